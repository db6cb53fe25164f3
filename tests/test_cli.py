"""What the command line says to what it cannot do: one message, exit code 2, in little time."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_process import ROOT, Done, done, start
from tiny import TINY_WRONG

from flowrl.config import load
from flowrl.training.data import PromptSampler, read_prompts

QUICKSTART = "configs/quickstart.yaml"
SMALL = (
    "training.prompts_per_iteration=2",
    "training.group_size=2",
    "training.micro_batch_size=2",
    "training.updates_per_pass=1",
    "sampler.num_steps=2",
    "tracking.tensorboard=false",
    "evaluation.max_prompts=2",
    "rewards=[{name: jpeg_compressibility}]",
    "evaluation.rewards=[{name: scene}]",
)
PLUGIN = """
import torch
from flowrl.registry import ComponentConfig, register

@register("reward", "{name}")
class Reward:
    \"\"\"{name}; higher is better.\"\"\"

    class Config(ComponentConfig):
        \"\"\"Options.\"\"\"

    def __init__(self, config):
        pass

    def __call__(self, samples, prompts, metadata):
        return {value}
"""
Run = Callable[..., Done]


@pytest.fixture
def flowrl(tmp_path: Path) -> Run:
    """``flowrl("train", ...)`` runs a command to its end; runs go to tmp_path/runs."""
    numbers = itertools.count()

    def run(*arguments: object) -> Done:
        return done(start([str(a) for a in arguments], tmp_path / f"command_{next(numbers)}"))

    return run


@pytest.fixture
def train(flowrl: Run, tmp_path: Path) -> Run:
    """``train(overrides and options)`` of a small quickstart."""
    return lambda *more: flowrl("train", QUICKSTART, *SMALL, f"output={tmp_path / 'runs'}", *more)


def refused(ended: Done, *said: str, code: int = 2, word: str = "error") -> None:
    """One line on stderr with all that it should say; no traceback; the exit code."""
    lines = ended.err.strip().splitlines()
    assert ended.code == code, ended
    assert len(lines) == 1 and lines[0].startswith(f"{word}: "), ended.err
    for part in said:
        assert part in lines[0], f"{part!r} is not in: {lines[0]}"


def plugin(folder: Path, name: str, value: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(PLUGIN.format(name=name, value=value))
    return path


# ---------------------------------------------------------------------------------- before heavy imports


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("optimizer.lrr=1e-4",), ("unknown key optimizer.lrr (did you mean 'lr'?)", "legal keys: betas")),
        (("optimizer.lr=fast",), ("optimizer.lr = 'fast'", "valid number")),
        (("optimizer.lr=-1",), ("optimizer.lr = -1", "greater than 0")),
        (("model.dtype=fp8",), ("model.dtype = 'fp8'", "'fp32', 'bf16' or 'fp16'")),
        (("optimizer.lr",), ("override 'optimizer.lr'", "section.key=value")),
        (("optimizer=[1",), ("override 'optimizer=[1'", "not valid YAML")),
        (
            ("training={prompts_per_iteration: 16, group_size: 12, micro_batch_size: 25}",),
            ("training: ", "micro_batch_size 25 does not divide the 192 samples", "that fit: 6, 12, 24"),
        ),
        (
            ("training={prompts_per_iteration: 16, group_size: 18, micro_batch_size: 12}",),
            ("group_size 18", "one must divide"),
        ),
        (
            (
                "training={prompts_per_iteration: 16, group_size: 12, micro_batch_size: 24}",
                "training.updates_per_pass=5",
            ),
            ("updates_per_pass 5 does not divide the 8 micro-batches", "4, 8"),
        ),
        (("--resume", "maybe"), ("--resume 'maybe'", "legal values are auto, never")),
        (("--plugin", "nowhere.py"), ("--plugin nowhere.py: no such file",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_wrong_settings(flowrl: Run, arguments: tuple[str, ...], said: tuple[str, ...]) -> None:
    refused(flowrl("train", QUICKSTART, *arguments), *said)


def test_wrong_files(flowrl: Run, tmp_path: Path) -> None:
    refused(
        flowrl("train", "configs/quickstrat.yaml"), "no recipe configs/quickstrat.yaml", "quickstart.yaml"
    )
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {path: x\nrewards: [\n")
    refused(flowrl("train", broken), f"{broken}: ", "line 2")
    crashing = tmp_path / "crash.py"
    crashing.write_text("import math\n\nmath.sqrt(-1)\n")
    refused(flowrl("train", QUICKSTART, "--plugin", crashing), "crash.py, line 3: ValueError: ")
    refused(flowrl("export", tmp_path / "none", "--out", tmp_path / "x"), "is not the folder of a run")
    refused(flowrl("report", tmp_path / "none"), str(tmp_path / "none"))


def test_wrong_commands_are_answered_by_the_parser(flowrl: Run) -> None:
    for arguments in (("trian",), ("train",), ("train", QUICKSTART, "--no-such-option"), ("rewards", "lst")):
        ended = flowrl(*arguments)
        assert ended.code == 2 and "Usage: " in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize(
    "command",
    [
        "",
        "train",
        "sample",
        "eval",
        "doctor",
        "bench",
        "report",
        "export",
        "convert",
        "rewards",
        "rewards list",
    ],
)
def test_help_of_each_command(flowrl: Run, command: str) -> None:
    ended = flowrl(*command.split(), "--help")
    assert ended.code == 0 and ended.err == ""
    assert f"Usage: flowrl {command}".rstrip() in ended.out
    assert len(ended.out.splitlines()) > 8


# ------------------------------------------------------------------------------------------ with a model


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("rewards=[{name: sceen}]",),
            ("rewards.0: unknown reward 'sceen' (did you mean 'scene'?)", "known: "),
        ),
        (
            ("objective={name: grpo}", "sampler.kernel={name: ode}"),
            ("sampler.kernel 'ode' is deterministic", "objective 'grpo'", "flow_sde, dance_sde, cps"),
        ),
        (("model.path=assets/shapes-flwo",), ("model.path = 'assets/shapes-flwo'", "no such folder")),
        (("model.path=assets",), ("model.path = 'assets'", "no model_index.json")),
        (("data.train=nowhere.jsonl",), ("data.train = 'nowhere.jsonl'", "no such file")),
        (
            ("sampler.guidance={guidence_scale: 2}",),
            ("sampler.guidance.guidence_scale (did you mean 'guidance_scale'?)",),
        ),
        (
            ("evaluation.guidance={guidence_scale: 2}",),
            ("evaluation.guidance.guidence_scale (did you mean 'guidance_scale'?)",),
        ),
    ],
    ids=lambda value: value[0].split("=")[0] + str(len(value[0])) if isinstance(value, tuple) else None,
)
def test_what_does_not_fit(train: Run, overrides: tuple[str, ...], said: tuple[str, ...]) -> None:
    refused(train(*overrides), *said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(train: Run) -> None:
    refused(train("model.device=cuda"), "model.device = 'cuda'", "legal: auto, cpu")


def test_a_scheduler_of_another_family(train: Run, tmp_path: Path) -> None:
    TINY_WRONG["sd15"].build().save_pretrained(tmp_path / "sd15")
    call = f"model.call={json.dumps(TINY_WRONG['sd15'].call)}"
    refused(train(f"model.path={tmp_path / 'sd15'}", call), "DDIMScheduler", "flow")


def test_run_folders_that_cannot_be_used(train: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(train(f"output={tmp_path / 'file'}"), "cannot make the run folder", "file/quickstart")
    refused(train("output=/proc/runs"), "cannot make the run folder /proc/runs")
    run = tmp_path / "runs" / "quickstart"
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    refused(train("--fresh"), "--fresh: ", "is not the folder of a run; nothing was deleted")
    assert (run / "notes.txt").read_text() == "mine"
    (run / "metrics.jsonl").write_text('{"iteration": 0}\n')
    refused(train(), f"{run} already holds a run", "--resume auto", "--fresh")
    assert (run / "metrics.jsonl").read_text() == '{"iteration": 0}\n'


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("flat", "torch.full((len(prompts),), 0.25)", ("reward 'flat' is constant: 0.25 for 4 samples",)),
        (
            "lost",
            "torch.full((len(prompts),), float('nan'))",
            ("reward 'lost' gave no finite score for 2 of 2",),
        ),
        ("wide", "torch.zeros(len(prompts), 1)", ("reward 'wide' returned shape (2, 1), expected (2,)",)),
    ],
)
def test_rewards_that_teach_nothing(train: Run, tmp_path: Path, name: str, value: str, said) -> None:
    ended = train(f"rewards=[{{name: {name}}}]", "--plugin", plugin(tmp_path, name, value))
    refused(ended, *said)
    assert not (tmp_path / "runs" / "quickstart" / "metrics.jsonl").exists()


def test_without_its_check_a_run_stops_at_the_first_iteration(train: Run, tmp_path: Path) -> None:
    path = plugin(tmp_path, "lost", "torch.full((len(prompts),), float('nan'))")
    ended = train("rewards=[{name: lost}]", "--plugin", path, "--no-preflight")
    refused(ended, "iteration 1: no sample has a finite reward", code=3, word="stopped")


def test_g44_a_sparse_reward_is_not_taken_for_a_constant_one(flowrl: Run, tmp_path: Path) -> None:
    """The first micro-batch, noise and grey all get 0; the next micro-batch does not."""
    config = load(ROOT / QUICKSTART, SMALL)
    sampler = PromptSampler(
        read_prompts(ROOT / config.data.train, "data.train"),
        prompts_per_iteration=2,
        group_size=2,
        micro_batch_size=2,
        seed=config.seed,
        shared_initial_noise=False,
    )
    wanted = sampler.chosen(0)[1].text
    path = plugin(tmp_path, "sparse", f"torch.tensor([float(p == {wanted!r}) for p in prompts])")
    ended = flowrl("doctor", QUICKSTART, *SMALL, "rewards=[{name: sparse}]", "--plugin", path, "--json")
    assert ended.code == 0, ended
    assert json.loads(ended.out)["facts"]["rewards"]["sparse"]["samples"] == 0.5


def test_from_a_cold_start_a_refusal_takes_less_than_20_seconds(tmp_path: Path) -> None:
    """The slowest one, a constant reward: the model is loaded and an iteration rolled out. CPU time."""
    path = plugin(tmp_path, "flat", "torch.zeros(len(prompts))")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "flowrl.cli", "train", QUICKSTART, "rewards=[{name: flat}]"]
    command += [f"output={tmp_path}", "--plugin", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    refused(Done(ended.returncode, ended.stdout, ended.stderr), "reward 'flat' is constant")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
