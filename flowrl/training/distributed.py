"""One process or many: the only file that knows accelerate.

Data parallelism here is by micro-batch. A rank rolls out and replays its own micro-batches (rank r of W
takes r, r + W, ...), scores are gathered so that advantages are computed over all of them, and gradients
are summed over ranks. The networks are not wrapped, so pipelines keep every attribute they read.

With ``sharding="full"`` each rank holds its part of every weight, gradient and optimizer state (FSDP2,
`fully_shard`): a block's weights are put together while it computes. Each network call and each backward
pass is then a communication, of which all ranks must make the same number in the same order.

Start several processes with ``accelerate launch`` or ``torchrun``; this file starts none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

from flowrl.errors import UserError
from flowrl.mdp.shards import whole


class Engine:
    """Communication between ranks; with one process everything is the identity.

    Attributes:
        rank, world: this process and how many there are.
        device: where this process computes.
        sharded: whether weights are spread over ranks.
    """

    def __init__(
        self, device: str = "auto", timeout_s: float = 600, sharding: Literal["none", "full"] = "none"
    ) -> None:
        """Joins the process group that the launcher describes, if any.

        Args:
            device: "auto", "cpu", "cuda" or "cuda:N".
            timeout_s: after how long without a word a lost peer ends the run.
            sharding: "full" has an effect with several processes only.

        Raises:
            UserError: if the device does not exist, or all ranks are sent to one.
        """
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise UserError(f"model.device = {device!r}; legal: auto, cpu, cuda, cuda:N")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"model.device = {device!r}: no CUDA device here; legal: auto, cpu")
        handler = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_s))
        self._accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[handler])
        kind = str(self._accelerator.distributed_type.value)
        if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            raise UserError(
                f"the launcher asks for {kind}: start plain processes, and set distributed.sharding=full in "
                "the recipe to shard weights"
            )
        self.rank = int(self._accelerator.process_index)
        self.world = int(self._accelerator.num_processes)
        self.sharded = sharding == "full" and self.world > 1
        self.timeout_s = timeout_s
        if device.startswith("cuda:") and self.world > 1:
            raise UserError(
                f"model.device = {device!r} with {self.world} processes: each takes its own; say cuda"
            )
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

    def shard(self, networks: Iterable[nn.Module]) -> None:
        """Spreads the weights of networks over ranks, in place; does nothing unless sharding is on.

        The blocks that a network repeats are put together one at a time; the rest of it is put together for
        the time of a forward or backward pass.
        """
        if not self.sharded:
            return
        mesh = init_device_mesh(self.device.type, (self.world,))
        for network in networks:
            network.register_forward_hook(_unlinked)
            lists = [child for child in network.children() if isinstance(child, nn.ModuleList)]
            blocks = [block for blocks in lists for block in blocks if any(True for _ in block.parameters())]
            for module in (*blocks, network):
                # The root too gives its weights back after a forward pass: in between they are parts.
                sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
                # A sum over ranks, as in `sum_gradients`; the default would be a mean.
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the main process, for a checkpoint; nothing elsewhere. All ranks must call it."""
        collected = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            if self.is_main:
                # One at a time on the device; the host holds the rest.
                collected[name] = full if full is tensor else full.cpu()
        return collected

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums gradients over ranks, in one communication; sharded ones were summed by the backward pass."""
        if self.world == 1 or self.sharded:
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

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scales gradients down to a total norm; returns the norm before, the same on every rank."""
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(norm)

    def mean(self, values: dict[str, float], highest: frozenset[str] = frozenset()) -> dict[str, float]:
        """Averages metrics, of the same names on every rank; those in `highest` take the maximum."""
        if self.world == 1:
            return values
        names = sorted(values)
        mine = torch.tensor([[values[name] for name in names]], dtype=torch.float64)
        columns = gather(mine.to(self.device)).cpu()
        means, maxima = columns.mean(dim=0), columns.amax(dim=0)
        return {name: float(maxima[i] if name in highest else means[i]) for i, name in enumerate(names)}

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.world == 1:
            return flag
        value = torch.tensor([float(flag)], device=self.device)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
        return bool(value.item())

    def agree(self, value: int, what: str) -> None:
        """Raises UserError unless every rank comes with the same value."""
        if self.world > 1:
            values = gather(torch.tensor([value], device=self.device)).tolist()
            if len(set(values)) > 1:
                raise UserError(
                    f"{what} differs between processes: {values}; do all see the same run folder?"
                )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, the connection that another process leaves torn when it ends becomes one clear error."""
        try:
            yield
        except RuntimeError as error:
            lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
            if self.world == 1 or not lost:
                raise
            raise UserError(
                f"process {self.rank} of {self.world} lost another one: it ended, or said nothing for "
                f"{self.timeout_s:g} s (distributed.timeout_s); its own message says why. The last "
                "checkpoint is whole: go on with --resume auto"
            ) from error

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leaves the process group."""
        if self.world > 1:
            self._accelerator.end_training()


def _unlinked(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """A network's output without views: one changed in place would lose FSDP's hook for the backward pass."""
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) and t._is_view() else t, output)
