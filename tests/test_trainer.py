"""The mathematics of the loop, on tiny pipelines: what each optimizer step is made of, and its figures."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from tiny_run import ROOT, brightness, by_position, distance, gradients, judged_by, tiny_run, weights
from torch import Tensor

from flowrl.build import Run
from flowrl.training.trainer import MAXIMA

UNCLIPPED = "optimizer.max_grad_norm=1e9"


def gradient_by_hand(run: Run) -> dict[str, Tensor]:
    """The gradient of the first update, as its definition says: the mean over micro-batches and steps."""
    trainer, wrapper = run.trainer, run.wrapper
    plan = trainer.plan(0)
    trajectories = [wrapper.rollout(request, plan) for request in trainer.sampler.requests(0)]
    scores = torch.cat(
        [
            trainer.rewards.score(wrapper.decode(t), t.request.prompts, t.request.metadata)
            for t in trajectories
        ]
    )
    values = trainer.advantage(scores, trainer.rewards.weights, trainer.sampler.groups()).values
    losses = []
    for number, trajectory in enumerate(trajectories):
        size = len(trajectory.request)
        rows = values[number * size : (number + 1) * size].double()
        for k in plan.trained:
            new, old = wrapper.replay(trajectory, k).log_prob, trajectory.log_probs[k]
            dims = trajectory.states[k][0].numel()
            losses.append(-(rows * ((new - old) / dims).exp()).mean())  # nothing is clipped at ratio 1
    parameters = run.policy.parameters()
    found = torch.autograd.grad(torch.stack(losses).mean(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


# ---------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
def test_an_update_has_the_mean_gradient_of_micro_batches_and_steps(cfg: bool) -> None:
    plain = ("objective.ratio=plain", "objective.step_weights=none")
    run = judged_by(tiny_run(UNCLIPPED, *plain, cfg=cfg), brightness)
    expected = gradient_by_hand(run)
    with gradients(run) as seen:
        metrics = run.trainer.run_iteration().metrics
    assert len(seen) == 1
    assert distance(seen[0], expected) < 1e-6
    norm = torch.cat([g.flatten() for g in expected.values()]).norm().item()
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_accumulated_micro_batches_equal_one_large_batch(size: int) -> None:
    """Scores go by position, so that pixels' rounding, which depends on the batch size, has no part in it."""
    scores = torch.rand(8)
    found = []
    for micro_batch in (size, 8):
        run = tiny_run(UNCLIPPED, f"training.micro_batch_size={micro_batch}")
        judged_by(run, by_position(scores.tolist()))
        with gradients(run) as seen:
            run.trainer.run_iteration()
        found.append(seen[0])
    assert distance(*found) < 1e-6


def test_gradient_checkpointing_changes_no_bit() -> None:
    found = []
    for flag in ("false", "true"):
        run = judged_by(tiny_run(f"model.gradient_checkpointing={flag}", "objective.kl_coef=0.1"), brightness)
        with gradients(run) as seen:
            run.trainer.run_iteration()
            run.trainer.run_iteration()
        found.append(seen)
    for plain, checkpointed in zip(*found, strict=True):
        assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_the_gradient_is_clipped_and_the_metric_is_not() -> None:
    free, cut = (judged_by(tiny_run(f"optimizer.max_grad_norm={n}"), brightness) for n in (1e9, 1e-3))
    with gradients(free) as whole, gradients(cut) as clipped:
        norm, same = (run.trainer.run_iteration().metrics["optimizer/grad_norm"] for run in (free, cut))
    assert norm == same > 1e-2
    scaled = {name: g * 1e-3 / norm for name, g in whole[0].items()}
    assert distance(clipped[0], scaled) < 1e-4  # torch adds 1e-6 to the norm that it divides by


def test_a_reward_of_the_other_sign_turns_the_gradient_round() -> None:
    def darkness(*given) -> Tensor:
        return -brightness(*given)

    found = []
    for reward in (brightness, darkness):
        run = judged_by(tiny_run(UNCLIPPED), reward)
        with gradients(run) as seen:
            run.trainer.run_iteration()
        found.append(seen[0])
    assert distance({name: -g for name, g in found[1].items()}, found[0]) < 1e-6


# ------------------------------------------------------------------------------------ passes and updates


@pytest.mark.parametrize(("passes", "updates"), [(1, 1), (1, 2), (1, 4), (2, 1), (3, 2)])
def test_g30_passes_and_updates_are_counted(passes: int, updates: int) -> None:
    run = judged_by(
        tiny_run(
            f"training.inner_passes={passes}",
            f"training.updates_per_pass={updates}",
            "training.micro_batch_size=2",
            "ema={decay: 0.5, warmup: false}",
        ),
        brightness,
    )
    with gradients(run) as seen:
        for iteration in (1, 2):
            metrics = run.trainer.run_iteration().metrics
            count = iteration * passes * updates
            assert len(seen) == run.trainer.state.updates == metrics["optimizer/updates"] == count
            assert run.policy.ema is not None and run.policy.ema.updates == count
    assert run.trainer.state.iteration == 2


