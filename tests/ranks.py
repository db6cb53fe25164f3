"""Real process groups for the tests: the same small runs in one process and in several, and what they did.

``python tests/ranks.py <folder>`` is one of the processes; `start_ranks` starts them all.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from flowrl.build import Run, build_run
from flowrl.cli import guarded
from flowrl.config import RunConfig, load
from flowrl.errors import UserError
from flowrl.training.checkpoint import Checkpoint, CheckpointStore
from flowrl.training.distributed import Engine
from flowrl.training.run import TrainingRun
from flowrl.training.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
SMALL = (
    "training.iterations=2",
    "training.prompts_per_iteration=2",
    "training.group_size=4",
    "training.micro_batch_size=2",
    "training.updates_per_pass=1",
    "sampler.num_steps=3",
    # Some weights have no effect (a bias of keys shifts a softmax): their gradient is what summation rounds
    # off, of which Adam with a small eps makes whole steps.
    "optimizer.eps=1e-6",
    # A ReLU at zero may fall on the other side after an update; small ones keep what follows within bounds.
    "optimizer.lr=5e-6",
    "sampler.steps={name: all}",
    "rewards=[{name: scene}]",
    "evaluation.max_prompts=5",
    "evaluation.samples_per_prompt=1",
    "evaluation.batch_size=2",
    "evaluation.every=0",
    "evaluation.rewards=[{name: scene}]",
    "tracking.tensorboard=false",
    "checkpoint.every=1",
)
LORA = "model.adapter={kind: lora, rank: 4, init: default}"
SHARDED = "distributed.sharding=full"
# One update only: what float32 rounds otherwise may make the next bfloat16, 65,536 times coarser.
BF16 = ("model.dtype=bf16", "model.gradient_checkpointing=true", "training.iterations=1")
# name: the recipe and what differs from it
CASES: dict[str, tuple[str, ...]] = {
    "nft": ("quickstart", "objective.units_per_micro_batch=2"),
    "grpo": ("quickstart_grpo", "objective.kl_coef=0.1"),
    "nft_lora": ("quickstart", "objective.units_per_micro_batch=2", LORA),
    "grpo_lora": ("quickstart_grpo", LORA),
    "grpo_bf16": ("quickstart_grpo", *BF16),
    "grpo_lora_bf16": ("quickstart_grpo", LORA, *BF16),
}
PLAIN = ("nft", "grpo")  # run in two processes without sharding as well
HANDED = ("nft", "grpo_lora")  # run by one, then two, then one process


def recipe(case: str, out: Path, *more: str) -> RunConfig:
    """The config of a case, with its run in ``<out>/<case>``."""
    name, *own = CASES[case]
    overrides = [*SMALL, *own, f"name={case}", f"output={out}", *more]
    return load(ROOT / "configs" / f"{name}.yaml", overrides)


def recorded_run(config: RunConfig, record: dict[str, torch.Tensor], prompts: list[Any]) -> Run:
    """A built run that writes down what its rollouts, rewards and advantages were."""
    run = build_run(config, ROOT / "configs" / "quickstart.yaml")
    trainer = run.trainer
    rollout, advantage = trainer._rollout, trainer.advantage

    def recorded_rollout(request: Any, plan: Any) -> Any:
        trajectory = rollout(request, plan)
        prompts.append([list(request.prompts), list(request.initial_seeds)])
        for index, state in trajectory.states.items():
            record[f"state/{len(prompts) - 1}/{index}"] = state.clone()
        record[f"final/{len(prompts) - 1}"] = trajectory.latents.clone()
        return trajectory

    def recorded_advantage(scores: torch.Tensor, *rest: Any) -> Any:
        advantages = advantage(scores, *rest)
        turn = sum(name.startswith("scores/") for name in record)
        record[f"scores/{turn}"], record[f"advantages/{turn}"] = scores.clone(), advantages.values.clone()
        return advantages

    trainer._rollout, trainer.advantage = recorded_rollout, recorded_advantage  # type: ignore[method-assign]
    return run


def train_case(case: str, out: Path, *more: str, resume: bool = False) -> None:
    """Trains a case in this process, and leaves a record beside its run."""
    config = recipe(case, out, *more)
    record: dict[str, torch.Tensor] = {}
    prompts: list[Any] = []
    run = recorded_run(config, record, prompts)
    engine = run.engine
    folder = RunFolder(config.output, config.name)
    TrainingRun(config, run.trainer, run.evaluator, engine, folder).train(resume)
    adam = run.trainer.optimizer.state.values()
    facts = {
        "prompts": prompts,
        "world": engine.world,
        "weights": held(p for network in run.policy.networks.values() for p in network.parameters()),
        "optimizer": held(state[key] for state in adam for key in ("exp_avg", "exp_avg_sq")),
        "copies": held(t for group in run.policy.tensors().values() for t in group.values() if t.ndim),
    }
    place = folder.path / f"rank_{engine.rank}_of_{engine.world}"
    save_file({name: tensor.contiguous() for name, tensor in record.items()}, f"{place}.safetensors")
    Path(f"{place}.json").write_text(json.dumps(facts))


def held(tensors: Iterable[torch.Tensor]) -> int:
    """How many numbers of these tensors this process holds."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)


class Traces:
    """What the run of a case left behind."""

    def __init__(self, case: str, out: Path, world: int) -> None:
        self.path = RunFolder(out, case).path
        places = [self.path / f"rank_{rank}_of_{world}" for rank in range(world)]
        self.records = [load_file(f"{place}.safetensors") for place in places]
        self.facts = [json.loads(Path(f"{place}.json").read_text()) for place in places]

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        store = CheckpointStore(self.path / "checkpoints", readonly=True)
        checkpoint = store.latest() if step is None else store.load(step)
        assert checkpoint is not None
        return checkpoint

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher tells a process."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def start_ranks(command: list[str], world: int = 2) -> list[subprocess.Popen[str]]:
    """Starts a Python command in every rank of a new process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(rank, world, port),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def fault(kind: str, timeout: str) -> None:
    """Rank 1 falls silent or raises while rank 0 waits for it; exits as the command line does."""
    engine = Engine("cpu", timeout_s=float(timeout))
    engine.barrier()

    def meet() -> None:
        if engine.rank == 1 and kind == "silence":
            time.sleep(300)
        if engine.rank == 1:
            raise UserError("a reward that fails")
        with engine.together():
            engine.barrier()

    sys.exit(guarded(meet))


def main(out: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for case in PLAIN:
        train_case(case, out / "two")
    for case in CASES:
        train_case(case, out / "sharded", SHARDED)
    for case in HANDED:
        train_case(case, out / "handed", SHARDED, "training.iterations=2", resume=True)


if __name__ == "__main__":
    fault(*sys.argv[2:]) if sys.argv[1] == "--fault" else main(Path(sys.argv[1]))
