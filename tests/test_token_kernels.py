"""Kernels of discrete flows: they sum to one, draw what they score, and score what the rates say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from token_reference import (
    CASES,
    DRAWN,
    POINTS,
    SOURCES,
    STEPS,
    V,
    brute_table,
    draw,
    make_path,
    mask_of,
    posterior,
    states_of,
    step_matrix,
    transition,
)
from torch import Tensor

from flowrl.mdp.token_logits import reshape_logits
from flowrl.mdp.token_transitions import Draws, Joint, Marginal, TokenTransition
from flowrl.pipelines.token_scheduler import DiscreteFlowScheduler

STEP = (0.3, 0.6)
ESTIMATORS = ({"estimator": "exact"}, {"estimator": "joint"}, {"estimator": "rate_mc", "num_draws": 3})


def name_of(case: Any) -> str:
    return "-".join(str(v) for v in case.values()) if isinstance(case, dict) else str(case)


cases = pytest.mark.parametrize(("source", "options"), CASES, ids=name_of)
sampled = pytest.mark.parametrize(
    ("source", "options"), [case for case in DRAWN if case[0] != "token"], ids=name_of
)
drawn = pytest.mark.parametrize(("source", "options"), DRAWN, ids=name_of)
estimators = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e["estimator"])


def every_state(source: str) -> Tensor:
    """Two rows of positions in every state (2, S)."""
    return torch.arange(states_of(source)).expand(2, -1)


def logits_of(source: str, seed: int = 0) -> Tensor:
    """Those of a mild and of a sure network (2, S, V), float32."""
    logits = draw(2, states_of(source), V, seed=seed, dtype=torch.float32)
    return logits * torch.tensor([1.0, 8.0])[:, None, None]


def scores(step: TokenTransition, x: Tensor, size: int, seed: int = 3) -> Tensor:
    """The log-probabilities (B, L, S) of all next states; for Draws, with one set of recorded draws."""
    columns = []
    for y in range(size):
        tokens = torch.full_like(x, y)
        if isinstance(step, Joint):
            parts = [
                step.token_log_probs(torch.stack([tokens, torch.full_like(x, x1)], -1)) for x1 in range(size)
            ]
            columns.append(torch.stack(parts).logsumexp(0))
        elif isinstance(step, Draws):
            action = step.sample(draw(len(x), *step.noise_shape, seed=seed))
            columns.append(step.token_log_probs(torch.cat([tokens[..., None].double(), action[..., 1:]], -1)))
        else:
            columns.append(step.token_log_probs(tokens))
    return torch.stack(columns, dim=-1)


# -- probabilities -------------------------------------------------------------------------------------------


@cases
def test_exact_laws_are_the_sum_over_all_x1(source: str, options: dict[str, Any]) -> None:
    """Of p(x1) K(y | x, x1), with K from the rates; they sum to one, and the table is what is scored."""
    path, x, size = make_path(source), every_state(source), states_of(source)
    for step in STEPS:
        log_posterior = path.log_posterior(logits_of(source), x)
        made = transition(options, path, log_posterior, x, step)
        probs = scores(made, x, size).exp()
        assert float((probs.sum(-1) - 1).abs().max()) < 1e-6 and float(probs.min()) >= 0
        expected = brute_table(options, source, log_posterior, x, step)
        torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-6)
        if isinstance(made, Marginal):
            torch.testing.assert_close(made.table().exp(), probs, rtol=1e-12, atol=1e-200)
        # And to the last digit, if the posterior has them.
        fine = posterior(source, logits_of(source).double(), x)
        probs = scores(transition(options, path, fine, x, step), x, size).exp()
        torch.testing.assert_close(probs, brute_table(options, source, fine, x, step), rtol=1e-9, atol=1e-12)


@drawn
@pytest.mark.parametrize("estimator", ESTIMATORS[1:], ids=lambda e: e["estimator"])
def test_other_estimators_sum_to_one(source: str, options: dict[str, Any], estimator: dict[str, Any]) -> None:
    """Joint over y and x1; rate_mc over y, whatever was drawn, under the policy that drew."""
    path, x, size = make_path(source), every_state(source), states_of(source)
    for step in STEPS:
        log_posterior = path.log_posterior(logits_of(source), x)
        made = transition({**options, **estimator}, path, log_posterior, x, step)
        probs = scores(made, x, size).exp()
        assert float((probs.sum(-1) - 1).abs().max()) < 1e-6 and float(probs.min()) >= 0
        if isinstance(made, Joint):
            expected = brute_table(options, source, log_posterior, x, step)
            torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-6)


def test_marginal_rates_and_drawn_x1_agree_to_second_order() -> None:
    path, x = make_path("uniform"), every_state("uniform")
    fine = posterior("uniform", logits_of("uniform").double(), x)
    gaps = []
    for h in (1e-2, 5e-3):
        pair = [
            transition({"name": name, "rule": "exponential"}, path, fine, x, (0.4, 0.4 + h))
            for name in ("discrete_mixture", "discrete_marginal_euler")
        ]
        gaps.append(float((scores(pair[0], x, V).exp() - scores(pair[1], x, V).exp()).abs().max()))
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("name", ["discrete_mixture", "discrete_marginal_euler"])
@pytest.mark.parametrize("power", [0.5, 2.0])
def test_first_steps_with_an_infinite_or_no_rate(name: str, power: float) -> None:
    """kappa' is infinite (all jump) or 0 (all stay) at t = 0; gradients stay finite."""
    for source in ("mask", "uniform"):
        path, x = make_path(source, power), every_state(source)
        logits = logits_of(source).requires_grad_()
        log_posterior = path.log_posterior(logits, x)
        made = transition({"name": name, "rule": "exponential"}, path, log_posterior, x, (0.0, 0.25))
        values = scores(made, x, states_of(source))
        assert float((values.detach().exp().sum(-1) - 1).abs().max()) < 1e-6
        stay = values.detach().exp().gather(-1, x[..., None])[..., 0]
        if power == 2:
            assert float((stay - 1).abs().max()) < 1e-6
        else:
            free = made.free
            expected = (
                log_posterior.exp().gather(-1, x[..., None])[..., 0]
                if name == "discrete_mixture"
                else 0 * stay
            )
            torch.testing.assert_close(stay[free], expected[free].to(stay), rtol=1e-5, atol=1e-6)
        (gradient,) = torch.autograd.grad(torch.where(values > -50, values, 0.0).sum(), logits)
        assert bool(torch.isfinite(gradient).all())


