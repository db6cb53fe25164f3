"""dFlowGRPO: the policy gradient at ratio 1, clipping as PPO does, and means over the right positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from token_reference import V, brute_table, draw, make_path, posterior, transition
from torch import Tensor

from flowrl import registry
from flowrl.mdp.metric_path import MetricPath
from flowrl.mdp.token_paths import MixturePath
from flowrl.mdp.token_transitions import TokenTransition
from flowrl.mdp.transitions import Gaussian
from flowrl.objective import TrajectoryStep

STEP = (0.3, 0.6)
ROWS, SITES = 4, 6
ADVANTAGES = torch.tensor([1.5, -0.7, 2.0, -1.0])
LEVELS = ("sequence", "token", "dim")
AVERAGES = ("all", "changeable", "changed")
MIXTURE = {"name": "discrete_mixture"}
STATES = torch.tensor([[V, 0, V, 1, V, V], [V, V, 2, 2, 0, 1], [V, V, V, V, V, V], [3, 1, 0, V, 2, V]])
OLD, NEW, REFERENCE = (draw(ROWS, SITES, V, seed=seed) for seed in (1, 2, 3))


def build(**options: Any) -> Any:
    return registry.build("objective", {"name": "dflow_grpo", **options}, "objective")


def law(
    logits: Tensor, x: Tensor, source: str = "mask", options: dict[str, Any] = MIXTURE
) -> TokenTransition:
    return transition(options, make_path(source), posterior(source, logits, x), x, STEP)


def step_of(now: TokenTransition, action: Tensor, old: Tensor, **fields: Any) -> TrajectoryStep:
    """A step with the log-probabilities `old` (B, L) of the policy that acted."""
    rows = len(old)
    made = TrajectoryStep(
        index=0,
        sigma=1 - STEP[0],
        sigma_next=1 - STEP[1],
        transition=now,
        reference=None,
        log_prob=now.log_prob(action),
        old_log_prob=old.sum(1),
        action=action,
        noise=torch.zeros(rows, *now.noise_shape),
        old_projection=None,
        advantages=ADVANTAGES[:rows],
        valid=torch.ones(rows, dtype=torch.bool),
        old_token_log_probs=old,
    )
    return replace(made, **fields)


def step(
    new: Tensor, x: Tensor = STATES, source: str = "mask", options: dict[str, Any] = MIXTURE, **fields: Any
) -> TrajectoryStep:
    """An action drawn under the logits OLD, scored under `new`."""
    acted, now = law(OLD, x, source, options), law(new, x, source, options)
    action = acted.sample(draw(ROWS, *acted.noise_shape, seed=5))
    return step_of(now, action, acted.token_log_probs(action), **fields)


def gradient(objective: Any, new: Tensor, **options: Any) -> Tensor:
    leaf = new.clone().requires_grad_()
    return torch.autograd.grad(objective(step(leaf, **options))[0], leaf)[0]


def uniform_states() -> Tensor:
    return torch.arange(ROWS * SITES).view(ROWS, SITES) % V


# -- the policy gradient -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("source", ["uniform", "metric"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_by_hand_for_one_position(level: str, source: str, dtype: torch.dtype) -> None:
    """-A d log p(y): the softmax's derivative through p(y) = sum over x1 of p(x1) K(y | x, x1)."""
    options = MIXTURE if source == "uniform" else {"name": "discrete_metric"}
    x, y = torch.tensor([[0], [0], [1], [1]]), torch.tensor([[0], [1], [0], [1]])
    logits = torch.tensor([[[0.3, -0.4]]], dtype=torch.float64).expand(4, 1, 2)
    eye = torch.eye(2, dtype=torch.float64)
    if source == "uniform":
        path: Any = MixturePath(2, "uniform")
        jump = 0.3 / 0.7
        kernel = jump * eye[None] + (1 - jump) * eye[:, None].expand(2, 2, 2)  # x, x1, y
    else:
        path = MetricPath(torch.tensor([[0.0], [1.0]]))
        growth = 3 * ((0.6 / 0.4) ** 0.9 - (0.3 / 0.7) ** 0.9)
        near = 1 / (1 + math.exp(-3 * (0.3 / 0.7) ** 0.9))  # p_t(x1 | x1)
        jump = 1 - math.exp(-growth * near)
        kernel = torch.zeros(2, 2, 2, dtype=torch.float64)
        for a in range(2):
            kernel[a, a, a], kernel[a, 1 - a, 1 - a], kernel[a, 1 - a, a] = 1.0, jump, 1 - jump
    q = logits.softmax(-1)[0, 0]
    expected = torch.zeros(4, 1, 2, dtype=torch.float64)
    for row in range(4):
        weights = kernel[x[row, 0], :, y[row, 0]] * q
        expected[row, 0] = -float(ADVANTAGES[row]) / 4 * (weights / weights.sum() - q)
    leaf = logits.to(dtype).clone().requires_grad_()
    now = transition(options, path, leaf.log_softmax(-1), x, STEP)
    loss, metrics = build(level=level)(step_of(now, y, now.token_log_probs(y).detach()))
    (got,) = torch.autograd.grad(loss, leaf)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    assert loss.dtype == torch.float64 and metrics["log_ratio_max"] == 0 and metrics["ratio_mean"] == 1


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("source", ["mask", "uniform"])
def test_levels_have_one_gradient_at_ratio_one(source: str, average: str) -> None:
    """That of -A times the mean log-probability over the averaged positions."""
    x = STATES if source == "mask" else uniform_states()
    got = [gradient(build(level=level, average=average), OLD, x=x, source=source) for level in LEVELS]
    leaf = OLD.clone().requires_grad_()
    made = step(leaf, x, source)
    counted = positions(made, average)
    means = [
        made.transition.token_log_probs(made.action)[b, c].mean() for b, c in enumerate(counted) if c.any()
    ]
    weights = [float(ADVANTAGES[b]) for b, c in enumerate(counted) if c.any()]
    loss = -torch.stack([a * m for a, m in zip(weights, means, strict=True)]).sum() / ROWS
    (expected,) = torch.autograd.grad(loss, leaf)
    for each in got:
        torch.testing.assert_close(each, expected, rtol=1e-10, atol=1e-14)
    assert float(expected.abs().max()) > 0


