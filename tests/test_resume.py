"""A resumed run ends with the same bytes as one that was never stopped (FAULTS G20, G21, G22)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.build import build_run
from flowrl.config import RunConfig, load
from flowrl.errors import UserError
from flowrl.training.checkpoint import CheckpointStore, digest
from flowrl.training.run import TrainingRun
from flowrl.training.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
SMALL = [
    "training.prompts_per_iteration=2",
    "training.group_size=2",
    "training.micro_batch_size=2",
    "training.updates_per_pass=1",
    "sampler.num_steps=3",
    "evaluation.max_prompts=2",
    "evaluation.samples_per_prompt=1",
    "evaluation.every=1",
    "evaluation.rewards=[{name: scene}]",
    "tracking.tensorboard=false",
    "checkpoint.every=1",
]


def recipe(name: str, out: Path, iterations: int, *more: str) -> RunConfig:
    overrides = [*SMALL, f"output={out}", f"training.iterations={iterations}", *more]
    return load(ROOT / "configs" / f"{name}.yaml", overrides)


def train(config: RunConfig, resume: bool, allow_change: bool = False) -> dict[str, Any]:
    with RunFolder(config.output, config.name) as folder:
        run = build_run(config, ROOT / "configs" / "quickstart.yaml")
        session = TrainingRun(config, run.trainer, run.evaluator, run.engine, folder)
        return session.train(resume, allow_change)


def traces(config: RunConfig) -> dict[str, str]:
    folder = RunFolder(config.output, config.name)
    checkpoint = CheckpointStore(folder.checkpoints, readonly=True).latest()
    assert checkpoint is not None
    hashes = {group: digest(checkpoint.tensors[group]) for group in checkpoint.tensors}
    hashes["metrics"] = hashlib.sha256((folder.path / "metrics.jsonl").read_bytes()).hexdigest()
    return hashes


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("quickstart", ()),
        ("quickstart_grpo", ()),
        ("quickstart_slas", ("model.adapter={kind: lora, rank: 4}",)),
    ],
    ids=["nft_full_ema", "grpo_full_ema", "slas_lora_ema"],
)
def test_g20_resumed_equals_uninterrupted(
    name: str, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    more = (*more, "sampler.steps={name: all}")
    whole = recipe(name, tmp_path / "whole", 4, *more)
    assert train(whole, resume=False)["status"] == "finished"
    for iterations in (1, 2, 4):
        parts = recipe(name, tmp_path / "parts", iterations, *more)
        summary = train(parts, resume=True)
    assert summary["iterations"] == 4
    assert traces(parts) == traces(whole)
    assert {"policy", "ema", "optimizer"} <= traces(whole).keys()


def test_r14_a_changed_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    train(recipe("quickstart", tmp_path, 1), resume=False)
    changed = recipe("quickstart", tmp_path, 2, "optimizer.lr=1e-5")
    with pytest.raises(UserError, match=r"optimizer\.lr: 0\.0005 -> 1e-05"):
        train(changed, resume=True)


def test_a_change_that_the_checkpoint_cannot_take_leaves_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    lora = "model.adapter={kind: lora, rank: "
    first = recipe("quickstart", tmp_path, 1, lora + "2}")
    train(first, resume=False)
    kept = RunFolder(first.output, first.name).path / "config.yaml"
    before = kept.read_bytes()
    with pytest.raises(UserError, match="this policy has"):
        train(recipe("quickstart", tmp_path, 2, lora + "4}"), resume=True, allow_change=True)
    assert kept.read_bytes() == before
    assert train(first, resume=True)["status"] == "finished"


def test_the_time_of_a_resumed_run_is_that_of_all_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    first = recipe("quickstart", tmp_path, 1)
    train(first, resume=False)
    timings = RunFolder(first.output, first.name).timings
    spent = timings.sum_of("total", "evaluate")
    assert spent > 0
    assert train(first, resume=True)["wall_s"] >= round(spent, 2)


def test_a_change_that_is_allowed_takes_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = {"lr": 1e-5, "weight_decay": 0.25, "eps": 1e-6, "betas": [0.8, 0.9]}
    train(recipe("quickstart", tmp_path, 1), resume=False)
    changed = recipe("quickstart", tmp_path, 2, f"optimizer={json.dumps(options)}")
    train(changed, resume=True, allow_change=True)
    checkpoint = CheckpointStore(RunFolder(tmp_path, "quickstart").checkpoints, readonly=True).load(2)
    used = checkpoint.state["optimizer"]["options"][0]
    assert {name: used[name] for name in options} == options
    rows = (tmp_path / "quickstart" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row).get("optimizer/lr") for row in rows] == [None, 5e-4, 1e-5]


def test_a_run_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = recipe("quickstart", tmp_path, 1)
    train(config, resume=False)
    with pytest.raises(UserError, match="already holds a run"):
        train(config, resume=False)
