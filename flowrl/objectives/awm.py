"""Advantage-weighted matching: the clipped ratio of GRPO with a flow-matching surrogate of log p(x0).

For a noise level t and noise eps drawn as in pretraining, x_t = (1 - t) x0 + t eps, u = eps - x0,

    l(v) = -mean_dims (v(x_t, t) - u)^2
    rho  = exp(l(v) - l(v_old)),   at the same t and eps
    loss = mean over rows of max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))
           + kl_coef mean_dims (v - v_ref)^2

Before the first update rho = 1, and the gradient is that of A times the pretraining loss: fitted towards
good samples and away from bad ones.

Source: arXiv 2509.25050.
Differs from the authors' code: the weight w(t) of l is 1, and one noise level serves all rows of a unit.
Published clip ranges and times were not found; ours are labelled by their defaults.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.objective import ForwardStep, Metrics, Times, draw_sigma, masked_mean, to_metrics, valid_mean
from flowrl.registry import ComponentConfig, register

LOG_RATIO_LIMIT = 20.0


@register("objective", "awm")
class AWM:
    """PPO's clipped objective on the forward process."""

    unit: ClassVar[Literal["trajectory", "forward"]] = "forward"
    acts: ClassVar[Literal["policy", "old", "reference"]] = "old"
    family: ClassVar[Literal["flow", "tokens", "any"]] = "flow"

    class Config(ComponentConfig):
        """Options of `AWM`."""

        clip_low: float = Field(1e-2, gt=0, lt=1, description="the ratio is clipped at 1 - clip_low")
        clip_high: float = Field(1e-2, gt=0, description="the ratio is clipped at 1 + clip_high")
        times: Times = Field("uniform", description="how a unit's noise level is drawn")
        units_per_micro_batch: int = Field(4, ge=1, description="noise levels per micro-batch and pass")
        kl_coef: float = Field(0.0, ge=0, description="weight of the squared distance to the reference")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config
        self.needs_reference = config.kl_coef > 0
        self.units_per_micro_batch = config.units_per_micro_batch

    def __call__(self, step: ForwardStep) -> tuple[Tensor, Metrics]:
        """The loss, a scalar, and metrics over valid rows."""
        config, valid, clean = self.config, step.valid, step.latents
        sigma = draw_sigma(config.times, step.sigmas, step.generator)
        device = step.generator.device
        noise = torch.randn(clean.shape, generator=step.generator, device=device).to(clean)
        noisy, target = (1 - sigma) * clean + sigma * noise, noise - clean
        with torch.no_grad():
            old = step.predict_old(noisy, sigma)
            reference = step.predict_reference(noisy, sigma) if self.needs_reference else old
        new = step.predict(noisy, sigma)  # last: no adapter is switched between it and backward

        difference = _mean_events((old - target).square()) - _mean_events((new - target).square())
        log = torch.where(valid, difference, torch.zeros_like(difference))
        ratio = log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        low, high = 1 - config.clip_low, 1 + config.clip_high
        rows = torch.maximum(-step.advantages * ratio, -step.advantages * ratio.clamp(low, high))
        policy_loss = masked_mean(rows, valid)
        kl = torch.zeros_like(policy_loss)
        if self.needs_reference:
            kl = masked_mean(_mean_events((new - reference).square()), valid)
        centre = valid_mean(ratio, valid)
        metrics = to_metrics(
            policy_loss=policy_loss,
            kl=kl,
            ratio_mean=centre,
            ratio_std=valid_mean((ratio - centre).square(), valid).sqrt(),
            log_ratio_max=log.abs().max(),
            clip_frac_low=valid_mean((ratio < low).float(), valid),
            clip_frac_high=valid_mean((ratio > high).float(), valid),
        )
        return policy_loss + config.kl_coef * kl, metrics


def _mean_events(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1)
