"""One folder a run: its lock, its metrics, its config, and the durable writes beneath them all.

``metrics.jsonl`` holds only what a rerun reproduces bit for bit; wall-clock figures go to
``timings.jsonl``. Both are cut back to the checkpoint's iteration on resume, so that a killed and resumed
run leaves the same file as one that was never killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.training.signals import FolderLock
from flowrl.training.tracking import JsonLines, plain

logger = logging.getLogger(__name__)

ABSENT = "<absent>"


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes and fsyncs a new file; returns size and SHA-256 of what was meant to be written."""
    size, digest = 0, hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for chunk in chunks:
            rest = memoryview(chunk)
            digest.update(rest)
            size += len(rest)
            while len(rest):
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"size": size, "sha256": digest.hexdigest()}


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file to read; follows no symbolic link, waits for no pipe, raises OSError."""
    file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def measure_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a regular file as it is on disk, in the form that `write_file` returns."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable; file systems that cannot sync a folder are let pass."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file so that a crash leaves the old content or the new; UserError if it cannot."""
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        write_file(temporary, [data])
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def safe_name(text: str) -> str:
    """A name that is one plain path component: letters, digits, ``._-``, not hidden, at most 100 long.

    A name that had to be altered gets a hash of the original, so that two names never share a folder.

    Raises:
        UserError: if the name is empty.
    """
    if not text:
        raise UserError("a run needs a name; got an empty one")
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".-")[:100]
    if clean == text:
        return clean
    return f"{clean[:80]}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}".lstrip("-")


def config_hash(config: Mapping[str, Any], free: Collection[str] = ()) -> str:
    """SHA-256 of a resolved config without its free fields."""
    fields = {key: value for key, value in _flatten(config).items() if not _is_free(key, free)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def changed_fields(
    old: Mapping[str, Any], new: Mapping[str, Any], free: Collection[str] = ()
) -> list[tuple[str, Any, Any]]:
    """The fields that differ, as (dotted key, old value, new value), without those under a free prefix."""
    before, after = _flatten(old), _flatten(new)
    keys = [key for key in sorted(before.keys() | after.keys()) if not _is_free(key, free)]
    pairs = [(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys]
    # compared as text, so that NaN equals itself and 1 differs from 1.0 and from True
    return [(key, a, b) for key, a, b in pairs if json.dumps(a) != json.dumps(b)]


class RunFolder:
    """The folder of one run; as a context manager it holds the run's lock.

    Reading and logging need no lock, so that only the main process of a distributed run takes it.
    """

    def __init__(self, root: Path | str, name: str) -> None:
        """Makes the folder ``<root>/<name>``.

        Args:
            root: the folder of all runs.
            name: the run's name; anything but a plain path component is altered by `safe_name`.

        Raises:
            UserError: if the folder cannot be made.
        """
        self.path = Path(root) / safe_name(name)
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.timings = JsonLines(self.path / "timings.jsonl")
        self.lock = FolderLock(self.path / "run.lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)
        except OSError as error:
            raise UserError(f"cannot make the run folder {self.path}: {error.strerror}") from error

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints belong."""
        return self.path / "checkpoints"

    def __enter__(self) -> RunFolder:
        """Takes the lock and clears what a killed process left half written.

        Raises:
            UserError: if another process holds the lock, or the folder cannot be written.
        """
        self.lock.acquire()
        for litter in self.path.glob(".tmp-*"):
            with contextlib.suppress(OSError):
                os.unlink(litter)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Gives the lock back."""
        self.lock.release()

    def log_metrics(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Appends an iteration's reproducible figures to ``metrics.jsonl``; no wall-clock figures here."""
        self.metrics.append({"iteration": iteration, **values})

    def log_timings(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Appends an iteration's wall-clock figures to ``timings.jsonl``."""
        self.timings.append({"iteration": iteration, **values})

    def sync(self) -> None:
        """Makes the logged lines durable; to be called before a checkpoint that counts on them."""
        self.metrics.sync()
        self.timings.sync()

    def truncate_metrics(self, last_iteration: int) -> int:
        """Drops torn lines and those after an iteration from both logs; returns how many it dropped."""
        return self.metrics.truncate(last_iteration) + self.timings.truncate(last_iteration)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces ``summary.json`` atomically."""
        text = json.dumps(plain(summary), indent=2, allow_nan=False)
        write_atomically(self.path / "summary.json", text.encode() + b"\n")

    def read_config(self) -> dict[str, Any] | None:
        """The config that the run was started with, or None for a new run; UserError if unreadable."""
        import yaml  # here, so that a worker that only checkpoints does not pay for it

        path = self.path / "config.yaml"
        if not path.exists():
            return None
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from error
        if not isinstance(config, dict):
            raise UserError(f"{path} holds no mapping")
        return config

    def write_config(
        self, config: Mapping[str, Any], free: Collection[str] = (), allow_change: bool = False
    ) -> None:
        """`check_config`, then `store_config`."""
        self.check_config(config, free, allow_change)
        self.store_config(config)

    def check_config(
        self, config: Mapping[str, Any], free: Collection[str] = (), allow_change: bool = False
    ) -> None:
        """Compares the resolved config with that of the run so far.

        Args:
            config: the resolved config as plain data.
            free: prefixes of keys that may change freely, e.g. ``training.iterations`` or ``tracking``.
            allow_change: log changed fields instead of refusing them.

        Raises:
            UserError: listing the changed fields with old and new values.
        """
        old = self.read_config()
        changes = [] if old is None else changed_fields(old, config, free)
        if changes:
            listed = "; ".join(f"{key}: {before!r} -> {after!r}" for key, before, after in changes)
            if not allow_change:
                raise UserError(f"{self.path} was started with another config: {listed}; see --allow-change")
            logger.warning("%s goes on with a changed config: %s", self.path, listed)

    def store_config(self, config: Mapping[str, Any]) -> None:
        """Writes the resolved config."""
        import yaml

        text = yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text.encode())


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested data as dotted keys; an empty mapping or list stays a value, so that it is not lost."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    flat: dict[str, Any] = {}
    for key, item in items:
        dotted = f"{prefix}{key}"
        if isinstance(item, Mapping | list | tuple) and item:
            flat.update(_flatten(item, f"{dotted}."))
        else:
            flat[dotted] = item
    return flat


def _is_free(key: str, free: Collection[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in free)
