"""Objectives: gradients against closed forms and finite differences, masking, fixed points.

B rows, D event dims; all in float64 unless said.
"""

import math
from dataclasses import replace

import pytest
import torch

from flowrl import registry
from flowrl.errors import UserError
from flowrl.mdp.transitions import Dirac, Gaussian, projection
from flowrl.objective import ForwardStep, TrajectoryStep, draw_sigma, masked_mean

ROWS, SIZE, STD = 6, 5, 0.3


def build(name, **options):
    return registry.build("objective", {"name": name, **options}, "objective")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OLD_MEAN, NOISE = draw(ROWS, SIZE), draw(ROWS, SIZE, seed=1)
ADVANTAGES = torch.tensor([1.5, -0.7, 2.0, -1.0, 0.4, -0.1])


def trajectory_step(mean, reference=None, advantages=ADVANTAGES, std=STD, old_mean=OLD_MEAN, noise=NOISE):
    """A step whose action was drawn from N(old_mean, std) and that is replayed at `mean`."""
    old, new = Gaussian(old_mean, std), Gaussian(mean, std)
    action = old.sample(noise)
    return TrajectoryStep(
        index=0,
        sigma=0.75,
        sigma_next=0.5,
        transition=new,
        reference=None if reference is None else Gaussian(reference, std),
        log_prob=new.log_prob(action),
        old_log_prob=old.log_prob(action),
        action=action,
        noise=noise,
        old_projection=projection(noise, old_mean),
        advantages=advantages,
        valid=torch.ones(len(noise), dtype=torch.bool),
    )


def gradient(objective, mean, **options):
    mean = mean.clone().requires_grad_()
    loss, metrics = objective(trajectory_step(mean, **options))
    return torch.autograd.grad(loss, mean)[0], float(loss.detach()), metrics


# ---------------------------------------------------------------- grpo


@pytest.mark.parametrize("reduction", ["per_dim", "sum"])
def test_gradient_at_ratio_one_is_reinforce(reduction):
    """And divided by D for the per-dim ratio."""
    got, loss, metrics = gradient(build("grpo", reduction=reduction), OLD_MEAN)
    score = NOISE / STD  # gradient of log N(a; mean, std) at a = mean + std noise
    expected = -ADVANTAGES[:, None] * score / ROWS / (SIZE if reduction == "per_dim" else 1)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert loss == pytest.approx(-float(ADVANTAGES.double().mean()), rel=1e-6)
    assert metrics["ratio_mean"] == 1 and metrics["ratio_std"] == 0 and metrics["log_ratio_max"] == 0
    assert metrics["clip_frac_low"] == metrics["clip_frac_high"] == metrics["approx_kl"] == 0


@pytest.mark.parametrize("options", [{}, {"ratio": "guard"}, {"reduction": "sum"}, {"kl_coef": 0.7}])
def test_clipped_gradient_equals_finite_differences(options):
    """Away from the old policy, with rows inside and outside the clip range on both sides."""
    scale = {"guard": STD, "sum": SIZE}.get(next(iter(options.values()), ""), 1)
    objective = build("grpo", clip_low=0.02 * scale, clip_high=0.03 * scale, **options)
    mean = (OLD_MEAN + 0.05 * draw(ROWS, SIZE, seed=2)).requires_grad_()
    reference = OLD_MEAN + 0.1

    def loss(mean):
        return objective(trajectory_step(mean, reference))[0]

    metrics = objective(trajectory_step(mean, reference))[1]
    assert metrics["clip_frac_low"] > 0 and metrics["clip_frac_high"] > 0
    assert metrics["clip_frac_low"] + metrics["clip_frac_high"] < 1
    assert torch.autograd.gradcheck(loss, mean, eps=1e-7, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["per_dim", "sum"])
