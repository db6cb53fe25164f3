"""Few-step and diffusion kernels on every noise schedule: textbook formulas, identities, whole loops.

The kernels are written for the flow; here each is compared with the formula of the schedule itself,
x = alpha x0 + sigma eps, and with diffusers' own samplers given the same noise. All in float64.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from flowrl import registry
from flowrl.mdp.schedules import Level, endpoints, part, scale_of_level, to_flow, variance_preserving
from flowrl.mdp.transitions import MIN_STD, Gaussian

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
SIGMA_DATA = 0.5


def kernel(name: str, **options: Any) -> Any:
    return registry.build("kernel", {"name": name, **options}, "sampler.kernel")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alpha_bar(*times: int, final: float = 1.0) -> tuple[Level, ...]:
    return variance_preserving(diffusers.DDIMScheduler(**SD).alphas_cumprod, list(times), final)


def trig(*times: float) -> tuple[Level, ...]:
    def curve(time: float) -> float:
        alpha, sigma = math.cos(time), SIGMA_DATA * math.sin(time)
        return sigma / (alpha + sigma)

    return tuple(Level(math.cos(t), SIGMA_DATA * math.sin(t), t, curve) for t in times)


def exploding(*times: float) -> tuple[Level, ...]:
    return tuple(Level(1.0, t, t, lambda time: time / (1 + time)) for t in times)


SCHEDULES: dict[str, tuple[float, ...]] = {
    "lerp": (1.0, 0.9375, 0.8333, 0.625, 0.0),
    "alpha_bar": alpha_bar(999, 759, 499, 259),
    "trig": trig(1.5, 1.3, 0.9, 0.4, 0.0),
    "exploding": exploding(80.0, 24.4, 5.84, 0.9, 0.0),
}
STEPS = [
    pytest.param(a, b, id=f"{name}-{k}")
    for name, levels in SCHEDULES.items()
    for k, (a, b) in enumerate(pairwise(levels))
]
NOISY_STEPS = [step for step in STEPS if step.values[1] > 0]


def roots(level: float) -> tuple[float, float]:
    return (level.alpha, level.sigma) if isinstance(level, Level) else (1 - level, level)


def law(name: str, x0: Tensor, eps: Tensor, level: float, following: float, **options: Any) -> Gaussian:
    """The transition in the sampler's own coordinates, as the wrapper makes it."""
    transition = kernel(name, **options)(*to_flow(x0, eps, level), level, following)
    return transition.scaled(scale_of_level(following))


