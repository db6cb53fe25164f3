"""Picture grids: the same prompts and seeds at every evaluation, so that two grids compare cell by cell.

Shapes: N samples, F frames, H and W pixels. Images are (N, 3, H, W) and videos (N, F, 3, H, W), float in
[0, 1]; of a video a grid shows the first, the middle and the last frame in a strip.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:  # a report is read without loading torch
    from torch import Tensor

Pixels = NDArray[np.uint8]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

GRID_NAME = re.compile(r"eval_(\d{1,12})\.png")
GAP = 8  # pixels between cells, and around the grid
SEAM = 2  # pixels between the parts of one cell
VISIBLE = 160  # the automatic scale makes cells at least so wide
MAX_LINES = 3  # of a caption; what is longer ends in an ellipsis
PAPER, INK, QUIET = (255, 255, 255), (34, 34, 40), (112, 112, 122)


def picture_grid(
    images: Tensor, captions: Sequence[str] | None = None, columns: int = 6, scale: int | None = None
) -> Image.Image:
    """Lays samples out in rows, each with its caption below.

    Args:
        images: (N, 3, H, W) or (N, F, 3, H, W) float in [0, 1]; what lies outside is clipped.
        captions: N strings, wrapped to the width of a cell, or None.
        columns: cells in a row.
        scale: whole factor of the nearest-neighbour enlargement; None: the smallest that makes a picture
            at least 160 pixels wide, so that 64-pixel pictures can be seen.

    Raises:
        ValueError: for a wrong shape, an empty batch, or captions that are not one a sample.
    """
    return _sheet(_cells(images, scale), captions, columns)


def before_after_grid(
    before: Tensor,
    after: Tensor,
    captions: Sequence[str] | None = None,
    columns: int = 3,
    scale: int | None = None,
) -> Image.Image:
    """Pairs of samples of the same prompt and seed: images side by side, video strips one above the other.

    Args:
        before: (N, 3, H, W) or (N, F, 3, H, W) float in [0, 1].
        after: the same shape.
        captions: N strings, or None.
        columns: pairs in a row.
        scale: as in `picture_grid`.

    Raises:
        ValueError: as `picture_grid`, and if the two shapes differ.
    """
    if before.shape != after.shape:
        raise ValueError(f"before {tuple(before.shape)} and after {tuple(after.shape)} differ in shape")
    axis = 1 if before.ndim == 4 else 0
    pairs = zip(_cells(before, scale), _cells(after, scale), strict=True)
    return _sheet([_join(pair, axis) for pair in pairs], captions, columns, ("before", "after"), axis)


def _cells(images: Tensor, scale: int | None) -> list[Pixels]:
    """One (h, w, 3) picture a sample, enlarged; the frames of a video side by side."""
    if images.ndim not in (4, 5) or images.shape[-3] != 3 or 0 in images.shape:
        raise ValueError(f"a grid takes (N, 3, H, W) or (N, F, 3, H, W), got {tuple(images.shape)}")
    if scale is not None and scale < 1:
        raise ValueError(f"scale {scale}: a whole number from 1")
    factor = scale or max(1, -(-VISIBLE // images.shape[-1]))
    last = 0 if images.ndim == 4 else images.shape[1] - 1
    frames = images.unsqueeze(1) if images.ndim == 4 else images[:, sorted({0, last // 2, last})]
    pixels = frames.detach().float().nan_to_num(0.0).clamp(0, 1).mul(255).round().byte()
    array = pixels.permute(0, 1, 3, 4, 2).cpu().numpy()
    array = array.repeat(factor, axis=2).repeat(factor, axis=3)
    return [_join(list(sample), 1) for sample in array]


def _join(parts: Sequence[Pixels], axis: int) -> Pixels:
    seam = np.full((SEAM, parts[0].shape[1], 3) if axis == 0 else (parts[0].shape[0], SEAM, 3), 255, np.uint8)
    pieces = [parts[0]]
    for part in parts[1:]:
        pieces += [seam, part]
    return np.concatenate(pieces, axis)


def _sheet(
    cells: list[Pixels],
    captions: Sequence[str] | None,
    columns: int,
    headings: tuple[str, ...] = (),
    axis: int = 1,
) -> Image.Image:
    """Places equal cells; `headings` name the parts of each cell along `axis`."""
    if columns < 1:
        raise ValueError(f"columns {columns}: a whole number from 1")
    if captions is not None and len(captions) != len(cells):
        raise ValueError(f"{len(captions)} captions for {len(cells)} samples")
    height, width = cells[0].shape[:2]
    columns = min(columns, len(cells))
    font = caption_font(max(11, round(min(height, width) / 14)))
    line = line_height(font)
    texts = [wrap(caption, width, font) for caption in captions or []]
    head = line + SEAM if headings else 0
    tops = [GAP]
    for row in range(0, len(cells), columns):
        deepest = max((len(lines) for lines in texts[row : row + columns]), default=0)
        tops.append(tops[-1] + head + height + deepest * line + (SEAM if deepest else 0) + GAP)
    sheet = Image.new("RGB", (GAP + columns * (width + GAP), tops[-1]), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, cell in enumerate(cells):
        left, top = GAP + number % columns * (width + GAP), tops[number // columns]
        _write_headings(draw, headings, (left, top), width, axis, font)
        sheet.paste(Image.fromarray(cell), (left, top + head))
        for index, text in enumerate(texts[number] if texts else []):
            draw.text((left, top + head + height + SEAM + index * line), text, fill=INK, font=font)
    return sheet


def _write_headings(
    draw: ImageDraw.ImageDraw, names: tuple[str, ...], at: tuple[int, int], width: int, axis: int, font: Font
) -> None:
    if axis == 0 and names:
        names = (" / ".join(names),)  # strips lie one above the other: one line names both
    for index, name in enumerate(names):
        draw.text((at[0] + index * width // len(names), at[1]), name, fill=QUIET, font=font)


class Picture(NamedTuple):
    """A stored grid, ready for a page."""

    iteration: int
    uri: str
    width: int
    height: int


def stored_grids(folder: Path, count: int, budget: int) -> list[Picture]:
    """The first, the last, and evenly spaced ones of a run's ``eval_<iteration>.png`` files.

    A file larger than its share of the budget is stored again as JPEG, smaller if it must be; one that
    cannot be read, as while it is being written, is left out.

    Args:
        folder: where the run keeps its grids; need not exist.
        count: at most so many, at least two.
        budget: bytes of all of them together.
    """
    found = {int(m[1]): path for path in folder.glob("eval_*.png") if (m := GRID_NAME.fullmatch(path.name))}
    steps = sorted(found)
    if len(steps) > count:
        steps = [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
    pictures = []
    for step in steps:
        try:
            pictures.append(_embed(step, found[step], budget // len(steps)))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # what Pillow raises
            continue
    return pictures


def _embed(iteration: int, path: Path, budget: int) -> Picture:
    data, kind = path.read_bytes(), "png"
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        size = image.size
        image.load()
        for side in (1600, 1200, 900, 600, 300):
            if len(data) <= budget:
                break
            small, stream, kind = image.convert("RGB"), io.BytesIO(), "jpeg"
            small.thumbnail((side, side * 4))
            small.save(stream, "JPEG", quality=85)
            data = stream.getvalue()
    return Picture(iteration, f"data:image/{kind};base64,{base64.b64encode(data).decode()}", *size)


@lru_cache
def caption_font(size: int) -> Font:
    """Matplotlib's DejaVu Sans, which covers most scripts; else Pillow's own font."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size) if path.is_file() else ImageFont.load_default(size)


def line_height(font: Font) -> int:
    """Pixels from one line of text to the next: the tallest and the deepest letters do not touch."""
    return int(font.getbbox("Ågjp|")[3]) + 2


def wrap(text: str, width: int, font: Font) -> list[str]:
    """Breaks a caption into at most three lines no wider than `width` pixels; long words are cut."""
    words = "".join(c if c.isprintable() else " " for c in text[:1000]).split()
    lines: list[str] = []
    while words:
        taken = len(words)
        while taken > 1 and font.getlength(" ".join(words[:taken])) > width:
            taken -= 1
        piece = " ".join(words[:taken])
        rest = words[taken:]
        if font.getlength(piece) > width:
            kept = _fitting(piece, width, font)
            piece, rest = piece[:kept], [piece[kept:], *rest]
        if len(lines) == MAX_LINES - 1 and rest:
            piece += "…"
            while font.getlength(piece) > width and len(piece) > 1:
                piece = piece[:-2] + "…"
            rest = []
        lines.append(piece)
        words = rest
    return lines


def _fitting(word: str, width: int, font: Font) -> int:
    """How many letters of a word fit, at least one."""
    return next((n for n in range(len(word), 1, -1) if font.getlength(word[:n]) <= width), 1)
