"""The image side of the shapes model: a pool of rendered scenes and a tiny deep-compression autoencoder.

Source: arXiv 2410.10733 (DC-AE), without its adversarial phase: flat shapes need none.

Shapes: B images, C latent channels, H and W image sides, h = H / 8 and w = W / 8 latent sides.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC

from flowrl.shapes.domain import sample_scene
from flowrl.shapes.prompts import TAGS
from flowrl.shapes.render import render

SIZE = 64
LATENT_CHANNELS = 8
NOISE = 0.3  # largest noise on the latents, relative to their standard deviation

logger = logging.getLogger("pretrain")


def draw_scenes(
    records: list[dict[str, Any]], num_scenes: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a balanced pool: a task uniformly, then one of its prompts, then a scene for it.

    Args:
        records: prompts with metadata.
        num_scenes: size of the pool.
        rng: the source of all randomness.

    Returns:
        uint8 images (num_scenes, 3, H, W) and the index into ``records`` of each (num_scenes,).
    """
    by_tag = [[i for i, record in enumerate(records) if record["tag"] == tag] for tag in TAGS]
    prompts = np.array(
        [rng.choice(by_tag[n % len(TAGS)]) for n in range(num_scenes)],
    )
    images = torch.empty(num_scenes, 3, SIZE, SIZE, dtype=torch.uint8)
    for n, prompt in enumerate(prompts):
        scene = sample_scene(records[prompt], rng)
        images[n] = torch.tensor(render(scene, SIZE)).permute(2, 0, 1)
    return images, torch.from_numpy(prompts)


def to_model_range(images: torch.Tensor) -> torch.Tensor:
    """Maps uint8 images to floats in [-1, 1]."""
    return (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def build_autoencoder() -> AutoencoderDC:
    """The untrained autoencoder: f = 8, all residual blocks at a half of the image side and below."""
    return AutoencoderDC(
        latent_channels=LATENT_CHANNELS,
        encoder_block_out_channels=(16, 32, 64, 64),
        decoder_block_out_channels=(16, 32, 64, 64),
        encoder_layers_per_block=(0, 1, 1, 1),
        decoder_layers_per_block=(0, 1, 2, 2),
        encoder_qkv_multiscales=((), (), (), ()),
        decoder_qkv_multiscales=((), (), (), ()),
    )


def train_autoencoder(
    images: torch.Tensor,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    log: Callable[[dict[str, Any]], None],
) -> AutoencoderDC:
    """Trains with L1 + L2 on latents under noise, and sets ``scaling_factor`` for unit latents.

    The noise makes the decoder forgive the flow's small errors. It is relative to the latents' own
    spread, so that the encoder cannot escape it by scaling up; a weak penalty holds each channel
    near zero mean and unit variance, since the pipeline has one scale for all of them.

    Args:
        images: uint8 pool (N, 3, H, W).
        num_steps: optimiser steps.
        batch_size: images per step.
        learning_rate: peak, reached after 100 steps, then cosine to 2 %.
        log: receives a record of metrics every 50 steps.
    """
    model = build_autoencoder().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, num_steps, warmup=100, floor=0.02)
    )
    start = time.monotonic()
    for step, chosen in enumerate(minibatches(len(images), batch_size, num_steps)):
        target = to_model_range(images[chosen])
        latents = model.encode(target).latent
        spread = latents.std(dim=(0, 2, 3))
        level = torch.rand(len(latents), 1, 1, 1) * NOISE
        noisy = latents + level * spread.detach().view(1, -1, 1, 1) * torch.randn_like(latents)
        output = model.decode(noisy).sample
        l1, l2 = F.l1_loss(output, target), F.mse_loss(output, target)
        standard = latents.mean(dim=(0, 2, 3)).square().mean() + (spread - 1).square().mean()
        loss = l1 + l2 + 0.01 * standard
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == num_steps - 1:
            log(
                {
                    "stage": "autoencoder",
                    "step": step,
                    "l1": l1.item(),
                    "l2": l2.item(),
                    "standard": standard.item(),
                    "seconds": time.monotonic() - start,
                }
            )
    model.eval()
    latents = encode(model, images[:2048])
    model.register_to_config(scaling_factor=1 / latents.std().item())
    return model


@torch.no_grad()
def encode(model: AutoencoderDC, images: torch.Tensor, batch_size: int = 256) -> torch.Tensor:
    """Encodes uint8 images (N, 3, H, W) to unscaled latents (N, C, h, w)."""
    return torch.cat([model.encode(to_model_range(batch)).latent for batch in images.split(batch_size)])


def minibatches(num_items: int, batch_size: int, num_batches: int) -> Iterator[torch.Tensor]:
    """Index batches from one random permutation after the other."""
    order = torch.randperm(num_items)
    position = 0
    for _ in range(num_batches):
        if position + batch_size > num_items:
            order, position = torch.randperm(num_items), 0
        yield order[position : position + batch_size]
        position += batch_size


def warmup_cosine(step: int, num_steps: int, warmup: int, floor: float) -> float:
    """Learning rate factor: linear from 0 to 1, then a cosine to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
