"""Checkpoints that are whole or absent.

``step_000012/`` holds a ``<group>.safetensors`` for every group of tensors, ``state.json``, and
``manifest.json`` with the size and SHA-256 of each. It is written under another name, fsynced, read back
and only then renamed, and no older one is deleted before. No file format in use notices a flipped bit, so
the manifest does, for every file and for itself. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowrl.errors import UserError
from flowrl.training.run_folder import open_regular, sync_folder, write_file
from flowrl.training.tracking import exact_json

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
SUFFIX = ".safetensors"
MAX_HEADER = 32 << 20  # bytes; the names and shapes of some 200,000 tensors
MAX_MANIFEST = 1 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP_NAME = re.compile(r"(?:\.old-)?step_(\d{6,15})")
_DTYPES = {
    getattr(torch, name): code
    for name, code in zip(
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split(),
        "F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL".split(),
        strict=True,
    )
}

_NOT_OPTIONS = ("params", "param_names")

JSON: TypeAlias = Any  # None, bool, int, float, str, and lists and str-keyed dicts of these


class CorruptCheckpoint(UserError):
    """A checkpoint is torn, damaged or not what its name says; the message names the file."""


class _Groups(Mapping[str, dict[str, Tensor]]):
    """The tensor groups of a checkpoint, read from disk when asked for."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder, self._names = folder, names

    def __getitem__(self, group: str) -> dict[str, Tensor]:
        if group not in self._names:
            raise KeyError(group)
        path = self._folder / f"{group}{SUFFIX}"
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                # cloned, since the mapped file may be rotated away while the tensors live on
                return {name: file.get_tensor(name).clone() for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpoint(f"{path} can no longer be read: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        step: the iteration after which it was saved.
        path: its folder.
        tensors: CPU tensors by group and name; a group is read each time it is asked for.
        state: the rest of the run's state.
    """

    step: int
    path: Path
    tensors: Mapping[str, dict[str, Tensor]]
    state: dict[str, JSON]


class CheckpointStore:
    """The checkpoints of one run. At most one process may save; any may read."""

    def __init__(self, folder: Path | str, keep: int = 2, *, readonly: bool = False) -> None:
        """Makes the folder and clears what a killed process left half done.

        Args:
            folder: where the checkpoints are.
            keep: how many of the newest stay.
            readonly: change nothing on disk; for readers beside a running process.

        Raises:
            UserError: if ``keep`` is less than 1 or the folder cannot be written.
        """
        if keep < 1:
            raise UserError(f"checkpoint.keep = {keep}: at least 1 must be kept")
        self.folder, self.keep = Path(folder), keep
        self._damaged: set[Path] = set()
        self._resumed = False
        try:
            if not readonly:
                self._prepare()
        except OSError as error:
            raise UserError(f"cannot write to the checkpoint folder {folder}: {error.strerror}") from error

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, JSON]) -> Path:
        """Writes a checkpoint, durably, and then deletes those that it supersedes.

        Superseded are all but the ``keep`` newest, damaged ones, and, where this store was read before,
        those of later steps: a run that went on from an earlier step has left their course.

        Returns:
            The checkpoint's folder.

        Raises:
            UserError: if state is not JSON, a group's name is not a plain file name, later steps are there
                of a run that was not resumed, or the disk fails; the checkpoints before then stay.
        """
        final = self.folder / _step_name(step)
        later = [path.name for other, path in self._found() if other > step]
        if later and not self._resumed:
            raise UserError(f"{self.folder} holds {later[0]} of a run that was not resumed; use another name")
        contents: dict[str, Iterator[bytes | memoryview]] = {STATE: iter([exact_json(state, "state")])}
        for group, named in tensors.items():
            if not _PLAIN_NAME.fullmatch(group):
                raise UserError(f"checkpoint group {group!r} is not a plain file name")
            contents[f"{group}{SUFFIX}"] = _safetensors(named)
        temporary = self.folder / f".tmp-{final.name}-{secrets.token_hex(4)}"
        try:
            os.mkdir(temporary)
            files = {}
            for name, chunks in contents.items():
                size, checksum = write_file(temporary / name, chunks)
                files[name] = {"sha256": checksum, "size": size}
            write_file(temporary / MANIFEST, [_manifest({"files": files, "format": FORMAT, "step": step})])
            sync_folder(temporary)
            _verify(temporary, step)
            self._publish(temporary, final)
        except (OSError, UserError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"cannot save the checkpoint {final}: {reason}; those before it stay") from error
        if later:
            logger.warning("%s supersedes %s, from which this run did not go on", final, ", ".join(later))
        self._rotate(step)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest intact checkpoint, or None if there are none at all.

        A damaged one is passed over with a warning that names the file, its expected and its actual hash.

        Raises:
            CorruptCheckpoint: if there are checkpoints and none is intact: to start afresh in silence would
                destroy the run.
            UserError: for a checkpoint of an unknown format.
        """
        failures = []
        for step, path in self._found():
            try:
                checkpoint = _open(path, step)
                self._resumed = True
                return checkpoint
            except CorruptCheckpoint as error:
                logger.warning("damaged checkpoint passed over: %s", error)
                failures.append(str(error))
                self._damaged.add(path)
        if failures:
            raise CorruptCheckpoint(f"no checkpoint in {self.folder} is intact: {'; '.join(failures)}")
        return None

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of a step, and no other.

        Raises:
            CorruptCheckpoint: if it is damaged.
            UserError: if there is none, or its format is unknown.
        """
        found = dict(self._found())
        if step not in found:
            known = ", ".join(str(other) for other in sorted(found)) or "none"
            raise UserError(f"{self.folder} has no checkpoint of step {step}; steps there: {known}")
        checkpoint = _open(found[step], step)
        self._resumed = True
        return checkpoint

    def _prepare(self) -> None:
        """Makes the folder, puts back what a crash left moved aside, and deletes litter."""
        os.makedirs(self.folder, exist_ok=True)
        sync_folder(self.folder.parent)
        for entry in sorted(os.listdir(self.folder)):
            path = self.folder / entry
            final = path.with_name(entry.removeprefix(".old-"))
            if entry.startswith(".old-step_") and not os.path.lexists(final):
                os.rename(path, final)
            elif entry.startswith((".old-step_", ".tmp-step_", ".trash-")):
                self._delete(path)

    def _found(self) -> list[tuple[int, Path]]:
        """Steps and folders, newest first; one moved aside counts while its replacement is not in place."""
        entries = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        found = {}
        for entry in entries:  # ".old-step_..." sorts before "step_...", which then takes its place
            match = _STEP_NAME.fullmatch(entry)
            if match and entry.endswith(_step_name(int(match[1]))):
                found[int(match[1])] = self.folder / entry
        return sorted(found.items(), reverse=True)

    def _publish(self, temporary: Path, final: Path) -> None:
        if os.path.lexists(final):  # this step saved again, or a damaged one of the same name
            aside = final.with_name(f".old-{final.name}")
            if os.path.lexists(aside):
                self._delete(aside)
            os.rename(final, aside)
        os.rename(temporary, final)
        sync_folder(self.folder)
        self._damaged.discard(final)

    def _rotate(self, step: int) -> None:
        """Deletes what a checkpoint that is safely there supersedes."""
        entries = sorted(os.listdir(self.folder))
        doomed = [self.folder / entry for entry in entries if entry.startswith(".old-step_")]
        kept = 0
        for other, path in self._found():
            good = other <= step and path not in self._damaged and kept < self.keep
            kept += good
            if not good and path not in doomed:
                doomed.append(path)
        for path in doomed:
            self._delete(path)
        self._damaged.clear()

    def _delete(self, path: Path) -> None:
        """Deletes a folder under another name, so that a half deleted one is never taken for a checkpoint."""
        try:
            if not path.name.startswith(".trash-"):
                trash = path.with_name(f".trash-{secrets.token_hex(4)}")
                os.rename(path, trash)
                path = trash
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except OSError as error:
            # not worth ending a run for: the next start tries again
            logger.warning("cannot delete the old checkpoint %s: %s", path, error.strerror)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes; equal exactly when all tensors are, bit for bit."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        total.update(_bytes(tensor))
    return total.hexdigest()


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """An optimizer's state as tensors ``<key>/<parameter name>`` and JSON.

    Names, not positions, tie state to parameters: a model that lists its parameters in another order
    resumes right, and one with other parameters is refused. Tensors are not copied.

    Args:
        optimizer: a torch optimizer, or a wrapper that shows its ``state`` and ``param_groups``.
        parameters: parameters by name; those that the optimizer does not hold are passed over.

    Raises:
        UserError: if the optimizer holds an unnamed parameter, or state that is neither tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, JSON] = {}
    groups = _named_groups(optimizer, parameters)
    for members in groups:
        for name, parameter in members.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{key}/{name}"] = value
                else:
                    scalars.setdefault(name, {})[key] = value
    options = [
        {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if key not in _NOT_OPTIONS}
        for group in optimizer.param_groups
    ]
    state = {
        "kind": _kind(optimizer),
        "groups": _shapes(groups),
        "options": options,
        "scalars": scalars,
    }
    exact_json(state, "the optimizer's state")
    return tensors, state


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, JSON],
) -> None:
    """Puts back what `flatten_optimizer` took, bit for bit, the learning rate and its like included.

    `Optimizer.load_state_dict` would cast the state to the parameter's dtype and tie it by position.

    Raises:
        UserError: if the kind, or the parameters' names, groups or shapes differ; nothing is changed then.
    """
    if state["kind"] != _kind(optimizer):
        raise UserError(f"the checkpoint's optimizer is {state['kind']}, this run's is {_kind(optimizer)}")
    groups = _named_groups(optimizer, parameters)
    if _shapes(groups) != state["groups"]:
        saved, here = (
            {str(item) for group in g for item in group.items()} for g in (state["groups"], _shapes(groups))
        )
        raise UserError(
            f"the optimizer's parameters or groups are not the checkpoint's; e.g. {sorted(saved ^ here)[:4]}"
        )
    kept: dict[str, dict[str, Any]] = {}
    for place, tensor in tensors.items():
        key, _, name = place.partition("/")
        kept.setdefault(name, {})[key] = tensor
    for group, members, options in zip(optimizer.param_groups, groups, state["options"], strict=True):
        for key, value in options.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        step_on_device = bool(group.get("fused") or group.get("capturable"))
        for name, parameter in members.items():
            optimizer.state.pop(parameter, None)
            restored = dict(state["scalars"].get(name, {}))
            for key, tensor in kept.get(name, {}).items():
                device = parameter.device if key != "step" or step_on_device else "cpu"
                # a copy, since the optimizer will update it in place
                restored[key] = tensor.to(device=device, copy=True)
            if restored:
                optimizer.state[parameter] = restored


