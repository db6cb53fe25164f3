"""Every flow kernel: its formula written a second time, its density, and the identities between kernels.

x0 = x - sigma v, eps = x + (1 - sigma) v, dt = sigma_next - sigma < 0.
"""

import math
from itertools import pairwise

import pytest
import torch

from flowrl import registry
from flowrl.mdp.transitions import MIN_STD, Gaussian

FLOW = [name for name in registry.names("kernel") if registry.get("kernel", name).family == "flow"]
STOCHASTIC = [name for name in FLOW if registry.build("kernel", {"name": name}, "kernel").std(0.75, 0.5) > 0]
LEVELS = [(1.0, 0.75), (0.9375, 0.8333), (0.75, 0.5), (0.5, 0.25), (0.08, 0.01), (0.25, 0.0)]


def build(name, **options):
    return registry.build("kernel", {"name": name, **options}, "kernel")


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def score_form(x, v, sigma, sigma_next, g):
    """The reverse SDE x + v dt - g^2 / 2 score dt, with the score from the predicted data."""
    dt, x0 = sigma_next - sigma, x - sigma * v
    score = -(x - (1 - sigma) * x0) / sigma**2
    return x + v * dt - 0.5 * g**2 * score * dt, g * math.sqrt(-dt)


def flow_diffusion(a, sigma, sigma_next):
    return a * math.sqrt(sigma / (1 - (sigma_next if sigma == 1 else sigma)))


def check(transition, mean, std):
    assert transition.std == pytest.approx(std, rel=1e-12, abs=1e-15)
    torch.testing.assert_close(transition.mean, mean, rtol=1e-12, atol=1e-12)


def test_the_registered_kernels():
    assert {"flow_sde", "dance_sde", "cps", "ode"} <= set(FLOW)
    assert {"flow_sde", "dance_sde", "cps"} <= set(STOCHASTIC) and "ode" not in STOCHASTIC


@pytest.mark.parametrize("a", [0.3, 0.7, 1.0])
@pytest.mark.parametrize(("sigma", "sigma_next"), LEVELS)
def test_flow_sde_formula(a, sigma, sigma_next):
    x, v = draw(2, 3), draw(2, 3, seed=1)
    transition = build("flow_sde", noise_level=a)(v, x, sigma, sigma_next)
    check(transition, *score_form(x, v, sigma, sigma_next, flow_diffusion(a, sigma, sigma_next)))


@pytest.mark.parametrize("eta", [0.25, 0.3, 1.0])
@pytest.mark.parametrize(("sigma", "sigma_next"), LEVELS)
def test_dance_sde_formula(eta, sigma, sigma_next):
    x, v = draw(2, 3), draw(2, 3, seed=1)
    check(build("dance_sde", eta=eta)(v, x, sigma, sigma_next), *score_form(x, v, sigma, sigma_next, eta))


@pytest.mark.parametrize("a", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("sigma", "sigma_next"), LEVELS)
def test_cps_formula(a, sigma, sigma_next):
    x, v = draw(2, 3), draw(2, 3, seed=1)
    x0, eps, std = x - sigma * v, x + (1 - sigma) * v, sigma_next * math.sin(a * math.pi / 2)
    mean = (1 - sigma_next) * x0 + math.sqrt(sigma_next**2 - std**2) * eps
    check(build("cps", noise_level=a)(v, x, sigma, sigma_next), mean, std)


@pytest.mark.parametrize(("sigma", "sigma_next"), [pair for pair in LEVELS if pair[0] < 1])
def test_flow_sde_and_dance_sde_agree_at_equal_diffusion(sigma, sigma_next):
    x, v = draw(2, 3), draw(2, 3, seed=1)
    flow = build("flow_sde", noise_level=0.7)(v, x, sigma, sigma_next)
    dance = build("dance_sde", eta=flow_diffusion(0.7, sigma, sigma_next))(v, x, sigma, sigma_next)
    check(flow, dance.mean, dance.std)


@pytest.mark.parametrize(("sigma", "sigma_next"), LEVELS)
def test_cps_at_full_noise_is_the_consistency_law(sigma, sigma_next):
    x, v = draw(2, 3), draw(2, 3, seed=1)
    transition = build("cps", noise_level=1)(v, x, sigma, sigma_next)
    check(transition, (1 - sigma_next) * (x - sigma * v), sigma_next)


