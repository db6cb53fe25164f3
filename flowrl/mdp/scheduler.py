"""The seam: a stand-in for a pipeline's scheduler whose ``step`` is the action of the MDP.

Every diffusers sampler asks its scheduler for the next state. `PolicyScheduler` delegates everything to
the pipeline's own scheduler except two things: ``timesteps`` can be narrowed to the steps that shall run,
and ``step`` is handed to a function of ours. Steps are counted by integer index, never looked up by a
floating-point time, and the wrapped scheduler's own step counter is never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

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
