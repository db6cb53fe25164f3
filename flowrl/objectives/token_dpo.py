"""Direct preference optimisation of discrete flows, on the best and the worst sample of a group.

A unit draws one time t for all rows. Of a row with tokens x1 and noisy x ~ p_t(. | x1), with the mean over
the positions that are not known already,

    s = mean_d (log p(x1_d | x) - log p_ref(x1_d | x))
    loss = mean over pairs of -log sigmoid(beta (s_best - s_worst))

s stands in for the log-ratio of the samples' likelihoods: on a masked path L mean_d (...) times a weight of t
is the difference of two bounds of them, as in diffusion DPO (the factor is part of beta); on uniform and
metric paths, whose bounds hold p(x) as well, it is a heuristic. A pair is the rows with the
highest and the lowest advantage of a group within the micro-batch; a group without two different ones gives
none. At p = p_ref the gradient is that of -(beta / 2)(s_best - s_worst).

Source: arXiv 2311.12908 (diffusion DPO), 2505.19223 (for masked language models); the baseline of 2605.09291.
Differs from the authors' code: pairs from the policy's own samples of the iteration, one time a unit, and a
mean in place of a sum over positions.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flowrl.objective import ForwardStep, Metrics, to_metrics
from flowrl.registry import ComponentConfig, register


@register("objective", "token_dpo")
class TokenDPO:
    """Preference of the best over the worst sample of each group."""

    unit: ClassVar[Literal["trajectory", "forward"]] = "forward"
    acts: ClassVar[Literal["policy", "old", "reference"]] = "policy"
    family: ClassVar[Literal["flow", "tokens", "any"]] = "tokens"
    needs_reference = True

    class Config(ComponentConfig):
        """Options of `TokenDPO`."""

        beta: float = Field(10.0, gt=0, description="how strongly a preference pulls away from the reference")
        units_per_micro_batch: int = Field(4, ge=1, description="times t per micro-batch and pass")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config
        self.units_per_micro_batch = config.units_per_micro_batch

    def __call__(self, step: ForwardStep) -> tuple[Tensor, Metrics]:
        """The loss, a scalar, and metrics over pairs."""
        if step.noised is None:
            raise TypeError("token_dpo needs tokens")
        draw = torch.rand((), generator=step.generator, device=step.generator.device, dtype=torch.float64)
        sigma = float(1 - draw)  # in (0, 1]: something is left to say
        noisy = step.noised(step.latents, sigma)
        with torch.no_grad():
            reference = step.predict_reference(noisy, sigma)
        posterior = step.predict(noisy, sigma)  # last: no adapter is switched between it and backward
        unknown = torch.isfinite(posterior.detach()).sum(-1) > 1
        gain = _pick(posterior, step.latents) - _pick(reference, step.latents)
        scores = torch.where(unknown, gain, 0.0).sum(1) / unknown.sum(1).clamp(min=1)
        pairs = preferred_pairs(step.groups, step.advantages, step.valid)
        if not pairs:
            zero = (0.0 * torch.where(unknown, gain, 0.0)).sum()
            return zero, to_metrics(policy_loss=zero, pairs=zero, margin=zero)
        best, worst = (torch.tensor(rows, device=scores.device) for rows in zip(*pairs, strict=True))
        margins = scores[best] - scores[worst]
        loss = -F.logsigmoid(self.config.beta * margins).mean()
        count = torch.tensor(float(len(pairs)))
        return loss, to_metrics(policy_loss=loss, pairs=count, margin=margins.mean())


def preferred_pairs(groups: tuple[int, ...], advantages: Tensor, valid: Tensor) -> list[tuple[int, int]]:
    """The rows (best, worst) of each group that has two valid rows of different advantage."""
    pairs = []
    for group in dict.fromkeys(groups):
        rows = [row for row, other in enumerate(groups) if other == group and bool(valid[row])]
        ranked = sorted(rows, key=lambda row: float(advantages[row]))
        if len(ranked) > 1 and float(advantages[ranked[-1]]) > float(advantages[ranked[0]]):
            pairs.append((ranked[-1], ranked[0]))
    return pairs


def _pick(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities (B, L) of tokens (B, L), in float64."""
    return log_probs.gather(-1, tokens[..., None])[..., 0].double()
