"""Reward ``jpeg_compressibility``: how few bytes an image takes as a JPEG, or how many.

    reward = -size / scale        (or +size / scale if `incompressible`),    size in kB (1000 bytes)

Source: DDPO, arXiv 2305.13301, section 5.1 (JPEG of quality 95). `scale` = 1 is DDPO's unit, 500 is that
of Flow-GRPO. Differs from the authors' code: none known.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, register
from flowrl.reward import Samples


@register("reward", "jpeg_compressibility")
class JpegCompressibility:
    """Minus (or plus) the kilobytes of each image as a JPEG, over `scale`; higher is better."""

    class Config(ComponentConfig):
        """Options of the ``jpeg_compressibility`` reward."""

        incompressible: bool = False
        scale: float = Field(default=500.0, gt=0)
        quality: int = Field(default=95, ge=1, le=100)

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config

    def __call__(
        self, samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        """Scores (B,), float32, in kB over `scale`; reads only the images.

        Raises:
            UserError: for video, which has no JPEG.
        """
        if samples.images.ndim != 4 or samples.images.shape[1] != 3:
            raise UserError(
                f"reward jpeg_compressibility: needs images (B, 3, H, W), got {tuple(samples.images.shape)}"
            )
        pixels = (samples.images.detach().clamp(0, 1) * 255).round().to("cpu", torch.uint8)
        sizes = [self._kilobytes(image.permute(1, 2, 0).numpy()) for image in pixels]
        sign = 1 if self.config.incompressible else -1
        return sign * torch.tensor(sizes, dtype=torch.float32) / self.config.scale

    def _kilobytes(self, image: Any) -> float:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=self.config.quality)
        return buffer.tell() / 1000
