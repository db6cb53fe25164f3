"""Flow-GRPO's SDE step: the reverse SDE that has the same marginals as the flow's ODE.

With dt = sigma_next - sigma < 0 and diffusion g^2 = a^2 sigma / (1 - sigma), a = ``noise_level``:

    mean = x + v dt - (g^2 / 2) score dt,        score = -eps / sigma,  eps = x + (1 - sigma) v
         = x (1 + g^2 dt / (2 sigma)) + v dt (1 + g^2 (1 - sigma) / (2 sigma))
    std  = g sqrt(-dt)

Source: arXiv 2505.05470 (published: noise_level 0.7, 10 training steps, clip 1e-4).
Differs from the authors' code:
  * g is infinite at sigma = 1. They replace sigma by sigmas[1] in the denominator 1 - sigma where it is
    exactly 1, so that 1 - 6e-8 gives a std of thousands. Here every sigma >= `NEAR_ONE` takes sigma_next
    in that denominator; below it nothing changes.
  * Densities carry their constants and their 1 / (2 std^2).
The last step (sigma_next = 0) has a density, std = g sqrt(sigma), and leaves that noise in the sample; it
is left out of training by the step selectors' default fraction, as in the authors' code.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flowrl.mdp.transitions import Gaussian
from flowrl.registry import ComponentConfig, register

NEAR_ONE = 0.999  # the diffusion's pole at sigma = 1 is avoided from here on


@register("kernel", "flow_sde")
class FlowSDE:
    """Gaussian step with diffusion a sqrt(sigma / (1 - sigma))."""

    family: ClassVar[str] = "flow"

    class Config(ComponentConfig):
        """Options of `FlowSDE`."""

        noise_level: float = Field(0.7, ge=0, description="a in g^2 = a^2 sigma / (1 - sigma); 0 is the ODE")

    def __init__(self, config: Config) -> None:
        """Keeps the noise level."""
        self.noise_level = config.noise_level

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Gaussian:
        """The Gaussian over the next state, for a velocity and a state (B, *)."""
        dt = sigma_next - sigma
        half = self._diffusion(sigma, sigma_next) / (2 * sigma)
        mean = torch.add(sample * (1 + half * dt), prediction, alpha=dt * (1 + half * (1 - sigma)))
        return Gaussian(mean, self.std(sigma, sigma_next))

    def std(self, sigma: float, sigma_next: float) -> float:
        """``g sqrt(-dt)``."""
        return math.sqrt(self._diffusion(sigma, sigma_next) * (sigma - sigma_next))

    def _diffusion(self, sigma: float, sigma_next: float) -> float:
        """g^2, with the guard near sigma = 1."""
        pole = sigma_next if sigma >= NEAR_ONE else sigma
        return self.noise_level**2 * sigma / (1 - pole)