def test_g01_the_ratio_is_one_before_the_first_update_and_not_after_it() -> None:
    once = judged_by(tiny_run("training.inner_passes=1"), brightness)
    for _ in range(2):
        metrics = once.trainer.run_iteration().metrics
        assert metrics["objective/log_ratio_max"] == 0 and metrics["objective/ratio_mean"] == 1
    twice = judged_by(tiny_run("training.inner_passes=2"), brightness)
    metrics = twice.trainer.run_iteration().metrics
    assert metrics["objective/log_ratio_max"] > 1e-5 and metrics["objective/ratio_std"] > 0
    assert twice.trainer.state.ratio_first_max == once.trainer.state.ratio_first_max == 0


def test_the_largest_of_maxima_and_the_mean_of_the_rest() -> None:
    """Two passes: the first has ratio 1 at every step, so means and maxima differ."""
    run = judged_by(tiny_run("training.inner_passes=2", "objective.kl_coef=0.1"), brightness)
    metrics = run.trainer.run_iteration().metrics
    steps = [metrics[f"step/{k}/log_ratio_max"] for k in run.trainer.plan(0).trained]
    assert MAXIMA == ("log_ratio_max",) and len(set(steps)) == len(steps)
    assert metrics["objective/log_ratio_max"] == max(steps)
    first = judged_by(tiny_run("objective.kl_coef=0.1"), brightness).trainer.run_iteration().metrics
    assert first["objective/kl"] == 0 < metrics["objective/kl"]
    assert first["objective/clip_frac_low"] + first["objective/clip_frac_high"] == 0
    assert metrics["objective/clip_frac_low"] + metrics["objective/clip_frac_high"] <= 0.5


