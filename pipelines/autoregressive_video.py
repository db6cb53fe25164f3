"""Autoregressive video as an MDP: chunk by chunk, each given the clean chunks before it.

With chunks n and denoising steps k, an action is the next state z_{n,k+1} of a chunk, with the density of the
kernel given z_{n,k} and the finished chunks x_1 .. x_{n-1} (arXiv 2605.15190, eq. 1 and 6). A step of this
wrapper is step k of all chunks: states, actions and means are those of the chunks side by side, and
log-probabilities sum over the chunks, since each one's law depends on the others through the history alone.
So K steps a chunk give K - 1 trained transitions, and objectives on transitions work as they do on images.

``replay`` says how a step is recomputed under the current weights, the history always by these weights too:

    packed    one forward over z1, x1, z2, x2, ..., zT under RAVEN's mask
    cached    the pipeline's own chunk loop with its cache, step k of each chunk, then the clean pass. With
              ``cached`` the log-ratio before the first update is exactly 0 in any dtype; with ``packed`` the
              recorded log-probabilities are those of a packed forward after the rollout, so it is 0 as well.

Both see the history's window as the acting policy saw it. ``history_gradient``: the loss on a chunk also
trains how the chunks before it are encoded into keys and values (published); without, keys and values of the
history are constants. The frames of the history are data in both.

``chunk_weighting`` gives late chunks more weight in a loss, or less: see `chunk_weights`.

Source: arXiv 2605.15190 (RAVEN, CM-GRPO).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.causal_attention import causal
from flowrl.mdp.chunks import chunk_weights
from flowrl.mdp.scheduler import Layout, as_state, layout_of, placed, unrounded
from flowrl.mdp.schedules import check_falling
from flowrl.mdp.seeds import standard_noise
from flowrl.mdp.steps import StepPlan
from flowrl.mdp.trajectory import Replay, Request, Trajectory
from flowrl.mdp.transitions import Gaussian, Transition
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.registry import ComponentConfig, register

LEGAL = ("FlowMatchLCMScheduler", "FlowMatchEulerDiscreteScheduler")


@register("wrapper", "autoregressive_video")
class AutoregressiveVideo(SamplerWrapper):
    """A pipeline that makes video chunk by chunk and asks its scheduler for each chunk's states."""

    family: ClassVar[str] = "flow"
    no_matching: ClassVar[str] = "a chunk is predicted given its history, which a noised clip does not have"

    class Config(ComponentConfig):
        """Options of `AutoregressiveVideo`."""

        replay: Literal["packed", "cached"] = Field("packed", description="how a step is recomputed")
        history_gradient: bool = Field(True, description="train how the history is encoded, too")
        chunk_weighting: float = Field(0.0, description="a of pi_a; -1 gives late chunks more weight")

    def __init__(self, config: Config, **collaborators: Any) -> None:
        """See `SamplerWrapper` for the collaborators.

        Raises:
            UserError: for a pipeline that does not make video in chunks.
        """
        name = type(collaborators["pipe"]).__name__
        if name != "CausalWanPipeline":
            raise UserError(
                f"model.wrapper autoregressive_video: {name} makes no video in chunks; use CausalWanPipeline"
            )
        super().__init__(**collaborators)
        self.config = config

    def check_scheduler(self, scheduler: Any) -> None:
        """Raises UserError unless the scheduler steps on the levels of a flow."""
        if type(scheduler).__name__ not in LEGAL:
            raise UserError(
                f"model.wrapper autoregressive_video: {type(scheduler).__name__}; legal: {', '.join(LEGAL)}"
            )

    def read_sigmas(self, scheduler: Any) -> tuple[float, ...]:
        """The (K + 1,) levels of a chunk's steps."""
        levels = tuple(float(level) for level in scheduler.sigmas)
        check_falling(levels)
        return levels

    # -- the MDP -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, request: Request, plan: StepPlan) -> Trajectory:
        """Makes the clips of a request and records the steps that a plan trains; see `SamplerWrapper`."""
        trajectory = Trajectory(request, (), plan)
        kept = {k + offset for k in plan.trained for offset in (0, 1)}
        states, means, noises = (defaultdict[int, list[Tensor]](list) for _ in range(3))
        finished: list[Tensor] = []
        last: list[Tensor | None] = [None]

        def on_step(call: int, prediction: Tensor, sample: Tensor) -> Tensor:
            k = call % self.num_steps
            if call == 0:
                trajectory.sigmas = self.read_sigmas(self.pipe.scheduler.base)
            state = as_state(sample) if k == 0 else unrounded(last[0], sample)
            sigma, sigma_next = trajectory.sigmas[k], trajectory.sigmas[k + 1]
            transition = self.transition(prediction, state, sigma, sigma_next, k in plan.stochastic)
            seeds = request.step_seeds if k in plan.stochastic else request.initial_seeds
            noise = standard_noise(seeds, call, transition.noise_shape, state.device)
            following = transition.sample(noise)
            if k in plan.trained:
                assert isinstance(transition, Gaussian)
                means[k].append(transition.mean)
                noises[k].append(noise)
            if k in kept:
                states[k].append(state)
            if k + 1 == self.num_steps:
                finished.append(following)
            last[0] = following
            return following

        self._run(request, on_step, slice(None), None, stochastic=plan.stochastic)
        trajectory.states = {k: torch.cat(chunks, dim=2) for k, chunks in states.items()}
        trajectory.latents = trajectory.states[self.num_steps] = torch.cat(finished, dim=2)
        for k in plan.trained:
            noise, action = torch.cat(noises[k], dim=2), trajectory.states[k + 1]
            if self.config.replay == "packed":
                transition = self._law(trajectory, k, self._packed(trajectory, k))
            else:
                std = self.kernel.std(trajectory.sigmas[k], trajectory.sigmas[k + 1])
                transition = self._weighted(Gaussian(torch.cat(means[k], dim=2), std))
            trajectory.record(k, transition, action, noise)
        return trajectory

    def replay(self, trajectory: Trajectory, index: int) -> Replay:
        """Recomputes step `index` of all chunks under the current weights; see `SamplerWrapper`."""
        if self.config.replay == "packed":
            prediction = self._packed(trajectory, index)
        else:
            prediction = self._cached(trajectory, index)
        transition = self._law(trajectory, index, prediction)
        action = trajectory.action(index)
        return Replay(transition, transition.log_prob(action), prediction, self._noise(trajectory, index))

    def _law(self, trajectory: Trajectory, index: int, prediction: Tensor) -> Transition:
        sigma, sigma_next = trajectory.sigmas[index], trajectory.sigmas[index + 1]
        return self._weighted(self.transition(prediction, trajectory.states[index], sigma, sigma_next))

    def _weighted(self, transition: Transition) -> Transition:
        if self.config.chunk_weighting == 0:
            return transition
        assert isinstance(transition, Gaussian)
        length = self.pipe.layout.frames_per_chunk
        weights = chunk_weights(transition.mean.shape[2] // length, self.config.chunk_weighting)
        spread = torch.tensor(weights, dtype=torch.float32).repeat_interleave(length).view(1, -1, 1, 1)
        return Gaussian(transition.mean, transition.std, spread.to(transition.mean.device))

    def _noise(self, trajectory: Trajectory, index: int) -> Tensor:
        """The noise of the recorded action, made anew from its seeds."""
        state = trajectory.states[index]
        length = self.pipe.layout.frames_per_chunk
        shape = (state.shape[1], length, *state.shape[3:])
        seeds = trajectory.request.step_seeds
        calls = range(index, state.shape[2] // length * self.num_steps, self.num_steps)
        return torch.cat([standard_noise(seeds, call, shape, state.device) for call in calls], dim=2)

    def _packed(self, trajectory: Trajectory, index: int) -> Tensor:
        """Predictions of all chunks by one forward."""
        request, sigma = trajectory.request, trajectory.sigmas[index]
        clean = trajectory.states[self.num_steps]
        length = {key: value for key, value in self.call.items() if key == "max_sequence_length"}
        transformer = self.pipe.transformer
        handle = transformer.register_forward_pre_hook(self._count, with_kwargs=True)
        try:
            with placed(self.pipe, "encode_prompt", self._prompts):
                prediction: Tensor = self.pipe.packed(
                    trajectory.states[index],
                    clean,
                    self._time_of(sigma),
                    list(request.prompts),
                    constant_history=not self.config.history_gradient,
                    **length,
                )
        finally:
            handle.remove()
        return prediction

    def _cached(self, trajectory: Trajectory, index: int) -> Tensor:
        """Predictions chunk by chunk, through the pipeline's own loop, along the recorded history."""
        clean = trajectory.states[self.num_steps]
        found: list[Tensor] = []

        def on_step(call: int, prediction: Tensor, sample: Tensor) -> Tensor:
            found.append(prediction)
            length = sample.shape[2]
            return clean[:, :, call * length : (call + 1) * length]

        state = trajectory.states[index]
        with causal(self.pipe.transformer).set(constant_history=not self.config.history_gradient):
            self._run(trajectory.request, on_step, slice(index, index + 1), state, stochastic=(index,))
        return torch.cat(found, dim=2)

    # -- the call ----------------------------------------------------------------------------------------

    def find_layout(self, prepared: Tensor, sample: Tensor) -> Layout:
        """That of the first chunk."""
        return layout_of(prepared[:, :, : sample.shape[2]], sample)
