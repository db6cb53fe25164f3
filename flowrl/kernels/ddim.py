"""DDIM with noise: the classic diffusion sampler, from deterministic (eta 0) to ancestral (eta 1).

With s = sigma_next, x0 = x - sigma v, eps = x + (1 - sigma) v:

    q    = s (1 - sigma) / (sigma (1 - s)),        the fall of the noise-to-data ratio in this step
    f    = eta sqrt(1 - q^2)
    mean = (1 - s) x0 + s sqrt(1 - f^2) eps
    std  = s f

On a table of alpha_bar (a now, a' next) this is the paper's mean sqrt(a') x0 + sqrt(1 - a' - std^2) eps with
std = eta sqrt((1 - a') / (1 - a) (1 - a / a')). At eta = 1, x0 exact, it is the posterior of the forward
process given x0, and that of the flow on a flow.

Source: arXiv 2010.02502 (DDIM, eq. 12 and 16); as a policy: arXiv 2305.13301 (DDPO; published: eta 1, 50
steps, clip 1e-4).
Differs from the authors' code (DDPO): the last step keeps the scheduler's own final alpha_bar. SD 1.x ends
at the table's first, where std is small and there is a density; schedulers that end at 1 have none there.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from flowrl.mdp.transitions import Gaussian
from flowrl.registry import ComponentConfig, register


@register("kernel", "ddim")
class DDIM:
    """Gaussian step whose fresh noise is eta times that of the forward process's posterior."""

    family: ClassVar[str] = "flow"

    class Config(ComponentConfig):
        """Options of `DDIM`."""

        eta: float = Field(1.0, ge=0, le=1, description="share of the posterior's noise; 0 is deterministic")

    def __init__(self, config: Config) -> None:
        """Keeps eta."""
        self.eta = config.eta

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Gaussian:
        """The Gaussian over the next state, for a velocity and a state (B, *)."""
        data, noise = 1 - sigma_next, sigma_next * math.sqrt(1 - self._fresh(sigma, sigma_next) ** 2)
        mean = torch.add((data + noise) * sample, prediction, alpha=noise * (1 - sigma) - data * sigma)
        return Gaussian(mean, self.std(sigma, sigma_next))

    def std(self, sigma: float, sigma_next: float) -> float:
        """``s f``."""
        return sigma_next * self._fresh(sigma, sigma_next)

    def _fresh(self, sigma: float, sigma_next: float) -> float:
        """The share f of the next level's noise that is fresh."""
        fall = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))
        return self.eta * math.sqrt(1 - fall**2)