def test_the_learning_rate_warms_up_by_updates() -> None:
    run = tiny_run("optimizer={lr: 1e-3, warmup_updates: 4}", "training.updates_per_pass=2")
    judged_by(run, brightness)
    rates: list[float] = []
    run.trainer.optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    logged = [run.trainer.run_iteration().metrics["optimizer/lr"] for _ in range(3)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
    assert logged == pytest.approx([sum(pair) / 2 for pair in zip(rates[::2], rates[1::2], strict=True)])


def test_g17_the_average_follows_the_weights_of_each_update() -> None:
    run = judged_by(tiny_run("ema={decay: 0.9, warmup: false}", "training.updates_per_pass=2"), brightness)
    expected = weights(run)
    passed: list[dict[str, Tensor]] = []
    run.trainer.optimizer.register_step_post_hook(lambda *_: passed.append(weights(run)))
    for _ in range(2):
        run.trainer.run_iteration()
    assert len(passed) == 4
    for present in passed:
        expected = {name: 0.9 * expected[name] + 0.1 * present[name] for name in expected}
    assert run.policy.ema is not None and distance(run.policy.ema.shadow, expected) < 1e-6
    assert distance(run.policy.ema.shadow, weights(run)) > 1e-3


# ---------------------------------------------------------------------------- forward-process objectives


def test_the_old_policy_follows_by_its_rule() -> None:
    run = tiny_run("old_policy={max_decay: 0.3, growth: 0.2}", recipe="quickstart_nft")
    judged_by(run, brightness)
    old = {name: tensor.clone() for name, tensor in run.policy.tensors()["old"].items()}
    for decay in (0.0, 0.2, 0.3, 0.3):
        before = weights(run)
        run.trainer.run_iteration()
        present = weights(run)
        assert any(not torch.equal(before[name], present[name]) for name in present)
        old = {name: decay * old[name] + (1 - decay) * present[name] for name in old}
        found = run.policy.tensors()["old"]
        assert all(torch.allclose(found[name], old[name], rtol=1e-5, atol=1e-9) for name in old)


@pytest.mark.parametrize(("recipe", "acts"), [("quickstart_nft", "old"), ("quickstart_grpo", "trained")])
def test_g39_who_acts(recipe: str, acts: str) -> None:
    """Weights moved behind the loop's back change the samples of GRPO, but not those of NFT's old policy."""
    rewards = []
    for moved in (False, True):
        run = judged_by(tiny_run(recipe=recipe), brightness)
        for p in run.policy.parameters().values():
            p.data.add_(0.1 * moved)
        rewards.append(run.trainer.run_iteration().metrics["reward/brightness/raw_mean"])
    assert (rewards[0] == rewards[1]) is (acts == "old")


# --------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits(dtype: str) -> None:
    """The gradient is that of float32 but for rounding; trained weights stay in float32 (FAULTS G25)."""
    found = []
    for name in ("fp32", dtype):
        run = judged_by(tiny_run(f"model.dtype={name}", UNCLIPPED), brightness)
        before = weights(run)
        with gradients(run) as seen:
            metrics = run.trainer.run_iteration().metrics
        found.append(seen[0])
        assert metrics["objective/log_ratio_max"] == metrics["optimizer/skipped"] == 0
        assert all(p.dtype == torch.float32 for p in run.policy.parameters().values())
        assert any(not torch.equal(p, before[n]) for n, p in run.policy.parameters().items())
    assert distance(found[1], found[0]) < 0.1


# ----------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("split", ["both", "conditional"])
@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
def test_network_evaluations_follow_the_formula(cfg: bool, split: str) -> None:
    """Per sample: T forwards of the rollout, then one per trained step, policy and pass; twice with CFG."""
    run = judged_by(
        tiny_run(
            f"sampler.cfg_gradient={split}",
            "objective.kl_coef=0.1",
            "training.inner_passes=2",
            "training.micro_batch_size=2",
            cfg=cfg,
        ),
        brightness,
    )
    metrics = run.trainer.run_iteration().metrics
    each = 2 if cfg else 1
    trained = len(run.trainer.plan(0).trained)
    assert 0 < trained < 3  # the last step of flow_sde is left out
    assert metrics["count/nfe_rollout"] == 3 * each
    assert metrics["count/nfe_train"] == trained * 2 * 2 * each
    assert metrics["count/stored_latents"] == trained + 1


@pytest.mark.parametrize(("kl", "forwards"), [(0.0, 2), (0.1, 3)])
def test_network_evaluations_of_a_forward_objective(kl: float, forwards: int) -> None:
    """New, old and, with a KL, reference, for each unit."""
    run = tiny_run(f"objective.kl_coef={kl}", recipe="quickstart_nft")
    metrics = judged_by(run, brightness).trainer.run_iteration().metrics
    units = run.trainer.objective.units_per_micro_batch
    assert metrics["count/nfe_rollout"] == 3
    assert metrics["count/nfe_train"] == units * forwards


def test_reward_figures_are_those_of_the_scores() -> None:
    def index(samples, prompts, metadata) -> Tensor:
        return torch.arange(len(samples), dtype=torch.float32)

    def prompt_length(samples, prompts, metadata) -> Tensor:
        return torch.tensor([float(len(prompt)) for prompt in prompts])

    run = judged_by(tiny_run(), index, prompt_length)
    run.trainer.rewards.weights.copy_(torch.tensor([2.0, -0.5]))
    lengths = [len(prompt.text) for prompt in run.trainer.sampler.chosen(0)]
    metrics = run.trainer.run_iteration().metrics
    assert metrics["reward/index/raw_mean"] == 1.5
    assert metrics["reward/index/raw_std"] == pytest.approx((5 / 4) ** 0.5)
    assert metrics["reward/index/weighted_mean"] == 3.0
    assert metrics["reward/prompt_length/raw_mean"] == sum(lengths) / 2
    assert metrics["reward/total_mean"] == pytest.approx(3.0 - sum(lengths) / 4)


def documented() -> set[str]:
    """The metric keys in the table of docs/report.md."""
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    table = page.split("## Keys of `metrics.jsonl`")[1].split("\n## ")[0]
    return {key for row in re.findall(r"^\| (`.*?) \|", table, re.M) for key in re.findall(r"`([^`]+)`", row)}


def general(key: str) -> str:
    key = re.sub(r"^step/\d+/", "step/<k>/", key)
    return re.sub(r"^reward/[^/]+/", "reward/<name>/", key)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("quickstart_grpo", ("objective.kl_coef=0.1",)),
        ("quickstart_slas", ()),
        ("quickstart_nft", ()),
        ("quickstart_nft", ("objective={name: awm}",)),
    ],
    ids=["grpo", "slas", "nft", "awm"],
)
def test_every_metric_is_documented_finite_and_the_same_each_time(recipe: str, more: tuple[str, ...]) -> None:
    rows = []
    for _ in range(2):
        run = judged_by(tiny_run(*more, recipe=recipe), brightness)
        rows.append([run.trainer.run_iteration() for _ in range(2)])
    assert [r.metrics for r in rows[0]] == [r.metrics for r in rows[1]]
    for result in rows[0]:
        assert all(value == value for value in result.metrics.values())
        assert {general(key) for key in result.metrics} <= documented()
        parts = sum(value for name, value in result.seconds.items() if name != "total")
        assert 0 < parts <= result.seconds["total"]
    needed = {"reward/total_mean", "optimizer/grad_norm", "count/nfe_train", "objective/policy_loss"}
    assert needed <= rows[0][0].metrics.keys()


def test_iterations_differ_and_count_up() -> None:
    run = judged_by(tiny_run(), brightness)
    means = [run.trainer.run_iteration().metrics["reward/brightness/raw_mean"] for _ in range(3)]
    assert all(a != b for a, b in pairwise(means)) and run.trainer.state.iteration == 3