def check(transition: Any, mean: Tensor, std: float) -> None:
    assert getattr(transition, "std", 0.0) == pytest.approx(std, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(transition.sample(torch.zeros_like(mean)), mean, rtol=1e-9, atol=1e-9)


# -- a level, and the way to the flow and back ---------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_flow_is_the_state_over_its_scale(name: str) -> None:
    x0, eps = draw(2, 3), draw(2, 3, seed=1)
    for level in SCHEDULES[name]:
        alpha, sigma = roots(level)
        velocity, state = to_flow(x0, eps, level)
        torch.testing.assert_close(scale_of_level(level) * state, alpha * x0 + sigma * eps)
        torch.testing.assert_close(state - level * velocity, x0)
        torch.testing.assert_close(state + (1 - level) * velocity, eps)
    levels = [float(level) for level in SCHEDULES[name]]
    assert levels == sorted(levels, reverse=True) and 0 <= levels[-1] < levels[0] <= 1


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_endpoints_invert_what_the_network_predicts(kind: str) -> None:
    x0, eps = draw(2, 3), draw(2, 3, seed=1)
    for level in alpha_bar(999, 500, 1):
        alpha, sigma = roots(level)
        if sigma == 0:
            continue
        output = {"epsilon": eps, "v_prediction": alpha * eps - sigma * x0, "sample": x0}[kind]
        found = endpoints(kind, output, alpha * x0 + sigma * eps, level)
        torch.testing.assert_close(found[0], x0)
        torch.testing.assert_close(found[1], eps)


def test_a_schedule_that_starts_at_pure_noise() -> None:
    """Zero terminal SNR: alpha is 0, the flow's level 1, and a v prediction is minus the data."""
    bars = diffusers.DDIMScheduler(**SD, rescale_betas_zero_snr=True).alphas_cumprod
    first, second = variance_preserving(bars, [999, 499], 1.0)[:2]
    x0, eps = draw(2, 3), draw(2, 3, seed=1)
    assert first == 1 and first.alpha == 0
    found = endpoints("v_prediction", -x0, eps, first)
    torch.testing.assert_close(found, (x0, eps))
    for name in ("ddim", "consistency", "tcd"):
        step = law(name, x0, eps, first, second)
        assert step.has_density and bool(step.log_prob(step.sample(eps)).isfinite().all())


def test_endpoints_refuse_another_prediction() -> None:
    with pytest.raises(ValueError, match="not 'flow_prediction'"):
        endpoints("flow_prediction", draw(1, 1), draw(1, 1), alpha_bar(999)[0])


def test_part_of_a_level_is_taken_on_its_own_time() -> None:
    assert part(0.8, 0.25) == pytest.approx(0.2)
    level = alpha_bar(759)[0]
    assert part(level, 0.7) == alpha_bar(531)[0]  # floor(0.7 * 759)
    assert part(level, 1.0) == level and part(level, 0.0) == 0
    last = alpha_bar(final=0.99)[-1]
    assert part(last, 0.5) == last > 0  # the end of time has nothing below it
    angle = trig(1.2)[0]
    assert part(angle, 0.5) == trig(0.6)[0]


@pytest.mark.parametrize("tenths", range(1, 10))
def test_the_destination_of_tcd_is_the_step_of_exact_arithmetic(tenths: int) -> None:
    """(1 - 0.9) * 750 is 74.99999999999999 in floats; the step is 75, as in diffusers."""
    law = kernel("tcd", eta=tenths / 10)
    times = range(10, 1000)
    found = [law.destination(level) for level in alpha_bar(*times)[:-1]]
    assert found == [alpha_bar((10 - tenths) * time // 10)[0] for time in times]


# -- the formulas of each schedule ---------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "following"), STEPS)
def test_consistency_is_its_formula(level: float, following: float) -> None:
    x0, eps = draw(2, 3), draw(2, 3, seed=1)
    alpha, sigma = roots(following)
    check(law("consistency", x0, eps, level, following), alpha * x0, sigma)


@pytest.mark.parametrize("eta", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("level", "following"), STEPS)
def test_tcd_is_its_formula(level: float, following: float, eta: float) -> None:
    x0, eps = draw(2, 3), draw(2, 3, seed=1)
    alpha, sigma = roots(following)
    below = part(following, 1 - eta)
    ratio = below / (1 - below)  # sigma_e / alpha_e
    mean = alpha * (x0 + ratio * eps)
    std = math.sqrt(max(sigma**2 - (alpha * ratio) ** 2, 0))
    check(law("tcd", x0, eps, level, following, eta=eta), mean, std if eta > 0 else 0.0)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("level", "following"), [step for step in STEPS if "alpha_bar" in str(step.id)])
def test_ddim_is_its_formula(level: Level, following: Level, eta: float) -> None:
    x0, eps = draw(2, 3), draw(2, 3, seed=1)
    now, then = level.alpha**2, following.alpha**2
    std = eta * math.sqrt((1 - then) / (1 - now) * (1 - now / then))
    mean = math.sqrt(then) * x0 + math.sqrt(1 - then - std**2) * eps
    check(law("ddim", x0, eps, level, following, eta=eta), mean, std)


@pytest.mark.parametrize(("level", "following"), NOISY_STEPS)
def test_ddim_with_all_noise_is_the_posterior_of_the_forward_process(level: float, following: float) -> None:
    """By completing the square in N(x; a x', v) N(x'; alpha' x0, sigma'^2), on any schedule."""
    x0, eps = draw(2, 3), draw(2, 3, seed=1)
    (alpha, sigma), (alpha_next, sigma_next) = roots(level), roots(following)
    factor = alpha / alpha_next
    noise = sigma**2 - (factor * sigma_next) ** 2
    precision = factor**2 / noise + 1 / sigma_next**2
    x = alpha * x0 + sigma * eps
    mean = (factor * x / noise + alpha_next * x0 / sigma_next**2) / precision
    check(law("ddim", x0, eps, level, following, eta=1.0), mean, precision**-0.5)


# -- identities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("cps", {"noise_level": 1.0}), ("consistency", {})),
        (("tcd", {"eta": 1.0}), ("consistency", {})),
        (("tcd", {"eta": 0.0}), ("ddim", {"eta": 0.0})),
        (("ddim", {"eta": 0.0}), ("ode", {})),
    ],
    ids=lambda spec: f"{spec[0]}{''.join(map(str, spec[1].values()))}",
)
@pytest.mark.parametrize(("level", "following"), STEPS)
def test_kernels_agree_where_they_must(level: float, following: float, one: Any, other: Any) -> None:
    x0, eps, noise = draw(2, 3), draw(2, 3, seed=1), draw(2, 3, seed=2)
    first, second = (law(name, x0, eps, level, following, **options) for name, options in (one, other))
    check(first, second.sample(torch.zeros_like(x0)), getattr(second, "std", 0.0))
    torch.testing.assert_close(first.sample(noise), second.sample(noise), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["ode", "consistency", "tcd", "ddim", "cps"])
