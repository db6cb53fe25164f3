"""Losses of pretraining, and the gradients and divergences of token transitions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from token_reference import (
    CASES,
    DRAWN,
    SOURCES,
    V,
    brute_table,
    draw,
    make_path,
    mask_of,
    path_law,
    posterior,
    states_of,
    transition,
)
from torch import Tensor

from flowrl.mdp.token_losses import cross_entropy, generalized_kl
from flowrl.mdp.token_paths import MixturePath
from flowrl.mdp.token_transitions import Draws, Joint

STEP = (0.3, 0.6)
ESTIMATORS = ({"estimator": "exact"}, {"estimator": "joint"}, {"estimator": "rate_mc", "num_draws": 3})
EVERY = [(source, {**options, **e}) for source, options in DRAWN for e in ESTIMATORS]
EVERY += [case for case in CASES if case not in DRAWN]
everything = pytest.mark.parametrize(
    ("source", "options"), EVERY, ids=lambda v: "-".join(map(str, v.values())) if isinstance(v, dict) else v
)


def exact_of(source: str) -> dict[str, Any]:
    return {"name": "discrete_metric" if source == "metric" else "discrete_mixture"}


def every_state(source: str) -> Tensor:
    return torch.arange(states_of(source))[None]


def mixture(source: str, power: float = 1.0) -> MixturePath:
    path = make_path(source, power)
    assert isinstance(path, MixturePath)
    return path


# -- losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["mask", "token"])
def test_on_a_masked_path_generalized_kl_is_cross_entropy_at_masks(source: str) -> None:
    """r times -log p(x1) at masks, 0 at known tokens; cross-entropy is the mean over masks."""
    path, mask = mixture(source, 2.0), mask_of(source)
    x1 = torch.tensor([[0, 2, 3, 0], [3, 2, 0, 2]])
    x = torch.where(torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1]]).bool(), torch.tensor(mask), x1)
    log_posterior = posterior(source, draw(2, 4, V), x)
    t = torch.tensor([0.2, 0.7])
    got = generalized_kl(path, log_posterior, x, x1, t)
    losses = []
    for row, time in enumerate((0.2, 0.7)):
        rate = 2 * time / (1 - time**2)
        for site in range(4):
            nats = -float(log_posterior[row, site, x1[row, site]])
            hidden = int(x[row, site]) == mask
            assert float(got[row, site]) == pytest.approx(rate * nats if hidden else 0.0, rel=1e-6)
            losses += [nats] if hidden else []
    assert float(cross_entropy(log_posterior, x1)) == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    nothing = cross_entropy(posterior(source, draw(2, 4, V), x1), x1)  # all is known
    assert float(nothing) == 0


def test_generalized_kl_of_uniform_tokens_by_hand() -> None:
    path, t = mixture("uniform"), 0.4
    log_posterior = draw(1, 2, V).log_softmax(-1)
    x, x1 = torch.tensor([[1, 1]]), torch.tensor([[1, 3]])
    p = log_posterior.exp()
    same, other = 1 - p[0, 0, 1], -p[0, 1, 1] - p[0, 1, 3].log()
    got = generalized_kl(path, log_posterior, x, x1, torch.tensor([t], dtype=torch.float64))
    torch.testing.assert_close(got, torch.stack([same, other])[None] / 0.6)


def true_posterior(source: str, t: float, prior: Tensor) -> tuple[Tensor, Tensor]:
    """p(x, x1) (S, V) and p(x1 | x) for one token of data with a law, by Bayes."""
    joint = torch.stack([prior[x1] * path_law(source, x1, t) for x1 in range(V)], dim=1)
    return joint, joint / joint.sum(1, keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize("loss", ["cross_entropy", "generalized_kl"])
@pytest.mark.parametrize("source", ["mask", "uniform"])
def test_losses_are_lowest_at_the_true_posterior(source: str, loss: str) -> None:
    """In expectation over x1 and x, by enumeration: no gradient there, and no other network is better."""
    path, t, size = mixture(source), 0.35, states_of(source)
    joint, right = true_posterior(source, t, torch.tensor([0.4, 0.3, 0.2, 0.1]).double())
    x, x1 = (v.flatten()[None] for v in torch.meshgrid(torch.arange(size), torch.arange(V), indexing="ij"))
    times = torch.tensor([t], dtype=torch.float64)

    def expected(logits: Tensor) -> Tensor:
        """Of logits (S, V), one row for each state."""
        log_posterior = posterior(source, logits[x[0]][None], x)
        if loss == "generalized_kl":
            return (
                (joint.flatten() * generalized_kl(path, log_posterior, x, x1, times)[0]).nan_to_num(0).sum()
            )
        single = [cross_entropy(log_posterior[:, i : i + 1], x1[:, i : i + 1]) for i in range(x.shape[1])]
        return (joint.flatten() * torch.stack(single)).nan_to_num(0).sum()

    best = right.clamp(min=1e-300).log().requires_grad_()
    value = expected(best)
    (gradient,) = torch.autograd.grad(value, best)
    assert float(gradient.abs().max()) < 1e-12 and float(value.detach()) >= 0
    for seed in range(10):
        worse = expected(best.detach() + 0.3 * draw(size, V, seed=seed))
        assert float(worse) > float(value.detach())


def test_generalized_kl_is_never_negative() -> None:
    """Not even for one token: p(x) + p(x1) <= 1 bounds it."""
    path = mixture("uniform")
    log_posterior = (3 * draw(50, 16, V)).log_softmax(-1)
    x, x1 = (torch.arange(16) // 4).expand(50, -1), (torch.arange(16) % 4).expand(50, -1)
    assert float(generalized_kl(path, log_posterior, x, x1, torch.full((50,), 0.5)).min()) >= 0


@pytest.mark.parametrize("source", ["mask", "uniform"])
def test_gradients_of_losses_are_finite(source: str) -> None:
    path, x = mixture(source), every_state(source)
    x1 = x.clamp(max=V - 1).roll(1) if source == "uniform" else torch.tensor([[0, 1, 2, 3, 1]])
    logits = (20 * draw(1, states_of(source), V, dtype=torch.float32)).requires_grad_()
    log_posterior = path.log_posterior(logits, x)
    total = generalized_kl(path, log_posterior, x, x1, torch.tensor([0.5])).sum() + cross_entropy(
        log_posterior, x1
    )
    (gradient,) = torch.autograd.grad(total, logits)
    assert bool(torch.isfinite(gradient).all()) and bool(torch.isfinite(total))
    assert torch.equal(gradient.abs().sum(-1)[0] > 0, torch.isfinite(log_posterior[0]).sum(-1) > 1)


# -- gradients of log-probabilities --------------------------------------------------------------------------


def recorded(
    source: str, options: dict[str, Any], rows: int = 3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, S, V) in float64, states (B, S) and an action drawn under other logits."""
    x = every_state(source).expand(rows, -1)
    logits, old = (draw(rows, x.shape[1], V, seed=seed + i) for i in (1, 2))
    acted = transition(options, make_path(source), posterior(source, old, x), x, STEP)
    return logits, x, acted.sample(draw(rows, *acted.noise_shape, seed=seed + 3))


