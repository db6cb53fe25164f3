"""Probability paths of discrete flow models, and the law of one sampler step along them.

A token x1 of the data is noised to x_t by p_t(. | x1), t = 0 noise and t = 1 data; as a noise level,
sigma = 1 - t. A network predicts the posterior p(x1 | x_t) of every position. A sampler step from t to t'
draws x1 from it, then y from K(y | x, x1): the token stays, or jumps at the rate u(y, x | x1) that transports
the path. Positions are independent given the network's prediction.

Mixture path, source p0 a point at the mask token or uniform, kappa_t = t^power:

    p_t(y | x1) = (1 - kappa) p0(y) + kappa 1[y = x1],        r = kappa' / (1 - kappa)
    u(y, x | x1) = (1 + c) r 1[y = x1] + c kappa' / kappa p0(y)            y != x, corrector c >= 0

Metric path, d a distance between tokens, beta_t = scale (t / (1 - t))^exponent, uniform at t = 0:

    p_t(y | x1) = softmax_y(-beta_t d(y, x1)),     u(y, x | x1) = p_t(y | x1) beta' [d(x, x1) - d(y, x1)]_+

With lambda = sum over y of u, the step jumps with probability J and then to y ~ u / lambda:

    integrated    J = (kappa(t') - kappa(t)) / (1 - kappa(t)) on a mixture path,
                  J = 1 - exp(-(beta(t') - beta(t)) lambda / beta') on a metric path
    exponential   J = 1 - exp(-h lambda), h = t' - t
    euler         J = min(1, h lambda)

A step to t' = 1 takes x1 itself, by every rule. "integrated" follows the rate through the step instead of
freezing it; it is finite at t = 0, where beta' is not.

Source: arXiv 2407.15595 (mixture paths, correctors), 2412.03487 (metric paths, kinetic-optimal rates),
2505.20147 (FUDOKI: scale 3, exponent 0.9, exponential).
Differs from the authors' code: the integrated rule, and the state is drawn by the law that is scored.
Shapes: N positions, V data tokens, S states (V, and the mask if it is no token of its own).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeVar

import torch
from torch import Tensor

from flowrl.errors import UserError

Rule = Literal["integrated", "exponential", "euler"]
Source = Literal["mask", "uniform"]
TINY = 1e-37  # a log of 0 would have a NaN for its gradient


class StepLaw(ABC):
    """K(y | x, x1) of one sampler step, for tokens x, x1 and y of any number of positions."""

    @abstractmethod
    def rows(self, x: Tensor, x1: Tensor) -> Tensor:
        """K(. | x, x1) for x, x1 (N,): probabilities (N, S) in float64."""

    @abstractmethod
    def at(self, x: Tensor, x1: Tensor, y: Tensor) -> Tensor:
        """K(y | x, x1), elementwise: float64 in the common shape of x, x1 and y."""

    def columns(self, x: Tensor, y: Tensor, num_tokens: int) -> Tensor:
        """K(y | x, x1) for x, y (N,) and every x1: float64 (N, V)."""
        x1 = torch.arange(num_tokens, device=x.device)
        return self.at(x[:, None], x1[None], y[:, None])


class TokenPath(ABC):
    """A path p_t(. | x1) with rates that transport it.

    Attributes:
        num_tokens: data tokens V; ids 0 .. V - 1.
        num_states: states S.
        mask_id: the state that stands for noise; None if the source is uniform.
    """

    num_tokens: int
    num_states: int
    mask_id: int | None = None

    @abstractmethod
    def marginal(self, x1: Tensor, t: float) -> Tensor:
        """The law p_t(. | x1) for x1 (N,): float64 (N, S)."""

    @abstractmethod
    def law(self, t: float, t_next: float, rule: Rule, corrector: float = 0.0) -> StepLaw:
        """The law of a step; UserError for a rule or corrector that the path does not have."""

    @abstractmethod
    def mobility(self, t: float, t_next: float, rule: Rule) -> float:
        """The largest probability of a jump: 0 where the step is forced to stay."""

    def log_posterior(self, logits: Tensor, x: Tensor) -> Tensor:
        """What the network says of x1: log-probabilities (..., S) in float32, for logits (..., V or S).

        On a path with a mask token, that is never x1, and a token that is not masked is known to be x1.

        Raises:
            UserError: for another number of logits.
        """
        size = logits.shape[-1]
        if size not in (self.num_tokens, self.num_states):
            raise UserError(f"{size} logits a token for {self.num_tokens} tokens of the path")
        logits = logits.float()
        if self.mask_id is None:
            return logits.log_softmax(-1)
        never = float("-inf")
        if size < self.num_states:
            logits = torch.nn.functional.pad(logits, (0, self.num_states - size), value=never)
        states = torch.arange(self.num_states, device=x.device)
        logits = logits.masked_fill(states == self.mask_id, never)
        known = (x != self.mask_id)[..., None]
        return torch.where(known, torch.where(states == x[..., None], 0.0, never), logits.log_softmax(-1))

    def prior(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Tokens (shape) at t = 0, on the generator's device."""
        if self.mask_id is not None:
            return torch.full(shape, self.mask_id)
        device = "cpu" if generator is None else generator.device
        return torch.randint(self.num_tokens, shape, generator=generator, device=device)

    def noised(self, x1: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draws x_t ~ p_t(. | x1) for tokens (B, L) and times (B,), for pretraining."""
        rows = [self.marginal(row, float(time)) for row, time in zip(x1, t, strict=True)]
        probs = torch.cat(rows)
        return torch.multinomial(probs, 1, generator=generator).view(x1.shape)


class MixturePath(TokenPath):
    """From the mask token, or from uniform tokens, to the data."""

    def __init__(self, num_tokens: int, source: Source, mask_id: int | None = None, power: float = 1.0):
        """``mask_id`` is a data token that is never data, or V: a state of its own (the default)."""
        if power <= 0:
            raise UserError(f"kappa_power = {power:g}: kappa_t = t^power needs a power above 0")
        self.num_tokens, self.source, self.power = num_tokens, source, power
        if source == "mask":
            self.mask_id = num_tokens if mask_id is None else mask_id
            if not 0 <= self.mask_id <= num_tokens:
                raise UserError(f"mask_token_id = {mask_id}: not in 0 .. {num_tokens}")
        self.num_states = num_tokens + (self.mask_id == num_tokens)

    def kappa(self, t: float) -> float:
        """The share of the data at time t."""
        return float(t**self.power)

    def kappa_dot(self, t: float) -> float:
        """Its derivative; infinite at t = 0 for a power below 1."""
        if t == 0 and self.power < 1:
            return float("inf")
        return float(self.power * t ** (self.power - 1))

    def source_probs(self, states: Tensor) -> Tensor:
        """The source p0 of states, in float64."""
        if self.mask_id is not None:
            return (states == self.mask_id).double()
        return torch.full(states.shape, 1 / self.num_tokens, dtype=torch.float64, device=states.device)

    def marginal(self, x1: Tensor, t: float) -> Tensor:
        """A mixture of the source and x1."""
        states = torch.arange(self.num_states, device=x1.device)
        kappa = self.kappa(t)
        return (1 - kappa) * self.source_probs(states) + kappa * (states == x1[:, None]).double()

    def noised(self, x1: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """By a coin a token, which is faster than a table of probabilities."""
        kept = (
            torch.rand(x1.shape, generator=generator, dtype=torch.float64) < t[:, None].double() ** self.power
        )
        return torch.where(kept, x1, self.prior(tuple(x1.shape), generator))

    def jump(self, t: float, t_next: float, rule: Rule) -> float:
        """The probability of a jump to x1 != x, without corrector."""
        if t_next >= 1:
            return 1.0
        if rule == "integrated":
            return (self.kappa(t_next) - self.kappa(t)) / (1 - self.kappa(t))
        rate = self.kappa_dot(t) / (1 - self.kappa(t))
        return jump_probability((t_next - t) * rate, rule)

    def mobility(self, t: float, t_next: float, rule: Rule) -> float:
        """`jump`."""
        return self.jump(t, t_next, rule)

    def law(self, t: float, t_next: float, rule: Rule, corrector: float = 0.0) -> MixtureLaw:
        """The three-way law: to x1, to a token of the source, or stay."""
        if corrector == 0 or t_next >= 1:
            return MixtureLaw(self, self.jump(t, t_next, rule), 0.0, rule)
        if rule == "integrated":
            raise UserError(
                "a corrector needs rule exponential or euler: its rate cannot be integrated apart"
            )
        kappa, dot, h = self.kappa(t), self.kappa_dot(t), t_next - t
        if kappa == 0:  # everything is noise: noising again changes nothing
            return MixtureLaw(self, self.jump(t, t_next, rule), 0.0, rule)
        forward = h * (1 + corrector) * dot / (1 - kappa)
        return MixtureLaw(self, forward, h * corrector * dot / kappa, rule, rates=True)


class MixtureLaw(StepLaw):
    """K of a mixture path; which tokens x1 are told apart only by whether they are x."""

    def __init__(
        self, path: MixturePath, forward: float, noising: float, rule: Rule, rates: bool = False
    ) -> None:
        """``forward``, ``noising``: integrated rates to x1 and to the source; or just J, without rates."""
        self.path, self.forward, self.noising, self.rule, self.rates = path, forward, noising, rule, rates

    def shares(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For states x: J to x1, the jump's p0 factor when x1 != x, and that when x1 = x; float64.

        The probability of a token y != x is then ``J 1[y = x1] + factor p0(y)``.
        """
        if not self.rates:
            zero = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
            return zero + self.forward, zero, zero
        same = self.noising * (1 - self.path.source_probs(x))
        different = self.forward + same
        jump_same, jump = jump_probability(same, self.rule), jump_probability(different, self.rule)
        safe = torch.where(same > 0, same, torch.ones_like(same))
        factor_same = torch.where(same > 0, jump_same / safe, torch.zeros_like(same)) * self.noising
        return jump * self.forward / different, jump * self.noising / different, factor_same

    def at(self, x: Tensor, x1: Tensor, y: Tensor) -> Tensor:
        """By cases."""
        x, x1, y = torch.broadcast_tensors(x, x1, y)
        to_data, noise, noise_same = self.shares(x)
        known = x1 == x
        factor = torch.where(known, noise_same, noise)
        moved = torch.where(known, torch.zeros_like(to_data), to_data)
        p0 = self.path.source_probs
        away = moved * (y == x1) + factor * p0(y)
        stay = (1 - moved - factor * (1 - p0(x))).clamp(min=0)  # not -1e-16
        return torch.where(y == x, stay, away)

    def rows(self, x: Tensor, x1: Tensor) -> Tensor:
        """`at` for every state."""
        states = torch.arange(self.path.num_states, device=x.device)
        return self.at(x[:, None], x1[:, None], states[None])

    def marginal_log_probs(self, log_posterior: Tensor, x: Tensor) -> Tensor:
        """The log of the sum over x1 of p(x1) K(. | x, x1), in closed form.

        ``log_posterior`` (..., S) and x (...) give (..., S):

        y != x:   J p(y) + p0(y) (factor (1 - p(x)) + factor' p(x))
        y = x:    1 - J (1 - p(x)) - (1 - p0(x)) (factor (1 - p(x)) + factor' p(x))
        """
        here = log_posterior.gather(-1, x[..., None])  # log p(x1 = x)
        if not self.rates:
            jump = torch.tensor(self.forward, dtype=torch.float64)
            away = log_posterior + float(jump.log())
            if self.forward == 1.0:
                return away  # not by logaddexp, whose gradient is NaN where both are -inf
            stay = torch.logaddexp(here + float(jump.log()), torch.log1p(-jump).to(here))
            return away.scatter(-1, x[..., None], stay)
        to_data, noise, noise_same = (share.to(here.dtype)[..., None] for share in self.shares(x))
        p_here = here.exp()
        drift = noise * (1 - p_here) + noise_same * p_here
        states = torch.arange(self.path.num_states, device=x.device)
        p0, p0_here = (self.path.source_probs(s).to(here.dtype) for s in (states, x[..., None]))
        away = to_data * log_posterior.exp() + p0 * drift
        stay = 1 - to_data * (1 - p_here) - (1 - p0_here) * drift
        return away.scatter(-1, x[..., None], stay).clamp(min=TINY).log()


class DataLaw(StepLaw):
    """The last step: y = x1."""

    def __init__(self, num_states: int) -> None:
        """Of S states."""
        self.num_states = num_states

    def at(self, x: Tensor, x1: Tensor, y: Tensor) -> Tensor:
        """1 where y = x1."""
        x, x1, y = torch.broadcast_tensors(x, x1, y)
        return (y == x1).double()

    def rows(self, x: Tensor, x1: Tensor) -> Tensor:
        """One-hot."""
        return torch.nn.functional.one_hot(x1, self.num_states).double()


class PathLevel(float):
    """A noise level 1 - t of a token path, which it carries to the kernel."""

    path: TokenPath

    def __new__(cls, sigma: float, path: TokenPath) -> PathLevel:
        """``sigma`` in [0, 1]."""
        level = super().__new__(cls, sigma)
        level.path = path
        return level


P = TypeVar("P", bound=TokenPath)


def path_of(sigma: float, wanted: type[P], kernel: str) -> P:
    """The path that a noise level carries, for a kernel of a kind of path.

    Raises:
        UserError: if it is of another kind.
    """
    path = sigma.path if isinstance(sigma, PathLevel) else None
    if not isinstance(path, wanted):
        hint = {"MixturePath": "discrete_mixture", "MetricPath": "discrete_metric"}.get(type(path).__name__)
        raise UserError(
            f"sampler.kernel {kernel} needs a {wanted.__name__}, the pipeline has a {type(path).__name__}"
            + (f"; use {hint}" if hint else "")
        )
    return path


def jump_probability(rate, rule: Rule):  # type: ignore[no-untyped-def]
    """1 - exp(-rate), or min(1, rate): of a float or a tensor."""
    if isinstance(rate, float):
        return float(jump_probability(torch.tensor(rate, dtype=torch.float64), rule))
    return rate.clamp(max=1.0) if rule == "euler" else -torch.expm1(-rate)
