"""Reward ``scene``: does an image of the shapes domain show what its GenEval record asks for?

The record's ``include`` entries (class, count, color, position) must be there and no ``exclude`` count
may be reached. Source: GenEval, arXiv 2310.11513, section 3 (verification by detected objects).
Differs from the authors' code: objects are found by colour and form (`flowrl.shapes.detector`); a
relation holds if the centres differ by more than `POSITION_MARGIN`; objects of an entry are chosen by
colour first; and a dense ``soft`` score is added, which RL needs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, register
from flowrl.reward import Samples
from flowrl.shapes.detector import MAX_OBJECTS, Detection, SceneReading, read_scene
from flowrl.shapes.domain import COLORS, POSITION_MARGIN, RELATIONS, SHAPES

MAX_WANTED = 6  # objects in one record
CLUTTER_FREE = 0.01  # fraction of the canvas that noise may spoil at no cost
CLUTTER_HALVES = 0.05  # beyond that, the fraction that halves the score


@register("reward", "scene")
class SceneReward:
    """Verifier of rendered scenes; higher is better, 1 = the prompt is satisfied.

    ``exact``: 1 if the record is satisfied, else 0. ``soft``: in [0, 1]; the best assignment of wanted to
    found objects, the mean of shape x colour x position similarity over the wanted ones, times a penalty
    for excluded extra objects, times one for clutter.
    """

    class Config(ComponentConfig):
        """Options of the ``scene`` reward."""

        mode: Literal["soft", "exact"] = "soft"

    def __init__(self, config: Config) -> None:
        """Keeps the mode."""
        self.config = config

    def __call__(
        self, samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        """Scores (B,), float32; reads only ``metadata``.

        Raises:
            UserError: for video, images that are not square or below 32 pixels, a record without
                ``include``, or one with an unknown class, colour or relation.
        """
        return scene_scores(samples.images, metadata)[self.config.mode]


def scene_scores(images: Tensor, metadata: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Both scores of each image: ``soft`` and ``exact``, float32 (B,).

    Args:
        images: float in [0, 1] (B, 3, H, H), H >= 32.
        metadata: B GenEval records.

    Raises:
        UserError: see `SceneReward.__call__`.
    """
    if images.ndim != 4 or images.shape[1] != 3 or images.shape[2] != images.shape[3] or images.shape[2] < 32:
        raise UserError(
            f"reward scene: needs square images (B, 3, H, H) with H >= 32, got shape {tuple(images.shape)}"
        )
    if len(metadata) != len(images):
        raise UserError(f"reward scene: {len(images)} images but {len(metadata)} metadata records")
    pixels = (images.detach().clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    scores: dict[str, list[float]] = {"soft": [], "exact": []}
    for image, record in zip(pixels.permute(0, 2, 3, 1).contiguous().numpy(), metadata, strict=True):
        check_record(record)
        reading = read_scene(image)
        scores["soft"].append(soft_score(reading, record))
        scores["exact"].append(float(is_satisfied(reading, record)))
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in scores.items()}


