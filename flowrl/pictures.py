"""Pictures named in data files: a local file, or a data URI that holds the picture itself."""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.errors import UserError

HEAD = "data:image/png;base64,"


def open_picture(source: Any) -> Image.Image:
    """The RGB picture that a record's ``image`` names.

    Args:
        source: path of a file, or "data:image/png;base64,..." (any format that Pillow reads).

    Raises:
        UserError: if it is neither, or holds no picture.
    """
    if not isinstance(source, str):
        raise UserError(f"image = {source!r}: the path of a picture or a data URI is needed")
    try:
        if source.startswith("data:"):
            head, _, body = source.partition(";base64,")
            if not body:
                raise UserError(f"image = {head[:40]!r}...: a data URI must be in base64")
            file: Any = io.BytesIO(base64.b64decode(body, validate=True))
        else:
            file = Path(source)
        with Image.open(file) as picture:
            return picture.convert("RGB")
    except (OSError, binascii.Error, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise UserError(f"image = {source[:80]!r}: no picture can be read ({reason})") from None


def data_uri(picture: Image.Image) -> str:
    """The picture as a data URI, PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return HEAD + base64.b64encode(buffer.getvalue()).decode()


def stretched(picture: Image.Image, size: int) -> Image.Image:
    """The picture as a square of so many pixels a side, whatever its shape was."""
    return picture.resize((size, size))


def padded(picture: Image.Image, size: int) -> Image.Image:
    """The picture in the middle of a grey square, its longer side filling it (FUDOKI, arXiv 2505.20147)."""
    scale = size / max(picture.size)
    width, height = (max(1, int(side * scale)) for side in picture.size)
    square = Image.new("RGB", (size, size), (127, 127, 127))
    shrunk = picture.resize((width, height), Image.Resampling.BILINEAR)
    square.paste(shrunk, ((size - width) // 2, (size - height) // 2))
    return square
