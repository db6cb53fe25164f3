"""Conversion of released weights into a pipeline folder: what a converter is, and how its source is read.

A converter is a callable ``converter(folder, tensors) -> Parts`` (register one with
``@register("converter", name)``): it knows the names of a release, and says which tensors of it are which
weights of which class. Reading, checking and writing are the same for all; only safetensors and JSON are
read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file
from torch import Tensor

from flowrl.errors import UserError
from flowrl.registry import nearest

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Part:
    """A component to be made: its class as ``module:Class``, its config, and its weights by name."""

    cls: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """A pipeline to be made.

    Attributes:
        pipeline: its class as ``module:Class``.
        components: by name; a `Part`, or an object that saves itself, such as a tokenizer.
        options: of the pipeline's own config.
        notes: what the user should know, e.g. what was left out.
    """

    pipeline: str
    components: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Converter(Protocol):
    """The contract of a converter."""

    def __call__(self, folder: Path, tensors: dict[str, Tensor]) -> Parts:
        """The pipeline that a source's folder and its tensors by name make; UserError for a wrong name."""


def find_source(source: str) -> Path:
    """The folder of a source; for a hub id, its safetensors and JSON files are downloaded.

    Raises:
        UserError: if it is no folder and no hub id.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.suffix in PICKLES:
        raise UserError(_pickled([path.name]))
    if path.exists():
        raise UserError(f"{source} is a file: give the folder, with its config.json and tokenizer")
    if not HUB_ID.fullmatch(source) or source.split("/")[0] in (".", ".."):
        raise UserError(f"{source}: no such folder, and not a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:
        raise UserError(f"{source} cannot be downloaded: {error}") from error


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, single or sharded.

    Raises:
        UserError: if there are none, a shard is missing or broken, or a name comes twice.
    """
    index = folder / INDEX
    if index.is_file():
        shards = sorted({str(name) for name in read_json(index).get("weight_map", {}).values()})
        files = [folder / Path(name).name for name in shards]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        raise UserError(_pickled(pickled) if pickled else f"{folder} has no *.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder}: {file.name} is missing, which {INDEX} names")
        try:
            loaded = load_file(file)
        except Exception as error:
            raise UserError(f"{file} is no safetensors file: {error}") from error
        twice = sorted(tensors.keys() & loaded.keys())
        if twice:
            raise UserError(f"{folder}: {twice[0]} is in several files")
        tensors.update(loaded)
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; UserError if the file is missing or holds none."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file.parent} has no {file.name}") from None
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}: an object is needed")
    return tree


class Source:
    """A source's tensors under a converter's own names, whatever they are called in the files."""

    def __init__(
        self, tensors: Mapping[str, Tensor], name: Callable[[str], str], unused: Callable[[str], bool]
    ) -> None:
        """Keeps what is used.

        Args:
            tensors: by their names in the files.
            name: the name in the files of one of the converter's names.
            unused: whether a name in the files is of no use to the converter.
        """
        self.name = name
        self.skipped = sorted(filter(unused, tensors))
        self.tensors = {key: tensor for key, tensor in tensors.items() if not unused(key)}

    def __getitem__(self, name: str) -> Tensor:
        """A tensor; UserError if it is missing."""
        if self.name(name) not in self.tensors:
            raise UserError(f"missing key: {self.name(name)}")
        return self.tensors[self.name(name)]

    def count(self, name: str) -> int:
        """How many ``name.0.*``, ``name.1.*`` ... there are."""
        number = 0
        while any(key.startswith(self.name(f"{name}.{number}.")) for key in self.tensors):
            number += 1
        return number

    def check(self, names: Iterable[str]) -> None:
        """Raises UserError unless these are all names; it gives the first that are missing or unexpected."""
        expected = set(map(self.name, names))
        missing, unexpected = sorted(expected - set(self.tensors)), sorted(set(self.tensors) - expected)
        if missing:
            raise UserError(f"{len(missing)} missing key(s), the first: {', '.join(missing[:3])}")
        if unexpected:
            near = nearest(unexpected[0], expected)
            raise UserError(
                f"{len(unexpected)} unexpected key(s), the first: {', '.join(unexpected[:3])}{near}"
            )

    def notes(self) -> tuple[str, ...]:
        """What is of no use, in a line."""
        kinds = sorted({".".join(key.removeprefix("model.").split(".")[:2]) for key in self.skipped})
        return (f"left out: {len(self.skipped)} tensors of {', '.join(kinds)}",) if kinds else ()


def _pickled(names: list[str]) -> str:
    return (
        f"{', '.join(names)}: a pickle can run code when it is read, so none is; convert it to safetensors "
        "where you trust it (safetensors.torch.save_file)"
    )
