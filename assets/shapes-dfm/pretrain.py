"""Pretrains a discrete flow over the tokens of shapes scenes, on a masked or a metric path.

    python assets/shapes-dfm/vq.py --out runs/shapes-vq
    python assets/shapes-dfm/pretrain.py --path mask --vq runs/shapes-vq/vae --out runs/shapes-dfm/masked
    python assets/shapes-dfm/pretrain.py --path metric --vq runs/shapes-vq/vae --out runs/shapes-dfm/metric \
        --start runs/shapes-dfm/masked

Writes a folder that ``flowrl.pipelines.discrete_flow.DiscreteFlowPipeline.from_pretrained`` loads, metrics as
JSON lines beside it, and while it runs a training state; started again with the same ``--out`` it carries on.
The text encoder begins as that of assets/shapes-flow and is trained along.

Loss: cross-entropy of the clean tokens at positions that are not known (flowrl/mdp/token_losses.py), times
uniform. Shapes: B scenes a step, L = 64 tokens, V = 256 codes.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import VQModel
from transformers import AutoTokenizer, Gemma2Model
from vq import draw_scenes, encode_tokens

from flowrl.mdp.token_losses import cross_entropy
from flowrl.pipelines.discrete_flow import DiscreteFlowPipeline
from flowrl.pipelines.token_scheduler import DiscreteFlowScheduler
from flowrl.pipelines.token_transformer import TokenTransformer
from flowrl.shapes.prompts import split_prompts

MAX_TOKENS = 16
TEXT = Path(__file__).parent.parent / "shapes-flow"

logger = logging.getLogger("pretrain")


def build_pipeline(args: argparse.Namespace) -> DiscreteFlowPipeline:
    """The pipeline before training: new, or from the weights of another one (``--start``)."""
    vq = VQModel.from_pretrained(args.vq)
    vq.register_to_config(_name_or_path="")  # else the saved config names a folder of this machine
    codes = vq.config.num_vq_embeddings
    source = args.start or TEXT
    text_encoder = Gemma2Model.from_pretrained(source / "text_encoder")
    states = codes + (args.path == "mask")
    transformer = TokenTransformer(
        num_tokens=codes,
        num_states=states,
        width=args.width,
        num_layers=args.layers,
        text_width=text_encoder.config.hidden_size,
    )
    if args.start is not None:
        weights = TokenTransformer.from_pretrained(args.start / "transformer").state_dict()
        weights["tokens.weight"] = weights["tokens.weight"][:states]
        transformer.load_state_dict(weights)
    text_encoder.config._name_or_path = ""
    return DiscreteFlowPipeline(
        tokenizer=AutoTokenizer.from_pretrained(TEXT / "tokenizer"),
        text_encoder=text_encoder,
        transformer=transformer,
        vae=vq,
        scheduler=DiscreteFlowScheduler(
            num_tokens=codes,
            path=args.path,
            metric_scale=args.metric_scale,
            metric_exponent=args.metric_exponent,
            metric_power=args.metric_power,
            metric_normalized=False,
        ),
    )


def training_pool(
    vq: VQModel, records: list[dict[str, Any]], num_scenes: int, seed: int, cache: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (N, L) of rendered scenes and the prompt index of each (N,); kept in ``cache``."""
    if cache.exists():
        return tuple(torch.load(cache, weights_only=True))
    rng = np.random.default_rng(seed)
    tokens, prompts = [], []
    for first in range(0, num_scenes, 5000):  # in parts, to keep the images out of memory
        images, chosen = draw_scenes(records, min(5000, num_scenes - first), rng)
        tokens.append(encode_tokens(vq, images))
        prompts.append(chosen)
    pool = torch.cat(tokens), torch.cat(prompts)
    torch.save(pool, cache)
    return pool


