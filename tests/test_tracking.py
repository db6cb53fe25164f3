"""Trackers: what TensorBoard shows after a resume, and errors that name the missing extra."""

import importlib.util
import math
import sys
import types

import pytest
import torch

from flowrl.errors import UserError
from flowrl.training.tracking import (
    NullTracker,
    TensorBoardTracker,
    WandbTracker,
    exact_json,
    plain,
)


def shown(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    return events.Reload()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_no_point_twice_after_a_resume(tmp_path):
    first = TensorBoardTracker(tmp_path)
    for iteration in range(1, 7):
        first.scalars({"reward/mean": iteration / 2, "loss": 1.0}, iteration)
    first.close()
    again = TensorBoardTracker(tmp_path, last_iteration=4)
    for iteration in range(5, 9):
        again.scalars({"reward/mean": iteration / 2 + 100}, iteration)
    again.images("samples", torch.rand(4, 3, 8, 8), 8)
    again.close()
    events = shown(tmp_path)
    points = [(point.step, point.value) for point in events.Scalars("reward/mean")]
    assert points == [(i, i / 2) for i in range(1, 5)] + [(i, i / 2 + 100) for i in range(5, 9)]
    assert [point.step for point in events.Scalars("loss")] == [1, 2, 3, 4]
    (image,) = events.Images("samples")
    assert (image.step, image.width, image.height) == (8, 16, 16) or image.encoded_image_string[
        :4
    ] == b"\x89PNG"


def test_tensorboard_in_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"TensorBoard's folder .*Not a directory"):
        TensorBoardTracker(tmp_path / "file" / "tb")


def test_missing_wandb_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"flowrl-suite\[wandb\]"):
        WandbTracker("project", "run", tmp_path)


def test_wandb_goes_through_accelerate(tmp_path, monkeypatch):
    calls = []

    class Fake:
        def __init__(self, project, **options):
            calls.append((project, options))

        def __getattr__(self, name):
            return lambda *arguments, **options: calls.append((name, *arguments, options))

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    module = types.ModuleType("accelerate.tracking")
    module.WandBTracker = Fake
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    monkeypatch.setitem(sys.modules, "accelerate.tracking", module)
    tracker = WandbTracker("project", "run", tmp_path, {"lr": math.nan})
    tracker.scalars({"x": 1.0}, 3)
    tracker.images("samples", torch.ones(2, 3, 4, 5), 3)
    tracker.close()
    assert calls[0] == ("project", {"name": "run", "id": "run", "resume": "allow", "dir": str(tmp_path)})
    assert [call[0] for call in calls[1:]] == [
        "start",
        "store_init_configuration",
        "log",
        "log_images",
        "finish",
    ]
    assert calls[2][1] == {"lr": None} and calls[3][1:] == ({"x": 1.0}, {"step": 3})
    images = calls[4][1]["samples"]
    assert len(images) == 2 and images[0].shape == (4, 5, 3) and images[0].max() == 255


def test_null_tracker():
    tracker = NullTracker()
    tracker.scalars({"x": 1.0}, 1)
    tracker.images("x", torch.zeros(1, 3, 2, 2), 1)
    tracker.close()


def test_exact_json_refuses_what_would_change():
    import json

    value = {"a": [1, 1.5, True, None, "x", {"b": math.inf}], "c": -0.0, "d": 2**70}
    assert json.loads(exact_json(value, "state")) == value
    for bad in ({1: 2}, {"a": (1, 2)}, {"a": [torch.tensor(1)]}, {"a": {2}}, {"a": b""}):
        with pytest.raises(UserError, match=r"^state"):
            exact_json(bad, "state")
    with pytest.raises(UserError, match=r"state\.a\.0 is a Tensor"):
        exact_json({"a": [torch.tensor(1)]}, "state")


def test_plain():
    assert plain({"a": (math.inf, torch.tensor(2.0)), 3: "x"}) == {"a": [None, 2.0], "3": "x"}
