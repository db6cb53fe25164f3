"""Coefficients-preserving sampling: the next state keeps the exact amounts of data and noise.

With s = sigma_next, x0 = x - sigma v, eps = x + (1 - sigma) v, and a = ``noise_level`` in [0, 1]:

    mean = (1 - s) x0 + s cos(a pi / 2) eps
    std  = s sin(a pi / 2)

so that the total noise coefficient sqrt((s cos)^2 + (s sin)^2) is s. a = 0 is the ODE's Euler step, a = 1
the consistency step (1 - s) x0 + s noise.

Source: arXiv 2509.05952 (published: noise_level 0.8, clip 1e-5).
Differs from the authors' code: their "log-prob" is -(x' - mean)^2, without 1 / (2 std^2) and constants,
and so is no density; here it is one, and clip ranges tuned on theirs do not transfer.
Warning: CPS does not keep the flow's marginals, not even with infinitely many steps: eps predicted at a
state is an average, so mixing it with fresh noise loses variance. On a target N(1, 0.5^2) with the exact
velocity, the samples' std is 0.347 at 10 steps and 0.404 in the limit, in place of 0.5 (noise 0.8).
The last step (s = 0) has std 0: no density, never trained.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flowrl.mdp.transitions import Gaussian
from flowrl.registry import ComponentConfig, register


@register("kernel", "cps")
class CPS:
    """Gaussian step whose total noise coefficient is sigma_next."""

    family: ClassVar[str] = "flow"

    class Config(ComponentConfig):
        """Options of `CPS`."""

        noise_level: float = Field(0.8, ge=0, le=1, description="share of fresh noise; 0 ODE, 1 consistency")

    def __init__(self, config: Config) -> None:
        """Keeps the split of the noise into old and fresh."""
        self.fresh = math.sin(0.5 * math.pi * config.noise_level)
        self.kept = math.cos(0.5 * math.pi * config.noise_level)

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Gaussian:
        """The Gaussian over the next state, for a velocity and a state (B, *)."""
        data, noise = 1 - sigma_next, sigma_next * self.kept
        mean = torch.add(sample * (data + noise), prediction, alpha=noise * (1 - sigma) - data * sigma)
        return Gaussian(mean, self.std(sigma, sigma_next))

    def std(self, sigma: float, sigma_next: float) -> float:
        """``sigma_next sin(a pi / 2)``."""
        return sigma_next * self.fresh
