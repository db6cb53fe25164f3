"""The seam: a stand-in for a pipeline's scheduler whose ``step`` is the action of the MDP.

Every diffusers sampler asks its scheduler for the next state. `PolicyScheduler` delegates everything to
the pipeline's own scheduler except two things: ``timesteps`` can be narrowed to the steps that shall run,
and ``step`` is handed to a function of ours. Steps are counted by integer index, never looked up by a
floating-point time, and the wrapped scheduler's own step counter is never touched. The functions below it
put it, and what else a call of the pipeline needs, into the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError

StepFunction = Callable[[int, Tensor, Tensor], Tensor]


class PolicyScheduler:
    """Stands in for the scheduler of a pipeline during one call of it.

    ``set_timesteps`` is deliberately not redefined: pipelines inspect its signature for ``sigmas``,
    ``timesteps`` and ``mu``.
    """

    def __init__(self, base: Any, on_step: StepFunction) -> None:
        """Wraps a scheduler.

        Args:
            base: the pipeline's own scheduler.
            on_step: ``on_step(call, model_output, sample) -> next sample``; ``call`` counts the calls of
                ``step`` in this pipeline call from 0.
        """
        self.base = base
        self._on_step = on_step
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
        return own[self._visible]

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        *args: Any,
        return_dict: bool = True,
        **kw: Any,
    ) -> Any:
        """The action: the next state, in the form that the pipeline unpacks.

        The state stays in float32 whatever the network's dtype; only what enters the network is rounded.
        """
        following = self._on_step(self._calls, model_output, sample)
        self._calls += 1
        return SimpleNamespace(prev_sample=following) if return_dict else (following,)

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


def scale_of(prepared: Tensor, sample: Tensor) -> float:
    """By what the pipeline multiplied its initial latents before the first step."""
    if prepared.shape != sample.shape:
        raise UserError("the pipeline changes the layout of its latents after prepare_latents")
    if torch.equal(prepared, sample.float()):
        return 1.0
    scale = float((sample.float() * prepared).sum() / prepared.square().sum())
    if not torch.allclose(prepared * scale, sample.float(), rtol=1e-3, atol=1e-4):
        raise UserError("the pipeline changes its initial latents by more than a constant factor")
    return scale
