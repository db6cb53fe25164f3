"""A tokenizer of shapes scenes: 64 x 64 pixels to 8 x 8 tokens out of 256, and its training.

    python assets/shapes-dfm/vq.py --out runs/shapes-dfm

Writes ``<out>/vae``, which ``diffusers.VQModel.from_pretrained`` loads, and metrics as JSON lines.

Source: VQ-VAE, arXiv 1711.00937, with the codebook as a moving average (its appendix A.1), unused codes put
on badly served cells as in arXiv 2005.00341 (section 3.1), and no adversarial phase: flat shapes need none.
Differs: the first steps train a plain autoencoder under noise, whose latents are clustered for a codebook.

Shapes: B images, C latent channels, H and W image sides, h = H / 8 and w = W / 8 latent sides, N cells,
K codes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import VQModel

from flowrl.rewards.scene import mean_by_tag, scene_scores
from flowrl.shapes.domain import BACKGROUND, sample_scene
from flowrl.shapes.prompts import TAGS, split_prompts
from flowrl.shapes.render import render

SIZE = 64
CELL = 8  # pixels on a side of what one token stands for
NUM_CODES = 256
CODE_CHANNELS = 8
NOISE = 0.5  # largest noise on the latents of the plain autoencoder, whose spread is one
PLAIN_SHARE = 0.3  # of the steps: those before quantisation
CALM_SHARE = 0.75  # of the steps: those after it leave unused codes where they are
DECAY = 0.98  # of the codebook's moving averages

logger = logging.getLogger("vq")
Log = Callable[[dict[str, Any]], None]


def draw_scenes(
    records: list[dict[str, Any]], num_scenes: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a balanced pool: the tasks in turn, a prompt of each by lot, then a scene for it.

    Args:
        records: prompts with metadata.
        num_scenes: size of the pool.
        rng: the source of all randomness.

    Returns:
        uint8 images (num_scenes, 3, H, W) and the index into ``records`` of each (num_scenes,).
    """
    by_tag = [[i for i, record in enumerate(records) if record["tag"] == tag] for tag in TAGS]
    prompts = np.array([rng.choice(by_tag[n % len(TAGS)]) for n in range(num_scenes)])
    images = torch.empty(num_scenes, 3, SIZE, SIZE, dtype=torch.uint8)
    for n, prompt in enumerate(prompts):
        images[n] = torch.tensor(render(sample_scene(records[prompt], rng), SIZE)).permute(2, 0, 1)
    return images, torch.from_numpy(prompts)


def build_vq() -> VQModel:
    """The untrained tokenizer: f = 8, thin at full size, without attention."""
    widths = (8, 16, 32, 64)
    return VQModel(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        layers_per_block=1,
        latent_channels=CODE_CHANNELS,
        sample_size=SIZE,
        num_vq_embeddings=NUM_CODES,
        norm_num_groups=4,
        vq_embed_dim=CODE_CHANNELS,
        scaling_factor=1.0,
        mid_block_add_attention=False,
    )


def to_model_range(images: torch.Tensor) -> torch.Tensor:
    """Maps images, uint8 or float in [0, 1], to floats in [-1, 1]."""
    unit = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    return (2 * unit - 1).contiguous(memory_format=torch.channels_last)


def encode_cells(vq: VQModel, pixels: torch.Tensor) -> torch.Tensor:
    """Latents (N, C) of the cells of images (B, 3, H, W) in [-1, 1], each encoded by itself.

    So equal cells are equal tokens, whatever lies around them: an encoder of whole images says the same thing
    in many ways (empty cells had 214 of 256 tokens), which whoever has to predict tokens cannot know.
    """
    channels = pixels.shape[1]
    cells = pixels.unfold(2, CELL, CELL).unfold(3, CELL, CELL).permute(0, 2, 3, 1, 4, 5)
    cells = cells.reshape(-1, channels, CELL, CELL).contiguous(memory_format=torch.channels_last)
    return vq.encode(cells).latents.flatten(1)


@torch.no_grad()
def encode_tokens(vq: VQModel, images: torch.Tensor, batch_size: int = 128) -> torch.Tensor:
    """Tokens int64 (B, h * w), row by row, of images (B, 3, H, W), uint8 or float in [0, 1]."""
    tokens = []
    for part in images.split(batch_size):
        cells = encode_cells(vq, to_model_range(part.to(vq.device)))
        tokens.append(_nearest(cells, vq.quantize.embedding.weight).view(len(part), -1))
    return torch.cat(tokens)


@torch.no_grad()
def decode_tokens(vq: VQModel, tokens: torch.Tensor, batch_size: int = 128) -> torch.Tensor:
    """Images in [0, 1] (B, 3, H, W) of tokens (B, h * w) of square images."""
    images = []
    for part in tokens.split(batch_size):
        side = math.isqrt(part.shape[1])
        latents = vq.quantize.embedding(part).view(len(part), side, side, -1).permute(0, 3, 1, 2)
        images.append((_decode(vq, latents) / 2 + 0.5).clamp(0, 1))
    return torch.cat(images)


