"""Samplers as MDPs: rollout, replay, prediction and decoding through the unmodified pipeline.

The pipeline that is deployed is the policy that is trained: all four run ``type(pipe).__call__``, with a
`PolicyScheduler` in place of its scheduler. A wrapper in pipelines/ says which schedulers it takes and
how their noise levels are read; everything else stands here, once.

Shapes: B rows of a micro-batch, ``*`` event dims, T sampler steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.kernel import Kernel
from flowrl.mdp.conditioning import ConditionalGradient, PromptCache, rows_of_call
from flowrl.mdp.scheduler import PolicyScheduler, StepFunction, own_dtype, placed, scale_of, undecorated
from flowrl.mdp.seeds import standard_noise
from flowrl.mdp.steps import StepPlan
from flowrl.mdp.trajectory import Replay, Request, Trajectory
from flowrl.mdp.transitions import MIN_STD, Gaussian, projection
from flowrl.registry import nearest
from flowrl.reward import Samples

DENOISERS = ("transformer", "transformer_2", "unet")
# Arguments of pipeline calls that the wrapper gives itself, and the one value that replay can honour of
# those by which a pipeline treats the steps of its loop differently.
GIVEN = {"self", "prompt", "num_inference_steps", "generator", "latents", "output_type", "return_dict"}
POSITIONAL = {"cfg_trunc_ratio": 1.0, "skip_guidance_layers": None}


class SamplerWrapper(ABC):
    """A diffusers pipeline seen as an MDP.

    Class attributes:
        family: the kind of schedule, which kernels must match.

    Attributes:
        pipe: the pipeline, unmodified outside the calls made here.
        forwards: rows that went through the networks so far (one count for each row and conditioning).
        kernel: the transition law of the stochastic steps.
    """

    family: ClassVar[str]

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
            raise UserError(
                f"sampler.kernel: a {kernel.family} kernel cannot drive the {self.family} schedule of "
                f"{type(pipe).__name__}"
            )
        self.check_scheduler(pipe.scheduler)
        self.networks = find_networks(pipe, networks)
        self._plain_call: Callable[..., Any] = undecorated(type(pipe))
        self._check_arguments()
        self._prompts = PromptCache(pipe.encode_prompt) if hasattr(pipe, "encode_prompt") else None
        self._split = ConditionalGradient() if cfg_gradient == "conditional" else None
        self._scale: float | None = None
        self._grid: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        self.forwards = 0
        pipe.set_progress_bar_config(disable=True)

    # -- what a family defines -------------------------------------------------------------------------

    @abstractmethod
    def check_scheduler(self, scheduler: Any) -> None:
        """Raises UserError if the scheduler is not of this wrapper's family."""

    @abstractmethod
    def read_sigmas(self, scheduler: Any) -> tuple[float, ...]:
        """The (T + 1,) noise levels of a scheduler on which ``set_timesteps`` has run."""

    # -- the MDP -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, request: Request, plan: StepPlan) -> Trajectory:
        """Samples a micro-batch with the pipeline and records its trained transitions.

        Args:
            request: prompts and seeds.
            plan: which steps are stochastic and which are recorded.

        Raises:
            UserError: if the scheduler's times and noise levels disagree, or the plan does not fit.
        """
        trajectory = Trajectory(request, (), plan)
        kept = {k + offset for k in plan.trained for offset in (0, 1)}

        def on_step(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            if not trajectory.sigmas:
                trajectory.sigmas = self.read_sigmas(self.pipe.scheduler.base)
            sigma, sigma_next = trajectory.sigmas[index], trajectory.sigmas[index + 1]
            stochastic = index in plan.stochastic
            kernel = self.kernel if stochastic else self.deterministic
            sample = sample.float()
            transition = kernel(prediction.float(), sample, sigma, sigma_next)
            if not stochastic:
                following = transition.sample(sample)
            else:
                noise = standard_noise(request.step_seeds, index, sample.shape[1:], sample.device)
                following = transition.sample(noise)
                if index in plan.trained:
                    trajectory.log_probs[index] = transition.log_prob(following)
                    if isinstance(transition, Gaussian):
                        trajectory.projections[index] = projection(noise, transition.mean)
            if index in kept:
                trajectory.states[index] = sample
            if index + 1 in kept:
                trajectory.states[index + 1] = following
            return following

        # The last state, not the pipeline's output: FLUX.2 unpacks and rescales what it returns as latents.
        trajectory.latents = self._run(request, on_step, slice(None), None)[1]
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
        state, action = trajectory.states[index], trajectory.states[index + 1]
        noise = standard_noise(trajectory.request.step_seeds, index, state.shape[1:], state.device)

        def on_step(_: int, prediction: Tensor, sample: Tensor) -> Tensor:
            transition = self.kernel(prediction.float(), state, sigma, sigma_next)
            found.append(Replay(transition, transition.log_prob(action), prediction, noise))
            return state

        self._run(trajectory.request, on_step, slice(index, index + 1), state)
        return found[0]

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

        def on_step(_: int, prediction: Tensor, sample: Tensor) -> Tensor:
            raise RuntimeError(f"{type(self.pipe).__name__} took a step while decoding")

        images, _ = self._run(
            trajectory.request, on_step, slice(self.num_steps, None), trajectory.latents, output_type="pt"
        )
        return to_samples(images, self.call)

    def schedule(self) -> tuple[float, ...]:
        """The (T + 1,) noise levels of a call with the recipe's arguments, found by a call of one row."""
        levels: list[tuple[float, ...]] = []

        def on_step(_: int, prediction: Tensor, sample: Tensor) -> Tensor:
            base = self.pipe.scheduler.base
            levels.append(self.read_sigmas(base))
            times = [*base.timesteps.tolist(), 0.0]
            self._grid = (levels[0][::-1], tuple(float(t) for t in times)[::-1])
            return sample

        probe = Request(("schedule",), ({},), (0,), (0,), (0,))
        with torch.no_grad():
            self._run(probe, on_step, slice(0, 1), None)
        return levels[0]

    def stds(self, sigmas: Sequence[float]) -> list[float]:
        """The kernel's noise std at each of the T steps."""
        return [self.kernel.std(a, b) for a, b in pairwise(sigmas)]

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
        output_type: str = "latent",
    ) -> tuple[Any, Tensor | None]:
        """Calls the pipeline with the seam in place; `state` stands in for its initial latents.

        Returns:
            what the pipeline returned, and the last state that a step returned.
        """
        prepared: list[Tensor] = []
        last: list[Tensor] = []

        def place(latents: Tensor) -> Tensor:
            latents = latents.float()
            if state is not None:
                if latents.shape != state.shape:
                    raise ValueError(f"state {tuple(state.shape)} where latents are {tuple(latents.shape)}")
                latents = state if self._scale in (None, 1.0) else state / self._scale
            prepared.append(latents)
            return latents

        def step(call: int, prediction: Tensor, sample: Tensor) -> Tensor:
            if self._scale is None:
                self._scale = scale_of(prepared[-1], sample)
            following = on_step(call, prediction, sample)
            last[:] = [following]
            if self._split is not None:
                self._split.next_step()
            return following

        scheduler = PolicyScheduler(self.pipe.scheduler, step)
        scheduler.show(visible)
        with self._installed(scheduler, place, len(request)):
            arguments = self.arguments(request)
            output = self._plain_call(self.pipe, **arguments, output_type=output_type, return_dict=False)[0]
        return output, last[0] if last else None

    @contextmanager
    def _installed(
        self, scheduler: PolicyScheduler, place: Callable[[Tensor], Tensor], rows: int
    ) -> Iterator[None]:
        """Puts scheduler, latents, prompt cache and row counters into the pipeline, and takes them out."""
        pipe = self.pipe
        replaced: dict[str, Any] = {"scheduler": scheduler}
        prepare = pipe.prepare_latents

        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs)
            return (place(made[0]), *made[1:]) if isinstance(made, tuple) else place(made)

        replaced["prepare_latents"] = prepare_latents
        if self._prompts is not None:
            self._prompts.positive = None
            replaced["encode_prompt"] = self._prompts
        with ExitStack() as stack:
            for name, value in replaced.items():
                stack.enter_context(placed(pipe, name, value))
            vae = getattr(pipe, "vae", None)
            if vae is not None:
                stack.enter_context(placed(vae, "decode", own_dtype(vae)))
            for network in self.networks.values():
                handle = network.register_forward_pre_hook(self._count, with_kwargs=True)
                stack.callback(handle.remove)
            if self._split is not None:
                self._split.cache, self._split.rows = self._prompts, rows
                stack.enter_context(self._split.installed(self.networks))
            yield

    def _count(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forwards += rows_of_call(args, kwargs)

    def _check_arguments(self) -> None:
        legal = set(signature(self._plain_call).parameters) - GIVEN
        negative = self.guidance.get("negative_prompt", self.call.get("negative_prompt"))
        if not isinstance(negative, str | None):
            raise UserError(f"negative_prompt = {negative!r}: one text for all samples is needed")
        for section, options in (("model.call", self.call), ("sampler.guidance", self.guidance)):
            for key in options:
                if key not in legal:
                    raise UserError(
                        f"unknown key {section}.{key}{nearest(key, legal)}: "
                        f"not an argument of {type(self.pipe).__name__} that a recipe can give"
                    )
                if options[key] != POSITIONAL.get(key, options[key]):
                    raise UserError(
                        f"{section}.{key} = {options[key]!r} treats steps by their position in the sampler's "
                        f"loop, which a replayed step does not have; legal: {POSITIONAL[key]!r}"
                    )


def find_networks(pipe: Any, wanted: Sequence[str] | None) -> dict[str, nn.Module]:
    """The denoising networks of a pipeline by component name.

    Raises:
        UserError: if a wanted component does not exist or none is found.
    """
    names = (
        list(wanted) if wanted is not None else [n for n in DENOISERS if getattr(pipe, n, None) is not None]
    )
    networks = {}
    for name in names:
        network = getattr(pipe, name, None)
        if not isinstance(network, nn.Module):
            raise UserError(
                f"model.networks: {type(pipe).__name__} has no network {name!r}; it has: "
                + ", ".join(n for n, c in pipe.components.items() if isinstance(c, nn.Module))
            )
        networks[name] = network
    if not networks:
        raise UserError(f"model.networks: no denoiser found in {type(pipe).__name__}; name it")
    return networks


def to_samples(images: Tensor, call: dict[str, Any]) -> Samples:
    """Decoded pixels as `Samples`: float32 in [0, 1] on the CPU; a clip of one frame is an image."""
    images = images.detach().to("cpu", torch.float32)
    if images.ndim == 5 and images.shape[1] == 1:
        images = images[:, 0]
    if images.ndim == 5:
        return Samples(images, fps=float(call.get("frame_rate", call.get("fps", 16))))
    return Samples(images)


def trainable(stds: Sequence[float]) -> list[int]:
    """The steps whose transition has a density."""
    return [k for k, std in enumerate(stds) if std >= MIN_STD]
