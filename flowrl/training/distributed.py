"""One process or many: the only file that knows accelerate.

Data parallelism here is by micro-batch. A rank rolls out and replays its own micro-batches (rank r of W
takes r, r + W, ...), scores are gathered so that advantages are computed over all of them, and gradients
are summed once per optimizer step, after all micro-batches and steps have been accumulated. The networks
are not wrapped, so pipelines keep every attribute they read.

Start several processes with ``accelerate launch`` or ``torchrun``; this file starts none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather
from torch import Tensor, nn

from flowrl.errors import UserError

DEFAULT_TIMEOUT_S = 600


class Engine:
    """Communication between ranks; with one process everything is the identity.

    Attributes:
        rank, world: this process and how many there are.
        device: where this process computes.
    """

    def __init__(self, device: str = "auto", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Joins the process group that the launcher describes, if any.

        Args:
            device: "auto", "cpu", "cuda" or "cuda:N".
            timeout_s: after how long without a word a lost peer ends the run.

        Raises:
            UserError: if the device does not exist.
        """
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"model.device = {device!r}: no CUDA device here; legal: auto, cpu")
        handler = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
        self._accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[handler])
        kind = str(self._accelerator.distributed_type.value)
        if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            raise UserError(f"the launcher asks for {kind}: only plain data parallelism is supported")
        self.rank = int(self._accelerator.process_index)
        self.world = int(self._accelerator.num_processes)
        self.device = torch.device(device) if device.startswith("cuda:") else self._accelerator.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def check_geometry(self, micro_batches: int, updates_per_pass: int) -> None:
        """Raises UserError if the micro-batches of an update cannot be dealt out evenly."""
        per_update = micro_batches // updates_per_pass
        if per_update % self.world:
            legal = [n for n in range(1, per_update + 1) if per_update % n == 0]
            raise UserError(
                f"{self.world} processes cannot share the {per_update} micro-batches of an update evenly; "
                f"legal numbers of processes: {', '.join(map(str, legal))}, or change "
                "training.micro_batch_size or training.prompts_per_iteration"
            )

    def share(self, items: Sequence[Any]) -> list[Any]:
        """This rank's micro-batches of an iteration."""
        return list(items[self.rank :: self.world])

    def gather_shares(self, values: list[Tensor]) -> Tensor:
        """Puts the rows of all ranks' micro-batches back into the order of the iteration.

        Args:
            values: this rank's micro-batches, each (B, *), on the CPU.

        Returns:
            (N, *) on the CPU, the same on every rank.
        """
        mine = torch.stack(values)
        if self.world == 1:
            return mine.flatten(0, 1)
        everyone = gather(mine.to(self.device)).cpu()
        ranks = everyone.view(self.world, len(values), *mine.shape[1:])
        return ranks.transpose(0, 1).flatten(0, 2)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums gradients over ranks, in one communication."""
        if self.world == 1:
            return
        parameters = list(parameters)
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([g.flatten() for g in gradients])
        torch.distributed.all_reduce(flat)
        offset = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            size = gradient.numel()
            parameter.grad = flat[offset : offset + size].view_as(gradient).clone()
            offset += size

    def mean(self, values: dict[str, float], highest: frozenset[str] = frozenset()) -> dict[str, float]:
        """Averages metrics, of the same names on every rank; those in `highest` take the maximum."""
        if self.world == 1:
            return values
        names = sorted(values)
        mine = torch.tensor([[values[name] for name in names]], dtype=torch.float64)
        columns = gather(mine.to(self.device)).cpu()
        means, maxima = columns.mean(dim=0), columns.amax(dim=0)
        return {name: float(maxima[i] if name in highest else means[i]) for i, name in enumerate(names)}

    def largest_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The row shape that any rank has, for ranks that hold no row themselves."""
        box = torch.zeros(8, dtype=torch.int64, device=self.device)
        box[: len(shape)] = torch.tensor(list(shape), dtype=torch.int64)
        torch.distributed.all_reduce(box, op=torch.distributed.ReduceOp.MAX)
        return tuple(int(n) for n in box if n > 0)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.world == 1:
            return flag
        value = torch.tensor([float(flag)], device=self.device)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
        return bool(value.item())

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leaves the process group."""
        if self.world > 1:
            self._accelerator.end_training()
