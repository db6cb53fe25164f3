"""Pretrains a causal Wan on clips of moving squares, then distils it to 4 steps a chunk.

    python assets/shapes-causal-video/pretrain.py --stage flow --out runs/shapes-video-flow
    python assets/shapes-causal-video/pretrain.py --stage distill --start runs/shapes-video-flow \
        --out runs/shapes-causal-video

Writes a folder that ``flowrl.pipelines.causal_wan.CausalWanPipeline.from_pretrained`` loads, metrics as JSON
lines beside it, and while it runs a training state; started again with the same ``--out`` it carries on.

flow: teacher forcing. All chunks of a clip are noised to one level and predicted in one packed forward, each
given the clean chunks before it (arXiv 2605.15190, eq. 5), x_sigma = (1 - sigma) x0 + sigma e, and the
network predicts e - x0. Some noise on the history keeps a chunk from trusting its predecessors' last digit.

distill: consistency distillation, arXiv 2303.01469, of the same packed forward: the endpoint
x_sigma - sigma v of the student is held equal to its own endpoint one Euler step of the frozen teacher
further down, by the pseudo-Huber distance of arXiv 2310.14189.

Captions are spoilt on purpose, so that there is something to learn by reinforcement: a share of the clips
goes in a random direction, a share ignores the prompt switch, a share moves at half the speed.

Shapes: B clips a step, F = 24 frames in T = 6 chunks, 16 x 16 pixels, no VAE. A chunk sees the first two
frames and the six before it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchLCMScheduler, WanTransformer3DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from flowrl.mdp.chunks import ChunkLayout, packed_forward
from flowrl.pipelines.causal_wan import CausalWanPipeline
from flowrl.shapes.motion import DIRECTIONS, SWITCH, draw_clip, split_prompts

MAX_TOKENS = 8
FRAMES = 24
LAYOUT = {"frames_per_chunk": 4, "window_frames": 12, "sink_frames": 2, "resident_frames": 24}
SHIFT = 3.0  # 4 steps at 1, .9, .75, .5
LEVELS = 24  # of the grid of the distillation, which holds those of 4 steps

logger = logging.getLogger("pretrain")


def build_pipeline() -> CausalWanPipeline:
    """The whole pipeline, untrained."""
    parts = sorted({part for record in split_prompts(False) for part in record["prompt"].split(SWITCH)})
    words = sorted({word for part in parts for word in part.split()})
    vocabulary = {token: index for index, token in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    text = UMT5Config(
        vocab_size=len(vocabulary),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    transformer = WanTransformer3DModel(
        patch_size=(2, 4, 4),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=3,
        out_channels=3,
        text_dim=64,
        freq_dim=64,
        ffn_dim=256,
        num_layers=4,
    )
    return CausalWanPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            eos_token="</s>",
            unk_token="<unk>",
            model_max_length=MAX_TOKENS,
        ),
        text_encoder=UMT5EncoderModel(text),
        scheduler=FlowMatchLCMScheduler(shift=SHIFT),
        transformer=transformer,
        **LAYOUT,
    )


def training_pool(args: argparse.Namespace) -> tuple[Tensor, Tensor, list[str]]:
    """Clips (N, 24, 16, 16, 3) uint8, the two parts of each caption (N, 2) as numbers, and all parts."""
    records = split_prompts(held_out=False)
    texts = sorted({part for record in records for part in record["prompt"].split(SWITCH)})
    cache = args.out / "pool.pt"
    if cache.exists():
        clips, parts = torch.load(cache, weights_only=True)
        return clips, parts, texts
    rng = np.random.default_rng(args.seed)
    clips, parts = [], []
    for _ in range(args.clips):
        record = records[rng.integers(len(records))]
        said = record["prompt"].split(SWITCH)
        parts.append([texts.index(said[0]), texts.index(said[-1])])
        clips.append(draw_clip(spoilt(record, args, rng), FRAMES, rng))
    pool = torch.from_numpy(np.stack(clips)), torch.tensor(parts)
    torch.save(pool, cache)
    return *pool, texts


def spoilt(record: dict[str, Any], args: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    """What the clip of a caption shows."""
    events = [dict(event) for event in record["events"]]
    for event in events:
        if rng.random() < args.wrong_direction:
            event["direction"] = list(DIRECTIONS)[rng.integers(len(DIRECTIONS))]
    if len(events) > 1 and rng.random() < args.ignored_switch:
        events[1] = events[0]
    if rng.random() < args.too_slow:
        events = [
            {**event, "speed": "slowly" if event["speed"] == "fast" else "very slowly"} for event in events
        ]
    return {**record, "events": events}


class Embedder:
    """Embeddings of all parts of captions, as the pipeline pads them."""

    def __init__(self, pipe: CausalWanPipeline, texts: list[str]) -> None:
        """Tokens once."""
        tokens = pipe.tokenizer(texts, padding="max_length", max_length=MAX_TOKENS, return_tensors="pt")
        self.ids, self.mask = tokens.input_ids, tokens.attention_mask

    def __call__(self, encoder: UMT5EncoderModel, parts: Tensor) -> list[Tensor]:
        """The text (B, L, D) of each of the T chunks, for parts (B, 2)."""
        every = encoder(self.ids, self.mask).last_hidden_state * self.mask[..., None]
        halves = FRAMES // LAYOUT["frames_per_chunk"] // 2
        return [every[parts[:, 0]]] * halves + [every[parts[:, 1]]] * halves


def train(pipe: CausalWanPipeline, args: argparse.Namespace, metrics: Any) -> CausalWanPipeline:
    """Trains the transformer, and the text encoder in the first stage; the result has averaged weights."""
    clips, parts, texts = training_pool(args)
    embed = Embedder(pipe, texts)
    distilling = args.stage == "distill"
    trained = {"transformer": pipe.transformer.train()}
    if not distilling:
        trained["text_encoder"] = pipe.text_encoder.train()
    averages = {name: copy.deepcopy(module).eval().requires_grad_(False) for name, module in trained.items()}
    teacher = copy.deepcopy(pipe.transformer).eval().requires_grad_(False) if distilling else None
    parameters = [p for module in trained.values() for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    state = args.out / "state.pt"
    first = load_state(state, trained, averages, optimizer)
    torch.manual_seed(args.seed + 1 + first)
    started, losses = time.monotonic(), []
    grid = torch.linspace(1, 0, LEVELS + 1)
    grid = SHIFT * grid / (1 + (SHIFT - 1) * grid)
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(step, args.steps, args.warmup)
        chosen = torch.randint(len(clips), (args.batch_size,))
        x0 = clips[chosen].float().div(127.5).sub(1).permute(0, 4, 1, 2, 3)
        history = x0 + args.history_noise * torch.rand(len(x0), 1, 1, 1, 1) * torch.randn_like(x0)
        history = pipe.layout.split(history)
        with torch.set_grad_enabled(not distilling):
            said = embed(pipe.text_encoder, parts[chosen])
        velocity = functools.partial(velocities, pipe.layout, history, said)
        noise = torch.randn_like(x0)
        if teacher is None:
            u = torch.rand(len(x0))
            sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
            wide = sigma.view(-1, 1, 1, 1, 1)
            found = velocity(pipe.transformer, (1 - wide) * x0 + wide * noise, sigma)
            loss = (found - (noise - x0)).square().mean()
        else:
            drawn = torch.randint(LEVELS, (len(x0),))
            sigma, below = grid[drawn], grid[drawn + 1]
            wide, narrow = sigma.view(-1, 1, 1, 1, 1), below.view(-1, 1, 1, 1, 1)
            noisy = (1 - wide) * x0 + wide * noise
            with torch.no_grad():
                target = noisy + (narrow - wide) * velocity(teacher, noisy, sigma)
                target = target - narrow * velocity(pipe.transformer, target, below)
            found = noisy - wide * velocity(pipe.transformer, noisy, sigma)
            distance = ((found - target).square().flatten(1).mean(1) + args.huber**2).sqrt() - args.huber
            loss = (distance / (sigma - below)).mean() / LEVELS
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
            record = {"stage": args.stage, "step": step + 1, "loss": round(float(np.mean(losses[-50:])), 5)}
            record["seconds"] = round(time.monotonic() - started)
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            logger.info(record)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save_state(state, step + 1, trained, averages, optimizer)
            result(pipe, averages).save_pretrained(args.out)
    return result(pipe, averages)


def velocities(
    layout: ChunkLayout,
    history: tuple[Tensor, ...],
    said: list[Tensor],
    network: Any,
    states: Tensor,
    sigma: Tensor,
) -> Tensor:
    """The network's prediction for all chunks of states at levels sigma (B,)."""
    return packed_forward(network, layout.split(states), history, 1000 * sigma, said, layout.window)


