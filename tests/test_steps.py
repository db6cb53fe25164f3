"""Step selectors: which steps are stochastic and which are trained."""

from collections import Counter
from itertools import pairwise

import pytest

from flowrl import registry
from flowrl.errors import UserError
from flowrl.mdp.steps import StepPlan
from flowrl.mdp.transitions import MIN_STD

TEN = [0.5] * 10  # a kernel whose every step has noise


def plan(name, stds=TEN, iteration=0, seed=0, **options):
    return registry.build("steps", {"name": name, **options}, "steps").plan(iteration, stds, seed)


@pytest.mark.parametrize(("fraction", "trained"), [(0.99, 9), (0.5, 5), (1.0, 10), (0.1, 1)])
def test_g14_fraction_of_ten_steps(fraction, trained):
    assert plan("all", fraction=fraction) == StepPlan(tuple(range(10)), tuple(range(trained)))


def test_g14_the_default_leaves_out_the_last_step():
    assert plan("all").trained == tuple(range(9))


def test_g14_fraction_one_trains_all_steps_with_noise():
    stds = [0.5] * 9 + [0.0]
    assert plan("all", stds, fraction=1.0) == StepPlan(tuple(range(10)), tuple(range(9)))


def test_g14_no_steps_is_refused_with_the_key_and_the_legal_steps():
    with pytest.raises(UserError, match=r"steps\.fraction = 0\.09 trains none of the 10 .*0, 1, 2"):
        plan("all", fraction=0.09)
    with pytest.raises(UserError, match="deterministic"):
        plan("all", [0.0] * 4)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_g14_fractions_outside_zero_to_one_are_refused(fraction):
    with pytest.raises(UserError, match=r"steps\.fraction"):
        plan("all", fraction=fraction)


def test_g14_fraction_is_not_hurt_by_rounding():
    assert 100 * 0.29 < 29 and len(plan("all", [0.5] * 100, fraction=0.29).trained) == 29


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("num_steps", [2, 4, 10])
@pytest.mark.parametrize("name", ["all", "random_subset", "fixed_window", "random_window", "sliding_window"])
def test_g04_steps_without_noise_are_never_trained(kernel, num_steps, name):
    sigmas = [1 - step / num_steps for step in range(num_steps)] + [0.0]
    law = registry.build("kernel", {"name": kernel}, "kernel")
    stds = [law.std(*pair) for pair in pairwise(sigmas)]
    options = {"all": {"fraction": 1.0}, "random_subset": {"fraction": 1.0}}.get(name, {"size": 2})
    if name == "random_window":
        options["high"] = num_steps
    chosen = plan(name, stds, iteration=3, **options)
    assert chosen.trained and all(stds[step] >= MIN_STD for step in chosen.trained)
    assert set(chosen.trained) <= set(chosen.stochastic)
    assert num_steps - 1 not in chosen.trained or kernel != "cps"


def test_g04_one_step_of_cps_is_refused_and_one_step_of_flow_sde_is_trained():
    cps, flow = (registry.build("kernel", {"name": name}, "kernel") for name in ("cps", "flow_sde"))
    with pytest.raises(UserError, match="none"):
        plan("all", [cps.std(1.0, 0.0)], fraction=1.0)
    assert plan("all", [flow.std(1.0, 0.0)], fraction=1.0).trained == (0,)


def test_random_subset_is_drawn_anew_every_iteration_from_the_seed():
    sixteen = [0.5] * 16
    plans = [plan("random_subset", sixteen, iteration, seed=5) for iteration in range(200)]
    assert plans == [plan("random_subset", sixteen, iteration, seed=5) for iteration in range(200)]
    assert plans[:20] != [plan("random_subset", sixteen, iteration, seed=6) for iteration in range(20)]
    assert all(p.stochastic == tuple(range(16)) for p in plans)
    assert all(len(set(p.trained)) == 9 and p.trained == tuple(sorted(p.trained)) for p in plans)
    counts = Counter(step for p in plans for step in p.trained)
    assert set(counts) == set(range(15))  # never the last
    assert all(abs(count - 120) < 4 * (200 * 0.6 * 0.4) ** 0.5 for count in counts.values())


def test_random_subset_is_a_share_of_the_steps_but_the_last():
    assert len(plan("random_subset", fraction=0.5).trained) == 4  # int(9 * 0.5)
    assert plan("random_subset", fraction=1.0).trained == tuple(range(9))


def test_random_subset_of_one_visits_every_step_with_noise():
    stds = [0.9, 0.8, 0.6, 0.0]
    plans = [plan("random_subset", stds, iteration, count=1) for iteration in range(300)]
    assert all(len(p.trained) == 1 and p.stochastic == (0, 1, 2, 3) for p in plans)
    counts = Counter(p.trained[0] for p in plans)
    assert set(counts) == {0, 1, 2} and all(abs(count - 100) < 40 for count in counts.values())
    assert plan("random_subset", stds, count=7).trained == (0, 1, 2)


def test_g37_a_one_step_sampler_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"single step goes straight to the data.*num_steps of 2 or more"):
        plan("all", [0.0])
    with pytest.raises(UserError, match="none, the kernel is deterministic"):
        plan("all", [0.0, 0.0])


def test_fixed_window_is_deterministic_outside():
    assert plan("fixed_window", start=2, size=3) == StepPlan((2, 3, 4), (2, 3, 4))
    assert plan("fixed_window", [0.5] * 3 + [0.0], start=2, size=2) == StepPlan((2, 3), (2,))
    with pytest.raises(UserError, match=r"steps 8 to 10 does not fit into 10"):
        plan("fixed_window", start=8, size=3)


def test_random_window_covers_its_range_evenly():
    starts = Counter()
    for iteration in range(400):
        chosen = plan("random_window", iteration=iteration, size=3, low=1, high=7)
        start = chosen.stochastic[0]
        assert chosen == StepPlan((start, start + 1, start + 2), (start, start + 1, start + 2))
        assert chosen == plan("random_window", iteration=iteration, size=3, low=1, high=7)
        starts[start] += 1
    assert set(starts) == {1, 2, 3, 4}
    assert all(abs(count - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5 for count in starts.values())


def test_random_window_defaults_to_the_first_half():
    starts = {plan("random_window", iteration=iteration).stochastic[0] for iteration in range(100)}
    assert starts == {0, 1, 2}
    with pytest.raises(UserError, match="no window of that size"):
        plan("random_window", [0.5] * 4)


def test_sliding_window_follows_its_formula():
    twenty_five = [0.5] * 25

    def starts(iterations, **options):
        return [plan("sliding_window", twenty_five, at, **options).stochastic[0] for at in iterations]

    assert starts([0, 24, 25, 49, 50]) == [0, 0, 1, 1, 2]
    assert plan("sliding_window", twenty_five, 25) == StepPlan((1, 2, 3, 4), (1, 2, 3, 4))
    assert starts([21 * 25, 22 * 25, 23 * 25]) == [21, 0, 1]  # steps 21 .. 24, then back to 0
    assert starts([21 * 25, 22 * 25, 99 * 25], roll_back=False) == [21, 21, 21]
    assert starts([0, 1, 2, 3], iterations_per_shift=1, stride=10) == [0, 10, 20, 0]
    with pytest.raises(UserError, match="does not fit"):
        plan("sliding_window", [0.5] * 3)


def test_sliding_window_over_steps_without_noise_explains():
    with pytest.raises(UserError, match="window of steps 1 to 1"):
        plan("sliding_window", [0.5, 0.0], 1, size=1, iterations_per_shift=1)
