"""Token paths against their definitions: marginals, rates that transport them, laws of a step, chains."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from token_reference import (
    POINTS,
    RULES,
    SOURCES,
    STEPS,
    V,
    beta,
    beta_dot,
    distance,
    draw,
    make_path,
    mask_of,
    path_law,
    posterior,
    rates,
    states_of,
    step_matrix,
    transition,
)
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.metric_path import MetricPath, MetricRows, MetricTables
from flowrl.mdp.token_paths import MixturePath, StepLaw
from flowrl.mdp.token_transitions import Categorical, Marginal

MIXTURES = ("mask", "token", "uniform")
TIMES = (0.0, 0.2, 0.5, 0.9)


def data_tokens(source: str) -> list[int]:
    return [x1 for x1 in range(V) if x1 != mask_of(source)]


def matrix(law: StepLaw, source: str, x1: int) -> Tensor:
    """K(y | x, x1) (S, S)."""
    states = torch.arange(states_of(source))
    return law.rows(states, torch.full_like(states, x1))


# -- marginals and rates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_marginals_are_those_of_the_definition(source: str) -> None:
    for power in (1.0,) if source == "metric" else (0.5, 1.0, 2.0):
        path = make_path(source, power)
        assert path.num_tokens == V and path.num_states == states_of(source)
        assert path.mask_id == mask_of(source)
        for t in TIMES:
            got = path.marginal(torch.tensor(data_tokens(source)), t)
            expected = torch.stack([path_law(source, x1, t, power) for x1 in data_tokens(source)])
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("source", SOURCES)
def test_ends_of_the_path(source: str) -> None:
    """Noise that knows nothing of x1 at t = 0, x1 itself at t = 1."""
    path = make_path(source)
    x1 = torch.tensor(data_tokens(source))
    start, end = path.marginal(x1, 0.0), path.marginal(x1, 1.0)
    torch.testing.assert_close(start, start[:1].expand_as(start))
    assert torch.equal(end.argmax(-1), x1) and torch.equal(end.amax(-1), torch.ones(len(x1)).double())
    prior = path.prior((4000,), torch.Generator().manual_seed(0))
    counts = torch.bincount(prior, minlength=path.num_states)
    assert fits(counts, start[0])


def fits(counts: Tensor, probs: Tensor) -> bool:
    """Whether counts have a law, by a chi-square test; nothing impossible happened."""
    possible = probs > 1e-12
    assert int(counts[~possible].sum()) == 0
    if int(possible.sum()) == 1:
        return True
    expected = probs[possible] / probs[possible].sum() * counts.sum()
    return bool(chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-3)


@pytest.mark.parametrize("source", SOURCES)
def test_noised_data_has_the_marginal_of_its_row(source: str) -> None:
    path = make_path(source, 1.0 if source == "metric" else 2.0)
    x1 = torch.tensor([[0], [2]]).expand(2, 10_000)
    times = torch.tensor([0.3, 0.8])
    x = path.noised(x1, times, torch.Generator().manual_seed(1))
    for row, (token, t) in enumerate(((0, 0.3), (2, 0.8))):
        counts = torch.bincount(x[row], minlength=path.num_states)
        assert fits(counts, path_law(source, token, t, 1.0 if source == "metric" else 2.0))


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("corrector", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("source", MIXTURES)
def test_mixture_rates_transport_the_path(source: str, corrector: float, power: float) -> None:
    """Kolmogorov's forward equation, for the rates of the reference; the laws below have those rates."""
    for t, x1 in itertools.product((0.2, 0.5, 0.9), data_tokens(source)):
        u, law = rates(source, x1, t, power, corrector), path_law(source, x1, t, power)
        derivative = power * t ** (power - 1) * (path_law(source, x1, 1.0) - path_law(source, x1, 0.0))
        assert float((law @ u - law * u.sum(1) - derivative).abs().max()) < 1e-12


def test_metric_rates_transport_the_path() -> None:
    """Kolmogorov's forward equation with dp/dt of the softmax, and that by finite differences."""
    path = make_path("metric")
    assert isinstance(path, MetricPath)
    states = torch.arange(V)
    for t in (0.05, 0.2, 0.5, 0.9, 0.97):
        law = path.marginal(states, t)
        d = path.distances(states)
        slope = path.beta_dot(t)
        derivative = slope * law * ((law * d).sum(1, keepdim=True) - d)
        for x1 in range(V):
            u = slope * law[x1] * (d[x1][:, None] - d[x1]).clamp(min=0)  # (x, y)
            torch.testing.assert_close(u, rates("metric", x1, t) * beta_dot(t), rtol=1e-9, atol=1e-12)
            assert float((law[x1] @ u - law[x1] * u.sum(1) - derivative[x1]).abs().max()) < 1e-8
        tiny = 1e-5 * (1 - t)
        difference = (path.marginal(states, t + tiny) - path.marginal(states, t - tiny)) / (2 * tiny)
        assert float((difference - derivative).abs().max()) < 1e-6


