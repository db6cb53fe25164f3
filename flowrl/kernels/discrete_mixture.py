"""One step of a discrete flow on a mixture path: draw x1 from the posterior, then jump to it or stay.

With p = p(x1 | x) of the network and J the probability of a jump (1 - exp(-h r) by rule "exponential",
(kappa(t') - kappa(t)) / (1 - kappa(t)) by rule "integrated", r = kappa' / (1 - kappa)), the sum over x1 has a
closed form:

    p(y) = J p(y)                  y != x
    p(x) = J p(x) + 1 - J

On a masked path a mask becomes y with probability J p(y), and a token that is known stays. A corrector adds
the rate c kappa' / kappa p0(y) of noising and raises r to (1 + c) r; which x1 is drawn then matters only by
whether it is x, so that the form stays closed. The last step, to t' = 1, is a draw from the posterior.

Estimators: ``exact`` is the above. ``rate_mc`` averages over draws of x1 that are recorded, ``joint`` scores
the x1 that was drawn; both have the same expectation and a larger variance (they are what the authors use).

Source: arXiv 2407.15595 (paths, correctors), 2605.09291 (dFlowGRPO, which scores by rate_mc).
Differs from the authors' code: see flowrl/mdp/token_paths.py; the exact form.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from flowrl.mdp.token_paths import MixturePath, Rule, path_of
from flowrl.mdp.token_transitions import Categorical, Draws, Joint, TokenTransition
from flowrl.registry import ComponentConfig, register


@register("kernel", "discrete_mixture")
class DiscreteMixture:
    """Categorical over the next tokens of a masked or uniform path."""

    family: ClassVar[str] = "tokens"

    class Config(ComponentConfig):
        """Options of `DiscreteMixture`."""

        rule: Rule = Field("integrated", description="the probability of a jump")
        corrector: float = Field(0.0, ge=0, description="c: noising at c times the rate, undone as fast")
        estimator: Literal["exact", "rate_mc", "joint"] = Field("exact", description="how a step is scored")
        num_draws: int = Field(24, ge=1, description="draws of x1 a step and position, for rate_mc")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config

    def __call__(
        self, prediction: Tensor, sample: Tensor, sigma: float, sigma_next: float
    ) -> TokenTransition:
        """The law of the next tokens, for log-probabilities of x1 (B, L, S) and tokens (B, L)."""
        config = self.config
        law = path_of(sigma, MixturePath, "discrete_mixture").law(
            1 - sigma, 1 - sigma_next, config.rule, config.corrector
        )
        if config.estimator == "exact":
            return Categorical(law.marginal_log_probs(prediction, sample), prediction, sample)
        if config.estimator == "joint":
            return Joint(prediction, sample, law)
        return Draws(prediction, sample, law, config.num_draws)

    def std(self, sigma: float, sigma_next: float) -> float:
        """The probability of a jump, in the place of a standard deviation."""
        return path_of(sigma, MixturePath, "discrete_mixture").mobility(
            1 - sigma, 1 - sigma_next, self.config.rule
        )
