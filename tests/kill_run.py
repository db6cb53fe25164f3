"""Whole training runs, killed at random moments; a resumed one must end with the bytes of an unbroken one.

    python tests/kill_run.py --kills 20

trains once without a break, then starts as many runs, kills each by SIGKILL, half of them inside a save,
resumes it with ``--resume auto`` and compares. tests/test_kill.py does the same with a few kills.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import cli_process

from flowrl.training.checkpoint import CheckpointStore, digest

ITERATIONS = 6
RECIPE = (
    f"training.iterations={ITERATIONS}",
    "training.prompts_per_iteration=2",
    "training.group_size=2",
    "training.micro_batch_size=2",
    "training.updates_per_pass=1",
    "rewards=[{name: jpeg_compressibility}]",
    "sampler.num_steps=2",
    "objective.units_per_micro_batch=1",
    "evaluation.max_prompts=2",
    "evaluation.samples_per_prompt=1",
    "evaluation.every=2",
    "evaluation.rewards=[]",
    "tracking.tensorboard=false",
    "checkpoint.every=1",
)
Moment = Literal["anywhere", "save"]


@dataclass(frozen=True)
class Kill:
    """What a kill met: the lines of metrics.jsonl then, and what it left half done."""

    moment: Moment
    lines: int
    litter: tuple[str, ...]


def folder(out: Path) -> Path:
    """Where a run with this output writes."""
    return out / "quickstart"


def start(out: Path, *overrides: str) -> BaseProcess:
    """``flowrl train ... --resume auto`` in a process of its own."""
    command = ["train", "configs/quickstart.yaml", *RECIPE, *overrides]
    command += [f"output={out}", "--resume", "auto", "--no-preflight"]
    return cli_process.start(command, out)


def finish(out: Path, *overrides: str) -> dict[str, str]:
    """Trains to the end; what it ended with."""
    process = start(out, *overrides)
    ended = cli_process.done(process)
    assert ended.code == 0, ended.err
    return traces(out)


def traces(out: Path) -> dict[str, str]:
    """SHA-256 of weights, averages, optimizer and metrics at the end of a run."""
    checkpoint = CheckpointStore(folder(out) / "checkpoints", readonly=True).latest()
    assert checkpoint is not None and checkpoint.step == ITERATIONS
    hashes = {group: digest(checkpoint.tensors[group]) for group in sorted(checkpoint.tensors)}
    assert {"policy", "ema", "old", "optimizer"} <= hashes.keys()
    return hashes | {"metrics": hashlib.sha256((folder(out) / "metrics.jsonl").read_bytes()).hexdigest()}


def lines(out: Path) -> int:
    """How many iterations are logged."""
    path = folder(out) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def litter(out: Path) -> Iterator[str]:
    """Names of half written or half deleted checkpoints."""
    checkpoints = folder(out) / "checkpoints"
    if checkpoints.is_dir():
        yield from sorted(name for name in os.listdir(checkpoints) if name.startswith("."))


def kill(out: Path, moment: Moment, rng: random.Random, pace: float) -> Kill:
    """Starts or resumes a run and kills it; one that ends first is deleted, and the next one has its turn.

    Args:
        out: the run's output.
        moment: "anywhere" in training, or inside a "save".
        rng: decides the moment.
        pace: seconds that an iteration takes.
    """
    process = start(out)
    before = lines(out)
    wait_for(process, lambda: lines(out) > before if before else (folder(out) / "config.yaml").exists())
    if moment == "anywhere":
        wanted = rng.randint(before, ITERATIONS)
        wait_for(process, lambda: lines(out) >= wanted)
        time.sleep(rng.uniform(0, pace))
    else:
        for _ in range(rng.randint(1, max(1, ITERATIONS - before - 1))):
            wait_for(process, lambda: not any(litter(out)))
            wait_for(process, lambda: any(litter(out)))
        time.sleep(rng.uniform(0, 0.05))
    process.kill()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return Kill(moment, lines(out), tuple(litter(out)))
    shutil.rmtree(folder(out))
    return kill(out, moment, rng, pace)


def wait_for(process: BaseProcess, condition: Callable[[], bool], timeout: float = 300) -> None:
    """Waits, with small steps, until a condition holds; fails if the process ends or time is up."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.is_alive(), f"ended with {process.exitcode}: {cli_process.done(process).err}"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def trained(out: Path) -> bool:
    """Whether every iteration of a finished run changed the weights."""
    rows = [json.loads(line) for line in (folder(out) / "metrics.jsonl").read_text().splitlines()]
    return len(rows) == ITERATIONS + 1 and all(row["optimizer/grad_norm"] > 0 for row in rows[1:])


def pace_of(out: Path) -> float:
    """Seconds that an iteration of a finished run took, with its evaluations and saves."""
    first, last = ((folder(out) / name).stat().st_mtime for name in ("config.yaml", "summary.json"))
    return (last - first) / ITERATIONS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    equal = inside = 0
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        expected = finish(whole)
        pace = pace_of(whole)
        assert trained(whole), "a run that learns nothing proves nothing"
        say(f"unbroken run: {pace:.2f} s an iteration, {expected}")
        for number in range(options.kills):
            out = Path(place) / f"run_{number}"
            met = kill(out, "save" if number % 2 else "anywhere", rng, pace)
            same = finish(out) == expected
            equal += same
            inside += bool(met.litter)
            say(f"kill {number + 1}: {met} -> {'equal' if same else 'DIFFERENT'}")
    say(f"{equal} of {options.kills} equal; {inside} kills left a save or a deletion half done")
    return 0 if equal == options.kills else 1


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
