"""Tensors that may be sharded: the few places where that makes a difference.

A sharded tensor (`DTensor`) looks whole and holds, in each process, its part. Element-wise arithmetic needs
nothing special; what does is below. Plain tensors pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor; for a sharded one all processes must ask for it at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_like(full: Tensor, pattern: Tensor) -> Tensor:
    """A full tensor, known to every process, sharded as another one of its shape is; no communication."""
    if not isinstance(pattern, DTensor) or full.shape != pattern.shape:
        return full
    part = distribute_tensor(full, pattern.device_mesh, pattern.placements, src_data_rank=None)
    return part.clone()  # the part alone: a view would keep the whole in memory


@torch.no_grad()
def exchange(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Lets parameters show other contents; returns what shows their own again.

    A plain parameter takes the other's storage, without a copy. The storage of a sharded one is tied to
    its place in communication, so contents are copied into it, and its own are returned as a copy.
    """
    own: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            own[name] = parameter.detach().clone()
            parameter.copy_(tensors[name])
        else:
            own[name] = parameter.data
            parameter.data = tensors[name]
    return own
