"""CM-GRPO: the regression's gradient is the policy gradient, the ratio's too, and both are kept honest.

B rows, D event dims; float64 unless said. The policy is a consistency step: N(alpha x0, sigma^2).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl import registry
from flowrl.config import RunConfig
from flowrl.errors import UserError
from flowrl.mdp.schedules import to_flow
from flowrl.mdp.transitions import Dirac, Gaussian, projection
from flowrl.objective import TrajectoryStep

ROWS, SIZE = 6, 5
LEVEL, NEXT = 0.9375, 0.625
ADVANTAGES = torch.tensor([1.5, -0.7, 2.0, -1.0, 0.4, -0.1])
FORMS = ("score_regression", "ratio")


def build(**options: Any) -> Any:
    return registry.build("objective", {"name": "cm_grpo", **options}, "objective")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X0, EPS, NOISE = draw(ROWS, SIZE), draw(ROWS, SIZE, seed=1), draw(ROWS, SIZE, seed=2)


def law(x0: Tensor) -> Gaussian:
    kernel = registry.build("kernel", {"name": "consistency"}, "sampler.kernel")
    transition: Gaussian = kernel(*to_flow(x0, EPS.to(x0), LEVEL), LEVEL, NEXT)
    return transition


def step(x0: Tensor, old: Tensor = X0, reference: Tensor | None = None) -> TrajectoryStep:
    """An action of the policy that predicted `old`, replayed under one that predicts `x0`."""
    acted, now = law(old.to(x0)), law(x0)
    action = acted.sample(NOISE.to(x0))
    return TrajectoryStep(
        index=0,
        sigma=LEVEL,
        sigma_next=NEXT,
        transition=now,
        reference=None if reference is None else law(reference),
        log_prob=now.log_prob(action),
        old_log_prob=acted.log_prob(action),
        action=action,
        noise=NOISE.to(x0),
        old_projection=projection(NOISE.to(x0), acted.mean),
        advantages=ADVANTAGES,
        valid=torch.ones(ROWS, dtype=torch.bool),
    )


def gradient(objective: Any, x0: Tensor = X0, **options: Any) -> Tensor:
    leaf = x0.clone().requires_grad_()
    return torch.autograd.grad(objective(step(leaf, **options))[0], leaf)[0]


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def policy_gradient(x0: Tensor, per_dim: bool, old: Tensor = X0) -> Tensor:
    """Of the mean over rows of -A log pi, by autograd."""
    leaf = x0.clone().requires_grad_()
    loss = -(ADVANTAGES * step(leaf, old).log_prob).mean() / (SIZE if per_dim else 1)
    return torch.autograd.grad(loss, leaf)[0]


# -- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["per_dim", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradient_is_that_of_minus_a_log_pi(form: str, reduction: str, dtype: torch.dtype) -> None:
    """On the policy that acted, for either form and reduction."""
    x0 = X0.to(dtype)
    got = gradient(build(form=form, reduction=reduction), x0)
    expected = policy_gradient(X0, reduction == "per_dim")
    assert relative(got.double(), expected) < 1e-6


def test_gradient_by_hand_and_as_the_paper_writes_it() -> None:
    """-A alpha (z - mean) / sigma^2, which is also that of its regression of x0."""
    got = gradient(build(reduction="sum"))
    by_hand = -ADVANTAGES.double()[:, None] * (1 - NEXT) / NEXT * NOISE / ROWS  # z - mean = sigma noise
    assert relative(got, by_hand) < 1e-12
    leaf, alpha = X0.clone().requires_grad_(), 1 - NEXT
    pull = ADVANTAGES.double()[:, None] * alpha / (2 * NEXT**2) * NEXT * NOISE
    loss = (leaf - (leaf + pull).detach()).square().sum(dim=1).mean()
    assert relative(got, torch.autograd.grad(loss, leaf)[0]) < 1e-12


@pytest.mark.parametrize("reduction", ["per_dim", "sum"])
def test_both_forms_agree_at_ratio_one(reduction: str) -> None:
    one, other = (gradient(build(form=form, reduction=reduction)) for form in FORMS)
    assert relative(one, other) < 1e-9
    assert relative(gradient(build(reduction="sum")), SIZE * gradient(build())) < 1e-12


def test_without_advantage_nothing_moves() -> None:
    for form in FORMS:
        leaf = X0.clone().requires_grad_()
        quiet = replace(step(leaf), advantages=torch.zeros(ROWS))
        assert float(torch.autograd.grad(build(form=form)(quiet)[0], leaf)[0].abs().max()) == 0


def test_stale_samples_are_weighted_and_clipped_by_the_ratio_only() -> None:
    new = X0 + 0.3 * draw(ROWS, SIZE, seed=3)
    regression = gradient(build(), new)
    assert relative(regression, policy_gradient(new, per_dim=True)) < 1e-9  # of log pi, wherever it acted
    wide = gradient(build(form="ratio", clip_low=0.99, clip_high=100.0), new)
    log = (step(new).log_prob - step(new).old_log_prob) / SIZE
    assert relative(wide, log.exp()[:, None] * regression) < 1e-9 and relative(wide, regression) > 1e-3
    metrics = build(form="ratio", clip_low=1e-3, clip_high=1e-3)(step(new))[1]
    assert metrics["clip_frac_low"] + metrics["clip_frac_high"] == 1
    clipped = gradient(build(form="ratio", clip_low=1e-3, clip_high=1e-3), new)
    stopped = ((log > 0) & (ADVANTAGES > 0)) | ((log < 0) & (ADVANTAGES < 0))
    assert stopped.any() and not stopped.all()
    assert float(clipped[stopped].abs().max()) == 0 and bool((clipped[~stopped].abs().sum(1) > 0).all())


def test_ratio_is_reported_by_both_forms() -> None:
    for form in FORMS:
        assert build(form=form)(step(X0))[1]["log_ratio_max"] == 0
        metrics = build(form=form)(step(X0 + 0.1))[1]
        log = (step(X0 + 0.1).log_prob - step(X0).log_prob) / SIZE
        assert metrics["log_ratio_max"] == pytest.approx(float(log.abs().max()), rel=1e-12)
        assert metrics["ratio_mean"] == pytest.approx(float(log.exp().mean()), rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_step_weights(form: str) -> None:
    plain = gradient(build(form=form))
    for weights, factor in (("std", NEXT), ("std_over_dt", NEXT / (LEVEL - NEXT))):
        assert relative(gradient(build(form=form, step_weights=weights)), factor * plain) < 1e-12
    # std makes the size of the gradient with respect to the mean that of the noise, at every level
    by_mean = gradient(build(form=form, step_weights="std", reduction="sum")) / (1 - NEXT)
    assert relative(by_mean, -ADVANTAGES[:, None] * NOISE / ROWS) < 1e-9


# -- KL ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["per_dim", "sum"])
def test_kl_is_the_closed_form_and_weighs_on_the_loss(reduction: str) -> None:
    """alpha^2 |x0 - x0_ref|^2 / (2 sigma^2)."""
    reference = X0 + 0.2 * draw(ROWS, SIZE, seed=4)
    expected = (1 - NEXT) ** 2 * (X0 - reference).square().sum(dim=1) / (2 * NEXT**2)
    expected = expected / SIZE if reduction == "per_dim" else expected
    objective = build(reduction=reduction, kl_coef=0.3)
    assert objective.needs_reference and not build().needs_reference
    loss, metrics = objective(step(X0, reference=reference))
    assert metrics["kl"] == pytest.approx(float(expected.mean()), rel=1e-9)
    assert float(loss) == pytest.approx(metrics["policy_loss"] + 0.3 * metrics["kl"], rel=1e-9)
    with pytest.raises(ValueError, match=r"kl_coef = 0\.3"):
        objective(step(X0))


def test_kl_equals_monte_carlo() -> None:
    here, there = law(X0), law(X0 + 0.5)
    noise = draw(40_000, ROWS, SIZE, seed=5)
    actions = here.mean + here.std * noise
    logs = -(actions - here.mean).square() + (actions - there.mean).square()
    estimate = float(logs.sum(dim=2).mean(dim=0)[0]) / (2 * here.std**2)
    assert float(here.kl(there)[0]) == pytest.approx(estimate, rel=0.02)


# -- what it does with rows and laws that do not fit ---------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_invalid_rows_are_absent_but_keep_their_place_in_the_mean(form: str) -> None:
    valid = torch.tensor([True, False, True, True, False, True])
    leaf = X0.clone().requires_grad_()
    poison = torch.where(valid, 0.0, math.nan)
    whole = step(leaf)
    poisoned = replace(
        whole,
        valid=valid,
        old_log_prob=whole.old_log_prob + poison,
        advantages=whole.advantages + poison.float(),
    )
    loss, metrics = build(form=form)(poisoned)
    got = torch.autograd.grad(loss, leaf)[0]
    assert torch.equal(got[valid], gradient(build(form=form))[valid]) and bool((got[~valid] == 0).all())
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_without_a_mean_is_refused() -> None:
    with pytest.raises(TypeError, match="Dirac"):
        build()(replace(step(X0), transition=Dirac(X0)))


# -- samples that have grown old -----------------------------------------------------------------------------


def recipe(form: str, **training: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "x",
            "model": {"path": "x"},
            "data": {"train": "x"},
            "rewards": [{"name": "scene"}],
            "objective": {"name": "cm_grpo", "form": form},
            "sampler": {"kernel": {"name": "consistency"}},
            "training": training,
        }
    )


def test_a_second_pass_needs_the_ratio_form() -> None:
    from flowrl.build import check_objective

    kernel = registry.build("kernel", {"name": "consistency"}, "sampler.kernel")
    with pytest.raises(UserError, match=r"inner_passes = 2: objective 'cm_grpo'.*stale.*form=ratio"):
        check_objective(recipe("score_regression", inner_passes=2), build(), kernel)
    check_objective(recipe("ratio", inner_passes=2), build(form="ratio"), kernel)
    check_objective(recipe("score_regression", inner_passes=1), build(), kernel)


# -- it learns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_sampler_of_two_steps_learns_its_reward(form: str) -> None:
    """x0 is a free parameter; the reward is the closeness of the re-noised state to a target."""
    torch.manual_seed(0)
    x0, target = torch.zeros(1, SIZE, dtype=torch.float64, requires_grad=True), torch.full((SIZE,), 0.8)
    optimizer = torch.optim.Adam([x0], lr=0.05)
    objective = build(form=form, step_weights="std", clip_low=0.2, clip_high=0.2)
    for _ in range(150):
        transition = Gaussian((1 - NEXT) * x0.expand(32, SIZE), NEXT)
        noise = torch.randn(32, SIZE, dtype=torch.float64)
        action = transition.sample(noise).detach()
        reward = -(action - (1 - NEXT) * target).square().sum(dim=1)
        log_prob = transition.log_prob(action)
        unit = replace(
            step(X0),
            transition=transition,
            action=action,
            noise=noise,
            log_prob=log_prob,
            old_log_prob=log_prob.detach(),
            advantages=((reward - reward.mean()) / reward.std()).float(),
            valid=torch.ones(32, dtype=torch.bool),
        )
        optimizer.zero_grad()
        objective(unit)[0].backward()
        optimizer.step()
    assert float((x0 - target).abs().max()) < 0.35
