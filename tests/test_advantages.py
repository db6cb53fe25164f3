"""Advantage estimators: values known by hand, invariances that hold exactly, and the SLAS optimum solved."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from flowrl import registry
from flowrl.advantage import group_mean, group_std
from flowrl.errors import UserError

NAMES = registry.names("advantage")
NAN = math.nan


def estimate(name, scores, groups, weights=None, **options):
    scores = torch.tensor(scores, dtype=torch.float32)
    scores = scores[:, None] if scores.dim() == 1 else scores
    weights = torch.ones(scores.shape[1]) if weights is None else torch.tensor(weights)
    estimator = registry.build("advantage", {"name": name, **options}, "advantage")
    return estimator(scores, weights, torch.tensor(groups))


def close(got, expected, atol=5e-5):
    torch.testing.assert_close(got.values, torch.tensor(expected), rtol=0, atol=atol)


def draw(num_samples, num_rewards=1, seed=0):
    scores = torch.randn(num_samples, num_rewards, generator=torch.Generator().manual_seed(seed))
    return (scores * 0.3 + 1.0).tolist()


# ---------------------------------------------------------------- values known by hand


def test_g08_a_group_spread_over_ranks_has_one_mean_and_one_std():
    got = estimate("group_relative", [1, 2, 3, 10], [7, 7, 7, 7], unbiased=True)
    close(got, [-0.7348, -0.4899, -0.2449, 1.4697])


def test_g08_groups_are_by_id_not_by_position():
    got = estimate("group_relative", [1, 10, 3, 30], [0, 1, 0, 1], std="none")
    close(got, [-1.0, -5.0, 1.0, 5.0])  # bound by clip 5


def test_g08_ids_need_all_64_bits():
    big = 2**60
    apart = estimate("group_relative", [1, 3, 5, 7], [big, big, big + 1, big + 1], std="none")
    close(apart, [-1.0, 1.0, -1.0, 1.0])
    assert float(torch.tensor(big).double()) == float(torch.tensor(big + 1).double())


@pytest.mark.parametrize(
    ("options", "outer", "inner"),
    [
        ({"std": "group", "unbiased": True}, 1.1618, 0.3873),
        ({"std": "group", "unbiased": False}, 1.3415, 0.4472),
        ({"std": "batch", "unbiased": True}, 0.3661, 0.1220),
    ],
)
def test_g09_choice_of_std(options, outer, inner):
    scores, groups = [1, 2, 3, 4, 10, 10, 10, 10], [0] * 4 + [1] * 4
    got = estimate("group_relative", scores, groups, eps=1e-4, **options)
    close(got, [-outer, -inner, inner, outer, 0, 0, 0, 0])
    assert got.values[4:].tolist() == [0, 0, 0, 0] and got.metrics["frac_zero_std"] == 0.5


@pytest.mark.parametrize(("unbiased", "value"), [(False, 0.5855), (True, 0.5345)])
def test_g09_batch_std_holds_the_differences_between_groups(unbiased, value):
    got = estimate("group_relative", [1, 2, 3, 4, 5, 6], [0] * 3 + [1] * 3, std="batch", unbiased=unbiased)
    close(got, [-value, 0, value, -value, 0, value])


def test_g10_rewards_that_cancel_in_the_sum_are_kept_when_normalised_first():
    scores, groups = [[0, 1], [1, 0]], [0, 0]
    summed = estimate("group_relative", scores, groups)
    first = estimate("group_relative", scores, groups, combine="normalize_then_sum")
    assert summed.metrics["frac_zero_std"] == 1.0 and summed.values.tolist() == [0, 0]
    assert first.metrics["frac_zero_std"] == 0.0
    # With unequal scales the sum no longer cancels; what is left is the first reward's, not rounding.
    close(estimate("group_relative", [[0, 1], [3, 0]], groups), [-1.0, 1.0])


def test_g10_a_missing_column_fails_loudly():
    with pytest.raises(ValueError, match="zip"):
        estimate("group_relative", [[0, 1], [1, 0]], [0, 0], weights=[1.0, 1.0, 1.0])


def test_g11_uneven_groups_and_a_group_of_one():
    got = estimate("group_relative", [1, 3, 5], [0, 0, 1], unbiased=True)
    close(got, [-0.7071, 0.7071, 0.0])
    assert got.values[2] == 0 and bool(got.valid.all())


def test_g34_a_masked_sample_leaves_the_mean():
    got = estimate("group_relative", [1, NAN, 0, 0], [0] * 4, std="none")
    close(got, [2 / 3, 0.0, -1 / 3, -1 / 3])
    assert got.valid.tolist() == [True, False, True, True]


def test_normalize_then_sum_by_hand():
    """Each reward by its own group's population std, weights 3 and 1, then by the std asked for."""
    scores = np.array([[1.0, 50.0], [2.0, 10.0], [4.0, 30.0], [1.0, 7.0], [9.0, 7.5], [5.0, 8.0]])
    groups = np.array([0, 0, 0, 1, 1, 1])
    combined = np.zeros(6)
    for weight, column in zip((3.0, 1.0), scores.T, strict=True):
        for group in (0, 1):
            rows = groups == group
            combined[rows] += weight / 4 * (column[rows] - column[rows].mean()) / column[rows].std()
    by_group = combined / np.array([combined[groups == group].std() for group in groups])
    expected = {"none": combined, "batch": combined / combined.std(), "group": by_group}
    for std, values in expected.items():
        got = estimate(
            "group_relative", scores, groups, [3.0, 1.0], combine="normalize_then_sum", std=std, eps=0.0
        )
        torch.testing.assert_close(got.values, torch.tensor(values).float(), rtol=1e-5, atol=1e-6)