def mean_by_tag(scores: Tensor, metadata: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean score of each GenEval tag that occurs, and ``overall``: the mean over the tags."""
    tags = [str(record.get("tag", "untagged")) for record in metadata]
    means = {
        tag: float(scores[[k for k, other in enumerate(tags) if other == tag]].mean())
        for tag in sorted(set(tags))
    }
    return {**means, "overall": sum(means.values()) / max(len(means), 1)}


def check_record(record: dict[str, Any]) -> None:
    """Raises UserError if a record cannot be verified; the message names the key and the legal values."""
    include = record.get("include")
    if not include:
        raise UserError(f"reward scene: the metadata of {record.get('prompt')!r} has no `include`")
    for k, entry in enumerate(include):
        _check("include.class", entry.get("class"), SHAPES)
        if entry.get("color") is not None:
            _check("include.color", entry["color"], COLORS)
        if entry.get("position") is not None:
            relation, index = entry["position"]
            _check("include.position", relation, RELATIONS)
            _check("include.position index", index, range(k))
    for entry in record.get("exclude", ()):
        _check("exclude.class", entry.get("class"), SHAPES)
    wanted = sum(entry.get("count", 1) for entry in include)
    if not 1 <= wanted <= MAX_WANTED:
        raise UserError(f"reward scene: a record may want 1 to {MAX_WANTED} objects, got {wanted}")


def is_satisfied(reading: SceneReading, record: dict[str, Any]) -> bool:
    """Whether every ``include`` entry is there and no ``exclude`` count is reached."""
    groups: list[list[Detection]] = []
    for entry in record["include"]:
        found = [
            item
            for item in reading.objects
            if item.sure and item.shape == entry["class"] and entry.get("color") in (None, item.color)
        ]
        count = entry.get("count", 1)
        if len(found) < count:
            return False
        groups.append(found[:count])
        if entry.get("position"):
            relation, index = entry["position"]
            pairs = itertools.product(groups[-1], groups[index])
            if not all(_along(relation, a, b) > POSITION_MARGIN for a, b in pairs):
                return False
    shapes = [item.shape for item in reading.objects]
    return all(shapes.count(entry["class"]) < entry["count"] for entry in record.get("exclude", ()))


def soft_score(reading: SceneReading, record: dict[str, Any]) -> float:
    """The dense score in [0, 1]; see `SceneReward`."""
    objects = reading.objects
    if not objects:
        return 0.0
    wanted = [
        (group, entry) for group, entry in enumerate(record["include"]) for _ in range(entry.get("count", 1))
    ]
    places = max(len(objects), len(wanted))  # those beyond the objects found stand for "missing"
    match = np.zeros((len(wanted), places))
    for i, (_, entry) in enumerate(wanted):
        for k, item in enumerate(objects):
            match[i, k] = _shape_similarity(item, entry["class"]) * _color_similarity(
                item, entry.get("color")
            )
    choices = _choices(places, len(wanted))
    each = match[np.arange(len(wanted)), choices]
    for i, (_, entry) in enumerate(wanted):
        if not entry.get("position"):
            continue
        relation, index = entry["position"]
        table = np.full((places, places), 0.25)
        for (k, a), (m, b) in itertools.permutations(enumerate(objects), 2):
            # From 0.25 at "clearly the other way round" to 1 where the relation holds.
            reach = (_along(relation, a, b) + 3 * POSITION_MARGIN) / (4 * POSITION_MARGIN)
            table[k, m] = 0.25 + 0.75 * min(max(reach, 0.0), 1.0)
        targets = [t for t, (group, _) in enumerate(wanted) if group == index]
        each[:, i] *= np.mean([table[choices[:, i], choices[:, t]] for t in targets], axis=0)
    best = int(each.sum(1).argmax())
    extra = _excess(objects, set(choices[best].tolist()), record.get("exclude", ()))
    clutter = max(reading.clutter - CLUTTER_FREE, 0) / CLUTTER_HALVES
    return float(each[best].mean()) * len(wanted) / (len(wanted) + extra) / (1 + clutter)


def _excess(objects: Sequence[Detection], used: set[int], exclude: Sequence[dict[str, Any]]) -> float:
    """How many unused objects an exclude count forbids; a small one counts in part."""
    limits = {entry["class"]: entry["count"] for entry in exclude}
    shapes = [item.shape for item in objects]
    return sum(
        min(item.area / 0.03, 1)
        for k, item in enumerate(objects)
        if k not in used and shapes.count(item.shape) >= limits.get(item.shape, MAX_OBJECTS + 1)
    )


def _shape_similarity(item: Detection, shape: str) -> float:
    overlap = item.shape_scores[shape]
    rival = max(score for name, score in item.shape_scores.items() if name != shape)
    quality = min(max((overlap - 0.4) / 0.45, 0), 1)
    # A circle and a square of one area overlap by 0.83, so what counts is also the lead over the others.
    return quality * (0.3 + 0.7 * min(max(0.5 + (overlap - rival) / 0.12, 0), 1))


def _color_similarity(item: Detection, color: str | None) -> float:
    score = item.color_scores[color or item.color]
    return 0.25 + 0.75 * score


def _along(relation: str, a: Detection, b: Detection) -> float:
    """How far `a` lies from `b` in the direction of the relation, canvas units."""
    dx, dy = RELATIONS[relation]
    return (a.x - b.x) * dx + (a.y - b.y) * dy


@functools.lru_cache(maxsize=64)
def _choices(places: int, wanted: int) -> np.ndarray:
    return np.array(list(itertools.permutations(range(places), wanted)))


def _check(key: str, value: Any, legal: Any) -> None:
    if value not in legal:
        raise UserError(f"reward scene: metadata {key} = {value!r}; legal: {', '.join(map(str, legal))}")
