"""Densities, divergences and reductions, against torch.distributions in float64."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from flowrl.mdp.transitions import MIN_STD, Dirac, Gaussian, log_ratio, projection


def normal(mean, std):
    return Independent(Normal(mean, torch.full_like(mean, std)), mean.dim() - 1)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(2, 1), (3, 4), (2, 3, 5, 4), (1, 2, 3, 2, 2)])
@pytest.mark.parametrize("std", [2e-6, 0.3, 2.0, 50.0])
def test_log_prob_equals_torch_distributions(shape, std):
    mean = draw(*shape)
    action = mean + std * 1.7 * draw(*shape, seed=1)
    got = Gaussian(mean, std).log_prob(action)
    assert got.dtype == torch.float64 and got.shape == shape[:1]
    torch.testing.assert_close(got, normal(mean, std).log_prob(action), rtol=1e-9, atol=1e-9)


def test_log_prob_of_float32_states_is_accumulated_in_float64():
    mean, noise = draw(1, 1 << 20, dtype=torch.float32), draw(1, 1 << 20, seed=1, dtype=torch.float32)
    action = Gaussian(mean, 0.25).sample(noise)
    exact = normal(mean.double(), 0.25).log_prob(action.double())
    torch.testing.assert_close(Gaussian(mean, 0.25).log_prob(action), exact, rtol=1e-9, atol=0)


@pytest.mark.parametrize("std", [0.01, 0.7])
def test_log_prob_of_a_sample_is_that_of_its_noise(std):
    noise = draw(4, 6)
    transition = Gaussian(draw(4, 6, seed=2), std)
    expected = normal(torch.zeros_like(noise), 1.0).log_prob(noise) - 6 * math.log(std)
    got = transition.log_prob(transition.sample(noise))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_entropy_by_monte_carlo():
    transition = Gaussian(torch.zeros(200_000, 3, dtype=torch.float64), 0.4)
    estimate = -transition.log_prob(transition.sample(draw(200_000, 3))).mean()
    entropy = 3 * (0.5 * math.log(2 * math.pi * math.e) + math.log(0.4))
    assert float(estimate) == pytest.approx(entropy, abs=0.01)


@pytest.mark.parametrize("other_std", [0.5, 0.2, 1.3])
def test_kl_equals_torch_distributions(other_std):
    mean, other = draw(3, 4), draw(3, 4, seed=1)
    got = Gaussian(mean, 0.5).kl(Gaussian(other, other_std))
    expected = kl_divergence(normal(mean, 0.5), normal(other, other_std))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_kl_of_a_transition_to_itself_is_exactly_zero():
    mean = draw(3, 4)
    assert Gaussian(mean, 0.3).kl(Gaussian(mean.clone(), 0.3)).tolist() == [0.0, 0.0, 0.0]


def test_event_size_counts_everything_but_the_rows():
    assert Gaussian(torch.zeros(5, 2, 3, 4), 1.0).event_size == 24
    assert Dirac(torch.zeros(5, 7)).event_size == 7


def test_a_step_narrower_than_min_std_has_no_density():
    mean = torch.ones(2, 3)
    narrow = Gaussian(mean, 0.99 * MIN_STD)
    assert not narrow.has_density and Gaussian(mean, MIN_STD).has_density
    with pytest.raises(ValueError, match="no density"):
        narrow.log_prob(mean)
    with pytest.raises(ValueError, match="no density"):
        narrow.kl(Gaussian(mean, 1.0))
    with pytest.raises(ValueError, match="no density"):
        Gaussian(mean, 1.0).kl(narrow)
    assert torch.equal(Gaussian(mean, 0.0).sample(torch.full_like(mean, 9.0)), mean)


def test_a_dirac_has_a_value_and_nothing_else():
    value = torch.ones(2, 3)
    dirac = Dirac(value)
    assert torch.equal(dirac.sample(torch.full_like(value, 9.0)), value) and not dirac.has_density
    with pytest.raises(ValueError, match="no density"):
        dirac.log_prob(value)
    with pytest.raises(ValueError, match="no density"):
        dirac.kl(dirac)
    with pytest.raises(TypeError, match="Dirac"):
        Gaussian(value, 1.0).kl(dirac)


@pytest.mark.parametrize("std", [-1e-9, math.nan, math.inf])
def test_impossible_stds_are_refused(std):
    with pytest.raises(ValueError, match="std"):
        Gaussian(torch.zeros(1, 1), std)


def test_an_action_that_would_broadcast_is_refused():
    with pytest.raises(ValueError, match="action"):
        Gaussian(torch.zeros(2, 3), 1.0).log_prob(torch.zeros(1, 3))


def test_g07_mean_and_sum_reductions():
    """D = 16384, every dim's mean shifted by 0.01 std; antithetic noise makes the averages exact."""
    size, shift = 16384, 0.01
    noise = draw(8, size)
    noise = torch.cat([noise, -noise])
    old, new = Gaussian(torch.zeros_like(noise), 1.0), Gaussian(torch.full_like(noise, shift), 1.0)
    action = old.sample(noise)
    per_dim = log_ratio(new.log_prob(action), old.log_prob(action), size)
    assert float(per_dim.exp().mean()) == pytest.approx(0.99995, abs=2e-8)
    assert float(per_dim.exp().mean()) == pytest.approx(math.exp(-(shift**2) / 2), abs=1e-8)
    total = log_ratio(new.log_prob(action), old.log_prob(action), size, per_dim=False)
    assert float(total.mean()) == pytest.approx(-0.82, abs=5e-3)
    assert float(total.mean()) == pytest.approx(-size * shift**2 / 2, rel=1e-9)
    torch.testing.assert_close(total, per_dim * size)


def test_projection_is_the_linear_part_of_the_log_ratio():
    noise, mean, other = draw(3, 2, 5), draw(3, 2, 5, seed=1), draw(3, 2, 5, seed=2)
    std = 0.3
    action = Gaussian(mean, std).sample(noise)
    change = Gaussian(other, std).log_prob(action) - Gaussian(mean, std).log_prob(action)
    linear = (projection(noise, other) - projection(noise, mean)) / std
    quadratic = (other - mean).flatten(1).square().sum(1) / (2 * std**2)
    torch.testing.assert_close(change, linear - quadratic, rtol=1e-10, atol=1e-10)
    assert projection(noise.float(), mean.float()).dtype == torch.float64
