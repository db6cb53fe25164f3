"""Transitions of token states: what kernels on discrete paths return.

A position's next token y is drawn by the posterior p(x1 | x) of the network and the law K(y | x, x1) of the
step (flowrl/mdp/token_paths.py). Four ways to score it, for B rows of L positions, V tokens, S states:

    Categorical    log p(y), a table (B, L, S): where the sum over x1 has a closed form
    Marginal       log sum over x1 of p(x1) K(y | x, x1): exact, V terms a position
    Joint          log p(x1) + log K(y | x, x1) of the x1 that was drawn
    Draws          log (1/n) sum over j of p(x1_j) / p_old(x1_j) K(y | x, x1_j), x1_j ~ p_old

The first two give a smaller variance: they average what the third leaves to chance (Rao-Blackwell). The last
is an unbiased estimate of p(y) for a y that does not depend on the draws. The recorded y does, being drawn by
the law of one of them, and its estimate is too high; but new over old is an unbiased importance ratio for
(y, draws), E_old[ratio f(y)] = E_new[f(y)], and training needs no more.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from flowrl.mdp.token_paths import StepLaw
from flowrl.mdp.transitions import Transition, sum_events

CHUNK = 16  # positions of which whole tables (S, V) are held at a time


class TokenTransition(Transition):
    """A distribution over the next tokens, independent from position to position."""

    def __init__(self, log_posterior: Tensor, sample: Tensor) -> None:
        """``log_posterior``: (B, L, S) float32, of x1; ``sample``: (B, L) the tokens now."""
        self.log_posterior = log_posterior
        self.x = sample

    @property
    def event_size(self) -> int:
        """Number of positions L."""
        return self.x.shape[1]

    @property
    def free(self) -> Tensor:
        """(B, L) bool: where the next token depends on the network; a known token has one chance only."""
        return torch.isfinite(self.log_posterior.detach()).sum(-1) > 1

    @property
    def has_density(self) -> bool:
        """Always."""
        return True

    @abstractmethod
    def token_log_probs(self, action: Tensor) -> Tensor:
        """Log-probability of an action, position by position: float64 (B, L)."""

    @abstractmethod
    def token_kl(self, other: Transition) -> Tensor:
        """KL(self || other), position by position: float64 (B, L)."""

    def log_prob(self, action: Tensor) -> Tensor:
        """The sum over positions."""
        return sum_events(self.token_log_probs(action))

    def kl(self, other: Transition) -> Tensor:
        """The sum over positions."""
        return sum_events(self.token_kl(other))

    def scaled(self, factor: float) -> TokenTransition:
        """Tokens have no scale: 1 only."""
        if factor != 1.0:
            raise ValueError("token states cannot be scaled")
        return self


class Categorical(TokenTransition):
    """By a table of log-probabilities."""

    def __init__(self, log_probs: Tensor, log_posterior: Tensor, sample: Tensor) -> None:
        """``log_probs``: (B, L, S) of the next token."""
        super().__init__(log_posterior, sample)
        self.log_probs = log_probs

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """One number a position."""
        return (self.event_size,)

    def sample(self, noise: Tensor) -> Tensor:
        """By the inverse of the cumulative distribution."""
        return draw(self.log_probs, noise)

    def token_log_probs(self, action: Tensor) -> Tensor:
        """From the table."""
        return _pick(self.log_probs, action)

    def token_kl(self, other: Transition) -> Tensor:
        """Exact, a sum over the states."""
        assert isinstance(other, Categorical)
        return _kl(self.log_probs, other.log_probs)


class Marginal(TokenTransition):
    """By the sum over all x1."""

    def __init__(self, log_posterior: Tensor, sample: Tensor, law: StepLaw) -> None:
        """``law``: K of the step."""
        super().__init__(log_posterior, sample)
        self.law = law

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Two numbers a position."""
        return (self.event_size, 2)

    def sample(self, noise: Tensor) -> Tensor:
        """Draws x1, then y."""
        x1 = _inverse(self._posterior.detach(), noise[..., 0].flatten()).view(self.x.shape)
        return _draw_row(self.law, self.x, x1, noise[..., 1])

    @cached_property
    def _posterior(self) -> Tensor:
        """Probabilities of x1, float64 (B L, V)."""
        return self.log_posterior.flatten(0, 1).double().exp()

    def token_log_probs(self, action: Tensor) -> Tensor:
        """V terms a position."""
        posterior = self._posterior
        columns = self.law.columns(self.x.flatten(), action.flatten(), posterior.shape[1])
        return (posterior * columns).sum(-1).clamp(min=1e-300).log().view(self.x.shape)

    def table(self) -> Tensor:
        """The whole table of log-probabilities, float64 (B, L, S); V S terms a position, some at a time."""
        posterior = self.log_posterior.flatten(0, 1).double()
        size = posterior.shape[1]
        states = torch.arange(size, device=self.x.device)
        parts = []
        for p, x in zip(posterior.split(CHUNK), self.x.flatten().split(CHUNK), strict=True):
            kernel = self.law.at(x[:, None, None], states[None, :, None], states[None, None])  # x1 by y
            parts.append((p.exp()[:, None] @ kernel)[:, 0])
        return torch.cat(parts).clamp(min=1e-300).log().view(*self.x.shape, size)

    def token_kl(self, other: Transition) -> Tensor:
        """Exact, from both tables: V times as dear as a log-probability."""
        assert isinstance(other, Marginal)
        return _kl(self.table(), other.table())