@pytest.mark.parametrize(("level", "following"), NOISY_STEPS)
def test_kernels_preserve_the_coefficients_of_the_schedule(level: float, following: float, name: str) -> None:
    """With true x0 and eps the next state has alpha' parts of data and sigma' of noise."""
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    data = law(name, one, zero, level, following)
    noise = law(name, zero, one, level, following)
    alpha, sigma = roots(following)
    assert float(data.sample(zero)) == pytest.approx(alpha, rel=1e-9)
    assert math.hypot(float(noise.sample(zero)), getattr(noise, "std", 0.0)) == pytest.approx(sigma, rel=1e-9)


# -- which transitions have a density ------------------------------------------------------------------------


def test_four_steps_of_the_flow_train_three_transitions() -> None:
    """The published schedule: shift 5, and late steps weigh most (alpha / (2 sigma^2) of each target)."""
    shifted = [5 * t / (1 + 4 * t) for t in (1.0, 0.75, 0.5, 0.25)] + [0.0]
    law = kernel("consistency")
    stds = [law.std(a, b) for a, b in pairwise(shifted)]
    assert [std >= MIN_STD for std in stds] == [True, True, True, False]
    assert stds == pytest.approx([0.9375, 0.8333, 0.625, 0], abs=5e-5)
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    factors = []
    for level, following in list(pairwise(shifted))[:3]:
        step = law(*to_flow(one, zero, level), level, following)
        factors.append(float(step.mean) / (2 * step.std**2))
    assert factors == pytest.approx([0.0356, 0.120, 0.480], abs=5e-4)


def test_g37_lcm_in_four_steps_has_three_transitions() -> None:
    scheduler = diffusers.LCMScheduler(**SD)
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == [999, 759, 499, 259]
    levels = variance_preserving(scheduler.alphas_cumprod, scheduler.timesteps.tolist(), 1.0)
    x0, eps = draw(2, 3), draw(2, 3, seed=1)
    steps = [law("consistency", x0, eps, a, b) for a, b in pairwise(levels)]
    assert [step.has_density for step in steps] == [True, True, True, False]
    renoised = [math.sqrt(1 - float(scheduler.alphas_cumprod[t])) for t in (759, 499, 259)]
    assert [step.std for step in steps[:3]] == pytest.approx(renoised, rel=1e-6)


@pytest.mark.parametrize("name", ["consistency", "tcd", "ddim"])
@pytest.mark.parametrize(("level", "following"), NOISY_STEPS)
def test_density_integrates_to_one_and_its_kl_is_that_of_samples(
    level: float, following: float, name: str
) -> None:
    zero, rows = torch.zeros(1, 1, dtype=torch.float64), 200_000
    here = law(name, zero + 0.4, zero - 0.7, level, following)
    assert here.has_density
    grid = torch.linspace(-9, 9, 2001, dtype=torch.float64)[:, None] * here.std + here.mean
    mass = Gaussian(here.mean.expand(2001, 1), here.std).log_prob(grid).exp()
    assert float(torch.trapezoid(mass, grid[:, 0])) == pytest.approx(1, abs=1e-9)
    alpha, _ = roots(following)
    there = law(name, zero + 0.4 + 1.3 * here.std / alpha, zero - 0.7, level, following)
    assert float(here.kl(there)) == pytest.approx(1.3**2 / 2, rel=1e-6)
    wide, far = (Gaussian(step.mean.expand(rows, 1), step.std) for step in (here, there))
    actions = wide.sample(draw(rows, 1, seed=3))
    estimate = float((wide.log_prob(actions) - far.log_prob(actions)).mean())
    assert float(here.kl(there)) == pytest.approx(estimate, rel=0.02)
    entropy = -float(wide.log_prob(actions).mean())
    assert entropy == pytest.approx(0.5 + math.log(here.std * math.sqrt(2 * math.pi)), abs=0.01)
