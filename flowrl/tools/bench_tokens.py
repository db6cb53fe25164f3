"""What scoring token steps costs beside the network, as ratios measured in one run.

The metric path's exact law is the dear one: V terms for every position. It is measured on random logits,
beside a forward of the model in assets/shapes-dfm. CPU time of one thread, the two sides interleaved.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl import registry
from flowrl.build import Run, build_run
from flowrl.config import load
from flowrl.mdp.metric_path import MetricPath
from flowrl.mdp.token_paths import MixturePath, PathLevel, TokenPath

TOKENS, LENGTH, ROWS = 256, 64, 4  # V, positions of a row, rows: 256 positions
RECIPE = Path(str(files("flowrl.configs"))) / "dflow_grpo_shapes_metric.yaml"
KERNELS = {
    "discrete_mixture, exact": ("mask", {"name": "discrete_mixture"}),
    "discrete_metric, exact": ("metric", {"name": "discrete_metric"}),
    "discrete_metric, rate_mc 24": ("metric", {"name": "discrete_metric", "estimator": "rate_mc"}),
}


def run_bench(repeats: int, as_json: bool, console: Console) -> dict[str, Any]:
    """Measures of each kernel the time of a step over that of a forward, and its largest tensor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures: dict[str, Any] = {"threads": 1, "repeats": repeats, "torch": torch.__version__}
        forward = _forward(build_run(load(RECIPE), recipe=RECIPE))
        figures["kernels"] = {name: _kernel(*KERNELS[name], forward, repeats) for name in KERNELS}
    finally:
        torch.set_num_threads(threads)
    if as_json:
        console.print_json(json.dumps(figures))
    else:
        _print(figures, console)
    return figures


def _kernel(
    kind: str, options: dict[str, Any], forward: Callable[[], None], repeats: int
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    path: TokenPath = MixturePath(TOKENS, "mask")
    if kind == "metric":
        path = MetricPath(torch.randn(TOKENS, 8, generator=generator))
    kernel = registry.build("kernel", options, "sampler.kernel")
    tokens = path.noised(
        torch.randint(TOKENS, (ROWS, LENGTH), generator=generator), torch.full((ROWS,), 0.5), generator
    )
    logits = torch.randn(ROWS, LENGTH, TOKENS, generator=generator)
    sigma, sigma_next = PathLevel(0.5, path), PathLevel(0.375, path)

    def step() -> None:
        transition = kernel(path.log_posterior(logits, tokens), tokens, sigma, sigma_next)
        noise = torch.randn(ROWS, *transition.noise_shape, generator=generator)
        transition.log_prob(transition.sample(noise))

    step()  # makes the tables of the step, which are kept
    forward()
    pairs = [(_seconds(step), _seconds(forward)) for _ in range(repeats)]
    with LargestTensor() as largest, torch.no_grad():
        step()
    ratios = [ours / theirs for ours, theirs in pairs]
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "step_ms": 1000 * statistics.median(ours for ours, _ in pairs),
        "forward_ms": 1000 * statistics.median(theirs for _, theirs in pairs),
        "largest_tensor": largest.size / (TOKENS * TOKENS * LENGTH * ROWS),
    }


def _forward(run: Run) -> Callable[[], None]:
    """A forward of the model's network alone, on four rows."""
    network: Any = run.wrapper.networks["transformer"]
    prompts = [str(row) for row in range(ROWS)]
    states, mask, *_ = run.wrapper.pipe.encode_prompt(prompts)
    inputs = {
        "hidden_states": torch.zeros(ROWS, LENGTH, dtype=torch.long),
        "encoder_hidden_states": states,
        "timestep": torch.full((ROWS,), 0.5),
        "encoder_attention_mask": mask,
    }

    def forward() -> None:
        with torch.no_grad():
            network(**inputs)

    return forward


def _seconds(call: Callable[[], None]) -> float:
    """CPU time of a call, the mean of ten."""
    started = time.process_time()
    for _ in range(10):
        call()
    return (time.process_time() - started) / 10


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        """Has seen none."""
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and looks at its results."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.size = max(self.size, value.untyped_storage().nbytes() // value.element_size())
        return result


def _print(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="flowrl bench --family discrete: 256 positions, 256 tokens", title_justify="left")
    for heading in ("kernel", "step / forward", "bar", "step, ms", "largest tensor / (V V positions)"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for name, found in figures["kernels"].items():
        bar = "<= 0.20" if name == "discrete_metric, exact" else ""
        ratio = f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"
        table.add_row(name, ratio, bar, f"{found['step_ms']:.1f}", f"{found['largest_tensor']:.4f}")
    console.print(table)
