"""Randomness without state: every draw is named, and its seed is a hash of its name.

Noise belongs to a sample, not to a process: it is drawn from (run seed, iteration, prompt id, member,
purpose, step). Results then do not depend on batch size or on the number of ranks, and a resumed run
needs no generator state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def derive_seed(*name: int | str) -> int:
    """A 63-bit seed from a name, e.g. ``derive_seed(run_seed, "noise", iteration, prompt, member)``."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in name)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*name: int | str) -> torch.Generator:
    """A CPU generator seeded by a name."""
    return torch.Generator().manual_seed(derive_seed(*name))


def standard_noise(seeds: Sequence[int], step: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal noise of one sampler step, row by row from each sample's own seed.

    Drawn on the CPU, so that a GPU run and a CPU run see the same noise.

    Args:
        seeds: one seed for each of the B rows.
        step: the sampler step.
        shape: shape of one row.
        device: where the noise is wanted.

    Returns:
        float32 (B, *shape).
    """
    rows = [torch.randn(tuple(shape), generator=generator(seed, "step", step)) for seed in seeds]
    return torch.stack(rows).to(device)
