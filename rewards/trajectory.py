"""Reward ``trajectory``: do the squares of a clip move as its caption says?

For clips of flowrl/shapes/motion.py. Each frame is read as the share of the asked colour in every pixel; the
motion between two frames is the shift, on the torus, that maps the one on the other best (by correlation at
low frequencies, in sixteenths of a pixel). With the asked velocity of length s along a unit vector u, and
a found one w,

    pair      = max(0, 1 - |w . u - s| / s) exp(-1.5 |w - (w . u) u|)
    presence  = max(0, 1 - |ink - asked ink| / asked ink) max(0, 1 - foreign / asked ink)        of a frame
    soft      = mean over events of the mean over the event's pairs of pair x presence of the later frame
    exact     = 1 if of every event the mean velocity is within .25 pixels of the asked one, and presence
                averages .7 or more

``ink`` is the area of the asked colour in pixels, ``foreign`` that of anything else that is not background.
Pairs belong to the event of their later frame, so a wrong order, or a switch that is ignored, scores 0 there.
``presence``, ``speed`` (pixels a frame) and ``exact`` are for evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, register
from flowrl.reward import Samples
from flowrl.shapes.domain import BACKGROUND, PALETTE
from flowrl.shapes.motion import COLORS, SIZE, SQUARE, velocities

REACH = 2.0  # the largest shift between two frames that is looked for, pixels
STEP = 0.0625
FINEST = 3  # the highest frequency that is compared: higher ones are distorted where pixels cut a square
TOLERANCE = 0.25
PRESENT = 0.7

Mode = Literal["soft", "exact", "presence", "speed"]


@register("reward", "trajectory")
class TrajectoryReward:
    """Verifier of clips of moving squares; higher is better, 1 = everything as asked."""

    class Config(ComponentConfig):
        """Options of the ``trajectory`` reward."""

        mode: Mode = "soft"

    def __init__(self, config: Config) -> None:
        """Keeps the mode."""
        self.config = config

    def __call__(
        self, samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        """Scores (B,), float32; reads only ``metadata``.

        Raises:
            UserError: for anything but clips of 16 x 16 pixels, or a record without ``events``.
        """
        return trajectory_scores(samples.images, metadata)[self.config.mode]


def trajectory_scores(video: Tensor, metadata: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """All scores of each clip, float32 (B,).

    Args:
        video: float in [0, 1] (B, F, 3, 16, 16).
        metadata: B records with ``color``, ``count`` and ``events``.
    """
    if video.ndim != 5 or tuple(video.shape[2:]) != (3, SIZE, SIZE) or video.shape[1] < 2:
        raise UserError(
            f"reward trajectory: needs clips (B, F, 3, {SIZE}, {SIZE}) of 2 frames or more, got "
            f"{tuple(video.shape)}"
        )
    if len(metadata) != len(video):
        raise UserError(f"reward trajectory: {len(video)} clips but {len(metadata)} metadata records")
    scores = [_score(clip, record) for clip, record in zip(video.double().cpu(), metadata, strict=True)]
    return {mode: torch.tensor([s[mode] for s in scores], dtype=torch.float32) for mode in scores[0]}


def _score(clip: Tensor, record: dict[str, Any]) -> dict[str, float]:
    missing = [key for key in ("color", "count", "events") if key not in record]
    if missing or record["color"] not in COLORS:
        raise UserError(
            f"reward trajectory: a record needs color ({', '.join(COLORS)}), count and events, got {record}"
        )
    ink, foreign = inked(clip, record["color"])
    asked_ink = record["count"] * SQUARE**2
    presence = (1 - (ink.sum((1, 2)) - asked_ink).abs() / asked_ink).clamp(min=0)
    presence = presence * (1 - foreign.sum((1, 2)) / asked_ink).clamp(min=0)
    found = shifts(ink)
    frames = len(clip)
    asked = torch.from_numpy(velocities(record["events"], frames))[1:]
    length = asked.norm(dim=1)
    unit = asked / length[:, None]
    along = (found * unit).sum(1)
    across = (found - along[:, None] * unit).norm(dim=1)
    pairs = (1 - (along - length).abs() / length).clamp(min=0) * (-1.5 * across).exp() * presence[1:]
    event = torch.arange(1, frames) * len(record["events"]) // frames
    soft, right = [], []
    for number in range(len(record["events"])):
        mine = event == number
        soft.append(float(pairs[mine].mean()))
        right.append(float((found[mine].mean(0) - asked[mine][0]).norm()) <= TOLERANCE)
    present = float(presence.mean())
    return {
        "soft": float(np.mean(soft)),
        "exact": float(all(right) and present >= PRESENT),
        "presence": present,
        "speed": float(found.norm(dim=1).mean()),
    }


def inked(clip: Tensor, color: str) -> tuple[Tensor, Tensor]:
    """The share of a colour, and of what is neither it nor background, in each pixel: (F, 16, 16) each.

    A pixel is split along the line from the background to the colour; what lies beside it is foreign.
    """
    paper, target = (torch.tensor(rgb, dtype=torch.float64) / 255 for rgb in (BACKGROUND, PALETTE[color]))
    line = target - paper
    offset = clip.movedim(1, -1) - paper
    share = (offset @ line) / (line @ line)
    beside = (offset - share[..., None] * line).norm(dim=-1) / line.norm()
    foreign = (beside + (share - share.clamp(0, 1)).abs() - 0.1).clamp(0, 1)  # a little is rounding and blur
    return share.clamp(0, 1) * (1 - foreign), foreign


def shifts(ink: Tensor) -> Tensor:
    """The motion (F - 1, 2) in pixels from each frame to the next, x and y; 0 where nothing is seen."""
    spectrum = torch.fft.fft2(ink - ink.mean((1, 2), keepdim=True))
    cross = spectrum[:-1].conj() * spectrum[1:]
    offsets = torch.arange(-REACH, REACH + STEP / 2, STEP, dtype=torch.float64)
    frequencies = torch.fft.fftfreq(SIZE, 1 / SIZE).double()
    turns = torch.exp(2j * torch.pi * offsets[:, None] * frequencies[None] / SIZE)
    turns[:, frequencies.abs() > FINEST] = 0
    matches = torch.einsum("ay,fyx,bx->fab", turns, cross, turns).real
    best = matches.flatten(1).argmax(1)
    motion = torch.stack([offsets[best % len(offsets)], offsets[best // len(offsets)]], dim=1)
    return torch.where((ink[1:].sum((1, 2)) > 1)[:, None], motion, 0.0)
