"""Discrete flows written out anew from their rates, slowly and in float64, to test against.

V = 4 tokens. Sources: "mask" (a state of its own), "token" (token 1 is the mask), "uniform", "metric".
A rate matrix u and a step matrix K of one x1 are (S, S): rows the state now, columns the next.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from flowrl import registry
from flowrl.mdp.metric_path import MetricPath
from flowrl.mdp.token_paths import MixturePath, PathLevel, TokenPath
from flowrl.mdp.token_transitions import TokenTransition

V = 4
POINTS = torch.tensor([[0.9, 0.1], [-0.2, 0.7], [0.3, -0.8], [-0.6, -0.4]], dtype=torch.float64)
SOURCES = ("mask", "token", "uniform", "metric")
RULES = ("integrated", "exponential", "euler")
STEPS = [(0.0, 0.25), (0.0, 1.0), (0.3, 0.4), (0.3, 0.9), (0.5, 0.501), (0.75, 1.0)]
SCALE, EXPONENT = 3.0, 0.9


def kernels(source: str) -> list[dict[str, Any]]:
    """Options of every law of a source that has an exact form."""
    if source == "metric":
        return [{"name": "discrete_metric", "rule": rule} for rule in RULES]
    found: list[dict[str, Any]] = [{"name": "discrete_mixture", "rule": rule} for rule in RULES]
    found += [{"name": "discrete_mixture", "rule": rule, "corrector": 0.5} for rule in RULES[1:]]
    return found + [{"name": "discrete_marginal_euler", "rule": rule} for rule in RULES[1:]]


CASES = [(source, options) for source in SOURCES for options in kernels(source)]
DRAWN = [(source, options) for source, options in CASES if options["name"] != "discrete_marginal_euler"]


def make_path(source: str, power: float = 1.0) -> TokenPath:
    if source == "metric":
        return MetricPath(POINTS)
    if source == "token":
        return MixturePath(V, "mask", mask_id=1, power=power)
    return MixturePath(V, "mask" if source == "mask" else "uniform", power=power)


def level(path: TokenPath, t: float) -> PathLevel:
    return PathLevel(1 - t, path)


def transition(
    options: dict[str, Any], path: TokenPath, log_posterior: Tensor, x: Tensor, step: tuple[float, float]
) -> TokenTransition:
    kernel = registry.build("kernel", options, "sampler.kernel")
    made: TokenTransition = kernel(log_posterior, x, level(path, step[0]), level(path, step[1]))
    return made


def mask_of(source: str) -> int | None:
    return {"mask": V, "token": 1}.get(source)


def states_of(source: str) -> int:
    return V + (source == "mask")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def posterior(source: str, logits: Tensor, x: Tensor) -> Tensor:
    """Log-probabilities of x1 (..., S) for logits (..., V): never a mask; known tokens are known."""
    mask, size = mask_of(source), states_of(source)
    if mask is None:
        return logits.log_softmax(-1)
    wide = torch.cat([logits, logits[..., : size - V]], dim=-1)
    wide = torch.where(torch.arange(size) == mask, -math.inf, wide).log_softmax(-1)
    pinned = torch.where(torch.arange(size) == x[..., None], 0.0, -math.inf).to(logits)
    return torch.where((x == mask)[..., None], wide, pinned)


def source_law(source: str) -> Tensor:
    """p0 (S,)."""
    mask, size = mask_of(source), states_of(source)
    law = torch.full((size,), 1 / V, dtype=torch.float64)
    return law if mask is None else (torch.arange(size) == mask).double()


def beta(t: float) -> float:
    return SCALE * (t / (1 - t)) ** EXPONENT


def beta_dot(t: float) -> float:
    """By the chain rule; at t = 0 the authors' code has 0."""
    return 0.0 if t == 0 else SCALE * EXPONENT * (t / (1 - t)) ** (EXPONENT - 1) * (1 - t) ** -2


