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

RUN_FILES = ("config.yaml", "run.lock", "metrics.jsonl")


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
        check_is_run(config)
    folder = RunFolder(config.output, config.name)
    if is_main:
        folder.__enter__()
    try:
        if fresh and is_main:
            clear_run(folder.path)
        run = build_run(config, recipe, trust=trust)
        progress = RichProgress(console) if run.engine.is_main else None
        if preflight:
            from flowrl.tools.doctor import preflight_check

            # On every process: with sharded weights the network calls that it makes are communication.
            with run.engine.together():
                preflight_check(run, console if run.engine.is_main else Console(quiet=True))
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


def distill(recipe: Path, overrides: list[str], *, plugins: list[str], trust: bool, **options: Any) -> None:
    """Trains a distillation recipe and exports the student; see ``flowrl distill --help``."""
    one_process("distill")
    config = read_recipe(recipe, overrides, plugins)
    objective = registry.get("objective", str(config.objective["name"]))
    if objective.acts != "reference":
        raise UserError(
            f"objective {config.objective['name']!r} distils nothing; flowrl distill needs a recipe with an "
            "objective that learns from the start model, such as consistency_distillation"
        )
    summary = train(recipe, overrides, plugins=plugins, trust=trust, allow_change=False, **options)
    if summary["status"] == "finished":
        folder = Path(config.output) / config.name
        out = folder / "pipeline"
        console = options["console"]
        shutil.rmtree(out, ignore_errors=True)  # of an earlier end of the same run
        export(folder, out, form="pipeline", weights="auto", plugins=plugins, trust=trust, console=console)


def one_process(command: str) -> None:
    """Raises UserError for a command that a launcher has started several times."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"flowrl {command} runs in one process: start it without accelerate or torchrun")


def read_recipe(recipe: Path, overrides: list[str], plugins: list[str]) -> RunConfig:
    """Loads plugins, then the recipe."""
    for plugin in plugins:
        registry.load_plugin(plugin)
    return load(recipe, overrides)


def check_is_run(config: RunConfig) -> None:
    """Raises UserError if what --fresh would clear is not the folder of a run."""
    from flowrl.training.run_folder import safe_name

    path = Path(config.output) / safe_name(config.name)
    if path.is_dir() and any(path.iterdir()) and not any((path / n).exists() for n in RUN_FILES):
        raise UserError(f"--fresh: {path} is not the folder of a run; nothing was deleted")


def clear_run(path: Path) -> None:
    """Empties a run folder whose lock this process holds; the lock itself stays."""
    for entry in path.iterdir():
        if entry.name == "run.lock":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def open_target(
    target: Path, overrides: list[str], plugins: list[str], weights: str, trust: bool
) -> tuple[RunConfig, Any]:
    """Builds what a recipe or a run folder describes, with the weights asked for.

    Args:
        target: a recipe, or the folder of a run.
        overrides: as for training.
        plugins: as for training.
        weights: "base", "trained" or "ema"; "auto" is the average if the run keeps one. A recipe has only
            "base".
        trust: as for training.

    Raises:
        UserError: if a run has no checkpoint, or no average where one is asked for.
    """
    for plugin in plugins:
        registry.load_plugin(plugin)
    is_run = target.is_dir()
    config = load(target / "config.yaml" if is_run else target, overrides)
    if not is_run and weights not in ("auto", "base"):
        raise UserError(f"--weights {weights}: a recipe has no trained weights; name a run folder instead")
    _quiet()
    from flowrl.build import build_run

    run = build_run(config, None if is_run else target, trust=trust)
    if is_run and weights != "base":
        load_weights(run, target, weights)
    return config, run


def load_weights(run: Any, folder: Path, weights: str) -> None:
    """Puts a run's newest checkpoint into its policy; the average takes the place of trained weights."""
    from flowrl.mdp.shards import spread_like
    from flowrl.training.checkpoint import CheckpointStore

    checkpoint = CheckpointStore(folder / "checkpoints", readonly=True).latest()
    if checkpoint is None:
        raise UserError(f"{folder} has no checkpoint yet")
    groups = {name: checkpoint.tensors[name] for name in checkpoint.tensors if name != "optimizer"}
    run.policy.load_tensors(groups)
    if weights == "ema" and "ema" not in groups:
        raise UserError(f"--weights ema: {folder} keeps no average (ema.decay is 0)")
    if weights in ("ema", "auto") and "ema" in groups:
        parameters = run.policy.parameters()
        for name, tensor in groups["ema"].items():
            parameters[name].detach().copy_(spread_like(tensor, parameters[name]))


