"""The shapes domain: prompts and their split, drawn scenes, the renderer, and the detector."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

from flowrl.shapes.detector import Detection, detect, read_scene
from flowrl.shapes.domain import (
    BACKGROUND,
    COLORS,
    GAP,
    MARGIN,
    PALETTE,
    POSITION_MARGIN,
    RELATIONS,
    SHAPES,
    Scene,
    SceneObject,
    sample_scene,
)
from flowrl.shapes.prompts import TAGS, TEMPLATES, all_prompts, split_prompts, write_jsonl
from flowrl.shapes.render import render

CENTRE = SceneObject("circle", "red", 0.5, 0.5, 0.16)


def one(shape: str, color: str = "red", x: float = 0.5, y: float = 0.5, radius: float = 0.16) -> Scene:
    return (SceneObject(shape, color, x, y, radius),)


def sole(image: np.ndarray) -> Detection:
    (found,) = detect(image)
    return found


# Prompts


def test_every_prompt_is_there_once_and_has_a_known_tag() -> None:
    records = all_prompts()
    assert len({record["prompt"] for record in records}) == len(records) == 240 * len(TEMPLATES)
    assert {record["tag"] for record in records} == set(TAGS)


def test_train_and_held_out_are_disjoint_and_complete() -> None:
    train, held_out = ({r["prompt"] for r in split_prompts(held_out=h)} for h in (False, True))
    assert not train & held_out
    assert train | held_out == {record["prompt"] for record in all_prompts()}
    assert len(held_out) / (len(held_out) + len(train)) == pytest.approx(0.25, abs=0.01)


def test_a_shorter_split_is_part_of_the_whole() -> None:
    few = split_prompts(held_out=True, per_tag=3)
    assert max(Counter(record["tag"] for record in few).values()) == 3
    assert all(record in split_prompts(held_out=True) for record in few)


def test_prompts_survive_a_file(tmp_path: Path) -> None:
    records = split_prompts(held_out=True, per_tag=2)
    write_jsonl(records, tmp_path / "prompts.jsonl")
    assert [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()] == records


def test_exclude_bounds_every_shape() -> None:
    for record in all_prompts():
        wanted = Counter({shape: 0 for shape in SHAPES})
        for entry in record["include"]:
            wanted[entry["class"]] += entry["count"]
        assert {e["class"]: e["count"] - 1 for e in record["exclude"]} == wanted


# Scenes


@pytest.mark.parametrize("tag", TAGS)
def test_a_drawn_scene_satisfies_its_prompt(tag: str) -> None:
    rng = np.random.default_rng(0)
    for record in [r for r in all_prompts() if r["tag"] == tag][::7]:
        scene = sample_scene(record, rng)
        entries = [entry for entry in record["include"] for _ in range(entry["count"])]
        assert [item.shape for item in scene] == [entry["class"] for entry in entries]
        for item, entry in zip(scene, entries, strict=True):
            assert item.color == entry.get("color", item.color)
            assert MARGIN + item.radius <= min(item.x, item.y, 1 - item.x, 1 - item.y) + 1e-9
            if "position" in entry:
                dx, dy = RELATIONS[entry["position"][0]]
                assert (item.x - scene[0].x) * dx + (item.y - scene[0].y) * dy > 2 * POSITION_MARGIN
        for k, a in enumerate(scene):
            assert all(math.hypot(a.x - b.x, a.y - b.y) >= a.radius + b.radius + GAP for b in scene[:k])


def test_scenes_follow_their_seed() -> None:
    record = all_prompts()[-1]
    first, again, other = (sample_scene(record, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_prompt_without_room_is_refused() -> None:
    crowd = {"prompt": "a crowd", "include": [{"class": "circle", "count": 40}]}
    with pytest.raises(ValueError, match="no layout fits the prompt 'a crowd'"):
        sample_scene(crowd, np.random.default_rng(0), max_tries=2)


# Renderer


@pytest.mark.parametrize("shape", SHAPES)
def test_rendered_area_and_colour(shape: str) -> None:
    image = render(one(shape, "blue"), size=128)
    radius = 0.16
    area = {
        "circle": math.pi * radius**2,
        "square": (2 * 0.85 * radius) ** 2,
        "triangle": 3 * math.sqrt(3) / 4 * radius**2,
    }[shape]
    assert image.dtype == np.uint8 and image.shape == (128, 128, 3)
    assert tuple(image[64, 64]) == PALETTE["blue"] and tuple(image[0, 0]) == BACKGROUND
    assert np.mean(np.abs(image.astype(int) - BACKGROUND).sum(-1) > 150) == pytest.approx(area, rel=0.08)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown shape 'star'"):
        render(one("star"))


# Detector


@pytest.mark.parametrize("size", [32, 48, 64, 100, 256])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("color", COLORS)
def test_one_object_is_found_where_it_is(shape: str, color: str, size: int) -> None:
    found = sole(render(one(shape, color, 0.3, 0.62, 0.15), size))
    assert (found.shape, found.color, found.sure) == (shape, color, True)
    assert math.hypot(found.x - 0.3, found.y - 0.62) < 0.008
    assert found.color_scores[color] == max(found.color_scores.values()) > 0.99
    assert found.shape_scores[shape] > 0.84


@pytest.mark.parametrize("size", [32, 64, 128])
def test_scenes_are_read_back_under_noise(size: int) -> None:
    rng = np.random.default_rng(3)
    records = all_prompts()
    right = 0
    for _ in range(100):
        scene = sample_scene(records[rng.integers(len(records))], rng)
        noisy = render(scene, size) + rng.normal(0, 15, (size, size, 3))
        found = detect(np.rint(noisy).clip(0, 255).astype(np.uint8))
        right += Counter((d.shape, d.color) for d in found) == Counter((o.shape, o.color) for o in scene)
    assert right >= 99


def test_squares_that_touch_at_a_corner_are_two() -> None:
    scene = (*one("square", "green", 0.35, 0.35), *one("square", "green", 0.615, 0.615))
    assert [d.shape for d in detect(render(scene, 64))] == ["square", "square"]


@pytest.mark.parametrize("color", [BACKGROUND, *PALETTE.values(), (120, 130, 140)])
def test_a_plain_canvas_holds_no_object(color: tuple[int, int, int]) -> None:
    reading = read_scene(np.full((64, 64, 3), color, np.uint8))
    assert reading.objects == ()
    assert reading.clutter == 0 if color == BACKGROUND else reading.clutter > 0.5


def test_clutter_is_what_is_neither_background_nor_object() -> None:
    image = render((CENTRE,), 64)
    assert read_scene(image).clutter < 0.001
    smeared = image.copy()
    smeared[:16] = PALETTE["black"]  # too large for an object
    assert read_scene(smeared).clutter == pytest.approx(0.25)
    blurred = [read_scene(cv2.GaussianBlur(image, (0, 0), sigma)).clutter for sigma in (1, 2, 3, 4)]
    assert blurred == sorted(blurred) and blurred[-1] > 0.005


def test_a_half_object_is_not_sure_of_its_shape() -> None:
    image = render((CENTRE,), 64).copy()
    image[:, 32:] = BACKGROUND
    assert not sole(image).sure


def test_overlap_falls_from_one_shape_to_the_next() -> None:
    """Circle to square by a superellipse: the scores cross once and monotonically."""
    ys, xs = np.mgrid[:64, :64] / 64 - 0.492
    lead = []
    for power in (2, 2.5, 3, 4, 6, 12, 40):
        inside = np.abs(xs / 0.15) ** power + np.abs(ys / 0.15) ** power <= 1
        image = np.where(inside[..., None], PALETTE["red"], BACKGROUND).astype(np.uint8)
        scores = sole(image).shape_scores
        lead.append(scores["circle"] - scores["square"])
    assert lead[0] > 0.1 > -0.1 > lead[-1]
    assert all(a >= b - 0.005 for a, b in itertools.pairwise(lead))


@pytest.mark.parametrize(
    "image", [np.zeros((64, 64, 3)), np.zeros((64, 48, 3), np.uint8), np.zeros((64, 64), np.uint8)]
)
def test_only_square_rgb_bytes_are_read(image: np.ndarray) -> None:
    with pytest.raises(ValueError, match="square uint8 RGB"):
        read_scene(image)
