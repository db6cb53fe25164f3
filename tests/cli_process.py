"""The command line in processes of its own, without paying for its imports each time.

A server process does the imports once and forks a child for every command. What a child does from there on
is what the ``flowrl`` script does: it can be killed, and its exit code and streams are its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Inherited by the server, which starts with the first command.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "flowrl.build",
        "flowrl.tools.report",
        "flowrl.rewards.scene",
        "flowrl.pipelines.flow_matching",
        "diffusers.pipelines.sana.pipeline_sana",
        "transformers.models.gemma2.modeling_gemma2",
    ]
)


@dataclass(frozen=True)
class Done:
    """A command that has ended: exit code (negative for a signal), streams."""

    code: int
    out: str
    err: str


def start(arguments: list[str], streams: Path) -> BaseProcess:
    """Starts ``flowrl <arguments>`` in the project folder, its output in ``<streams>.out`` and ``.err``."""
    process = SERVER.Process(target=_command, args=(arguments, str(streams)), name=str(streams))
    process.start()
    return process


def done(process: BaseProcess) -> Done:
    """Waits for a command."""
    process.join()
    out, err = (Path(f"{process.name}.{kind}").read_text(encoding="utf-8") for kind in ("out", "err"))
    assert process.exitcode is not None
    return Done(process.exitcode, out, err)


def _command(arguments: list[str], streams: str) -> None:
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{streams}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, descriptor)
    os.chdir(ROOT)
    sys.argv = ["flowrl", *arguments]
    from flowrl import cli

    cli.main()
