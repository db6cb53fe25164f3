"""GRPO of masked models by a one-step estimate (diffu-GRPO): the clean tokens scored from pure noise.

With x1 the tokens that were made and x a draw of the noise, p(x1_d | x) what one forward says of position d:

    rho  = exp(mean over d of log p(x1_d | x) - log p_old(x1_d | x))
    loss = mean over rows of max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) + kl_coef KL

The trajectory plays no part, so a unit costs one forward of each policy; but p(x1 | noise) as a product over
positions is not the probability of what the sampler does, which makes it the baseline of dFlowGRPO. The KL is
that of the posteriors at the same x, exact, averaged over positions.

Source: arXiv 2504.12216 (d1: one forward with all answer tokens masked), 2605.09291 (as a baseline: the
geometric mean of the tokens' ratios). Clip ranges are those of dflow_grpo.
Differs from the authors' code: d1 also masks part of the prompt at random, and clips token by token.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.objective import ForwardStep, Metrics, masked_mean, to_metrics, valid_mean
from flowrl.registry import ComponentConfig, register

LOG_RATIO_LIMIT = 20.0


@register("objective", "diffu_grpo")
class DiffuGRPO:
    """PPO's clipped objective on the posterior of pure noise."""

    unit: ClassVar[Literal["trajectory", "forward"]] = "forward"
    acts: ClassVar[Literal["policy", "old", "reference"]] = "old"
    family: ClassVar[Literal["flow", "tokens", "any"]] = "tokens"

    class Config(ComponentConfig):
        """Options of `DiffuGRPO`."""

        clip_low: float = Field(1e-3, gt=0, lt=1, description="the ratio is clipped at 1 - clip_low")
        clip_high: float = Field(1.5e-3, gt=0, description="the ratio is clipped at 1 + clip_high")
        units_per_micro_batch: int = Field(1, ge=1, description="draws of the noise; 1 for a masked path")
        kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference a position")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config
        self.needs_reference = config.kl_coef > 0
        self.units_per_micro_batch = config.units_per_micro_batch

    def __call__(self, step: ForwardStep) -> tuple[Tensor, Metrics]:
        """The loss, a scalar, and metrics over valid rows except ``log_ratio_max``."""
        config, valid = self.config, step.valid
        if step.noised is None:
            raise TypeError("diffu_grpo needs tokens")
        noise = step.noised(step.latents, 1.0)
        with torch.no_grad():
            old = _pick(step.predict_old(noise, 1.0), step.latents)
            reference = step.predict_reference(noise, 1.0) if self.needs_reference else None
        posterior = step.predict(noise, 1.0)  # last: no adapter is switched between it and backward
        log = (_pick(posterior, step.latents) - old).mean(1)
        log = torch.where(valid, log, 0.0)
        ratio = log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        advantages = torch.where(valid, step.advantages, 0.0).double()
        low, high = 1 - config.clip_low, 1 + config.clip_high
        rows = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
        policy_loss = masked_mean(rows, valid)
        kl = policy_loss.new_zeros(())
        if reference is not None:
            kl = masked_mean(_kl(posterior, reference).mean(1), valid)
        metrics = to_metrics(
            policy_loss=policy_loss,
            kl=kl,
            ratio_mean=valid_mean(ratio.detach(), valid),
            log_ratio_max=log.detach().abs().max(),
            clip_frac_low=valid_mean((ratio < low).double(), valid),
            clip_frac_high=valid_mean((ratio > high).double(), valid),
        )
        return policy_loss + config.kl_coef * kl, metrics


def _pick(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities (B, L) of tokens (B, L), in float64."""
    return log_probs.gather(-1, tokens[..., None])[..., 0].double()


def _kl(new: Tensor, other: Tensor) -> Tensor:
    """KL (B, L) of log-probabilities (B, L, S); states that are impossible for both add nothing."""
    possible = torch.isfinite(new)
    difference = torch.where(possible, new, 0.0) - torch.where(possible, other, 0.0)
    return (torch.where(possible, new, float("-inf")).exp() * difference).sum(-1).double()