def sample(
    target: Path,
    overrides: list[str],
    *,
    prompts: list[str],
    count: int,
    seed: int,
    out: Path,
    weights: str,
    plugins: list[str],
    trust: bool,
    console: Console,
) -> None:
    """Samples prompts with the deployed pipeline; one picture a file, and a grid."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder")
    config, run = open_target(target, overrides, plugins, weights, trust)
    from torchvision.transforms.functional import to_pil_image

    from flowrl.training.data import Prompt
    from flowrl.training.evaluate import captioned
    from flowrl.training.grids import picture_grid

    texts = [Prompt(text, {"prompt": text}) for text in prompts] or run.trainer.sampler.prompts[:12]
    evaluator = evaluator_of(run, texts, samples_per_prompt=count, seed=seed)
    with run.policy.acting():
        samples, rows = evaluator.sample()
    if not run.engine.is_main:
        return
    out.mkdir(parents=True, exist_ok=True)
    images = samples.images
    for number, image in enumerate(images):
        still = image if image.ndim == 3 else image[image.shape[0] // 2]
        to_pil_image(still).save(out / f"{number:04d}.png")
    records = [{"file": f"{n:04d}.png", "prompt": p.text, "member": m} for n, (p, m) in enumerate(rows)]
    records = [r | ({"text": samples.texts[n]} if samples.texts else {}) for n, r in enumerate(records)]
    (out / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    (out / "settings.json").write_text(json.dumps(evaluator.settings, indent=2) + "\n", encoding="utf-8")
    columns = count if count > 1 else min(6, len(images))
    scale = max(1, 160 // images.shape[-1])
    grid = picture_grid(images, captioned([p.text for p, _ in rows], samples), columns=columns, scale=scale)
    grid.save(out / "grid.png")
    console.print(f"{len(images)} samples of {config.name} in {out}", highlight=False)


def evaluate(
    target: Path,
    overrides: list[str],
    *,
    weights: str,
    plugins: list[str],
    trust: bool,
    as_json: bool,
    out: Path | None,
    console: Console,
) -> None:
    """Evaluates on the held-out prompts; every score comes with its generation settings."""
    config, run = open_target(target, overrides, plugins, weights, trust)
    from flowrl.training.run import versions

    if run.evaluator is None:
        raise UserError("data.held_out: no prompts to evaluate on; give a file")
    with run.policy.acting():
        result = run.evaluator.evaluate()
    if not run.engine.is_main:
        return
    report = {
        "target": str(target),
        "weights": weights,
        "scores": result.metrics,
        "generation": run.evaluator.settings,
        "versions": versions(),
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        console.print_json(json.dumps(report))
        return
    from rich.table import Table

    table = Table(title=f"{config.name}: held-out", title_justify="left", show_header=False)
    for name, value in result.metrics.items():
        table.add_row(name.removeprefix("eval/"), f"{value:.4f}")
    console.print(table)
    console.print_json(json.dumps(report["generation"]))


def evaluator_of(run: Any, prompts: list[Any], samples_per_prompt: int, seed: int) -> Any:
    """An evaluator on other prompts, with a recipe's evaluation settings."""
    from flowrl.build import build_evaluator

    options = {"samples_per_prompt": samples_per_prompt, "seed": seed, "max_prompts": None}
    changed = run.config.model_copy(update={"evaluation": run.config.evaluation.model_copy(update=options)})
    return build_evaluator(changed, run.wrapper, prompts, run.trainer.rewards, run.engine)


def doctor(
    recipe: Path,
    overrides: list[str],
    *,
    plugins: list[str],
    trust: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Examines a recipe; the exit code is 2 if it has a problem."""
    one_process("doctor")
    _, run = open_target(recipe, overrides, plugins, "auto", trust)
    from flowrl.tools.doctor import examine, print_diagnosis

    diagnosis = examine(run)
    if as_json:
        console.print_json(json.dumps(vars(diagnosis)))
    else:
        print_diagnosis(diagnosis, console)
    return 2 if diagnosis.problems else 0


def report(folders: list[Path], out: Path | None, console: Console) -> None:
    """Writes the report of a run, or of several side by side."""
    from flowrl.tools.report import write_comparison, write_report

    if len(folders) == 1 and out is None:
        path = write_report(folders[0])
    else:
        path = write_comparison(folders, out or Path("comparison.html"))
    console.print(str(path), highlight=False, soft_wrap=True)


def export(
    folder: Path,
    out: Path,
    *,
    form: str,
    weights: str,
    plugins: list[str],
    trust: bool,
    console: Console,
) -> None:
    """Writes a run's weights for diffusers and verifies them by loading them afresh."""
    one_process("export")
    if not folder.is_dir():
        raise UserError(f"{folder} is not the folder of a run")
    config, run = open_target(folder, [], plugins, weights, trust)
    from flowrl.build import deployed_scheduler, load_pipeline
    from flowrl.mdp.trajectory import Request
    from flowrl.tools import export as exporting

    prompt = run.trainer.sampler.prompts[0]
    request = Request((prompt.text,), (prompt.metadata,), (0,), (0,), (0,))
    arguments = run.wrapper.arguments(request, config.evaluation.guidance, config.evaluation.num_steps)
    call = {k: v for k, v in arguments.items() if k != "generator"}

    def deployed(pipe: Any) -> Any:
        pipe.scheduler = deployed_scheduler(config, pipe)
        return pipe

    exporting.export(
        deployed(run.wrapper.pipe),
        run.policy,
        out,
        form,  # type: ignore[arg-type]
        average=False,
        make_pipe=lambda: deployed(load_pipeline(config, None, trust).to(run.engine.device)),
        call=call,
    )
    console.print(f"exported to {out}, verified by loading it into a fresh pipeline", highlight=False)


def convert(
    name: str, source: str, options: list[str], out: Path, *, plugins: list[str], console: Console
) -> None:
    """Converts released weights; see ``flowrl convert --help``."""
    for plugin in plugins:
        registry.load_plugin(plugin)
    _quiet()
    from flowrl.tools import convert as converting

    converting.convert(name, source, options, out, console)


def bench(family: str, repeats: int, as_json: bool, console: Console) -> None:
    """Measures what training costs, of a family of samplers."""
    if family not in ("flow", "discrete"):
        raise UserError(f"--family = {family!r}: flow or discrete")
    _quiet()
    if family == "flow":
        from flowrl.tools.bench import run_bench
    else:
        from flowrl.tools.bench_tokens import run_bench
    run_bench(repeats, as_json, console)


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
