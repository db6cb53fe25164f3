"""Clipped-ratio policy gradient on recorded transitions (GRPO), with GRPO-Guard's ratio as an option.

For a row with advantage A, event size D, log-probabilities new and old of its recorded action:

    rho  = exp((new - old) / D)  (reduction "per_dim")   or   exp(new - old)  ("sum")
    loss = mean over rows of max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))
           + kl_coef * KL(transition || reference) / D

The two reductions are not comparable. "per_dim" is the geometric mean of the dims' ratios, which published
clip ranges (1e-5 to 1e-3) assume; its gradient at rho = 1 is REINFORCE's divided by D. "sum" is the true
likelihood ratio: its clip range must be about D times larger, and it overflows for large D.

GRPO-Guard (ratio "guard"). A recorded action is a = m_old + std n. With delta = m_new - m_old,

    new - old = (|a - m_old|^2 - |a - m_new|^2) / (2 std^2) = n.delta / std - |delta|^2 / (2 std^2)

The second term makes E[log rho] < 0 and pushes ratios out of the upper clip; 1 / std makes their scale
differ between steps. Guard removes both:

    log rho = ((new - old) / D + mean(delta^2) / (2 std^2)) std = n.delta / D
            = (n.m_new - n.m_old) / D

which needs only the projection n.m_old of the acting policy's mean, recorded at rollout. Its companion
``step_weights: inverse_dt`` divides the policy loss by |sigma_next - sigma|, the paper's gradient
reweighting across noise levels.

Source: arXiv 2505.05470 (Flow-GRPO: clip 1e-4, kl 0.04), 2505.07818 (DanceGRPO: clip 1e-4), 2503.14476
(unequal clips), 2510.22319 (GRPO-Guard).
Differs from the authors' code:
  * Flow-GRPO's KL leaves out the dt of the step's variance; here it is the exact Gaussian KL, always as a
    mean over dims. At dt = -0.1 ours is ten times theirs: scale its published kl_coef accordingly.
  * log rho is clamped to +-20 against overflow; a row beyond that has no policy gradient.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.mdp.transitions import Gaussian, log_ratio, projection
from flowrl.objective import Metrics, TrajectoryStep, masked_mean, to_metrics, valid_mean
from flowrl.registry import ComponentConfig, register

LOG_RATIO_LIMIT = 20.0


@register("objective", "grpo")
class GRPO:
    """PPO's clipped objective for one transition of a micro-batch."""

    unit: ClassVar[Literal["trajectory", "forward"]] = "trajectory"
    acts: ClassVar[Literal["policy", "old", "reference"]] = "policy"
    family: ClassVar[Literal["flow", "tokens", "any"]] = "any"

    class Config(ComponentConfig):
        """Options of `GRPO`."""

        clip_low: float = Field(1e-4, gt=0, lt=1, description="the ratio is clipped at 1 - clip_low")
        clip_high: float = Field(1e-4, gt=0, description="the ratio is clipped at 1 + clip_high")
        reduction: Literal["per_dim", "sum"] = Field("per_dim", description="log-ratio over event dims")
        ratio: Literal["plain", "guard"] = Field("plain", description="guard is GRPO-Guard's ratio")
        step_weights: Literal["none", "inverse_dt"] = Field("none", description="policy loss of each step")
        kl_coef: float = Field(0.0, ge=0, description="weight of the per-dim KL to the reference")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config
        self.needs_reference = config.kl_coef > 0

    def __call__(self, step: TrajectoryStep) -> tuple[Tensor, Metrics]:
        """The loss (float64 scalar) and metrics, means over valid rows except ``log_ratio_max``."""
        valid = step.valid
        raw = self._log_ratio(step)
        # Invalid rows leave before exp(): a NaN behind a where() would still reach the gradient.
        safe = torch.where(valid, raw, torch.zeros_like(raw))
        ratio = safe.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
        advantages = step.advantages.to(ratio.dtype)
        rows = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
        policy_loss = masked_mean(rows, valid)
        if self.config.step_weights == "inverse_dt":
            policy_loss = policy_loss / abs(step.sigma_next - step.sigma)
        kl = self._kl(step)
        loss = policy_loss + self.config.kl_coef * kl
        log, ratio = safe.detach(), ratio.detach()
        centre = valid_mean(ratio, valid)
        metrics = to_metrics(
            policy_loss=policy_loss,
            kl=kl,
            ratio_mean=centre,
            ratio_std=valid_mean((ratio - centre).square(), valid).sqrt(),
            log_ratio_max=log.abs().max(),
            clip_frac_low=valid_mean((ratio < low).double(), valid),
            clip_frac_high=valid_mean((ratio > high).double(), valid),
            approx_kl=valid_mean(torch.expm1(log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - log, valid),
        )
        return loss, metrics

    def _log_ratio(self, step: TrajectoryStep) -> Tensor:
        """The log-ratio (B,) by the options `ratio` and `reduction`."""
        new, old = step.log_prob, step.old_log_prob
        if self.config.ratio == "guard":
            if not isinstance(step.transition, Gaussian) or step.old_projection is None:
                raise TypeError(f"ratio: guard needs Gaussian steps, not {type(step.transition).__name__}")
            new, old = projection(step.noise, step.transition.mean), step.old_projection
        return log_ratio(new, old, step.transition.event_size, per_dim=self.config.reduction == "per_dim")

    def _kl(self, step: TrajectoryStep) -> Tensor:
        if not self.needs_reference:
            return step.log_prob.new_zeros(())
        if step.reference is None:
            raise ValueError(f"kl_coef = {self.config.kl_coef:g} needs the reference transition, got None")
        return masked_mean(step.transition.kl(step.reference) / step.transition.event_size, step.valid)