@everything
def test_gradients_are_finite_differences(source: str, options: dict[str, Any]) -> None:
    """In float64; in float32, as in training, the same to its precision."""
    logits, x, action = recorded(source, options)
    path = make_path(source)

    def score(raw: Tensor) -> Tensor:
        return transition(options, path, posterior(source, raw, x), x, STEP).token_log_probs(action)

    assert torch.autograd.gradcheck(score, logits.requires_grad_(), atol=1e-6)
    (exact,) = torch.autograd.grad(score(logits).sum(), logits)
    single = logits.detach().float().requires_grad_()
    step = transition(options, path, path.log_posterior(single, x), x, STEP)
    (gradient,) = torch.autograd.grad(step.log_prob(action).sum(), single)
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-4, atol=1e-5)
    if mask_of(source) is not None:  # a token that is known has no say
        known = x != mask_of(source)
        assert float(gradient[known].abs().max()) == 0 and torch.equal(step.free, ~known)
        if options.get("corrector", 0.0) == 0:
            assert float(step.token_log_probs(action).detach()[known].abs().max()) < 1e-6
    else:
        assert bool(step.free.all())


@everything
def test_points_and_impossible_tokens_give_no_nan(source: str, options: dict[str, Any]) -> None:
    """Networks that are sure by a large logit, by all others being -inf, or have one token at -inf."""
    path, x = make_path(source), every_state(source)
    low = float("-inf")
    huge = torch.tensor([200.0, 0.0, 0.0, 0.0])
    point = torch.tensor([0.0, low, low, low])
    cut = torch.tensor([0.3, 0.1, low, 0.2])
    for step, row in itertools.product(((0.0, 0.2), STEP, (0.75, 1.0)), (huge, point, cut)):
        logits = row.expand(1, x.shape[1], V).clone().requires_grad_()
        made = transition(options, path, path.log_posterior(logits, x), x, step)
        action = made.sample(draw(1, *made.noise_shape, seed=1))
        values = made.token_log_probs(action)
        (gradient,) = torch.autograd.grad(values.sum() + made.kl(made).sum(), logits)
        assert bool(torch.isfinite(values).all()) and bool(torch.isfinite(gradient).all())
        if row is point:
            assert not bool(made.free.any()) and float(gradient.abs().max()) < 1e-6


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_pinned_is_deaf_to_the_network(source: str) -> None:
    """One finite logit left: raw logits there change nothing; at the last step it has log-probability 0."""
    path, x = make_path(source), every_state(source)
    pinned = torch.full((1, x.shape[1], V), float("-inf"))
    pinned[..., 2] = 0.0
    made = [
        transition(exact_of(source), path, path.log_posterior(pinned + shift, x), x, step)
        for shift, step in itertools.product((0.0, 3.0), (STEP, (0.75, 1.0)))
    ]
    assert not any(bool(step.free.any()) for step in made)
    action = made[0].sample(draw(1, *made[0].noise_shape))
    assert torch.equal(made[0].token_log_probs(action), made[2].token_log_probs(action))
    end = made[1].sample(draw(1, *made[1].noise_shape))
    expected = torch.full_like(x, 2) if mask_of(source) is None else torch.where(x == mask_of(source), 2, x)
    assert torch.equal(end, expected) and float(made[1].token_log_probs(end).abs().max()) == 0