@pytest.mark.parametrize("a", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize(("sigma", "sigma_next"), LEVELS)
def test_cps_preserves_the_coefficients_of_data_and_noise(a, sigma, sigma_next):
    kernel = build("cps", noise_level=a)
    velocities = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)  # eps - x0 of pure data, of pure noise
    states = torch.tensor([[1 - sigma], [sigma]], dtype=torch.float64)
    transition = kernel(velocities, states, sigma, sigma_next)
    data, noise = transition.mean[:, 0].tolist()
    assert data == pytest.approx(1 - sigma_next, abs=1e-12)
    assert math.hypot(noise, transition.std) == pytest.approx(sigma_next, abs=1e-12)


@pytest.mark.parametrize("spec", [("flow_sde", "noise_level"), ("dance_sde", "eta"), ("cps", "noise_level")])
@pytest.mark.parametrize(("sigma", "sigma_next"), LEVELS)
def test_g02_without_noise_every_kernel_is_the_euler_step(spec, sigma, sigma_next):
    name, option = spec
    x, v = draw(2, 3), draw(2, 3, seed=1)
    euler = build("ode")(v, x, sigma, sigma_next).sample(torch.zeros_like(x))
    torch.testing.assert_close(euler, x + (sigma_next - sigma) * v, rtol=1e-14, atol=1e-14)
    check(build(name, **{option: 0})(v, x, sigma, sigma_next), euler, 0.0)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_g02_without_noise_a_whole_chain_equals_diffusers(shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(10)
    sigmas = scheduler.sigmas.tolist()
    kernel = build("flow_sde", noise_level=0)
    theirs = ours = draw(2, 4, dtype=torch.float32)
    for step, (timestep, pair) in enumerate(zip(scheduler.timesteps, pairwise(sigmas), strict=True)):
        theirs = scheduler.step(torch.sin(theirs + step), timestep, theirs).prev_sample
        ours = kernel(torch.sin(ours + step), ours, *pair).mean
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sigma", [1.0, 1 - 6e-8, 0.9999, 0.999])
def test_g03_first_step_near_sigma_one(sigma):
    kernel, sigma_next = build("flow_sde"), 0.857692
    diffusion = kernel.std(sigma, sigma_next) / math.sqrt(sigma - sigma_next)
    assert diffusion == pytest.approx(1.856, rel=1e-3 if sigma == 1 else 0.05)
    x, v = draw(2, 3, dtype=torch.float32), draw(2, 3, seed=1, dtype=torch.float32)
    transition = kernel(v, x, sigma, sigma_next)
    reference = kernel(v, x, 1.0, sigma_next)
    torch.testing.assert_close(transition.mean, reference.mean, rtol=5e-3, atol=5e-3)
    assert bool(transition.log_prob(transition.sample(v)).isfinite().all())


def test_g03_below_the_guard_nothing_changes():
    assert build("flow_sde").std(0.9989, 0.99) == pytest.approx(
        0.7 * math.sqrt(0.9989 / 0.0011 * 0.0089), rel=1e-9
    )


def test_g04_the_last_step_of_every_kernel():
    sigma = 0.25
    assert build("flow_sde").std(sigma, 0.0) == pytest.approx(0.7 * sigma / math.sqrt(1 - sigma), rel=1e-12)
    assert build("dance_sde").std(sigma, 0.0) == pytest.approx(0.3 * math.sqrt(sigma), rel=1e-12)
    x, v = draw(2, 3), draw(2, 3, seed=1)
    for name in ("cps", "ode"):
        last = build(name)(v, x, sigma, 0.0)
        assert build(name).std(sigma, 0.0) == 0 and not last.has_density
        torch.testing.assert_close(last.sample(draw(2, 3, seed=2)), x - sigma * v, rtol=1e-12, atol=1e-12)


G06 = [
    (1.00, 0.75, 0.880000, 0.700000, -1.062264),
    (0.75, 0.50, 0.910625, 0.606218, -0.918423),
    (0.50, 0.25, 1.033125, 0.350000, -0.369116),
    (0.25, 0.00, 1.073958, 0.202073, 0.180190),
]


@pytest.mark.parametrize(("sigma", "sigma_next", "mean", "std", "log_prob"), G06)
def test_g06_values_of_flow_sde(sigma, sigma_next, mean, std, log_prob):
    x, v = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), -0.5, dtype=torch.float64)
    transition = build("flow_sde", noise_level=0.7)(v, x, sigma, sigma_next)
    assert float(transition.mean) == pytest.approx(mean, abs=6e-7)
    assert transition.std == pytest.approx(std, abs=6e-7)
    action = transition.mean + transition.std
    assert float(transition.log_prob(action)) == pytest.approx(log_prob, abs=6e-7)


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize(("sigma", "sigma_next"), LEVELS[:-1])
def test_g06_density_integrates_to_one(name, sigma, sigma_next):
    kernel = build(name)
    mean = kernel(torch.full((1, 1), -0.5).double(), torch.ones(1, 1).double(), sigma, sigma_next).mean.item()
    std = kernel.std(sigma, sigma_next)
    grid = torch.linspace(mean - 9 * std, mean + 9 * std, 2001, dtype=torch.float64)[:, None]
    rows = torch.ones_like(grid)
    density = kernel(-0.5 * rows, rows, sigma, sigma_next).log_prob(grid).exp()
    assert float(torch.trapezoid(density, grid[:, 0])) == pytest.approx(1.0, abs=1e-9)


