"""What ``flowrl doctor`` says of recipes for few-step and diffusion models, right and wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_recipes import ROOT, shrunk, stand_in
from tiny import TINY

from flowrl.build import Run, build_run
from flowrl.config import RunConfig
from flowrl.errors import UserError
from flowrl.tools.doctor import Diagnosis, examine, print_diagnosis


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def built(recipe: str, pipe: Any = None, **sections: dict[str, Any]) -> Run:
    path = Path(ROOT / "configs" / f"{recipe}.yaml")
    tree = shrunk(path).model_dump()
    for section, values in sections.items():
        tree[section] = tree[section] | values if isinstance(tree[section], dict) else values
    return build_run(RunConfig.model_validate(tree), path, pipe=pipe or stand_in(path).build())


def shown(diagnosis: Diagnosis) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    print_diagnosis(diagnosis, console)
    return console.export_text()


def test_the_transitions_of_a_few_step_model() -> None:
    """Levels in flow coordinates, stds of the sampler's own states; three of four steps have a density."""
    run = built("cm_grpo_sdxl_lcm", sampler={"steps": {"name": "all"}})
    diagnosis = examine(run)
    rows = diagnosis.facts["schedule"]
    assert [row["trained"] for row in rows] == [True, True, True, False]
    bars = run.wrapper.pipe.scheduler.alphas_cumprod
    assert [row["std"] for row in rows[:3]] == pytest.approx(
        [float((1 - bars[time]).sqrt()) for time in (759, 499, 259)], rel=1e-6
    )
    assert rows[3]["std"] == 0 and rows[3]["gradient_factor"] is None and rows[3]["sigma_next"] == 0
    for row, time, following in zip(rows, (999, 759, 499), (759, 499, 259), strict=False):
        # d mean / d eps = sqrt(a') sqrt(1 - a) / sqrt(a), over the std
        bar, after = float(bars[time]), float(bars[following])
        factor = (after * (1 - bar) / bar / (1 - after)) ** 0.5
        assert row["gradient_factor"] == pytest.approx(factor, rel=1e-3)
    assert diagnosis.facts["ratio"]["max"] == 0 and not diagnosis.problems
    lines = [line for line in shown(diagnosis).splitlines() if "│" in line]
    assert sum(" yes " in line for line in lines[:4]) == 3


@pytest.mark.parametrize("recipe", ["cm_grpo_sdxl_lcm", "cm_grpo_flux_lcm"])
def test_g37_a_one_step_recipe_is_refused_with_the_reason(recipe: str) -> None:
    with pytest.raises(UserError, match=r"straight to the data, a point without a density.*num_steps of 2"):
        built(recipe, sampler={"num_steps": 1})


def test_g32_a_ddim_recipe_with_a_flow_model_is_refused() -> None:
    for recipe in ("ddpo_sd15", "slas_sd14"):
        with pytest.raises(UserError, match=r"FlowMatchEulerDiscreteScheduler.*its samples would be noise"):
            built(recipe, pipe=TINY["sd3"].build())
    with pytest.raises(UserError, match=r"model\.wrapper diffusion.*a flow model needs model\.wrapper"):
        built("ddpo_sd15", pipe=TINY["sd3"].build(), model=_keeping("ddpo_sd15"))


def _keeping(recipe: str) -> dict[str, Any]:
    """The recipe's model section, with the pipeline's own scheduler."""
    return {"wrapper": {"name": "diffusion"}} | {
        "call": shrunk(ROOT / "configs" / f"{recipe}.yaml").model.call
    }


def test_stale_samples_need_the_ratio() -> None:
    """Refused for more passes; a warning for more updates a pass; silence for the ratio form."""
    with pytest.raises(UserError, match=r"training\.inner_passes = 2.*no importance ratio.*form=ratio"):
        built("cm_grpo_flux_lcm", training={"inner_passes": 2})
    several = {"updates_per_pass": 2}
    warnings = examine(built("cm_grpo_flux_lcm", training=several), short=True).warnings
    assert (
        sum("training.updates_per_pass = 2: the objective has no importance ratio" in w for w in warnings)
        == 1
    )
    ratio = {"name": "cm_grpo", "form": "ratio"}
    warnings = examine(built("cm_grpo_flux_lcm", training=several, objective=ratio), short=True).warnings
    assert not any("importance ratio" in warning for warning in warnings)
    built("cm_grpo_flux_lcm", training={"inner_passes": 2}, objective=ratio)


@pytest.mark.parametrize(
    ("recipe", "why"), [("cm_grpo_flux_lcm", "undoes a few-step distillation"), ("ddpo_sd15", "velocity")]
)
@pytest.mark.parametrize("objective", ["nft", "awm"])
def test_g38_matching_objectives_need_a_flow(recipe: str, why: str, objective: str) -> None:
    with pytest.raises(UserError, match=rf"objective '{objective}' on model\.wrapper.*{why}.*use grpo or cm"):
        built(recipe, objective={"name": objective})


def test_a_deterministic_kernel_is_refused() -> None:
    for kernel in ({"name": "tcd", "eta": 0.0}, {"name": "ddim", "eta": 0.0}):
        with pytest.raises(UserError, match=r"is deterministic.*consistency, ddim, or tcd with eta above 0"):
            built("cm_grpo_flux_lcm", sampler={"kernel": kernel})
