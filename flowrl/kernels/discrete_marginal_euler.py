"""One step of a discrete flow by its marginal rate: the rate averaged over x1 first, then a jump.

With p = p(x1 | x) of the network and r = kappa' / (1 - kappa) of a mixture path,

    lambda = r (1 - p(x))
    p(x)   = exp(-h lambda)
    p(y)   = (1 - exp(-h lambda)) p(y) / (1 - p(x))        y != x

By rule "euler" 1 - exp(-h lambda) becomes min(1, h lambda). It differs from ``discrete_mixture``, where x1 is
drawn before the jump, by O(h^2). The last step, to t' = 1, is a draw from the posterior.

Source: arXiv 2402.04997, 2407.15595 (the marginal rate of a discrete flow).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.mdp.token_paths import TINY, MixturePath, path_of
from flowrl.mdp.token_transitions import Categorical
from flowrl.registry import ComponentConfig, register


@register("kernel", "discrete_marginal_euler")
class DiscreteMarginalEuler:
    """Categorical over the next tokens by the marginal rate of a mixture path."""

    family: ClassVar[str] = "tokens"

    class Config(ComponentConfig):
        """Options of `DiscreteMarginalEuler`."""

        rule: Literal["exponential", "euler"] = Field("exponential", description="the probability of a jump")

    def __init__(self, config: Config) -> None:
        """Keeps the rule."""
        self.rule = config.rule

    def __call__(self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float) -> Categorical:
        """The law of the next tokens, for log-probabilities of x1 (B, L, S) and tokens (B, L)."""
        if sigma_next <= 0:
            return Categorical(prediction, prediction, sample)
        amount = self._amount(sigma, sigma_next)
        here = prediction.gather(-1, sample[..., None])
        leaves = -torch.expm1(here)  # 1 - p(x)
        exponent = amount * leaves
        jump = exponent.clamp(max=1.0) if self.rule == "euler" else -torch.expm1(-exponent)
        away = prediction + (jump.clamp(min=TINY).log() - leaves.clamp(min=TINY).log())
        stay = (1 - jump).clamp(min=TINY).log()
        return Categorical(away.scatter(-1, sample[..., None], stay), prediction, sample)

    def std(self, sigma: float, sigma_next: float) -> float:
        """The probability of a jump for a token that is surely wrong."""
        return path_of(sigma, MixturePath, "discrete_marginal_euler").mobility(
            1 - sigma, 1 - sigma_next, self.rule
        )

    def _amount(self, sigma: float, sigma_next: float) -> float:
        """The integrated rate h r, finite: infinity times 0 would be NaN."""
        path, t = path_of(sigma, MixturePath, "discrete_marginal_euler"), 1 - sigma
        return min((sigma - sigma_next) * path.kappa_dot(t) / (1 - path.kappa(t)), 1e30)
