"""One step of a discrete flow on a metric path: draw x1 from the posterior, then jump nearer to it or stay.

With p = p(x1 | x) of the network, beta the sharpness of the path and b = beta(t') - beta(t) (rule
"integrated") or h beta'(t) ("exponential"),

    slack(x, x1)  = sum over y of p_t(y | x1) [d(x, x1) - d(y, x1)]_+
    K(y | x, x1)  = (1 - exp(-b slack)) p_t(y | x1) [d(x, x1) - d(y, x1)]_+ / slack         y != x
    K(x | x, x1)  = exp(-b slack)
    p(y)          = sum over x1 of p(x1) K(y | x, x1)

The integrated rule is finite at t = 0, where beta' is not: the authors force the first step to stay, so that
it cannot be trained; here it can. The last step, to t' = 1, is a draw from the posterior.

Estimators: ``exact`` takes the sum, V terms a position, from tables of V x V that are made once a step: for
up to some thousand tokens. ``rate_mc`` averages over draws of x1 that are recorded, ``joint`` scores the one
that was drawn. The next token is drawn from the K of one draw, that is from exactly the law that is scored.

Source: arXiv 2412.03487 (kinetic-optimal rates), 2505.20147 (FUDOKI), 2605.09291 (dFlowGRPO: rate_mc, 24
draws for images and 1 for text).
Differs from the authors' code: they draw the next token by the averaged rate, which is not the averaged K
that they score (total variation .047 at t = .3, h = .1).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from flowrl.mdp.metric_path import MetricPath
from flowrl.mdp.token_paths import Rule, path_of
from flowrl.mdp.token_transitions import Draws, Joint, Marginal, TokenTransition
from flowrl.registry import ComponentConfig, register


@register("kernel", "discrete_metric")
class DiscreteMetric:
    """The law of the next tokens of a metric path."""

    family: ClassVar[str] = "tokens"

    class Config(ComponentConfig):
        """Options of `DiscreteMetric`."""

        rule: Rule = Field("integrated", description="the probability of a jump")
        estimator: Literal["exact", "rate_mc", "joint"] = Field("exact", description="how a step is scored")
        num_draws: int = Field(24, ge=1, description="draws of x1 a step and position, for rate_mc")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config

    def __call__(
        self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float
    ) -> TokenTransition:
        """The law of the next tokens, for log-probabilities of x1 (B, L, V) and tokens (B, L)."""
        config = self.config
        law = path_of(sigma, MetricPath, "discrete_metric").law(1 - sigma, 1 - sigma_next, config.rule)
        if config.estimator == "exact":
            return Marginal(prediction, sample, law)
        if config.estimator == "joint":
            return Joint(prediction, sample, law)
        return Draws(prediction, sample, law, config.num_draws)

    def std(self, sigma: float, sigma_next: float) -> float:
        """A bound of the probability of a jump: 0 where every token is forced to stay."""
        return path_of(sigma, MetricPath, "discrete_metric").mobility(
            1 - sigma, 1 - sigma_next, self.config.rule
        )