def train_vq(
    images: torch.Tensor,
    steps: int,
    batch_size: int,
    lr: float,
    log: Log,
    checkpoint: Path | None = None,
) -> VQModel:
    """Trains a tokenizer: first without quantisation but under noise, then with a codebook.

    The noise makes that far apart in the latents which is far apart in the image, so that clusters are
    of use. The decoder sees whole images: it mends from the neighbours what a token of a cell leaves open.

    Args:
        images: uint8 pool (B, 3, H, W).
        steps: optimiser steps of both parts.
        batch_size: images per step.
        lr: peak learning rate, reached after 100 steps, then cosine to 2 %.
        log: receives a record of metrics every 50 steps.
        checkpoint: folder the model is saved to every 500 steps.
    """
    vq = build_vq().to(memory_format=torch.channels_last)
    vq.quantize.embedding.requires_grad_(False)
    parameters = [p for p in vq.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    plain_steps = int(PLAIN_SHARE * steps)
    codebook: Codebook | None = None
    start = time.monotonic()
    for step in range(steps):
        if step == plain_steps:
            codebook = Codebook(vq, *_sample_cells(vq, images[torch.randperm(len(images))[:2048]]))
        chosen = images[torch.randint(len(images), (batch_size,))]
        target = to_model_range(chosen)
        cells = encode_cells(vq, target)
        latents = _grid(cells, batch_size)
        if codebook is None:
            noisy = latents + NOISE * torch.rand(batch_size, 1, 1, 1) * torch.randn_like(latents)
            standard = cells.mean(0).square().mean() + (cells.std(0) - 1).square().mean()
            regular = 0.02 * standard
        else:
            quantised = codebook.quantise(cells)
            codebook.update(cells.detach(), revive=step % 20 == 0 and step < CALM_SHARE * steps)
            regular = 0.25 * F.mse_loss(cells, quantised)
            noisy = latents + (_grid(quantised, batch_size) - latents).detach()
        output = _decode(vq, noisy)
        error = output - target
        recon = (edge_weights(chosen) * (error.abs() + error.square())).mean()
        optimizer.zero_grad()
        (recon + regular).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            record = {"stage": "plain" if codebook is None else "vq", "step": step}
            record |= {"recon": recon.item(), "l1": error.abs().mean().item(), "regular": regular.item()}
            record |= {"grad_norm": norm.item(), "spread": cells.std().item()}
            record |= {} if codebook is None else codebook.figures()
            log(record | {"seconds": time.monotonic() - start})
        if checkpoint and step % 500 == 499:
            vq.save_pretrained(checkpoint)
    vq.quantize.embedding.requires_grad_(True)
    return vq.eval()


class Codebook:
    """The codebook of a model in training: the moving averages of the cells that each code stands for."""

    def __init__(self, vq: VQModel, cells: torch.Tensor, empty: torch.Tensor) -> None:
        """Starts from clusters of cells (N, C); the first code is the mean of those that are empty (N,)."""
        self.codes = vq.quantize.embedding.weight.data
        filled = cells[~empty]
        self.codes.copy_(
            torch.cat([cells[empty].mean(0, keepdim=True), cluster(filled, len(self.codes) - 1)])
        )
        self.counts = torch.ones(len(self.codes))
        self.sums = self.codes.clone()
        self.tokens = torch.zeros(0, dtype=torch.long)

    def quantise(self, cells: torch.Tensor) -> torch.Tensor:
        """The nearest codes (N, C) of cells (N, C), without gradient."""
        self.tokens = _nearest(cells.detach(), self.codes)
        return self.codes[self.tokens]

    def update(self, cells: torch.Tensor, revive: bool) -> None:
        """Moves the codes towards the cells just quantised, and unused ones onto badly served cells."""
        counts, sums = torch.zeros_like(self.counts), torch.zeros_like(self.sums)
        counts.index_add_(0, self.tokens, torch.ones(len(cells)))
        sums.index_add_(0, self.tokens, cells)
        self.counts.lerp_(counts, 1 - DECAY)
        self.sums.lerp_(sums, 1 - DECAY)
        if revive:
            unused = (self.counts < 0.05).nonzero().squeeze(1)
            distances = (cells - self.codes[self.tokens]).square().sum(1)
            places = cells[torch.multinomial(distances + 1e-9, len(unused))] if len(unused) else cells[:0]
            self.counts[unused] = 0.5
            self.sums[unused] = 0.5 * places
        self.codes.copy_(self.sums / self.counts.clamp(min=1e-5).unsqueeze(1))

    def figures(self) -> dict[str, float]:
        """How many codes are in use, and the perplexity of their use."""
        return {"used": int((self.counts >= 0.05).sum()), "perplexity": perplexity(self.counts)}


def cluster(points: torch.Tensor, num: int, rounds: int = 15) -> torch.Tensor:
    """Centres (num, C) of points (N, C) by k-means, begun with k-means++."""
    centres = points[torch.randint(len(points), (1,))]
    distances = torch.full((len(points),), torch.inf)
    for _ in range(num - 1):
        distances = torch.minimum(distances, (points - centres[-1]).square().sum(1))
        centres = torch.cat([centres, points[torch.multinomial(distances + 1e-12, 1)]])
    for _ in range(rounds):
        nearest = _nearest(points, centres)
        counts = torch.bincount(nearest, minlength=num).unsqueeze(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


def foreground(images: torch.Tensor) -> torch.Tensor:
    """How far each pixel of uint8 images is from the background, in [0, 1] (B, 1, H, W)."""
    plain = torch.tensor(BACKGROUND).view(1, 3, 1, 1)
    return ((images.float() - plain).abs().amax(1, keepdim=True) / 100).clamp(max=1)


def empty_cells(images: torch.Tensor) -> torch.Tensor:
    """Which cells (N,) of uint8 images are background."""
    return (F.max_pool2d(foreground(images), CELL) == 0).flatten()


def edge_weights(images: torch.Tensor) -> torch.Tensor:
    """Weights of the pixels in the loss (B, 1, H, W): 1, twice that in objects, six times at outlines."""
    inside = foreground(images)
    contrast = F.max_pool2d(inside, 3, 1, 1) + F.max_pool2d(-inside, 3, 1, 1)
    return 1 + torch.maximum(inside, 5 * contrast)


def warmup_cosine(step: int, num_steps: int, warmup: int = 100, floor: float = 0.02) -> float:
    """Learning rate factor: linear from 0 to 1, then a cosine to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def perplexity(counts: torch.Tensor) -> float:
    """Exp of the entropy of a histogram: how many codes in equal use would be as varied."""
    shares = counts / counts.sum()
    return float(torch.exp(-(shares * shares.clamp(min=1e-12).log()).sum()))


def round_trip(vq: VQModel, num_scenes: int, seed: int) -> dict[str, float]:
    """The verifier's scores of scenes of held-out prompts, encoded and decoded, and the use of the codes."""
    records = split_prompts(held_out=True)
    images, chosen = draw_scenes(records, num_scenes, np.random.default_rng(seed))
    tokens = encode_tokens(vq, images)
    metadata = [records[i] for i in chosen]
    scores = scene_scores(decode_tokens(vq, tokens), metadata)
    counts = torch.bincount(tokens.flatten(), minlength=NUM_CODES).float()
    figures = {f"exact_{tag}": score for tag, score in mean_by_tag(scores["exact"], metadata).items()}
    figures["soft"] = float(scores["soft"].mean())
    figures |= {"used": int((counts > 0).sum()), "perplexity": perplexity(counts)}
    return figures | {"commonest": float(counts.max() / counts.sum())}


def _grid(cells: torch.Tensor, batch_size: int) -> torch.Tensor:
    side = math.isqrt(len(cells) // batch_size)
    return cells.view(batch_size, side, side, -1).permute(0, 3, 1, 2)


def _nearest(cells: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return torch.cdist(cells, codes).argmin(1)


def _decode(vq: VQModel, latents: torch.Tensor) -> torch.Tensor:
    """The decoder on its own: the model's ``decode`` would quantise or look up tokens."""
    return vq.decoder(vq.post_quant_conv(latents))


@torch.no_grad()
def _sample_cells(vq: VQModel, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cells = torch.cat([encode_cells(vq, to_model_range(part)) for part in images.split(128)])
    return cells, empty_cells(images)


def parse_args() -> argparse.Namespace:
    """The command line; the defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--scenes", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Trains a tokenizer, unless the folder has one, and scores it."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out / "vae"

    def log(record: dict[str, Any]) -> None:
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()})
        with (args.out / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
            metrics.write(line + "\n")
        logger.info(line)

    if not (folder / "config.json").exists():
        torch.manual_seed(args.seed)
        records = split_prompts(held_out=False)
        images, _ = draw_scenes(records, args.scenes, np.random.default_rng(args.seed))
        vq = train_vq(images, args.steps, args.batch_size, args.lr, log, checkpoint=args.out / "partial")
        vq.register_to_config(_name_or_path="")  # else the saved config may name a folder of this machine
        vq.save_pretrained(folder)
    vq = VQModel.from_pretrained(folder)
    log({"stage": "round trip", **round_trip(vq, 600, args.seed + 1000)})


if __name__ == "__main__":
    main()
