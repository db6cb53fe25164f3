"""Compares methods on one task: several seeds each, at equal network evaluations.

    python docs/comparison.py quickstart --seeds 0 1 2 --jobs 2
    python docs/comparison.py fewstep --seeds 0 1 2 --jobs 2

Runs ``flowrl train`` for every method and seed (runs that have finished are kept), then prints a Markdown
table and draws the learning curves. Everything in docs/comparison.md and docs/fewstep.md comes from here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
HEADLINE = "scene_exact"
HEADER = (
    "method",
    "iterations",
    "training reward",
    "held-out exact",
    "gain ± sd",
    "final / best",
    "clip_score",
    "diversity",
)


@dataclass(frozen=True)
class Method:
    """A row of the table: a recipe and what is changed in it."""

    label: str
    recipe: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A table: its methods, and the budget as iterations of one of them."""

    methods: dict[str, Method]
    yardstick: str
    iterations: int


QUICKSTART = {
    "grpo_group": Method("GRPO, std of the group", "quickstart_grpo", ("advantage.std=group",)),
    "grpo_batch": Method("GRPO, std of the batch", "quickstart_grpo"),
    "grpo_none": Method("GRPO, no std", "quickstart_grpo", ("advantage.std=none",)),
    "slas_0.5": Method("SLAS, gamma 0.5", "quickstart_slas"),
    "slas_1.0": Method("SLAS, gamma 1", "quickstart_slas", ("advantage.gamma=1.0",)),
    "nft": Method("DiffusionNFT", "quickstart_nft"),
}
CM = "cm_grpo_shapes"
# 24 iterations are few for the recipe's own average of the weights.
SHORT = ("ema.decay=0.9", "evaluation.samples_per_prompt=3")
SDE = "sampler.kernel={{name: flow_sde, noise_level: {}}}"
FEWSTEP = {
    "consistency": Method("consistency (CM-GRPO)", CM, SHORT),
    "tcd_1.0": Method("TCD, eta 1", CM, (*SHORT, "sampler.kernel={name: tcd, eta: 1.0}")),
    "tcd_0.3": Method("TCD, eta 0.3", CM, (*SHORT, "sampler.kernel={name: tcd, eta: 0.3}")),
    "sde_0.3": Method("Flow-SDE, noise 0.3", CM, (*SHORT, SDE.format(0.3))),
    "sde_0.7": Method("Flow-SDE, noise 0.7", CM, (*SHORT, SDE.format(0.7))),
    "sde_1.0": Method("Flow-SDE, noise 1", CM, (*SHORT, SDE.format(1.0))),
}
COMPARISONS = {
    "quickstart": Comparison(QUICKSTART, "grpo_batch", 16),
    "fewstep": Comparison(FEWSTEP, "consistency", 24),
}
METHODS = QUICKSTART | FEWSTEP


