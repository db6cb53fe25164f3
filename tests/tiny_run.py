"""Whole runs of a recipe on tiny pipelines, for the tests of the loop and of the evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny import NEGATIVE, TINY
from torch import Tensor

from flowrl.build import Run, build_run
from flowrl.config import load
from flowrl.reward import RewardSet, Samples, WeightedReward

ROOT = Path(__file__).parent.parent
Score = Callable[[Samples, Sequence[str], Sequence[dict[str, Any]]], Tensor]
BASE = (
    "model.device=cpu",
    "model.adapter={kind: lora, rank: 4, alpha: 8}",
    f"data.train={ROOT / 'assets/prompts/objects_train.jsonl'}",
    f"data.held_out={ROOT / 'assets/prompts/objects_heldout.jsonl'}",
    "rewards=[{name: jpeg_compressibility}]",
    "evaluation.rewards=[]",
    "evaluation.batch_size=2",
    "evaluation.samples_per_prompt=1",
    "evaluation.max_prompts=3",
    "ema.decay=0",
    "sampler.num_steps=3",
    "sampler.steps={name: all}",
    "optimizer.lr=1e-3",
    "training.prompts_per_iteration=2",
    "training.group_size=4",
    "training.micro_batch_size=4",
    "training.updates_per_pass=1",
)


def tiny_run(
    *overrides: str, recipe: str = "quickstart_grpo", tiny: str = "sd3_no_t5", cfg: bool = False
) -> Run:
    """A built run of a recipe with a tiny pipeline in place of its model; guidance off unless `cfg`."""
    entry = TINY[tiny]
    guidance = entry.cfg | {"negative_prompt": NEGATIVE} if cfg else entry.no_cfg
    own = [f"model.call={json.dumps(entry.call)}", f"sampler.guidance={json.dumps(guidance)}"]
    config = load(ROOT / "configs" / f"{recipe}.yaml", [*BASE, *own, *overrides])
    return build_run(config, pipe=entry.build())


def brightness(samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
    """The mean of all pixels of each sample."""
    return samples.images.flatten(1).mean(dim=1)


def by_position(scores: Sequence[float]) -> Score:
    """A reward that deals out the scores given, in order, whatever the samples."""
    left = iter(scores)

    def given(samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        return torch.tensor([next(left) for _ in prompts])

    return given


def judged_by(run: Run, *scores: Score) -> Run:
    """The run with rewards of a test in place of its recipe's, each with weight 1."""
    run.trainer.rewards = RewardSet([WeightedReward(s.__name__, s, 1.0) for s in scores])
    return run


def weights(run: Run) -> dict[str, Tensor]:
    """A copy of the trained weights."""
    return {name: p.detach().clone() for name, p in run.policy.parameters().items()}


@contextmanager
def gradients(run: Run) -> Iterator[list[dict[str, Tensor]]]:
    """Fills a list with the gradients that reach each optimizer step, as the optimizer sees them."""
    seen: list[dict[str, Tensor]] = []

    def copy(*_: Any) -> None:
        named = run.policy.parameters().items()
        seen.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})

    handle = run.trainer.optimizer.register_step_pre_hook(copy)
    try:
        yield seen
    finally:
        handle.remove()


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """|first - second| over |second|, over all tensors together."""
    assert first.keys() == second.keys()
    a, b = (torch.cat([side[name].flatten().double() for name in second]) for side in (first, second))
    return float((a - b).norm() / b.norm())