def train(
    pipe: DiscreteFlowPipeline,
    pool: tuple[torch.Tensor, torch.Tensor],
    prompts: list[str],
    args: argparse.Namespace,
    metrics: Any,
) -> DiscreteFlowPipeline:
    """Trains text encoder and transformer; returns the pipeline with the averaged weights."""
    tokens, prompt_ids = pool
    path = pipe.scheduler.path
    trained = {"transformer": pipe.transformer.train(), "text_encoder": pipe.text_encoder.train()}
    averages = {name: copy.deepcopy(module).eval().requires_grad_(False) for name, module in trained.items()}
    text = pipe.tokenizer([*prompts, ""], padding="max_length", max_length=MAX_TOKENS, return_tensors="pt")
    longest = int(text.attention_mask.sum(1).max())  # columns of padding change nothing
    ids, masks = text.input_ids[:, :longest], text.attention_mask[:, :longest]
    parameters = [p for module in trained.values() for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    state_file = args.out / "state.pt"
    first = load_state(state_file, trained, averages, optimizer)
    torch.manual_seed(args.seed + 1 + first)
    started, losses = time.monotonic(), []
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(step, args.steps, args.warmup)
        chosen = torch.randint(len(tokens), (args.batch_size,))
        x1 = tokens[chosen]
        wrong = args.caption_noise if step >= args.steps - args.noisy_steps else 0.0
        caption = spoil(prompt_ids[chosen], len(prompts), wrong, args.caption_dropout)
        t = torch.rand(args.batch_size)
        x = path.noised(x1, t)
        states = trained["text_encoder"](ids[caption], attention_mask=masks[caption])[0]
        logits = trained["transformer"](
            hidden_states=x,
            encoder_hidden_states=states,
            timestep=t,
            encoder_attention_mask=masks[caption],
        )[0]
        loss = cross_entropy(path.log_posterior(logits, x), x1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(args.ema, (1 + step) / (10 + step))
        for name, module in trained.items():
            torch._foreach_lerp_(
                list(averages[name].parameters()), [p.detach() for p in module.parameters()], 1 - decay
            )
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            record = {"stage": args.path, "step": step + 1, "loss": round(float(np.mean(losses[-50:])), 4)}
            record["seconds"] = round(time.monotonic() - started)
            metrics.write(json.dumps(record) + "\n")
            logger.info(record)
        if (step + 1) % args.save_every == 0:
            state = {name: module.state_dict() for name, module in trained.items()}
            state |= {f"average_{name}": module.state_dict() for name, module in averages.items()}
            torch.save({"step": step + 1, "optimizer": optimizer.state_dict(), **state}, state_file)
    return DiscreteFlowPipeline(tokenizer=pipe.tokenizer, vae=pipe.vae, scheduler=pipe.scheduler, **averages)


def spoil(caption: torch.Tensor, num_prompts: int, noise: float, dropout: float) -> torch.Tensor:
    """Prompt indices (B,), a share ``noise`` of which is of any prompt, then ``dropout`` of the empty one.

    Wrong captions make a model that can do more than it shows (assets/README.md, shapes-flow).
    """
    wrong = torch.rand(len(caption)) < noise
    caption = torch.where(wrong, torch.randint(num_prompts, caption.shape), caption)
    return caption.masked_fill(torch.rand(len(caption)) < dropout, num_prompts)


def learning_rate(step: int, num_steps: int, warmup: int) -> float:
    """A factor: linear to 1, flat, and over the last third linear to 0.05."""
    start = num_steps * 2 // 3
    return min((step + 1) / warmup, 1 - 0.95 * max(0.0, (step - start) / max(1, num_steps - start)))


def load_state(file: Path, trained: dict[str, Any], averages: dict[str, Any], optimizer: Any) -> int:
    """Restores an interrupted run and returns its step, or 0 if there is none."""
    if not file.exists():
        return 0
    state = torch.load(file, weights_only=True)
    for name, module in trained.items():
        module.load_state_dict(state[name])
        averages[name].load_state_dict(state[f"average_{name}"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def parse_args() -> argparse.Namespace:
    """The command line; the defaults are those of the shipped models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--vq", type=Path, required=True, help="folder of the VQ model")
    parser.add_argument("--path", choices=("mask", "uniform", "metric"), default="mask")
    parser.add_argument("--start", type=Path, help="a pipeline whose weights are the beginning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=112)
    parser.add_argument("--scenes", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--metric-scale", type=float, default=3.0)
    parser.add_argument("--metric-exponent", type=float, default=0.9)
    parser.add_argument("--metric-power", type=float, default=1.0)
    parser.add_argument("--caption-noise", type=float, default=0.25, help="share of wrong captions")
    parser.add_argument("--noisy-steps", type=int, default=400, help="the last steps, which have them")
    parser.add_argument("--caption-dropout", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=250)
    return parser.parse_args()


def main() -> None:
    """Makes the pool of tokens, trains, saves."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    pipe = build_pipeline(args)
    records = split_prompts(held_out=False)
    pool = training_pool(pipe.vae, records, args.scenes, args.seed + 1, args.vq.parent / "pool.pt")
    with (args.out / "metrics.jsonl").open("a", encoding="utf-8", buffering=1) as metrics:
        trained = train(pipe, pool, [r["prompt"] for r in records], args, metrics)
    trained.save_pretrained(args.out)
    (args.out / "state.pt").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
