"""Finds the objects of an image of the shapes domain: nearest palette colour, components, template fit.

A shape is told by overlap: the component is compared with the upright circle, square and triangle of the
same area around the same centre. The overlap falls gradually as a form degrades, which a reward needs.
All work is done at one side length, so that the result hardly depends on the image's resolution.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from flowrl.shapes.domain import BACKGROUND, COLORS, PALETTE, SHAPES

SIDE = 64  # images are resampled to this side
MIN_AREA = 0.006  # of the canvas: a quarter of the smallest object
MAX_AREA = 0.2  # twice the largest object: beyond it, a component is a backdrop
TWO_AREA = 0.09  # the least that two squares which touch may cover
MAX_OBJECTS = 8  # the largest ones are kept, the rest counts as clutter
SURE_OVERLAP = 0.75  # a component that fits its shape less well is not taken for one
_TOLERANCE = 60.0  # distance in sRGB that noise may cause at a pixel
_BITS = 6  # of each sRGB channel, in the table of nearest colours
_KERNEL = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
_BLOCK = cv2.getStructuringElement(cv2.MORPH_RECT, (3, 3))


@dataclass(frozen=True)
class Detection:
    """One object found in an image, in units of the canvas.

    Attributes:
        shape: the best fitting shape.
        color: the nearest palette colour.
        x: centre, to the right.
        y: centre, downwards.
        area: fraction of the canvas covered.
        shape_scores: for every shape, the overlap (intersection over union) with its template.
        color_scores: for every palette colour, a similarity in [0, 1]; 1 within noise of the colour.
    """

    shape: str
    color: str
    x: float
    y: float
    area: float
    shape_scores: dict[str, float]
    color_scores: dict[str, float]

    @property
    def sure(self) -> bool:
        """Whether the component fits its shape well enough to be called an object of it."""
        return self.shape_scores[self.shape] >= SURE_OVERLAP


@dataclass(frozen=True)
class SceneReading:
    """What an image holds: its objects, largest first, and its clutter.

    Attributes:
        objects: the detections.
        clutter: fraction of the canvas that is neither background nor of one colour with the object it
            lies in, the outlines of objects excepted.
    """

    objects: tuple[Detection, ...]
    clutter: float


class _Found(NamedTuple):
    """A detection with its mean colour, and its pixels in a box of the image."""

    detection: Detection
    color: tuple[float, ...]
    component: np.ndarray
    box: tuple[slice, slice]


def detect(image: np.ndarray) -> list[Detection]:
    """The objects of an image (H, H, 3), uint8 sRGB; see `read_scene`."""
    return list(read_scene(image).objects)


def read_scene(image: np.ndarray) -> SceneReading:
    """Reads one image.

    Args:
        image: uint8 sRGB (H, H, 3), H >= 32.

    Raises:
        ValueError: if the image is of another type or form.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.shape[0] != image.shape[1]:
        raise ValueError(f"need a square uint8 RGB image, got {image.dtype} {image.shape}")
    if image.shape[0] != SIDE:
        method = cv2.INTER_AREA if image.shape[0] > SIDE else cv2.INTER_CUBIC
        image = cv2.resize(image, (SIDE, SIDE), interpolation=method)
    red, green, blue = (image[..., k].astype(np.int32) >> (8 - _BITS) for k in range(3))
    nearest = _nearest_colors()[(red << 2 * _BITS) | (green << _BITS) | blue]
    found: list[_Found] = []
    present = np.bincount(nearest.ravel(), minlength=len(COLORS) + 1)
    for label in range(1, len(COLORS) + 1):
        if present[label] < MIN_AREA * SIDE * SIDE:
            continue
        opened = cv2.morphologyEx((nearest == label).view(np.uint8), cv2.MORPH_OPEN, _KERNEL)
        for component, box in _components(opened):
            found.append(_describe(image, component, box))
    found.sort(key=lambda item: -item.detection.area)
    found = found[:MAX_OBJECTS]
    return SceneReading(tuple(item.detection for item in found), _clutter(image, found))


def _components(mask: np.ndarray, split: bool = True) -> Iterator[tuple[np.ndarray, tuple[slice, slice]]]:
    """The connected parts of a mask that have an object's size: each in a box with two pixels to spare."""
    count, components, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
    for k in range(1, count):
        x, y, width, height, pixels = stats[k].tolist()
        box = (slice(max(y - 2, 0), y + height + 2), slice(max(x - 2, 0), x + width + 2))
        component = (components[box] == k).view(np.uint8)
        if split and pixels > TWO_AREA * SIDE**2:
            # Two squares may touch at a corner: if a little erosion parts the component, it was several.
            whole = np.zeros_like(mask)
            whole[box] = component
            parts = list(_components(_erode(whole), split=False))
            if sum(part.sum() > TWO_AREA / 3 * SIDE**2 for part, _ in parts) > 1:
                for part, place in parts:
                    yield cv2.dilate(part, _BLOCK) & whole[place], place
                continue
        if MIN_AREA <= pixels / SIDE**2 <= MAX_AREA:
            yield component, box


