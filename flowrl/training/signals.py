"""How a run gets along with other processes: it heeds their signals, and keeps them off its folder.

A signal asks for a stop at the next safe point, where a checkpoint can be written; a second one means now.
The lock names its holder, so that the message of a refused process says whom to wait for.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from flowrl.errors import UserError

logger = logging.getLogger(__name__)

LOCK_GRACE_S = 10.0  # a lock without readable content may be one that is just being written


class GracefulStop:
    """Turns the first SIGTERM, SIGINT or SIGUSR1 into a flag, and the second into an immediate exit.

    Python lets only the main thread install handlers: elsewhere this logs a warning and does nothing.
    The handlers found on entering are put back on leaving.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
        exit_codes: Mapping[signal.Signals, int] | None = None,
    ) -> None:
        """Installs nothing yet.

        Args:
            signals: the signals to heed.
            exit_codes: exit codes that differ from 128 + n, e.g. a scheduler's requeue code for SIGUSR1.
        """
        self.signals = tuple(signals)
        self.signal: signal.Signals | None = None
        self._exit_codes = dict(exit_codes or {})
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has asked for a stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code that tells the caller of the stop: 143 for SIGTERM, 130 for SIGINT, 0 for none."""
        if self.signal is None:
            return 0
        return self._exit_codes.get(self.signal, 128 + self.signal)

    def __enter__(self) -> GracefulStop:
        """Installs the handlers."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: signals will not stop this run gracefully")
            return self
        for number in self.signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Puts the former handlers back."""
        while self._before:
            number, handler = self._before.popitem()
            # None stands for a handler that was not installed from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # no clean-up: whatever the run is doing, its files are whole at any moment
            os._exit(128 + number)
        self.signal = signal.Signals(number)


class FolderLock:
    """A lock file with the pid, host and start time of its holder.

    One left behind by a dead process of this host is recovered; of another host nothing can be known.
    """

    def __init__(self, path: Path) -> None:
        """Takes nothing yet; the folder of ``path`` must exist by the time of `acquire`."""
        self.path = path
        self._held: bytes | None = None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            UserError: if another process holds it, or the folder cannot be written.
        """
        content = json.dumps(_holder()).encode()
        try:
            for _ in range(20):
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    descriptor = os.open(self.path, flags, 0o644)
                except FileExistsError:
                    self._clear_stale()
                    continue
                try:
                    os.write(descriptor, content)
                except OSError:
                    os.unlink(self.path)
                    raise
                finally:
                    os.close(descriptor)
                self._held = content
                return
        except OSError as error:
            raise UserError(f"cannot write to the run folder {self.path.parent}: {error.strerror}") from error
        raise UserError(f"cannot take the lock {self.path}: other processes keep taking it")

    def release(self) -> None:
        """Gives the lock back; does nothing in a forked child or when it is not held."""
        held, self._held = self._held, None
        with contextlib.suppress(OSError):
            if held and json.loads(held)["pid"] == os.getpid() and self.path.read_bytes() == held:
                os.unlink(self.path)

    def _clear_stale(self) -> None:
        """Removes the lock of a dead process; raises UserError if its holder may live."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with open(descriptor, "rb") as file:
            # Two processes may find the same stale lock. Only one at a time may remove it, and only while
            # the name still leads to the file that was judged: else the second would remove a fresh lock.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            judged = os.fstat(file.fileno())
            try:
                if not os.path.samestat(judged, os.stat(self.path)):
                    return
            except FileNotFoundError:
                return
            holder = _parse(file.read(4096))
            if holder is None:
                alive = time.time() - judged.st_mtime < LOCK_GRACE_S
            else:
                alive = _may_live(holder)
            if alive:
                who = holder or {"pid": "?", "host": "?", "started": "just now"}
                raise UserError(
                    f"the run folder {self.path.parent} is in use by process {who['pid']} on {who['host']}, "
                    f"started {who['started']}; wait for it or choose another name "
                    f"(if that process is surely gone, delete {self.path})"
                )
            logger.warning("recovered the lock %s of a process that is gone", self.path)
            os.unlink(self.path)


def _holder() -> dict[str, Any]:
    """What a lock says of this process."""
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": started, "process": _birth(pid)}


def _parse(content: bytes) -> dict[str, Any] | None:
    """The holder that a lock file names, or None for a torn one."""
    try:
        holder = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(holder, dict) or not {"pid", "host", "started"} <= holder.keys():
        return None
    return holder if isinstance(holder["pid"], int) and holder["pid"] > 0 else None


def _may_live(holder: Mapping[str, Any]) -> bool:
    """Whether the holder of a lock may still run; on another host it always may."""
    if holder["host"] != socket.gethostname():
        return True
    try:
        os.kill(holder["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it exists and belongs to someone else
    # the pid may have been given to another process since, or be a zombie's
    return holder.get("process") in (None, _birth(holder["pid"]))


def _birth(pid: int) -> str | None:
    """Boot and start time of a living process, which tell it from a later one of the same pid."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None  # no /proc on this system
    return "dead" if fields[0] in "ZX" else f"{boot}:{fields[19]}"
