"""Euler step of the flow's ODE, x' = x + (sigma_next - sigma) v: deterministic, so never trained itself.

Used for the steps outside a stochastic window, and as the rollout of forward-process objectives.
Source: the probability-flow ODE of rectified flow, arXiv 2209.03003.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from flowrl.mdp.transitions import Dirac
from flowrl.registry import ComponentConfig, register


@register("kernel", "ode")
class ODE:
    """Dirac at the Euler step."""

    family: ClassVar[str] = "flow"

    class Config(ComponentConfig):
        """`ODE` has no options."""

    def __init__(self, config: Config) -> None:
        """Nothing to keep."""

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Dirac:
        """The next state, for a velocity and a state (B, *)."""
        return Dirac(torch.add(sample, prediction, alpha=sigma_next - sigma))

    def std(self, sigma: float, sigma_next: float) -> float:
        """0."""
        return 0.0
