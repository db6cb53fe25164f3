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
from ranks import CASES, HANDED, PLAIN, ROOT, SMALL, Traces, environment, start_ranks, train_case
from tiny_run import tiny_run

from flowrl.cli import app
from flowrl.errors import UserError
from flowrl.training.distributed import Engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # two processes on one busy core wait much
TOLERANCE = 1e-6  # of weights: the order of a sum over ranks is another
RUNS = [("two", case) for case in PLAIN] + [("sharded", case) for case in CASES]
each_run = pytest.mark.parametrize(("folder", "case"), RUNS, ids=["-".join(run) for run in RUNS])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all cases: ``one`` in this process, ``two`` and ``sharded`` in two, ``handed`` in turns."""
    out = tmp_path_factory.mktemp("distributed")
    for case in HANDED:
        train_case(case, out / "handed", "training.iterations=1")
    processes = start_ranks(["tests/ranks.py", str(out)])
    for process in processes:
        errors = process.communicate(timeout=900)[1]
        assert process.returncode == 0, errors
    for case in CASES:
        train_case(case, out / "one")
    for case in HANDED:
        train_case(case, out / "handed", "training.iterations=3", resume=True)
        train_case(case, out / "longer", "training.iterations=3")
    return out


@each_run
def test_r8_two_processes_see_the_same_samples_rewards_and_advantages(
    folder: str, case: str, out: Path
) -> None:
    ranks, alone = Traces(case, out / folder, 2), Traces(case, out / "one", 1)
    prompts = alone.facts[0]["prompts"]
    assert len(prompts) == 4 * len(alone.metrics()[1:]) and [f["world"] for f in ranks.facts] == [2, 2]
    for rank in range(2):
        assert ranks.facts[rank]["prompts"] == prompts[rank::2]
        for name, tensor in ranks.records[rank].items():
            kind, number, *rest = name.split("/")
            if kind in ("scores", "advantages"):  # gathered: every rank knows all of them
                same, before_update = name, number == "0"
            else:
                same, before_update = "/".join([kind, str(int(number) * 2 + rank), *rest]), int(number) < 2
            if before_update:
                assert torch.equal(tensor, alone.records[0][same]), name


def same_weights(case: str, first: Path, second: Path, worlds: tuple[int, int] = (2, 1)) -> None:
    mine, theirs = (Traces(case, *side).checkpoint() for side in zip((first, second), worlds, strict=True))
    assert mine.step == theirs.step == mine.state["train"]["updates"] > 0
    assert set(mine.tensors) == set(theirs.tensors) >= {"policy", "ema", "optimizer"}
    for group in theirs.tensors:
        tensors, expected = mine.tensors[group], theirs.tensors[group]
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
            gap = float((tensor.double() - expected[name].double()).abs().max())
            assert gap < TOLERANCE, f"{group}, {name}: {gap}"


@each_run
def test_r8_two_processes_find_the_same_first_gradient(folder: str, case: str, out: Path) -> None:
    """Adam hides the scale of a gradient from the weights; its first moment is 0.1 of the first one."""
    ranks, alone = Traces(case, out / folder, 2).checkpoint(1), Traces(case, out / "one", 1).checkpoint(1)
    mine, theirs = ranks.tensors["optimizer"], alone.tensors["optimizer"]
    # What all blocks read collects its gradient in bfloat16, in an order that FSDP's hooks change.
    tolerance = 0.02 if "bf16" in case else 1e-5
    moments = [name for name in theirs if name.startswith("exp_avg/")]
    largest = max(float(theirs[name].norm()) for name in moments)
    assert largest > 0
    for name in moments:
        gap = float((mine[name] - theirs[name]).norm())
        assert gap <= tolerance * float(theirs[name].norm()) + 1e-7 * largest, name


@pytest.mark.parametrize(("folder", "case"), [run for run in RUNS if "bf16" not in run[1]])
def test_r8_two_processes_end_with_the_same_weights(folder: str, case: str, out: Path) -> None:
    same_weights(case, out / folder, out / "one")


@each_run
def test_g31_two_processes_report_the_same_figures(folder: str, case: str, out: Path) -> None:
    """Five prompts in batches of two: the last batch is short, and one process has a batch less."""
    ranks, alone = Traces(case, out / folder, 2).metrics(), Traces(case, out / "one", 1).metrics()
    assert ranks[0] == alone[0] and any(name.startswith("eval/") for name in ranks[0])
    for mine, theirs in zip(ranks[1:], alone[1:], strict=True):
        assert mine.keys() == theirs.keys() and mine["optimizer/grad_norm"] > 0
        for name, value in mine.items():
            after_update = 0.02 if "bf16" in case and name.startswith("eval/") else 1e-5
            assert value == pytest.approx(theirs[name], rel=1e-3, abs=after_update), name


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_process_holds_half_of_the_numbers(case: str, out: Path) -> None:
    ranks, alone = Traces(case, out / "sharded", 2), Traces(case, out / "one", 1)
    for kind in ("weights", "optimizer", "copies"):
        total = alone.facts[0][kind]
        parts = [facts[kind] for facts in ranks.facts]
        assert sum(parts) == total and max(parts) <= 0.51 * total, kind
    assert alone.facts[0]["optimizer"] > 0


@pytest.mark.parametrize("case", HANDED)
def test_r13_one_then_two_sharded_then_one_process_end_as_one(case: str, out: Path) -> None:
    steps = [row["iteration"] for row in Traces(case, out / "handed", 1).metrics()]
    assert steps == [0, 1, 2, 3]
    for world in (1, 2):  # each went on, for one iteration
        assert len(Traces(case, out / "handed", world).facts[0]["prompts"]) == 4 // world
    same_weights(case, out / "handed", out / "longer", worlds=(1, 1))


# -- processes that end before their time ------------------------------------------------------------------


def command(out: Path, *overrides: str) -> list[str]:
    """The command line of the case nft."""
    options = [*SMALL, *CASES["nft"][1:], "name=nft", f"output={out}", *overrides]
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
        process.wait()


def test_r12_r13_a_killed_process_ends_the_other_and_one_process_goes_on(
    out: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    started += start_ranks(command(tmp_path, "distributed.timeout_s=300", "training.iterations=50"))
    wait_for_checkpoint(started, tmp_path)
    started[0].send_signal(signal.SIGKILL)  # the one that holds the lock and writes
    errors = started[1].communicate(timeout=60)[1]
    assert started[1].returncode == 2
    assert errors.count("error:") == 1 and "Traceback" not in errors
    assert "process 1 of 2 lost another one" in errors and "--resume auto" in errors
    # With one process, and another time-out, which is no change of the recipe.
    train_case("nft", tmp_path, resume=True)
    steps = [row["iteration"] for row in Traces("nft", tmp_path, 1).metrics()]
    assert steps == [0, 1, 2]
    assert len(Traces("nft", tmp_path, 1).facts[0]["prompts"]) < 8  # it did not start over
    same_weights("nft", tmp_path, out / "one", worlds=(1, 1))


def test_r6_sigterm_to_the_launcher_stops_all_ranks_with_a_checkpoint(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    long = ("training.iterations=50", "checkpoint.every=1000", "distributed.sharding=full")
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
        assert started[0].poll() is None, started[0].communicate()[1]
        assert time.monotonic() < deadline
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


# -- what is refused ----------------------------------------------------------------------------------------


def test_two_networks_and_draws_of_each_process_do_not_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("cpu")
    engine.sharded = True
    monkeypatch.setattr(engine, "shard", lambda networks: None)
    monkeypatch.setattr("flowrl.build.Engine", lambda *_: engine)
    with pytest.raises(UserError, match=r"distributed.sharding = full, objective 'nft'.*transformer_2"):
        tiny_run("sampler.kernel={name: ode}", recipe="quickstart_nft", tiny="wan22")
    tiny_run(tiny="wan22")  # processes agree on the steps that they replay


@pytest.mark.parametrize(
    "command", [["export", "runs/x", "--out", "y"], ["doctor", "configs/quickstart.yaml"]]
)
def test_commands_for_one_process_say_so(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=f"flowrl {command[0]} runs in one process"):
        app(command, standalone_mode=False)