# -- draws ---------------------------------------------------------------------------------------------------

MANY, REDRAWS = 20_000, 5_000


def fits(values: Tensor, probs: Tensor) -> bool:
    """Whether draws have a law, by a chi-square test; nothing impossible was drawn."""
    counts = torch.bincount(values.flatten(), minlength=len(probs)).double()
    likely = probs * values.numel() >= 5
    assert float(counts[probs < 1e-12].sum()) == 0
    rest = torch.stack([counts[~likely].sum(), probs[~likely].sum() * values.numel()])
    seen, expected = counts[likely], probs[likely] * values.numel()
    if float(rest[1]) >= 1:
        seen, expected = torch.cat([seen, rest[:1]]), torch.cat([expected, rest[1:]])
    if len(seen) < 2:
        return True
    expected = expected / expected.sum() * seen.sum()
    return bool(chisquare(seen.numpy(), expected.numpy()).pvalue > 1e-3)


def guided(x: int, temperature: float) -> Tensor:
    """Logits (1, 1, V) with guidance 3 and a temperature."""
    cond, uncond = (draw(1, 1, V, seed=seed + x, dtype=torch.float32) for seed in (10, 20))
    return reshape_logits(uncond + 3.0 * (cond - uncond) * 0.5, temperature)


def where_from(source: str) -> tuple[int, ...]:
    """States to draw from: two tokens, or the mask and a token."""
    mask = mask_of(source)
    return (0, 2) if mask is None else (mask, 2)


