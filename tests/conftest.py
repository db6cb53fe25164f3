"""Every test runs offline, on one thread, with deterministic kernels and freshly seeded generators.

Code under test draws from named seeds and must not depend on the global generators; they are seeded so
that a test that builds a random network by them builds the same one each time, alone or after others.
"""

from __future__ import annotations

import os

# Read at import by the libraries below, and inherited by the processes that tests start.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {"build", "dist", "runs", "node_modules"}

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def seed_all(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed_all(0)


@pytest.fixture
def reseed() -> Callable[[int], None]:
    """``reseed(seed)``: seeds the global generators anew in the middle of a test."""
    return seed_all


def python_files(*folders: str) -> list[Path]:
    """All Python files of the project, or of some of its folders, without what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.split("\0") if name.endswith(".py")]
    else:  # an unpacked source archive
        roots = [ROOT / folder for folder in folders] or [ROOT]
        files = [path for root in roots for path in root.rglob("*.py")]
        files = [p for p in files if not any(_skipped(part) for part in p.relative_to(ROOT).parts)]
    return sorted(path for path in files if path.is_file())


def _skipped(part: str) -> bool:
    return part in SKIPPED or part.startswith(".") or part.endswith(".egg-info")