def test_sum_then_normalize_uses_the_weights():
    got = estimate("group_relative", [[1, 5], [2, 1]], [0, 0], [4.0, 1.0], std="none")
    close(got, [0.0, 0.0])  # 4 * 1 + 5 = 4 * 2 + 1
    close(estimate("group_relative", [[1, 5], [2, 1]], [0, 0], [6.0, 1.0], std="none"), [-1.0, 1.0])


def test_a_negative_weight_reverses_the_order():
    up = estimate("group_relative", [1, 2, 4], [0] * 3)
    down = estimate("group_relative", [1, 2, 4], [0] * 3, [-2.0])
    torch.testing.assert_close(down.values, -up.values)


@pytest.mark.parametrize("name", NAMES)
def test_clip_and_its_metric(name):
    scores = [1.0] * 99 + [100.0]
    options = {"std": "group"} if name == "group_relative" else {}
    free = estimate(name, scores, [0] * 100, clip=None, **options)
    bound = estimate(name, scores, [0] * 100, **options)
    assert float(free.values.max()) > 5 and float(bound.values.max()) == 5
    assert free.metrics["adv_clip_frac"] == 0 and bound.metrics["adv_clip_frac"] == pytest.approx(0.01)
    assert torch.equal(free.values[:99], bound.values[:99])


def test_reward_std_group_is_the_mean_over_groups():
    got = estimate("group_relative", [1, 3, 10, 14, 5], [0, 0, 1, 1, 2])
    assert got.metrics["reward_std_group"] == pytest.approx((1 + 2 + 0) / 3)
    assert got.metrics["frac_zero_std"] == pytest.approx(1 / 3)


# ---------------------------------------------------------------- what holds for every estimator

VARIANTS = [
    ("group_relative", {}),
    ("group_relative", {"std": "batch", "unbiased": True}),
    ("group_relative", {"std": "none"}),
    ("group_relative", {"combine": "normalize_then_sum", "std": "batch"}),
    ("slas", {}),
    ("slas", {"gamma": 0.0, "rescale": False}),
    ("slas", {"gamma": 1.0, "scale": "raw", "recenter": True}),
    ("slas", {"combine": "normalize_then_sum", "recenter": True}),
]
CENTRED = [v for v in VARIANTS if v[0] == "group_relative" or v[1].get("recenter") or v[1].get("gamma") == 0]


def test_every_estimator_is_covered():
    assert {name for name, _ in VARIANTS} <= set(NAMES)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_r7_a_sample_without_a_score_is_exactly_as_if_absent(name, options):
    scores, groups = draw(12, 2), [0, 1, 2] * 4
    for bad in (NAN, math.inf, -math.inf):
        broken = [list(row) for row in scores]
        broken[4][1] = bad
        got = estimate(name, broken, groups, [1.0, 2.0], **options)
        kept = [row for row in range(12) if row != 4]
        absent = estimate(name, [scores[r] for r in kept], [groups[r] for r in kept], [1.0, 2.0], **options)
        assert torch.equal(got.values[kept], absent.values) and got.metrics == absent.metrics
        assert got.values[4] == 0 and got.valid.tolist() == [row != 4 for row in range(12)]
        assert got.values.dtype == torch.float32


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_nothing_scored_gives_zeros(name, options):
    got = estimate(name, [NAN, NAN], [0, 0], **options)
    assert got.values.tolist() == [0, 0] and not bool(got.valid.any())
    assert got.metrics == {"frac_zero_std": 1.0, "reward_std_group": 0.0, "adv_clip_frac": 0.0}


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_g08_the_order_of_samples_and_ids_changes_nothing_at_all(name, options):
    scores, groups = draw(64, 2), [(5 * index) % 7 for index in range(64)]
    got = estimate(name, scores, groups, **options)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = estimate(name, [scores[i] for i in order], [groups[i] for i in order], **options)
    assert torch.equal(shuffled.values, got.values[order])
    renamed = estimate(name, scores, [[90, -4, 17, 3, 55, 8, 21][group] for group in groups], **options)
    torch.testing.assert_close(renamed.values, got.values, rtol=1e-6, atol=1e-7)