def test_g05_kl_of_a_step_holds_dt():
    """sigma .75 -> .5, a = .7, means .1 apart: .0136054; without dt it would be .0034014."""
    kernel = build("flow_sde", noise_level=0.7)
    here = kernel(torch.zeros(1, 1).double(), torch.zeros(1, 1).double(), 0.75, 0.5)
    assert float(here.kl(Gaussian(here.mean + 0.1, here.std))) == pytest.approx(0.0136054, abs=5e-8)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_g05_kl_equals_monte_carlo(name):
    kernel, rows = build(name), 100_000
    x = torch.ones(1, 3, dtype=torch.float64)
    probe = [kernel(v * x, x, 0.75, 0.5).mean for v in (0.0, 1.0)]
    scale = 1.2 * kernel.std(0.75, 0.5) / float((probe[1] - probe[0])[0, 0].abs())
    here = kernel((0 * x).expand(rows, 3), x.expand(rows, 3), 0.75, 0.5)
    there = kernel((scale * x).expand(rows, 3), x.expand(rows, 3), 0.75, 0.5)
    action = here.sample(draw(rows, 3))
    estimate = float((here.log_prob(action) - there.log_prob(action)).mean())
    assert float(here.kl(there)[0]) == pytest.approx(3 * 1.2**2 / 2, rel=1e-9)
    assert float(here.kl(there)[0]) == pytest.approx(estimate, rel=0.02)


@pytest.mark.parametrize("name", FLOW)
@pytest.mark.parametrize(("sigma", "sigma_next"), LEVELS)
def test_std_is_that_of_the_transition(name, sigma, sigma_next):
    kernel = build(name)
    transition = kernel(draw(2, 3), draw(2, 3, seed=1), sigma, sigma_next)
    assert getattr(transition, "std", 0.0) == kernel.std(sigma, sigma_next)
    assert transition.has_density == (kernel.std(sigma, sigma_next) >= MIN_STD)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_state_stays_float32_and_the_gradient_is_the_coefficient(name):
    kernel = build(name)
    v = draw(2, 3, dtype=torch.float32).requires_grad_()
    x = draw(2, 3, seed=1, dtype=torch.float32)
    mean = kernel(v, x, 0.75, 0.5).mean
    assert mean.dtype == torch.float32
    (gradient,) = torch.autograd.grad(mean.sum(), v)
    slope = kernel(torch.ones(1, 1), torch.zeros(1, 1), 0.75, 0.5).mean
    slope = slope - kernel(torch.zeros(1, 1), torch.zeros(1, 1), 0.75, 0.5).mean
    torch.testing.assert_close(gradient, slope.expand(2, 3), rtol=1e-6, atol=1e-7)
    assert float(slope.abs()) > 1e-3


@pytest.mark.parametrize("name", STOCHASTIC)
def test_g01_replay_in_any_order_equals_the_rollout_exactly(name):
    torch.manual_seed(0)
    network = torch.nn.Linear(6, 6)
    kernel, sigmas = build(name), [1.0, 0.8, 0.5, 0.2]
    state, record = draw(4, 6, dtype=torch.float32), []
    with torch.no_grad():
        for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            transition = kernel(network(state), state, sigma, sigma_next)
            action = transition.sample(draw(4, 6, seed=step, dtype=torch.float32))
            record.append((state, sigma, sigma_next, action, transition.log_prob(action)))
            state = action
    for state, sigma, sigma_next, action, old in reversed(record):
        new = kernel(network(state), state, sigma, sigma_next).log_prob(action)
        assert torch.equal(new, old) and new.requires_grad