@sampled
@estimators
def test_samples_have_the_law_that_is_scored(
    source: str, options: dict[str, Any], estimator: dict[str, Any]
) -> None:
    """At three temperatures, with guidance; for the drawn x1 of joint as well."""
    path, size = make_path(source), states_of(source)
    first, second = where_from(source)
    for temperature, start in ((0.5, first), (1.0, second), (1.5, first)):
        x = torch.full((1, MANY), start)
        log_posterior = path.log_posterior(guided(start, temperature), x[:, :1]).expand(1, MANY, size)
        made = transition({**options, **estimator}, path, log_posterior, x, STEP)
        action = made.sample(draw(1, *made.noise_shape, seed=11))
        one = brute_table(options, source, log_posterior[:, :1], x[:, :1], STEP)[0, 0]
        assert fits(made.state(action), one), (temperature, start)
        if isinstance(made, Joint):
            y, x1 = action.unbind(-1)
            p, k = log_posterior[0, 0].double().exp(), path.law(*STEP, *law_options(options))
            joint = p[:, None] * k.rows(torch.full((size,), start), torch.arange(size))
            assert fits(x1 * size + y, joint.flatten())


def law_options(options: dict[str, Any]) -> tuple[Any, float]:
    return options["rule"], options.get("corrector", 0.0)


@pytest.mark.parametrize(
    ("source", "rule"), [*itertools.product(("mask", "uniform"), ("exponential", "euler"))]
)
def test_samples_of_the_marginal_rate(source: str, rule: str) -> None:
    path, options = make_path(source), {"name": "discrete_marginal_euler", "rule": rule}
    for start in where_from(source):
        x = torch.full((1, MANY), start)
        log_posterior = path.log_posterior(guided(start, 1.0).expand(1, MANY, V), x)
        made = transition(options, path, log_posterior, x, STEP)
        action = made.sample(draw(1, *made.noise_shape, seed=8))
        assert fits(action, brute_table(options, source, log_posterior[:, :1], x[:, :1], STEP)[0, 0])


@drawn
def test_the_deployed_scheduler_has_the_same_law(source: str, options: dict[str, Any]) -> None:
    rule, corrector = law_options(options)
    scheduler = DiscreteFlowScheduler(
        num_tokens=V,
        path="mask" if source == "token" else source,
        mask_token_id=1 if source == "token" else None,
        metric_normalized=False,
        rule=rule,
        corrector=corrector,
    )
    scheduler.set_embeddings(POINTS)
    scheduler.set_timesteps(4)
    generator = torch.Generator().manual_seed(5)
    for index, temperature, start in ((1, 1.5, 0), (2, 0.5, 1), (3, 1.0, 0)):
        x = torch.full((1, MANY), where_from(source)[start])
        logits = guided(start, temperature).expand(1, MANY, V)
        y = scheduler.step(logits, scheduler.timesteps[index], x, generator=generator)[0]
        step = (index / 4, (index + 1) / 4)
        log_posterior = posterior(source, logits[:, :1].double(), x[:, :1])
        assert fits(y, brute_table(options, source, log_posterior, x[:, :1], step)[0, 0])
        # The path of the scheduler is the one that kernels are given.
        made = transition(options, scheduler.path, log_posterior, x[:, :1], step)
        expected = brute_table(options, source, log_posterior, x[:, :1], step)
        torch.testing.assert_close(
            scores(made, x[:, :1], states_of(source)).exp(), expected, rtol=1e-5, atol=1e-6
        )


def test_extreme_noise_draws_nothing_impossible() -> None:
    """Numbers so large that the uniform one rounds to 0 or 1."""
    path, x = make_path("mask"), torch.tensor([[V, V]])
    made = transition({"name": "discrete_mixture"}, path, path.log_posterior(draw(1, 2, V), x), x, (0.5, 1.0))
    assert made.sample(torch.tensor([[-40.0, 40.0]])).tolist() == [[0, V - 1]]


