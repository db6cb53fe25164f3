"""Picture grids: where the pixels are, that captions stay in their cells, what comes back from disk."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.training.grids import (
    GAP,
    MAX_LINES,
    SEAM,
    before_after_grid,
    caption_font,
    line_height,
    picture_grid,
    stored_grids,
    wrap,
)

WHITE = (255, 255, 255)
LONG = "a photo of three small red circles to the left of two big green triangles above a blue square"


def flat_images(values: list[float], size: int = 8) -> torch.Tensor:
    """(N, 3, size, size), each of one grey."""
    return torch.tensor(values).reshape(-1, 1, 1, 1).expand(-1, 3, size, size)


def test_cells_are_where_they_belong() -> None:
    grid = picture_grid(flat_images([0.0, 0.2, 0.4, 0.6, 0.8]), None, columns=2, scale=4)
    assert grid.mode == "RGB" and grid.size == (GAP + 2 * (32 + GAP), GAP + 3 * (32 + GAP))
    pixels = np.asarray(grid)
    for number, grey in enumerate((0, 51, 102, 153, 204)):
        left, top = GAP + number % 2 * (32 + GAP), GAP + number // 2 * (32 + GAP)
        assert (pixels[top : top + 32, left : left + 32] == grey).all()
        assert (pixels[top : top + 32, left - GAP : left] == 255).all()
    assert (pixels[GAP + 2 * (32 + GAP) :, GAP + 32 :] == 255).all()  # the sixth cell is empty


def test_enlargement_is_nearest_neighbour() -> None:
    image = torch.rand(1, 3, 5, 7)
    pixels = np.asarray(picture_grid(image, None, columns=1, scale=3))[GAP : GAP + 15, GAP : GAP + 21]
    expected = (image[0].permute(1, 2, 0) * 255).round().byte().numpy().repeat(3, 0).repeat(3, 1)
    assert (pixels == expected).all()


@pytest.mark.parametrize(("size", "cell"), [(64, 192), (512, 512), (160, 160), (100, 200)])
def test_small_pictures_are_enlarged_until_they_can_be_seen(size: int, cell: int) -> None:
    assert picture_grid(flat_images([0.5], size), None).size[0] == cell + 2 * GAP


def test_values_out_of_range_and_not_finite_are_clipped() -> None:
    grid = picture_grid(flat_images([-3.0, 7.0, float("nan"), float("inf")]), None, columns=4, scale=1)
    assert [grid.getpixel((GAP + n * (8 + GAP), GAP)) for n in range(4)] == [(0,) * 3, WHITE, (0,) * 3, WHITE]


def test_captions_stay_below_their_cell_and_within_its_width() -> None:
    images = flat_images([0.0, 0.0, 0.0, 0.0], 64)
    grid = picture_grid(images, [LONG, "x" * 200, "", LONG * 20], columns=2, scale=2)
    bare = picture_grid(images, None, columns=2, scale=2)
    assert grid.size[0] == bare.size[0] and grid.size[1] > bare.size[1]
    pixels = np.asarray(grid).min(axis=2)
    for left in (0, GAP + 128, GAP + 128 + GAP + 128):
        assert (pixels[:, left : left + GAP] == 255).all()  # no ink in the gutters
    line = line_height(caption_font(11))
    foot = SEAM + MAX_LINES * line
    assert grid.size[1] == GAP + 2 * (128 + foot + GAP)
    for number in range(4):
        left, top = GAP + number % 2 * (128 + GAP), GAP + number // 2 * (128 + foot + GAP)
        assert (pixels[top : top + 128, left : left + 128] == 0).all()  # no ink over the picture
        caption = pixels[top + 128 : top + 128 + foot, left : left + 128]
        assert (caption < 128).any() == (number != 2)
        assert (pixels[top + 128 + foot : top + 128 + foot + GAP] == 255).all()


def test_lines_of_a_caption_do_not_touch() -> None:
    font = caption_font(14)
    grid = np.asarray(picture_grid(flat_images([0.0], 200), ["Ågjpq| Ågjpq| Ågjpq| Ågjpq| Ågjpq|"], scale=1))
    ink = (grid[GAP + 200 + SEAM :].min(axis=2) < 200).any(axis=1)
    blocks = np.flatnonzero(np.diff(ink.astype(int), prepend=0) == 1)
    assert len(wrap("Ågjpq| Ågjpq| Ågjpq| Ågjpq| Ågjpq|", 200, font)) == 2 and len(blocks) == 2


@pytest.mark.parametrize(
    "text", [LONG, "short", "", "   ", "wörd " * 99, "x" * 5000, "a\nb\tc\x00d", "日本語 " * 30]
)
def test_wrapped_lines_fit(text: str) -> None:
    font = caption_font(12)
    lines = wrap(text, 120, font)
    assert len(lines) <= MAX_LINES and all(font.getlength(line) <= 120 for line in lines)
    assert all(line.isprintable() for line in lines)
    if text in (LONG, "short"):
        assert " ".join(lines).rstrip("…") == text[: len(" ".join(lines).rstrip("…"))]


def test_markup_in_a_caption_is_only_ink() -> None:
    evil = ["<script>alert(1)</script>", "=SUM(A1)", "$\\frac{1}{2}$", "%s {0}"]
    assert picture_grid(flat_images([0.1, 0.2, 0.3, 0.4], 64), evil, columns=2).size[0] == GAP + 2 * (
        192 + GAP
    )


def test_videos_show_first_middle_and_last_frame() -> None:
    video = torch.stack([flat_images([f / 10, f / 10]) for f in range(7)], 1)  # (2, 7, 3, 8, 8)
    grid = picture_grid(video, ["a", "b"], columns=1, scale=2)
    assert grid.size[0] == 2 * GAP + 3 * 16 + 2 * SEAM
    greys = [grid.getpixel((GAP + n * (16 + SEAM), GAP))[0] for n in range(3)]
    assert greys == [0, round(0.3 * 255), round(0.6 * 255)]
    assert grid.getpixel((GAP + 16, GAP)) == WHITE
    for frames, width in ((1, 16), (2, 32 + SEAM)):
        assert picture_grid(video[:, :frames], None, columns=1, scale=2).size[0] == 2 * GAP + width


def test_before_and_after_lie_side_by_side() -> None:
    before, after = flat_images([0.0, 0.2], 64), flat_images([0.4, 0.6], 64)
    grid = before_after_grid(before, after, ["one", "two"], columns=2, scale=1)
    assert grid.size[0] == GAP + 2 * (128 + SEAM + GAP)
    head = line_height(caption_font(11)) + SEAM
    xs = [GAP, GAP + 64 + SEAM, GAP + 128 + SEAM + GAP, GAP + 192 + 2 * SEAM + GAP]
    assert [grid.getpixel((x, GAP + head))[0] for x in xs] == [0, 102, 51, 153]
    assert np.asarray(grid)[GAP : GAP + head, GAP:].min() < 200  # the headings


def test_before_and_after_of_videos_lie_one_above_the_other() -> None:
    before, after = (
        flat_images([0.0], 64)[:, None].expand(-1, 3, -1, -1, -1),
        torch.ones(1, 3, 3, 64, 64) * 0.4,
    )
    grid = before_after_grid(before, after, scale=1)
    head = line_height(caption_font(11)) + SEAM
    assert grid.size[0] == 2 * GAP + 3 * 64 + 2 * SEAM
    assert [grid.getpixel((GAP, GAP + head + y))[0] for y in (0, 63, 64 + SEAM)] == [0, 0, 102]


@pytest.mark.parametrize(
    ("images", "options", "word"),
    [
        (torch.zeros(2, 1, 8, 8), {}, "N, 3, H, W"),
        (torch.zeros(0, 3, 8, 8), {}, "N, 3, H, W"),
        (torch.zeros(3, 8, 8), {}, "N, 3, H, W"),
        (torch.zeros(2, 3, 8, 8), {"captions": ["one"]}, "1 captions for 2"),
        (torch.zeros(2, 3, 8, 8), {"columns": 0}, "columns 0"),
        (torch.zeros(2, 3, 8, 8), {"scale": 0}, "scale 0"),
    ],
)
def test_wrong_arguments_are_named(images: torch.Tensor, options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        picture_grid(images, **options)
    with pytest.raises(ValueError, match="differ in shape"):
        before_after_grid(torch.zeros(2, 3, 8, 8), torch.zeros(1, 3, 8, 8))


def test_stored_grids_are_first_last_and_some_between(tmp_path: Path) -> None:
    for step in range(0, 110, 10):
        Image.new("RGB", (40, 20), (step, 0, 0)).save(tmp_path / f"eval_{step:06d}.png")
    (tmp_path / "eval_000200.png").write_bytes(b"\x89PNG torn")
    (tmp_path / "eval_final.png").write_bytes(b"")
    assert [p.iteration for p in stored_grids(tmp_path, 100, 10**6)] == list(range(0, 110, 10))
    (tmp_path / "eval_000200.png").unlink()
    pictures = stored_grids(tmp_path, 3, 10**6)
    assert [p.iteration for p in pictures] == [0, 50, 100] and pictures[0][2:] == (40, 20)
    data = base64.b64decode(pictures[1].uri.removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (50, 0, 0)
    assert stored_grids(tmp_path / "none", 3, 10**6) == []


def test_large_grids_are_stored_again_within_their_budget(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (900, 1800, 3), np.uint8)
    for step in (0, 10):
        Image.fromarray(noise).save(tmp_path / f"eval_{step:06d}.png")
    pictures = stored_grids(tmp_path, 2, 400_000)
    assert all(p.uri.startswith("data:image/jpeg;base64,") and p[2:] == (1800, 900) for p in pictures)
    assert sum(len(p.uri) for p in pictures) < 400_000 * 4 / 3 + 100
