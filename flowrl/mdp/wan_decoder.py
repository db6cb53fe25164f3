"""Pixels of Wan latents, of a whole clip or chunk by chunk as they are made.

Without a VAE the latents are pixels. Shapes: B rows, C channels, F latent frames, h and w latent sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Pixels (B, 3, F', H, W) in [-1, 1] of latents (B, C, F, h, w)."""
    pixels: Tensor = latents if vae is None else vae.decode(_unscaled(vae, latents), return_dict=False)[0]
    return pixels.float().clamp(-1, 1)


def decode_stream(vae: Any, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The pixels of each chunk; an ``AutoencoderKLWan`` remembers what its causal convolutions saw before.

    Together the chunks give what `decode` gives for all of them at once.
    """
    memory: list[Any] | None = None
    for chunk in chunks:
        if vae is None:
            yield decode(None, chunk)
            continue
        first = memory is None
        if memory is None:
            vae.clear_cache()
            memory = vae._feat_map
        frames = []
        for latent in vae.post_quant_conv(_unscaled(vae, chunk)).split(1, dim=2):
            frames.append(vae.decoder(latent, feat_cache=memory, feat_idx=[0], first_chunk=first))
            first = False
        yield torch.cat(frames, dim=2).float().clamp(-1, 1)


def _unscaled(vae: Any, latents: Tensor) -> Tensor:
    shape = (1, -1, 1, 1, 1)
    mean, std = (torch.tensor(v).view(shape) for v in (vae.config.latents_mean, vae.config.latents_std))
    latents = latents.to(vae.device, vae.dtype)
    return latents * std.to(latents) + mean.to(latents)