@pytest.mark.parametrize("source", ["mask", "token"])
def test_known_tokens_are_deaf_to_the_network(source: str) -> None:
    """Whatever it says of them: to the last bit."""
    path, x = make_path(source), every_state(source)
    known = (x != mask_of(source))[..., None]
    logits = draw(1, x.shape[1], V, dtype=torch.float32)
    other = torch.where(known, 50 * draw(1, x.shape[1], V, seed=1).float(), logits)
    for estimator in ESTIMATORS:
        options = {**exact_of(source), **estimator}
        one, two = (transition(options, path, path.log_posterior(v, x), x, STEP) for v in (logits, other))
        noise = draw(1, *one.noise_shape, seed=4)
        action = one.sample(noise)
        assert torch.equal(action, two.sample(noise)) and torch.equal(
            one.log_prob(action), two.log_prob(action)
        )


# -- divergences ---------------------------------------------------------------------------------------------


@everything
def test_kl_is_the_sum_over_what_can_happen(source: str, options: dict[str, Any]) -> None:
    """Of next tokens, or of y and x1 for joint; 0 to itself, never negative."""
    path, x = make_path(source), every_state(source)
    p, q = (posterior(source, draw(1, x.shape[1], V, seed=seed), x) for seed in (1, 2))
    new, other = (transition(options, path, v, x, STEP) for v in (p, q))
    values = new.token_kl(other)
    assert values.shape == x.shape and float(values.min()) >= -1e-12
    assert float(new.token_kl(new).abs().max()) == 0
    tables = [brute_table(options, source, v, x, STEP)[0] for v in (p, q)]
    for site in range(x.shape[1]):
        pairs = list(zip(*(table[site].tolist() for table in tables), strict=True))
        exact = sum(a * math.log(a / b) for a, b in pairs if a > 0)
        if isinstance(new, Joint | Draws):  # that of the posteriors, which is no less
            assert float(values[0, site]) >= exact - 1e-12
            pairs = list(zip(p[0, site].exp().tolist(), q[0, site].exp().tolist(), strict=True))
            exact = sum(a * math.log(a / b) for a, b in pairs if a > 0)
        assert float(values[0, site]) == pytest.approx(exact, abs=1e-9)
    assert torch.equal(new.kl(other), values.sum(1))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("estimator", ["exact", "joint"])
def test_kl_by_monte_carlo(source: str, estimator: str) -> None:
    options = {**exact_of(source), "estimator": estimator}
    path, many = make_path(source), 20_000
    start = 0 if mask_of(source) is None else mask_of(source)
    x = torch.full((1, many), start)
    p, q = (posterior(source, draw(1, 1, V, seed=s), x[:, :1]).expand(1, many, -1) for s in (1, 2))
    new, other = (transition(options, path, v, x, STEP) for v in (p, q))
    action = new.sample(draw(1, *new.noise_shape))
    ratios = new.token_log_probs(action) - other.token_log_probs(action)
    small = [transition(options, path, v[:, :1], x[:, :1], STEP) for v in (p, q)]
    exact = float(small[0].kl(small[1]))
    assert exact > 0.01 and abs(float(ratios.mean()) - exact) < 4 * float(ratios.std()) / many**0.5
