"""Run folders as the report reads them: finished, still running, or torn by a crash.

A folder holds config.yaml, metrics.jsonl, timings.jsonl and, once training has ended, summary.json. Lines
that cannot be read are counted and skipped; a later line of the same iteration, as after a resume, wins.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrl.errors import UserError
from flowrl.safe_yaml import parse_yaml

Floats = NDArray[np.float64]
MAX_DEPTH = 20  # of nested settings


@dataclass(frozen=True)
class Run:
    """What a run folder holds, as far as it can be read; rows are keyed by iteration."""

    name: str
    folder: Path
    config_text: str
    config: dict[str, Any]
    summary: dict[str, Any]
    metrics: dict[int, dict[str, Any]]
    timings: dict[int, dict[str, Any]]
    torn: int

    @cached_property
    def keys(self) -> list[str]:
        """All metric keys in order of appearance."""
        return [*dict.fromkeys(key for row in self.metrics.values() for key in row)]

    def label(self) -> str:
        """The name with its parent folder: tells runs of equal names apart."""
        return "/".join(self.folder.resolve().parts[-2:])

    def series(self, key: str) -> tuple[Floats, Floats]:
        """Iterations and values of a metric; null and what is no finite number are left out."""
        points = [(step, number(row.get(key))) for step, row in self.metrics.items()]
        table = np.array(points, np.float64)
        x, y = table[np.isfinite(table[:, 1])].T
        return x, y

    def names(self, prefix: str, suffix: str = "", deep: bool = False) -> list[str]:
        """The middles of the keys prefix + middle + suffix; those with a "/" inside only if `deep`."""
        match = re.compile(re.escape(prefix) + ("(.+)" if deep else "([^/]+)") + re.escape(suffix)).fullmatch
        return [found[1] for key in self.keys if (found := match(key))]

    def ends(self, *keys: str, told: Sequence[object] = (None, None)) -> tuple[float, float]:
        """First and last value of the first key that was logged, else those that the summary told.

        After a single evaluation there is no last value yet: it is NaN.
        """
        for y in (self.series(key)[1] for key in keys):
            if len(y):
                return float(y[0]), float(y[-1]) if len(y) > 1 else math.nan
        return number(told[0]), number(told[1])

    def recent(self, key: str) -> float:
        """Mean of the last ten values, NaN if there are none."""
        y = self.series(key)[1][-10:]
        return float(y.mean()) if len(y) else math.nan

    @property
    def headline(self) -> str:
        """The judge that the run is measured by."""
        names = self.names("eval/", "/mean") or self.names("reward/", "/raw_mean") or ["reward"]
        return str(self.summary.get("reward_name") or names[0])

    @cached_property
    def judges(self) -> dict[str, tuple[float, float]]:
        """Before and after of every held-out judge, the headline first."""
        told = mapping(self.summary.get("judges"))
        names = dict.fromkeys([self.headline, *self.names("eval/", "/mean"), *told])
        return {n: self.ends(f"eval/{n}/mean", told=_pair(told.get(n))) for n in names}

    @cached_property
    def meters(self) -> dict[str, tuple[float, float]]:
        """Before and after of diversity and of the other properties of the pictures."""
        told = mapping(self.summary.get("meters"))
        names = dict.fromkeys(["diversity", *self.names("eval/"), *self.names("samples/"), *told])
        return {n: self.ends(f"eval/{n}", f"samples/{n}", told=_pair(told.get(n))) for n in names}

    @property
    def gap(self) -> tuple[float, float]:
        """Training reward minus held-out reward of the headline judge; the last five iterations count."""
        train = self.series(f"reward/{self.headline}/raw_mean")[1]
        first, last = self.ends(f"eval/{self.headline}/mean")
        return (train[0] - first, float(train[-5:].mean()) - last) if len(train) else (math.nan, math.nan)

    def tags(self, judge: str) -> dict[str, tuple[float, float]]:
        """Before and after of every prompt tag under a judge."""
        told = mapping(mapping(mapping(self.summary.get("judges")).get(judge)).get("by_tag"))
        names = dict.fromkeys([*self.names(f"eval/{judge}/tag/", deep=True), *told])
        return {n: self.ends(f"eval/{judge}/tag/{n}", told=_pair(told.get(n))) for n in names}

    @cached_property
    def phases(self) -> dict[str, Floats]:
        """Seconds of each phase at each iteration, the largest first; what no phase claims is last.

        The total of an iteration is its training: evaluation and checkpoints come on top.
        """
        rows = [*self.timings.values()]
        names = dict.fromkeys(key for row in rows for key in row if key not in ("iteration", "total"))
        table = {n: np.nan_to_num([number(row.get(n)) for row in rows]) for n in names}
        table = dict(sorted(table.items(), key=lambda item: -item[1].sum()))
        total = np.nan_to_num([number(row.get("total")) for row in rows])
        claimed = np.sum([y for n, y in table.items() if n not in ("evaluate", "checkpoint")], axis=0)
        rest = (total - claimed).clip(0)
        return table | ({"unaccounted": rest} if rest.sum() > 0.01 * total.sum() else {})

    def not_finite(self) -> list[tuple[int, str]]:
        """Iteration and key of every logged value that is null or no finite number."""
        return [(i, k) for i, row in self.metrics.items() for k, v in row.items() if math.isnan(number(v))]


def number(value: object) -> float:
    """A finite float, or NaN for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


