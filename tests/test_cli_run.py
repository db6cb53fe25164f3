"""The command line from start to end: train, then everything that is done with a run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_process import ROOT, Done, done, start
from PIL import Image
from torch import Tensor

from flowrl.build import build_run
from flowrl.commands import load_weights
from flowrl.config import load

QUICKSTART = "configs/quickstart.yaml"
SETTINGS = (
    "model.adapter={kind: lora, rank: 4, alpha: 12}",  # rank != alpha: the export must carry the scale
    "ema={decay: 0.5, warmup: false}",
    "optimizer.lr=2e-2",
    "training.iterations=3",
    "training.prompts_per_iteration=2",
    "training.group_size=4",
    "training.micro_batch_size=4",
    "training.updates_per_pass=1",
    "sampler.num_steps=6",
    "rewards=[{name: scene}, {name: jpeg_compressibility, weight: 0.1}]",
    "evaluation.max_prompts=6",
    "evaluation.samples_per_prompt=2",
    "evaluation.rewards=[{name: scene, mode: exact, label: exact}, {name: scene}]",
)
SUMMARY = {
    "reward_before",
    "reward_after",
    "diversity_before",
    "diversity_after",
    "ratio_first_max",
    "wall_s",
    "generation",
    "versions",
}
Run = Callable[..., Done]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def flowrl(place: Path) -> Run:
    """``flowrl("eval", ...)`` runs a command that must succeed."""

    def run(*arguments: object) -> Done:
        ended = done(start([str(a) for a in arguments], place / f"command_{next(_numbers)}"))
        assert ended.code == 0, ended
        return ended

    return run


@pytest.fixture(scope="module")
def trained(flowrl: Run, place: Path) -> Path:
    """The folder of a small run that ``flowrl train`` made."""
    ended = flowrl("train", QUICKSTART, *SETTINGS, f"output={place}", "name=small")
    assert ended.err == "" and "held-out, before and after" in ended.out
    return place / "small"


def test_a_run_leaves_all_that_the_manual_names(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert SUMMARY <= summary.keys() and summary["status"] == "finished"
    assert (summary["iterations"], summary["updates"], summary["weights"]) == (3, 3, "ema")
    assert summary["reward_name"] == "exact" and set(summary["judges"]) == {"exact", "scene"}
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert summary["reward_before"] == rows[0]["eval/exact/mean"]
    assert summary["reward_after"] == rows[3]["eval/exact/mean"]
    assert len((trained / "timings.jsonl").read_text().splitlines()) == 4
    assert [p.name for p in sorted((trained / "grids").iterdir())] == ["eval_000000.png", "eval_000003.png"]
    assert list((trained / "tensorboard").glob("events.*"))
    assert "<svg" in (trained / "report.html").read_text() and not (trained / "run.lock").exists()
    assert load(trained / "config.yaml").model.adapter.alpha == 12


def test_eval_gives_the_figures_of_the_run(flowrl: Run, trained: Path, place: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for weights, row in (("base", rows[0]), ("auto", rows[3]), ("ema", rows[3])):
        ended = flowrl("eval", trained, "--weights", weights, "--json")
        found = json.loads(ended.out)
        assert ended.err == "" and found["scores"] == {k: v for k, v in row.items() if k.startswith("eval/")}
        assert found["generation"]["num_inference_steps"] == 6 and "torch" in found["versions"]
    file = place / "eval.json"
    other = flowrl("eval", trained, "--weights", "trained", "--out", file)
    assert json.loads(file.read_text())["scores"] != found["scores"] and "scene/mean" in other.out


def test_sample_writes_pictures_and_what_they_are(flowrl: Run, trained: Path, place: Path) -> None:
    out = place / "samples"
    prompts = ("a photo of a red circle", "a photo of two blue squares")
    options = [word for prompt in prompts for word in ("--prompt", prompt)]
    flowrl("sample", trained, *options, "--count", 2, "--seed", 3, "--out", out)
    records = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["member"]) for r in records] == [(p, m) for p in prompts for m in (0, 1)]
    pixels = {(out / r["file"]).read_bytes() for r in records}
    with Image.open(out / "0000.png") as picture:
        assert len(pixels) == 4 and picture.size == (64, 64)
    assert json.loads((out / "settings.json").read_text())["seed"] == 3 and (out / "grid.png").is_file()
    again = place / "again"
    flowrl("sample", trained, *options, "--count", 2, "--seed", 3, "--out", again, "--weights", "ema")
    assert (again / "0003.png").read_bytes() == (out / "0003.png").read_bytes()
    flowrl("sample", trained, *options, "--count", 2, "--seed", 3, "--out", again, "--weights", "base")
    assert (again / "0003.png").read_bytes() != (out / "0003.png").read_bytes()


def test_report_of_one_run_and_of_several(flowrl: Run, trained: Path, place: Path) -> None:
    (trained / "report.html").unlink()
    assert flowrl("report", trained).out.strip() == str(trained / "report.html")
    assert (trained / "report.html").stat().st_size > 10_000
    flowrl("report", trained, trained, "--out", place / "both.html")
    assert (place / "both.html").stat().st_size > 10_000


FRESH = """
import sys
import torch
from diffusers import DiffusionPipeline