def test_distances_and_sharpness_are_those_of_the_definition() -> None:
    path = make_path("metric")
    assert isinstance(path, MetricPath)
    got = path.distances(torch.arange(V))
    for x1, y in itertools.product(range(V), range(V)):
        assert float(got[x1, y]) == pytest.approx(distance(y, x1), abs=1e-14)
    fourth = MetricPath(POINTS, power=4.0).distances(torch.arange(V))
    torch.testing.assert_close(fourth, got.square(), rtol=1e-12, atol=1e-14)
    for t in (0.1, 0.6):
        assert path.beta(t) == pytest.approx(beta(t)) and path.beta_dot(t) == pytest.approx(beta_dot(t))
        assert path.beta_dot(t) == pytest.approx((beta(t + 1e-6) - beta(t - 1e-6)) / 2e-6, rel=1e-6)
    assert path.beta(0.0) == 0 and path.beta_dot(0.0) == 0


# -- laws of a step ------------------------------------------------------------------------------------------


def laws(source: str) -> list[tuple[str, float]]:
    plain = [(rule, 0.0) for rule in RULES]
    return plain if source == "metric" else [*plain, *((rule, c) for rule in RULES[1:] for c in (0.5, 30.0))]


@pytest.mark.parametrize(
    ("source", "power"), [*itertools.product(MIXTURES, (0.5, 1.0, 2.0)), ("metric", 1.0)]
)
def test_laws_are_those_of_the_rates(source: str, power: float) -> None:
    """Every element, three ways of access; rows are probabilities."""
    path = make_path(source, power)
    size = states_of(source)
    states = torch.arange(size)
    steps = STEPS if power == 1 else STEPS[3:]  # kappa' is infinite or 0 at t = 0
    for (rule, corrector), step, x1 in itertools.product(laws(source), steps, data_tokens(source)):
        law = path.law(*step, rule, corrector)
        got = matrix(law, source, x1)
        expected = step_matrix(source, x1, step, rule, corrector, power)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        assert float(got.min()) >= 0, (rule, corrector, step)
        torch.testing.assert_close(got.sum(1), torch.ones(size).double(), rtol=0, atol=1e-12)
        at = law.at(states[:, None], torch.tensor(x1), states[None])
        torch.testing.assert_close(at, got, rtol=1e-12, atol=1e-15)
        for y in range(size):
            column = law.columns(states, torch.full_like(states, y), size)[:, x1]
            torch.testing.assert_close(column, got[:, y], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("source", ["mask", "uniform"])
@pytest.mark.parametrize("rule", RULES[1:])
def test_a_strong_corrector_never_makes_a_probability_negative(source: str, rule: Any) -> None:
    """The chance to stay is 1 minus parts that add up to 1: rounding must not push it below 0."""
    path = make_path(source)
    for t, h, corrector in itertools.product((0.01, 0.05, 0.3, 0.37), (0.5, 0.61), (0.5, 1.0, 30.0, 1e3)):
        for x1 in data_tokens(source):
            law = matrix(path.law(t, t + h, rule, corrector), source, x1)
            assert float(law.min()) >= 0 and float((law.sum(1) - 1).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("exponential", (0.2212, 0.2835, 0.3935)),
        ("euler", (0.25, 0.3333, 0.5)),
        ("integrated", (0.25, 0.3333, 0.5)),
    ],
)
@pytest.mark.parametrize("source", MIXTURES)
def test_jump_probabilities(source: str, rule: Any, expected: tuple[float, ...]) -> None:
    """At kappa = t and h = .25; the last step takes x1 by every rule."""
    path = make_path(source)
    assert isinstance(path, MixturePath)
    for t, value in zip((0.0, 0.25, 0.5), expected, strict=True):
        assert path.jump(t, t + 0.25, rule) == pytest.approx(value, abs=5e-5)
        law = matrix(path.law(t, t + 0.25, rule), source, 0)
        assert float(law[2, 0]) == pytest.approx(value, abs=5e-5)
        assert path.mobility(t, t + 0.25, rule) == path.jump(t, t + 0.25, rule)
    assert path.jump(0.75, 1.0, rule) == 1
    last = matrix(path.law(0.75, 1.0, rule), source, 0)
    assert bool((last[:, 0] == 1).all()) and float(last[:, 1:].abs().max()) == 0


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_the_integrated_rule_follows_the_path_exactly(power: float) -> None:
    """J = (kappa' - kappa) / (1 - kappa); steps compose, and p_t goes to p_t' whatever the step."""
    for source in MIXTURES:
        path = make_path(source, power)
        assert isinstance(path, MixturePath)
        for t, t_next in ((0.0, 0.3), (0.3, 0.8), (0.8, 0.99)):
            jump = (t_next**power - t**power) / (1 - t**power)
            assert path.jump(t, t_next, "integrated") == pytest.approx(jump, rel=1e-12)
            middle = 0.4 * t + 0.6 * t_next
            for x1 in data_tokens(source):
                whole = matrix(path.law(t, t_next, "integrated"), source, x1)
                first, second = (
                    matrix(path.law(a, b, "integrated"), source, x1)
                    for a, b in ((t, middle), (middle, t_next))
                )
                torch.testing.assert_close(first @ second, whole, rtol=1e-12, atol=1e-14)
                moved, reached = path_law(source, x1, t, power) @ whole, path_law(source, x1, t_next, power)
                torch.testing.assert_close(moved, reached, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("source", ["uniform", "metric"])
@pytest.mark.parametrize("rule", ["exponential", "euler"])
def test_rules_agree_to_second_order(source: str, rule: Any) -> None:
    """Half the step, a quarter of the difference."""
    path = make_path(source)
    gaps = []
    for h in (1e-3, 5e-4, 2.5e-4):
        pair = [matrix(path.law(0.4, 0.4 + h, r), source, 1) for r in ("integrated", rule)]
        gaps.append(float((pair[0] - pair[1]).abs().max()))
    if gaps[0] < 1e-12:  # euler is exact for kappa = t
        assert source == "uniform" and rule == "euler"
        return
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.03) and gaps[1] / gaps[2] == pytest.approx(4, rel=0.03)


