"""Metric paths of discrete flows: tokens near each other are reached before far ones.

    p_t(y | x1) = softmax_y(-beta_t d(y, x1)),            beta_t = scale (t / (1 - t))^exponent
    u(y, x | x1) = p_t(y | x1) beta' [d(x, x1) - d(y, x1)]_+

d is a power of the Euclidean distance of token embeddings. The law of a step is in
flowrl/mdp/token_paths.py; with b the growth of beta in it, and for one x1,

    slack(x) = sum over y of p_t(y) [d(x) - d(y)]_+            lambda = beta' slack
    K(y | x) = (1 - exp(-b slack(x))) p_t(y) [d(x) - d(y)]_+ / slack(x)        y != x

Up to `TABLE_TOKENS` tokens the tables of V x V are made once a step; above, rows are made for the x1 that
are asked for, which only the estimators by draws can afford.

Source: arXiv 2412.03487 (eq. for kinetic-optimal rates), 2505.20147 (FUDOKI: scale 3, exponent 0.9; d is the
fourth power of the distance of normalised embeddings in its code, the first in its text).
Shapes: N positions, V tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.token_paths import DataLaw, Rule, StepLaw, TokenPath, jump_probability

TABLE_TOKENS = 1024
MAX_LAWS = 64  # kept tables: of two schedules with 32 steps each
CHUNK = 256  # rows of V numbers that are held at a time where there are no tables


class MetricPath(TokenPath):
    """Between tokens with embeddings: a softmax over distances that sharpens with time."""

    def __init__(
        self, embeddings: Tensor, power: float = 2.0, scale: float = 3.0, exponent: float = 0.9
    ) -> None:
        """Takes embeddings (V, D); d(y, x1) = |e(y) - e(x1)|^power.

        Raises:
            UserError: if two tokens have the same embedding, or an option is not above 0.
        """
        for name, value in (("power", power), ("scale", scale), ("exponent", exponent)):
            if not value > 0:
                raise UserError(f"metric_{name} = {value}: above 0 is needed")
        if len(embeddings.unique(dim=0)) < len(embeddings):
            raise UserError("two tokens have the same embedding: a metric path cannot tell them apart")
        self.embeddings, self.power = embeddings.detach(), power
        self.num_tokens = self.num_states = len(embeddings)
        self.scale, self.exponent = scale, exponent
        self._laws: dict[tuple[float, float, str], StepLaw] = {}

    def distances(self, x1: Tensor) -> Tensor:
        """Distances d(y, x1) for x1 (N,) and every y: float64 (N, V)."""
        points = self.embeddings.double().to(x1.device)
        exact = "donot_use_mm_for_euclid_dist"  # the other way, 0 comes out as 1e-8
        return torch.cdist(points[x1], points, compute_mode=exact) ** self.power

    def beta(self, t: float) -> float:
        """The sharpness of the path at t < 1."""
        return float(self.scale * (t / (1 - t)) ** self.exponent)

    def beta_dot(self, t: float) -> float:
        """Its derivative; 0 at t = 0 where it is infinite, as the authors have it: the step stays."""
        if t == 0 and self.exponent < 1:
            return 0.0
        return float(self.scale * self.exponent * (t / (1 - t)) ** (self.exponent - 1) / (1 - t) ** 2)

    def marginal(self, x1: Tensor, t: float) -> Tensor:
        """The law ``softmax(-beta d)``."""
        if t >= 1:
            return torch.nn.functional.one_hot(x1, self.num_states).double()
        return (-self.beta(t) * self.distances(x1)).softmax(-1)

    def growth(self, t: float, t_next: float, rule: Rule) -> float:
        """How much beta grows in a step, or would at its first rate."""
        if rule == "integrated":
            return self.beta(t_next) - self.beta(t)
        return (t_next - t) * self.beta_dot(t)

    def mobility(self, t: float, t_next: float, rule: Rule) -> float:
        """A bound: the slack of a token is at most its distance, and that the power of the diameter."""
        if t_next >= 1:
            return 1.0
        reach = 2 * float(self.embeddings.double().norm(dim=-1).max())
        return jump_probability(self.growth(t, t_next, rule) * reach**self.power, rule)

    def law(self, t: float, t_next: float, rule: Rule, corrector: float = 0.0) -> StepLaw:
        """The kinetic-optimal law, kept: one for each step of a schedule."""
        if corrector:
            raise UserError("a metric path has no corrector")
        if t_next >= 1:
            return DataLaw(self.num_states)
        growth = self.growth(t, t_next, rule)
        rule = "exponential" if rule == "integrated" else rule
        if (t, growth, rule) not in self._laws:
            kind = MetricTables if self.num_tokens <= TABLE_TOKENS else MetricRows
            if len(self._laws) == MAX_LAWS:
                self._laws.pop(next(iter(self._laws)))
            self._laws[t, growth, rule] = kind(self, t, growth, rule)
        return self._laws[t, growth, rule]


class MetricTables(StepLaw):
    """K by tables (V, V): row x1, column x or y."""

    def __init__(self, path: MetricPath, t: float, growth: float, rule: Rule) -> None:
        """Makes the tables."""
        states = torch.arange(path.num_tokens, device=path.embeddings.device)
        self.distances = path.distances(states)
        self.probs = path.marginal(states, t)
        self.jumps, self.gain = jumps_and_gain(self.distances, self.probs, growth, rule)
        tables = (self.distances, self.gain, self.probs, 1 - self.jumps)
        self._by_state = tuple(table.T.contiguous() for table in tables)  # rows are read faster than columns

    def at(self, x: Tensor, x1: Tensor, y: Tensor) -> Tensor:
        """By elements."""
        x, x1, y = torch.broadcast_tensors(x, x1, y)
        nearer = (self.distances[x1, x] - self.distances[x1, y]).clamp(min=0)
        return torch.where(y == x, 1 - self.jumps[x1, x], self.gain[x1, x] * self.probs[x1, y] * nearer)

    def rows(self, x: Tensor, x1: Tensor) -> Tensor:
        """By whole rows."""
        own = self.distances[x1]
        away = own.gather(1, x[:, None]).sub(own).clamp_(min=0).mul_(self.probs[x1])
        away.mul_(self.gain[x1, x][:, None])
        return away.scatter_(1, x[:, None], 1 - self.jumps[x1, x][:, None])

    def columns(self, x: Tensor, y: Tensor, num_tokens: int) -> Tensor:
        """By whole columns."""
        distances, gain, probs, stays = self._by_state
        values = distances[x].sub_(distances[y]).clamp_(min=0).mul_(gain[x]).mul_(probs[y])
        stayed = (x == y).nonzero()[:, 0]
        return values.index_copy_(0, stayed, stays[x[stayed]])


class MetricRows(StepLaw):
    """K without tables: the distances of an x1 to all tokens are made when it is asked for."""

    def __init__(self, path: MetricPath, t: float, growth: float, rule: Rule) -> None:
        """Keeps what is needed to make a row."""
        self.path, self.beta, self.growth, self.rule = path, path.beta(t), growth, rule

    def at(self, x: Tensor, x1: Tensor, y: Tensor) -> Tensor:
        """Row by row, `CHUNK` at a time."""
        x, x1, y = torch.broadcast_tensors(x, x1, y)
        parts = [
            self.rows(*some[:2]).gather(1, some[2][:, None])[:, 0]
            for some in zip(*(v.flatten().split(CHUNK) for v in (x, x1, y)), strict=True)
        ]
        return torch.cat(parts).view(x.shape)

    def rows(self, x: Tensor, x1: Tensor) -> Tensor:
        """By one pass over the distances of each x1."""
        own = self.path.distances(x1)
        probs = (-self.beta * own).softmax(-1)
        flow = probs * (own.gather(1, x[:, None]) - own).clamp(min=0)
        slack = flow.sum(-1, keepdim=True)
        jump = jump_probability(self.growth * slack, self.rule)
        away = flow * jump / torch.where(slack > 0, slack, 1.0)
        return away.scatter(1, x[:, None], 1 - jump)


def jumps_and_gain(distances: Tensor, probs: Tensor, growth: float, rule: Rule) -> tuple[Tensor, Tensor]:
    """1 - exp(-growth slack), and that over the slack (0 where there is none), for tables (V, V).

    For one x1 all slacks come from one sort of the distances: with P and (P d) cumulated over nearer tokens,
    slack = d P - (P d).
    """
    ordered, order = distances.sort(dim=1)
    mass = probs.gather(1, order)
    slack = ordered * mass.cumsum(1) - (mass * ordered).cumsum(1)
    slack = torch.empty_like(slack).scatter(1, order, slack.clamp(min=0))
    slack = slack.masked_fill(torch.eye(len(slack), dtype=torch.bool, device=slack.device), 0.0)
    jumps = jump_probability(growth * slack, rule)
    return jumps, torch.where(slack > 0, jumps / torch.where(slack > 0, slack, 1.0), 0.0)