torch.set_num_threads(1)
base, call, *pairs = sys.argv[1:]
call = torch.load(call, weights_only=True)
for form, folder in zip(pairs[::2], pairs[1::2]):
    pipe = DiffusionPipeline.from_pretrained(base if form == "lora" else folder)
    if form == "lora":
        pipe.load_lora_weights(folder)
    noise = [torch.Generator().manual_seed(7)]
    images = pipe(**call, generator=noise, output_type="pt", return_dict=False)[0]
    torch.save(images, folder + ".pt")
assert not any(name.split(".")[0] == "flowrl" for name in sys.modules)
"""


def test_g26_exports_give_the_trained_pictures_in_a_process_without_flowrl(
    flowrl: Run, trained: Path, place: Path
) -> None:
    exports = [("lora", "trained"), ("lora", "ema"), ("pipeline", "ema")]
    pairs: list[str] = []
    for form, weights in exports:
        folder = place / f"{form}_{weights}"
        assert (
            "verified" in flowrl("export", trained, "--out", folder, "--form", form, "--weights", weights).out
        )
        pairs += [form, str(folder)]
    config = load(trained / "config.yaml")
    prompt = "a photo of a green triangle"
    call = {**config.model.call, **config.sampler.guidance, "prompt": [prompt], "num_inference_steps": 6}
    torch.save(call, place / "call.pt")
    command = [sys.executable, "-c", FRESH, config.model.path, str(place / "call.pt"), *pairs]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr

    def expected(weights: str) -> Tensor:
        run = build_run(config, ROOT / QUICKSTART)
        if weights != "base":
            load_weights(run, trained, weights)
        noise = [torch.Generator().manual_seed(7)]
        with run.policy.acting():
            return run.wrapper.pipe(**call, generator=noise, output_type="pt", return_dict=False)[0].detach()

    pictures = {weights: expected(weights) for weights in ("base", "trained", "ema")}
    for form, weights in exports:
        found = torch.load(place / f"{form}_{weights}.pt", weights_only=True)
        assert (found - pictures[weights]).abs().max() < 1e-5, (form, weights)
    assert (pictures["trained"] - pictures["ema"]).abs().max() > 1e-3
    assert (pictures["ema"] - pictures["base"]).abs().max() > 1e-3


def test_doctor_says_what_training_will_do(flowrl: Run) -> None:
    settings = [s for s in SETTINGS if not s.startswith("model.adapter")]
    ended = flowrl(
        "doctor", QUICKSTART, *settings, "objective={name: grpo}", "sampler.kernel={name: cps}", "--json"
    )
    found = json.loads(ended.out)
    assert ended.err == "" and found["problems"] == []
    facts = found["facts"]
    assert facts["ratio"]["max"] == 0 and facts["geometry"]["micro_batches"] == 2
    assert [row["step"] for row in facts["schedule"]] == list(range(6))
    assert facts["trainable_parameters"] > 1_000_000 and set(facts["rewards"]) == {
        "scene",
        "jpeg_compressibility",
    }
    assert facts["guidance"]["rollout"] == facts["guidance"]["evaluation"] == {"guidance_scale": 1.0}
    assert facts["memory"]["optimizer_bytes"] == 8 * facts["trainable_parameters"]
    assert "ready to train" in flowrl("doctor", QUICKSTART, *settings).out


def test_rewards_list(flowrl: Run) -> None:
    rows = json.loads(flowrl("rewards", "list", "--json").out)
    assert {"scene", "clip_score", "jpeg_compressibility"} <= rows.keys() and all(rows.values())
    assert "jpeg_compressibility" in flowrl("rewards", "list").out
