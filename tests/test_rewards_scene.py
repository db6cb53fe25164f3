"""The scene reward: right scenes score 1, every kind of mistake is seen, and the soft score is graded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from flowrl import registry
from flowrl.errors import UserError
from flowrl.reward import Samples
from flowrl.rewards.scene import MAX_WANTED, mean_by_tag, scene_scores
from flowrl.shapes.domain import BACKGROUND, COLORS, PALETTE, SHAPES, Scene, SceneObject, sample_scene
from flowrl.shapes.prompts import TAGS, all_prompts
from flowrl.shapes.render import render

Record = dict[str, Any]
RED_CIRCLE = SceneObject("circle", "red", 0.3, 0.5, 0.16)
BLUE_SQUARE = SceneObject("square", "blue", 0.7, 0.5, 0.16)
PAIR: Record = {
    "tag": "color_attr",
    "prompt": "a photo of a red circle and a blue square",
    "include": [
        {"class": "circle", "count": 1, "color": "red"},
        {"class": "square", "count": 1, "color": "blue"},
    ],
    "exclude": [
        {"class": "circle", "count": 2},
        {"class": "square", "count": 2},
        {"class": "triangle", "count": 1},
    ],
}
SQUARE_LEFT: Record = {
    "include": [
        {"class": "circle", "count": 1},
        {"class": "square", "count": 1, "position": ["left of", 0]},
    ],
}


def tensor(*images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255


def score(image: np.ndarray | Scene, record: Record) -> tuple[float, float]:
    pixels = render(image, 64) if isinstance(image, tuple) else image
    scores = scene_scores(tensor(pixels), [record])
    return float(scores["soft"]), float(scores["exact"])


def drawn(tag: str | None, count: int, seed: int = 0) -> tuple[list[Scene], list[Record]]:
    rng = np.random.default_rng(seed)
    pool = [record for record in all_prompts() if tag in (None, record["tag"])]
    records = [pool[rng.integers(len(pool))] for _ in range(count)]
    return [sample_scene(record, rng) for record in records], records


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("noise", [0, 15])
def test_right_scenes_score_one(tag: str, noise: float) -> None:
    scenes, records = drawn(tag, 300)
    rng = np.random.default_rng(1)
    images = [np.rint(render(scene, 64) + rng.normal(0, noise, (64, 64, 3))) for scene in scenes]
    scores = scene_scores(tensor(*images).clamp(0, 1), records)
    assert scores["exact"].mean() >= (0.99 if noise else 1)
    assert scores["soft"].mean() > 0.99
    assert scores["soft"].quantile(0.02) > 0.97


@pytest.mark.parametrize("size", [32, 48, 100, 256])
def test_any_resolution_will_do(size: int) -> None:
    scenes, records = drawn(None, 60)
    scores = scene_scores(tensor(*[render(scene, size) for scene in scenes]), records)
    assert scores["exact"].mean() == 1
    assert scores["soft"].min() > 0.85


def _other(value: str, values: tuple[str, ...]) -> str:
    return values[(values.index(value) + 1) % len(values)]


def _wrong_color(scene: Scene, record: Record) -> Scene | None:
    if "color" not in record["include"][0]:
        return None
    return (replace(scene[0], color=_other(scene[0].color, COLORS)), *scene[1:])


def _wrong_shape(scene: Scene, record: Record) -> Scene:
    return (replace(scene[0], shape=_other(scene[0].shape, SHAPES)), *scene[1:])


def _one_missing(scene: Scene, record: Record) -> Scene:
    return scene[:-1]


def _turned_round(scene: Scene, record: Record) -> Scene | None:
    if record["tag"] != "position":
        return None
    return tuple(replace(item, x=1 - item.x, y=1 - item.y) for item in scene)


def _colors_swapped(scene: Scene, record: Record) -> Scene | None:
    if record["tag"] != "color_attr":
        return None
    return (replace(scene[0], color=scene[1].color), replace(scene[1], color=scene[0].color))


def _one_too_many(scene: Scene, record: Record) -> Scene | None:
    extra = SceneObject("triangle", "green", 0.0, 0.0, 0.14)
    for x, y in itertools.product((0.2, 0.5, 0.8), repeat=2):
        if all(np.hypot(x - item.x, y - item.y) > item.radius + 0.2 for item in scene):
            return (*scene, replace(extra, x=x, y=y))
    return None


@pytest.mark.parametrize(
    "mistake",
    [_wrong_color, _wrong_shape, _one_missing, _turned_round, _colors_swapped, _one_too_many],
    ids=lambda mistake: mistake.__name__.strip("_"),
)
def test_every_mistake_is_seen(mistake: Callable[[Scene, Record], Scene | None]) -> None:
    scenes, records = drawn(None, 150)
    cases = [(mistake(scene, record), record) for scene, record in zip(scenes, records, strict=True)]
    cases = [(scene, record) for scene, record in cases if scene is not None]
    assert len(cases) >= 8
    scores = scene_scores(tensor(*[render(scene, 64) for scene, _ in cases]), [r for _, r in cases])
    assert scores["exact"].max() == 0
    assert scores["soft"].max() < 0.85
    assert scores["soft"].mean() < 0.7


@pytest.mark.parametrize("color", [BACKGROUND, *PALETTE.values(), (128, 128, 128)])
def test_a_plain_canvas_scores_nothing(color: tuple[int, int, int]) -> None:
    for record in all_prompts()[::100]:
        assert score(np.full((64, 64, 3), color, np.uint8), record) == (0, 0)


def test_noise_scores_nothing() -> None:
    rng = np.random.default_rng(0)
    fine = rng.integers(0, 256, (20, 64, 64, 3)).astype(np.uint8)
    coarse = [cv2.resize(image[:12, :12], (64, 64), interpolation=cv2.INTER_CUBIC) for image in fine]
    _, records = drawn(None, 40)
    scores = scene_scores(tensor(*fine, *coarse), records)
    assert scores["exact"].max() == 0
    assert scores["soft"].max() < 0.05


def test_soft_credits_each_part() -> None:
    right = score((RED_CIRCLE, BLUE_SQUARE), PAIR)[0]
    one_wrong = score((RED_CIRCLE, replace(BLUE_SQUARE, color="yellow")), PAIR)[0]
    both_wrong = score((replace(RED_CIRCLE, color="blue"), replace(BLUE_SQUARE, color="red")), PAIR)[0]
    alone = score((RED_CIRCLE,), PAIR)[0]
    assert right == pytest.approx(1) and 0.9 * right > one_wrong > alone > both_wrong > 0


def test_soft_follows_a_color_on_its_way() -> None:
    scores = []
    for share in np.linspace(0, 1, 9):
        image = render((RED_CIRCLE, BLUE_SQUARE), 64).astype(float)
        other = render((replace(RED_CIRCLE, color="green"), BLUE_SQUARE), 64)
        scores.append(score(np.rint(image + share * (other - image)).astype(np.uint8), PAIR)[0])
    assert scores[0] > 0.95 and scores[-1] < 0.75
    assert all(b <= a + 0.01 for a, b in itertools.pairwise(scores))


def test_soft_follows_a_shape_on_its_way() -> None:
    ys, xs = np.mgrid[:64, :64] / 64
    scores = []
    for power in (40, 12, 6, 4, 3, 2.5, 2):
        image = render((RED_CIRCLE,), 64).copy()
        inside = np.abs((xs - 0.7) / 0.136) ** power + np.abs((ys - 0.5) / 0.136) ** power <= 1
        image[inside] = PALETTE["blue"]
        scores.append(score(image, PAIR)[0])
    assert scores[0] > 0.95 and scores[-1] < 0.8
    assert all(b <= a + 0.01 for a, b in itertools.pairwise(scores))


def test_soft_follows_an_object_on_its_way() -> None:
    scores = [
        score(
            (replace(RED_CIRCLE, x=0.5), replace(BLUE_SQUARE, x=x, y=0.2 if 0.2 < x < 0.8 else 0.5)),
            SQUARE_LEFT,
        )[0]
        for x in (0.85, 0.7, 0.6, 0.5, 0.45, 0.3)
    ]
    assert scores[-1] == pytest.approx(1)
    assert all(b >= a - 0.01 for a, b in itertools.pairwise(scores)) and scores[0] < 0.7


def test_soft_falls_with_blur_and_with_opacity() -> None:
    image = render((RED_CIRCLE, BLUE_SQUARE), 64)
    blurred = [score(cv2.GaussianBlur(image, (0, 0), sigma), PAIR)[0] for sigma in (0.5, 2, 3, 4, 6)]
    assert blurred[0] > 0.95 and blurred[-1] < 0.6
    assert all(b <= a + 0.01 for a, b in itertools.pairwise(blurred))
    faded = [
        score(np.rint(image * share + np.array(BACKGROUND) * (1 - share)).astype(np.uint8), PAIR)[0]
        for share in (1, 0.8, 0.6, 0.4, 0.2)
    ]
    assert faded[0] > 0.95 and faded[-1] < 0.3
    assert all(b <= a + 0.01 for a, b in itertools.pairwise(faded))


def test_half_an_object_is_none() -> None:
    image = render((RED_CIRCLE, BLUE_SQUARE), 64).copy()
    image[:, : round(0.3 * 64)] = BACKGROUND
    soft, exact = score(image, PAIR)
    assert exact == 0 and soft < 0.8


def test_a_blot_and_a_backdrop_cost() -> None:
    image = render((RED_CIRCLE, BLUE_SQUARE), 64).copy()
    image[:8] = (120, 150, 120)
    assert score(image, PAIR)[0] < 0.6
    on_black = np.where((np.abs(image.astype(int) - 232).max(-1) < 3)[..., None], np.uint8(25), image)
    assert score(on_black, PAIR)[0] < 0.2


def test_a_record_without_exclude_permits_more() -> None:
    """As in GenEval's own files, where most tags exclude nothing."""
    more = (RED_CIRCLE, BLUE_SQUARE, SceneObject("triangle", "green", 0.5, 0.2, 0.14))
    record = {key: value for key, value in PAIR.items() if key != "exclude"}
    assert score(more, record) == (pytest.approx(1), 1)
    assert score(more, PAIR)[1] == 0


