"""What training costs beyond the bare network calls that it needs, as ratios measured in one run.

`run_bench` builds tiny random Stable Diffusion 3 pipelines, so it needs no weights. Times are process CPU
time on one thread, the two sides interleaved, so that a busy machine disturbs both alike. FLOPs are counted,
not timed.

Cost model, in forwards of one micro-batch (full fine-tuning): rollout T, and for each of K trained steps one
forward and one backward of twice its cost; with CFG a forward has 2B rows, and ``cfg_gradient: conditional``
leaves the unconditional half out of the backward.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flowrl.build import Run, build_run
from flowrl.config import RunConfig

STEPS = 10
TEXT_TOKENS = 77
# name: (layers, heads, latent side, rows of a micro-batch); about 50 and 15 ms a forward on one core
SIZES = {"50 ms": (3, 4, 36, 4), "15 ms": (2, 3, 28, 4)}


def run_bench(repeats: int, as_json: bool, console: Console) -> dict[str, Any]:
    """Measures everything and prints it.

    Returns:
        the figures: rho_cpu by size, FLOP ratios, memory and import figures.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures: dict[str, Any] = {"threads": 1, "repeats": repeats, "torch": torch.__version__}
        figures["rho_cpu"] = {name: _rho(name, repeats) for name in SIZES}
        figures["flops"] = _flops()
        figures["memory"] = _memory()
        figures["import_s"] = _imports()
    finally:
        torch.set_num_threads(threads)
    if as_json:
        console.print_json(json.dumps(figures))
    else:
        _print(figures, console)
    return figures


def make_run(
    size: str = "15 ms", kind: str = "full", cfg: bool = False, cfg_gradient: str = "both", kl: float = 0.0
) -> Run:
    """A run on a tiny random SD3: two micro-batches an iteration, 10 steps of which 9 are trained."""
    layers, heads, side, rows = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text("a red circle\na blue square\n", encoding="utf-8")
        config = RunConfig.model_validate(
            {
                "name": "bench",
                "model": {
                    "path": "bench",
                    "device": "cpu",
                    "adapter": {"kind": kind},
                    "call": {"height": side, "width": side, "max_sequence_length": 16},
                },
                "sampler": {
                    "num_steps": STEPS,
                    "guidance": {"guidance_scale": 4.5 if cfg else 1.0},
                    "cfg_gradient": cfg_gradient,
                },
                "data": {"train": str(prompts)},
                "rewards": [{"name": "jpeg_compressibility"}],
                "objective": {"kl_coef": kl},
                "training": {"prompts_per_iteration": 2, "group_size": rows, "micro_batch_size": rows},
            }
        )
        return build_run(config, pipe=tiny_sd3(layers, heads))