def distance(y: int, x1: int) -> float:
    return sum(float(a - b) ** 2 for a, b in zip(POINTS[y], POINTS[x1], strict=True))


def path_law(source: str, x1: int, t: float, power: float = 1.0) -> Tensor:
    """p_t(. | x1)."""
    if source == "metric":
        weights = [math.exp(-beta(t) * distance(y, x1)) for y in range(V)]
        return torch.tensor(weights, dtype=torch.float64) / sum(weights)
    kappa = t**power
    law = (1 - kappa) * source_law(source)
    law[x1] += kappa
    return law


def rates(source: str, x1: int, t: float, power: float = 1.0, corrector: float = 0.0) -> Tensor:
    """u(y, x | x1) off the diagonal, per unit of beta' for the metric source."""
    size = states_of(source)
    u = torch.zeros(size, size, dtype=torch.float64)
    law = path_law(source, x1, t, power)
    for x in range(size):
        for y in range(size):
            if x == y:
                continue
            if source == "metric":
                u[x, y] = law[y] * max(0.0, distance(x, x1) - distance(y, x1))
                continue
            kappa, dot = t**power, power * t ** (power - 1)
            u[x, y] = dot / (1 - kappa) * (y == x1)
            if corrector and kappa > 0:
                u[x, y] += corrector * dot / (kappa * (1 - kappa)) * law[y]
    return u


@functools.cache
def step_matrix(
    source: str,
    x1: int,
    step: tuple[float, float],
    rule: str = "integrated",
    corrector: float = 0.0,
    power: float = 1.0,
) -> Tensor:
    """K(y | x, x1): a jump by the rule, then to y ~ u / lambda."""
    t, t_next = step
    size = states_of(source)
    if t_next == 1:
        return (torch.arange(size) == x1).double().expand(size, size).clone()
    u = rates(source, x1, t, power, corrector)
    if rule != "integrated":
        integral = u * (t_next - t) * (beta_dot(t) if source == "metric" else 1.0)
    elif source == "metric":
        integral = u * (beta(t_next) - beta(t))
    else:
        integral = u * 0
        integral[:, x1] = -math.log((1 - t_next**power) / (1 - t**power))
        integral.fill_diagonal_(0.0)
    total = integral.sum(1)
    jump = total.clamp(max=1) if rule == "euler" else 1 - torch.exp(-total)
    matrix = integral * (jump / torch.where(total > 0, total, 1.0))[:, None]
    return matrix + torch.diag(1 - jump)


def brute_table(
    options: dict[str, Any], source: str, log_posterior: Tensor, x: Tensor, step: tuple[float, float]
) -> Tensor:
    """The law of the next tokens (B, L, S), by a sum over all x1."""
    size = states_of(source)
    probs = log_posterior.double().exp()
    if options["name"] == "discrete_marginal_euler":
        return _marginal_rate_table(options, probs, x, step)
    rule, corrector = options.get("rule", "integrated"), options.get("corrector", 0.0)
    table = torch.zeros(*x.shape, size, dtype=torch.float64)
    for x1 in range(size):
        if x1 == mask_of(source):
            continue
        table += probs[..., x1, None] * step_matrix(source, x1, step, rule, corrector)[x]
    return table


def _marginal_rate_table(
    options: dict[str, Any], probs: Tensor, x: Tensor, step: tuple[float, float]
) -> Tensor:
    """Of the rates averaged over x1, for kappa = t."""
    t, t_next = step
    if t_next == 1:
        return probs
    rate = probs / (1 - t) * (t_next - t)
    rate = rate.scatter(-1, x[..., None], 0.0)
    total = rate.sum(-1, keepdim=True)
    jump = total.clamp(max=1) if options["rule"] == "euler" else 1 - torch.exp(-total)
    table = rate * jump / torch.where(total > 0, total, 1.0)
    return table.scatter(-1, x[..., None], 1 - jump)
