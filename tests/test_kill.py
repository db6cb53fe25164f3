"""Whole runs under SIGKILL, SIGTERM and SIGINT; see kill_run.py, which kills as often as you like."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from kill_run import finish, folder, kill, lines, pace_of, start, trained, wait_for

from flowrl.training.checkpoint import CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], float]:
    """What an uninterrupted run ends with, and the seconds of an iteration."""
    out = tmp_path_factory.mktemp("unbroken")
    traces = finish(out)
    assert trained(out)
    return traces, pace_of(out)


def test_r1_killed_three_times_and_resumed_equals_unbroken(
    unbroken: tuple[dict[str, str], float], tmp_path: Path
) -> None:
    expected, pace = unbroken
    rng = random.Random(1)
    kills = [kill(tmp_path, moment, rng, pace) for moment in ("save", "anywhere", "save")]
    assert finish(tmp_path) == expected, kills
    assert not list((folder(tmp_path) / "checkpoints").glob(".*")), "litter of a killed save is cleared"


def test_r6_signals_stop_a_run_that_resumes_to_the_same_end(
    unbroken: tuple[dict[str, str], float], tmp_path: Path
) -> None:
    """SIGINT again and again: at once, without a checkpoint. SIGTERM: after a checkpoint."""
    seldom = "checkpoint.every=100"  # so that a checkpoint in between is the signal's
    run = start(tmp_path, seldom)
    wait_for(run, lambda: lines(tmp_path) >= 2)
    while run.is_alive():
        with suppress(ProcessLookupError):  # it may end between the question and the signal
            os.kill(run.pid, signal.SIGINT)
        time.sleep(0.02)
    assert run.exitcode == 130
    assert not (folder(tmp_path) / "summary.json").exists()
    # The first signal may have begun a save before the second ended it: a torso is no checkpoint.
    assert CheckpointStore(folder(tmp_path) / "checkpoints", readonly=True).latest() is None

    run = start(tmp_path, seldom)
    wait_for(run, lambda: lines(tmp_path) == 1)  # it starts over, as there is no checkpoint
    wait_for(run, lambda: lines(tmp_path) >= 3)
    os.kill(run.pid, signal.SIGTERM)
    run.join()
    assert run.exitcode == 143
    summary = json.loads((folder(tmp_path) / "summary.json").read_text())
    checkpoint = CheckpointStore(folder(tmp_path) / "checkpoints", readonly=True).latest()
    assert summary["status"] == "stopped" and checkpoint is not None
    assert 2 <= checkpoint.step == summary["iterations"] == lines(tmp_path) - 1 < 6
    assert not (folder(tmp_path) / "run.lock").exists()

    assert finish(tmp_path, seldom) == unbroken[0]