def _erode(mask: np.ndarray) -> np.ndarray:
    return cv2.erode(mask, _BLOCK, borderType=cv2.BORDER_CONSTANT, borderValue=0)


def _describe(image: np.ndarray, component: np.ndarray, box: tuple[slice, slice]) -> _Found:
    inner = _erode(component)
    patch = image[box]
    mean = cv2.mean(patch, inner if inner.any() else component)[:3]
    # Coverage of every pixel, 0 to 1, from where its colour lies between the background's and the object's.
    direction = np.asarray(mean, np.float32) - np.asarray(BACKGROUND, np.float32)
    direction /= max(float(direction @ direction), 1.0)
    along = patch.astype(np.float32) @ direction - np.float32(np.dot(BACKGROUND, direction))
    cover = np.clip((along - 0.15) / 0.7, 0, 1) * cv2.dilate(component, _BLOCK, iterations=2)
    columns, rows = cover.sum(0), cover.sum(1)
    total = float(columns.sum())
    xs = np.arange(len(columns), dtype=np.float32)
    ys = np.arange(len(rows), dtype=np.float32)
    x, y = float(columns @ xs) / total, float(rows @ ys) / total
    xs, ys = (xs - np.float32(x))[None, :], (ys - np.float32(y))[:, None]
    shape_scores = {}
    for shape in SHAPES:
        common = float(np.minimum(cover, _template(shape, xs, ys, total)).sum())
        # Template and object have the same area, also where the template leaves the box.
        shape_scores[shape] = common / (2 * total - common)
    color_scores = _color_scores(mean)
    detection = Detection(
        shape=max(shape_scores, key=shape_scores.__getitem__),
        color=max(color_scores, key=color_scores.__getitem__),
        x=(box[1].start + x + 0.5) / SIDE,
        y=(box[0].start + y + 0.5) / SIDE,
        area=total / SIDE**2,
        shape_scores=shape_scores,
        color_scores=color_scores,
    )
    return _Found(detection, mean, component, box)


def _template(shape: str, xs: np.ndarray, ys: np.ndarray, area: float) -> np.ndarray:
    """Coverage by a shape of an area (in pixels) around the origin, with edges one pixel wide."""
    if shape == "circle":
        inside = math.sqrt(area / math.pi) - np.sqrt(xs * xs + ys * ys)
    elif shape == "square":
        inside = math.sqrt(area) / 2 - np.maximum(np.abs(xs), np.abs(ys))
    else:
        radius = math.sqrt(area * 4 / (3 * math.sqrt(3)))  # of the circle through the corners
        inside = np.minimum(radius / 2 - ys, (ys + radius - math.sqrt(3) * np.abs(xs)) / 2)
    cover: np.ndarray = np.clip(inside + 0.5, 0, 1)
    return cover


def _color_scores(mean: tuple[float, ...]) -> dict[str, float]:
    color_lab = cv2.cvtColor(np.asarray([[mean]], np.float32) / 255, cv2.COLOR_RGB2LAB)[0, 0]
    scores = {}
    for color, target in zip(COLORS, _palette_lab()[1:], strict=True):
        excess = max(math.dist(color_lab, target) - 8, 0)
        # A steep part that tells blue from purple (32 apart), and a slope from afar.
        scores[color] = 0.7 * max(1 - excess / 28, 0) + 0.3 * max(1 - excess / 120, 0)
    return scores


def _clutter(image: np.ndarray, found: list[_Found]) -> float:
    plain = np.empty((SIDE, SIDE, 3), np.float32)
    plain[:] = BACKGROUND
    objects = np.zeros((SIDE, SIDE), np.uint8)
    for item in found:
        plain[item.box][item.component > 0] = item.color
        objects[item.box] |= item.component
    difference = image - plain
    distance = np.sqrt(np.einsum("hwc,hwc->hw", difference, difference))
    outline = cv2.dilate(objects, _BLOCK) - cv2.erode(
        objects, _BLOCK, borderType=cv2.BORDER_CONSTANT, borderValue=1
    )
    excess = np.clip((distance - _TOLERANCE) / _TOLERANCE, 0, 1)
    return float(np.where(outline > 0, 0, excess).sum()) / SIDE**2


@functools.lru_cache(maxsize=1)
def _palette_lab() -> list[tuple[float, ...]]:
    colors = np.asarray([BACKGROUND, *PALETTE.values()], np.float32)[None] / 255
    return [tuple(map(float, row)) for row in cv2.cvtColor(colors, cv2.COLOR_RGB2LAB)[0]]


@functools.lru_cache(maxsize=1)
def _nearest_colors() -> np.ndarray:
    """For each quantised colour, the nearest one: 0 for the background, then the palette in order."""
    levels = (np.arange(2**_BITS, dtype=np.float32) + 0.5) / 2**_BITS
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(1, -1, 3)
    lab = cv2.cvtColor(np.ascontiguousarray(grid), cv2.COLOR_RGB2LAB)[0]
    targets = np.asarray(_palette_lab(), np.float32)
    distances = [np.linalg.norm(lab - target, axis=1) for target in targets]
    return np.argmin(distances, axis=0).astype(np.uint8)
