"""GRPO of discrete flows (dFlowGRPO): clipped-ratio policy gradient on the transitions of a discrete flow.

A step's action is the next token of every position, scored by rates and posterior together. With the
log-ratios l_d = log p(y_d) - log p_old(y_d) of a row's positions d, and a mean over some of them
(``average``),

    level sequence   rho = exp(mean l_d)         rows = max(-A rho, -A clip(rho))
    level token      rho_d = exp(l_d)            rows = mean over d of max(-A rho_d, -A clip(rho_d))
    level dim        rho = exp(mean clip(l_d))   rows = -A rho
                     l_d clipped to log(1 - clip_low) .. log(1 + clip_high)
    loss = discount^k mean over rows of rows + kl_coef * KL

At rho = 1 all levels have the same gradient, that of -A times the mean log-probability. ``average``:

    all          every position (published)
    changeable   those whose next token depends on the network. On a masked path these are the masks, and a
                 mean over all positions shrinks the log-ratio of step k by about their share
    changed      those whose token did change

Positions that are not averaged have no gradient. A known token has probability 1 and log-ratio 0 anyway.
"changed" picks positions by the action, which biases the gradient on uniform and metric paths: a baseline
no longer cancels. Clipping at level "dim" stops a position's gradient for either sign of A, unlike PPO's.

KL to the reference, averaged over the same positions: "exact" sums over the vocabulary; "k3" is
rho_d (r - 1 - log r) with r = p_ref(y) / p(y). With the position's ratio rho_d in it, both its value and its
gradient are unbiased for KL(p || p_ref), as long as all or changeable positions are counted: without it, the
gradient at p = p_old would be that of KL(p_ref || p). With the kernels' rate_mc it is an upper bound.
The metrics ``clip_frac_*`` say how many rows have a geometric mean outside the range, at every level.

Source: arXiv 2605.09291 (published for images: sequence, all, clip 1e-3 and 1.5e-3, no KL, discount 1; for
text KL .01).
Differs from the authors' code: exact log-probabilities by default (kernels); their k3 has r upside down,
which with y from p estimates chi^2(p || p_ref) - KL(p || p_ref), and no ratio; steps whose law does not
depend on the network are never trained; "changeable".
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.mdp.token_transitions import TokenTransition
from flowrl.objective import Metrics, TrajectoryStep, masked_mean, to_metrics, valid_mean
from flowrl.registry import ComponentConfig, register

LOG_RATIO_LIMIT = 20.0


@register("objective", "dflow_grpo")
class DFlowGRPO:
    """PPO's clipped objective for one transition of token states."""

    unit: ClassVar[Literal["trajectory", "forward"]] = "trajectory"
    acts: ClassVar[Literal["policy", "old", "reference"]] = "policy"
    family: ClassVar[Literal["flow", "tokens", "any"]] = "tokens"

    class Config(ComponentConfig):
        """Options of `DFlowGRPO`."""

        level: Literal["sequence", "token", "dim"] = Field(
            "sequence", description="where the ratio is clipped"
        )
        average: Literal["all", "changeable", "changed"] = Field("all", description="positions of the mean")
        clip_low: float = Field(1e-3, gt=0, lt=1, description="the ratio is clipped at 1 - clip_low")
        clip_high: float = Field(1.5e-3, gt=0, description="the ratio is clipped at 1 + clip_high")
        discount: float = Field(1.0, gt=0, le=1, description="the policy loss of step k times discount^k")
        kl: Literal["exact", "k3"] = Field("exact", description="how the KL to the reference is estimated")
        kl_coef: float = Field(0.0, ge=0, description="weight of the KL a position")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config
        self.needs_reference = config.kl_coef > 0

    def __call__(self, step: TrajectoryStep) -> tuple[Tensor, Metrics]:
        """The loss (float64 scalar) and metrics, means over valid rows except ``log_ratio_max``."""
        config, transition, valid = self.config, step.transition, step.valid
        if not isinstance(transition, TokenTransition) or step.old_token_log_probs is None:
            raise TypeError(f"dflow_grpo needs steps of tokens, not {type(transition).__name__}")
        counted = self._counted(transition, step.action) & valid[:, None]
        new = transition.token_log_probs(step.action)
        ratios = torch.where(counted, new - step.old_token_log_probs, 0.0)
        log = mean_over(ratios, counted)
        advantages = torch.where(valid, step.advantages, 0.0).double()
        rows = self._rows(ratios, log, counted, advantages)
        policy_loss = config.discount**step.index * masked_mean(rows, valid)
        kl = self._kl(step, transition, new, ratios, counted)
        ratio = log.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        low, high = 1 - config.clip_low, 1 + config.clip_high
        metrics = to_metrics(
            policy_loss=policy_loss,
            kl=kl,
            ratio_mean=valid_mean(ratio, valid),
            log_ratio_max=ratios.abs().max(),
            clip_frac_low=valid_mean((ratio < low).double(), valid),
            clip_frac_high=valid_mean((ratio > high).double(), valid),
            positions=valid_mean(counted.sum(1).double(), valid),
            changed=valid_mean((transition.state(step.action) != transition.x).double().mean(1), valid),
        )
        return policy_loss + config.kl_coef * kl, metrics

    def _counted(self, transition: TokenTransition, action: Tensor) -> Tensor:
        if self.config.average == "all":
            return torch.ones_like(transition.x, dtype=torch.bool)
        if self.config.average == "changeable":
            return transition.free
        return transition.state(action) != transition.x

    def _rows(self, ratios: Tensor, log: Tensor, counted: Tensor, advantages: Tensor) -> Tensor:
        """The policy loss (B,) of each row, by the option `level`."""
        low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
        if self.config.level == "token":
            ratio = ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            gains = advantages[:, None]
            return mean_over(torch.maximum(-gains * ratio, -gains * ratio.clamp(low, high)), counted)
        if self.config.level == "dim":
            return -advantages * mean_over(ratios.clamp(math.log(low), math.log(high)), counted).exp()
        ratio = log.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))

    def _kl(
        self,
        step: TrajectoryStep,
        transition: TokenTransition,
        new: Tensor,
        ratios: Tensor,
        counted: Tensor,
    ) -> Tensor:
        if not self.needs_reference:
            return new.new_zeros(())
        if not isinstance(step.reference, TokenTransition):
            raise ValueError(f"kl_coef = {self.config.kl_coef:g} needs the reference transition, got None")
        if self.config.kl == "exact":
            values = transition.token_kl(step.reference)
        else:
            log = step.reference.token_log_probs(step.action) - new
            importance = ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            values = importance * (torch.expm1(log.clamp(max=LOG_RATIO_LIMIT)) - log)
        return masked_mean(mean_over(torch.where(counted, values, 0.0), counted), step.valid)


def mean_over(values: Tensor, counted: Tensor) -> Tensor:
    """The mean (B,) over the counted positions of (B, L); 0 where none is."""
    return torch.where(counted, values, 0.0).sum(1) / counted.sum(1).clamp(min=1)
