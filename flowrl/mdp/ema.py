"""Exponential moving average of the trained weights, kept in float32.

The average is updated once per optimizer step, never per micro-batch: e <- d e + (1 - d) p.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from flowrl.config import EmaConfig
from flowrl.mdp.shards import exchange


class Ema:
    """The average, its count of updates, and a context that lends it to the network."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EmaConfig) -> None:
        """Starts at the present weights.

        Args:
            parameters: the trained parameters by name; their objects must stay the same.
            config: decay and warm-up; the decay must be above 0.
        """
        if config.decay <= 0:
            raise ValueError(f"ema.decay must be above 0 for an average to be kept, got {config.decay}")
        self._parameters = dict(parameters)
        self._config = config
        self._lent = False
        self.updates = 0
        self.shadow = {name: p.detach().to(torch.float32, copy=True) for name, p in self._parameters.items()}

    @property
    def lent(self) -> bool:
        """Whether the network holds the average at the moment."""
        return self._lent

    def decay(self) -> float:
        """The decay of the next update: the configured one, or (1 + n) / (10 + n) while that is smaller."""
        n = self.updates
        return min(self._config.decay, (1 + n) / (10 + n)) if self._config.warmup else self._config.decay

    @torch.no_grad()
    def update(self) -> None:
        """Takes the present weights in; to be called once after each optimizer step."""
        if self._lent:
            raise RuntimeError("the average cannot be updated while the network holds it")
        weight = 1.0 - self.decay()
        present = [p.detach().float() for p in self._parameters.values()]
        torch._foreach_lerp_(list(self.shadow.values()), present, weight)
        self.updates += 1

    @contextmanager
    def lend(self) -> Iterator[None]:
        """The network holds the average inside; its own weights come back on every kind of exit.

        The weights that come back are the same bits. Nothing may train inside, and the context does not nest.
        """
        if self._lent:
            raise RuntimeError("the network already holds the average: the context does not nest")
        average = {name: self.shadow[name].to(p.dtype) for name, p in self._parameters.items()}
        own = exchange(self._parameters, average)
        self._lent = True
        try:
            torch.clear_autocast_cache()  # it knows weights by object, not by content
            with torch.no_grad():
                yield
        finally:
            exchange(self._parameters, own)
            torch.clear_autocast_cache()
            self._lent = False
