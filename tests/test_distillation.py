"""Consistency distillation against the closed form of a Gaussian target."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl import commands, registry
from flowrl.build import build_run
from flowrl.config import load
from flowrl.errors import UserError
from flowrl.mdp.seeds import generator
from flowrl.objective import ForwardStep, Objective

ROOT = Path(__file__).parent.parent
MEAN, STD = 1.0, 0.5
FINE = tuple(1 - k / 400 for k in range(400))


def spread(sigma: float) -> float:
    """The standard deviation of x_sigma for x0 ~ N(MEAN, STD^2)."""
    return math.hypot((1 - sigma) * STD, sigma)


def velocity(x: Tensor, sigma: float) -> Tensor:
    """E[eps - x0 | x_sigma = x], from the joint Gaussian."""
    centred = x - (1 - sigma) * MEAN
    variance = spread(sigma) ** 2
    return sigma / variance * centred - (MEAN + (1 - sigma) * STD**2 / variance * centred)


def endpoint(x: Tensor, sigma: float) -> Tensor:
    """Where the flow's ODE takes x: the quantile is kept."""
    return MEAN + STD * (x - (1 - sigma) * MEAN) / spread(sigma)


def student(endpoint_of: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor]:
    return lambda x, sigma: (x - endpoint_of(x, sigma)) / sigma


def step(
    sigmas: tuple[float, ...], predict: Callable[[Tensor, float], Tensor], seed: int, rows: int = 512
) -> ForwardStep:
    def never(x: Tensor, sigma: float) -> Tensor:
        raise AssertionError("the old policy plays no part")

    clean = MEAN + STD * torch.randn(rows, 4, generator=generator("clean", seed), dtype=torch.float64)
    return ForwardStep(
        latents=clean,
        predict=predict,
        predict_old=never,
        predict_reference=velocity,
        sigmas=sigmas,
        generator=generator("unit", seed),
        advantages=torch.zeros(rows),
        valid=torch.ones(rows, dtype=torch.bool),
    )


def objective(**options: float) -> Objective:
    built: Objective = registry.build(
        "objective", {"name": "consistency_distillation", **options}, "objective"
    )
    return built


def test_velocity_belongs_to_the_endpoints() -> None:
    """The two closed forms above agree: the ODE of one, integrated finely, ends at the other."""
    x = start = torch.randn(1000, dtype=torch.float64, generator=generator("ode"))
    for k in range(4000):
        sigma = 1 - k / 4000
        x = x - velocity(x, sigma) / 4000
    assert float((x - endpoint(start, 1.0)).abs().max()) < 2e-3


def test_the_exact_consistency_function_is_the_fixed_point() -> None:
    """Its error is one Euler step's, second order in the step, and so falls as the grid is made finer."""
    errors = {}
    for count in (50, 100, 200):
        grid = tuple(1 - k / count for k in range(count))
        drawn = [objective()(step(grid, student(endpoint), seed))[1]["endpoint_error"] for seed in range(64)]
        errors[count] = sum(drawn) / len(drawn)
    assert errors[200] < 1e-3
    assert 3.3 < errors[50] / errors[100] < 4.7
    assert 3.3 < errors[100] / errors[200] < 4.7


@pytest.mark.parametrize("wrong", [0.8, 1.25])
def test_gradient_leads_to_the_exact_function(wrong: float) -> None:
    """Of students with a wrong spread, descent leads back; only s = 0 anchors, the rest passes it on."""
    scale = torch.tensor(wrong, dtype=torch.float64, requires_grad=True)

    def guess(x: Tensor, sigma: float) -> Tensor:
        return MEAN + scale * (endpoint(x, sigma) - MEAN)

    anchored = (0.05,)  # the one transition that ends at s = 0
    loss, _ = objective(huber=1.0)(step(anchored, student(guess), 0))
    (gradient,) = torch.autograd.grad(loss, scale)
    assert math.copysign(1, float(gradient)) == math.copysign(1, wrong - 1)
    with torch.no_grad():
        scale.fill_(1.0)
    loss, _ = objective(huber=1.0)(step(anchored, student(guess), 0))
    (right,) = torch.autograd.grad(loss, scale)
    assert abs(float(right)) < 0.05 * abs(float(gradient))