def test_the_clip_stops_only_gains_beyond_its_range(reduction):
    """Clip 0.03: a rising good row and a falling bad row stop; everything else keeps its gradient."""
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    ratios = torch.tensor([1.04, 0.5, 1.02, 0.96, 1.5, 0.98]).double()
    mean = OLD_MEAN.clone().requires_grad_()
    step = trajectory_step(mean, advantages=advantages)
    log_ratios = ratios.log() * (SIZE if reduction == "per_dim" else 1)
    step = replace(step, old_log_prob=step.log_prob.detach() - log_ratios)
    loss, metrics = build("grpo", clip_low=0.03, clip_high=0.03, reduction=reduction)(step)
    flows = torch.tensor([0.0, 1, 1, 0, 1, 1]).double()
    size = SIZE if reduction == "per_dim" else 1
    expected = -(flows * advantages * ratios)[:, None] * NOISE / STD / size / ROWS
    torch.testing.assert_close(torch.autograd.grad(loss, mean)[0], expected, rtol=1e-9, atol=1e-12)
    paid = torch.tensor([1.03, 0.5, 1.02, 0.97, 1.5, 0.98]).double()
    assert float(loss.detach()) == pytest.approx(float(-(advantages * paid).mean()), rel=1e-7)
    assert metrics["clip_frac_low"] == metrics["clip_frac_high"] == pytest.approx(1 / 3)


