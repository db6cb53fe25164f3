"""The seam: a stand-in for a pipeline's scheduler whose ``step`` is the action of the MDP.

Every diffusers sampler asks its scheduler for the next state. `PolicyScheduler` delegates everything to
the pipeline's own scheduler except two things: ``timesteps`` can be narrowed to the steps that shall run,
and ``step`` is handed to a function of ours. Steps are counted by integer index, never looked up by a
floating-point time. The functions below it put it, and what else a call of the pipeline needs, into the
pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.conditioning import states_of_call

StepFunction = Callable[[int, Tensor, Tensor], Tensor]


class Taken(NamedTuple):
    """What a step returns, for pipelines that index, unpack or name it."""

    prev_sample: Tensor
    pred_original_sample: Tensor


class PolicyScheduler:
    """Stands in for the scheduler of a pipeline during one call of it.

    ``set_timesteps`` is deliberately not redefined: pipelines inspect its signature for ``sigmas``,
    ``timesteps`` and ``mu``.
    """

    def __init__(
        self,
        base: Any,
        on_step: StepFunction,
        spare_times: int = 0,
        jumps: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Wraps a scheduler.

        Args:
            base: the pipeline's own scheduler.
            on_step: ``on_step(call, model_output, sample) -> next sample``; ``call`` counts the calls of
                ``step`` in this pipeline call from 0.
            spare_times: how many of ``timesteps`` the pipeline takes off the end before it loops.
            jumps: for pipelines that tell their network where step i ends, which they read in
                ``sigmas[i + 1]``: from the scheduler's levels (T + 1,) to the ends of the steps (T,).
        """
        self.base = base
        self._on_step = on_step
        self._spare = spare_times
        self._jumps = jumps
        self._calls = 0
        self._visible: slice | Tensor = slice(None)

    def show(self, visible: slice | Tensor) -> None:
        """Narrows ``timesteps``: to a slice of the scheduler's own, or to the given times."""
        self._visible = visible

    @property
    def timesteps(self) -> Tensor:
        """The model times that the pipeline will loop over."""
        own: Tensor = self.base.timesteps
        if isinstance(self._visible, Tensor):
            return self._visible.to(own.device)
        stop = self._visible.stop
        return own[self._visible.start : None if stop is None else stop + self._spare]

    @property
    def sigmas(self) -> Tensor:
        """The scheduler's own levels, narrowed so that ``sigmas[i + 1]`` is the end of visible step i."""
        own: Tensor = self.base.sigmas
        if self._jumps is None or isinstance(self._visible, Tensor):
            return own
        first = self._visible.start or 0
        return torch.cat([own[first : first + 1], self._jumps(own)[first:]])

    def scale_model_input(self, sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The scheduler's own scaling, for the step that is next; its counter is set, not trusted."""
        if hasattr(self.base, "_step_index") and isinstance(self._visible, slice):
            self.base._step_index = (self._visible.start or 0) + self._calls
        scaled: Tensor = self.base.scale_model_input(sample, *args, **kwargs)
        return scaled

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Taken:
        """The action: the next state, in float32 whatever the network's dtype.

        Some pipelines unpack a second value, the denoised sample, and decode that of the last step, where
        the two are the same.
        """
        following = self._on_step(self._calls, model_output, sample)
        self._calls += 1
        return Taken(following, following)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the pipeline's own scheduler."""
        if name == "base":  # not set yet: copying or unpickling an instance must not recurse
            raise AttributeError(name)
        return getattr(self.base, name)


@contextmanager
def placed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an instance attribute past any ``__setattr__`` bookkeeping, and restores what was there."""
    missing = object()
    before = owner.__dict__.get(name, missing)
    owner.__dict__[name] = value
    try:
        yield
    finally:
        if before is missing:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = before


def own_dtype(vae: Any) -> Callable[..., Any]:
    """The VAE's ``decode``, in its own dtype and outside autocast."""
    decode = vae.decode

    def decode_in_own_dtype(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(latents.device.type, enabled=False):
            return decode(latents.to(vae.dtype), *args, **kwargs)

    return decode_in_own_dtype


def undecorated(cls: type[Any]) -> Callable[..., Any]:
    """A pipeline's ``__call__`` as it was before ``torch.no_grad`` wrapped it.

    Raises:
        UserError: if it is not wrapped, so that it may turn gradients off inside.
    """
    call: Callable[..., Any] = cls.__call__
    plain: Callable[..., Any] | None = getattr(call, "__wrapped__", None)
    if plain is None:
        raise UserError(
            f"{cls.__name__}.__call__ is not decorated by torch.no_grad; cannot replay with gradient"
        )
    return plain


@dataclass(frozen=True)
class Layout:
    """What a pipeline does to its initial latents between ``prepare_latents`` and the first step.

    Attributes:
        axes: the permutation of their axes.
        scale: the factor after it.
    """

    axes: tuple[int, ...]
    scale: float

    def undo(self, state: Tensor) -> Tensor:
        """What ``prepare_latents`` must return for the first step to see `state`."""
        if self.scale != 1.0:
            state = state / self.scale
        return state.permute([self.axes.index(axis) for axis in range(len(self.axes))])


def layout_of(prepared: Tensor, sample: Tensor) -> Layout:
    """Finds the layout from both ends of the way.

    Raises:
        UserError: if it is more than a permutation and a factor.
    """
    for order in permutations(range(1, prepared.ndim)):
        axes = (0, *order)
        moved = prepared.permute(axes)
        if moved.shape != sample.shape:
            continue
        if torch.equal(moved.to(sample.dtype), sample):  # some pipelines round to the network's dtype
            return Layout(axes, 1.0)
        scale = float((sample.double() * moved).sum() / moved.double().square().sum())
        if torch.allclose(moved * scale, sample.float(), rtol=1e-3, atol=1e-4):
            return Layout(axes, scale)
    raise UserError(
        "the pipeline changes its latents between prepare_latents and the first step by more than a "
        "permutation of axes and a constant factor"
    )


def as_state(latents: Tensor) -> Tensor:
    """A state as it is kept: float32, or tokens as they are."""
    return latents.float() if latents.is_floating_point() else latents


def unrounded(kept: Tensor | None, sample: Tensor) -> Tensor:
    """The state (B, *) that a step returned, in float32, for what the pipeline made of it until the next.

    Raises:
        UserError: if the pipeline did more than round it to the network's dtype.
    """
    if kept is None or not torch.equal(kept.to(sample.dtype), sample):
        raise UserError("the pipeline changes its latents between two steps; such steps are no policy")
    return kept


@contextmanager
def installed(
    pipe: Any,
    scheduler: PolicyScheduler,
    place: Callable[[Tensor], Tensor],
    encode_prompt: Callable[..., Any] | None,
) -> Iterator[None]:
    """Puts the stand-in, and what else a call needs, into the pipeline, and takes it out again.

    Args:
        pipe: the pipeline.
        scheduler: stands in for its scheduler.
        place: makes the initial latents of those that ``prepare_latents`` returned.
        encode_prompt: stands in for the pipeline's own, if given.
    """
    prepare = pipe.prepare_latents

    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        made = prepare(*args, **kwargs)
        return (place(made[0]), *made[1:]) if isinstance(made, tuple) else place(made)

    replaced = {"scheduler": scheduler, "prepare_latents": prepare_latents}
    if encode_prompt is not None:
        replaced["encode_prompt"] = encode_prompt
    vae = getattr(pipe, "vae", None)
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(placed(pipe, name, value))
        if vae is not None:
            stack.enter_context(placed(vae, "decode", own_dtype(vae)))
        yield


@contextmanager
def idle(networks: Iterable[Any]) -> Iterator[None]:
    """Networks that return zeros in the shape of their state, for a call whose prediction nobody uses."""

    def zeros(state: Any) -> Any:
        return [zeros(row) for row in state] if isinstance(state, list) else torch.zeros_like(state)

    def forward(*args: Any, **kwargs: Any) -> tuple[Any]:
        return (zeros(states_of_call(args, kwargs)),)

    with ExitStack() as stack:
        for network in networks:
            stack.enter_context(placed(network, "forward", forward))
        yield