def _named_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = optimizer.param_groups
    if any(id(parameter) not in names for group in groups for parameter in group["params"]):
        raise UserError("the optimizer holds a parameter that is not among the named ones")
    return [{names[id(parameter)]: parameter for parameter in group["params"]} for group in groups]


def _shapes(groups: list[dict[str, Tensor]]) -> list[dict[str, list[int]]]:
    return [{name: list(parameter.shape) for name, parameter in group.items()} for group in groups]


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(
        getattr(optimizer, "optimizer", optimizer)
    ).__name__  # accelerate's wrapper holds the real one


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The safetensors format tensor by tensor: the library's own writer holds a whole group twice."""
    # wide types first, so that every tensor lies aligned, as the library does it
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES or name == "__metadata__":
            raise UserError(f"tensor {name!r} of {tensor.dtype} cannot be saved")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield _bytes(tensors[name])


def _step_name(step: int) -> str:
    if step < 0:
        raise UserError(f"checkpoint step {step} is negative")
    return f"step_{step:06d}"


def _manifest(body: Mapping[str, JSON]) -> bytes:
    """The manifest file: a body and its SHA-256, in one fixed spelling."""
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"body": body, "sha256": checksum}, indent=1, sort_keys=True).encode() + b"\n"


def _open(path: Path, step: int) -> Checkpoint:
    groups = [name.removesuffix(SUFFIX) for name in _verify(path, step) if name.endswith(SUFFIX)]
    try:
        return Checkpoint(step, path, _Groups(path, groups), json.loads((path / STATE).read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path / STATE}: {error}") from error


def _verify(path: Path, step: int) -> list[str]:
    """Checks every byte of a checkpoint; returns its file names or raises CorruptCheckpoint."""
    try:
        if path.is_symlink():
            raise CorruptCheckpoint(f"{path} is a symbolic link")
        files = _read_manifest(path / MANIFEST, step)
        present = set(os.listdir(path)) - {MANIFEST}
        if present != files.keys():
            missing, extra = sorted(files.keys() - present), sorted(present - files.keys())
            raise CorruptCheckpoint(f"{path}: files missing {missing}, files not in its manifest {extra}")
        for name, entry in files.items():
            _verify_file(path / name, entry)
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error
    return list(files)


def _read_manifest(path: Path, step: int) -> dict[str, dict[str, Any]]:
    """The files of a manifest that is, to the byte, what this module writes."""
    with open_regular(path) as file:
        raw = file.read(MAX_MANIFEST)
    try:
        whole = json.loads(raw)
        body, recorded = whole["body"], whole["sha256"]
        rewritten = _manifest(body)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is not a manifest: {error!r}") from error
    if raw != rewritten:
        actual = json.loads(rewritten)["sha256"]
        raise CorruptCheckpoint(f"{path}: SHA-256 of its body {recorded} expected, {actual} found")
    version = body.get("format") if isinstance(body, dict) else None
    if version != FORMAT:
        raise UserError(f"{path} has format {version!r}; this release reads {FORMAT}")
    if body.get("step") != step:
        raise CorruptCheckpoint(f"{path} is of step {body.get('step')}, not {step}")
    files = body.get("files")
    if not isinstance(files, dict) or STATE not in files:
        raise CorruptCheckpoint(f"{path} lists no {STATE}")
    for name, entry in files.items():
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
            raise CorruptCheckpoint(f"{path} lists {name!r}, which is not a plain file name")
        if not isinstance(entry, dict) or entry.keys() != {"sha256", "size"}:
            raise CorruptCheckpoint(f"{path} lacks the size or SHA-256 of {name}")
    return files


def _verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["size"]:
            raise CorruptCheckpoint(f"{path}: {entry['size']} bytes expected, {size} found")
        actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != entry["sha256"]:
            raise CorruptCheckpoint(f"{path}: SHA-256 {entry['sha256']} expected, {actual} found")
        if path.suffix == SUFFIX:
            # a hash says nothing of who made the file: one may ask for any amount of memory
            file.seek(0)
            header = int.from_bytes(file.read(8), "little")
            if header > min(size, MAX_HEADER):
                raise CorruptCheckpoint(f"{path}: a header of {header} bytes in a file of {size}")
            with safe_open(path, framework="pt", device="cpu"):
                pass  # it checks that the tensors lie inside of the file, without gaps or overlaps