def test_clip_ranges_differ_by_side():
    tight, loose = {"clip_low": 0.01, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": 0.01}
    mean = OLD_MEAN + 0.02 * NOISE  # every row's ratio rises
    metrics = [gradient(build("grpo", **options), mean)[2] for options in (tight, loose)]
    assert [m["clip_frac_high"] for m in metrics] == [0.0, 1.0]
    assert metrics[0]["ratio_mean"] > 1.01 and [m["clip_frac_low"] for m in metrics] == [0.0, 0.0]
    back = gradient(build("grpo", **tight), OLD_MEAN - 0.02 * NOISE)[2]
    assert back["clip_frac_low"] == 1.0


def test_metrics_are_those_of_the_ratio():
    objective, mean = build("grpo", clip_low=0.02, clip_high=0.03), OLD_MEAN + 0.05 * draw(ROWS, SIZE, seed=2)
    step = trajectory_step(mean)
    log = (step.log_prob - step.old_log_prob) / SIZE
    metrics = objective(step)[1]
    assert metrics["ratio_mean"] == pytest.approx(float(log.exp().mean()), rel=1e-12)
    assert metrics["ratio_std"] == pytest.approx(float(log.exp().std(correction=0)), rel=1e-9)
    assert metrics["log_ratio_max"] == pytest.approx(float(log.abs().max()), rel=1e-12)
    assert metrics["approx_kl"] == pytest.approx(float((log.exp() - 1 - log).mean()), rel=1e-9)
    assert metrics["policy_loss"] == pytest.approx(float(objective(step)[0]), rel=1e-12)


def test_guard_ratio_equals_its_definition():
    """log rho = ((new - old) / D + mean(dmean^2) / (2 std^2)) std."""
    mean = OLD_MEAN + 0.05 * draw(ROWS, SIZE, seed=2)
    step = trajectory_step(mean)
    quadratic = (mean - OLD_MEAN).square().mean(dim=1) / (2 * STD**2)
    expected = ((step.log_prob - step.old_log_prob) / SIZE + quadratic) * STD
    metrics = build("grpo", ratio="guard")(step)[1]
    assert metrics["ratio_mean"] == pytest.approx(float(expected.exp().mean()), rel=1e-12)
    assert metrics["log_ratio_max"] == pytest.approx(float(expected.abs().max()), rel=1e-10)


def test_guard_ratio_is_centred_and_the_plain_one_is_not():
    """Averaged over antithetic noise E[log rho] is 0 for guard, -mean(dmean^2) / (2 std^2) for plain."""
    noise = torch.cat([NOISE, -NOISE])
    old = OLD_MEAN.repeat(2, 1)
    step = trajectory_step(old + 0.05, old_mean=old, noise=noise, advantages=ADVANTAGES.repeat(2))
    logs = {ratio: build("grpo", ratio=ratio)._log_ratio(step) for ratio in ("guard", "plain")}
    assert float(logs["guard"].mean()) == pytest.approx(0, abs=1e-15)
    assert float(logs["plain"].mean()) == pytest.approx(-(0.05**2) / (2 * STD**2), rel=1e-10)


def test_guard_gradient_at_ratio_one_does_not_depend_on_the_std():
    gradients = [gradient(build("grpo", ratio="guard"), OLD_MEAN, std=std)[0] for std in (0.1, 1.0)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)
    expected = -ADVANTAGES[:, None] * NOISE / SIZE / ROWS
    torch.testing.assert_close(gradients[0], expected, rtol=1e-12, atol=1e-14)


def test_guard_refuses_what_has_no_mean():
    step = replace(trajectory_step(OLD_MEAN), transition=Dirac(OLD_MEAN))
    with pytest.raises(TypeError, match="Dirac"):
        build("grpo", ratio="guard")(step)


def test_inverse_dt_divides_the_policy_loss_only():
    mean, reference = OLD_MEAN + 0.01, OLD_MEAN - 0.1
    plain = build("grpo", kl_coef=2.0)(trajectory_step(mean, reference))
    weighted = build("grpo", kl_coef=2.0, step_weights="inverse_dt")(trajectory_step(mean, reference))
    assert weighted[1]["policy_loss"] == pytest.approx(plain[1]["policy_loss"] / 0.25, rel=1e-12)
    assert weighted[1]["kl"] == plain[1]["kl"] > 0
    assert float(weighted[0]) == pytest.approx(weighted[1]["policy_loss"] + 2 * weighted[1]["kl"], rel=1e-12)


@pytest.mark.parametrize("reduction", ["per_dim", "sum"])
def test_g05_kl_is_the_exact_one_per_dim(reduction):
    """sigma .75 -> .5, a = .7: std^2 = .3675; means .1 apart in every dim."""
    objective = build("grpo", kl_coef=1.0, reduction=reduction)
    got, loss, metrics = gradient(
        objective, OLD_MEAN, reference=OLD_MEAN + 0.1, std=math.sqrt(0.3675), advantages=torch.zeros(ROWS)
    )
    assert objective.needs_reference and metrics["kl"] == pytest.approx(0.0136054, abs=5e-8)
    assert loss == pytest.approx(metrics["kl"], rel=1e-12)
    torch.testing.assert_close(got, torch.full_like(got, -0.1 / 0.3675 / SIZE / ROWS), rtol=1e-12, atol=0)


def test_kl_is_that_of_the_policy_to_the_reference():
    """Told apart by unequal stds, since the Gaussian KL is symmetric otherwise."""
    step = trajectory_step(OLD_MEAN, advantages=torch.zeros(ROWS))
    reference = Gaussian(OLD_MEAN + 0.1, 2 * STD)
    kl = build("grpo", kl_coef=1.0)(replace(step, reference=reference))[1]["kl"]
    expected = math.log(2) + (1 + (0.1 / STD) ** 2) / 8 - 0.5
    assert kl == pytest.approx(expected, rel=1e-12)


def test_without_kl_no_reference_is_needed_and_with_it_one_is():
    assert not build("grpo").needs_reference
    with pytest.raises(ValueError, match="kl_coef = 1"):
        build("grpo", kl_coef=1.0)(trajectory_step(OLD_MEAN))


def test_g07_sum_of_many_dims_does_not_overflow():
    """1.01^16384 is infinite in float32; the log-ratio is clamped, loss and gradient stay finite."""
    noise = torch.ones(2, 16384, dtype=torch.float64)
    old = torch.zeros_like(noise)
    got, loss, metrics = gradient(
        build("grpo", reduction="sum"),
        old + 0.01,
        advantages=torch.tensor([1.0, -1.0]),
        std=1.0,
        old_mean=old,
        noise=noise,
    )
    assert metrics["log_ratio_max"] == pytest.approx(0.01 * 16384 - 0.5 * 1e-4 * 16384, rel=1e-9)
    assert math.isfinite(loss) and bool(got.isfinite().all()) and metrics["ratio_mean"] == math.exp(20)


@pytest.mark.parametrize("options", [{}, {"ratio": "guard"}, {"kl_coef": 0.5}])
def test_invalid_rows_are_absent_but_keep_their_place_in_the_mean(options):
    objective = build("grpo", **options)
    mean, reference = OLD_MEAN + 0.001 * NOISE, OLD_MEAN + 0.1
    valid = torch.tensor([True, False, True, True, False, True])

    def run(step, leaf):
        loss, metrics = objective(step)
        return loss.detach(), metrics, torch.autograd.grad(loss, leaf)[0]

    leaf = mean.clone().requires_grad_()
    step = trajectory_step(leaf, reference)
    poison = torch.where(valid, 0.0, math.nan)
    poisoned = replace(
        step,
        valid=valid,
        old_log_prob=step.old_log_prob + poison,
        old_projection=step.old_projection + poison,
        advantages=ADVANTAGES + poison.float(),
    )
    loss, metrics, got = run(poisoned, leaf)
    kept = mean[valid].clone().requires_grad_()
    alone = trajectory_step(
        kept, reference[valid], ADVANTAGES[valid], old_mean=OLD_MEAN[valid], noise=NOISE[valid]
    )
    expected, expected_metrics, expected_gradient = run(alone, kept)
    assert float(loss) == pytest.approx(float(expected) * 4 / 6, rel=1e-12)
    torch.testing.assert_close(got[valid], expected_gradient * 4 / 6, rtol=1e-12, atol=1e-15)
    assert bool((got[~valid] == 0).all())
    for name in ("ratio_mean", "ratio_std", "log_ratio_max", "clip_frac_high", "approx_kl"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-9, abs=1e-15)


def test_masked_mean_of_nothing_is_zero():
    assert float(masked_mean(torch.tensor([math.nan, 1.0]), torch.tensor([False, False]))) == 0


def test_g12_the_second_update_has_ratios():
    """Old log-probs are kept from the rollout: update 1 is at ratio 1, update 2 is not and gets clipped."""
    torch.manual_seed(0)
    network = torch.nn.Linear(SIZE, SIZE).double()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    kernel = registry.build("kernel", {"name": "flow_sde"}, "kernel")
    objective, state = build("grpo", clip_low=1e-4, clip_high=1e-4), draw(ROWS, SIZE, seed=3)
    with torch.no_grad():
        rollout = kernel(network(state), state, 0.75, 0.5)
        action, noise = rollout.sample(NOISE), NOISE
        old_log_prob, old_projection = rollout.log_prob(action), projection(noise, rollout.mean)
    seen = []
    for _ in range(2):
        transition = kernel(network(state), state, 0.75, 0.5)
        step = replace(
            trajectory_step(OLD_MEAN),
            transition=transition,
            log_prob=transition.log_prob(action),
            old_log_prob=old_log_prob,
            old_projection=old_projection,
        )
        loss, metrics = objective(step)
        guard = build("grpo", ratio="guard")(step)[1]
        seen.append((metrics, guard))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for first in seen[0]:
        assert first["log_ratio_max"] == 0 and first["ratio_std"] == 0
    for second in seen[1]:
        assert second["ratio_std"] > 1e-4 and second["clip_frac_low"] + second["clip_frac_high"] > 0.5
    assert seen[1][0]["policy_loss"] < seen[0][0]["policy_loss"]


WRONG = [{"clip_low": 0.0}, {"clip_low": 1.0}, {"clip_high": -1.0}, {"reduction": "mean"}]


@pytest.mark.parametrize("option", WRONG)
def test_wrong_options_name_their_key(option):
    with pytest.raises(UserError, match=rf"objective\.{next(iter(option))}"):
        build("grpo", **option)


# ---------------------------------------------------------------- forward-process objectives

SIGMAS = (0.95, 0.9, 0.75, 0.5)


def forward_step(velocity, old, reference=0.0, advantages=ADVANTAGES, seed=0, valid=None):
    """A step whose networks ignore their input: the velocity is a tensor to differentiate by."""
    latents = draw(len(advantages), SIZE, seed=4)
    return ForwardStep(
        latents=latents,
        predict=lambda x, sigma: velocity + 0 * x,
        predict_old=lambda x, sigma: old + 0 * x,
        predict_reference=lambda x, sigma: reference + 0 * x,
        sigmas=SIGMAS,
        generator=torch.Generator().manual_seed(seed),
        advantages=advantages.double(),
        valid=torch.ones(len(advantages), dtype=torch.bool) if valid is None else valid,
    )


def drawn(objective, seed=0):
    """What the objective draws from a generator of that seed: sigma, x_t and u."""
    generator = torch.Generator().manual_seed(seed)
    sigma = draw_sigma(objective.config.times, SIGMAS, generator)
    clean = draw(ROWS, SIZE, seed=4)
    noise = torch.randn(ROWS, SIZE, generator=generator).double()
    return sigma, (1 - sigma) * clean + sigma * noise, noise - clean


def forward_gradient(objective, velocity, *args, **options):
    velocity = velocity.clone().requires_grad_()
    loss, metrics = objective(forward_step(velocity, *args, **options))
    return torch.autograd.grad(loss, velocity)[0], float(loss.detach()), metrics


FORWARD = [("nft", {"weighting": "none"}), ("nft", {"weighting": "x0_normalised"}), ("awm", {})]


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("weighting", ["none", "x0_normalised"])
def test_nft_loss_equals_its_formula(beta, weighting):
    objective = build("nft", beta=beta, weighting=weighting, kl_coef=0.3, adv_max=4.0)
    new, old, reference = draw(ROWS, SIZE, seed=5), draw(ROWS, SIZE, seed=6), draw(ROWS, SIZE, seed=7)
    sigma, noisy, target = drawn(objective)
    clean = noisy - sigma * target
    optimality = (ADVANTAGES.double() / 8 + 0.5).clamp(0, 1)
    terms = []
    for implicit in ((1 - beta) * old + beta * new, (1 + beta) * old - beta * new):
        if weighting == "none":
            terms.append((implicit - target).square().mean(1))
        else:
            error = noisy - sigma * implicit - clean
            terms.append((error.square() / error.abs().mean(1, keepdim=True)).mean(1))
    rows = 4.0 / beta * (optimality * terms[0] + (1 - optimality) * terms[1])
    kl = (new - reference).square().mean()
    loss, metrics = objective(forward_step(new, old, reference))
    assert float(loss) == pytest.approx(float(rows.mean() + 0.3 * kl), rel=1e-12)
    assert metrics["kl"] == pytest.approx(float(kl), rel=1e-12)
    assert metrics["policy_loss"] == pytest.approx(float(rows.mean()), rel=1e-12)
    assert metrics["old_deviation"] == pytest.approx(float((new - old).square().mean()), rel=1e-12)
    assert metrics["optimality"] == pytest.approx(float(optimality.mean()), rel=1e-6)


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_nft_fixed_point_is_the_reward_weighted_residual(beta):
    """One velocity for all rows: its minimiser is v_old + (1 / beta) mean[(2 r - 1)(u - v_old)]."""
    objective = build("nft", beta=beta, weighting="none")
    old = draw(1, SIZE, seed=6)
    _, _, target = drawn(objective)
    optimality = (ADVANTAGES.double() / 10 + 0.5)[:, None]
    minimiser = old + ((2 * optimality - 1) * (target - old)).mean(0, keepdim=True) / beta
    at_minimum, lowest, _ = forward_gradient(objective, minimiser, old)
    assert float(at_minimum.abs().max()) < 1e-12
    elsewhere, _, _ = forward_gradient(objective, old, old)
    assert float(elsewhere.abs().max()) > 0.01
    around = [minimiser + draw(1, SIZE, seed=seed) for seed in range(5)]
    assert all(forward_gradient(objective, point, old)[1] > lowest for point in around)


@pytest.mark.parametrize("weighting", ["none", "x0_normalised"])
def test_nft_without_preference_changes_nothing(weighting):
    """r = 1/2: the minimum of every row is at v = v_old, and only there."""
    objective, old = build("nft", weighting=weighting), draw(ROWS, SIZE, seed=6)
    at_old, _, metrics = forward_gradient(objective, old, old, advantages=torch.zeros(ROWS))
    assert float(at_old.abs().max()) < 1e-13 and metrics["optimality"] == 0.5
    away, _, _ = forward_gradient(objective, old + 0.1, old, advantages=torch.zeros(ROWS))
    assert float(away.mean()) > 1e-3


@pytest.mark.parametrize("weighting", ["none", "x0_normalised"])
def test_nft_gradient_at_the_old_policy_is_advantage_weighted_matching(weighting):
    """A times the gradient of the matching loss; x0_normalised weighs it by sigma / mean |v_old - u|."""
    objective, old = build("nft", weighting=weighting, beta=0.7), draw(ROWS, SIZE, seed=6)
    sigma, _, target = drawn(objective)
    got, _, metrics = forward_gradient(objective, old, old)
    expected = ADVANTAGES.double()[:, None] * 2 * (old - target) / SIZE / ROWS
    if weighting == "x0_normalised":
        expected = expected * sigma / (old - target).abs().mean(1, keepdim=True)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
    assert metrics["old_deviation"] == 0


@pytest.mark.parametrize(("name", "options"), FORWARD)
def test_g39_flipping_the_reward_flips_the_gradient(name, options):
    objective, old = build(name, **options), draw(ROWS, SIZE, seed=6)
    up, _, _ = forward_gradient(objective, old, old)
    down, _, _ = forward_gradient(objective, old, old, advantages=-ADVANTAGES)
    torch.testing.assert_close(down, -up, rtol=1e-6, atol=1e-9)
    assert float(up.abs().min()) > 0
    away = [forward_gradient(objective, old + 0.01, old, advantages=s * ADVANTAGES)[0] for s in (1, -1)]
    assert float((away[0] - away[1]).abs().max()) > 0.01


@pytest.mark.parametrize("scale", [5.0, 50.0])
def test_nft_optimality_saturates_at_adv_max(scale):
    objective, old = build("nft"), draw(ROWS, SIZE, seed=6)
    _, _, metrics = forward_gradient(objective, old, old, advantages=torch.full((ROWS,), scale))
    assert metrics["optimality"] == 1.0


@pytest.mark.parametrize(("name", "options"), [FORWARD[0], FORWARD[2]])
def test_forward_gradient_equals_finite_differences(name, options):
    """Not for x0_normalised, whose weight is detached; its gradient is tested at the old policy."""
    objective = build(name, kl_coef=0.2, **options)
    old = draw(ROWS, SIZE, seed=6)
    new = (old + 0.05 * draw(ROWS, SIZE, seed=5)).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: objective(forward_step(v, old, old + 0.3))[0], new, eps=1e-7)


