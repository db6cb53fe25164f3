"""CM-GRPO: policy gradient on the Gaussian transitions of a consistency sampler, as a regression or a ratio.

A row has advantage A, and its recorded action z a density N(mean, std^2 I) with D dims under the policy
being trained. With sg the stop-gradient and R the reduction (sum or mean over dims),

    score_regression:  rows = R |mean - sg(mean + A / (2 std^2) (z - mean))|^2
    ratio:             rows = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)),
                       rho  = exp(R over dims of new - old log-densities)
    loss = mean over rows of weight * rows + kl_coef R KL(transition || reference)

The regression's value means nothing; its gradient is that of -A R log pi, REINFORCE's:
d/dmean = 2 (mean - target) = -A (z - mean) / std^2. In the paper it is written for the endpoint x0, of which
the mean is alpha x0: |x0 - sg(x0 + A alpha / (2 std^2) (z - mean))|^2 has the same gradient in every weight.
At rho = 1 both forms have the same gradient, for either reduction; "per_dim" is "sum" over D.

The regression knows no ratio, so a sample may serve one update only: more passes are refused, and several
updates a pass, of which the later ones see slightly stale samples, give a warning. The ratio form corrects
for staleness, and clips.

A step's gradient is A noise / std per dim of the mean, so that late steps weigh most. ``step_weights``:

    none         1
    std          std: the mean's gradient has one size at all steps, that of x0 keeps its factor alpha
    std_over_dt  std / max(|sigma - sigma_next|, 1e-6): on flows, the option of the authors' code (which
                 divides by the difference of times, on tables of alphas another number)

Source: arXiv 2605.15190 (eq. 8 to 10, algorithm 2). Published: regression, one random transition an
iteration, advantages normalised reward by reward, then summed (``advantage: {combine:
normalize_then_sum}``), clipped at 5; no KL, one update a rollout, groups of 32, lr 5e-6, AdamW with
betas (0, 0.999).
Differs from the authors' code: they sum in the paper and average in the code, times 100; the factor is
left out, since AdamW is deaf to it. Clip ranges of the ratio form are ours.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.mdp.transitions import Gaussian, log_ratio, sum_events
from flowrl.objective import Metrics, TrajectoryStep, masked_mean, to_metrics, valid_mean
from flowrl.registry import ComponentConfig, register

LOG_RATIO_LIMIT = 20.0
MIN_DT = 1e-6


@register("objective", "cm_grpo")
class CMGRPO:
    """Score regression, or clipped ratio, for one transition of a micro-batch."""

    unit: ClassVar[Literal["trajectory", "forward"]] = "trajectory"
    acts: ClassVar[Literal["policy", "old", "reference"]] = "policy"
    family: ClassVar[Literal["flow", "tokens", "any"]] = "flow"

    class Config(ComponentConfig):
        """Options of `CMGRPO`."""

        form: Literal["score_regression", "ratio"] = Field(
            "score_regression", description="ratio allows more than one update on the same samples"
        )
        reduction: Literal["per_dim", "sum"] = Field("per_dim", description="log-densities over event dims")
        step_weights: Literal["none", "std", "std_over_dt"] = Field(
            "none", description="policy loss of each step"
        )
        clip_low: float = Field(1e-4, gt=0, lt=1, description="the ratio is clipped at 1 - clip_low")
        clip_high: float = Field(1e-4, gt=0, description="the ratio is clipped at 1 + clip_high")
        kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference, reduced alike")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config
        self.needs_reference = config.kl_coef > 0
        self.on_policy = config.form == "score_regression"

    def __call__(self, step: TrajectoryStep) -> tuple[Tensor, Metrics]:
        """The loss (float64 scalar) and metrics, means over valid rows except ``log_ratio_max``."""
        config, transition, valid = self.config, step.transition, step.valid
        if not isinstance(transition, Gaussian):
            raise TypeError(f"cm_grpo needs Gaussian steps, not {type(transition).__name__}")
        per_dim = config.reduction == "per_dim"
        log = log_ratio(step.log_prob, step.old_log_prob, transition.event_size, per_dim)
        log = torch.where(valid, log, torch.zeros_like(log))
        ratio = log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        advantages = torch.where(valid, step.advantages, torch.zeros_like(step.advantages)).to(ratio.dtype)
        low, high = 1 - config.clip_low, 1 + config.clip_high
        if self.on_policy:
            rows = _score_regression(transition, step.action, advantages)
            rows = rows / transition.event_size if per_dim else rows
        else:
            rows = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
        policy_loss = self._weight(step, transition.std) * masked_mean(rows, valid)
        kl = self._kl(step, transition.event_size if per_dim else 1)
        ratio = ratio.detach()
        metrics = {
            "policy_loss": policy_loss,
            "kl": kl,
            "ratio_mean": valid_mean(ratio, valid),
            "log_ratio_max": log.abs().max(),
        }
        if not self.on_policy:
            metrics["clip_frac_low"] = valid_mean((ratio < low).double(), valid)
            metrics["clip_frac_high"] = valid_mean((ratio > high).double(), valid)
        return policy_loss + config.kl_coef * kl, to_metrics(**metrics)

    def _weight(self, step: TrajectoryStep, std: float) -> float:
        if self.config.step_weights == "none":
            return 1.0
        if self.config.step_weights == "std":
            return std
        return std / max(abs(step.sigma - step.sigma_next), MIN_DT)

    def _kl(self, step: TrajectoryStep, size: int) -> Tensor:
        if not self.needs_reference:
            return step.log_prob.new_zeros(())
        if step.reference is None:
            raise ValueError(f"kl_coef = {self.config.kl_coef:g} needs the reference transition, got None")
        return masked_mean(step.transition.kl(step.reference) / size, step.valid)


def _score_regression(transition: Gaussian, action: Tensor, advantages: Tensor) -> Tensor:
    """Squared distance (B,) of the mean to its target, summed over event dims.

    In float64: a target that differs from the mean by little would lose its digits in float32.
    """
    mean, gains = transition.mean.double(), advantages.view(-1, *[1] * (transition.mean.ndim - 1))
    pull = gains / (2 * transition.std**2) * (action.double() - mean)
    return sum_events(transition.weighted((mean - (mean + pull).detach()).square()))
