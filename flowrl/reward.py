"""What a reward is, and a weighted set of rewards.

A reward is a callable ``reward(samples, prompts, metadata) -> float32 tensor (B,)``, higher is better.
A set of rewards is never mixed here: every component keeps its own column, and the advantage decides
the order of normalising and summing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flowrl.errors import UserError


@dataclass(frozen=True)
class Samples:
    """Decoded samples of one micro-batch.

    Attributes:
        images: float32 in [0, 1], on the CPU: images (B, 3, H, W) or video (B, F, 3, H, W); where texts
            were sampled, the pictures that they are about.
        fps: frames per second for video; None for images.
        texts: (B,) the texts, where those were sampled.
    """

    images: Tensor
    fps: float | None = None
    texts: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """The number of samples B."""
        return self.images.shape[0]


class Reward(Protocol):
    """The contract of a reward (register one with ``@register("reward", name)``).

    Higher is better. Scores must not depend on what else is in the batch. A sample that cannot be
    scored gets NaN, which masks that sample; it never gets a silent zero.
    """

    def __call__(
        self, samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        """Scores (B,), float32."""
        ...


@dataclass(frozen=True)
class WeightedReward:
    """One column of a reward set: its column name, the reward, and its weight in the sum."""

    name: str
    reward: Reward
    weight: float


class RewardSet:
    """Several rewards scored side by side; `score` gives one column for each, unscaled."""

    def __init__(self, members: Sequence[WeightedReward]) -> None:
        """Raises UserError for an empty set, repeated names or weights that are all zero."""
        if not members:
            raise UserError("rewards: at least one reward is needed")
        self.names = tuple(member.name for member in members)
        if len(set(self.names)) != len(self.names):
            raise UserError(f"rewards: names must differ, got {', '.join(self.names)}")
        self.weights = torch.tensor([member.weight for member in members], dtype=torch.float32)
        if not bool((self.weights != 0).any()):
            raise UserError("rewards: every weight is 0, nothing would be learnt")
        self.members = tuple(members)

    def score(self, samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """Raw scores of every reward.

        Returns:
            float32 (B, R); NaN where a sample could not be scored.

        Raises:
            UserError: if a reward returns the wrong shape, or pixels lie outside [0, 1].
            FloatingPointError: if pixels are not finite.
        """
        low, high = (float(bound) for bound in samples.images.aminmax())  # both NaN if any pixel is
        if not (math.isfinite(low) and math.isfinite(high)):
            raise FloatingPointError("decoded pixels hold NaN or infinity (is the VAE in its own dtype?)")
        if low < 0 or high > 1:
            raise UserError(
                f"decoded pixels lie in [{low:g}, {high:g}], not in [0, 1]: "
                "the pipeline must return finished images for output_type 'pt'"
            )
        columns = []
        for member in self.members:
            column = member.reward(samples, prompts, metadata)
            if not isinstance(column, Tensor):
                raise UserError(
                    f"reward {member.name!r} returned a {type(column).__name__}, expected a tensor"
                )
            if tuple(column.shape) != (len(samples),):
                raise UserError(
                    f"reward {member.name!r} returned shape {tuple(column.shape)}, expected ({len(samples)},)"
                )
            columns.append(column.detach().to("cpu", torch.float32))
        return torch.stack(columns, dim=1)