def run(name: str, method: Method, seed: int, budget: int, args: argparse.Namespace) -> None:
    """Trains one method with one seed until it has used its network evaluations."""
    folder = args.out / f"{name}_{seed}"
    if (folder / "summary.json").exists():
        return
    iterations = round(budget / evaluations_per_iteration(method))
    every = max(1, iterations // 4)
    command = [
        shutil.which("flowrl", path=str(Path(sys.executable).parent)) or "flowrl",
        "train",
        str(ROOT / "configs" / f"{method.recipe}.yaml"),
        *method.overrides,
        f"name={folder.name}",
        f"output={folder.parent}",
        f"seed={seed}",
        f"training.iterations={iterations}",
        f"evaluation.every={every}",
        f"checkpoint.every={iterations}",
        "checkpoint.keep=1",
        "--no-preflight",
        "--fresh",
    ]
    log = args.out / f"{folder.name}.log"
    with log.open("w", encoding="utf-8") as file:
        subprocess.run(
            command,
            check=True,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
        )


def evaluations_per_iteration(method: Method) -> int:
    """Rows through the network in an iteration, forward only and forward with backward counted alike."""
    from flowrl import registry
    from flowrl.config import load

    config = load(ROOT / "configs" / f"{method.recipe}.yaml", list(method.overrides))
    objective = registry.build("objective", config.objective, "objective")
    rollout, passes = config.sampler.num_steps, config.training.inner_passes
    if objective.unit == "forward":  # old and new policy, once a unit each
        return config.training.samples * (rollout + 2 * passes * objective.units_per_micro_batch)
    selector = registry.build("steps", config.sampler.steps, "sampler.steps")
    trained = selector.plan(0, [1.0] * rollout, config.seed).trained
    return config.training.samples * (rollout + passes * len(trained))


def curve(folder: Path, key: str) -> tuple[list[int], list[float]]:
    """Iterations and values of a metric."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(r["iteration"], r[key]) for r in records if r.get(key) is not None]
    return [i for i, _ in found], [v for _, v in found]


def row(method: str, seeds: list[int], out: Path) -> str:
    """One line of the Markdown table: means over seeds, with the standard deviation of the headline."""
    summaries: list[dict[str, Any]] = []
    train: list[float] = []
    for seed in seeds:
        folder = out / f"{method}_{seed}"
        summaries.append(json.loads((folder / "summary.json").read_text()))
        rewards = curve(folder, "reward/scene_soft/raw_mean")[1]
        train.append(statistics.mean(rewards[-3:]) - statistics.mean(rewards[:3]))
    gains = [s["reward_after"] - s["reward_before"] for s in summaries]
    best = [max(curve(out / f"{method}_{s}", f"eval/{HEADLINE}/mean")[1]) for s in seeds]
    after = [s["reward_after"] for s in summaries]
    clip = [s["judges"]["clip_score"] for s in summaries]
    cells = [
        METHODS[method].label,
        str(summaries[0]["iterations"]),
        f"{statistics.mean(train):+.3f}",
        f"{statistics.mean(after):.3f}",
        f"{statistics.mean(gains):+.3f} ± {statistics.stdev(gains) if len(gains) > 1 else 0:.3f}",
        f"{statistics.mean(a / b for a, b in zip(after, best, strict=True)):.2f}",
        f"{statistics.mean(c['after'] - c['before'] for c in clip):+.3f}",
        f"{statistics.mean(s['diversity_after'] / s['diversity_before'] for s in summaries):.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def plot(methods: list[str], seeds: list[int], out: Path, file: Path) -> None:
    """Held-out score over the share of the budget: seeds thin, their mean thick."""
    figure, axes = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    for number, method in enumerate(methods):
        curves = [curve(out / f"{method}_{seed}", f"eval/{HEADLINE}/mean") for seed in seeds]
        share = [i / curves[0][0][-1] for i in curves[0][0]]
        for _, values in curves:
            axes.plot(share, values, color=f"C{number}", linewidth=0.6, alpha=0.5)
        mean = [statistics.mean(values) for values in zip(*(v for _, v in curves), strict=True)]
        # Dashes let a curve be seen that lies under another.
        style = "--" if number % 2 else "-"
        axes.plot(share, mean, style, color=f"C{number}", linewidth=2, label=METHODS[method].label)
    axes.set_xlabel("share of the network evaluations")
    axes.set_ylabel("held-out exact scene score")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Runs what is missing, then prints the table and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all of the table")
    parser.add_argument("--iterations", type=int, help="of its yardstick; the others get as many evaluations")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a run")
    parser.add_argument("--out", type=Path, default=Path("runs/comparison"))
    parser.add_argument("--figure", type=Path, help="default: docs/images/<comparison>_comparison.png")
    args = parser.parse_args()
    table = COMPARISONS[args.comparison]
    methods = args.methods or list(table.methods)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    budget = (args.iterations or table.iterations) * evaluations_per_iteration(METHODS[table.yardstick])
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [
            pool.submit(run, name, METHODS[name], seed, budget, args)
            for seed in args.seeds
            for name in methods
        ]
        for job in jobs:
            job.result()
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    lines += [row(method, args.seeds, args.out) for method in methods]
    sys.stdout.write("\n".join(lines) + "\n")
    figure = args.figure or ROOT / "docs" / "images" / f"{args.comparison}_comparison.png"
    plot(methods, args.seeds, args.out, figure)


if __name__ == "__main__":
    main()
