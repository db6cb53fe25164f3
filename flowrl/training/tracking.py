"""Where figures go: JSON lines that are the record of a run, and trackers that show it.

`JsonLines` is the truth that tests compare; TensorBoard and W&B are views that may be lost. Only the main
process of a distributed run builds either.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor  # run folders and their figures need no torch


class JsonLines:
    """A file of one JSON object a line, each with the key ``iteration``; floats are exact."""

    def __init__(self, path: Path) -> None:
        """Opens nothing yet; the file appears with its first line."""
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a line in one write, so that a killed process tears the last line at most.

        Raises:
            UserError: if the disk is full or the file cannot be written; what was torn is taken back.
        """
        line = json.dumps(plain(record), allow_nan=False).encode() + b"\n"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                size = os.fstat(descriptor).st_size
                if os.write(descriptor, line) != len(line):
                    os.ftruncate(descriptor, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error

    def sync(self) -> None:
        """Makes the lines durable."""
        if self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def truncate(self, last_iteration: int) -> int:
        """Drops torn lines and those after an iteration; returns how many it dropped.

        Raises:
            UserError: if the file cannot be written.
        """
        if not self.path.exists():
            return 0
        content = self.path.read_bytes()
        lines = content.splitlines(keepends=True)
        kept = [line for line in lines if _iteration(line) <= last_iteration]
        # a record that lacks only its newline is whole
        wanted = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in kept)
        if wanted != content:
            temporary = self.path.with_name(f".tmp-{self.path.name}")
            try:
                with open(temporary, "wb") as file:
                    file.write(wanted)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
            except OSError as error:
                raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        return len(lines) - len(kept)

    def sum_of(self, *keys: str) -> float:
        """The sum of some figures over all lines, none of which may be torn (see `truncate`)."""
        if not self.path.exists():
            return 0.0
        records = [json.loads(line) for line in self.path.read_bytes().splitlines()]
        return float(sum(record.get(key) or 0.0 for record in records for key in keys))


class Tracker(Protocol):
    """A view of a run's figures."""

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Shows figures of an iteration; names with slashes form groups, e.g. ``reward/mean``."""

    def images(self, name: str, images: Tensor, iteration: int) -> None:
        """Shows images in [0, 1] (B, 3, H, W) as one grid."""

    def close(self) -> None:
        """Writes out what is pending."""


class NullTracker:
    """Shows nothing."""

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Does nothing."""

    def images(self, name: str, images: Tensor, iteration: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class TensorBoardTracker:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, last_iteration: int | None = None) -> None:
        """Opens a new event file.

        Args:
            folder: where the event files go.
            last_iteration: on resume, the checkpoint's iteration; later points of the run before are hidden.

        Raises:
            UserError: if the folder cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        purge_step = None if last_iteration is None else last_iteration + 1
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        except OSError as error:
            raise UserError(f"cannot write TensorBoard's folder {folder}: {error.strerror}") from error

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Shows figures of an iteration."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)

    def images(self, name: str, images: Tensor, iteration: int) -> None:
        """Shows images in [0, 1] (B, 3, H, W) as one grid."""
        pixels = images.detach().float().clamp(0, 1).cpu()
        self._writer.add_images(name, pixels, iteration)

    def close(self) -> None:
        """Writes out what is pending."""
        self._writer.close()


class WandbTracker:
    """A run on Weights & Biases, through accelerate's tracker."""

    def __init__(self, project: str, run: str, folder: Path, config: Mapping[str, Any] | None = None) -> None:
        """Starts the run, or goes on with the one of that name.

        Args:
            project: the project on W&B.
            run: the run's name and id; W&B itself passes over points that it already has.
            folder: where W&B keeps its local files.
            config: the resolved config.

        Raises:
            UserError: if wandb is not installed.
        """
        if importlib.util.find_spec("wandb") is None:
            raise UserError("tracking by wandb needs the extra: pip install 'flowrl-suite[wandb]'")
        from accelerate.tracking import WandBTracker

        self._tracker = WandBTracker(project, name=run, id=run, resume="allow", dir=str(folder))
        self._tracker.start()
        self._tracker.store_init_configuration(plain(config or {}))

    def scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Shows figures of an iteration."""
        self._tracker.log(dict(values), step=iteration)

    def images(self, name: str, images: Tensor, iteration: int) -> None:
        """Shows images in [0, 1] (B, 3, H, W)."""
        pixels = images.detach().float().clamp(0, 1).mul(255).round().byte().cpu()
        self._tracker.log_images({name: list(pixels.permute(0, 2, 3, 1).numpy())}, step=iteration)

    def close(self) -> None:
        """Writes out what is pending."""
        self._tracker.finish()


def plain(value: Any) -> Any:
    """JSON data whose floats survive exactly; NaN and infinities, which JSON lacks, become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def exact_json(value: Any, where: str) -> bytes:
    """JSON from which the same data comes back; NaN and infinities are spelt as Python spells them.

    Raises:
        UserError: for what JSON would change in silence, such as a tuple, an int key or a tensor.
    """
    _require_exact(value, where)
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def seal(body: Mapping[str, Any]) -> bytes:
    """JSON of a mapping and its SHA-256, in one fixed spelling."""
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"body": body, "sha256": checksum}, indent=1, sort_keys=True).encode() + b"\n"


def unseal(data: bytes) -> dict[str, Any]:
    """The mapping that was sealed; raises ValueError if a single bit differs from what `seal` wrote."""
    try:
        whole = json.loads(data)
        body, recorded = whole["body"], whole["sha256"]
        again = seal(body)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not sealed JSON ({type(error).__name__})") from error
    if data != again or not isinstance(body, dict):
        actual = json.loads(again)["sha256"]
        raise ValueError(f"SHA-256 of the body {recorded} expected, {actual} found")
    return body


def _require_exact(value: Any, where: str) -> None:
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise UserError(f"{where} has the key {key!r}, which JSON would turn into a string")
            _require_exact(item, f"{where}.{key}")
    elif type(value) is list:
        for index, item in enumerate(value):
            _require_exact(item, f"{where}.{index}")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise UserError(f"{where} is a {type(value).__name__}, which JSON would not bring back as it is")


def _iteration(line: bytes) -> float:
    """The iteration of a record, or infinity for a torn one."""
    try:
        value = json.loads(line)["iteration"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf
    return value if isinstance(value, int) else math.inf