def mapping(value: object) -> dict[str, Any]:
    """The value if it is a mapping, with keys as strings, else an empty one."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _pair(entry: object) -> tuple[object, object]:
    return mapping(entry).get("before"), mapping(entry).get("after")


def flat(tree: object, prefix: str = "") -> dict[str, str]:
    """A nested mapping or list as dotted keys."""
    if not isinstance(tree, dict | list) or not tree:
        return {prefix: str(tree)}
    if prefix.count(".") >= MAX_DEPTH:
        return {prefix: "..."}
    leaves: dict[str, str] = {}
    for key, item in enumerate(tree) if isinstance(tree, list) else tree.items():
        leaves |= flat(item, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def short(value: object) -> str:
    """Four significant digits and a true minus sign; a dash for what is no finite number."""
    return f"{number(value):.4g}".replace("-", "−").replace("nan", "–")


def load_run(folder: Path) -> Run:
    """Reads a run folder, finished or not.

    Raises:
        UserError: if the folder is missing or holds no readable line of metrics.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is not a run folder: it has no metrics.jsonl")
    metrics, torn = _rows(folder / "metrics.jsonl")
    timings, torn_timings = _rows(folder / "timings.jsonl")
    if not metrics:
        raise UserError(f"{folder}: metrics.jsonl has no readable line yet, so there is nothing to report")
    text = _text(folder / "config.yaml")
    config = _tree(parse_yaml, text)
    summary = _tree(json.loads, _text(folder / "summary.json"))
    return Run(folder.resolve().name, folder, text, config, summary, metrics, timings, torn + torn_timings)


def _tree(parse: Callable[[str], object], text: str) -> dict[str, Any]:
    """What a file holds; one that is missing or torn counts as not written yet."""
    try:
        return mapping(parse(text))
    except (ValueError, RecursionError):
        return {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _rows(path: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """Rows by iteration, later lines over earlier ones as after a resume, and how many were unreadable."""
    rows: dict[int, dict[str, Any]] = {}
    torn = 0
    for line in filter(str.strip, _text(path).split("\n")):
        try:
            row = json.loads(line)
            if not 0 <= int(row["iteration"]) == row["iteration"] < 2**53:
                raise ValueError(line)
            rows.setdefault(int(row["iteration"]), {}).update(row)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            torn += 1
    return dict(sorted(rows.items())), torn
