"""The JPEG reward against the size of files written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl import registry
from flowrl.errors import UserError
from flowrl.reward import Samples


def reward(**options: Any) -> Any:
    return registry.build("reward", {"name": "jpeg_compressibility", **options}, "rewards.0")


def pictures() -> torch.Tensor:
    ramp = torch.linspace(0, 1, 64).expand(3, 64, 64)
    return torch.stack([torch.full((3, 64, 64), 0.5), ramp, torch.rand(3, 64, 64)])


def test_it_is_the_size_of_the_file_in_kilobytes(tmp_path: Path) -> None:
    images = pictures()
    kilobytes = []
    for number, image in enumerate(images):
        file = tmp_path / f"{number}.jpg"
        Image.fromarray(np.uint8(np.rint(image.permute(1, 2, 0).numpy() * 255))).save(file, quality=95)
        kilobytes.append(file.stat().st_size / 1000)
    expected = torch.tensor(kilobytes)
    samples, nothing = Samples(images), [{}] * 3
    assert torch.allclose(reward()(samples, [""] * 3, nothing), -expected / 500)
    assert torch.allclose(reward(scale=1)(samples, [""] * 3, nothing), -expected)
    assert torch.allclose(reward(scale=1, incompressible=True)(samples, [""] * 3, nothing), expected)
    assert kilobytes == sorted(kilobytes)  # flat, smooth, noise


def test_a_lower_quality_takes_fewer_bytes() -> None:
    samples = Samples(pictures())
    low, high = (reward(quality=quality)(samples, [""] * 3, [{}] * 3) for quality in (20, 95))
    assert (low >= high).all() and low[2] > high[2]


def test_wrong_options_and_video_are_refused() -> None:
    with pytest.raises(UserError, match=r"rewards\.0\.scale = 0"):
        reward(scale=0)
    with pytest.raises(UserError, match="needs images"):
        reward()(Samples(torch.zeros(1, 4, 3, 16, 16), fps=8.0), [""], [{}])
