"""What an advantage estimator is given and what it returns; the estimators live in flowrl/advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Advantages:
    """Advantages of all samples of an iteration, over all ranks.

    Attributes:
        values: (N,) float32; 0 where `valid` is False.
        valid: (N,) bool; False where any reward of the sample is not finite.
        metrics: e.g. ``frac_zero_std``, ``reward_std_group``.
    """

    values: Tensor
    valid: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


class Advantage(Protocol):
    """The contract of an estimator (register one with ``@register("advantage", name)``).

    A pure function of the gathered scores: no state, no communication, independent of the order of the
    samples and of how they were spread over ranks.
    """

    def __call__(self, scores: Tensor, weights: Tensor, groups: Tensor) -> Advantages:
        """Advantages from raw scores.

        Args:
            scores: (N, R) float32, raw scores of every reward; NaN where a sample could not be scored.
            weights: (R,) float32, the weights of the rewards.
            groups: (N,) int64, the group of each sample: by id, not by position or prompt text.
        """
        ...


def group_mean(values: Tensor, index: Tensor) -> Tensor:
    """Mean of every group, the same to the last bit in whatever order the samples come.

    Args:
        values: (N,) float64, finite.
        index: (N,) int64, each sample's group as 0 .. number of groups - 1, none of them empty.

    Returns:
        float64 (number of groups,).
    """
    values, order = values.sort()
    index = index[order]
    counts = torch.bincount(index)
    return values.new_zeros(len(counts)).index_add_(0, index, values) / counts


def group_std(values: Tensor, index: Tensor, unbiased: bool) -> Tensor:
    """Standard deviation within every group, 0 for a group of one; see `group_mean`.

    Args:
        values: (N,) float64, finite.
        index: (N,) int64.
        unbiased: divide the squares by count - 1, not by count.

    Returns:
        float64 (number of groups,).
    """
    squares = (values - group_mean(values, index)[index]).square()
    counts = torch.bincount(index)
    variance = group_mean(squares, index)
    if unbiased:
        variance = variance * counts / (counts - 1).clamp(min=1)
    return variance.sqrt()
