"""The run folder: names, lock, metrics that equal the uninterrupted run's, and config drift."""

import json
import os
import subprocess
import sys

import pytest

from flowrl.errors import UserError
from flowrl.training import run_folder
from flowrl.training.run_folder import (
    RunFolder,
    changed_fields,
    config_hash,
    open_regular,
    safe_name,
    write_atomically,
)

PAYLOADS = [
    "../../etc/cron.d/x",
    "..",
    ".",
    "/etc/passwd",
    "a/../../b",
    "a\0b",
    "..\\..\\x",
    "~/x",
    "$(touch x)",
    "a\nb",
    "x" * 5000,
    "-rf",
    ".hidden",
    "\u202egnp.exe",
    "\ud800",
]


@pytest.mark.parametrize("name", PAYLOADS, ids=range(len(PAYLOADS)))
def test_no_name_leads_out_of_the_root(tmp_path, name):
    root = tmp_path / "a" / "runs"
    run = RunFolder(root, name)
    assert run.path.parent == root and run.path.resolve().parent == root.resolve()
    assert list(root.iterdir()) == [run.path]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert run.path.name.isascii() and len(run.path.name) <= 100 and run.path.name[0] not in ".-"


def test_names():
    assert safe_name("sd3-grpo_1.2") == "sd3-grpo_1.2"
    altered = [safe_name(name) for name in PAYLOADS]
    assert len(set(altered)) == len(altered)
    assert safe_name("a/b") != safe_name("a_b")
    assert safe_name(altered[0]) == altered[0]
    with pytest.raises(UserError, match="needs a name"):
        safe_name("")