@pytest.mark.parametrize("source", SOURCES)
def test_the_corrector_keeps_the_path_to_second_order(source: str) -> None:
    """A step with it, too, brings p_t to p_t' but for O(h^2); a metric path has none."""
    path = make_path(source)
    if source == "metric":
        with pytest.raises(UserError, match="corrector"):
            path.law(0.4, 0.5, "exponential", 0.5)
        return
    with pytest.raises(UserError, match="corrector"):
        path.law(0.4, 0.5, "integrated", 0.5)
    errors = []
    for h in (1e-2, 5e-3):
        law = matrix(path.law(0.4, 0.4 + h, "exponential", 2.0), source, 0)
        moved = path_law(source, 0, 0.4) @ law - path_law(source, 0, 0.4 + h)
        errors.append(float(moved.abs().max()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05) and errors[0] < 1e-2


def test_tables_and_rows_of_a_metric_path_agree() -> None:
    path = MetricPath(draw(30, 3), power=1.5)
    states = torch.arange(30)
    x, x1 = (v.flatten() for v in torch.meshgrid(states, states, indexing="ij"))
    for t, growth, rule in itertools.product((0.0, 0.3, 0.9), (0.01, 2.0, 1e3), ("exponential", "euler")):
        tables, rows = MetricTables(path, t, growth, rule), MetricRows(path, t, growth, rule)
        whole = rows.rows(x, x1)
        torch.testing.assert_close(tables.rows(x, x1), whole, rtol=0, atol=1e-12)
        torch.testing.assert_close(whole.sum(1), torch.ones(900).double(), rtol=0, atol=1e-12)
        assert float(whole.min()) >= 0 and float(tables.rows(x, x1).min()) >= 0
        y = x1.roll(7)
        torch.testing.assert_close(tables.at(x, x1, y), rows.at(x, x1, y), rtol=0, atol=1e-12)
        torch.testing.assert_close(tables.columns(x, y, 30), rows.columns(x, y, 30), rtol=0, atol=1e-12)


def test_rules_of_one_metric_path_are_kept_apart() -> None:
    """Exponential and euler have the same growth of beta, but not the same law."""
    path = make_path("metric")
    first = {rule: matrix(path.law(0.3, 0.5, rule), "metric", 0) for rule in ("exponential", "euler")}
    for rule, law in first.items():
        torch.testing.assert_close(law, step_matrix("metric", 0, (0.3, 0.5), rule))
    assert path.law(0.3, 0.5, "euler") is path.law(0.3, 0.5, "euler")


def test_mobility_bounds_the_jumps_of_a_metric_path() -> None:
    path = make_path("metric")
    for rule, (t, t_next) in itertools.product(RULES, STEPS):
        jumps = [1 - matrix(path.law(t, t_next, rule), "metric", x1).diagonal() for x1 in range(V)]
        assert path.mobility(t, t_next, rule) >= float(torch.stack(jumps).max()) - 1e-12
    assert path.mobility(0.0, 0.25, "exponential") == 0 and path.mobility(0.0, 0.25, "integrated") > 0


@pytest.mark.parametrize("source", SOURCES)
def test_log_posterior(source: str) -> None:
    """A mask is never x1, a token that is not masked is known, whatever the network says."""
    path, x = make_path(source), torch.tensor([[0, 1, 2, states_of(source) - 1]])
    logits = draw(1, 4, V, dtype=torch.float32)
    got = path.log_posterior(logits, x)
    assert got.dtype == torch.float32 and got.shape == (1, 4, states_of(source))
    torch.testing.assert_close(got, posterior(source, logits, x))
    if source == "mask":  # a network with a logit for the mask as well: that one does not count
        wide = torch.cat([logits, torch.full((1, 4, 1), 9.0)], dim=-1)
        torch.testing.assert_close(path.log_posterior(wide, x), got)
    with pytest.raises(UserError, match="logits"):
        path.log_posterior(draw(1, 4, V + 2), x)


# -- an enumerated chain -------------------------------------------------------------------------------------

TOKENS, SITES = 3, 2
DATA = torch.tensor([[0.30, 0.05, 0.10], [0.02, 0.20, 0.08], [0.10, 0.03, 0.12]], dtype=torch.float64)


def chain_path(source: str) -> Any:
    if source == "metric":
        return MetricPath(torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64), power=1.0)
    return MixturePath(TOKENS, source)


