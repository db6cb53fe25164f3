"""The verifier of moving squares: against clips whose motion is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl import registry
from flowrl.errors import UserError
from flowrl.reward import Samples
from flowrl.rewards.trajectory import inked, shifts, trajectory_scores
from flowrl.shapes.motion import (
    COLORS,
    DIRECTIONS,
    SIZE,
    SPEEDS,
    SQUARE,
    all_prompts,
    draw_clip,
    render_clip,
    split_prompts,
    velocities,
)

RECORDS = all_prompts()


def clips(records: list[dict[str, Any]], frames: int = 24, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    made = np.stack([draw_clip(record, frames, rng) for record in records])
    return torch.from_numpy(made).permute(0, 1, 4, 2, 3).float() / 255


def record(*events: tuple[str, str], color: str = "red", count: int = 1) -> dict[str, Any]:
    return {
        "color": color,
        "count": count,
        "events": [{"direction": way, "speed": speed} for way, speed in events],
    }


def moving(speed: float, way: str = "right", frames: int = 24, color: str = "red") -> Tensor:
    """One square at any speed."""
    corners = np.arange(frames)[:, None, None] * speed * np.array(DIRECTIONS[way]) + 3.0
    return torch.from_numpy(render_clip(corners, color)).permute(0, 3, 1, 2).float()[None] / 255


# -- the domain ----------------------------------------------------------------------------------------------


def test_prompts() -> None:
    held_out, train = split_prompts(True), split_prompts(False)
    assert len(RECORDS) == 4 * 2 * (8 + 8 * 6) and len(held_out) == len(RECORDS) // 4
    texts = [r["prompt"] for r in held_out + train]
    assert sorted(texts) == sorted({r["prompt"] for r in RECORDS}) and len(set(texts)) == len(texts)
    assert "two blue squares move up slowly | two blue squares move left fast" in texts


def test_squares_keep_their_area_at_every_place() -> None:
    """Anti-aliased, and across the border of the torus."""
    corners = np.random.default_rng(0).uniform(-20, 20, size=(50, 1, 2))
    for color in COLORS:
        video = torch.from_numpy(render_clip(corners, color)).permute(0, 3, 1, 2).double() / 255
        ink, foreign = inked(video, color)
        torch.testing.assert_close(ink.sum((1, 2)), torch.full((50,), 25.0).double(), atol=0.1, rtol=0)
        assert float(foreign.max()) < 1e-6
    turned = render_clip(corners + np.array([3 * SIZE, -SIZE]), "red")
    assert np.array_equal(turned, render_clip(corners, "red"))
    whole = render_clip(np.array([[[2.0, 7.0]]]), "blue")[0]
    assert int((whole != whole[0, 0]).any(-1).sum()) == SQUARE**2


def test_velocities_share_the_frames_among_events() -> None:
    found = velocities(record(("left", "fast"), ("down", "slowly"))["events"], 6)
    assert found.tolist() == [[-1, 0]] * 3 + [[0, 0.5]] * 3


def test_two_squares_do_not_touch() -> None:
    many = [record(("left", "fast"), count=2)] * 40
    for clip in clips(many, frames=2):
        assert float(inked(clip.double(), "red")[0][0].sum()) == pytest.approx(50, abs=0.2)


# -- the reward ----------------------------------------------------------------------------------------------


def test_clips_that_satisfy_their_record_score_one() -> None:
    scores = trajectory_scores(clips(RECORDS[::5]), RECORDS[::5])
    assert float(scores["soft"].min()) > 0.99 and bool((scores["exact"] == 1).all())
    assert float(scores["presence"].min()) > 0.99
    speeds = [np.mean([SPEEDS[e["speed"]] for e in r["events"]]) for r in RECORDS[::5]]
    assert scores["speed"].tolist() == pytest.approx(speeds, abs=0.02)


@pytest.mark.parametrize(
    ("speed", "expected"), [(0.0, 0), (0.25, 0.25), (0.5, 0.5), (1.0, 1), (1.5, 0.5), (2, 0)]
)
def test_speed(speed: float, expected: float) -> None:
    """The closed form 1 - |v - s| / s for an asked speed of 1."""
    scores = trajectory_scores(moving(speed), [record(("right", "fast"))])
    assert float(scores["soft"]) == pytest.approx(expected, abs=0.03)
    assert float(scores["speed"]) == pytest.approx(speed, abs=0.03)
    assert float(scores["exact"]) == float(abs(speed - 1) <= 0.25)


@pytest.mark.parametrize("way", DIRECTIONS)
def test_direction(way: str) -> None:
    """The asked one scores 1; the opposite and the two others nothing."""
    video = moving(1.0, way)
    for asked in DIRECTIONS:
        scores = trajectory_scores(video, [record((asked, "fast"))])
        assert float(scores["soft"]) == pytest.approx(float(asked == way), abs=0.02)


def test_off_axis_motion_costs_exponentially() -> None:
    corners = np.arange(24)[:, None, None] * np.array([1.0, 0.5]) + 3.0
    video = torch.from_numpy(render_clip(corners, "red")).permute(0, 3, 1, 2).float()[None] / 255
    scores = trajectory_scores(video, [record(("right", "fast"))])
    assert float(scores["soft"]) == pytest.approx(np.exp(-0.75), abs=0.02)
    assert float(scores["exact"]) == 0


def test_order_and_an_ignored_switch() -> None:
    asked = record(("left", "fast"), ("up", "fast"))
    swapped = record(("up", "fast"), ("left", "fast"))
    ignored = record(("left", "fast"))
    scores = trajectory_scores(clips([asked, swapped, ignored]), [asked] * 3)
    assert scores["soft"].tolist() == pytest.approx([1, 0, 0.5], abs=0.03)
    assert scores["exact"].tolist() == [1, 0, 0]


def test_presence_counts_missing_extra_and_foreign_ink() -> None:
    one, two = record(("right", "slowly")), record(("right", "slowly"), count=2)
    video = clips([one])
    assert float(trajectory_scores(video, [two])["presence"]) == pytest.approx(0.5, abs=0.01)
    assert float(trajectory_scores(clips([two]), [one])["presence"]) == pytest.approx(0, abs=0.01)
    blue = record(("right", "slowly"), color="blue")
    assert float(trajectory_scores(video, [blue])["presence"]) < 0.3
    assert float(trajectory_scores(torch.rand_like(video), [one])["presence"]) == 0
    faded = video[:, :1, :, :1, :1] + 0.5 * (video - video[:, :1, :, :1, :1])
    assert float(trajectory_scores(faded, [one])["presence"]) == pytest.approx(0.5, abs=0.05)


def test_an_empty_clip_scores_nothing() -> None:
    background = clips([record(("right", "fast"))])[:, :, :, :1, :1].amax(dim=(0, 1), keepdim=True)
    scores = trajectory_scores(background.expand(1, 24, 3, SIZE, SIZE), [record(("right", "fast"))])
    assert all(float(scores[mode]) == 0 for mode in ("soft", "exact", "presence", "speed"))


def test_shifts_wrap_around() -> None:
    ink = torch.zeros(2, SIZE, SIZE, dtype=torch.float64)
    ink[0, 3:8, 14:], ink[0, 3:8, :3] = 1, 1
    ink[1] = ink[0].roll((1, -2), (0, 1))
    torch.testing.assert_close(shifts(ink), torch.tensor([[-2.0, 1.0]], dtype=torch.float64))


def test_as_a_registered_reward() -> None:
    """Each row by itself, in any order; the mode picks the column."""
    chosen = RECORDS[5::60]
    video = clips(chosen)
    for mode in ("soft", "exact", "presence", "speed"):
        reward = registry.build("reward", {"name": "trajectory", "mode": mode}, "rewards[0]")
        whole = reward(Samples(video, fps=8.0), [r["prompt"] for r in chosen], chosen)
        assert whole.dtype == torch.float32 and whole.shape == (len(chosen),)
        back = reward(Samples(video.flip(0), fps=8.0), [""] * len(chosen), chosen[::-1])
        torch.testing.assert_close(back.flip(0), whole)
        single = [reward(Samples(video[i : i + 1], fps=8.0), [""], chosen[i : i + 1]) for i in range(3)]
        torch.testing.assert_close(torch.cat(single), whole[:3])


def test_what_it_cannot_judge_is_refused() -> None:
    right = record(("right", "fast"))
    with pytest.raises(UserError, match="needs clips"):
        trajectory_scores(torch.zeros(2, 3, 16, 16), [right] * 2)
    with pytest.raises(UserError, match="needs clips"):
        trajectory_scores(torch.zeros(1, 24, 3, 32, 32), [right])
    with pytest.raises(UserError, match="1 clips but 2 metadata records"):
        trajectory_scores(torch.zeros(1, 24, 3, 16, 16), [right] * 2)
    with pytest.raises(UserError, match="a record needs color"):
        trajectory_scores(torch.zeros(1, 24, 3, 16, 16), [{"prompt": "a cat"}])
