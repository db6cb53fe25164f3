"""Convert: released weights become a pipeline folder that ``model.path`` takes, verified by loading it."""

from __future__ import annotations

import os
import pkgutil
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from flowrl import registry
from flowrl.build import pipeline_class
from flowrl.convert import Part, Parts, find_source, read_safetensors
from flowrl.errors import UserError
from flowrl.safe_yaml import parse_yaml


def convert(name: str, source: str, options: list[str], out: Path, console: Console) -> None:
    """Converts and verifies; see ``flowrl convert --help``.

    Args:
        name: of a converter.
        source: a folder, or a hub id.
        options: ``key=value`` of the converter.
        out: a folder that does not exist yet.
        console: where the notes go.

    Raises:
        UserError: for whatever does not fit; then nothing is left under ``out``.
    """
    if out.exists():
        raise UserError(f"--out {out} exists: a conversion does not overwrite")
    spec: dict[str, Any] = {"name": name}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or not key:
            raise UserError(f"option {option!r}: write it as key=value")
        spec[key] = parse_yaml(value)
    converter = registry.build("converter", spec, "convert")
    folder = find_source(source)
    parts: Parts = converter(folder, read_safetensors(folder))
    pipe = assemble(parts)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        pipe.save_pretrained(part)
        verify(pipe, part)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for note in parts.notes:
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"converted to {out}, verified by loading it", highlight=False, soft_wrap=True)


def assemble(parts: Parts) -> Any:
    """The pipeline, its networks holding the given tensors."""
    components = {
        name: make(name, part) if isinstance(part, Part) else part for name, part in parts.components.items()
    }
    return pkgutil.resolve_name(parts.pipeline)(**components, **parts.options)


def make(name: str, part: Part) -> Any:
    """A component; UserError if a tensor has the wrong shape."""
    cls = pkgutil.resolve_name(part.cls)
    if not part.tensors:
        return cls(**part.config)
    with torch.device("meta"):  # nothing is allocated: the tensors take the place of the parameters
        network = cls(**part.config)
    try:
        network.load_state_dict(dict(part.tensors), strict=True, assign=True)
    except RuntimeError as error:
        raise UserError(f"{name}: {' '.join(str(error).split())}") from None
    return network.eval()


def verify(pipe: Any, folder: Path) -> None:
    """Raises UserError unless the folder loads with exactly the weights of the pipeline."""
    loaded = pipeline_class(str(folder)).from_pretrained(folder, use_safetensors=True)
    if type(loaded) is not type(pipe):
        raise UserError(f"the converted pipeline loads as {type(loaded).__name__}, not {type(pipe).__name__}")
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            other = loaded.components[name].state_dict()
            for key, tensor in component.state_dict().items():
                if key not in other or not torch.equal(tensor, other[key].to(tensor.dtype)):
                    raise UserError(f"the converted pipeline does not load: {name}.{key} differs")
