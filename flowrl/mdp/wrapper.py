"""Samplers as MDPs: rollout, replay, prediction and decoding through the unmodified pipeline.

The pipeline that is deployed is the policy that is trained: all four run ``type(pipe).__call__``, with a
`PolicyScheduler` in place of its scheduler. A wrapper in pipelines/ says which schedulers it takes and
how their noise levels are read; everything else stands here, once.

Shapes: B rows of a micro-batch, ``*`` event dims, T sampler steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.kernel import Kernel
from flowrl.mdp.adapters import find_networks
from flowrl.mdp.arguments import check_arguments, refusals
from flowrl.mdp.conditioning import ConditionalGradient, PromptCache, rows_of_call
from flowrl.mdp.scheduler import (
    Layout,
    PolicyScheduler,
    StepFunction,
    as_state,
    idle,
    installed,
    layout_of,
    undecorated,
    unrounded,
)
from flowrl.mdp.schedules import scale_of_level
from flowrl.mdp.seeds import standard_noise
from flowrl.mdp.steps import StepPlan
from flowrl.mdp.trajectory import Replay, Request, Trajectory
from flowrl.mdp.transitions import Transition
from flowrl.reward import Samples


class SamplerWrapper(ABC):
    """A diffusers pipeline seen as an MDP.

    Class attributes:
        family: the kind of kernels that it can use.
        no_matching: why forward-process objectives cannot be used on it; empty if they can.
        decoding_steps: steps that a call which only decodes must still take: 1 where the pipeline decodes
            what the last step returns rather than its latents.
        probe: a row by which the noise levels can be found.

    Attributes:
        pipe: the pipeline, unmodified outside the calls made here.
        forwards: rows that went through the networks so far (one count for each row and conditioning).
        kernel: the transition law of the stochastic steps.
    """

    family: ClassVar[str]
    no_matching: ClassVar[str] = ""
    decoding_steps: ClassVar[int] = 0
    probe: ClassVar[Request] = Request(("schedule",), ({},), (0,), (0,), (0,))

    def __init__(
        self,
        pipe: Any,
        kernel: Kernel,
        deterministic: Kernel,
        *,
        num_steps: int,
        call: dict[str, Any],
        guidance: dict[str, Any],
        cfg_gradient: str = "both",
        networks: Sequence[str] | None = None,
    ) -> None:
        """Wraps a pipeline.

        Args:
            pipe: a diffusers pipeline.
            kernel: the transition law of stochastic steps.
            deterministic: the law of the other steps (``ode``).
            num_steps: sampler steps T.
            call: keyword arguments given to every pipeline call.
            guidance: the guidance arguments, the same in rollout, replay and reference.
            cfg_gradient: "both" or "conditional".
            networks: names of the denoisers; None finds them.

        Raises:
            UserError: for a scheduler of the wrong family, a kernel of another family, or call arguments
                that the pipeline does not have.
        """
        self.pipe = pipe
        self.kernel = kernel
        self.deterministic = deterministic
        self.num_steps = num_steps
        self.call = dict(call)
        self.guidance = dict(guidance)
        if kernel.family != self.family:
            owner = type(pipe).__name__
            raise UserError(
                f"sampler.kernel: a {kernel.family} kernel cannot drive the {self.family} schedule of {owner}"
            )
        self.check_scheduler(pipe.scheduler)
        self.networks = find_networks(pipe, networks)
        self._plain_call: Callable[..., Any] = undecorated(type(pipe))
        self.check_arguments("model.call", self.call)
        self.check_arguments("sampler.guidance", self.guidance)
        self._prompts = PromptCache(pipe.encode_prompt) if hasattr(pipe, "encode_prompt") else None
        self._split = ConditionalGradient() if cfg_gradient == "conditional" else None
        self._layout: Layout | None = None
        self.spare_times = 0  # of the scheduler's times, those that the pipeline's loop leaves out
        self.raw_output = "latent"  # the cheapest output_type of the pipeline
        self._grid: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        self.forwards = 0
        pipe.set_progress_bar_config(disable=True)

    # -- what a family defines -------------------------------------------------------------------------

    @abstractmethod
    def check_scheduler(self, scheduler: Any) -> None:
        """Raises UserError if the scheduler is not of this wrapper's family."""

    @abstractmethod
    def read_sigmas(self, scheduler: Any) -> tuple[float, ...]:
        """The (T + 1,) noise levels of a scheduler on which ``set_timesteps`` has run.

        In the coordinates of the flow, falling within [0, 1]: floats, or a `flowrl.mdp.schedules.Level` each
        where the sampler's own states are not those of a flow, or a `flowrl.mdp.token_paths.PathLevel`.
        """

    def to_flow(self, prediction: Tensor, state: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        """Velocity and state of the flow for what the pipeline predicted: for flows these are themselves.

        Args:
            prediction: (B, *) float32, as the pipeline gave it to its scheduler.
            state: (B, *) float32, in the sampler's own coordinates.
            sigma: the state's noise level, one of `read_sigmas`.
        """
        return prediction, state

    def find_layout(self, prepared: Tensor, sample: Tensor) -> Layout:
        """What the pipeline does to latents on the way from `prepared` to its first `sample`."""
        return layout_of(prepared, sample)

    def jumps(self, levels: Tensor, stochastic: Sequence[int]) -> Tensor:
        """Where the network's jump of each step ends (T,), for pipelines that tell it; of levels (T + 1,)."""
        return levels[1:]

    # -- the MDP -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, request: Request, plan: StepPlan) -> Trajectory:
        """Samples the prompts of a request and records the transitions that a plan trains.

        Raises:
            UserError: if the scheduler's times and noise levels disagree, or the plan does not fit.
        """
        trajectory = Trajectory(request, (), plan)
        kept = {k + offset for k in plan.trained for offset in (0, 1)}

        def on_step(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            if index == 0:
                trajectory.sigmas = self.read_sigmas(self.pipe.scheduler.base)
            elif sample is not trajectory.latents:
                # Rounded on its way to the network, which sees the same in replay: the state is what acted.
                sample = unrounded(trajectory.latents, sample)
            sigma, sigma_next = trajectory.sigmas[index], trajectory.sigmas[index + 1]
            stochastic = index in plan.stochastic
            sample = as_state(sample)
            transition = self.transition(prediction, sample, sigma, sigma_next, stochastic)
            # Steps outside the plan's window are draws of the initial noise, where they are draws at all.
            seeds = request.step_seeds if stochastic else request.initial_seeds
            noise = standard_noise(seeds, index, transition.noise_shape, sample.device)
            action = transition.sample(noise)
            following = transition.state(action)
            if index in plan.trained:
                trajectory.record(index, transition, action, noise)
            if index in kept:
                trajectory.states[index] = sample
            if index + 1 in kept:
                trajectory.states[index + 1] = following
            trajectory.latents = following  # FLUX.2 unpacks and rescales what it returns as latents
            return following

        self._run(request, on_step, slice(None), None, stochastic=plan.stochastic)
        if len(trajectory.sigmas) != self.num_steps + 1:
            raise UserError(
                f"sampler.num_steps {self.num_steps}: {type(self.pipe).__name__} made "
                f"{len(trajectory.sigmas) - 1} steps"
            )
        return trajectory

    def replay(self, trajectory: Trajectory, index: int) -> Replay:
        """Recomputes one recorded step under the current weights, with gradient if it is enabled.

        Exactly the rows of the rollout's micro-batch are run, so before the first update the log-prob
        equals the recorded one bit for bit, in any dtype.
        """
        found: list[Replay] = []
        sigma, sigma_next = trajectory.sigmas[index], trajectory.sigmas[index + 1]
        state, action = trajectory.states[index], trajectory.action(index)

        def on_step(_: int, prediction: Tensor, sample: Tensor) -> Tensor:
            transition = self.transition(prediction, state, sigma, sigma_next)
            seeds = trajectory.request.step_seeds
            noise = standard_noise(seeds, index, transition.noise_shape, state.device)
            found.append(Replay(transition, transition.log_prob(action), prediction, noise))
            return state

        self._run(trajectory.request, on_step, slice(index, index + 1), state, stochastic=(index,))
        return found[0]

    def transition(
        self, prediction: Tensor, state: Tensor, sigma: float, sigma_next: float, stochastic: bool = True
    ) -> Transition:
        """The law of one step, in the sampler's own coordinates.

        Args:
            prediction: (B, *), as the pipeline gave it to its scheduler.
            state: (B, *) float32, at noise level `sigma`.
            sigma, sigma_next: two neighbours of `read_sigmas`.
            stochastic: whether the kernel takes the step, or its deterministic stand-in.
        """
        kernel = self.kernel if stochastic else self.deterministic
        velocity, sample = self.to_flow(prediction.float(), state, sigma)
        return kernel(velocity, sample, sigma, sigma_next).scaled(scale_of_level(sigma_next))

    def predict(self, request: Request, state: Tensor, sigma: float) -> Tensor:
        """What the network predicts at any noise level, guidance included.

        Args:
            request: the prompts of the rows.
            state: (B, *) float32, noisy latents in the sampler's own layout.
            sigma: the noise level of all rows.

        Returns:
            (B, *) float32.
        """
        found: list[Tensor] = []

        def on_step(_: int, prediction: Tensor, sample: Tensor) -> Tensor:
            found.append(prediction.float())
            return sample

        self._run(request, on_step, self._time_of(sigma), state)
        return found[0]

    def noising(self, generator: torch.Generator) -> Callable[[Tensor, float], Tensor] | None:
        """How clean states are noised to a level, where that is more than adding noise."""
        return None

    def _time_of(self, sigma: float) -> Tensor:
        """The time that the network is given at a noise level, between those of the pipeline's own grid.

        Mostly 1000 sigma, but CogView4 gives its network times that differ from its noise levels.
        """
        if self._grid is None:
            self.schedule()
        levels, times = self._grid or ((), ())
        return torch.tensor([float(np.interp(sigma, levels, times))], dtype=torch.float32)

    @torch.no_grad()
    def decode(self, trajectory: Trajectory) -> Samples:
        """Decodes final latents by the pipeline's own code: a call of it with no step left to run.

        The VAE runs in its own dtype, outside autocast; pixels are moved to the CPU.
        """
        if trajectory.latents is None:
            raise ValueError("the final latents were given up")

        latents = trajectory.latents

        def on_step(call: int, prediction: Tensor, sample: Tensor) -> Tensor:
            if call >= self.decoding_steps:
                raise RuntimeError(f"{type(self.pipe).__name__} took a step while decoding")
            return latents

        visible = slice(self.num_steps - self.decoding_steps, self.num_steps)
        images = self._run(trajectory.request, on_step, visible, latents, decode=True)
        return self.to_samples(images, trajectory.request)

    def to_samples(self, output: Tensor, request: Request) -> Samples:
        """What a call with ``output_type`` "pt" returned, as rewards take it; one frame is an image."""
        images = output.detach().to("cpu", torch.float32)
        if images.ndim == 5 and images.shape[1] == 1:
            images = images[:, 0]
        if images.ndim == 5:
            return Samples(images, fps=float(self.call.get("frame_rate", self.call.get("fps", 16))))
        return Samples(images)

    def schedule(self) -> tuple[float, ...]:
        """The (T + 1,) noise levels of a call of one row; UserError if the pipeline refuses its arguments."""
        levels: list[tuple[float, ...]] = []

        def on_step(_: int, prediction: Tensor, sample: Tensor) -> Tensor:
            base = self.pipe.scheduler.base
            levels.append(self.read_sigmas(base))
            times = [*base.timesteps.tolist()[: len(levels[0]) - 1], 0.0]
            self._grid = (levels[0][::-1], tuple(float(t) for t in times)[::-1])
            return sample

        with torch.no_grad(), refusals(self.pipe, self.call, self.guidance):
            self._run(self.probe, on_step, slice(0, 1), None)
        return levels[0]

    def stds(self, sigmas: Sequence[float]) -> list[float]:
        """The noise std of each of the T steps, if the kernel takes it, in the sampler's own coordinates."""
        return [scale_of_level(b) * self.kernel.std(a, b) for a, b in pairwise(sigmas)]

    @property
    def encoder_calls(self) -> int:
        """How often the pipeline's text encoding ran."""
        return self._prompts.encoder_calls if self._prompts is not None else 0

    # -- one call of the pipeline ------------------------------------------------------------------------

    def arguments(
        self, request: Request, guidance: dict[str, Any] | None = None, num_steps: int | None = None
    ) -> dict[str, Any]:
        """The keyword arguments of a pipeline call; guidance and steps default to the rollout's."""
        rows = len(request)
        guidance = self.guidance if guidance is None else guidance
        arguments = {**self.call, **guidance, "prompt": list(request.prompts)}
        if arguments.get("negative_prompt") is not None:
            arguments["negative_prompt"] = [arguments["negative_prompt"]] * rows
        arguments["num_inference_steps"] = self.num_steps if num_steps is None else num_steps
        arguments["generator"] = [torch.Generator().manual_seed(seed) for seed in request.initial_seeds]
        return arguments

    def _run(
        self,
        request: Request,
        on_step: StepFunction,
        visible: slice | Tensor,
        state: Tensor | None,
        stochastic: Sequence[int] = (),
        decode: bool = False,
    ) -> Any:
        """Calls the pipeline with the seam in place, and returns its output.

        Args:
            request: the prompts and seeds of the rows.
            on_step: takes the steps.
            visible: which steps run, or at which times.
            state: stands in for the initial latents, if given.
            stochastic: which steps the kernel takes.
            decode: ask for pixels, and let the networks idle.
        """
        prepared: list[Tensor] = []

        def place(latents: Tensor) -> Tensor:
            latents = as_state(latents)
            if state is not None:
                held = state if self._layout is None else self._layout.undo(state)
                if latents.shape != held.shape:
                    raise ValueError(f"state {tuple(held.shape)} where latents are {tuple(latents.shape)}")
                latents = held
            prepared.append(latents)
            return latents

        def step(call: int, prediction: Tensor, sample: Tensor) -> Tensor:
            if self._layout is None:
                self._layout = self.find_layout(prepared[-1], sample)
            following = on_step(call, prediction, sample)
            if self._split is not None:
                self._split.next_step()
            return following

        def jumps(levels: Tensor) -> Tensor:
            return self.jumps(levels, stochastic)

        scheduler = PolicyScheduler(self.pipe.scheduler, step, self.spare_times, jumps)
        scheduler.show(visible)
        if self._prompts is not None:
            self._prompts.positive = None
        with ExitStack() as stack:
            stack.enter_context(installed(self.pipe, scheduler, place, self._prompts))
            if decode:
                stack.enter_context(idle(self.networks.values()))
            else:
                for network in self.networks.values():
                    handle = network.register_forward_pre_hook(self._count, with_kwargs=True)
                    stack.callback(handle.remove)
                if self._split is not None:
                    self._split.cache, self._split.rows = self._prompts, len(request)
                    stack.enter_context(self._split.installed(self.networks))
            arguments = self.arguments(request) | {"output_type": "pt" if decode else self.raw_output}
            return self._plain_call(self.pipe, **arguments, return_dict=False)[0]

    def _count(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forwards += rows_of_call(args, kwargs)

    def check_arguments(self, section: str, options: dict[str, Any], replayed: bool = True) -> None:
        """Raises UserError for arguments that the pipeline's call cannot take: see `check_arguments`."""
        check_arguments(self._plain_call, type(self.pipe).__name__, section, options, replayed)
