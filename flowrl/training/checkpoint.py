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
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from flowrl.errors import UserError
from flowrl.mdp.shards import spread_like
from flowrl.training.run_folder import measure_file, open_regular, sync_folder, write_file
from flowrl.training.tracking import exact_json, seal, unseal

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST, STATE, SUFFIX = "manifest.json", "state.json", ".safetensors"
MAX_HEADER = 32 << 20  # bytes; the names and shapes of some 200,000 tensors
MAX_MANIFEST = 1 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP_NAME = re.compile(r"(?:\.old-)?step_(\d{6,15})")
_NOT_OPTIONS = ("params", "param_names")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
JSON: TypeAlias = Any  # None, bool, int, float, str, and lists and str-keyed dicts of these


class CorruptCheckpoint(UserError):
    """A checkpoint is torn, damaged or not what its name says; the message names the file."""


class _Groups(UserDict[str, Any]):
    """Tensor groups by name: holds the paths of their files, and reads one when it is asked for."""

    def __getitem__(self, group: str) -> dict[str, Tensor]:
        path = self.data[group]
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                # cloned, since the mapped file may be rotated away while the tensors live on
                return {name: file.get_tensor(name).clone() for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpoint(f"{path} can no longer be read: {error}") from error


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; ``tensors`` are by group and name, and read when a group is asked for."""

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
            keep: how many of the newest stay, at least 1.
            readonly: change nothing on disk; for readers beside a running process.

        Raises:
            UserError: if the folder cannot be written.
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
        """Writes a checkpoint, durably, then deletes those that it supersedes; returns its folder.

        Superseded are all but the ``keep`` newest, damaged ones, and, where this store was read before,
        those of later steps: a run that went on from an earlier step has left their course.

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
            files = {name: write_file(temporary / name, chunks) for name, chunks in contents.items()}
            write_file(temporary / MANIFEST, [seal({"files": files, "format": FORMAT, "step": step})])
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
            CorruptCheckpoint: if none is intact; to start afresh in silence would destroy the run.
            UserError: for a checkpoint of an unknown format.
        """
        failures = []
        for step, path in self._found():
            try:
                return self._open(path, step)
            except CorruptCheckpoint as error:
                logger.warning("damaged checkpoint passed over: %s", error)
                failures.append(str(error))
                self._damaged.add(path)
        if failures:
            raise CorruptCheckpoint(f"no checkpoint in {self.folder} is intact: {'; '.join(failures)}")
        return None

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of a step; CorruptCheckpoint if it is damaged, UserError if there is none."""
        found = dict(self._found())
        if step not in found:
            raise UserError(f"{self.folder} has no checkpoint of step {step}; it has {sorted(found)}")
        return self._open(found[step], step)

    def _open(self, path: Path, step: int) -> Checkpoint:
        groups, state = _verify(path, step)
        self._resumed = True
        return Checkpoint(step, path, _Groups(groups), state)

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
            trash = path.with_name(f".trash-{secrets.token_hex(4)}")
            os.rename(path, trash)
            sync_folder(self.folder)
            if trash.is_dir() and not trash.is_symlink():
                shutil.rmtree(trash)
            else:
                os.unlink(trash)
        except OSError as error:
            # not worth ending a run for: the next start tries again
            logger.warning("cannot delete the old checkpoint %s: %s", path, error.strerror)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes; equal exactly when all tensors are, bit for bit."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        total.update(_bytes(tensor))
    return total.hexdigest()


def flatten_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """An optimizer's state as tensors ``<key>/<parameter name>`` and JSON.

    Names, not positions, tie state to parameters: a model that lists its parameters in another order
    resumes right, and one with other parameters is refused. Tensors are not copied.

    Raises:
        UserError: if the optimizer holds an unnamed parameter, or state that is neither tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, JSON] = {}
    groups, state = _describe(optimizer, parameters)
    for members in groups:
        for name, parameter in members.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{key}/{name}"] = value
                else:
                    scalars.setdefault(name, {})[key] = value
    state["options"] = [
        {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if key not in _NOT_OPTIONS}
        for group in optimizer.param_groups
    ]
    state["scalars"] = scalars
    exact_json(state, "the optimizer's state")
    return tensors, state


def restore_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], state: JSON
) -> None:
    """Puts back what `flatten_optimizer` took, bit for bit, the learning rate and its like included.

    `Optimizer.load_state_dict` would cast the state to the parameter's dtype and tie it by position.

    Raises:
        UserError: if the kind, or the parameters' names, groups or shapes differ; nothing is changed then.
    """
    groups, here = _describe(optimizer, parameters)
    if state["kind"] != here["kind"]:
        raise UserError(f"the checkpoint's optimizer is {state['kind']}, this run's is {here['kind']}")
    if state["groups"] != here["groups"]:
        saved, own = ({str(item) for g in side["groups"] for item in g.items()} for side in (state, here))
        odd = sorted(saved ^ own)[:4]
        raise UserError(f"the optimizer's parameters or groups are not the checkpoint's; e.g. {odd}")
    owners: dict[str, tuple[Tensor, dict[str, Any]]] = {}
    for group, members, options in zip(optimizer.param_groups, groups, state["options"], strict=True):
        for key, value in options.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for name, parameter in members.items():
            owners[name] = (parameter, group)
            optimizer.state.pop(parameter, None)
    for name, values in state["scalars"].items():
        optimizer.state[owners[name][0]].update(values)
    for place, tensor in tensors.items():
        key, name = place.split("/", 1)
        parameter, group = owners[name]
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        copied = tensor.to("cpu" if on_host else parameter.device, copy=True)  # updated in place later
        optimizer.state[parameter][key] = spread_like(copied, parameter)


def _describe(
    optimizer: Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[list[dict[str, Tensor]], dict[str, JSON]]:
    """The named parameters of each group, and what a checkpoint and a run must agree on."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        raise UserError("the optimizer holds a parameter that is not among the named ones")
    groups = [{names[id(p)]: p for p in group["params"]} for group in optimizer.param_groups]
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__  # accelerate's wrapper has the inner one
    return groups, {"kind": kind, "groups": [{n: list(p.shape) for n, p in g.items()} for g in groups]}


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The safetensors format tensor by tensor: the library's own writer holds a whole group twice."""
    # wide types first, so that every tensor lies aligned, as the library does it
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype, shape = tensors[name].dtype, list(tensors[name].shape)
        if dtype not in _DTYPES or name == "__metadata__":
            raise UserError(f"tensor {name!r} of {dtype} cannot be saved")
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
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


def _verify(path: Path, step: int) -> tuple[dict[str, Path], dict[str, JSON]]:
    """Checks every byte of a checkpoint; returns the paths of its groups, and its state."""
    where = path
    try:
        if path.is_symlink():
            raise CorruptCheckpoint(f"{path} is a symbolic link")
        files = _read_manifest(path / MANIFEST, step)
        present = set(os.listdir(path)) - {MANIFEST}
        if present != files.keys():
            missing, extra = sorted(files.keys() - present), sorted(present - files.keys())
            raise CorruptCheckpoint(f"{path}: files missing {missing}, files not in its manifest {extra}")
        groups = {}
        for name, expected in files.items():
            where = path / name
            found = measure_file(where)
            if found != expected:
                raise CorruptCheckpoint(f"{where}: expected {expected}, found {found}")
            if name.endswith(SUFFIX):
                _check_header(where)
                groups[name.removesuffix(SUFFIX)] = where
        where = path / STATE
        return groups, json.loads(where.read_bytes())
    except (OSError, SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where}: {error}") from error


def _read_manifest(path: Path, step: int) -> dict[str, Any]:
    with open_regular(path) as file:
        raw = file.read(MAX_MANIFEST)
    try:
        body = unseal(raw)
    except ValueError as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error
    if body.get("format") != FORMAT:
        raise UserError(f"{path} has format {body.get('format')!r}; this release reads {FORMAT}")
    if body.get("step") != step:
        raise CorruptCheckpoint(f"{path} is of step {body.get('step')}, not {step}")
    files = body.get("files")
    if not isinstance(files, dict) or STATE not in files:
        raise CorruptCheckpoint(f"{path} lists no {STATE}")
    for name in files:
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
            raise CorruptCheckpoint(f"{path} lists {name!r}, which is not a plain file name")
    return files


def _check_header(path: Path) -> None:
    # a right hash says nothing of who made the file, and a header may ask for any amount of memory
    with open_regular(path) as file:
        if (length := int.from_bytes(file.read(8), "little")) > MAX_HEADER:
            raise CorruptCheckpoint(f"{path}: a header of {length} bytes")
    with safe_open(path, framework="pt", device="cpu"):
        pass  # it checks that the tensors lie inside of the file, without gaps or overlaps