# -- estimators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_rate_mc_is_unbiased_and_its_variance_falls(source: str) -> None:
    """Of the probability of each y under another policy than the one that drew; variance like 1 / n."""
    name = "discrete_metric" if source == "metric" else "discrete_mixture"
    path, size, start = make_path(source), states_of(source), where_from(source)[0]
    x = torch.full((1, REDRAWS), start)
    old, new = (path.log_posterior(draw(1, 1, V, seed=s).float(), x[:, :1]) for s in (1, 2))
    exact = brute_table({"name": name}, source, new, x[:, :1], STEP)[0, 0]
    variances = []
    for n in (4, 16, 64):
        options = {"name": name, "estimator": "rate_mc", "num_draws": n}
        acted, now = (transition(options, path, p.expand(1, REDRAWS, size), x, STEP) for p in (old, new))
        recorded = acted.sample(draw(1, *acted.noise_shape, seed=n))
        spread = torch.zeros(size, dtype=torch.float64)
        for y in range(size):
            action = torch.cat([torch.full((1, REDRAWS, 1), float(y)).double(), recorded[..., 1:]], -1)
            estimates = now.token_log_probs(action).exp()
            error = float(estimates.std()) / REDRAWS**0.5
            assert abs(float(estimates.mean() - exact[y])) <= 4 * error + 1e-7, (n, y)
            spread[y] = estimates.var()
        ratio = (now.token_log_probs(recorded) - acted.token_log_probs(recorded)).exp()
        assert abs(float(ratio.mean()) - 1) <= 4 * float(ratio.std()) / REDRAWS**0.5 + 1e-7
        variances.append(spread)
    moving = variances[0] > 1e-9
    assert moving.any()
    for more, less in itertools.pairwise(variances):
        torch.testing.assert_close(
            more[moving] / less[moving], torch.full((int(moving.sum()),), 4.0).double(), rtol=0.2, atol=0
        )


@drawn
def test_joint_has_the_ratio_of_the_posteriors(source: str, options: dict[str, Any]) -> None:
    """And its expectation given y is the ratio of the exact law (Rao-Blackwell)."""
    options = {**options, "estimator": "joint"}
    path, size, start = make_path(source), states_of(source), where_from(source)[0]
    x = torch.full((1, MANY), start)
    old, new = (path.log_posterior(draw(1, 1, V, seed=s).float(), x[:, :1]) for s in (1, 2))
    acted, now = (transition(options, path, p.expand(1, MANY, size), x, STEP) for p in (old, new))
    action = acted.sample(draw(1, *acted.noise_shape))
    y, x1 = action.unbind(-1)
    log_ratio = now.token_log_probs(action) - acted.token_log_probs(action)
    expected = (new - old)[0, 0][x1].double()
    torch.testing.assert_close(log_ratio, expected, rtol=1e-9, atol=1e-9)
    tables = [brute_table(options, source, p, x[:, :1], STEP)[0, 0] for p in (new, old)]
    for token in range(size):
        some = log_ratio[y == token].exp()
        if len(some) > 100:
            error = float(some.std()) / len(some) ** 0.5
            assert abs(float(some.mean() - tables[0][token] / tables[1][token])) < 4 * error + 1e-6


def test_monte_carlo_of_a_metric_step() -> None:
    """x1 from the posterior and then y from the rates of the reference, without the code under test."""
    source, generator = "metric", torch.Generator().manual_seed(0)
    log_posterior = posterior(source, draw(1, 1, V), torch.tensor([[0]]))
    x1 = torch.multinomial(log_posterior[0, 0].exp(), MANY, replacement=True, generator=generator)
    law = torch.stack([step_matrix(source, token, STEP)[3] for token in range(V)])
    y = torch.multinomial(law[x1], 1, generator=generator)
    x = torch.tensor([[3]])
    made = transition({"name": "discrete_metric"}, make_path(source), log_posterior, x, STEP)
    assert fits(y, scores(made, x, V).exp()[0, 0])


def test_has_density_free_and_shapes() -> None:
    """L positions a row, one number or several each; only what the network decides is free."""
    path, x = make_path("mask"), torch.tensor([[V, 0, V]])
    log_posterior = path.log_posterior(draw(1, 3, V), x)
    for options, shape in zip(ESTIMATORS, ((3,), (3, 2), (3, 5)), strict=True):
        made = transition({"name": "discrete_mixture", **options}, path, log_posterior, x, STEP)
        assert made.noise_shape == shape and made.event_size == 3 and made.has_density
        assert made.free.tolist() == [[True, False, True]]
        action = made.sample(draw(1, *shape))
        assert made.state(action).shape == (1, 3) and made.state(action).dtype == torch.long
        values = made.token_log_probs(action)
        assert values.dtype == torch.float64 and torch.equal(made.log_prob(action), values.sum(1))
        with pytest.raises(ValueError, match="scaled"):
            made.scaled(2.0)