def tiny_sd3(layers: int, heads: int, head_dim: int = 32) -> Any:
    """A random SD3 pipeline whose text encoder is a table of random embeddings."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    width = heads * head_dim
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer = SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            num_layers=layers,
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            joint_attention_dim=width,
            caption_projection_dim=width,
            pooled_projection_dim=width,
            out_channels=4,
            pos_embed_max_size=32,
        )
        for parameter in transformer.parameters():
            if not bool(parameter.any()):  # zero-initialised gates would hide the work behind them
                nn.init.normal_(parameter, std=0.02)
        vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, shift_factor=0.0)
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )

    def encode_prompt(
        prompt: list[str],
        negative_prompt: list[str] | None = None,
        do_classifier_free_guidance: bool = True,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        positive = _embeddings(prompt, width)
        if not do_classifier_free_guidance:
            return positive[0], None, positive[1], None
        negative = _embeddings(negative_prompt or [""] * len(prompt), width)
        return positive[0], negative[0], positive[1], negative[1]

    pipe.__dict__["encode_prompt"] = encode_prompt
    return pipe


def _embeddings(prompts: list[str], width: int) -> tuple[Tensor, Tensor]:
    rows = [torch.Generator().manual_seed(sum(map(ord, text))) for text in prompts]
    tokens = torch.stack([torch.randn(TEXT_TOKENS, width, generator=row) for row in rows])
    return tokens, tokens.mean(dim=1)


def _rho(size: str, repeats: int) -> dict[str, float]:
    """CPU time of an iteration, decoding and reward apart, over that of its bare network calls."""
    run = make_run(size)
    trainer = run.trainer
    trainer.clock = time.process_time
    bare = _bare_calls(run)
    ratios, ours, theirs = [], [], []
    trainer.run_iteration()
    bare()
    for _ in range(repeats):
        seconds = trainer.run_iteration().seconds
        ours.append(seconds["total"] - seconds["decode"] - seconds["reward"])
        started = time.process_time()
        bare()
        theirs.append(time.process_time() - started)
        ratios.append(ours[-1] / theirs[-1])
    forwards = STEPS * 2 + 3 * 2 * len(trainer.plan(0).trained)
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "iteration_s": statistics.median(ours),
        "forward_ms": 1000 * statistics.median(theirs) / forwards,
    }


def _bare_calls(run: Run) -> Callable[[], None]:
    """The forwards and forward-backwards that an iteration cannot do without, alone."""
    network: Any = run.wrapper.networks["transformer"]
    trajectory = run.wrapper.rollout(run.trainer.sampler.requests(0)[0], run.trainer.plan(0))
    rows = len(trajectory.request)
    state = next(iter(trajectory.states.values()))
    tokens, pooled = _embeddings(list(trajectory.request.prompts), network.config.joint_attention_dim)
    inputs = {
        "hidden_states": state,
        "timestep": torch.full((rows,), 500.0),
        "encoder_hidden_states": tokens,
        "pooled_projections": pooled,
        "return_dict": False,
    }
    trained = len(trajectory.plan.trained)

    def calls() -> None:
        for _ in range(run.config.training.micro_batches):
            with torch.no_grad():
                for _ in range(STEPS):
                    network(**inputs)
            for _ in range(trained):
                network(**inputs)[0].sum().backward()
        network.zero_grad(set_to_none=True)

    return calls


def _flops() -> dict[str, Any]:
    """FLOPs of replay with either CFG gradient, and of a whole iteration against the cost model."""
    result: dict[str, Any] = {}
    for kind in ("lora", "full"):
        replay = {
            mode: _replay_flops(make_run(kind=kind, cfg=True, cfg_gradient=mode))
            for mode in ("both", "conditional")
        }
        result[f"replay_saved_{kind}"] = 1 - replay["conditional"] / replay["both"]
    for name, options in {
        "no_cfg": {},
        "cfg": {"cfg": True},
        "cfg_conditional": {"cfg": True, "cfg_gradient": "conditional"},
        "cfg_kl": {"cfg": True, "kl": 0.1},
    }.items():
        result[f"model_error_{name}"] = _model_error(make_run(**options))  # type: ignore[arg-type]
    return result


def _replay_flops(run: Run) -> int:
    trajectory = run.wrapper.rollout(run.trainer.sampler.requests(0)[0], run.trainer.plan(0))
    with FlopCounterMode(display=False) as counter:
        run.wrapper.replay(trajectory, 0).log_prob.sum().backward()
    return int(counter.get_total_flops())


def _model_error(run: Run) -> float:
    """Relative difference of an iteration's FLOPs, decoding apart, from the cost model's."""
    trainer, config = run.trainer, run.config
    trajectory = run.wrapper.rollout(trainer.sampler.requests(0)[0], trainer.plan(0))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run.wrapper.replay(trajectory, 0)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        run.wrapper.decode(trajectory)
    decode = counter.get_total_flops() * config.training.micro_batches
    with FlopCounterMode(display=False) as counter:
        trainer.run_iteration()
    measured = counter.get_total_flops() - decode
    trained = len(trainer.plan(0).trained)
    backward = 1.0 if config.sampler.cfg_gradient == "conditional" else 2.0
    reference = 1.0 if trainer.objective.needs_reference else 0.0
    per_micro_batch = STEPS + trained * (1.0 + backward + reference)
    predicted = forward * per_micro_batch * config.training.micro_batches
    return abs(measured - predicted) / predicted


def _memory() -> dict[str, Any]:
    """Copies of the model, stored latents and text-encoder calls under LoRA with a KL to the reference."""
    run = make_run(kind="lora", cfg=True, kl=0.1)
    network = run.wrapper.networks["transformer"]
    adapters = run.policy.num_trainable
    layers, heads, _, _ = SIZES["15 ms"]
    base = sum(p.numel() for p in tiny_sd3(layers, heads).transformer.parameters())
    run.trainer.run_iteration()
    calls = run.wrapper.encoder_calls
    result = run.trainer.run_iteration()
    return {
        "model_copies": (sum(p.numel() for p in network.parameters()) - adapters) / base,
        "stored_latents_per_sample": result.metrics["count/stored_latents"],
        "trained_steps": len(run.trainer.plan(0).trained),
        "encoder_calls_after_cache": run.wrapper.encoder_calls - calls,
    }


def _imports() -> dict[str, float]:
    """Seconds that importing flowrl adds to importing torch, in fresh processes."""

    def seconds(code: str) -> float:
        probe = f"import time, torch; t = time.process_time(); {code}; print(time.process_time() - t)"
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        return float(done.stdout)

    return {"flowrl": seconds("import flowrl"), "flowrl.cli": seconds("import flowrl.cli")}


def _print(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="flowrl bench: ratios of one run, one thread", title_justify="left")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("bar", justify="right")
    for name, bar in (("50 ms", 1.06), ("15 ms", 1.15)):
        rho = figures["rho_cpu"][name]
        label = f"rho_cpu, {rho['forward_ms']:.0f} ms a forward"
        table.add_row(label, f"{rho['median']:.3f} ({rho['min']:.3f} to {rho['max']:.3f})", f"<= {bar}")
    flops = figures["flops"]
    table.add_row("replay FLOPs saved, LoRA", f"{flops['replay_saved_lora']:.1%}", ">= 25%")
    table.add_row("replay FLOPs saved, full", f"{flops['replay_saved_full']:.1%}", ">= 33%")
    for name, value in flops.items():
        if name.startswith("model_error"):
            table.add_row(f"FLOPs off the cost model, {name[12:]}", f"{value:.2%}", "<= 2%")
    memory = figures["memory"]
    table.add_row("copies of the model under LoRA", f"{memory['model_copies']:.3f}", "1")
    stored = f"{memory['stored_latents_per_sample']:.0f}"
    table.add_row("stored latents a sample", stored, f"<= {memory['trained_steps'] + 1}")
    table.add_row("encoder calls after the cache", str(memory["encoder_calls_after_cache"]), "0")
    for name, value in figures["import_s"].items():
        table.add_row(f"import {name} beyond torch, CPU s", f"{value:.2f}", "<= 0.5")
    console.print(table)
