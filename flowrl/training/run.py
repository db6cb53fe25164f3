"""A run from start to end: folder, resume, iterations, evaluations, checkpoints, summary.

The trainer knows iterations; this file knows files. All state that a run needs to go on is in its last
checkpoint: randomness has none (`flowrl.mdp.seeds`) and the order of prompts is a function of the
iteration, so a resumed run equals an uninterrupted one bit for bit on the CPU.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from flowrl.config import RunConfig
from flowrl.errors import UserError
from flowrl.training.checkpoint import (
    Checkpoint,
    CheckpointStore,
    digest,
    flatten_optimizer,
    restore_optimizer,
)
from flowrl.training.distributed import Engine
from flowrl.training.evaluate import Evaluation, Evaluator
from flowrl.training.grids import picture_grid
from flowrl.training.run_folder import RunFolder
from flowrl.training.signals import GracefulStop
from flowrl.training.tracking import NullTracker, TensorBoardTracker, Tracker, WandbTracker
from flowrl.training.trainer import IterationResult, Trainer, TrainState

logger = logging.getLogger(__name__)

# What may change between the start of a run and its resumption.
FREE_FIELDS = (
    "description",
    "source",
    "output",
    "training.iterations",
    "checkpoint",
    "tracking",
    "model.device",
    "distributed",
)
PACKAGES = ("flowrl-suite", "torch", "diffusers", "transformers", "accelerate", "peft", "open_clip_torch")


class Progress(Protocol):
    """Who shows a run while it goes on."""

    def start(self, done: int, total: int) -> None:
        """The run begins (or goes on) after `done` of `total` iterations."""

    def iteration(self, number: int, result: IterationResult) -> None:
        """An iteration has ended."""

    def evaluation(self, number: int, metrics: Mapping[str, float]) -> None:
        """An evaluation has ended."""


class TrainingRun:
    """One run of a recipe in its folder."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        evaluator: Evaluator | None,
        engine: Engine,
        folder: RunFolder,
        progress: Progress | None = None,
    ) -> None:
        """Opens nothing yet; `train` does."""
        self.config = config
        self.trainer = trainer
        self.evaluator = evaluator
        self.engine = engine
        self.folder = folder
        self.progress = progress
        self._tracker: Tracker = NullTracker()
        self._history: dict[str, dict[str, float]] = {}
        self._seconds = 0.0

    def train(self, resume: bool, allow_change: bool = False) -> dict[str, Any]:
        """Trains to the end, or until a signal asks to stop.

        Args:
            resume: go on from the newest intact checkpoint, if there is one.
            allow_change: go on although the recipe has changed.

        Returns:
            the summary, also written to ``summary.json``; its ``status`` is "finished" or "stopped".

        Raises:
            UserError: for an occupied, unwritable or unfitting run folder.
            FloatingPointError: see `Trainer.run_iteration`.
        """
        with self.engine.together():
            return self._train(resume, allow_change)

    def _train(self, resume: bool, allow_change: bool) -> dict[str, Any]:
        store = CheckpointStore(
            self.folder.checkpoints, self.config.checkpoint.keep, readonly=not self.engine.is_main
        )
        self._check_folder(store, resume, allow_change)
        self.engine.barrier()  # the main process may have had to tidy the folder up
        checkpoint = store.latest() if resume else None
        self.engine.agree(checkpoint.step if checkpoint is not None else -1, "the newest checkpoint")
        if checkpoint is not None:
            self._restore(checkpoint)
        if self.engine.is_main:
            # not before: a checkpoint that does not fit a changed recipe leaves the folder as it was
            self.folder.store_config(self.config.model_dump(mode="json"))
            done = self.trainer.state.iteration if checkpoint is not None else -1
            self.folder.truncate_metrics(done)
            self._seconds = self.folder.timings.sum_of("total", "evaluate")
            self._tracker = self._open_tracker(done if checkpoint is not None else None)
        with GracefulStop() as stop:
            return self._loop(store, stop, fresh=checkpoint is None)

    def _loop(self, store: CheckpointStore, stop: GracefulStop, fresh: bool) -> dict[str, Any]:
        total = self.config.training.iterations
        state = self.trainer.state
        if self.progress is not None:
            self.progress.start(state.iteration, total)
        started = time.perf_counter()
        before = self._seconds
        if fresh:
            self._log(0, IterationResult(self._evaluate(0)))
            self._seconds = before + time.perf_counter() - started
        stopped = False
        while state.iteration < total and not stopped:
            result = self.trainer.run_iteration()
            number = state.iteration
            every = self.config.evaluation.every
            if number == total or (every and number % every == 0):
                evaluated = time.perf_counter()
                result.metrics |= self._evaluate(number)
                result.seconds["evaluate"] = time.perf_counter() - evaluated
            self._log(number, result)
            self._seconds = before + time.perf_counter() - started
            stopped = self.engine.any(stop.requested)
            if stopped or number == total or number % self.config.checkpoint.every == 0:
                self._save(store)
        summary = self._summary("stopped" if state.iteration < total else "finished")
        summary["exit_code"] = stop.exit_code if stopped else 0
        if self.engine.is_main:
            self.folder.write_summary(summary)
            self._tracker.close()
        return summary

    # -- files -------------------------------------------------------------------------------------------

    def _check_folder(self, store: CheckpointStore, resume: bool, allow_change: bool) -> None:
        if not self.engine.is_main:
            return
        if not resume and (self.folder.path / "metrics.jsonl").exists():
            raise UserError(
                f"{self.folder.path} already holds a run; go on with --resume auto, start over with --fresh, "
                "or choose another name=..."
            )
        self.folder.check_config(self.config.model_dump(mode="json"), FREE_FIELDS, allow_change)

    def _save(self, store: CheckpointStore) -> None:
        policy, state = self.trainer.policy, self.trainer.state
        optimizer, options = flatten_optimizer(self.trainer.optimizer, policy.parameters())
        groups = {**policy.tensors(), "optimizer": optimizer}
        groups = {name: self.engine.collect(tensors) for name, tensors in groups.items()}
        if self.engine.is_main:
            self.folder.sync()
            store.save(
                state.iteration,
                groups,
                {
                    "train": dict(vars(state)),
                    "optimizer": options,
                    "scaler": self.trainer.scaler.state_dict(),
                    "history": self._history,
                    "policy_digest": digest(groups["policy"]),
                    "config_digest": self.config.digest(),
                    "versions": versions(),
                },
            )
        self.engine.barrier()

    def _restore(self, checkpoint: Checkpoint) -> None:
        groups = {name: checkpoint.tensors[name] for name in checkpoint.tensors if name != "optimizer"}
        policy = self.trainer.policy
        policy.load_tensors(groups)
        restore_optimizer(
            self.trainer.optimizer,
            policy.parameters(),
            checkpoint.tensors["optimizer"],
            checkpoint.state["optimizer"],
        )
        self.trainer.scaler.load_state_dict(checkpoint.state["scaler"])
        self.trainer.state = TrainState(**checkpoint.state["train"])
        self._history = dict(checkpoint.state["history"])
        found = digest(self.engine.collect(policy.tensors()["policy"]))
        if self.engine.is_main and found != checkpoint.state["policy_digest"]:
            raise RuntimeError(
                f"{checkpoint.path}: restored weights have SHA-256 {found}, saved were "
                f"{checkpoint.state['policy_digest']}"
            )

    def _open_tracker(self, done: int | None) -> Tracker:
        options = self.config.tracking
        if options.wandb:
            name = self.config.name
            return WandbTracker(options.project, name, self.folder.path, self.config.model_dump(mode="json"))
        if options.tensorboard:
            return TensorBoardTracker(self.folder.path / "tensorboard", done)
        return NullTracker()

    # -- figures -----------------------------------------------------------------------------------------

    def _evaluate(self, number: int) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        policy = self.trainer.policy
        with policy.ema_weights() if policy.ema is not None else policy.acting():
            evaluation = self.evaluator.evaluate()
        self._history.setdefault("before", dict(evaluation.metrics))
        self._history["after"] = dict(evaluation.metrics)
        if self.engine.is_main:
            self._save_grid(number, evaluation)
        if self.progress is not None:
            self.progress.evaluation(number, evaluation.metrics)
        return evaluation.metrics

    def _save_grid(self, number: int, evaluation: Evaluation) -> None:
        folder = self.folder.path / "grids"
        folder.mkdir(exist_ok=True)
        side = evaluation.grid.shape[-1]
        grid = picture_grid(evaluation.grid, evaluation.captions, columns=6, scale=max(1, 160 // side))
        grid.save(folder / f"eval_{number:06d}.png")
        still = evaluation.grid if evaluation.grid.ndim == 4 else evaluation.grid[:, 0]
        self._tracker.images("evaluation", still, number)

    def _log(self, number: int, result: IterationResult) -> None:
        if self.engine.is_main:
            self.folder.log_metrics(number, result.metrics)
            self.folder.log_timings(number, result.seconds)
            finite = {name: value for name, value in result.metrics.items() if value == value}
            self._tracker.scalars(finite, number)
        if self.progress is not None and number > 0:
            self.progress.iteration(number, result)

    def _summary(self, status: str) -> dict[str, Any]:
        before, after = self._history.get("before", {}), self._history.get("after", {})
        names = self.evaluator.judges.names if self.evaluator is not None else ()
        summary: dict[str, Any] = {
            "name": self.config.name,
            "status": status,
            "iterations": self.trainer.state.iteration,
            "updates": self.trainer.state.updates,
            "reward_name": names[0] if names else None,
            "reward_before": before.get(f"eval/{names[0]}/mean") if names else None,
            "reward_after": after.get(f"eval/{names[0]}/mean") if names else None,
            "diversity_before": before.get("eval/diversity"),
            "diversity_after": after.get("eval/diversity"),
            "ratio_first_max": self.trainer.state.ratio_first_max,
            "wall_s": round(self._seconds, 2),
            "judges": {name: _judge(name, before, after) for name in names},
            "meters": {
                key.removeprefix("eval/"): {"before": before[key], "after": after.get(key)}
                for key in before
                if key.count("/") == 1
            },
            "generation": self.evaluator.settings if self.evaluator is not None else {},
            "weights": "ema" if self.trainer.policy.ema is not None else "trained",
            "trainable_parameters": self.trainer.policy.num_trainable,
            "processes": self.engine.world,
            "versions": versions(),
            "config_digest": self.config.digest(),
        }
        return summary


def versions() -> dict[str, str]:
    """Versions of what a number depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["cuda"] = torch.version.cuda if torch.cuda.is_available() and torch.version.cuda else "none"
    return found


def _judge(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    prefix = f"eval/{name}/tag/"
    return {
        "before": before.get(f"eval/{name}/mean"),
        "after": after.get(f"eval/{name}/mean"),
        "by_tag": {
            key.removeprefix(prefix): {"before": before[key], "after": after.get(key)}
            for key in before
            if key.startswith(prefix)
        },
    }
