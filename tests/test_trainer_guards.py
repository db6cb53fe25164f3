"""What the loop does with numbers that are not finite: nothing is lost, nothing is learnt from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_run import brightness, by_position, gradients, judged_by, tiny_run, weights
from torch import Tensor

from flowrl.advantage import Advantages
from flowrl.build import Run
from flowrl.errors import UserError
from flowrl.reward import RewardSet, Samples, WeightedReward
from flowrl.training.checkpoint import digest, flatten_optimizer

NAN, INF = float("nan"), float("inf")


def state(run: Run) -> dict[str, str]:
    """SHA-256 of all that an update changes."""
    groups = {name: digest(tensors) for name, tensors in run.policy.tensors().items()}
    optimizer = flatten_optimizer(run.trainer.optimizer, run.policy.parameters())[0]
    return groups | {"optimizer": digest(optimizer)}


@contextmanager
def broken_gradient(run: Run, value: float) -> Iterator[None]:
    """One number of one parameter's gradient is not finite."""
    parameter = list(run.policy.parameters().values())[-1]

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = value
        return spoilt

    handle = parameter.register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def broken_prediction(run: Run, value: float) -> Iterator[None]:
    """The network predicts one number that is not finite whenever a gradient is recorded."""

    def spoil(module: Any, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        return (output[0] + torch.full_like(output[0], value), *output[1:])

    handle = run.policy.networks["transformer"].register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("recipe", ["quickstart_grpo", "quickstart_nft"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("broken", [broken_gradient, broken_prediction], ids=["gradient", "prediction"])
def test_r7_a_bad_update_changes_nothing_and_is_counted(
    broken: Callable[[Run, float], Any], value: float, recipe: str
) -> None:
    run = judged_by(tiny_run("ema.decay=0.9", recipe=recipe), brightness)
    run.trainer.run_iteration()
    before, updates = state(run), run.trainer.state.updates
    with broken(run, value), gradients(run) as seen:
        metrics = run.trainer.run_iteration().metrics
    after = state(run)
    if recipe == "quickstart_nft":  # the old policy follows the weights at each iteration, updated or not
        before.pop("old"), after.pop("old")
    assert after == before and seen == [] and run.trainer.state.updates == updates == 1
    assert metrics["optimizer/skipped"] == 1 and math.isnan(metrics["optimizer/grad_norm"])
    assert run.trainer.state.bad_updates == 1 and run.trainer.state.iteration == 2
    metrics = run.trainer.run_iteration().metrics
    assert metrics["optimizer/skipped"] == 0 and state(run)["policy"] != before["policy"]
    assert run.trainer.state.bad_updates == 0 and run.trainer.state.updates == 2


def test_r7_several_bad_updates_in_a_row_end_the_run() -> None:
    run = judged_by(tiny_run("training.max_bad_updates=3", "training.updates_per_pass=2"), brightness)
    before = weights(run)
    with broken_gradient(run, NAN):
        run.trainer.run_iteration()
        with pytest.raises(FloatingPointError, match="3 updates in a row had a non-finite gradient"):
            run.trainer.run_iteration()
    assert all(torch.equal(before[name], now) for name, now in weights(run).items())
    assert run.trainer.state.updates == 0


def test_good_updates_in_between_keep_the_run_going() -> None:
    run = judged_by(tiny_run("training.max_bad_updates=2"), brightness)
    for bad in (True, False, True, False):
        with broken_gradient(run, NAN if bad else 0.0):
            run.trainer.run_iteration()
    assert run.trainer.state.updates == 2


def test_fp16_finds_its_scale_and_only_a_lasting_failure_ends_the_run() -> None:
    small = ("sampler.num_steps=2", "training.prompts_per_iteration=1")
    run = judged_by(tiny_run("model.dtype=fp16", "training.max_bad_updates=2", *small), brightness)
    trainer, before = run.trainer, weights(run)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    skipped = 0
    while trainer.state.updates == 0:
        skipped += int(trainer.run_iteration().metrics["optimizer/skipped"])
    assert skipped > 2 and trainer.scaler.get_scale() == 2.0 ** (26 - skipped) > 1
    assert any(not torch.equal(before[name], now) for name, now in weights(run).items())
    trainer.scaler.update(4.0)
    with broken_gradient(run, NAN):
        assert trainer.run_iteration().metrics["optimizer/skipped"] == 1
        with pytest.raises(FloatingPointError, match="2 updates in a row"):
            trainer.run_iteration()


# ------------------------------------------------------------------------------------------------ rewards


def masked(*rows: int) -> list[float]:
    scores = torch.linspace(0, 1, 8).square().tolist()
    return [NAN if row in rows else score for row, score in enumerate(scores)]


@pytest.mark.parametrize("rows", [(1,), (0, 5), (4, 5, 6, 7)], ids=str)
@pytest.mark.parametrize("recipe", ["quickstart_grpo", "quickstart_nft"])
def test_r7_rows_without_a_reward_have_no_part_in_the_gradient(recipe: str, rows: tuple[int, ...]) -> None:
    """Whatever stands in their place: the gradient equals that with any other advantage there, exactly."""
    found = []
    for stand_in in (0.0, 3.0, NAN):
        run = judged_by(tiny_run(recipe=recipe), by_position(masked(*rows)))
        estimate = run.trainer.advantage

        def advantage(*given: Tensor, estimate: Any = estimate, value: float = stand_in) -> Advantages:
            estimated = estimate(*given)
            values = torch.where(estimated.valid, estimated.values, torch.tensor(value))
            return Advantages(values, estimated.valid, estimated.metrics)

        run.trainer.advantage = advantage
        with gradients(run) as seen:
            metrics = run.trainer.run_iteration().metrics
        assert metrics["rows/invalid"] == len(rows) and metrics["optimizer/skipped"] == 0
        total = [score for score in masked(*rows) if score == score]
        assert metrics["reward/total_mean"] == pytest.approx(sum(total) / len(total))
        found.append(seen[0])
    assert any(bool(g.any()) for g in found[0].values())
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)


def test_r7_no_reward_at_all_ends_the_run_before_an_update() -> None:
    run = judged_by(tiny_run(), by_position([NAN, INF, -INF, NAN] * 2))
    before = state(run)
    with pytest.raises(FloatingPointError, match="iteration 1: no sample has a finite reward"):
        run.trainer.run_iteration()
    assert state(run) == before


@pytest.mark.parametrize("value", [NAN, INF])
def test_g49_broken_latents_or_pixels_are_never_scored(value: float) -> None:
    run = judged_by(tiny_run(), brightness)
    bias = run.wrapper.pipe.vae.decoder.conv_out.bias
    bias.data.copy_(torch.tensor([value, 0.0, -value]))
    run.wrapper.pipe.image_processor.register_to_config(do_normalize=False)  # it would clamp an infinity to 1
    with pytest.raises(FloatingPointError, match="decoded pixels hold NaN or infinity"):
        run.trainer.run_iteration()


@pytest.mark.parametrize(
    ("pixel", "error", "said"),
    [
        (NAN, FloatingPointError, "NaN or infinity"),
        (INF, FloatingPointError, "NaN or infinity"),
        (-INF, FloatingPointError, "NaN or infinity"),
        (1.001, UserError, r"lie in \[0, 1\.001\], not in \[0, 1\]"),
        (-0.5, UserError, r"lie in \[-0\.5, 0\], not in \[0, 1\]"),
        (255.0, UserError, r"\[0, 255\]"),
    ],
)
def test_a_set_of_rewards_takes_finite_pixels_in_0_to_1(pixel: float, error: type, said: str) -> None:
    rewards = RewardSet([WeightedReward("brightness", brightness, 1.0)])
    images = torch.zeros(2, 3, 4, 4)
    images[1, 2, 3, 3] = pixel
    with pytest.raises(error, match=said):
        rewards.score(Samples(images), ["a", "b"], [{}, {}])
    images[1, 2, 3, 3] = 1.0
    assert rewards.score(Samples(images), ["a", "b"], [{}, {}]).tolist() == [[0.0], [pytest.approx(1 / 48)]]


def test_a_reward_that_returns_no_tensor_is_named() -> None:
    rewards = RewardSet([WeightedReward("listed", lambda *_: [0.0, 1.0], 1.0)])  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="'listed' returned a list, expected a tensor"):
        rewards.score(Samples(torch.zeros(2, 3, 4, 4)), ["a", "b"], [{}, {}])


def test_a_reward_of_the_wrong_shape_is_named() -> None:
    def pixelwise(samples: Samples, prompts: Any, metadata: Any) -> Tensor:
        return samples.images.mean(dim=1)

    run = judged_by(tiny_run(), pixelwise)
    with pytest.raises(UserError, match=r"reward 'pixelwise' returned shape \(4, .*expected \(4,\)"):
        run.trainer.run_iteration()