def test_group_statistics_do_not_depend_on_the_order_of_summation():
    """To the last bit of float64, which the cast of the advantages to float32 would hide."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(500, dtype=torch.float64, generator=generator).exp() * 1e3
    index = torch.arange(500) % 3
    order = torch.randperm(500, generator=generator)
    assert values.sum() != values[order].sum()  # plain sums do
    assert torch.equal(group_mean(values, index), group_mean(values[order], index[order]))
    for unbiased in (False, True):
        got = group_std(values, index, unbiased)
        assert torch.equal(got, group_std(values[order], index[order], unbiased))
        expected = torch.stack([values[index == g].std(correction=int(unbiased)) for g in range(3)])
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("name", "options"), CENTRED)
def test_every_group_sums_to_zero(name, options):
    groups = torch.tensor([0, 1, 2, 2] * 6)
    values = estimate(name, draw(24, 2, seed=3), groups.tolist(), clip=None, **options).values
    for group in range(3):
        assert float(values[groups == group].sum()) == pytest.approx(0, abs=2e-5)
    assert float(values.abs().mean()) > 0.1


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, -1234.5])
def test_equal_rewards_give_zero(name, options, value):
    got = estimate(name, [value] * 6, [0, 0, 0, 1, 1, 1], **options)
    assert got.values.tolist() == [0] * 6 and got.metrics["frac_zero_std"] == 1.0


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rounding_noise_is_not_blown_up(name, options, scale):
    """Rewards equal but for their last bits, next to a group that is not: only the latter learns."""
    value = torch.tensor([0.7 * scale])
    nearly = [float(value), float(value.nextafter(value * 2)), float(value.nextafter(value * 0))]
    got = estimate(name, [*nearly, 0.2 * scale, 0.5 * scale, 0.9 * scale], [0] * 3 + [1] * 3, **options)
    assert got.values[:3].tolist() == [0, 0, 0] and bool((got.values[3:] != 0).all())
    alone = estimate(name, nearly, [0] * 3, **options)
    assert alone.values.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "options"), [v for v in VARIANTS if v[1].get("std") != "none" and v[1].get("combine") is None]
)
@pytest.mark.parametrize("factor", [1 / 26, 26.0, 1e3])
def test_g43_rescaling_a_reward_changes_nothing(name, options, factor):
    scores, groups = torch.tensor(draw(12)), [0, 1, 2] * 4
    got = estimate(name, scores.tolist(), groups, **options)
    rescaled = estimate(name, (scores * factor).tolist(), groups, **options)
    torch.testing.assert_close(rescaled.values, got.values, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_shift_of_a_whole_group_changes_nothing_unless_the_std_sees_it(name, options):
    scores, groups = torch.tensor(draw(12)), torch.tensor([0, 1, 2] * 4)
    got = estimate(name, scores.tolist(), groups.tolist(), **options)
    moved = estimate(name, (scores + (groups == 1)[:, None]).tolist(), groups.tolist(), **options)
    sees = (name == "group_relative" and options.get("std") == "batch" and "combine" not in options) or (
        options.get("scale") == "raw" and not options.get("rescale", True)
    )
    change = float((moved.values - got.values).abs().max())
    assert change > 0.1 if sees else change < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_wrong_options_are_refused(name):
    with pytest.raises(UserError, match=r"advantage\.clip"):
        estimate(name, [1, 2], [0, 0], clip=0.0)


# ---------------------------------------------------------------- SLAS


def shaped(d, gamma):
    return np.sign(d) * np.abs(d) ** (1 + gamma)


def centre(scores, groups):
    return scores - np.array([scores[groups == group].mean() for group in groups])


SKEWED = np.array([0.0, 0.1, 0.3, 2.0, 5.0, 5.2, 5.1, 6.4, 1.0, 1.3])
SKEWED_GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])


@pytest.mark.parametrize("gamma", [0.0, 0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("scale", ["centred", "raw"])
def test_slas_formula(gamma, rescale, scale):
    d = centre(SKEWED, SKEWED_GROUPS)
    expected = shaped(d / (d if scale == "centred" else SKEWED).std(), gamma)
    expected = expected / expected.std() if rescale else expected
    got = estimate("slas", SKEWED, SKEWED_GROUPS, gamma=gamma, rescale=rescale, scale=scale)
    torch.testing.assert_close(got.values, torch.tensor(expected).float().clamp(-5, 5), rtol=1e-5, atol=1e-6)


def test_slas_with_rescale_is_power_then_std_whatever_the_first_scale():
    raw = estimate("slas", SKEWED, SKEWED_GROUPS, scale="raw")
    centred = estimate("slas", SKEWED, SKEWED_GROUPS, scale="centred")
    torch.testing.assert_close(raw.values, centred.values, rtol=1e-6, atol=1e-7)


def test_slas_does_not_divide_by_the_prompts_own_std():
    """Groups with gaps of 1 and 0.1: 1 to 1 with the group's std, 10^(1 + gamma) to 1 here."""
    scores, groups = [0.0, 1.0, 0.0, 0.1], [0, 0, 1, 1]
    relative = estimate("group_relative", scores, groups).values
    assert float(relative[1] / relative[3]) == pytest.approx(1.0, rel=1e-4)
    for gamma in (0.0, 0.5, 1.0):
        values = estimate("slas", scores, groups, gamma=gamma).values
        assert float(values[1] / values[3]) == pytest.approx(10 ** (1 + gamma), rel=1e-4)


