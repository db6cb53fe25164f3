"""The consistency step: jump to the predicted x0, then put fresh noise on it up to the next level.

With s = sigma_next and x0 = x - sigma v:

    mean = (1 - s) x0
    std  = s

On a sampler x = alpha x0 + sigma eps that is no flow this is N(alpha_next x0, sigma_next^2): what LCM, sCM,
consistency models and few-step flow models sample by. The mean depends on the state through the predicted
x0 only, and std is a number of the schedule, so the sampler of a distilled model is itself a policy with a
density, without a surrogate SDE. Per dim, the gradient of a log-probability with respect to x0 has the
size (1 - s) / s: late steps weigh most.

Source: arXiv 2605.15190 (CM-GRPO, eq. 6), 2303.01469 (consistency models, algorithm 1), 2310.04378 (LCM).
Differs from the authors' text: their appendix counts one transition more than has a density. The last one
(s = 0) is a point: of T steps T - 1 can be trained, and a one-step sampler has none.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from flowrl.mdp.transitions import Gaussian
from flowrl.registry import ComponentConfig, register


@register("kernel", "consistency")
class Consistency:
    """Gaussian around the re-scaled predicted data, all of its noise fresh."""

    family: ClassVar[str] = "flow"

    class Config(ComponentConfig):
        """`Consistency` has no options."""

    def __init__(self, config: Config) -> None:
        """Nothing to keep."""

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Gaussian:
        """The Gaussian over the next state, for a velocity and a state (B, *)."""
        data = 1 - sigma_next
        return Gaussian(
            torch.add(data * sample, prediction, alpha=-data * sigma), self.std(sigma, sigma_next)
        )

    def std(self, sigma: float, sigma_next: float) -> float:
        """``sigma_next``."""
        return float(sigma_next)

    def destination(self, sigma_next: float) -> float:
        """Where the network's jump ends: at the data."""
        return 0.0