def positions(made: TrajectoryStep, average: str) -> Tensor:
    """The positions (B, L) of the mean, by their definition."""
    now, x = made.transition, made.transition.x
    if average == "all":
        return torch.ones_like(x).bool()
    if average == "changed":
        return torch.as_tensor(now.state(made.action) != x)
    return torch.as_tensor(x == V) if int(x.max()) == V else torch.ones_like(x).bool()


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("mask", MIXTURE),
        ("mask", {**MIXTURE, "estimator": "rate_mc", "num_draws": 5}),
        ("uniform", {**MIXTURE, "estimator": "joint"}),
        ("uniform", {"name": "discrete_marginal_euler"}),
        ("metric", {"name": "discrete_metric"}),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_the_policy_that_acted_has_ratio_exactly_one(
    source: str, options: dict[str, Any], level: str
) -> None:
    x = STATES if source == "mask" else uniform_states()
    loss, metrics = build(level=level)(step(OLD, x, source, options))
    assert metrics["log_ratio_max"] == 0.0 and metrics["ratio_mean"] == 1.0
    assert metrics["clip_frac_low"] == 0 and metrics["clip_frac_high"] == 0
    assert float(loss) == pytest.approx(-float(ADVANTAGES.mean()))


# -- clipping ------------------------------------------------------------------------------------------------

LOW, HIGH = 0.1, 0.2
TABLE = [  # advantage, ratio, value of -A rho after PPO's clip, whether it has a gradient
    (2.0, 1.5, -2 * 1.2, False),
    (2.0, 1.1, -2 * 1.1, True),
    (2.0, 0.5, -2 * 0.5, True),
    (-2.0, 1.5, 2 * 1.5, True),
    (-2.0, 0.95, 2 * 0.95, True),
    (-2.0, 0.5, 2 * 0.9, False),
]


