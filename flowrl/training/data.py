"""Prompts: reading them, and which of them an iteration trains on, as a function of its number.

The order of prompts has no state: iteration i takes the next P entries of an endless sequence of seeded
permutations of the prompt file. Every prompt appears once an epoch, resume needs no cursor, and the
number of ranks plays no part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.errors import UserError
from flowrl.mdp.seeds import derive_seed, generator
from flowrl.mdp.trajectory import Request
from flowrl.pictures import open_picture

MAX_PROMPT_CHARACTERS = 20_000


@dataclass(frozen=True)
class Prompt:
    """One entry of a prompt file: its text and its record."""

    text: str
    metadata: dict[str, Any]


def read_prompts(path: Path, key: str) -> list[Prompt]:
    """Reads a prompt file: JSONL records with a ``prompt`` (GenEval's schema), or one prompt a line.

    A record may have an ``image``, the picture that a question is about: a path, relative to the file, or a
    data URI.

    Args:
        path: a ``.jsonl`` or a text file.
        key: the config key, for messages.

    Raises:
        UserError: for a missing, unreadable or empty file, or a line that is no record, with its number.
    """
    if not path.is_file():
        raise UserError(f"{key} = {str(path)!r}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error.reason})"
        raise UserError(f"{key} = {str(path)!r}: {reason}") from None
    prompts = []
    # not by splitlines(), which also splits at characters that JSON allows inside a text
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        record: Any = {"prompt": line.strip()}
        if path.suffix == ".jsonl":
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", str(error))
                raise UserError(f"{key}: {path} line {number}: not JSON ({reason})") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise UserError(f"{key}: {path} line {number}: a record needs a 'prompt' text")
        if len(record["prompt"]) > MAX_PROMPT_CHARACTERS:
            raise UserError(f"{key}: {path} line {number}: longer than {MAX_PROMPT_CHARACTERS} characters")
        if "image" in record:
            try:
                record["image"] = _picture(record["image"], path.parent)
            except UserError as error:
                raise UserError(f"{key}: {path} line {number}: {error}") from None
        prompts.append(Prompt(record["prompt"], record))
    if not prompts:
        raise UserError(f"{key} = {str(path)!r}: holds no prompt")
    return prompts


def _picture(source: Any, folder: Path) -> Any:
    """A record's ``image``, checked; relative paths are relative to the prompt file."""
    if isinstance(source, str) and not source.startswith("data:"):
        source = str(folder / source)
    open_picture(source)
    return source


class PromptSampler:
    """Which prompts, members and seeds an iteration consists of."""

    def __init__(
        self,
        prompts: list[Prompt],
        *,
        prompts_per_iteration: int,
        group_size: int,
        micro_batch_size: int,
        seed: int,
        shared_initial_noise: bool,
    ) -> None:
        """Args are those of the recipe; see `flowrl.config.TrainingConfig` for their geometry."""
        self.prompts = prompts
        self.per_iteration = prompts_per_iteration
        self.group_size = group_size
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.shared_initial_noise = shared_initial_noise

    def chosen(self, iteration: int) -> list[Prompt]:
        """The P prompts of an iteration (counted from 0)."""
        count = len(self.prompts)
        start = iteration * self.per_iteration
        return [
            self.prompts[self._order(position // count)[position % count]]
            for position in range(start, start + self.per_iteration)
        ]

    def requests(self, iteration: int) -> list[Request]:
        """All micro-batches of an iteration, over all ranks, in order."""
        rows = [
            (prompt, slot, member)
            for slot, prompt in enumerate(self.chosen(iteration))
            for member in range(self.group_size)
        ]
        size = self.micro_batch_size
        return [self._request(iteration, rows[i : i + size]) for i in range(0, len(rows), size)]

    def groups(self) -> torch.Tensor:
        """(N,) int64: the group (slot of the iteration) of every sample, in the order of `requests`."""
        return torch.arange(self.per_iteration).repeat_interleave(self.group_size)

    def _request(self, iteration: int, rows: list[tuple[Prompt, int, int]]) -> Request:
        def seeds(purpose: str, shared: bool) -> tuple[int, ...]:
            return tuple(
                derive_seed(self.seed, purpose, iteration, slot, 0 if shared else member)
                for _, slot, member in rows
            )

        return Request(
            prompts=tuple(prompt.text for prompt, _, _ in rows),
            metadata=tuple(prompt.metadata for prompt, _, _ in rows),
            groups=tuple(slot for _, slot, _ in rows),
            initial_seeds=seeds("initial", self.shared_initial_noise),
            step_seeds=seeds("steps", False),
        )

    def _order(self, epoch: int) -> list[int]:
        order: list[int] = torch.randperm(
            len(self.prompts), generator=generator(self.seed, "prompts", epoch)
        ).tolist()
        return order