def bayes(path: Any, t: float, x: Tensor) -> Tensor:
    """The true p(x1 of each site | both sites) (N, 2, S) of states x (N, 2), by Bayes' rule over the data."""
    likelihood = path.marginal(torch.arange(TOKENS), t)  # (x1, x)
    joint = DATA[None] * likelihood[:, x[:, 0]].T[:, :, None] * likelihood[:, x[:, 1]].T[:, None]
    total = joint.sum((1, 2))
    joint = torch.where(total[:, None, None] > 0, joint, DATA)  # states that do not occur
    joint = joint / joint.sum((1, 2), keepdim=True)
    sites = torch.stack([joint.sum(2), joint.sum(1)], dim=1)
    return torch.nn.functional.pad(sites, (0, path.num_states - TOKENS))


def end_of_chain(source: str, steps: int, rule: str) -> float:
    """Total variation between the data and the chain's end, by exact laws of all states."""
    path = chain_path(source)
    size = path.num_states
    x = torch.tensor(list(itertools.product(range(size), repeat=SITES)))
    options = {"name": "discrete_metric" if source == "metric" else "discrete_mixture", "rule": rule}
    start = path.marginal(torch.tensor([0]), 0.0)[0]
    law = torch.outer(start, start).flatten()
    for k in range(steps):
        t, t_next = k / steps, (k + 1) / steps
        step = transition(options, path, bayes(path, t, x).log(), x, (t, t_next))
        assert isinstance(step, (Categorical, Marginal))
        sites = (step.table() if isinstance(step, Marginal) else step.log_probs).exp()
        law = law @ (sites[:, 0, :, None] * sites[:, 1, None, :]).flatten(1)
    end = law.view(size, size)
    assert float(end.sum()) == pytest.approx(1, abs=1e-9)
    return (
        float((end[:TOKENS, :TOKENS] - DATA).abs().sum() + end[TOKENS:].sum() + end[:TOKENS, TOKENS:].sum())
        / 2
    )


@pytest.mark.parametrize("source", ["mask", "uniform", "metric"])
def test_a_chain_ends_in_the_data(source: str) -> None:
    """Under the true posterior the joint law of two dependent tokens comes out, within 1 / steps."""
    one, few, many, most = (end_of_chain(source, steps, "integrated") for steps in (1, 8, 64, 128))
    assert one == pytest.approx(0.272, abs=1e-9)  # the distance of the product of the margins from the data
    assert 0.02 < few < 0.07 and most < 0.01
    assert 1.8 < many / most < 2.2
    frozen = end_of_chain(source, 64, "exponential")
    assert frozen > many
