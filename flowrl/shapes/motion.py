"""Moving squares: what a clip of the video domain is, its captions, and how clips are drawn by lot.

A clip shows one or two squares of one colour on a torus of 16 x 16 pixels: what leaves at one side comes in
at the other. They move along an axis, slowly or fast; after a prompt switch, at half of the clip, they go on
in another way. A caption has one part for each event, and parts are joined by `SWITCH`.

Units: pixels, x to the right and y downwards; speeds in pixels a frame.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flowrl.shapes.domain import BACKGROUND, PALETTE

SIZE = 16
SQUARE = 5  # side of a square
FPS = 8.0
SWITCH = " | "  # that of flowrl/mdp/chunks.py
COLORS = ("red", "green", "blue", "yellow")
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SPEEDS: dict[str, float] = {"slowly": 0.5, "fast": 1.0}  # those of captions
UNASKED: dict[str, float] = {"very slowly": 0.25}  # seen in clips that do not follow their caption
NUMBERS = {1: "a {} square moves", 2: "two {} squares move"}
TAGS = ("one_event", "two_events")
HELD_OUT_FRACTION = 0.25


def all_prompts() -> list[dict[str, Any]]:
    """Every prompt of the domain, in a fixed order: ``prompt``, ``tag``, ``color``, ``count``, ``events``."""
    return list(_records())


def split_prompts(held_out: bool) -> list[dict[str, Any]]:
    """The train or the held-out prompts: disjoint and complete; a quarter of each tag is held out."""
    chosen: list[dict[str, Any]] = []
    for tag in TAGS:
        records = sorted((r for r in all_prompts() if r["tag"] == tag), key=_text_hash)
        cut = round(HELD_OUT_FRACTION * len(records))
        chosen.extend(records[:cut] if held_out else records[cut:])
    return chosen


def velocities(events: Sequence[dict[str, str]], num_frames: int) -> np.ndarray:
    """The asked velocity (F, 2) with which each frame is reached from the one before it.

    Events share the frames evenly. The first row belongs to no motion that can be seen.
    """
    found = np.empty((num_frames, 2))
    for frame in range(num_frames):
        event = events[frame * len(events) // num_frames]
        found[frame] = np.multiply(DIRECTIONS[event["direction"]], (SPEEDS | UNASKED)[event["speed"]])
    return found


def draw_clip(record: dict[str, Any], num_frames: int, rng: np.random.Generator) -> np.ndarray:
    """A clip that satisfies a record, begun anywhere: uint8 (F, 16, 16, 3)."""
    while True:
        starts = rng.uniform(0, SIZE, size=(record["count"], 2))
        if record["count"] == 1 or float(np.abs(_wrapped(starts[0] - starts[1])).max()) > SQUARE + 1:
            break
    steps = velocities(record["events"], num_frames)
    steps[0] = 0
    return render_clip(starts + steps.cumsum(0)[:, None], record["color"])


def render_clip(corners: np.ndarray, color: str) -> np.ndarray:
    """Squares at top left corners (F, N, 2), anti-aliased: uint8 (F, 16, 16, 3)."""
    cover = np.zeros((len(corners), SIZE, SIZE))
    for number in range(corners.shape[1]):
        x, y = (_coverage(corners[:, number, axis]) for axis in (0, 1))
        cover = np.maximum(cover, y[:, :, None] * x[:, None, :])
    ink, paper = (np.array(value, dtype=float) for value in (PALETTE[color], BACKGROUND))
    return (paper + cover[..., None] * (ink - paper)).round().astype(np.uint8)


def _coverage(corner: np.ndarray) -> np.ndarray:
    """Which share of each pixel (F, 16) lies in [corner, corner + side) on the circle."""
    past = (np.arange(SIZE)[None] - corner[:, None]) % SIZE  # where the pixel begins, from the corner on
    inside = np.clip(SQUARE - past, 0, 1)
    return np.clip(inside + np.clip(past - (SIZE - 1), 0, 1), 0, 1)


def _wrapped(difference: np.ndarray) -> np.ndarray:
    return (difference + SIZE / 2) % SIZE - SIZE / 2


def _records() -> Iterator[dict[str, Any]]:
    motions = [{"direction": d, "speed": s} for d, s in itertools.product(DIRECTIONS, SPEEDS)]
    for color, count in itertools.product(COLORS, NUMBERS):
        for motion in motions:
            yield _record(color, count, [motion])
        for first, second in itertools.product(motions, motions):
            if first["direction"] != second["direction"]:
                yield _record(color, count, [first, second])


def _record(color: str, count: int, events: list[dict[str, str]]) -> dict[str, Any]:
    subject = NUMBERS[count].format(color)
    prompt = SWITCH.join(f"{subject} {event['direction']} {event['speed']}" for event in events)
    return {"prompt": prompt, "tag": TAGS[len(events) - 1], "color": color, "count": count, "events": events}


def _text_hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(record["prompt"].encode()).hexdigest()