def at_ratio(advantage: float, ratios: Tensor, leaf: Tensor) -> TrajectoryStep:
    """One row of tokens from a uniform source whose ratios are as said."""
    x = torch.zeros(1, ratios.shape[1], dtype=torch.long)
    now = law(leaf, x, "uniform")
    action = torch.ones_like(x)
    old = now.token_log_probs(action).detach() - ratios.log()
    return step_of(now, action, old, advantages=torch.tensor([advantage]))


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize(("advantage", "ratio", "value", "moves"), TABLE)
def test_clip_is_that_of_ppo(level: str, advantage: float, ratio: float, value: float, moves: bool) -> None:
    leaf = draw(1, 3, V).requires_grad_()
    made = at_ratio(advantage, torch.full((1, 3), ratio, dtype=torch.float64), leaf)
    loss, metrics = build(level=level, clip_low=LOW, clip_high=HIGH)(made)
    assert float(loss.detach()) == pytest.approx(value, rel=1e-9)
    (got,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    score = made.transition.token_log_probs(made.action).mean()
    (direction,) = torch.autograd.grad(score, leaf)
    torch.testing.assert_close(got, -advantage * ratio * direction * moves, rtol=1e-9, atol=1e-12)
    assert metrics["ratio_mean"] == pytest.approx(ratio)
    assert metrics["clip_frac_low"] == (ratio < 1 - LOW) and metrics["clip_frac_high"] == (ratio > 1 + HIGH)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_levels_of_the_clip_by_hand(advantage: float) -> None:
    """Ratios of positions that differ: clipped as a geometric mean, one by one, or in the mean's exponent."""
    ratios = [1.5, 0.5, 1.05, 1.0]
    table = torch.tensor([ratios], dtype=torch.float64)
    whole = math.exp(sum(math.log(r) for r in ratios) / 4)

    def clip(r: float) -> float:
        return min(max(r, 1 - LOW), 1 + HIGH)

    expected = {
        "sequence": max(-advantage * whole, -advantage * clip(whole)),
        "token": sum(max(-advantage * r, -advantage * clip(r)) for r in ratios) / 4,
        "dim": -advantage * math.exp(sum(math.log(clip(r)) for r in ratios) / 4),
    }
    moving = {
        "sequence": [clip(whole) == whole or advantage > 0] * 4,
        "token": [max(-advantage * r, -advantage * clip(r)) == -advantage * r for r in ratios],
        "dim": [clip(r) == r for r in ratios],
    }
    for level in LEVELS:
        leaf = draw(1, 4, V).requires_grad_()
        loss, metrics = build(level=level, clip_low=LOW, clip_high=HIGH)(at_ratio(advantage, table, leaf))
        assert float(loss.detach()) == pytest.approx(expected[level], rel=1e-9)
        (got,) = torch.autograd.grad(loss, leaf)
        assert (got[0].abs().sum(-1) > 0).tolist() == moving[level]
        assert metrics["log_ratio_max"] == pytest.approx(math.log(2))


# -- means ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("level", LEVELS)
def test_means_and_denominators_by_loops(level: str, average: str) -> None:
    made = step(NEW, index=3)
    objective = build(level=level, average=average, clip_low=LOW, clip_high=HIGH, discount=0.5)
    counted = positions(made, average)
    new, old = made.transition.token_log_probs(made.action), made.old_token_log_probs
    assert old is not None
    total, ratios = 0.0, []
    for row in range(ROWS):
        logs = [float(new[row, d] - old[row, d]) for d in range(SITES) if counted[row, d]]
        gain = float(ADVANTAGES[row])
        mean = sum(logs) / max(len(logs), 1)
        ratios.append(math.exp(mean))

        def clip(r: float) -> float:
            return min(max(r, 1 - LOW), 1 + HIGH)

        if level == "sequence":
            total += max(-gain * math.exp(mean), -gain * clip(math.exp(mean)))
        elif level == "token":
            parts = [max(-gain * math.exp(v), -gain * clip(math.exp(v))) for v in logs]
            total += sum(parts) / max(len(parts), 1)
        else:
            total += -gain * math.exp(sum(math.log(clip(math.exp(v))) for v in logs) / max(len(logs), 1))
    loss, metrics = objective(made)
    assert float(loss) == pytest.approx(0.5**3 * total / ROWS, rel=1e-9)
    assert metrics["positions"] == pytest.approx(float(counted.sum()) / ROWS)
    assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / ROWS)
    moved = (made.action != STATES).sum() / (ROWS * SITES)
    assert metrics["changed"] == pytest.approx(float(moved)) and 0 < float(moved) < 1