def test_lock_is_held_inside_the_block_only(tmp_path):
    with RunFolder(tmp_path, "run") as run:
        assert run.lock.path.exists()
        (run.path / ".tmp-summary.json-1234").touch()
        with pytest.raises(UserError, match="in use by process"), RunFolder(tmp_path, "run"):
            pass
        assert run.lock.path.exists()
    assert not run.lock.path.exists()
    with RunFolder(tmp_path, "run"):
        assert [entry.name for entry in run.path.iterdir()] == ["run.lock"]  # litter is cleared


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(UserError, match=r"cannot make the run folder .*Not a directory") as caught:
        RunFolder(blocker / "runs", "run")
    assert "\n" not in str(caught.value)
    run = RunFolder(tmp_path, "run")
    os.rmdir(run.path)
    for write in (
        run.lock.acquire,
        lambda: run.log_metrics(1, {}),
        lambda: run.write_summary({}),
        lambda: run.write_config({}),
    ):
        with pytest.raises(UserError, match=r"cannot write .*No such file") as caught:
            write()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_atomic_writes_leave_the_old_or_the_new(tmp_path, monkeypatch, name):
    path = tmp_path / "summary.json"
    write_atomically(path, b"old")

    def fail(*arguments, **options):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.os, name, fail)
        with pytest.raises(UserError, match=r"cannot write .*summary\.json: Input/output error"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["summary.json"]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            open_regular(tmp_path / name)
    with pytest.raises(OSError):
        open_regular(tmp_path)


def test_metrics_are_exact_json(tmp_path):
    torch = pytest.importorskip("torch")
    run = RunFolder(tmp_path, "run")
    values = {
        "a": 0.1 + 0.2,
        "b": 1e-310,
        "c": float("nan"),
        "d": -float("inf"),
        "e": 3,
        "f": None,
        "g": -0.0,
    }
    run.log_metrics(7, values | {"t": torch.tensor(0.1), "nested": {"x": [1.5, float("inf")]}})
    text = run.metrics.path.read_text()
    assert text.endswith("\n") and "NaN" not in text and "Infinity" not in text
    record = json.loads(text)
    assert record.pop("iteration") == 7
    assert record.pop("t") == torch.tensor(0.1).item()
    assert record.pop("nested") == {"x": [1.5, None]}
    assert record == values | {"c": None, "d": None} and str(record["g"]) == "-0.0"


@pytest.mark.parametrize(
    "torn", [b"", b'{"iteration": 9, "x', b'{"iteration": 4', b"\x00\xff\n", b"[]\n", b"7"]
)
def test_a_resumed_log_equals_the_uninterrupted_one(tmp_path, torn):
    whole, broken = RunFolder(tmp_path, "whole"), RunFolder(tmp_path, "broken")
    for iteration in range(1, 9):
        whole.log_metrics(iteration, {"reward": iteration / 3})
    for iteration in range(1, 7):
        broken.log_metrics(iteration, {"reward": iteration / 3})
        broken.log_timings(iteration, {"seconds": 1.0})
    with open(broken.metrics.path, "ab") as file:
        file.write(torn)
    broken.sync()
    assert broken.truncate_metrics(4) == 2 + 2 + bool(torn)
    assert broken.truncate_metrics(4) == 0
    for iteration in range(5, 9):
        broken.log_metrics(iteration, {"reward": iteration / 3})
    assert broken.metrics.path.read_bytes() == whole.metrics.path.read_bytes()
    assert len(broken.timings.path.read_bytes().splitlines()) == 4


def test_a_record_without_its_newline_is_kept(tmp_path):
    run = RunFolder(tmp_path, "run")
    run.log_metrics(1, {"x": 1})
    whole = run.metrics.path.read_bytes()
    run.metrics.path.write_bytes(whole.rstrip())
    assert run.truncate_metrics(1) == 0
    assert run.metrics.path.read_bytes() == whole


def test_disk_full_takes_the_torn_line_back(tmp_path):
    script = """
import resource, sys
from flowrl.errors import UserError
from flowrl.training.run_folder import RunFolder
run = RunFolder(sys.argv[1], "run")
run.log_metrics(1, {"x": "." * 50})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for attempt in (lambda: run.log_metrics(2, {"x": "." * 50}), lambda: run.write_summary({"x": "." * 500})):
    try:
        attempt()
    except UserError as error:
        sys.stdout.write(f"{error}\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True, timeout=60
    )
    first, second = done.stdout.splitlines()
    assert first.endswith("metrics.jsonl: No space left on device") and second.endswith("File too large")
    run = RunFolder(tmp_path, "run")
    assert run.truncate_metrics(9) == 0 and run.metrics.path.read_text().count("\n") == 1
    assert [entry.name for entry in run.path.iterdir()] == ["metrics.jsonl"]


CONFIG = {
    "seed": 1,
    "training": {"iterations": 100, "lr": 1e-5, "betas": [0.9, 0.999]},
    "rewards": [{"name": "ocr", "weight": 1.0}],
    "tracking": {"kind": "tensorboard"},
    "empty": {},
}
FREE = {"training.iterations", "tracking", "checkpoint"}


def changed(**changes):
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = config
        for part in parents:
            node = node[int(part) if part.isdigit() else part]
        node[last] = value
    return config


def test_changed_fields():
    assert changed_fields(CONFIG, changed(), FREE) == []
    free = changed(training__iterations=200, tracking__kind="none", checkpoint={"every": 5})
    assert changed_fields(CONFIG, free, FREE) == []
    assert config_hash(CONFIG, FREE) == config_hash(free, FREE) != config_hash(changed(seed=2), FREE)
    assert changed_fields(CONFIG, changed(training__lr=1e-4, rewards__0__weight=2.0), FREE) == [
        ("rewards.0.weight", 1.0, 2.0),
        ("training.lr", 1e-5, 1e-4),
    ]
    assert changed_fields(CONFIG, changed(training__iterations_more=1), FREE)  # a prefix is of whole parts
    assert changed_fields(CONFIG, changed(empty=[]), FREE) == [("empty", {}, [])]
    assert changed_fields({"x": float("nan")}, {"x": float("nan")}) == []
    assert changed_fields({"x": 1}, {"x": True}) and changed_fields({"x": 1}, {"x": 1.0})
    assert changed_fields({}, {"x": None}) == [("x", "<absent>", None)]


def test_a_changed_config_is_refused_field_by_field(tmp_path, caplog):
    run = RunFolder(tmp_path, "run")
    assert run.read_config() is None
    run.write_config(CONFIG, FREE)
    assert run.read_config() == CONFIG
    run.write_config(changed(training__iterations=7), FREE)
    assert run.read_config()["training"]["iterations"] == 7
    new = changed(training__lr=1e-4, seed=3)
    with pytest.raises(UserError, match=r"seed: 1 -> 3; training\.lr: 1e-05 -> 0\.0001; .*--allow-change"):
        run.write_config(new, FREE)
    assert run.read_config()["seed"] == 1
    run.write_config(new, FREE, allow_change=True)
    assert run.read_config() == new and "seed: 1 -> 3" in caplog.text


def test_a_config_file_runs_no_code(tmp_path):
    run = RunFolder(tmp_path, "run")
    for text in (f"!!python/object/apply:os.mkdir ['{tmp_path}/marker']", "a: [", "- 1", "\0"):
        (run.path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml"):
            run.read_config()
    assert not (tmp_path / "marker").exists()


def test_summary(tmp_path):
    run = RunFolder(tmp_path, "run")
    run.write_summary({"best": 0.5, "nan": float("nan"), "steps": [1, 2]})
    assert json.loads((run.path / "summary.json").read_text()) == {"best": 0.5, "nan": None, "steps": [1, 2]}
