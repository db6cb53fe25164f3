"""Noise levels: every Gaussian sampler in the coordinates of the flow.

A sampler's state at one noise level is x = alpha x0 + sigma eps. Divided by its scale alpha + sigma,

    x / (alpha + sigma) = (1 - s) x0 + s eps,       s = sigma / (alpha + sigma) in [0, 1],

it is a state of the rectified flow at level s, with velocity v = eps - x0. So a kernel is written once, for
the flow, and serves them all: the wrapper brings states and predictions here (`to_flow`), and takes the
kernel's distribution back by multiplying it with the scale of the next level. Means, stds and KLs are then
those of the sampler's own states.

    schedule                        alpha                sigma                     time
    flow (lerp)                     1 - s                s                         s
    variance preserving (alpha_bar) sqrt(alpha_bar)      sqrt(1 - alpha_bar)       index of the training step
    TrigFlow (sCM)                  cos t                sigma_data sin t          t in [0, pi / 2]
    variance exploding (EDM)        1                    sigma                     sigma
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor

from flowrl.errors import UserError

VARIANCE_PRESERVING = ("epsilon", "v_prediction", "sample")  # what a network may predict there


class Level(float):
    """A noise level of a sampler that is not a flow itself: as a number, the flow's s.

    The levels of a flow are plain floats, so that ``level``, 1 - ``level``, and 1 say all that is below.

    Attributes:
        alpha, sigma: x = alpha x0 + sigma eps.
        time: its place on the sampler's own time axis, 0 at the end.
    """

    alpha: float
    sigma: float
    time: float

    def __new__(cls, alpha: float, sigma: float, time: float, curve: Callable[[float], float]) -> Level:
        """``curve`` gives the flow's s at any time of the schedule, 0 at time 0."""
        level = super().__new__(cls, sigma / (alpha + sigma))
        level.alpha, level.sigma, level.time = alpha, sigma, time
        level._curve = curve
        return level

    _curve: Callable[[float], float]

    def part(self, share: float) -> float:
        """The flow's s at a share of this level's time; a level at the end of time stays itself."""
        return self._curve(share * self.time) if self.time > 0 else self


def scale_of_level(level: float) -> float:
    """``alpha + sigma``, by which states of the flow are multiplied: 1 for a flow's own level."""
    return level.alpha + level.sigma if isinstance(level, Level) else 1.0


def part(level: float, share: float) -> float:
    """The flow's s at a share of a level's time, which for a flow is the level itself."""
    return level.part(share) if isinstance(level, Level) else share * level


def to_flow(x0: Tensor, eps: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Velocity and state of the flow (B, *) for predicted data and noise.

    The state is put together from the two, so that a kernel finds them again even where the sampler has
    clipped x0 and they no longer fit its own state.
    """
    return eps - x0, (1 - level) * x0 + level * eps


def variance_preserving(alpha_bars: Tensor, times: list[int], final: float) -> tuple[Level, ...]:
    """Levels of a schedule given by its table of alpha_bar.

    Args:
        alpha_bars: (N,) the scheduler's ``alphas_cumprod``, by training step.
        times: (T,) training steps at which the network is called, descending.
        final: alpha_bar after the last step.
    """
    table = alpha_bars.double().tolist()

    def curve(time: float) -> float:
        # (1 - 0.9) * 750 is 74.99999999999999
        alpha, sigma = _roots(table[math.floor(time + 1e-9)]) if time > 0 else (1.0, 0.0)
        return sigma / (alpha + sigma)

    bars = [(table[time], time) for time in times] + [(final, 0)]
    return tuple(Level(*_roots(bar), time, curve) for bar, time in bars)


def endpoints(kind: str, prediction: Tensor, sample: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Data and noise (x0, eps), each (B, *), that a variance-preserving network's prediction implies.

    Args:
        kind: what it predicts: "epsilon", "v_prediction" (alpha eps - sigma x0) or "sample" (x0).
        prediction: (B, *) float32.
        sample: (B, *) float32, the state x at `level`.
        level: its noise level.
    """
    alpha, sigma = level.alpha, level.sigma
    if kind == "epsilon":
        return (sample - sigma * prediction) / alpha, prediction
    if kind == "v_prediction":
        return alpha * sample - sigma * prediction, alpha * prediction + sigma * sample
    if kind == "sample":
        return prediction, (sample - alpha * prediction) / sigma
    raise ValueError(f"a network predicts one of {', '.join(VARIANCE_PRESERVING)}, not {kind!r}")


def check_falling(levels: tuple[float, ...]) -> None:
    """Raises UserError unless the noise levels fall step by step and lie within [0, 1]."""
    if any(a <= b for a, b in pairwise(levels)) or not (levels[-1] >= 0 and levels[0] <= 1 + 1e-6):
        raise UserError(f"the scheduler's noise levels do not fall step by step within [0, 1]: {levels}")


def replace_scheduler(pipe: Any, name: str, where: str) -> None:
    """Gives a pipeline another scheduler of diffusers, on the noise schedule of its own.

    Args:
        pipe: the pipeline; its deployment and evaluation use the new scheduler too.
        name: the class.
        where: the config key, for the error message.

    Raises:
        UserError: if the two schedulers are not of one family, so that the schedule would be lost.
    """
    import diffusers

    own, wanted = pipe.scheduler, getattr(diffusers, name)
    of_flow = name.startswith("FlowM")
    if of_flow != type(own).__name__.startswith("FlowM") or (not of_flow and not is_table(own)):
        raise UserError(
            f"{where} = {name!r}: {type(pipe).__name__} has a {type(own).__name__} "
            f"(prediction_type {own.config.get('prediction_type')!r}), whose noise schedule {name} cannot "
            "take over; its samples would be noise"
        )
    options = {} if of_flow else {"clip_sample": own.config.get("clip_sample", False)}
    pipe.scheduler = wanted.from_config(own.config, **options)


def on_flow(scheduler: Any) -> bool:
    """Whether a scheduler's noise levels are those of a flow."""
    return type(scheduler).__name__.startswith("FlowM") or bool(scheduler.config.get("use_flow_sigmas"))


def is_table(scheduler: Any) -> bool:
    """Whether a scheduler's noise levels are a table of alpha_bar for a network of a diffusion model."""
    return hasattr(scheduler, "alphas_cumprod") and (
        scheduler.config.get("prediction_type") in VARIANCE_PRESERVING
    )


def predicted_endpoints(
    scheduler: Any, prediction: Tensor, state: Tensor, level: float
) -> tuple[Tensor, Tensor]:
    """Data and noise (x0, eps), each (B, *), by a table scheduler's prediction type and its clipping of x0.

    Args:
        scheduler: one for which `is_table` holds.
        prediction: (B, *) float32.
        state: (B, *) float32, the sampler's own.
        level: its `flowrl.mdp.schedules.Level`.
    """
    config = scheduler.config
    assert isinstance(level, Level)
    x0, eps = endpoints(config.prediction_type, prediction, state, level)
    if config.get("thresholding", False):
        x0 = scheduler._threshold_sample(x0)
    elif config.get("clip_sample", False):
        x0 = x0.clamp(-config.clip_sample_range, config.clip_sample_range)
    return x0, eps


def _roots(bar: float) -> tuple[float, float]:
    return math.sqrt(bar), math.sqrt(1 - bar)
