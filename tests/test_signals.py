"""Signals and locks, tried on real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from flowrl.errors import UserError
from flowrl.training.signals import FolderLock, GracefulStop

WORKER = """
import sys, time
from flowrl.training.signals import GracefulStop
import signal
codes = {signal.SIGUSR1: 85} if "requeue" in sys.argv else None
with GracefulStop(exit_codes=codes) as stop:
    print("ready", flush=True)
    while not stop.requested or "stuck" in sys.argv:
        if stop.requested:
            print("asked", flush=True)
            time.sleep(60)
        time.sleep(0.005)
    print("saved", flush=True)
sys.exit(stop.exit_code)
"""

HOLDER = """
import sys
from pathlib import Path
from flowrl.training.signals import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "arguments", "code"),
    [
        (signal.SIGTERM, (), 143),
        (signal.SIGINT, (), 130),
        (signal.SIGUSR1, (), 138),
        (signal.SIGUSR1, ("requeue",), 85),
    ],
)
def test_first_signal_stops_at_the_next_safe_point(number, arguments, code):
    worker = start(WORKER, *arguments)
    assert worker.stdout.readline() == "ready\n"
    worker.send_signal(number)
    out, err = worker.communicate(timeout=20)
    assert (out, err, worker.returncode) == ("saved\n", "", code)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_exits_at_once(second):
    worker = start(WORKER, "stuck")
    assert worker.stdout.readline() == "ready\n"
    worker.send_signal(signal.SIGTERM)
    assert worker.stdout.readline() == "asked\n"
    before = time.monotonic()
    worker.send_signal(second)
    out, _ = worker.communicate(timeout=20)
    assert (out, worker.returncode) == ("", 128 + second)
    assert time.monotonic() - before < 5


def test_handlers_are_put_back():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with GracefulStop() as outer, GracefulStop() as inner:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert inner.requested and inner.signal is signal.SIGUSR1
        assert not outer.requested and outer.exit_code == 0
    with pytest.raises(RuntimeError), GracefulStop():
        raise RuntimeError
    assert [signal.getsignal(number) for number in numbers] == before


def test_outside_of_the_main_thread_nothing_is_installed(caplog):
    def run():
        with GracefulStop() as stop:
            assert not stop.requested

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "not in the main thread" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_process_is_refused_and_a_dead_ones_lock_recovered(tmp_path):
    path = tmp_path / "run.lock"
    holder = start(HOLDER, path)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(
        UserError, match=rf"in use by process {holder.pid} on {socket.gethostname()}"
    ) as caught:
        FolderLock(path).acquire()
    assert "\n" not in str(caught.value)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
    lock = FolderLock(path)
    lock.acquire()
    assert json.loads(path.read_bytes())["pid"] == os.getpid()
    lock.release()
    assert not path.exists()
    lock.release()
    holder.communicate()


def test_whose_lock_is_stale(tmp_path):
    path = tmp_path / "run.lock"
    lock = FolderLock(path)
    lock.acquire()
    mine = json.loads(path.read_bytes())
    with pytest.raises(UserError, match=str(os.getpid())):
        FolderLock(path).acquire()

    def holds(**changes):
        path.write_text(json.dumps(mine | changes))
        try:
            FolderLock(path).acquire()
        except UserError:
            return True
        return False

    assert holds(host="elsewhere")  # nothing can be known of it
    assert holds(process=None)  # a system that tells no birth times
    assert not holds(process="other-boot:1")  # the pid is another process's by now
    assert not holds(pid=2**22 + 1)
    assert not holds(pid=2**80)
    path.write_bytes(b"")
    with pytest.raises(UserError):  # perhaps it is just being written
        FolderLock(path).acquire()
    for torn in (b"", b'{"pid": 1', b"[]", b'{"pid": -1, "host": "x", "started": ""}'):
        path.write_bytes(torn)
        os.utime(path, (time.time() - 60, time.time() - 60))
        FolderLock(path).acquire()


def test_of_many_that_find_a_stale_lock_one_takes_it(tmp_path):
    path = tmp_path / "run.lock"
    for _ in range(20):
        path.write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "started": "long ago"}))
        barrier, winners = threading.Barrier(8), []

        def take(barrier=barrier, winners=winners):
            lock = FolderLock(path)
            barrier.wait()
            try:
                lock.acquire()
                winners.append(lock)
            except UserError:
                pass

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        winners[0].release()