@pytest.mark.parametrize(("name", "options"), FORWARD)
def test_forward_objectives_skip_invalid_rows(name, options):
    objective, old = build(name, kl_coef=0.1, **options), draw(ROWS, SIZE, seed=6)
    valid = torch.tensor([True, False, True, True, True, True])
    poison = torch.where(valid, 0.0, math.nan)
    got, loss, metrics = forward_gradient(
        objective, old + 0.01, old, advantages=ADVANTAGES + poison, valid=valid
    )
    per_row = [
        forward_gradient(objective, old + 0.01, old, advantages=ADVANTAGES, valid=torch.arange(ROWS) == row)
        for row in range(ROWS)
    ]
    kept = [row for row in range(ROWS) if row != 1]
    assert loss == pytest.approx(sum(per_row[row][1] for row in kept), rel=1e-9)
    torch.testing.assert_close(got, sum(per_row[row][0] for row in kept), rtol=1e-9, atol=1e-12)
    assert bool((got[1] == 0).all()) and all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ["nft", "awm"])
def test_forward_objectives_declare_what_they_need(name):
    plain, anchored = build(name), build(name, kl_coef=0.1, units_per_micro_batch=3)
    assert plain.unit == "forward" and build("grpo").unit == "trajectory"
    assert not plain.needs_reference and anchored.needs_reference
    assert anchored.units_per_micro_batch == 3 and plain.units_per_micro_batch >= 1
    never = replace(forward_step(draw(ROWS, SIZE), draw(ROWS, SIZE)), predict_reference=None)
    assert plain(never)[1]["kl"] == 0


