"""Group-relative advantages: a sample's reward against those of the other samples of its prompt.

    A_i = (r_i - mean of its group) / (s + eps),      clipped to +-clip at the end

``std`` names s: of the group ("group"), of all rewards of the batch, differences between groups included
("batch"), or 1 ("none", Dr. GRPO). Several rewards r_m with weights w_m are combined in one of two orders:

    sum_then_normalize:  r = sum_m w_m r_m, then as above
    normalize_then_sum:  each r_m by its own group's mean and std; r = sum_m w_m A_m / sum_m |w_m|;
                         then as above, with ``std`` group (CM-GRPO) | batch (GDPO) | none (MixGRPO)

Source: arXiv 2505.05470 (Flow-GRPO: population std + 1e-4, clip 5), arXiv 2505.07818 (DanceGRPO: unbiased
std + 1e-8, clip 5), arXiv 2503.20783 (no std), arXiv 2605.15190, alg. 2 (CM-GRPO), arXiv 2601.05242 (GDPO).
Differs from the authors' code:
  * A group whose std is at most ``std_floor`` times the reward's own scale gives exactly 0: its spread is
    rounding, and dividing by it would make +-1 of it. The scale is the batch's largest |r|, or largest
    sum_m |w_m r_m| for a sum. eps alone cannot do this for rewards of every scale, so it is small here.
  * A sample with a score that is not finite is left out, exactly as if it had not been drawn.
  * A group of one sample gives 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.advantage import Advantages, group_mean, group_std
from flowrl.registry import ComponentConfig, register


@register("advantage", "group_relative")
class GroupRelative:
    """Centred by the group, scaled by the group, the batch, or not at all."""

    class Config(ComponentConfig):
        """Options of `GroupRelative`."""

        std: Literal["group", "batch", "none"] = Field("group", description="what the rewards are divided by")
        unbiased: bool = Field(False, description="std with count - 1, not count, in its denominator")
        combine: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
            "sum_then_normalize", description="order of the two for several rewards"
        )
        eps: float = Field(1e-6, ge=0, description="added to every std")
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
        total = sum((w * c for w, c in columns), torch.zeros_like(scores[:, 0]))
        spread = group_std(total, index, self.config.unbiased)
        if self.config.combine == "sum_then_normalize":
            sizes = sum((abs(w) * c.abs() for w, c in columns), torch.zeros_like(total))
            scale = float(sizes.max())
            flat = spread <= self.config.std_floor * scale
            raw = self._normalise(total, index, self.config.std, scale)
        else:
            scales = [float(c.abs().max()) for _, c in columns]
            parts = [self._normalise(c, index, "group", s) for (_, c), s in zip(columns, scales, strict=True)]
            flat = torch.stack([group_std(part, index, False) == 0 for part in parts]).all(dim=0)
            norm = sum(abs(w) for w, _ in columns)
            pairs = zip(columns, parts, strict=True)
            combined = sum((w / norm * part for (w, _), part in pairs), torch.zeros_like(total))
            raw = self._normalise(combined, index, self.config.std, 1.0)
        clipped = raw if self.config.clip is None else raw.clamp(-self.config.clip, self.config.clip)
        metrics = {
            "frac_zero_std": float(flat.double().mean()),
            "reward_std_group": float(spread.mean()),
            "adv_clip_frac": float((clipped != raw).double().mean()),
        }
        return clipped, metrics

    def _normalise(self, values: Tensor, index: Tensor, std: str, scale: float) -> Tensor:
        """Centres by group and divides by the std named; groups without spread give 0."""
        centred = values - group_mean(values, index)[index]
        within = group_std(values, index, self.config.unbiased)
        flat = within <= self.config.std_floor * scale
        if std == "group":
            centred = centred / (within[index] + self.config.eps)
        elif std == "batch":
            everything = group_std(values, torch.zeros_like(index), self.config.unbiased)
            centred = centred / (everything + self.config.eps)
        return torch.where(flat[index], torch.zeros_like(centred), centred)
