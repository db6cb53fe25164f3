"""DanceGRPO's SDE step: as Flow-GRPO's, with the same diffusion g = ``eta`` at every noise level.

With dt = sigma_next - sigma < 0:

    mean = x + v dt - (eta^2 / 2) score dt,      score = -(x - (1 - sigma) x0) / sigma^2,  x0 = x - sigma v
         = x (1 + eta^2 dt / (2 sigma)) + v dt (1 + eta^2 (1 - sigma) / (2 sigma))
    std  = eta sqrt(-dt)

Source: arXiv 2505.07818 (published for FLUX: eta 0.3, 16 steps, shift 3, clip 1e-4; for
HunyuanVideo: eta 0.25, shift 5).
Differs from the authors' code: they decode the image from the last step's predicted x0; here the last
step is a step like the others, with density and std = eta sqrt(sigma). The step selectors leave it out
of training; make it deterministic with a window that ends before it.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flowrl.mdp.transitions import Gaussian
from flowrl.registry import ComponentConfig, register


@register("kernel", "dance_sde")
class DanceSDE:
    """Gaussian step with constant diffusion."""

    family: ClassVar[str] = "flow"

    class Config(ComponentConfig):
        """Options of `DanceSDE`."""

        eta: float = Field(0.3, ge=0, description="the diffusion g; 0 is the ODE")

    def __init__(self, config: Config) -> None:
        """Keeps eta."""
        self.eta = config.eta

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Gaussian:
        """The Gaussian over the next state, for a velocity and a state (B, *)."""
        dt = sigma_next - sigma
        half = self.eta**2 / (2 * sigma)
        mean = torch.add(sample * (1 + half * dt), prediction, alpha=dt * (1 + half * (1 - sigma)))
        return Gaussian(mean, self.std(sigma, sigma_next))

    def std(self, sigma: float, sigma_next: float) -> float:
        """``eta sqrt(-dt)``."""
        return self.eta * math.sqrt(sigma - sigma_next)