def test_the_mean_over_masks_is_the_larger_by_their_share() -> None:
    """A known token adds a log-ratio of 0, and a position to the mean over all."""
    everything = gradient(build(average="all"), OLD)
    masks = gradient(build(average="changeable"), OLD)
    share = (STATES == V).double().mean(1)
    torch.testing.assert_close(everything, masks * share[:, None, None], rtol=1e-10, atol=1e-14)
    assert float(masks[STATES != V].abs().max()) == 0


@pytest.mark.parametrize("average", AVERAGES)
def test_logits_that_decide_nothing_change_nothing(average: str) -> None:
    """Positions that are no action (known tokens): neither the loss nor its gradient."""
    other = torch.where((STATES == V)[..., None], NEW, 30 * draw(ROWS, SITES, V, seed=9))
    objective = build(average=average, kl_coef=0.1)
    reference = law(REFERENCE, STATES)
    values = [objective(step(logits, reference=reference))[0] for logits in (NEW, other)]
    assert torch.equal(values[0], values[1])
    gradients = [gradient(objective, logits, reference=reference) for logits in (NEW, other)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_a_row_without_positions_counts_as_zero() -> None:
    """Nothing changed: no ratio, no division by zero."""
    leaf = NEW.clone().requires_grad_()
    now = law(leaf, STATES)
    quiet = step_of(now, STATES, now.token_log_probs(STATES).detach() - 0.3)
    loss, metrics = build(average="changed", level="token")(quiet)
    assert float(loss.detach()) == 0 and metrics["positions"] == 0 and metrics["log_ratio_max"] == 0
    (got,) = torch.autograd.grad(loss, leaf)
    assert float(got.abs().max()) == 0


# -- KL ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", AVERAGES)
def test_exact_kl_by_loops(average: str) -> None:
    """Added undiscounted, averaged over the same positions as the loss."""
    reference = law(REFERENCE, STATES)
    made = step(NEW, reference=reference, index=2)
    loss, metrics = build(average=average, kl_coef=0.25, discount=0.5)(made)
    plain = build(average=average, discount=0.5)(made)[0]
    counted = positions(made, average)
    p, q = (
        brute_table(MIXTURE, "mask", posterior("mask", v, STATES), STATES, STEP) for v in (NEW, REFERENCE)
    )
    rows = []
    for row in range(ROWS):
        values = [
            sum(float(a * (a / b).log()) for a, b in zip(p[row, d], q[row, d], strict=True) if a > 0)
            for d in range(SITES)
            if counted[row, d]
        ]
        rows.append(sum(values) / max(len(values), 1))
    assert metrics["kl"] == pytest.approx(sum(rows) / ROWS, rel=1e-6) and metrics["kl"] > 0.01
    assert float(loss - plain) == pytest.approx(0.25 * metrics["kl"], rel=1e-9)
    with pytest.raises(ValueError, match="reference"):
        build(kl_coef=0.25)(step(NEW))


@pytest.mark.parametrize("source", ["mask", "uniform", "metric"])
def test_k3_is_unbiased_for_the_kl_to_the_reference(source: str) -> None:
    """Not for that of the reference to the policy, which differs."""
    options = {"name": "discrete_metric"} if source == "metric" else MIXTURE
    many = 40_000
    x = torch.full((1, many), V if source == "mask" else 0)
    one, two = 1.5 * draw(1, 1, V, seed=1), 1.5 * draw(1, 1, V, seed=6)
    now, reference = (law(v.expand(1, many, V), x, source, options) for v in (one, two))
    action = now.sample(draw(1, *now.noise_shape, seed=4))
    old = now.token_log_probs(action)
    made = step_of(now, action, old, reference=reference)
    estimate = build(kl="k3", kl_coef=1.0)(made)[1]["kl"]
    small = [law(v, x[:, :1], source, options) for v in (one, two)]
    exact, reverse = float(small[0].kl(small[1])), float(small[1].kl(small[0]))
    log = reference.token_log_probs(action) - old
    error = float((torch.expm1(log) - log).std()) / many**0.5
    assert abs(estimate - exact) < 4 * error and abs(reverse - exact) > 10 * error
    assert build(kl="k3", kl_coef=1.0)(replace(made, reference=now))[1]["kl"] == 0


def test_k3_has_the_gradient_of_the_kl_to_the_reference() -> None:
    """By enumeration of y, with the policy away from the one that acted; not that of KL(ref || p)."""
    acted, leaf = draw(1, 1, V, seed=2), draw(1, 1, V, seed=1).requires_grad_()
    x = torch.full((1, 1), V)
    now, old, reference = (law(v, x, "mask", MIXTURE) for v in (leaf, acted, draw(1, 1, V, seed=6)))
    total = torch.zeros((), dtype=torch.float64)
    for y in range(V + 1):
        action = torch.full((1, 1), y)
        chance = old.token_log_probs(action).exp()
        made = step_of(now, action, old.token_log_probs(action), reference=reference)
        loss = build(kl="k3", kl_coef=1.0)(replace(made, advantages=torch.zeros(1)))[0]
        total = total + float(chance) * loss
    (got,) = torch.autograd.grad(total, leaf, retain_graph=True)
    exact = now.kl(reference).sum()
    (expected,) = torch.autograd.grad(exact, leaf)
    assert float(total.detach()) == pytest.approx(float(exact.detach()), rel=1e-5)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


# -- rows and steps that are not to be used ------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("kl", ["exact", "k3"])
def test_invalid_rows_leave_no_trace(level: str, average: str, kl: str) -> None:
    """Their advantage and log-probabilities are NaN; the others keep their weight in the micro-batch."""
    objective = build(level=level, average=average, kl=kl, kl_coef=0.1)
    valid = torch.tensor([True, False, True, True])
    leaf = NEW.clone().requires_grad_()
    made = step(leaf, reference=law(REFERENCE, STATES))
    assert made.old_token_log_probs is not None
    broken = replace(
        made,
        valid=valid,
        advantages=torch.where(valid, ADVANTAGES, math.nan),
        old_token_log_probs=torch.where(valid[:, None], made.old_token_log_probs, math.nan),
        old_log_prob=torch.where(valid, made.old_log_prob, math.nan),
    )
    loss, metrics = objective(broken)
    (got,) = torch.autograd.grad(loss, leaf)
    assert all(math.isfinite(v) for v in metrics.values())
    assert float(got[1].abs().max()) == 0
    torch.testing.assert_close(got[valid], gradient(objective, NEW, reference=law(REFERENCE, STATES))[valid])
    nothing, metrics = objective(replace(broken, valid=torch.zeros(ROWS, dtype=torch.bool)))
    assert float(nothing.detach()) == 0 and all(math.isfinite(v) for v in metrics.values())


def test_far_ratios_stay_finite() -> None:
    """A token that became nearly impossible, or was: exponents are bounded."""
    for shift in (500.0, -500.0):
        leaf = draw(ROWS, SITES, V).requires_grad_()
        made = step(leaf)
        assert made.old_token_log_probs is not None
        far = replace(made, old_token_log_probs=made.old_token_log_probs + shift)
        for level in LEVELS:
            loss, metrics = build(level=level)(far)
            (got,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            assert bool(torch.isfinite(got).all()) and all(math.isfinite(v) for v in metrics.values())


def test_steps_without_tokens_are_refused() -> None:
    made = step(NEW)
    with pytest.raises(TypeError, match="tokens"):
        build()(replace(made, old_token_log_probs=None))
    with pytest.raises(TypeError, match="Gaussian"):
        build()(replace(made, transition=Gaussian(torch.zeros(ROWS, SITES), 1.0)))
