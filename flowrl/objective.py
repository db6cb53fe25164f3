"""What an objective is given and what it returns; the objectives themselves live in flowrl/objectives.

Two kinds of work unit reach an objective. A `TrajectoryStep` is one recorded transition of a
micro-batch, replayed with gradient (policy-gradient objectives). A `ForwardStep` is the clean latents of
a micro-batch with a way to query the network at any noise level (forward-process objectives).

An objective never calls backward and never sees the config or the distributed engine.
Shapes: B rows of a micro-batch, ``*`` event dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from flowrl.mdp.transitions import Transition

Metrics = dict[str, float]


@dataclass(frozen=True)
class TrajectoryStep:
    """One transition of a micro-batch, replayed under the policy being trained.

    Attributes:
        index: the sampler step k.
        sigma, sigma_next: noise levels of the transition, 1 = noise.
        transition: the distribution under the current weights, with gradient.
        reference: the distribution under the reference policy, or None if the objective needs none.
        log_prob: (B,) float64, of the recorded action under `transition`, summed over event dims.
        old_log_prob: (B,) float64, under the policy that acted.
        action: (B, *) the recorded next state, with what else a token step drew.
        noise: (B, *) the standard noise that the action was made of.
        old_projection: (B,) float64, sum over event dims of noise times the acting policy's mean; None
            unless the step is Gaussian.
        advantages: (B,) float32.
        valid: (B,) bool; False where a sample's reward could not be computed.
        old_token_log_probs: (B, L) float64, `old_log_prob` by position; None unless states are tokens.
    """

    index: int
    sigma: float
    sigma_next: float
    transition: Transition
    reference: Transition | None
    log_prob: Tensor
    old_log_prob: Tensor
    action: Tensor
    noise: Tensor
    old_projection: Tensor | None
    advantages: Tensor
    valid: Tensor
    old_token_log_probs: Tensor | None = None


@dataclass(frozen=True)
class ForwardStep:
    """The clean samples of a micro-batch, for objectives on the forward process.

    Attributes:
        latents: (B, *) float32, clean latents x0 in the sampler's own layout; or tokens (B, L).
        predict: ``predict(x_t, sigma) -> velocity`` (B, *) under the current weights, with gradient;
            sigma is one float for all rows. Of tokens: log-probabilities (B, L, S) of the clean ones.
        predict_old: the same under the acting policy, without gradient.
        predict_reference: the same under the reference policy, without gradient.
        sigmas: the noise levels of the sampler's grid, descending, without the final 0; an objective
            draws its own times in between.
        generator: randomness for times and noises of this unit, seeded by (run, iteration, unit).
        advantages: (B,) float32.
        valid: (B,) bool.
        groups: (B,) which rows belong together.
        noised: ``noised(tokens, sigma) -> tokens`` (B, L) by the path of the pipeline; None of a flow.
    """

    latents: Tensor
    predict: Callable[[Tensor, float], Tensor]
    predict_old: Callable[[Tensor, float], Tensor]
    predict_reference: Callable[[Tensor, float], Tensor]
    sigmas: tuple[float, ...]
    generator: torch.Generator
    advantages: Tensor
    valid: Tensor
    groups: tuple[int, ...] = ()
    noised: Callable[[Tensor, float], Tensor] | None = None


class Objective(Protocol):
    """The contract of an objective (register one with ``@register("objective", name)``).

    Class attributes:
        unit: "trajectory" or "forward": which work unit it takes.
        acts: who makes the samples: the "policy" that is trained, its slow "old" copy, or the "reference".
        family: which states it can train on: those of a "flow", "tokens", or "any".

    Attributes:
        needs_reference: whether the reference policy is evaluated for every unit.
        units_per_micro_batch: for "forward" objectives, how many units each micro-batch gives.
        on_policy: whether a sample may serve one update only, since the loss has no ratio; False if absent.
    """

    unit: ClassVar[Literal["trajectory", "forward"]]
    acts: ClassVar[Literal["policy", "old", "reference"]]
    family: ClassVar[Literal["flow", "tokens", "any"]]
    needs_reference: bool

    @property
    def units_per_micro_batch(self) -> int:
        """How many units each micro-batch gives to a "forward" objective."""
        ...

    def __call__(self, step: Any) -> tuple[Tensor, Metrics]:
        """The loss, a scalar that is the mean over the micro-batch's rows, and metrics to average."""
        ...


def masked_mean(values: Tensor, valid: Tensor) -> Tensor:
    """Sum over valid rows over the number of all rows B: micro-batches keep equal weight.

    Invalid rows are selected out rather than multiplied by zero, so that their NaN cannot spread.
    """
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    return torch.where(valid, values, zero).sum() / values.shape[0]


def valid_mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid rows, 0 if there is none: for metrics, whose scale must not depend on masking."""
    return torch.where(valid, values, torch.zeros_like(values)).sum() / valid.sum().clamp(min=1)


def to_metrics(**scalars: Tensor) -> Metrics:
    """Scalars as floats, brought to the host in one transfer."""
    stacked = torch.stack([scalar.detach().double() for scalar in scalars.values()])
    return dict(zip(scalars, stacked.tolist(), strict=True))


Times = Literal["grid", "uniform", "logit_normal"]


def draw_sigma(times: Times, sigmas: tuple[float, ...], generator: torch.Generator) -> float:
    """One noise level for a forward-process unit.

    Args:
        times: one of `sigmas` with equal chances ("grid"), U(0, 1) ("uniform"), or the sigmoid of a
            standard normal ("logit_normal").
        sigmas: the sampler's grid without the final 0.
        generator: source of randomness.
    """
    device = generator.device
    if times == "grid":
        return sigmas[int(torch.randint(len(sigmas), (), generator=generator, device=device))]
    if times == "uniform":
        return float(torch.rand((), generator=generator, device=device, dtype=torch.float64))
    return float(torch.randn((), generator=generator, device=device, dtype=torch.float64).sigmoid())
