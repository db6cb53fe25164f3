"""Several processes do what one does: real process groups on the CPU (FAULTS G08, G28, G31; R8, R12, R13)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import ROOT, SMALL, Traces, environment, start_ranks, train_case

pytestmark = pytest.mark.slow
PLAIN = ("nft", "grpo")
TOLERANCE = 1e-6  # of weights: the order of a sum over ranks is another


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def two(out: Path) -> Path:
    """The runs of all cases in two processes."""
    processes = start_ranks(["tests/ranks.py", str(out / "two"), *PLAIN])
    for process in processes:
        errors = process.communicate(timeout=280)[1]
        assert process.returncode == 0, errors
    return out / "two"


@pytest.fixture(scope="module")
def one(out: Path) -> Path:
    """The same runs in this process."""
    for case in PLAIN:
        train_case(case, out / "one")
    return out / "one"


@pytest.mark.parametrize("case", PLAIN)
def test_r8_two_processes_see_the_same_samples_rewards_and_advantages(
    case: str, two: Path, one: Path
) -> None:
    ranks, alone = Traces(case, two, 2), Traces(case, one, 1)
    prompts = alone.facts[0]["prompts"]
    assert len(prompts) == 12 and [f["world"] for f in ranks.facts] == [2, 2]
    for rank in range(2):
        assert ranks.facts[rank]["prompts"] == prompts[rank::2]
        for name, tensor in ranks.records[rank].items():
            kind, number, *rest = name.split("/")
            if kind in ("scores", "advantages"):  # gathered: every rank knows all of them
                same = name
            else:
                same = "/".join([kind, str(int(number) * 2 + rank), *rest])
            expected = alone.records[0][same]
            if int(number) < (1 if kind in ("scores", "advantages") else 2):  # before the first update
                assert torch.equal(tensor, expected), name
            else:
                torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-4)


def same_weights(case: str, two: Path, one: Path, world: int = 2) -> None:
    ranks, alone = Traces(case, two, world).checkpoint(), Traces(case, one, 1).checkpoint()
    assert ranks.step == alone.step == 3
    assert ranks.state["train"]["updates"] == 3
    assert set(ranks.tensors) == set(alone.tensors) >= {"policy", "ema", "optimizer"}
    for group in alone.tensors:
        mine, theirs = ranks.tensors[group], alone.tensors[group]
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=TOLERANCE, msg=f"{group}: {name}")


@pytest.mark.parametrize("case", PLAIN)
def test_r8_two_processes_end_with_the_same_weights(case: str, two: Path, one: Path) -> None:
    same_weights(case, two, one)


@pytest.mark.parametrize("case", PLAIN)
def test_g31_two_processes_report_the_same_figures(case: str, two: Path, one: Path) -> None:
    """Five prompts in batches of two: the last batch is short, and one process has a batch less."""
    ranks, alone = Traces(case, two, 2).metrics(), Traces(case, one, 1).metrics()
    assert ranks[0] == alone[0] and any(name.startswith("eval/") for name in ranks[0])
    for mine, theirs in zip(ranks[1:], alone[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value == pytest.approx(theirs[name], rel=1e-3, abs=1e-5, nan_ok=True), name


# -- processes that end before their time ------------------------------------------------------------------


def command(out: Path, *overrides: str) -> list[str]:
    """The command line of the case nft."""
    options = [*SMALL, "name=nft", f"output={out}", *overrides]
    return ["-m", "flowrl.cli", "train", "configs/quickstart.yaml", *options, "--resume", "auto"]


def wait_for_checkpoint(processes: list[subprocess.Popen[str]], out: Path) -> None:
    deadline = time.monotonic() + 240
    while not list(out.glob("nft/checkpoints/step_*")):
        ended = [p.communicate()[1] for p in processes if p.poll() is not None]
        assert not ended and time.monotonic() < deadline, ended
        time.sleep(0.01)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a test, none of which outlives it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("victim", [0, 1])
def test_r12_r13_a_killed_process_ends_the_other_and_one_process_goes_on(
    victim: int, one: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    started += start_ranks(command(tmp_path, "distributed.timeout_s=60"))
    wait_for_checkpoint(started, tmp_path)
    started[victim].send_signal(signal.SIGKILL)
    errors = started[1 - victim].communicate(timeout=60)[1]
    assert started[1 - victim].returncode == 2
    assert errors.count("error:") == 1 and "Traceback" not in errors
    assert f"process {1 - victim} of 2 lost another one" in errors and "--resume auto" in errors
    # With one process, and another time-out, which is no change of the recipe.
    train_case("nft", tmp_path, resume=True)
    steps = [row["iteration"] for row in Traces("nft", tmp_path, 1).metrics()]
    assert steps == [0, 1, 2, 3]
    assert len(Traces("nft", tmp_path, 1).facts[0]["prompts"]) < 12  # it did not start over
    same_weights("nft", tmp_path, one, world=1)


def test_r6_sigterm_to_the_launcher_stops_all_ranks_with_a_checkpoint(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    long = ("training.iterations=50", "checkpoint.every=1000", "distributed.timeout_s=60")
    started.append(
        subprocess.Popen(
            [sys.executable, *launcher, *command(tmp_path, *long)],
            cwd=ROOT,
            env=environment(0, 1, 0),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    metrics = tmp_path / "nft" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert started[0].poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    started[0].send_signal(signal.SIGTERM)
    errors = started[0].communicate(timeout=120)[1]
    assert started[0].returncode != 0
    assert "lost another one" not in errors
    summary = json.loads((tmp_path / "nft" / "summary.json").read_text())
    assert summary["status"] == "stopped" and summary["processes"] == 2
    checkpoints = [path.name for path in (tmp_path / "nft" / "checkpoints").iterdir()]
    assert checkpoints == [f"step_{summary['iterations']:06d}"]
    assert not (tmp_path / "nft" / "run.lock").exists()


@pytest.mark.parametrize("fault", ["silence", "exception"])
def test_r12_an_exception_ends_the_others_at_once_and_silence_after_the_time_out(
    fault: str, started: list[subprocess.Popen[str]]
) -> None:
    timeout = 3 if fault == "silence" else 100
    started += start_ranks(["tests/ranks.py", "--fault", fault, str(timeout)])
    begin = time.monotonic()
    errors = started[0].communicate(timeout=90)[1]
    assert started[0].returncode == 2
    assert re.search(rf"process 0 of 2 lost another one.* {timeout} s", errors)
    if fault == "exception":
        assert "a reward that fails" in started[1].communicate(timeout=20)[1]
        assert time.monotonic() - begin < 100
    else:
        assert started[1].poll() is None