def test_target_carries_no_gradient_and_value_is_the_formula() -> None:
    """Against the formula written again, by finite differences that keep the target."""
    scale = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    seed, huber = 7, 0.3

    def guess(x: Tensor, sigma: float) -> Tensor:
        return scale * endpoint(x, sigma)

    unit = step(FINE[200:], student(guess), seed)
    loss, metrics = objective(huber=huber)(unit)
    (gradient,) = torch.autograd.grad(loss, scale)

    again = generator("unit", seed)
    drawn = int(torch.randint(200, (), generator=again))
    sigma, after = FINE[200:][drawn], (*FINE[200:], 0.0)[drawn + 1]
    noise = torch.randn(unit.latents.shape, generator=again).double()
    noisy = (1 - sigma) * unit.latents + sigma * noise
    moved = noisy + (after - sigma) * velocity(noisy, sigma)
    target = 0.9 * endpoint(moved, after)

    def value(factor: float) -> float:
        squares = (factor * endpoint(noisy, sigma) - target).square().mean(dim=1)
        return float(((squares + huber**2).sqrt() - huber).mean() / (sigma - after))

    assert loss.item() == pytest.approx(value(0.9), rel=1e-9)
    assert metrics["distillation_loss"] == pytest.approx(value(0.9), rel=1e-9)
    slope = (value(0.9 + 1e-6) - value(0.9 - 1e-6)) / 2e-6
    assert float(gradient) == pytest.approx(slope, rel=1e-5)


def test_a_student_that_is_right_already_has_a_finite_gradient() -> None:
    """A fresh student is its teacher, so that at s = 0 the distance is exactly 0: a kink if huber were 0."""
    with pytest.raises(UserError, match=r"objective\.huber"):
        objective(huber=0.0)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss, _ = objective()(step((0.05,), lambda x, sigma: scale * velocity(x, sigma), 0))
    assert loss.item() == 0 and torch.autograd.grad(loss, scale)[0] == 0


def test_samples_come_from_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout of an iteration does not depend on what the student has learnt."""
    monkeypatch.chdir(ROOT)
    config = load(
        "configs/distill_shapes.yaml",
        [
            f"output={tmp_path}",
            "training={prompts_per_iteration: 2, group_size: 2, micro_batch_size: 2, updates_per_pass: 2}",
            "sampler.num_steps=3",
            "evaluation.max_prompts=2",
            "optimizer.lr=1e-2",
        ],
    )
    run = build_run(config)
    request = run.trainer.sampler.requests(5)[0]
    before = run.trainer._rollout(request, run.trainer.plan(5)).latents
    result = run.trainer.run_iteration()
    assert result.metrics["objective/distillation_loss"] > 0
    after = run.trainer._rollout(request, run.trainer.plan(5)).latents
    assert before is not None and after is not None
    assert torch.equal(before, after)
    with run.policy.compute(), run.policy.acting():
        learnt = run.wrapper.rollout(request, run.trainer.plan(5)).latents
    assert learnt is not None and not torch.equal(before, learnt)
    assert run.evaluator is not None
    assert run.evaluator.settings["scheduler"] == "FlowMatchLCMScheduler"
    run.evaluator.evaluate()
    assert type(run.wrapper.pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"


def test_unknown_scheduler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load("configs/distill_shapes.yaml", ["evaluation.scheduler=FlowMatchLCM"])
    with pytest.raises(UserError, match=r"'FlowMatchLCM'.*did you mean 'FlowMatchLCMScheduler'"):
        build_run(config)


def test_a_scheduler_of_another_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load("configs/distill_shapes.yaml", ["evaluation.scheduler=DDIMScheduler"])
    with pytest.raises(UserError, match=r"evaluation\.scheduler = 'DDIMScheduler'.*would be noise"):
        build_run(config)


def test_distill_refuses_an_objective_that_distils_nothing() -> None:
    with pytest.raises(UserError, match="'nft' distils nothing"):
        commands.distill(ROOT / "configs" / "quickstart_nft.yaml", [], plugins=[], trust=False)
