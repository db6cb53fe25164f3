"""What every registered reward owes: whoever registers one is tested by these.

A reward that needs options, or images of its own kind, gets an entry in `EXAMPLES`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from flowrl import registry
from flowrl.errors import UserError
from flowrl.reward import RewardSet, Samples, WeightedReward
from flowrl.shapes import motion
from flowrl.shapes.domain import sample_scene
from flowrl.shapes.prompts import split_prompts
from flowrl.shapes.render import render

COUNT = 6
TOLERANCE = 1e-4


def photos() -> tuple[Samples, list[str], list[dict[str, Any]]]:
    """Smooth pictures of very different kinds, with plain prompts."""
    rough = torch.rand(COUNT, 3, 5, 5)
    smooth = F.interpolate(rough, size=(64, 64), mode="bicubic")
    noise = torch.rand(COUNT, 3, 64, 64) * torch.linspace(0, 1, COUNT).view(-1, 1, 1, 1)
    prompts = [f"a photo of {k} cats" for k in range(COUNT)]
    return Samples((smooth + noise).clamp(0, 1)), prompts, [{"prompt": p} for p in prompts]


def scenes() -> tuple[Samples, list[str], list[dict[str, Any]]]:
    """Scenes of the shapes domain, half of them with the wrong prompt."""
    records = [r for k, r in enumerate(split_prompts(held_out=True, per_tag=2)) if k % 2][:COUNT]
    rng = np.random.default_rng(0)
    drawn = [records[0], *records[:-1]]
    images = np.stack([render(sample_scene(record, rng), 64) for record in drawn])
    samples = Samples(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255)
    return samples, [record["prompt"] for record in records], records


def tiny_clip(folder: Path) -> dict[str, Any]:
    """Options with a small random model in open_clip's folder format."""
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "layers": 1, "width": 32, "head_width": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return {"model": str(folder), "device": "cpu", "clamp": False, "scale": 10.0}


@dataclass(frozen=True)
class Example:
    """How a reward is built and what it is shown; for a folder of its own `options` may be a function."""

    options: dict[str, Any] | Callable[[Path], dict[str, Any]] = field(default_factory=dict)
    inputs: Callable[[], tuple[Samples, list[str], list[dict[str, Any]]]] = photos


def answers() -> tuple[Samples, list[str], list[dict[str, Any]]]:
    """Answers to questions with a choice, half of them right."""
    records = [{"prompt": "red or blue", "answer": "red", "options": ["red", "blue"]}] * COUNT
    texts = tuple("red" if k % 2 else "blue" for k in range(COUNT))
    return Samples(torch.rand(COUNT, 3, 8, 8), texts=texts), [r["prompt"] for r in records], records


def moving_squares() -> tuple[Samples, list[str], list[dict[str, Any]]]:
    """Clips of moving squares, each a mixture of what was asked and of what the next one asks."""
    records = motion.split_prompts(held_out=True)[::9][:COUNT]
    rng = np.random.default_rng(0)
    made = np.stack([motion.draw_clip(record, 24, rng) for record in records])
    clips = torch.from_numpy(made).permute(0, 1, 4, 2, 3).float() / 255
    parts = torch.linspace(0.1, 0.6, COUNT).view(-1, 1, 1, 1, 1)
    samples = Samples(clips + parts * (clips.roll(1, 0) - clips), fps=motion.FPS)
    return samples, [record["prompt"] for record in records], records


EXAMPLES = {
    "trajectory": Example(inputs=moving_squares),
    "exact_match": Example(inputs=answers),
    "option_match": Example(inputs=answers),
    "scene": Example(inputs=scenes),
    "clip_score": Example(options=tiny_clip),
}
NAMES = registry.names("reward")


def chosen(samples: Samples, rows: Sequence[int]) -> Samples:
    texts = samples.texts and tuple(samples.texts[k] for k in rows)
    return Samples(samples.images[list(rows)], samples.fps, texts)


@dataclass(frozen=True)
class Case:
    reward: Any
    samples: Samples
    prompts: list[str]
    metadata: list[dict[str, Any]]
    scores: torch.Tensor


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.manual_seed(0)
    example = EXAMPLES.get(request.param, Example())
    options = example.options
    if callable(options):
        options = options(tmp_path_factory.mktemp(request.param))
    reward = registry.build("reward", {"name": request.param, **options}, "rewards.0")
    samples, prompts, metadata = example.inputs()
    return Case(reward, samples, prompts, metadata, reward(samples, prompts, metadata))


def test_there_are_rewards() -> None:
    assert {"scene", "clip_score", "jpeg_compressibility"} <= set(NAMES)
    assert set(EXAMPLES) <= set(NAMES)


def test_one_float32_score_for_each_sample_that_differs(case: Case) -> None:
    assert case.scores.shape == (len(case.samples),) and case.scores.dtype == torch.float32
    assert case.scores.isfinite().all() and not case.scores.requires_grad
    assert case.scores.max() - case.scores.min() > 10 * TOLERANCE, "a constant score teaches nothing"


def test_a_score_does_not_depend_on_its_batch(case: Case) -> None:
    for k in range(len(case.samples)):
        one = chosen(case.samples, [k])
        alone = case.reward(one, case.prompts[k : k + 1], case.metadata[k : k + 1])
        assert alone.item() == pytest.approx(case.scores[k].item(), abs=TOLERANCE)


def test_permuted_inputs_give_permuted_scores(case: Case) -> None:
    order = torch.randperm(len(case.samples)).tolist()
    moved = chosen(case.samples, order)
    scores = case.reward(moved, [case.prompts[k] for k in order], [case.metadata[k] for k in order])
    assert torch.allclose(scores, case.scores[order], atol=TOLERANCE)


def test_scores_repeat_and_inputs_stay(case: Case) -> None:
    images, metadata = case.samples.images.clone(), json.dumps(case.metadata)
    assert torch.equal(case.reward(case.samples, case.prompts, case.metadata), case.scores)
    assert torch.equal(case.samples.images, images) and json.dumps(case.metadata) == metadata


def test_a_set_of_rewards_takes_it(case: Case) -> None:
    table = RewardSet([WeightedReward("judge", case.reward, 1.0)])
    found = table.score(case.samples, case.prompts, case.metadata)
    assert torch.allclose(found[:, 0], case.scores, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_says_what_it_is(name: str) -> None:
    cls = registry.get("reward", name)
    text = " ".join((inspect.getdoc(cls) or "").split())
    assert text.split(".")[0] and "higher is better" in text
    assert inspect.getdoc(cls.Config) and inspect.getdoc(cls.__call__)
    module = inspect.getdoc(inspect.getmodule(cls)) or ""
    assert module.startswith(f"Reward ``{name}``")


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused(name: str) -> None:
    fields = registry.get("reward", name).Config.model_fields
    spec = {key: "x" for key, field_ in fields.items() if field_.is_required()}
    with pytest.raises(UserError, match=r"unknown key rewards\.0\.no_such_option"):
        registry.build("reward", {"name": name, **spec, "no_such_option": 1}, "rewards.0")
