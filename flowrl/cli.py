"""The command line: ``flowrl train | sample | eval | doctor | bench | report | export | convert | rewards``.

Nothing heavy is imported before a command needs it, so that ``--help`` and a wrong recipe answer at once.
Errors that are the user's to mend are one message and exit code 2.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from flowrl.errors import UserError

app = typer.Typer(
    name="flowrl",
    help="RL fine-tuning of diffusion and flow generative models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
rewards_app = typer.Typer(help="Reward models.", no_args_is_help=True)
app.add_typer(rewards_app, name="rewards")
console = Console()
errors = Console(stderr=True)

Recipe = Annotated[Path, typer.Argument(help="A recipe, e.g. configs/quickstart.yaml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides such as optimizer.lr=1e-4 or training.iterations=20.", show_default=False),
]
Plugin = Annotated[
    list[str] | None,
    typer.Option(help="A .py file or module whose @register lines add rewards, kernels, objectives, ..."),
]
Trust = Annotated[bool, typer.Option(help="Let a hub repository run its own Python code.")]
Resume = Annotated[
    str, typer.Option(help="auto: go on from the newest intact checkpoint; never: start a new run.")
]
Fresh = Annotated[bool, typer.Option(help="Delete what an earlier run of this name left.")]
Preflight = Annotated[bool, typer.Option(help="Run the short doctor check first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, nothing else.")]


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = "never",
    fresh: Fresh = False,
    allow_change: Annotated[bool, typer.Option(help="Resume although the recipe has changed.")] = False,
    preflight: Preflight = True,
    plugin: Plugin = None,
    trust_remote_code: Trust = False,
) -> None:
    """Fine-tune a model by a recipe; results go to runs/<recipe name>.

    Start several processes with `accelerate launch -m flowrl.cli train RECIPE`.
    """
    from flowrl import commands

    _choice("--resume", resume, ("auto", "never"))
    summary = commands.train(
        recipe,
        overrides or [],
        resume=resume == "auto",
        fresh=fresh,
        allow_change=allow_change,
        preflight=preflight,
        plugins=plugin or [],
        trust=trust_remote_code,
        console=console,
    )
    if summary["exit_code"]:
        raise typer.Exit(summary["exit_code"])


@app.command()
def distill(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = "never",
    fresh: Fresh = False,
    preflight: Preflight = True,
    plugin: Plugin = None,
    trust_remote_code: Trust = False,
) -> None:
    """Distil a model into a few-step student; the pipeline goes to runs/<recipe name>/pipeline.

    The student learns from samples of the model itself: a prompt file is all that is needed.
    """
    from flowrl import commands

    _choice("--resume", resume, ("auto", "never"))
    commands.distill(
        recipe,
        overrides or [],
        resume=resume == "auto",
        fresh=fresh,
        preflight=preflight,
        plugins=plugin or [],
        trust=trust_remote_code,
        console=console,
    )


Target = Annotated[
    Path,
    typer.Argument(
        help="A run folder (runs/quickstart), or a recipe for its base model.", show_default=False
    ),
]
Weights = Annotated[
    str, typer.Option(help="Of a run: auto (the average if one is kept), ema, trained, or base.")
]
WEIGHTS = ("auto", "ema", "trained", "base")


@app.command()
def sample(
    target: Target,
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("samples"),
    weights: Weights = "auto",
    plugin: Plugin = None,
    trust_remote_code: Trust = False,
) -> None:
    """Sample pictures with the pipeline as it would be deployed."""
    from flowrl import commands

    _choice("--weights", weights, WEIGHTS)
    commands.sample(
        target,
        overrides or [],
        prompts=prompt or [],
        count=count,
        seed=seed,
        out=out,
        weights=weights,
        plugins=plugin or [],
        trust=trust_remote_code,
        console=console,
    )


@app.command("eval")
def evaluate(
    target: Target,
    overrides: Overrides = None,
    weights: Weights = "auto",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    plugin: Plugin = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Score held-out prompts; the generation settings stand beside every score."""
    from flowrl import commands

    _choice("--weights", weights, WEIGHTS)
    commands.evaluate(
        target,
        overrides or [],
        weights=weights,
        plugins=plugin or [],
        trust=trust_remote_code,
        as_json=as_json,
        out=out,
        console=console,
    )


