"""Strategic stochastic sampling of TCD: jump below the next level, then put fresh noise on up to it.

With s = sigma_next, e the level at (1 - eta) of the *time* of s, x0 = x - sigma v, eps = x + (1 - sigma) v:

    x_e  = (1 - e) x0 + e eps
    mean = (1 - s) / (1 - e) x_e = (1 - s) x0 + s q eps,       q = e (1 - s) / (s (1 - e))
    std  = sqrt(s^2 - ((1 - s) / (1 - e))^2 e^2) = s sqrt(1 - q^2)

q is the quotient of the two levels' noise-to-data ratios. eta = 1 jumps to the data (the consistency step),
eta = 0 to s itself (DDIM without noise). Time is what the sampler counts in: sigma for a flow, the index of
the training step for a table of alpha_bar.

Source: arXiv 2402.19159 (Trajectory Consistency Distillation, algorithm 2, where eta is called gamma;
published: 0.3 at 4 steps); arXiv 2605.15190 uses the same law for flows.
Differs from diffusers' TCDScheduler at eta = 1 only: there the table's first level, which still holds some
noise, stands for the data.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flowrl.mdp.schedules import part
from flowrl.mdp.transitions import Gaussian
from flowrl.registry import ComponentConfig, register


@register("kernel", "tcd")
class TCD:
    """Gaussian step that re-noises from a level between the data and the next one."""

    family: ClassVar[str] = "flow"

    class Config(ComponentConfig):
        """Options of `TCD`."""

        eta: float = Field(0.3, ge=0, le=1, description="how far below the next level; 0 DDIM, 1 consistency")

    def __init__(self, config: Config) -> None:
        """Keeps eta."""
        self.eta = config.eta

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Gaussian:
        """The Gaussian over the next state, for a velocity and a state (B, *)."""
        data, noise = 1 - sigma_next, sigma_next * self._kept(sigma_next)
        mean = torch.add((data + noise) * sample, prediction, alpha=noise * (1 - sigma) - data * sigma)
        return Gaussian(mean, self.std(sigma, sigma_next))

    def std(self, sigma: float, sigma_next: float) -> float:
        """``s sqrt(1 - q^2)``."""
        return sigma_next * math.sqrt(1 - self._kept(sigma_next) ** 2)

    def destination(self, sigma_next: float) -> float:
        """Where the network's jump ends: at (1 - eta) of the next level's time."""
        return part(sigma_next, 1 - self.eta)

    def _kept(self, sigma_next: float) -> float:
        """The share q of the next level's noise that is the predicted eps."""
        if self.eta == 0 or sigma_next == 0:
            return 1.0
        below = self.destination(sigma_next)
        return below * (1 - sigma_next) / (sigma_next * (1 - below))