def test_slas_clips_after_shaping():
    """At gamma = 1 a z of 2.3 is shaped to 5.29 and clipped to 5."""
    scores = np.array([0.0] * 40 + [1.0])
    z = centre(scores, np.zeros(41)) / scores.std()
    assert 2.24 < z.max()
    got = estimate("slas", scores, [0] * 41, gamma=1.0, rescale=False)
    assert float(got.values[-1]) == 5.0 and z.max() ** 2 > 5


def tangent_optimum(d, gamma):
    """argmax <d, delta> over sum delta = 0, sum delta^2 / (pi |d|^gamma) <= 1, found numerically.

    The last entry makes the sum zero; dividing by the metric length puts delta on the boundary.
    """
    metric = len(d) / np.abs(d) ** gamma

    def on_boundary(free):
        delta = np.append(free, -free.sum())
        return delta / np.sqrt(metric @ delta**2)

    start = np.array([1.0, -1.0] + [0.0] * (len(d) - 3))
    found = minimize(lambda free: -d @ on_boundary(free), start, method="Nelder-Mead", tol=1e-14)
    return on_boundary(found.x)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_slas_recentred_is_the_optimum_on_the_simplex_tangent_space(gamma):
    rewards = SKEWED[:4]
    optimum = tangent_optimum(rewards - rewards.mean(), gamma)
    zeros = [0] * 4
    exact = estimate("slas", rewards, zeros, gamma=gamma, recenter=True).values.double().numpy()
    direction = optimum / np.linalg.norm(optimum)
    np.testing.assert_allclose(exact / np.linalg.norm(exact), direction, atol=1e-6)
    published = estimate("slas", rewards, zeros, gamma=gamma).values.double().numpy()
    gap = np.abs(published / np.linalg.norm(published) - direction).max()
    assert gap < 1e-6 if gamma == 0 else gap > 0.05
    assert abs(published.sum()) < 1e-5 if gamma == 0 else published.sum() > 0.1


def test_slas_recentred_by_hand():
    d = centre(SKEWED, SKEWED_GROUPS)
    expected = np.zeros_like(d)
    for group in (0, 1, 2):
        rows = SKEWED_GROUPS == group
        mu = shaped(d[rows], 0.5).mean() / np.sqrt(np.abs(d[rows])).mean()
        expected[rows] = np.sqrt(np.abs(d[rows])) * (d[rows] - mu)
    expected = torch.tensor(expected / expected.std()).float()
    got = estimate("slas", SKEWED, SKEWED_GROUPS, recenter=True)
    torch.testing.assert_close(got.values, expected, rtol=1e-5, atol=1e-6)


def test_slas_of_several_rewards():
    scores = np.stack([SKEWED, 100 * SKEWED[::-1]], axis=1)
    parts = [centre(column, SKEWED_GROUPS) for column in scores.T]
    for combine, mixed in {
        "sum_then_normalize": parts[0] + 3 * parts[1],
        "normalize_then_sum": parts[0] / parts[0].std() + 3 * parts[1] / parts[1].std(),
    }.items():
        expected = shaped(mixed, 0.5) / shaped(mixed, 0.5).std()
        got = estimate("slas", scores, SKEWED_GROUPS, [1.0, 3.0], combine=combine)
        torch.testing.assert_close(got.values, torch.tensor(expected).float(), rtol=1e-5, atol=1e-5)
