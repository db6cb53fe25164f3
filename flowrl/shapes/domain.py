"""What a scene is: palette, shapes, objects, and how a scene that satisfies a prompt is drawn by lot.

Coordinates are in units of the canvas side (0 to 1), x to the right and y downwards, so that the same
scene can be rendered at any resolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

SHAPES: tuple[str, ...] = ("circle", "square", "triangle")

# sRGB, 8 bit. Far apart from each other and from the background in CIELAB.
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 80, 200),
    "yellow": (245, 205, 25),
    "purple": (150, 60, 190),
    "black": (25, 25, 25),
}
BACKGROUND: tuple[int, int, int] = (232, 232, 232)
COLORS: tuple[str, ...] = tuple(PALETTE)

RADIUS: tuple[float, float] = (0.135, 0.185)  # circumscribed radius of an object, canvas units
GAP: float = 0.05  # smallest distance between the circumscribed circles of two objects
MARGIN: float = 0.03  # smallest distance between a circumscribed circle and the border
RELATIONS: dict[str, tuple[int, int]] = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
POSITION_MARGIN: float = 0.1  # a relation holds if the centres differ by more than this along its axis


@dataclass(frozen=True)
class SceneObject:
    """One object: its shape, colour, centre (x, y) and circumscribed radius, in canvas units."""

    shape: str
    color: str
    x: float
    y: float
    radius: float


Scene = tuple[SceneObject, ...]


def sample_scene(metadata: dict[str, Any], rng: np.random.Generator, max_tries: int = 400) -> Scene:
    """Draws a scene that satisfies a prompt's metadata exactly, with nothing else in it.

    Args:
        metadata: a GenEval-style record with ``include`` (``class``, ``count``, optional ``color``,
            optional ``position`` = [relation, index of the object it refers to]).
        rng: the source of all randomness.
        max_tries: how many layouts are drawn before giving up.

    Returns:
        the objects, in the order of ``include``.

    Raises:
        ValueError: if no layout fits within ``max_tries``.
    """
    for _ in range(max_tries):
        objects: list[SceneObject] = []
        first_of_entry: list[SceneObject] = []
        for entry in metadata["include"]:
            placed = _place_entry(entry, objects, first_of_entry, rng)
            if placed is None:
                break
            objects.extend(placed)
            first_of_entry.append(placed[0])
        else:
            return tuple(objects)
    raise ValueError(f"no layout fits the prompt {metadata.get('prompt')!r} in {max_tries} tries")


def _place_entry(
    entry: dict[str, Any],
    objects: list[SceneObject],
    first_of_entry: list[SceneObject],
    rng: np.random.Generator,
) -> list[SceneObject] | None:
    placed: list[SceneObject] = []
    # Objects of one entry share a colour unless the prompt leaves it open for each of them.
    for _ in range(entry.get("count", 1)):
        color = entry.get("color") or COLORS[rng.integers(len(COLORS))]
        radius = rng.uniform(*RADIUS)
        low, high = MARGIN + radius, 1 - MARGIN - radius
        for _ in range(30):
            x, y = rng.uniform(low, high, size=2)
            candidate = SceneObject(entry["class"], color, float(x), float(y), float(radius))
            if all(_apart(candidate, other) for other in [*objects, *placed]) and _in_position(
                candidate, entry.get("position"), first_of_entry
            ):
                placed.append(candidate)
                break
        else:
            return None
    return placed


def _apart(a: SceneObject, b: SceneObject) -> bool:
    return math.hypot(a.x - b.x, a.y - b.y) >= a.radius + b.radius + GAP


def _in_position(
    candidate: SceneObject, position: list[Any] | None, first_of_entry: list[SceneObject]
) -> bool:
    if position is None:
        return True
    relation, index = position
    other = first_of_entry[index]
    dx, dy = RELATIONS[relation]
    along = (candidate.x - other.x) * dx + (candidate.y - other.y) * dy
    across = abs((candidate.x - other.x) * dy) + abs((candidate.y - other.y) * dx)
    # The drawn scenes are unambiguous: clearly more along the axis of the relation than across it.
    return along > 2 * POSITION_MARGIN and along > across
