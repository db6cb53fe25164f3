"""One self-contained HTML page for a run, or for several runs side by side.

report_run.py reads the run folders, report_charts.py draws, report.html.j2 holds the page and its words; this
file judges what the numbers say and puts the page together. Every string of a run is escaped, by Jinja2 or by
matplotlib's SVG writer; the page needs no network.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jinja2
import numpy as np

from flowrl.errors import UserError
from flowrl.tools import report_charts
from flowrl.tools.report_run import Run, flat, load_run, mapping, number, short
from flowrl.training.grids import Picture, stored_grids

JUDGE_SLACK = 0.02  # a judge that falls by less is not called falling
PICTURES = 6  # grids of a single run: before, some during, after
PICTURE_BYTES = 1_500_000  # of all grids of a page, before base64
MAX_REST = 48  # charts of keys that the page does not know
CSV_BYTES = 600_000  # larger tables of curves are left out


def verdicts(run: Run) -> list[tuple[str, str]]:
    """(good | warn | bad | note, sentence): what the numbers say, whichever way they point."""
    return [(level, text) for holds, level, text in [*_results(run), *_mechanics(run)] if holds]


def _results(run: Run) -> Iterator[tuple[bool, str, str]]:
    """Rules on what came out. A comparison with an unknown value is false, so its rule stays silent."""
    planned = mapping(run.config.get("training")).get("iterations", "an unknown number")
    status, head = str(run.summary.get("status") or "finished"), run.headline
    words = f"Unfinished: iteration {max(run.metrics)} of {planned} is the last one logged."
    yield not run.summary, "warn", words
    ended = status.lower() in ("ok", "done", "finished", "complete", "completed")
    yield not ended, "warn", f"The run ended with status “{status}”."
    (before, after), (x, y) = run.judges[head], run.series(f"eval/{head}/mean")
    words = f"from {short(before)} to {short(after)} on held-out prompts."
    yield after > before, "good", f"{head} rose {words}"
    yield after < before, "bad", f"{head} fell {words}"
    yield after == before, "warn", f"{head} did not move: {words}"
    waiting = math.isfinite(before) and math.isnan(after)
    yield waiting, "note", f"No evaluation after training yet: {head} is {short(before)}."
    first, last = run.ends(f"reward/{head}/raw_mean")
    words = f"No held-out evaluation was logged; training reward went from {short(first)} to {short(last)}."
    yield math.isnan(before), "note", words
    if len(y) > 1:
        top = int(np.argmax(y))
        share = f"{y[-1] / y[top]:.2f} of best" if y[top] > 0 else f"{short(y[top] - y[-1])} below it"
        slipped = y[top] - y[-1] > 0.1 * (y[top] - y[0])
        words = f"Best at iteration {x[top]:.0f} ({short(y[top])}); final is {share}."
        yield True, "warn" if slipped else "good", words
    first, last = run.gap
    words = f"Training reward minus held-out: {short(first)} at the start, {short(last)} at the end."
    yield not math.isnan(first + last), "warn" if last - first > 0.5 * abs(after - before) else "note", words
    for name, (was, now) in run.judges.items():
        words = f"{name}, a judge beside the headline, fell from {short(was)} to {short(now)}."
        yield name != head and now < was - JUDGE_SLACK * abs(was), "warn", words
    for name, (was, now) in run.meters.items():
        left = now / was if was > 0 else math.nan
        if name == "diversity":
            level = "bad" if left < 0.5 else "warn" if left < 0.8 else "good"
            yield left >= 0, level, f"Diversity {'fell' if left < 1 else 'went'} to {left:.2f} of its base."
        else:
            words = f"{name} moved to {left:.2f} of its base: look at the pictures."
            yield abs(left - 1) > 0.25, "warn", words


def _mechanics(run: Run) -> Iterator[tuple[bool, str, str]]:
    """Rules on how the training itself behaved."""
    off = number(run.summary.get("ratio_first_max")) if "objective/log_ratio_max" in run.keys else math.nan
    yield off == 0, "good", "The ratio was exactly 1 before the first update."
    words = f"Before the first update a log-ratio was {short(off)}, not 0: the replay is not the rollout."
    yield off > 0, "bad", words
    clip = np.nansum([run.recent(f"objective/clip_frac_{side}") for side in ("low", "high")])
    yield clip > 0.5, "bad", f"Lately {clip:.0%} of the ratios were clipped: most samples give no gradient."
    equal = run.recent("advantage/frac_zero_std")
    yield equal > 0.5, "warn", f"Lately {equal:.0%} of the groups had equal rewards and taught nothing."
    norms = {k: run.recent(f"step/{k}/output_grad_norm") for k in run.names("step/", "/output_grad_norm")}
    weak = [k for k, norm in norms.items() if norm < 1e-3 * max(norms.values())]
    yield bool(weak), "warn", f"Output gradient below 1/1000 of the largest at step {', '.join(weak)}."
    for key, what in (("optimizer/skipped", "updates were skipped"), ("rows/invalid", "rows had no reward")):
        x, y = run.series(key)
        yield bool(y.any()), "warn", f"Some {what}, first at iteration {next(iter(x[y != 0]), 0):.0f}."
    holes = run.not_finite()
    first = "{1} at iteration {0}".format(*holes[0]) if holes else ""
    yield bool(holes), "warn", f"{len(holes)} logged values are not finite numbers, the first {first}."
    yield run.torn > 0, "warn", f"{run.torn} unreadable lines of the logs were skipped."
    costs = {name: float(seconds.sum()) for name, seconds in run.phases.items()}
    top, total = next(iter(costs), ""), sum(costs.values())
    pace, share = total / max(1, len(run.timings)), costs.get(top, 0.0) / (total or 1.0)
    words = f"An iteration took {pace:.3g} s on average, {share:.0%} of it {top}."
    yield total > 0, "note", words


class Page:
    """What the template may ask for."""

    nan = math.nan

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.drawn: set[str] = set()

    def curve(
        self, keys: dict[str, str], band: str = "", log: bool = False, shift: float = 0.0
    ) -> report_charts.Chart | None:
        """Metrics (key to label) over iterations: colours tell apart the runs, or the metrics of one run."""
        self.drawn |= {*keys, band}
        lines, many = [], len(self.runs) > 1
        for r, run in enumerate(self.runs):
            for k, (key, label) in enumerate(keys.items()):
                x, y = run.series(key)
                when, std = run.series(band) if band and k == 0 and not many else (x[:0], y[:0])
                color, dash = (r, k + r // 7) if many else (k, k // 7)  # seven colours, then dashes
                if len(y):
                    spread = std if np.array_equal(when, x) else None
                    lines.append(report_charts.Line(label, x, y + shift, color, dash, spread))
        if not lines:
            return None
        chart = report_charts.curve(lines, log)
        legend = [(label, "ink", dash) for label, _, dash in chart.legend]  # the page names the runs once
        return replace(chart, legend=legend) if many else chart

    @staticmethod
    def facts(run: Run) -> list[str]:
        """What there is to say of a run in one line."""
        facts = [str(run.summary.get("status") or ("finished" if run.summary else "unfinished"))]
        facts.append(f"{max(run.metrics)} iteration{'s' * (max(run.metrics) != 1)}")
        wall = number(run.summary.get("wall_s"))
        if wall >= 0:
            hours, minutes = divmod(round(wall / 60), 60)
            spent = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{wall:.0f} s"
            facts.append(spent)
        return facts

    @staticmethod
    def headline(run: Run) -> tuple[float, float]:
        """Before and after of the headline judge."""
        return run.judges[run.headline]

    def union(self, what: str) -> list[str]:
        """The names of "judges", "meters" or "phases" of all runs."""
        return [*dict.fromkeys(name for run in self.runs for name in getattr(run, what))]

    def tags(self, judge: str) -> list[dict[str, tuple[float, float]]]:
        """Before and after of each prompt tag under a judge, one table a run."""
        return [run.tags(judge) for run in self.runs]

    def phase(self, run: Run, name: str) -> tuple[float, float, float]:
        """Seconds, seconds per iteration and share of a phase."""
        seconds = {phase: float(y.sum()) for phase, y in run.phases.items()}
        spent = seconds.get(name, 0.0)
        return spent, spent / max(1, len(run.timings)), spent / (sum(seconds.values()) or 1.0)

    def labels(self, prefix: str, suffix: str = "") -> dict[str, str]:
        """Keys of all runs, each labelled by its middle."""
        return {f"{prefix}{name}{suffix}": name for name in self.names(prefix, suffix)}

    def names(self, prefix: str, suffix: str = "", deep: bool = False) -> list[str]:
        """The middles of the keys prefix + middle + suffix over all runs."""
        return [*dict.fromkeys(name for run in self.runs for name in run.names(prefix, suffix, deep))]

    def step_metrics(self) -> list[str]:
        """What was logged of each sampler step."""
        known = ["std", "log_ratio_max", "output_grad_norm"]
        found = dict.fromkeys(n.partition("/")[2] for n in self.names("step/", deep=True) if "/" in n)
        return [*(m for m in known if m in found), *(m for m in found if m not in known)]

    def rest(self) -> list[str]:
        """Keys that no chart or table has shown yet."""
        keys = dict.fromkeys(key for run in self.runs for key in run.keys)
        shown = re.compile(r"iteration|step/\d+/.+|eval/.+/tag/.+").fullmatch
        return [key for key in keys if key not in self.drawn and not shown(key)][:MAX_REST]

    @staticmethod
    def span(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
        """The axis that holds all finite values: 0 to 1 where that is enough."""
        values = [v for pair in pairs for v in pair if math.isfinite(v)] or [0.0]
        low, high = min(0.0, *values), max(values)
        return low, 1.0 if low == 0 and 0.5 < high <= 1 else high if high > low else low + 1

    def heat(self, run: Run, metric: str) -> report_charts.Chart | None:
        """A metric of the sampler steps as a map."""
        rows = {k: run.series(f"step/{k}/{metric}") for k in run.names("step/", f"/{metric}")}
        times = sorted({i for x, _ in rows.values() for i in x})
        steps = sorted((k for k in rows if len(rows[k][0])), key=lambda k: (len(k), k))
        table = np.full((len(steps), len(times)), np.nan)
        for row, step in zip(table, steps, strict=True):
            row[np.searchsorted(times, rows[step][0])] = rows[step][1]
        return report_charts.heat(steps, np.array(times), table) if times else None

    def stages(self, run: Run) -> report_charts.Chart | None:
        """Seconds of each phase."""
        x = np.array([*run.timings], np.float64)
        parts = {name: run.phases.get(name, np.zeros(len(x))) for name in self.union("phases")}
        return report_charts.stack(x, parts) if run.phases else None

    def settings(self) -> dict[str, list[str]]:
        """The settings in which the runs differ."""
        trees = [flat(run.config) if run.config else {} for run in self.runs]
        keys = dict.fromkeys(key for tree in trees for key in tree)
        rows = {key: [tree.get(key, "–") for tree in trees] for key in keys}
        return {key: row for key, row in rows.items() if len(set(row)) > 1}

    def pictures(self, run: Run) -> list[Picture]:
        """Grids of a run, in order: several of a single run, first and last of one among others."""
        many = len(self.runs) > 1
        return stored_grids(run.folder / "grids", 2 if many else PICTURES, PICTURE_BYTES // len(self.runs))

    def csv(self) -> str:
        """All metrics of all runs as a base64 CSV file, empty if that would swell the page."""
        keys = [*dict.fromkeys(k for run in self.runs for row in run.metrics.values() for k in row)]
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["run", *map(csv_cell, keys)])
        for run in self.runs:
            for row in run.metrics.values():
                values = [number(row.get(k)) for k in keys]
                writer.writerow([csv_cell(run.name), *("" if math.isnan(v) else f"{v:.7g}" for v in values)])
        data = table.getvalue().encode(errors="replace")
        return base64.b64encode(data).decode() if len(data) <= CSV_BYTES else ""


def csv_cell(text: str) -> str:
    """A string on one line that no spreadsheet takes for a formula."""
    line = re.sub(r"[\x00-\x1f]", " ", text)
    return f"'{line}" if line.lstrip().startswith(("=", "+", "-", "@")) else line


def write_report(run_folder: Path) -> Path:
    """Writes report.html into a run folder, finished or not, and returns its path.

    Raises:
        UserError: if the folder is not a run folder or holds no metrics yet.
    """
    return _write([load_run(Path(run_folder))], Path(run_folder) / "report.html")


def write_comparison(run_folders: Sequence[Path], out: Path) -> Path:
    """Writes one page that lays several runs over each other, and returns its path.

    Args:
        run_folders: the runs, in the order of their colours; equal names are told apart by their parents.
        out: the HTML file, or a folder for comparison.html.

    Raises:
        UserError: for no folder at all, or one that is not a run folder or holds no metrics yet.
    """
    if not run_folders:
        raise UserError("a comparison needs at least one run folder")
    runs = [load_run(Path(folder)) for folder in run_folders]
    names = [run.name for run in runs]
    runs = [replace(r, name=r.label()) if names.count(r.name) > 1 else r for r in runs]
    out = Path(out)
    return _write(runs, out / "comparison.html" if out.is_dir() else out)


def _digest(script: str) -> str:
    """The hash by which the page's security policy knows its own script, and refuses any other."""
    return base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()


def _write(runs: list[Run], out: Path) -> Path:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"short": short, "digest": _digest}
    page = environment.get_template("report.html.j2").render(
        page=Page(runs), runs=runs, verdicts=verdicts, flat=flat
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f"{out.name}.part")
    draft.write_text(page, encoding="utf-8", errors="replace")
    os.replace(draft, out)
    return out