@pytest.mark.parametrize("name", ["nft", "awm"])
def test_forward_queries_share_one_state_and_old_ones_hold_no_graph(name):
    calls = {}
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def record(key):
        def predict(x, sigma):
            calls[key] = (x, sigma, torch.is_grad_enabled())
            return weight * x

        return predict

    step = replace(
        forward_step(weight, weight),
        predict=record("new"),
        predict_old=record("old"),
        predict_reference=record("reference"),
    )
    objective = build(name, kl_coef=1.0)
    objective(step)
    sigma, noisy, _ = drawn(objective)
    for key in ("new", "old", "reference"):
        assert calls[key][1] == sigma and type(calls[key][1]) is float
        assert torch.equal(calls[key][0], noisy) and calls[key][2] == (key == "new")


def test_awm_loss_equals_its_formula():
    objective = build("awm", clip_low=0.02, clip_high=0.05)
    old = draw(ROWS, SIZE, seed=6)
    new = old + 0.05 * draw(ROWS, SIZE, seed=5)
    _, _, target = drawn(objective)
    ratio = ((old - target).square().mean(1) - (new - target).square().mean(1)).exp()
    advantages = ADVANTAGES.double()
    expected = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.98, 1.05)).mean()
    loss, metrics = objective(forward_step(new, old))
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    assert metrics["clip_frac_low"] == pytest.approx(float((ratio < 0.98).double().mean()))
    assert metrics["clip_frac_high"] == pytest.approx(float((ratio > 1.05).double().mean()))
    assert 0 < metrics["clip_frac_low"] + metrics["clip_frac_high"] < 1


