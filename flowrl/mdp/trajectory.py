"""What a rollout records: one micro-batch, no more than replay needs.

Shapes: B rows, ``*`` event dims. All tensors are detached, in float32 (log-probabilities in float64).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowrl.mdp.steps import StepPlan
from flowrl.mdp.token_transitions import TokenTransition
from flowrl.mdp.transitions import Gaussian, Transition, projection


@dataclass(frozen=True)
class Request:
    """What a micro-batch asks for: B prompts and the seeds of their noise.

    Attributes:
        prompts: (B,) texts.
        metadata: (B,) records that the prompts came with.
        groups: (B,) the group (prompt instance) that each row belongs to.
        initial_seeds: (B,) seeds of the initial noise; equal within a group if it is shared.
        step_seeds: (B,) seeds of the noise of the steps.
    """

    prompts: tuple[str, ...]
    metadata: tuple[dict[str, Any], ...]
    groups: tuple[int, ...]
    initial_seeds: tuple[int, ...]
    step_seeds: tuple[int, ...]

    def __len__(self) -> int:
        """The number of rows B."""
        return len(self.prompts)


@dataclass
class Trajectory:
    """One rolled-out micro-batch.

    Attributes:
        request: what was asked for.
        sigmas: (T + 1,) noise levels of the sampler, descending.
        plan: which steps were stochastic and which are trained.
        states: step k -> state x_k (B, *), for every trained k and its k + 1.
        log_probs: step k -> (B,) log-probability of the recorded action, summed over event dims.
        projections: step k -> (B,) sum over event dims of noise times mean, of Gaussian steps.
        token_log_probs: step k -> (B, L) log-probability of the action by position, of token steps.
        actions: step k -> the recorded action, where it is more than the next state.
        latents: (B, *) final state; given up after decoding unless the objective trains on it.
    """

    request: Request
    sigmas: tuple[float, ...]
    plan: StepPlan
    states: dict[int, Tensor] = field(default_factory=dict)
    log_probs: dict[int, Tensor] = field(default_factory=dict)
    projections: dict[int, Tensor] = field(default_factory=dict)
    token_log_probs: dict[int, Tensor] = field(default_factory=dict)
    actions: dict[int, Tensor] = field(default_factory=dict)
    latents: Tensor | None = None

    def record(self, step: int, transition: Transition, action: Tensor, noise: Tensor) -> None:
        """Keeps what the replay of a step compares with."""
        if isinstance(transition, TokenTransition):
            self.token_log_probs[step] = transition.token_log_probs(action)
        self.log_probs[step] = transition.log_prob(action)
        if isinstance(transition, Gaussian):
            self.projections[step] = projection(noise, transition.mean)
        if transition.state(action) is not action:
            self.actions[step] = action

    def action(self, step: int) -> Tensor:
        """The recorded action of a trained step."""
        return self.actions.get(step, self.states[step + 1])

    def stored_latents(self) -> int:
        """How many latents each sample keeps: K + 1 for K consecutive trained steps."""
        held = {tensor.data_ptr() for tensor in self.states.values()}
        if self.latents is not None:
            held.add(self.latents.data_ptr())
        return len(held)


@dataclass(frozen=True)
class Replay:
    """One recorded step, recomputed under the current weights.

    Attributes:
        transition: the distribution over the next state.
        log_prob: (B,) float64, of the recorded action.
        prediction: (B, *) what the network predicted, guidance included.
        noise: (B, *noise_shape) the standard noise that the action was made of.
    """

    transition: Transition
    log_prob: Tensor
    prediction: Tensor
    noise: Tensor


def rows_of(values: Sequence[Any], start: int, size: int) -> tuple[Any, ...]:
    """The rows [start, start + size) of a per-sample sequence."""
    return tuple(values[start : start + size])
