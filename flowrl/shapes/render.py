"""Renders scenes: flat colours on a plain background, anti-aliased by supersampling."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from flowrl.shapes.domain import BACKGROUND, PALETTE, Scene, SceneObject

SUPERSAMPLING = 4


def render(scene: Scene, size: int = 64) -> np.ndarray:
    """Renders one scene.

    Args:
        scene: the objects.
        size: side of the square image in pixels.

    Returns:
        uint8 array (size, size, 3), sRGB.
    """
    side = size * SUPERSAMPLING
    image = Image.new("RGB", (side, side), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for item in scene:
        _draw(draw, item, side)
    return np.asarray(image.resize((size, size), Image.Resampling.BOX))


def _draw(draw: ImageDraw.ImageDraw, item: SceneObject, side: int) -> None:
    x, y, radius = item.x * side, item.y * side, item.radius * side
    fill = PALETTE[item.color]
    if item.shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    elif item.shape == "square":
        half = radius * 0.85  # between inscribed and circumscribed: areas of the shapes stay close
        draw.rectangle((x - half, y - half, x + half, y + half), fill=fill)
    elif item.shape == "triangle":
        corners = [
            (x + radius * math.sin(angle), y - radius * math.cos(angle))
            for angle in (0.0, 2 * math.pi / 3, 4 * math.pi / 3)
        ]
        draw.polygon(corners, fill=fill)
    else:
        raise ValueError(f"unknown shape {item.shape!r}")
