"""SLAS: advantages without the prompt's own std, shaped by a power, scaled over the whole batch.

    d_i = r_i - mean of its group
    z_i = d_i / s,                   s the std over the whole batch of d ("centred") or of r ("raw")
    A_i = sign(z_i) |z_i|^(1 + gamma),  then divided by its std over the batch (``rescale``),
                                        then clipped to +-clip

Dividing by each prompt's own std gives a group of tiny and a group of large reward gaps the same
advantages. Without it the ascent direction is linear in d (gamma = 0); gamma > 0 weakens small gaps and
strengthens large ones. With ``rescale`` the first division is immaterial and only the final one counts.

Where the power comes from. In one group with policy pi (uniform over its samples), a change delta of the
probabilities that keeps their sum and has bounded length in the metric that makes large |d| cheap,

    maximise sum_i d_i delta_i   subject to   sum_i delta_i = 0,   sum_i delta_i^2 / (pi_i |d_i|^gamma) <= c,

is solved by delta_i = k pi_i |d_i|^gamma (d_i - mu), mu = E_pi[sign(d) |d|^(1+gamma)] / E_pi[|d|^gamma].
The published form drops mu, so that a skewed group's advantages do not sum to zero; ``recenter`` keeps it.

Several rewards: sum_then_normalize uses r = sum_m w_m r_m; normalize_then_sum divides each reward's d_m
by its own s first, and uses d = sum_m w_m d_m / s_m / sum_m |w_m|.

Source: arXiv 2605.10937, theorems 2 and 3 (base DanceGRPO, on SD 1.4 and FLUX.1-dev, clip 5).
Not published where we could look, so ours: gamma 0.5, where the batch std enters, ``recenter``.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.advantage import Advantages, group_mean, group_std
from flowrl.registry import ComponentConfig, register


@register("advantage", "slas")
class SLAS:
    """Centred by the group, shaped by a power, scaled by the batch."""

    class Config(ComponentConfig):
        """Options of `SLAS`."""

        gamma: float = Field(0.5, ge=0, description="exponent beyond 1; 0 is linear")
        scale: Literal["centred", "raw"] = Field("centred", description="whose batch std the rewards get")
        recenter: bool = Field(False, description="exact tangent-space solution: sums to 0 in every group")
        rescale: bool = Field(True, description="divide by the batch std again after shaping")
        combine: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
            "sum_then_normalize", description="order of the two for several rewards"
        )
        std_floor: float = Field(1e-5, ge=0, description="a smaller std, relative to the reward, counts as 0")
        clip: float | None = Field(5.0, gt=0, description="bound on |advantage|; None for no bound")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config

    def __call__(self, scores: Tensor, weights: Tensor, groups: Tensor) -> Advantages:
        """Advantages (N,) from scores (N, R), weights (R,) and group ids (N,)."""
        valid = torch.isfinite(scores).all(dim=1)
        values = torch.zeros(len(scores), device=scores.device)
        metrics = {"frac_zero_std": 1.0, "reward_std_group": 0.0, "adv_clip_frac": 0.0}
        if bool(valid.any()):
            index = torch.unique(groups[valid], return_inverse=True)[1]
            estimate, metrics = self._estimate(scores[valid].double(), weights.double(), index)
            values[valid] = estimate.float()
        return Advantages(values, valid, metrics)

    def _estimate(self, scores: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, dict[str, float]]:
        columns = [(w, c) for w, c in zip(weights.tolist(), scores.unbind(1), strict=True) if w != 0]
        zero = torch.zeros_like(scores[:, 0])
        total = sum((w * c for w, c in columns), zero)
        if self.config.combine == "sum_then_normalize":
            scaled = self._scaled(
                total, index, float(sum((abs(w) * c.abs() for w, c in columns), zero).max())
            )
        else:
            norm = sum(abs(w) for w, _ in columns)
            parts = (w / norm * self._scaled(c, index, float(c.abs().max())) for w, c in columns)
            scaled = self._scaled(sum(parts, zero), index, 1.0)
        shaped = self._shape(scaled, index)
        if self.config.rescale:
            shaped = _divide(shaped, _batch_std(shaped))
        clipped = shaped if self.config.clip is None else shaped.clamp(-self.config.clip, self.config.clip)
        metrics = {
            "frac_zero_std": float((group_std(scaled, index, False) == 0).double().mean()),
            "reward_std_group": float(group_std(total, index, False).mean()),
            "adv_clip_frac": float((clipped != shaped).double().mean()),
        }
        return clipped, metrics

    def _scaled(self, values: Tensor, index: Tensor, scale: float) -> Tensor:
        """z (N,): centred by group and divided by the batch's std; groups without spread give 0."""
        centred = values - group_mean(values, index)[index]
        flat = group_std(values, index, False) <= self.config.std_floor * scale
        centred = torch.where(flat[index], torch.zeros_like(centred), centred)
        return _divide(centred, _batch_std(centred if self.config.scale == "centred" else values))

    def _shape(self, z: Tensor, index: Tensor) -> Tensor:
        metric = z.abs().pow(self.config.gamma)
        if not self.config.recenter:
            return metric * z
        mu = _divide(group_mean(metric * z, index), group_mean(metric, index))
        return metric * (z - mu[index])


def _batch_std(values: Tensor) -> Tensor:
    return group_std(values, torch.zeros(len(values), dtype=torch.int64, device=values.device), False)


def _divide(values: Tensor, by: Tensor) -> Tensor:
    """``values / by``, 0 where ``by`` is 0."""
    return torch.where(
        by > 0, values / torch.where(by > 0, by, torch.ones_like(by)), torch.zeros_like(values)
    )
