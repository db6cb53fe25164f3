"""What a user sees while a run goes on: a progress bar with the reward, and the table at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from flowrl.training.trainer import IterationResult


class RichProgress:
    """A live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        """Shows nothing yet."""
        self.console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: Any = None
        self._total = 0

    def start(self, done: int, total: int) -> None:
        """Opens the bar."""
        self._total = total
        self._bar.start()
        self._task = self._bar.add_task("training", total=total, completed=done, note="")

    def iteration(self, number: int, result: IterationResult) -> None:
        """Advances the bar."""
        metrics = result.metrics
        note = f"reward {metrics.get('reward/total_mean', float('nan')):.4f}"
        if metrics.get("objective/kl"):
            note += f"  kl {metrics['objective/kl']:.2e}"
        if metrics.get("optimizer/skipped"):
            note += "  [yellow]update skipped[/]"
        self._bar.update(self._task, completed=number, note=note)
        if not self.console.is_terminal:
            seconds = result.seconds.get("total", 0.0)
            self.console.print(
                f"iteration {number}/{self._total}  {note}  ({seconds:.1f} s)", highlight=False
            )

    def evaluation(self, number: int, metrics: Mapping[str, float]) -> None:
        """Prints the judges of an evaluation above the bar."""
        judges = [key for key in metrics if key.startswith("eval/") and key.endswith("/mean")]
        shown = "  ".join(f"{key.split('/')[1]} {metrics[key]:.4f}" for key in judges)
        diversity = metrics.get("eval/diversity", float("nan"))
        self.console.print(
            f"held-out at iteration {number}: {shown}  diversity {diversity:.4f}", highlight=False
        )

    def stop(self) -> None:
        """Closes the bar."""
        self._bar.stop()


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The before/after table that ends a run."""
    table = Table(title=f"{summary['name']}: held-out, before and after", title_justify="left")
    table.add_column("")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    rows = {name: (judge["before"], judge["after"]) for name, judge in summary["judges"].items()}
    rows["pairwise diversity"] = (summary["diversity_before"], summary["diversity_after"])
    for name, meter in summary["meters"].items():
        if name != "diversity":
            rows[name] = (meter["before"], meter["after"])
    for name, (before, after) in rows.items():
        if before is None or after is None:
            continue
        change = f"{after - before:+.4f}"
        if name == "pairwise diversity" and before:
            change = f"x {after / before:.3f}"
        table.add_row(name, f"{before:.4f}", f"{after:.4f}", change)
    return table
