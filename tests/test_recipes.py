"""Every recipe loads and resolves; those for large models train a tiny model of the same class."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY, TinyPipeline
from tiny_fewstep import FEWSTEP
from tiny_janus import fudoki_pipeline

from flowrl import registry
from flowrl.build import build_run
from flowrl.config import RunConfig, load
from flowrl.mdp.metric_path import MetricPath
from flowrl.mdp.token_paths import MixturePath, PathLevel

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
FUDOKI = TinyPipeline("fudoki", fudoki_pipeline, {"max_sequence_length": 96}, {}, {})
STAND_INS = {
    "sd35_medium": TINY["sd3"],
    "flux1_dev": TINY["flux"],
    "slas_flux": TINY["flux"],
    "qwen_image": TINY["qwen_image"],
    "wan21": TINY["wan"],
    "ddpo_sd15": FEWSTEP["sd14_pndm"].tiny,
    "slas_sd14": FEWSTEP["sd14_pndm"].tiny,
    "cm_grpo_sdxl_lcm": FEWSTEP["sdxl_lcm"].tiny,
    "cm_grpo_sana_sprint": FEWSTEP["sana_sprint_4"].tiny,
    "cm_grpo_flux_lcm": TINY["flux"],
    "dflow_grpo_fudoki_geneval": FUDOKI,
    "dflow_grpo_fudoki_pickscore": FUDOKI,  # ..._understanding: tests/test_fudoki_understanding.py
}
LARGE = [path for path in RECIPES if any(path.stem.startswith(prefix) for prefix in STAND_INS)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_resolves(path: Path) -> None:
    """Components exist and take their options; the prompt files are there; the paper is named."""
    config = load(path)
    kernel = registry.build("kernel", config.sampler.kernel, "sampler.kernel")
    steps = registry.build("steps", config.sampler.steps, "sampler.steps")
    registry.build("advantage", config.advantage, "advantage")
    objective = registry.build("objective", config.objective, "objective")
    if objective.unit == "trajectory":
        sigmas = [1 - k / config.sampler.num_steps for k in range(config.sampler.num_steps + 1)]
        if kernel.family == "tokens":
            metric = config.sampler.kernel["name"] == "discrete_metric"
            path = MetricPath(torch.eye(3)) if metric else MixturePath(3, "mask")
            sigmas = [PathLevel(sigma, path) for sigma in sigmas]
        stds = [kernel.std(a, b) for a, b in pairwise(sigmas)]
        assert steps.plan(0, stds, config.seed).trained
    for spec in [*config.rewards, *config.evaluation.rewards]:
        options = {k: v for k, v in spec.items() if k not in ("name", "weight", "label")}
        registry.parse(registry.get("reward", spec["name"]).Config, options, "rewards")
    for file in (config.data.train, config.data.held_out):
        assert file is None or (ROOT / file).is_file()
    assert "arXiv" in config.source
    assert config.description


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_trains_on_a_tiny_model_of_the_same_class(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two iterations: the first update starts at ratio 1 exactly, and weights move."""
    monkeypatch.chdir(ROOT)
    config = shrunk(path)
    tiny = stand_in(path)
    run = build_run(config, path, pipe=tiny.build())
    before = {name: p.detach().clone() for name, p in run.policy.parameters().items()}
    for _ in range(2):
        result = run.trainer.run_iteration()
        assert result.metrics["optimizer/skipped"] == 0
    assert run.trainer.state.ratio_first_max == 0
    moved = [name for name, p in run.policy.parameters().items() if not torch.equal(p, before[name])]
    assert len(moved) > len(before) / 4


def stand_in(path: Path) -> TinyPipeline:
    """The tiny pipeline of a recipe's class, with the scheduler that its checkpoint is released with."""
    return next(tiny for prefix, tiny in STAND_INS.items() if path.stem.startswith(prefix))


def shrunk(path: Path) -> RunConfig:
    """The recipe with a small size, a reward that needs no download, and the tiny pipeline's arguments."""
    tree: dict[str, Any] = load(path).model_dump()
    tiny = stand_in(path)
    cfg = tiny.cfg if "negative_prompt" in tree["sampler"]["guidance"] else tiny.no_cfg
    if isinstance(cfg.get("negative_prompt"), list):
        cfg = cfg | {"negative_prompt": cfg["negative_prompt"][0]}
    kept = ("num_frames", "intermediate_timesteps")
    call = tiny.call | {k: v for k, v in tree["model"]["call"].items() if k in kept}
    tree["model"] |= {"device": "cpu", "dtype": "fp32", "call": call, "gradient_checkpointing": False}
    tree["model"]["adapter"] |= {"rank": 2, "alpha": 4.0}
    tree["model"]["base_adapters"] = []
    tree["sampler"] |= {"guidance": cfg}
    tree["sampler"]["num_steps"] = min(tree["sampler"]["num_steps"], 8)
    tree["rewards"] = [{"name": "jpeg_compressibility"}]
    tree["data"]["held_out"] = None
    tree["optimizer"]["lr"] = 1e-3
    tree["training"] |= {
        "prompts_per_iteration": 2,
        "group_size": 2,
        "micro_batch_size": 2,
        "updates_per_pass": 1,
    }
    return RunConfig.model_validate(tree)