@app.command()
def doctor(
    recipe: Recipe,
    overrides: Overrides = None,
    plugin: Plugin = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Check a recipe: ratio and noise per step, groups, memory, rewards, guidance."""
    from flowrl import commands

    return commands.doctor(
        recipe,
        overrides or [],
        plugins=plugin or [],
        trust=trust_remote_code,
        as_json=as_json,
        console=console,
    )


@app.command()
def bench(
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats of every measurement.")] = 7,
    family: Annotated[str, typer.Option(help="flow: a whole iteration; discrete: token kernels.")] = "flow",
    as_json: AsJson = False,
) -> None:
    """Measure what training costs beyond the bare network calls, as ratios in one run."""
    from flowrl import commands

    commands.bench(family, repeats, as_json, console)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="File of the comparison.")] = None,
) -> None:
    """Write the self-contained HTML report of a run, or of several side by side."""
    from flowrl import commands

    commands.report(runs, out, console)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Option(help="A folder that does not exist yet.")],
    form: Annotated[str, typer.Option(help="lora: for load_lora_weights; pipeline: merged.")] = "lora",
    weights: Weights = "auto",
    plugin: Plugin = None,
    trust_remote_code: Trust = False,
) -> None:
    """Export a run for diffusers, verified by loading it afresh."""
    from flowrl import commands

    _choice("--form", form, ("lora", "pipeline"))
    _choice("--weights", weights, ("auto", "ema", "trained"))
    commands.export(
        run,
        out,
        form=form,
        weights=weights,
        plugins=plugin or [],
        trust=trust_remote_code,
        console=console,
    )


@app.command()
def convert(
    name: Annotated[str, typer.Argument(help="A converter: fudoki.")],
    source: Annotated[str, typer.Argument(help="A folder of safetensors with config.json, or a hub id.")],
    out: Annotated[Path, typer.Option(help="A folder that does not exist yet.")],
    options: Annotated[
        list[str] | None, typer.Argument(help="Its options, such as image_size=384.", show_default=False)
    ] = None,
    plugin: Plugin = None,
) -> None:
    """Convert released weights into a pipeline folder for model.path; nothing is unpickled."""
    from flowrl.commands import convert as run_convert

    run_convert(name, source, options or [], out, plugins=plugin or [], console=console)


@rewards_app.command("list")
def rewards_list(plugin: Plugin = None, as_json: AsJson = False) -> None:
    """List the registered rewards."""
    from flowrl import commands

    commands.rewards_list(plugin or [], as_json, console)


def _choice(option: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise UserError(f"{option} {value!r}: legal values are {', '.join(legal)}")


def guarded(run: Callable[[], Any]) -> int:
    """Runs a command; user errors become one message and exit code 2."""
    # Recent versions of typer carry a click of their own, so its errors are known by a public subclass.
    usage_error: Any = typer.BadParameter.__mro__[1]
    try:
        result = run()
    except UserError as error:
        errors.print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        return 2
    except FloatingPointError as error:
        errors.print(f"[bold red]stopped:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        return 3
    except typer.Abort:
        return 130
    except usage_error as error:
        error.show()
        return int(error.exit_code)
    return result if isinstance(result, int) else 0


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def main() -> None:
    """Entry point."""
    # Idle OpenMP threads that spin make every CPU run crawl as soon as the machine does anything else.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(
        level=os.environ.get("FLOWRL_LOG", "WARNING").upper(),
        format="%(message)s",
        handlers=[RichHandler(console=errors, show_path=False, show_time=False)],
    )
    sys.exit(guarded(lambda: app(standalone_mode=False)))


if __name__ == "__main__":
    main()