def result(pipe: CausalWanPipeline, averages: dict[str, Any]) -> CausalWanPipeline:
    """The pipeline with averaged weights."""
    return CausalWanPipeline(
        tokenizer=pipe.tokenizer,
        scheduler=pipe.scheduler,
        **{"text_encoder": pipe.text_encoder, "transformer": pipe.transformer, **averages},
        **LAYOUT,
    )


def learning_rate(step: int, steps: int, warmup: int) -> float:
    """Warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + float(np.cos(np.pi * (step - warmup) / max(1, steps - warmup))))


def save_state(
    path: Path, step: int, trained: dict[str, Any], averages: dict[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    """Everything that the next step needs, written beside the old state and put in its place."""
    content = {
        "step": step,
        "trained": {name: module.state_dict() for name, module in trained.items()},
        "averages": {name: module.state_dict() for name, module in averages.items()},
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_state(
    path: Path, trained: dict[str, Any], averages: dict[str, Any], optimizer: torch.optim.Optimizer
) -> int:
    """The step to carry on from."""
    if not path.exists():
        return 0
    content = torch.load(path, weights_only=True)
    for name, module in trained.items():
        module.load_state_dict(content["trained"][name])
        averages[name].load_state_dict(content["averages"][name])
    optimizer.load_state_dict(content["optimizer"])
    return int(content["step"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=["flow", "distill"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="the flow that is distilled")
    parser.add_argument("--clips", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--ema", type=float, default=0.998)
    parser.add_argument("--huber", type=float, default=0.01)
    parser.add_argument("--history-noise", type=float, default=0.1)
    parser.add_argument("--wrong-direction", type=float, default=0.3)
    parser.add_argument("--ignored-switch", type=float, default=0.3)
    parser.add_argument("--too-slow", type=float, default=0.4)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    if (args.stage == "distill") != (args.start is not None):
        parser.error("--start: the flow that is distilled, of --stage distill")
    pipe = build_pipeline() if args.start is None else CausalWanPipeline.from_pretrained(args.start)
    with (args.out / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        train(pipe, args, metrics).save_pretrained(args.out)


if __name__ == "__main__":
    main()