class Joint(TokenTransition):
    """By the x1 that was drawn, which is part of the action (B, L, 2): y and x1."""

    def __init__(self, log_posterior: Tensor, sample: Tensor, law: StepLaw) -> None:
        """``law``: K of the step."""
        super().__init__(log_posterior, sample)
        self.law = law

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Two numbers a position."""
        return (self.event_size, 2)

    def sample(self, noise: Tensor) -> Tensor:
        """Draws x1, then y."""
        x1 = draw(self.log_posterior, noise[..., 0])
        return torch.stack([_draw_row(self.law, self.x, x1, noise[..., 1]), x1], dim=-1)

    def state(self, action: Tensor) -> Tensor:
        """The next tokens."""
        return action[..., 0]

    def token_log_probs(self, action: Tensor) -> Tensor:
        """The law is free of parameters: only the posterior has a gradient."""
        y, x1 = action.unbind(-1)
        return _pick(self.log_posterior, x1) + self.law.at(self.x, x1, y).log()

    def token_kl(self, other: Transition) -> Tensor:
        """Exact: that of the posteriors, since both share the law."""
        assert isinstance(other, Joint)
        return _kl(self.log_posterior, other.log_posterior)


class Draws(TokenTransition):
    """By n draws of x1, which are part of the action.

    An action is (B, L, 1 + 2 n) in float64: y, the n draws, and the log-probabilities under which they were
    drawn. y is drawn from the K of one of them.
    """

    def __init__(self, log_posterior: Tensor, sample: Tensor, law: StepLaw, num_draws: int) -> None:
        """``law``: K of the step; ``num_draws``: n."""
        super().__init__(log_posterior, sample)
        self.law, self.num_draws = law, num_draws

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Per position n + 2 numbers."""
        return (self.event_size, self.num_draws + 2)

    def sample(self, noise: Tensor) -> Tensor:
        """The draws, then which of them, then y."""
        n = self.num_draws
        draws = torch.stack([draw(self.log_posterior, noise[..., j]) for j in range(n)], dim=-1)
        chosen = (uniform(noise[..., n]) * n).long().clamp(max=n - 1)
        x1 = draws.gather(-1, chosen[..., None])[..., 0]
        y = _draw_row(self.law, self.x, x1, noise[..., n + 1])
        log_probs = self.log_posterior.gather(-1, draws).double()
        return torch.cat([y[..., None].double(), draws.double(), log_probs], dim=-1)

    def state(self, action: Tensor) -> Tensor:
        """The next tokens."""
        return action[..., 0].long()

    def token_log_probs(self, action: Tensor) -> Tensor:
        """An estimate of p(y), as a logarithm: see the head of this file for what is unbiased."""
        n = self.num_draws
        y, draws, old = action[..., :1].long(), action[..., 1 : n + 1].long(), action[..., n + 1 :]
        new = self.log_posterior.gather(-1, draws).double()
        law = self.law.at(self.x[..., None], draws, y).log()
        return (new - old + law).logsumexp(-1) - math.log(n)

    def token_kl(self, other: Transition) -> Tensor:
        """That of the posteriors: an upper bound, which averaging over x1 can only lower."""
        assert isinstance(other, Draws)
        return _kl(self.log_posterior, other.log_posterior)


def uniform(noise: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float64, from standard normal ones."""
    return torch.special.ndtr(noise.double()).clamp(max=1 - 2**-53)


def draw(log_probs: Tensor, noise: Tensor) -> Tensor:
    """States (...) from log-probabilities (..., S), by one standard normal number each (...)."""
    return _inverse(log_probs.detach().double().exp(), noise)


def _draw_row(law: StepLaw, x: Tensor, x1: Tensor, noise: Tensor) -> Tensor:
    return _inverse(law.rows(x.flatten(), x1.flatten()), noise.flatten()).view(x.shape)


def _inverse(probs: Tensor, noise: Tensor) -> Tensor:
    """The first state whose cumulated probability exceeds a uniform number: never one of probability 0."""
    cumulated = probs.cumsum(-1)
    level = uniform(noise)[..., None] * cumulated[..., -1:]
    found = torch.searchsorted(cumulated, level, right=True)[..., 0]
    return found.clamp(max=probs.shape[-1] - 1)


def _pick(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens[..., None])[..., 0].double()


def _kl(new: Tensor, other: Tensor) -> Tensor:
    """The sum p (log p - log q) over the last axis; states without probability add nothing."""
    new, other = new.double(), other.double()
    possible = torch.isfinite(new)
    difference = torch.where(possible, new, 0.0) - torch.where(possible, other, 0.0)
    return (torch.where(possible, new, float("-inf")).exp() * difference).sum(-1)
