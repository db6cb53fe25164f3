"""Checkpoints under crashes, a full disk, damage and malice, and optimizer state to the bit."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save

from flowrl.errors import UserError
from flowrl.training import checkpoint, run_folder
from flowrl.training.checkpoint import (
    CheckpointStore,
    CorruptCheckpoint,
    digest,
    flatten_optimizer,
    restore_optimizer,
)
from flowrl.training.tracking import seal


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """What must be synced is tested by `FaultyDisk`; the subprocesses below do sync."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def content(step):
    generator = torch.Generator().manual_seed(step)
    policy = {"weight": torch.randn(6, 5, generator=generator), "bias": torch.randn(5, generator=generator)}
    return {"policy": policy, "ema": {"weight": policy["weight"].bfloat16()}}, {"seen": [step, step / 3]}


def fill(folder, *steps, keep=2):
    store = CheckpointStore(folder, keep)
    for step in steps:
        store.save(step, *content(step))
    return store


def assert_is(found, step):
    tensors, state = content(step)
    assert found.step == step and found.state == state and set(found.tensors) == set(tensors)
    for group, named in tensors.items():
        assert digest(found.tensors[group]) == digest(named)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_round_trip(tmp_path):
    tensors = {
        str(dtype): torch.randn(3, 4).mul(9).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    }
    tensors |= {
        "scalar": torch.tensor(7.5, requires_grad=True),
        "empty": torch.zeros(0, 3),
        "view": torch.arange(12).view(3, 4).t(),
        "special": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    state = {"best": -float("inf"), "scale": 0.1, "none": None, "deep": [{"a": True}]}
    store = CheckpointStore(tmp_path / "deep" / "checkpoints")
    assert store.latest() is None
    path = store.save(12, {"policy": tensors, "nothing": {}}, state)
    assert path.name == "step_000012"
    found = store.latest()
    assert found.state == state and digest(found.tensors["policy"]) == digest(tensors)
    assert found.tensors["nothing"] == {}
    with pytest.raises(KeyError):
        found.tensors["other"]
    assert all(tensor.device.type == "cpu" for tensor in found.tensors["policy"].values())
    assert digest(load_file(path / "policy.safetensors")) == digest(tensors)  # the library reads it too
    held = found.tensors["policy"]
    shutil.rmtree(path)
    assert digest(held) == digest(tensors)  # and needs the file no longer
    with pytest.raises(CorruptCheckpoint, match="can no longer be read"):
        found.tensors["policy"]


def test_the_same_content_gives_the_same_bytes(tmp_path):
    first, again = fill(tmp_path / "a", 1), fill(tmp_path / "b", 1)
    for name in names(first.folder / "step_000001"):
        assert (first.folder / "step_000001" / name).read_bytes() == (
            again.folder / "step_000001" / name
        ).read_bytes()


def test_rotation_and_strict_load(tmp_path):
    store = fill(tmp_path, 1, 2, 3, 1000000)
    assert names(tmp_path) == ["step_000003", "step_1000000"]
    assert_is(store.latest(), 1000000)
    assert_is(store.load(3), 3)
    with pytest.raises(UserError, match=r"no checkpoint of step 2; it has \[3, 1000000\]"):
        store.load(2)


def test_going_on_from_an_earlier_step_leaves_the_later_course(tmp_path, caplog):
    fill(tmp_path, 5, 10)
    with pytest.raises(UserError, match="of a run that was not resumed"):
        CheckpointStore(tmp_path).save(1, *content(1))
    assert names(tmp_path) == ["step_000005", "step_000010"]
    store = CheckpointStore(tmp_path)
    assert_is(store.load(5), 5)
    store.save(6, *content(6))
    assert "supersedes step_000010" in caplog.text
    assert_is(store.latest(), 6)


@pytest.mark.parametrize(
    ("tensors", "state", "match"),
    [
        ({"../x": {}}, {}, "not a plain file name"),
        ({"a/b": {}}, {}, "not a plain file name"),
        ({"": {}}, {}, "not a plain file name"),
        ({"a": {"x": torch.zeros(1, dtype=torch.complex64)}}, {}, "complex64 cannot be saved"),
        ({"a": {"__metadata__": torch.zeros(1)}}, {}, "cannot be saved"),
        ({}, {"x": (1, 2)}, r"state\.x is a tuple"),
        ({}, {"x": {1: 2}}, r"state\.x has the key 1"),
        ({}, {"x": [torch.tensor(1)]}, r"state\.x\.0 is a Tensor"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path, tensors, state, match):
    store = fill(tmp_path, 1)
    with pytest.raises(UserError, match=match):
        store.save(2, tensors, state)
    assert names(tmp_path) == ["step_000001"]
    with pytest.raises(UserError, match="negative"):
        store.save(-1, {}, {})
    with pytest.raises(UserError, match=r"checkpoint\.keep = 0"):
        CheckpointStore(tmp_path, keep=0)


class Crash(BaseException):
    """The process is gone: no handler of the code under test may see this."""


class FaultyDisk:
    """Stands in for `os` and `shutil`; fails at the n-th call that changes the disk.

    ``kill`` keeps all that was done before; ``power`` also loses what was not yet fsynced, data and renames;
    ``full`` raises OSError instead.
    """

    CHANGES = ("mkdir", "write", "fsync", "rename", "replace", "unlink", "rmtree")

    def __init__(self, mode="kill", fail_at=None):
        self.mode, self.fail_at, self.count = mode, fail_at, 0
        self.unsynced, self.lost, self.renames = {}, [], []

    def __getattr__(self, name):
        real = getattr(os, name) if hasattr(os, name) else getattr(shutil, name)
        if name in ("open", "close"):
            return object.__getattribute__(self, f"do_{name}")
        return (lambda *a, **o: self.change(name, real, *a, **o)) if name in self.CHANGES else real

    def do_open(self, path, flags, *mode):
        descriptor = os.open(path, flags, *mode)
        if flags & os.O_CREAT:
            self.unsynced[descriptor] = os.dup(descriptor)
        return descriptor

    def do_close(self, descriptor):
        if descriptor in self.unsynced:
            self.lost.append(self.unsynced.pop(descriptor))
        os.close(descriptor)

    def change(self, name, real, *arguments, **options):
        self.count += 1
        if self.count - 1 == self.fail_at:
            if name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            if name == "rmtree":
                os.unlink(min(os.scandir(arguments[0]), key=lambda entry: entry.name).path)
            if self.mode == "full":
                raise OSError(28, "No space left on device")
            if self.mode == "power":
                self.lose()
            raise Crash
        result = real(*arguments, **options)
        if name == "rename":
            self.renames.append(arguments)
        if name == "fsync":
            copy = self.unsynced.pop(arguments[0], None)
            if copy is None:
                self.renames.clear()  # a folder's
            else:
                os.close(copy)
        return result

    def lose(self):
        for source, target in reversed(self.renames):
            if os.path.lexists(target) and not os.path.lexists(source):
                os.rename(target, source)
        for copy in (*self.unsynced.values(), *self.lost):
            os.ftruncate(copy, 0)

    def forget(self):
        for copy in (*self.unsynced.values(), *self.lost):
            os.close(copy)


def attempt(disk, action):
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint, run_folder):
            patch.setattr(module, "os", disk)
        patch.setattr(checkpoint, "shutil", disk)
        try:
            action()
        except Crash:
            return "crash"
        except UserError as error:
            assert "No space left" in str(error)
            return "refused"
        else:
            if disk.mode == "power":  # right after a save that was reported as done
                disk.lose()
            return "done"
        finally:
            disk.forget()


SCENARIOS = {
    "first": (lambda folder: folder.mkdir(), None, 1, 2),
    "next": (lambda folder: fill(folder, 1, 2), 2, 3, 2),
    "only one kept": (lambda folder: fill(folder, 1, keep=1), 1, 2, 1),
    "same step": (lambda folder: fill(folder, 7, keep=1), 7, 7, 1),
    "damaged": (lambda folder: (fill(folder, 1, 2), flip(folder / "step_000002" / "state.json", 9)), 1, 2, 2),
}


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def saved_value(folder, readonly):
    """What a restart finds, as its step and the mark that the scenario put into its state."""
    found = CheckpointStore(folder, readonly=readonly).latest()
    if found is None:
        return None
    tensors, _ = content(found.step)
    assert all(digest(found.tensors[group]) == digest(tensors[group]) for group in tensors)
    return found.step, found.state.get("mark")


@pytest.mark.parametrize("mode", ["kill", "power", "full"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_fault_at_any_call_leaves_the_old_or_the_new(tmp_path, mode, scenario):
    prepare, old_step, new_step, keep = SCENARIOS[scenario]
    prepare(tmp_path / "base")
    old, new = (old_step, None) if old_step is not None else None, (new_step, "new")
    tensors, state = content(new_step)

    def save(folder):
        store = CheckpointStore(folder, keep)
        store.latest()
        store.save(new_step, tensors, state | {"mark": "new"})

    shutil.copytree(tmp_path / "base", tmp_path / "clean")
    clean = FaultyDisk()
    assert attempt(clean, lambda: save(tmp_path / "clean")) == "done"
    assert clean.count > 10
    for index in range(clean.count + 1):
        folder = tmp_path / f"fault{index}"
        shutil.copytree(tmp_path / "base", folder)
        outcome = attempt(FaultyDisk(mode, index), lambda folder=folder: save(folder))
        allowed = [new] if outcome == "done" else [old, new]
        assert saved_value(folder, readonly=True) in allowed, index
        assert saved_value(folder, readonly=False) in allowed, index
        assert all(re.fullmatch(r"step_\d{6}", name) for name in names(folder)), (index, names(folder))
        if scenario != "damaged":  # what is there is whole, the half deleted included
            for name in names(folder):
                CheckpointStore(folder, readonly=True).load(int(name[5:]))
        save(folder)
        assert saved_value(folder, readonly=False) == new and len(names(folder)) <= keep
        shutil.rmtree(folder)


def test_a_disk_that_writes_something_else_is_found_out_before_the_rename(tmp_path, monkeypatch):
    store = fill(tmp_path, 1, keep=1)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, bytes(data).replace(b"seen", b"sean")))
        with pytest.raises(
            UserError, match=r"cannot save .*state\.json: expected .*, found .*; those before it stay"
        ):
            store.save(2, *content(2))
    assert names(tmp_path) == ["step_000001"]
    assert_is(store.latest(), 1)


def test_a_crash_while_recovering_from_a_crash(tmp_path):
    fill(tmp_path / "base", 7, keep=1)
    tensors, state = content(7)
    for first in range(40):
        folder = tmp_path / "once"
        shutil.copytree(tmp_path / "base", folder)
        save = FaultyDisk("kill", first)
        attempt(save, lambda folder=folder: CheckpointStore(folder, 1).save(7, tensors, state))
        for second in range(5):
            again = tmp_path / "twice"
            shutil.copytree(folder, again)
            attempt(FaultyDisk("power", second), lambda again=again: CheckpointStore(again, 1))
            assert saved_value(again, readonly=True) == saved_value(again, readonly=False) == (7, None)
            shutil.rmtree(again)
        shutil.rmtree(folder)
    assert save.count <= 40  # every call of the save was tried


def damaged(folder, caplog, named):
    """Asserts that step 2 is refused by name and that step 1 takes its place."""
    store = CheckpointStore(folder)
    with pytest.raises(CorruptCheckpoint, match=re.escape(named)) as caught:
        store.load(2)
    caplog.clear()
    assert_is(store.latest(), 1)
    assert named in caplog.text and "passed over" in caplog.text
    return str(caught.value)


def test_two_hundred_flipped_bits_are_all_seen(tmp_path, caplog):
    fill(tmp_path, 1, 2)
    path = tmp_path / "step_000002"
    files = sorted(path.iterdir())
    assert len(files) == 4
    rng = random.Random(0)
    for trial in range(200):
        file = files[trial % 4]
        bit = rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        message = damaged(tmp_path, caplog, str(file))
        if file.name != "manifest.json":
            expected = json.loads((path / "manifest.json").read_text())["body"]["files"][file.name]["sha256"]
            actual = hashlib.sha256(file.read_bytes()).hexdigest()
            assert re.search(f"expected .*{expected}.*, found .*{actual}", message)
        flip(file, bit)
    assert_is(CheckpointStore(tmp_path).latest(), 2)


def test_other_damage_is_seen(tmp_path, caplog):
    fill(tmp_path / "base", 1, 2)

    def check(change, named):
        shutil.copytree(tmp_path / "base", tmp_path / "copy")
        change(tmp_path / "copy" / "step_000002")
        damaged(tmp_path / "copy", caplog, named)
        shutil.rmtree(tmp_path / "copy")

    for name in names(tmp_path / "base" / "step_000002"):
        size = (tmp_path / "base" / "step_000002" / name).stat().st_size
        for length in (size - 1, size // 2, 0, size + 1):
            check(lambda path, name=name, length=length: os.truncate(path / name, length), name)
        check(lambda path, name=name: (path / name).unlink(), name)
        if name != "manifest.json":
            check(lambda path, name=name: shutil.copy(path.parent / "step_000001" / name, path / name), name)
    check(lambda path: (path / "extra.bin").touch(), "extra.bin")
    check(lambda path: (path / "sub").mkdir(), "sub")
    check(lambda path: (shutil.rmtree(path), path.touch()), "step_000002")
    check(lambda path: (shutil.rmtree(path), path.mkdir()), "manifest.json")
    check(lambda path: (shutil.rmtree(path), path.symlink_to("step_000001")), "symbolic link")
    swapped = "manifest.json is of step 1, not 2"
    check(lambda path: (shutil.rmtree(path), shutil.copytree(path.parent / "step_000001", path)), swapped)


def test_when_none_is_intact_nothing_starts_afresh(tmp_path):
    fill(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"step_00000{step}" / "state.json", 3)
    with pytest.raises(CorruptCheckpoint, match=r"no checkpoint in .* is intact: .*step_000002.*step_000001"):
        CheckpointStore(tmp_path).latest()


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    fill(tmp_path, 1, 2)
    flip(tmp_path / "step_000002" / "state.json", 3)
    store = CheckpointStore(tmp_path)
    assert_is(store.latest(), 1)
    store.save(3, *content(3))
    assert names(tmp_path) == ["step_000001", "step_000003"]


def test_a_full_disk_leaves_the_one_before_and_no_litter(tmp_path):
    script = """
import resource, sys, torch
from flowrl.errors import UserError
from flowrl.training.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(1, {"policy": {"weight": torch.ones(10)}}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    store.save(2, {"small": {"weight": torch.ones(10)}, "policy": {"weight": torch.ones(10000)}}, {})
except UserError as error:
    sys.exit(f"{error}")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r"cannot save the checkpoint .*step_000002: File too large; those before it stay\n", done.stderr
    )
    assert names(tmp_path) == ["step_000001"]
    assert CheckpointStore(tmp_path).latest().step == 1


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to the checkpoint folder .*Not a directory"):
        CheckpointStore(tmp_path / "file" / "checkpoints")
    assert CheckpointStore(tmp_path / "absent", readonly=True).latest() is None
    assert names(tmp_path) == ["file"]


def forge(folder, contents, manifest=None, **changes):
    """A step 2 whose manifest is in order but whose maker is not."""
    path = folder / "step_000002"
    path.mkdir()
    entries = {}
    for name, data in ({"state.json": b"{}"} | contents).items():
        entries[name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        if "/" not in name and "\0" not in name and name not in ("", ".", ".."):
            (path / name).write_bytes(data)
    body = {"files": entries, "format": 1, "step": 2} | changes
    (path / "manifest.json").write_bytes(manifest or seal(body))
    return path


@pytest.mark.parametrize(
    "name",
    ["../secret", "..", ".", "", "/etc/passwd", "a/b", "a\0b", ".hidden", "-rf", "a\nb", "~x", "x" * 200],
)
def test_a_manifest_names_plain_files_only(tmp_path, caplog, name):
    fill(tmp_path / "run", 1)
    (tmp_path / "run" / "secret").write_bytes(b"x")
    forge(tmp_path / "run", {name: b"x"})
    assert "not a plain file name" in damaged(tmp_path / "run", caplog, repr(name))


def test_links_and_pipes_are_refused(tmp_path, caplog):
    fill(tmp_path, 1)
    path = forge(tmp_path, {"policy.safetensors": save({"x": torch.ones(1)})})
    policy = path / "policy.safetensors"
    assert set(CheckpointStore(tmp_path).load(2).tensors) == {"policy"}
    policy.rename(tmp_path / "elsewhere")
    policy.symlink_to(tmp_path / "elsewhere")
    damaged(tmp_path, caplog, "policy.safetensors")
    policy.unlink()
    os.mkfifo(policy)
    damaged(tmp_path, caplog, "not a regular file")


def header(length, text=b"{}"):
    return length.to_bytes(8, "little") + text


MALICE = {
    "pickle": b"cos\nmkdir\n(S'marker'\ntR.",
    "header of 2^63 bytes": header(2**63),
    "header longer than the file": header(100 << 20),
    "header of 100 MB": header(100 << 20, b"{}" + b" " * ((100 << 20) - 2)),
    "header of 40 MB": header(40 << 20, b"{}" + b" " * ((40 << 20) - 2)),
    "not JSON": header(4, b"{{{{"),
    "offsets beyond the end": header(
        64, b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(64) + b"\0" * 4
    ),
    "overlapping": header(
        120,
        b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"y":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'.ljust(120)
        + b"\0" * 4,
    ),
    "empty": b"",
}


@pytest.mark.parametrize("kind", MALICE)
def test_malicious_tensor_files_are_refused(tmp_path, caplog, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "run", 1)
    forge(tmp_path / "run", {"policy.safetensors": MALICE[kind]})
    damaged(tmp_path / "run", caplog, "step_000002")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "manifest",
    [
        b"[" * 100_000,
        b"null",
        b"{}",
        b"\xff\xfe",
        b'{"body": {}, "sha256": 1}',
        b"9" * 100_000,
        b" " * (2 << 20),
    ],
    ids=range(7),
)
def test_malformed_manifests_are_refused(tmp_path, caplog, manifest):
    fill(tmp_path, 1)
    forge(tmp_path, {}, manifest)
    damaged(tmp_path, caplog, "manifest.json")


def test_malformed_state_is_refused(tmp_path, caplog):
    fill(tmp_path, 1)
    forge(tmp_path, {"state.json": b"[" * 100_000})
    damaged(tmp_path, caplog, "state.json")


@pytest.mark.parametrize(
    "changes", [{"files": []}, {"files": {}}, {"step": "2"}, {"files": {"state.json": 1}}]
)
def test_manifests_of_another_shape_are_refused(tmp_path, caplog, changes):
    fill(tmp_path, 1)
    forge(tmp_path, {}, **changes)
    damaged(tmp_path, caplog, "step_000002")


@pytest.mark.parametrize("version", [2, 0, None, "1"])
def test_an_unknown_format_is_an_error_and_not_damage(tmp_path, version):
    fill(tmp_path, 1)
    forge(tmp_path, {}, format=version)
    for read in (CheckpointStore(tmp_path).latest, lambda: CheckpointStore(tmp_path).load(2)):
        with pytest.raises(UserError, match=f"has format {version!r}; this release reads 1") as caught:
            read()
        assert not isinstance(caught.value, CorruptCheckpoint)


def test_digest_sees_every_difference():
    base = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    assert digest(base) == digest(dict(reversed(base.items())))
    others = [
        {"a": base["a"]},
        base | {"a": torch.zeros(3, 2)},
        base | {"a": torch.zeros(2, 3, dtype=torch.int32)},
        base | {"a": -torch.zeros(2, 3)},
        {"a": base["a"], "c": base["b"]},
    ]
    assert len({digest(tensors) for tensors in [base, *others]}) == 6


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, betas=(0.8, 0.99)),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "rprop": lambda groups: torch.optim.Rprop(groups),
}


def build(kind, reverse=False, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    first, second = list(model[0].parameters()), list(model[2].parameters())
    if reverse:
        first, second = first[::-1], second[::-1]
    optimizer = OPTIMIZERS[kind]([{"params": first, "weight_decay": 0.1}, {"params": second}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return model, optimizer, schedule, dict(model.named_parameters())


def train(model, optimizer, schedule, steps):
    for step in steps:
        data = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_to_the_bit(tmp_path, kind):
    model, optimizer, schedule, named = build(kind)
    train(model, optimizer, schedule, range(3))
    tensors, state = flatten_optimizer(optimizer, named)
    store = CheckpointStore(tmp_path)
    store.save(3, {"policy": named, "optimizer": tensors}, {"optimizer": state, "lr": schedule.state_dict()})
    at_save = digest(tensors)
    train(model, optimizer, schedule, range(3, 6))

    found = CheckpointStore(tmp_path).latest()
    model2, optimizer2, schedule2, named2 = build(kind, reverse=True, seed=9)
    model2.load_state_dict(found.tensors["policy"])
    schedule2.load_state_dict(found.state["lr"])
    restore_optimizer(optimizer2, named2, found.tensors["optimizer"], found.state["optimizer"])
    tensors2, state2 = flatten_optimizer(optimizer2, named2)
    assert digest(tensors2) == at_save and state2 == state
    assert type(optimizer2.param_groups[0].get("betas", ())) is tuple
    train(model2, optimizer2, schedule2, range(3, 6))
    assert digest(named2) == digest(named)
    assert digest(flatten_optimizer(optimizer2, named2)[0]) == digest(flatten_optimizer(optimizer, named)[0])


def test_restored_state_is_neither_cast_nor_shared():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    master = torch.full((3,), 1 + 2**-20)
    optimizer.state[parameter] = {"momentum_buffer": master, "count": 3}
    tensors, state = flatten_optimizer(optimizer, {"weight": parameter})
    optimizer.state[parameter] = {"stale": torch.zeros(1)}
    restore_optimizer(optimizer, {"weight": parameter}, tensors, state)
    restored = optimizer.state[parameter]
    assert set(restored) == {"momentum_buffer", "count"} and restored["count"] == 3
    assert torch.equal(restored["momentum_buffer"], master) and restored["momentum_buffer"] is not master


def test_an_optimizer_of_other_parameters_is_refused_and_left_alone():
    _, optimizer, _, named = build("adamw")
    tensors, state = flatten_optimizer(optimizer, named)
    _, sgd, _, named_sgd = build("sgd")
    with pytest.raises(UserError, match="optimizer is AdamW, this run's is SGD"):
        restore_optimizer(sgd, named_sgd, tensors, state)
    other = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    before = torch.optim.AdamW(other.parameters(), lr=5.0)
    with pytest.raises(UserError, match=r"parameters or groups are not the checkpoint's.*0\.bias"):
        restore_optimizer(before, dict(other.named_parameters()), tensors, state)
    assert before.param_groups[0]["lr"] == 5.0
    with pytest.raises(UserError, match="not among the named ones"):
        flatten_optimizer(optimizer, {"0.weight": named["0.weight"]})
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(UserError, match="lr is a Tensor"):
        flatten_optimizer(optimizer, named)


def test_grad_scaler_state_is_json(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=3.7e4)
    scaler.scale(torch.ones(1))
    scaler.update(1234.5)
    CheckpointStore(tmp_path).save(1, {}, {"scaler": scaler.state_dict()})
    restored = torch.amp.GradScaler("cpu")
    restored.load_state_dict(CheckpointStore(tmp_path).latest().state["scaler"])
    assert restored.state_dict() == scaler.state_dict() and restored.get_scale() == 1234.5


KILLED = """
import os, random, signal, sys, time
import torch
from flowrl.training.checkpoint import CheckpointStore, digest

torch.set_num_threads(1)
rng = random.Random(int(sys.argv[2]))

def tensors(step):
    policy = {"weight": torch.full((200, 50), float(step))}
    return {"policy": policy, "ema": {"weight": torch.ones(20) / (step + 1)}}

for kill in range(10):
    found = CheckpointStore(sys.argv[1]).latest()
    assert found is None or all(digest(found.tensors[g]) == digest(t) for g, t in tensors(found.step).items())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        store = CheckpointStore(sys.argv[1])
        found = store.latest()
        step = 0 if found is None else found.step + 1
        while True:
            store.save(step, tensors(step), {"step": step})
            os.write(writer, b"%d\\n" % step)
            step += 1
    os.close(writer)
    report = b"" if kill % 3 == 2 else os.read(reader, 1)  # most are killed in some save after the first
    time.sleep(rng.uniform(0, 0.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(reader, "rb") as pipe:
        reported = [int(line) for line in (report + pipe.read()).split()]
    found = CheckpointStore(sys.argv[1], readonly=True).latest()
    now = -1 if found is None else found.step
    assert not reported or now in (reported[-1], reported[-1] + 1), (now, reported)
    sys.stdout.write(f"{now}\\n")
"""


def test_kill_9_ten_times_while_saving(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, "0"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    steps = [int(line) for line in done.stdout.split()]
    assert len(steps) == 10 and steps == sorted(steps) and steps[-1] > 0
    assert CheckpointStore(tmp_path).latest().step == steps[-1]
    assert all(re.fullmatch(r"step_\d{6}", name) for name in names(tmp_path))
