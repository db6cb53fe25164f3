"""What the command line does, as functions; heavy imports happen here and not in `flowrl.cli`."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from flowrl import registry
from flowrl.config import RunConfig, load
from flowrl.errors import UserError

logger = logging.getLogger(__name__)


def train(
    recipe: Path,
    overrides: list[str],
    *,
    resume: bool,
    fresh: bool,
    allow_change: bool,
    preflight: bool,
    plugins: list[str],
    trust: bool,
    console: Console,
) -> dict[str, Any]:
    """Trains a recipe; see ``flowrl train --help``."""
    config = read_recipe(recipe, overrides, plugins)
    _quiet()
    from flowrl.build import build_run
    from flowrl.progress import RichProgress, summary_table
    from flowrl.training.run import TrainingRun
    from flowrl.training.run_folder import RunFolder

    is_main = int(os.environ.get("RANK", "0")) == 0
    if fresh and is_main:
        remove_run(config)
    folder = RunFolder(config.output, config.name)
    if is_main:
        folder.__enter__()
    try:
        run = build_run(config, recipe, trust=trust)
        progress = RichProgress(console) if run.engine.is_main else None
        if preflight and run.engine.is_main:
            from flowrl.tools.doctor import preflight_check

            preflight_check(run, console)
        session = TrainingRun(config, run.trainer, run.evaluator, run.engine, folder, progress)
        try:
            summary = session.train(resume, allow_change)
        finally:
            if progress is not None:
                progress.stop()
        if run.engine.is_main:
            from flowrl.tools.report import write_report

            report = write_report(folder.path)
            console.print(f"report: {report}", highlight=False, soft_wrap=True)
            if summary["judges"]:
                console.print(summary_table(summary))
        run.engine.close()
        return summary
    finally:
        if is_main:
            folder.__exit__(None, None, None)


def read_recipe(recipe: Path, overrides: list[str], plugins: list[str]) -> RunConfig:
    """Loads plugins, then the recipe."""
    for plugin in plugins:
        registry.load_plugin(plugin)
    return load(recipe, overrides)


def remove_run(config: RunConfig) -> None:
    """Deletes an earlier run's folder, if it is one.

    Raises:
        UserError: if the folder holds something else.
    """
    from flowrl.training.run_folder import safe_name

    path = Path(config.output) / safe_name(config.name)
    if not path.exists():
        return
    if any(path.iterdir()) and not (path / "config.yaml").exists() and not (path / "run.lock").exists():
        raise UserError(f"--fresh: {path} is not the folder of a run; nothing was deleted")
    shutil.rmtree(path)


def rewards_list(plugins: list[str], as_json: bool, console: Console) -> None:
    """Lists the registered rewards with the first line of their documentation."""
    for plugin in plugins:
        registry.load_plugin(plugin)
    rows = {
        name: (registry.get("reward", name).__doc__ or "").strip().splitlines()[0]
        for name in registry.names("reward")
    }
    if as_json:
        console.print_json(json.dumps(rows))
        return
    width = max(map(len, rows), default=0)
    for name, line in rows.items():
        console.print(f"[bold]{name.ljust(width)}[/]  {line}", highlight=False)


def _quiet() -> None:
    """Third-party progress bars and notices would bury ours."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
