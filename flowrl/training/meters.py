"""Meters of a set of images that stand beside every reward, so that reward hacking can be seen.

A reward that rises while brightness, edges or colours collapse, or while the samples of one prompt become
alike, is being gamed. All meters are pure functions of images float in [0, 1] (N, 3, H, W) and return
plain floats, the mean over the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

EDGE = 0.1  # luma step from pixel to pixel that counts as an edge
BINS = 8  # levels of each channel in the colour histogram
DIVERSITY_SIDE = 64  # larger images are averaged down to this side before they are compared


def image_meters(images: Tensor) -> dict[str, float]:
    """All meters of single images by name: brightness, contrast, saturation, edge_density, color_entropy.

    Args:
        images: float in [0, 1] (N, 3, H, W).

    Raises:
        ValueError: for another shape or an empty set.
    """
    return {
        "brightness": brightness(images),
        "contrast": contrast(images),
        "saturation": saturation(images),
        "edge_density": edge_density(images),
        "color_entropy": color_entropy(images),
    }


def brightness(images: Tensor) -> float:
    """Mean luma (Rec. 601), in [0, 1]."""
    return float(_luma(images).mean())


def contrast(images: Tensor) -> float:
    """Standard deviation of the luma over an image's pixels, in [0, 0.5]; the mean over images."""
    return float(_luma(images).flatten(1).std(dim=1, correction=0).mean())


def saturation(images: Tensor) -> float:
    """HSV saturation in [0, 1], (max - min) / max of the channels and 0 for black; the mean over pixels."""
    _check(images)
    high, low = images.amax(1), images.amin(1)
    return float(torch.where(high > 0, (high - low) / high.clamp_min(1e-6), 0.0).mean())


def edge_density(images: Tensor) -> float:
    """Fraction of pixels where the luma changes by more than `EDGE` towards the next pixel, in [0, 1].

    The change is the length of the forward difference (right, below); the last row and column have none
    and are left out.
    """
    luma = _luma(images)
    right = luma[:, :-1, 1:] - luma[:, :-1, :-1]
    below = luma[:, 1:, :-1] - luma[:, :-1, :-1]
    return float((torch.hypot(right, below) > EDGE).float().mean())


def color_entropy(images: Tensor) -> float:
    """Shannon entropy of an image's colours, in bits, 0 to 9; the mean over images.

    The colours are counted in `BINS` equal bins for each channel.
    """
    _check(images)
    levels = (images * BINS).long().clamp(0, BINS - 1)
    index = (levels[:, 0] * BINS + levels[:, 1]) * BINS + levels[:, 2]
    total = 0.0
    for row in index.flatten(1):
        share = torch.bincount(row, minlength=BINS**3).double() / row.numel()
        total += float(torch.special.entr(share).sum())
    return total / len(images) / float(torch.log(torch.tensor(2.0, dtype=torch.float64)))


def pairwise_diversity(images: Tensor, groups: Tensor | None = None) -> float:
    """How different the samples of one prompt are: the RMS pixel distance of two of them, in [0, 1].

    The mean over all pairs in a group, then over the groups that have a pair. Images with a side above
    `DIVERSITY_SIDE` are averaged down first, so that fine noise is no diversity.

    Args:
        images: float in [0, 1] (N, 3, H, W).
        groups: the prompt of each image (N,), integers; None compares all images with each other, for
            sets with one sample a prompt.

    Returns:
        the mean distance; NaN if no group has two images.

    Raises:
        ValueError: for another shape or an empty set.
    """
    _check(images)
    if groups is None:
        groups = torch.zeros(len(images), dtype=torch.long)
    if tuple(groups.shape) != (len(images),):
        raise ValueError(f"need one group for each of {len(images)} images, got shape {tuple(groups.shape)}")
    height, width = images.shape[2:]
    if max(height, width) > DIVERSITY_SIDE:
        images = F.adaptive_avg_pool2d(images, (min(height, DIVERSITY_SIDE), min(width, DIVERSITY_SIDE)))
    pixels = images.flatten(1).float()
    means = []
    for group in groups.unique():
        members = pixels[groups == group]
        if len(members) > 1:
            means.append(torch.pdist(members).double().mean() / members.shape[1] ** 0.5)
    return float(torch.stack(means).mean()) if means else float("nan")


def text_diversity(texts: Sequence[str], groups: Tensor) -> float:
    """The share of pairs of one prompt's texts that differ, in [0, 1]: the mean over groups with a pair."""
    shares = []
    for group in groups.unique():
        members = [text for text, other in zip(texts, groups.tolist(), strict=True) if other == group]
        pairs = list(combinations(members, 2))
        if pairs:
            shares.append(sum(a != b for a, b in pairs) / len(pairs))
    return sum(shares) / len(shares) if shares else float("nan")


def _luma(images: Tensor) -> Tensor:
    _check(images)
    red, green, blue = images.float().unbind(1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _check(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != 3 or len(images) == 0:
        raise ValueError(f"need images (N, 3, H, W) with N >= 1, got shape {tuple(images.shape)}")