def test_awm_gradient_at_the_old_policy_is_advantage_weighted_matching():
    objective, old = build("awm"), draw(ROWS, SIZE, seed=6)
    _, _, target = drawn(objective)
    got, loss, metrics = forward_gradient(objective, old, old)
    expected = ADVANTAGES.double()[:, None] * 2 * (old - target) / SIZE / ROWS
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
    assert metrics["ratio_mean"] == 1 and loss == pytest.approx(-float(ADVANTAGES.mean()), rel=1e-6)


def test_times_of_forward_units():
    def sample(times, count=4000):
        generator = torch.Generator().manual_seed(0)
        return torch.tensor([draw_sigma(times, SIGMAS, generator) for _ in range(count)], dtype=torch.float64)

    grid = sample("grid")
    for sigma in SIGMAS:
        assert float((grid == sigma).double().mean()) == pytest.approx(0.25, abs=0.03)
    uniform = sample("uniform")
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    for quantile in (0.1, 0.5, 0.9):
        assert float(uniform.quantile(quantile)) == pytest.approx(quantile, abs=0.03)
    normal = torch.distributions.Normal(0.0, 1.0)
    logit = sample("logit_normal")
    for quantile in (0.1, 0.5, 0.9):
        expected = float(normal.icdf(torch.tensor(quantile)).sigmoid())
        assert float(logit.quantile(quantile)) == pytest.approx(expected, abs=0.02)
