"""Transition distributions: what a kernel returns, and the only place that sums over event dims.

Shapes: B rows of a micro-batch, ``*`` event dims. Log-probabilities are sums over the event dims, in
nats, accumulated in float64. Published clip ranges (1e-5 to 1e-3) assume the mean over dims instead;
`log_ratio` is where that reduction is named.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from torch import Tensor

MIN_STD = 1e-6  # a transition narrower than this is a Dirac for all purposes and is never trained


class Transition(ABC):
    """A distribution over the next state of each row of a batch."""

    @property
    @abstractmethod
    def event_size(self) -> int:
        """Number of event dims D of a row."""

    @property
    @abstractmethod
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal noise of a row that `sample` takes."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """The action for given standard noise (B, *noise_shape)."""

    def state(self, action: Tensor) -> Tensor:
        """The next state (B, *) that an action leads to: mostly the action itself."""
        return action

    @abstractmethod
    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density of an action (B, *), summed over event dims: float64 (B,), in nats."""

    @abstractmethod
    def kl(self, other: Transition) -> Tensor:
        """KL(self || other), summed over event dims: float64 (B,), in nats."""

    @property
    @abstractmethod
    def has_density(self) -> bool:
        """Whether the transition has a density, so that it can be trained."""

    @abstractmethod
    def scaled(self, factor: float) -> Transition:
        """The distribution of `factor` > 0 times the next state."""


class Gaussian(Transition):
    """An isotropic Gaussian N(mean, std^2 I) with one std for all rows.

    ``weights`` of mean 1, which broadcast to the event dims, count some dims more than others in
    log-densities and KL, as some losses want it; but with 1 these are no longer those of the distribution.
    """

    def __init__(self, mean: Tensor, std: float, weights: Tensor | None = None) -> None:
        """``mean``: (B, *) in float32 or float64; ``std`` >= 0: the step's own, sqrt(|dt|) included."""
        if std < 0 or not math.isfinite(std):
            raise ValueError(f"std must be finite and >= 0, got {std}")
        self.mean = mean
        self.std = float(std)
        self.weights = weights

    @property
    def event_size(self) -> int:
        """Number of event dims D of a row."""
        return self.mean[0].numel()

    @property
    def has_density(self) -> bool:
        """Whether std is large enough (`MIN_STD`) for a density."""
        return self.std >= MIN_STD

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """That of a row of the mean."""
        return tuple(self.mean.shape[1:])

    def scaled(self, factor: float) -> Gaussian:
        """Mean and std times `factor`."""
        return self if factor == 1.0 else Gaussian(factor * self.mean, factor * self.std, self.weights)

    def sample(self, noise: Tensor) -> Tensor:
        """``mean + std * noise``."""
        return self.mean + self.std * noise

    def log_prob(self, action: Tensor) -> Tensor:
        """Gaussian log-density, constants included.

        Raises:
            ValueError: if there is no density, or the action's shape differs from the mean's.
        """
        self._check(action)
        squares = sum_events(self.weighted(((action - self.mean) / self.std).double().square()))
        constant = math.log(self.std) + 0.5 * math.log(2 * math.pi)
        return -0.5 * squares - self.event_size * constant

    def kl(self, other: Transition) -> Tensor:
        """Closed form; for equal stds ||mu - mu'||^2 / (2 std^2)."""
        if not isinstance(other, Gaussian):
            raise TypeError(f"KL between Gaussian and {type(other).__name__}")
        self._check(other.mean)
        if not other.has_density:
            raise ValueError("the other transition has no density")
        squares = sum_events(self.weighted(((self.mean - other.mean) / other.std).double().square()))
        ratio = self.std / other.std
        return 0.5 * squares + self.event_size * (0.5 * (ratio * ratio - 1.0) - math.log(ratio))

    def weighted(self, values: Tensor) -> Tensor:
        """Values (B, *) of the event dims, times their weights."""
        return values if self.weights is None else values * self.weights

    def _check(self, action: Tensor) -> None:
        if not self.has_density:
            raise ValueError(f"a transition of std {self.std:g} has no density")
        if action.shape != self.mean.shape:
            raise ValueError(f"action {tuple(action.shape)} for mean {tuple(self.mean.shape)}")


class Dirac(Transition):
    """A deterministic step: it has a value and no density."""

    def __init__(self, value: Tensor) -> None:
        """``value``: (B, *)."""
        self.value = value

    @property
    def event_size(self) -> int:
        """Number of event dims D of a row."""
        return self.value[0].numel()

    @property
    def has_density(self) -> bool:
        """Never."""
        return False

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """None is needed."""
        return (0,)

    def scaled(self, factor: float) -> Dirac:
        """The value times `factor`."""
        return self if factor == 1.0 else Dirac(factor * self.value)

    def sample(self, noise: Tensor) -> Tensor:
        """The value, whatever the noise."""
        return self.value

    def log_prob(self, action: Tensor) -> Tensor:
        """Raises ValueError: a deterministic step cannot be scored."""
        raise ValueError("a deterministic step has no density; it cannot be scored or trained")

    def kl(self, other: Transition) -> Tensor:
        """Raises ValueError: a deterministic step cannot be scored."""
        raise ValueError("a deterministic step has no density; it cannot be scored or trained")


def log_ratio(new: Tensor, old: Tensor, event_size: int, per_dim: bool = True) -> Tensor:
    """Log importance ratio with its reduction over event dims named.

    Args:
        new: log-probabilities (B,) under the policy being trained.
        old: log-probabilities (B,) under the policy that acted.
        event_size: number of event dims D.
        per_dim: divide by D (the geometric-mean ratio that published clip ranges assume). False gives
            the true likelihood ratio, whose clip range must be about D times larger.

    Returns:
        (B,).
    """
    difference = new - old
    return difference / event_size if per_dim else difference


def projection(noise: Tensor, mean: Tensor) -> Tensor:
    """Sum over event dims of noise times mean: float64 (B,).

    The part of a Gaussian log-ratio that is linear in the means. Recorded at rollout and recomputed at
    replay by this same function, so that equal means give equal values to the last bit.
    """
    return sum_events((noise * mean).double())


def sum_events(values: Tensor) -> Tensor:
    """The sum over event dims of (B, *): (B,)."""
    return values.flatten(1).sum(dim=1)