def test_a_geneval_counting_record() -> None:
    record = {
        "tag": "counting",
        "include": [{"class": "circle", "count": 2}],
        "exclude": [{"class": "circle", "count": 3}],
        "prompt": "a photo of two circles",
    }
    circles = [SceneObject("circle", "red", x, 0.3, 0.14) for x in (0.2, 0.5, 0.8)]
    assert [score(tuple(circles[:n]), record)[1] for n in (1, 2, 3)] == [0, 1, 0]
    assert score((*circles[:2], replace(BLUE_SQUARE, y=0.75)), record)[1] == 1


def test_position_is_judged_by_the_centres() -> None:
    assert score((replace(RED_CIRCLE, x=0.7), replace(BLUE_SQUARE, x=0.3)), SQUARE_LEFT)[1] == 1
    assert score((RED_CIRCLE, BLUE_SQUARE), SQUARE_LEFT)[1] == 0
    near = (replace(RED_CIRCLE, x=0.5, y=0.25), replace(BLUE_SQUARE, x=0.45, y=0.7))
    assert score(near, SQUARE_LEFT)[1] == 0  # left by 0.05, less than the margin


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"include": [{"class": "giraffe", "count": 1}]}, "include.class = 'giraffe'; legal: circle, square"),
        ({"include": [{"class": "circle", "count": 1, "color": "pink"}]}, "include.color = 'pink'"),
        ({"exclude": [{"class": "cow", "count": 1}]}, "exclude.class = 'cow'"),
        ({"include": []}, "has no `include`"),
        ({"include": [{"class": "circle", "count": MAX_WANTED + 1}]}, "objects, got 7"),
        (
            {
                "include": [
                    {"class": "circle", "count": 1},
                    {"class": "square", "count": 1, "position": ["near", 0]},
                ]
            },
            "include.position = 'near'; legal: left of",
        ),
        (
            {"include": [{"class": "circle", "count": 1, "position": ["above", 0]}]},
            "include.position index = 0",
        ),
    ],
)
def test_records_that_cannot_be_verified_are_refused(change: Record, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score((RED_CIRCLE,), {**PAIR, **change})


@pytest.mark.parametrize("shape", [(1, 3, 31, 31), (1, 3, 64, 48), (1, 2, 3, 64, 64), (1, 1, 64, 64)])
def test_other_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="square images"):
        scene_scores(torch.zeros(shape), [PAIR])


def test_one_record_for_each_image_is_needed() -> None:
    with pytest.raises(UserError, match="2 images but 1 metadata records"):
        scene_scores(torch.zeros(2, 3, 64, 64), [PAIR])


def test_modes_are_the_two_scores() -> None:
    scenes, records = drawn(None, 12)
    records = records[1:] + records[:1]
    samples = Samples(tensor(*[render(scene, 64) for scene in scenes]))
    both = scene_scores(samples.images, records)
    for mode, expected in both.items():
        reward = registry.build("reward", {"name": "scene", "mode": mode}, "rewards.0")
        assert torch.equal(reward(samples, [""] * 12, records), expected)


def test_means_by_tag() -> None:
    records = [{"tag": "colors"}, {"tag": "colors"}, {"tag": "counting"}]
    means = mean_by_tag(torch.tensor([1.0, 0.0, 0.25]), records)
    assert means == pytest.approx({"colors": 0.5, "counting": 0.25, "overall": 0.375})
