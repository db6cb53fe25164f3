"""Which sampler steps are stochastic and which are trained: step selectors, and the plan they make.

A plan is made once an iteration, from the run's seed, and holds for every member of every group: the
members of a group then differ by their noise only. Steps outside ``stochastic`` are taken by the
deterministic sampler. A step of std below `MIN_STD` is never trained; a plan that trains nothing is an
error. Let n be the number of sampler steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from pydantic import Field

from flowrl.errors import UserError
from flowrl.mdp.seeds import generator
from flowrl.mdp.transitions import MIN_STD
from flowrl.registry import ComponentConfig, register


@dataclass(frozen=True)
class StepPlan:
    """The steps of one iteration.

    Attributes:
        stochastic: ascending indices of the steps that the kernel takes; the others are deterministic.
        trained: ascending indices of the steps that are recorded and trained, a subset of `stochastic`.
    """

    stochastic: tuple[int, ...]
    trained: tuple[int, ...]


class StepSelector(Protocol):
    """The contract of a selector (register one with ``@register("steps", name)``): pure and stateless."""

    def plan(self, iteration: int, stds: Sequence[float], seed: int) -> StepPlan:
        """The plan of an iteration.

        Args:
            iteration: counted from 0.
            stds: the kernel's std at each of the n steps, 0 for deterministic ones.
            seed: the run's seed.

        Raises:
            UserError: if no step would be trained, or the options do not fit n steps.
        """
        ...


@register("steps", "all")
class AllSteps:
    """Every step is stochastic; the first ``int(n * fraction)`` are trained.

    Source: Flow-GRPO's ``timestep_fraction`` (arXiv 2505.05470). The default leaves out the last step.
    """

    class Config(ComponentConfig):
        """Options of `AllSteps`."""

        fraction: float = Field(0.99, gt=0, le=1, description="share of the steps that is trained")

    def __init__(self, config: Config) -> None:
        """Keeps the fraction."""
        self.fraction = config.fraction

    def plan(self, iteration: int, stds: Sequence[float], seed: int) -> StepPlan:
        """The same plan at every iteration."""
        count = _share(len(stds), self.fraction)
        return _make(range(len(stds)), range(count), stds, f"steps.fraction = {self.fraction:g}")


@register("steps", "random_subset")
class RandomSubset:
    """Every step is stochastic; a random ``int((n - 1) * fraction)`` of them, never the last, is trained.

    ``count`` gives the number itself: 1 is one random transition an iteration.

    Source: DanceGRPO's ``timestep_fraction`` 0.6 (arXiv 2505.07818); CM-GRPO's single random transition
    (arXiv 2605.15190).
    Differs from the authors' code: they draw the steps of every sample separately; here all samples of
    an iteration share the subset.
    """

    class Config(ComponentConfig):
        """Options of `RandomSubset`."""

        fraction: float = Field(0.6, gt=0, le=1, description="share of the steps that is trained")
        count: int | None = Field(None, ge=1, description="how many steps are trained, in place of a share")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.fraction, self.count = config.fraction, config.count

    def plan(self, iteration: int, stds: Sequence[float], seed: int) -> StepPlan:
        """A subset drawn from (seed, iteration)."""
        candidates = _trainable(range(len(stds) - 1), stds)
        count = _share(len(stds) - 1, self.fraction) if self.count is None else self.count
        count = min(count, len(candidates))
        order = torch.randperm(len(candidates), generator=generator(seed, "steps", iteration)).tolist()
        chosen = sorted(candidates[position] for position in order[:count])
        return _make(range(len(stds)), chosen, stds, f"steps.fraction = {self.fraction:g}")


@register("steps", "fixed_window")
class FixedWindow:
    """Steps ``start .. start + size - 1`` are stochastic and trained, the others deterministic."""

    class Config(ComponentConfig):
        """Options of `FixedWindow`."""

        start: int = Field(0, ge=0, description="first step of the window")
        size: int = Field(4, ge=1, description="number of steps in the window")

    def __init__(self, config: Config) -> None:
        """Keeps the window."""
        self.start, self.size = config.start, config.size

    def plan(self, iteration: int, stds: Sequence[float], seed: int) -> StepPlan:
        """The same plan at every iteration."""
        return _window(self.start, self.size, stds)


@register("steps", "random_window")
class RandomWindow:
    """A window of ``size`` steps whose start is uniform over low .. high - size, both included.

    Source: Flow-GRPO-Fast (arXiv 2505.05470 and its code: size 3, low 0, high n // 2).
    Differs from the authors' code: one window an iteration, not one a micro-batch.
    """

    class Config(ComponentConfig):
        """Options of `RandomWindow`."""

        size: int = Field(3, ge=1, description="number of steps in the window")
        low: int = Field(0, ge=0, description="first step that the window may hold")
        high: int | None = Field(None, ge=1, description="end (exclusive) of those steps; None is n // 2")

    def __init__(self, config: Config) -> None:
        """Keeps the range."""
        self.size, self.low, self.high = config.size, config.low, config.high

    def plan(self, iteration: int, stds: Sequence[float], seed: int) -> StepPlan:
        """A window drawn from (seed, iteration)."""
        high = len(stds) // 2 if self.high is None else self.high
        starts = high - self.size - self.low + 1
        if starts < 1:
            raise UserError(
                f"steps.size = {self.size}: no window of that size fits into steps {self.low} to {high - 1}"
                f" of {len(stds)}; make size smaller or high larger"
            )
        drawn = int(torch.randint(starts, (), generator=generator(seed, "steps", iteration)))
        return _window(self.low + drawn, self.size, stds)


@register("steps", "sliding_window")
class SlidingWindow:
    """A window that moves on by ``stride`` steps after every ``iterations_per_shift`` iterations.

    With positions = (n - size) // stride + 1 and shift = iteration // iterations_per_shift, the window
    starts at stride * (shift mod positions) if ``roll_back``, else at stride * min(shift, positions - 1).

    Source: MixGRPO, progressive strategy (arXiv 2507.21802; published: size 4, 25 steps, 25 iterations).
    """

    class Config(ComponentConfig):
        """Options of `SlidingWindow`."""

        size: int = Field(4, ge=1, description="number of steps in the window")
        stride: int = Field(1, ge=1, description="steps the window moves by")
        iterations_per_shift: int = Field(25, ge=1, description="iterations it stays at one position")
        roll_back: bool = Field(True, description="return to step 0 after the end; else stay there")

    def __init__(self, config: Config) -> None:
        """Keeps the schedule."""
        self.config = config

    def plan(self, iteration: int, stds: Sequence[float], seed: int) -> StepPlan:
        """A function of the iteration only."""
        config = self.config
        positions = max(len(stds) - config.size, 0) // config.stride + 1
        shift = iteration // config.iterations_per_shift
        position = shift % positions if config.roll_back else min(shift, positions - 1)
        return _window(config.stride * position, config.size, stds)


def trainable(stds: Sequence[float]) -> list[int]:
    """The steps whose transition has a density."""
    return [k for k, std in enumerate(stds) if std >= MIN_STD]


def _share(count: int, fraction: float) -> int:
    """``int(count * fraction)``, safe against 0.29 * 100 = 28.999999999999996."""
    return int(count * fraction + 1e-9)


def _window(start: int, size: int, stds: Sequence[float]) -> StepPlan:
    if start + size > len(stds):
        raise UserError(
            f"steps.size = {size}: the window of steps {start} to {start + size - 1} does not fit into"
            f" {len(stds)} sampler steps"
        )
    window = range(start, start + size)
    return _make(window, window, stds, f"the window of steps {start} to {start + size - 1}")


def _make(stochastic: Iterable[int], trained: Iterable[int], stds: Sequence[float], cause: str) -> StepPlan:
    steps = _trainable(trained, stds)
    if not steps:
        able = _trainable(range(len(stds)), stds)
        why = "none, the kernel is deterministic"
        if len(stds) == 1:
            why = (
                "none: a single step goes straight to the data, a point without a density, so a one-step "
                "model is no policy that can be trained here; use sampler.num_steps of 2 or more"
            )
        raise UserError(
            f"{cause} trains none of the {len(stds)} sampler steps; steps with noise (std >= {MIN_STD:g}): "
            f"{', '.join(map(str, able)) or why}"
        )
    return StepPlan(tuple(stochastic), steps)


def _trainable(steps: Iterable[int], stds: Sequence[float]) -> tuple[int, ...]:
    return tuple(step for step in steps if stds[step] >= MIN_STD)
