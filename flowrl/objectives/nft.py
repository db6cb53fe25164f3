"""DiffusionNFT: the reward enters a flow-matching loss on the clean samples; no trajectory, no log-prob.

With optimality r = clip(A / (2 adv_max) + 1/2, 0, 1) of a sample, a noise level t and noise eps,

    x_t = (1 - t) x0 + t eps,   u = eps - x0
    v+ = (1 - beta) v_old + beta v,     v- = (1 + beta) v_old - beta v
    loss = mean over rows of adv_max / beta (r l(v+) + (1 - r) l(v-)) + kl_coef mean_dims (v - v_ref)^2

where v_old is the acting policy and l is one of

    none:          l(w) = mean_dims (w - u)^2
    x0_normalised: l(w) = mean_dims (y - x0)^2 / max(mean_dims |y - x0|, 1e-5), y = x_t - t w, with the
                   denominator detached: t times the former, over a self-normalising error

Fixed point. For weighting "none", dl/dv = 0 gives E[r (v+ - u) - (1 - r)(v- - u) | x_t] = 0, that is

    v = v_old + (1 / beta) E[(2 r - 1)(u - v_old) | x_t]

the reward-weighted residual. If A = 0 for all, r = 1/2 and each row's minimum is at v = v_old. Changing
the sign of A changes the sign of v - v_old. The factor adv_max gives the gradient A's own scale.

Source: arXiv 2509.16117 (published: adv_max 5; the acting policy follows the trained one by a slow
average, never a copy after every step).
Differs from the authors' code: one noise level for all rows of a unit, drawn again for every unit, where
they draw one per sample and visit the whole grid.
Sampling is free of guidance by design, so that guidance is distilled. Do not use it on a few-step
distilled model: the flow-matching regression undoes the distillation.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.objective import ForwardStep, Metrics, Times, draw_sigma, masked_mean, to_metrics, valid_mean
from flowrl.registry import ComponentConfig, register

MIN_ERROR = 1e-5  # floor of the self-normalising error in x0 space


@register("objective", "nft")
class NFT:
    """Negative-aware fine-tuning on the forward process."""

    unit: ClassVar[Literal["trajectory", "forward"]] = "forward"
    acts: ClassVar[Literal["policy", "old", "reference"]] = "old"
    family: ClassVar[Literal["flow", "tokens", "any"]] = "flow"

    class Config(ComponentConfig):
        """Options of `NFT`."""

        beta: float = Field(1.0, gt=0, description="how far v+ and v- lie from v_old; smaller pushes harder")
        adv_max: float = Field(5.0, gt=0, description="advantage that counts as surely good")
        weighting: Literal["x0_normalised", "none"] = Field("x0_normalised", description="error of v+ and v-")
        times: Times = Field("grid", description="how a unit's noise level is drawn")
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

        advantages = torch.where(valid, step.advantages, torch.zeros_like(step.advantages))
        optimality = (advantages / (2 * config.adv_max) + 0.5).clamp(0, 1)
        positive = self._error((1 - config.beta) * old + config.beta * new - target, sigma)
        negative = self._error((1 + config.beta) * old - config.beta * new - target, sigma)
        rows = (optimality * positive + (1 - optimality) * negative) * (config.adv_max / config.beta)
        policy_loss = masked_mean(rows, valid)
        kl = torch.zeros_like(policy_loss)
        if self.needs_reference:
            kl = masked_mean(_mean_events((new - reference).square()), valid)
        metrics = to_metrics(
            policy_loss=policy_loss,
            positive_loss=valid_mean(positive, valid),
            negative_loss=valid_mean(negative, valid),
            old_deviation=valid_mean(_mean_events((new - old).square()), valid),
            optimality=valid_mean(optimality, valid),
            kl=kl,
        )
        return policy_loss + config.kl_coef * kl, metrics

    def _error(self, residual: Tensor, sigma: float) -> Tensor:
        """l (B,) of a velocity residual w - u; in x0 space the residual is -sigma (w - u)."""
        if self.config.weighting == "none":
            return _mean_events(residual.square())
        residual = sigma * residual
        size = _mean_events(residual.detach().abs()).clamp(min=MIN_ERROR)
        return _mean_events(residual.square()) / size


def _mean_events(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1)
