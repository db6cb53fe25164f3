"""A tiny network and a policy in it, for the tests of the policy."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from tiny import TINY
from torch import Tensor, nn

from flowrl.config import AdapterConfig, EmaConfig
from flowrl.mdp.policy import Policy

LORA = AdapterConfig(rank=4, alpha=12)
FULL = AdapterConfig(kind="full")
KINDS = {"lora": LORA, "full": FULL}
AVERAGE = EmaConfig(decay=0.5, warmup=False)
CONTEXTS: dict[str, Callable[[Policy], AbstractContextManager[None]]] = {
    "acting": Policy.acting,
    "reference": Policy.reference,
    "old": Policy.old,
    "average": Policy.ema_weights,
}


@functools.cache
def start() -> tuple[dict[str, Any], dict[str, Tensor]]:
    network = TINY["sd3"].build().transformer
    return dict(network.config), network.state_dict()


def fresh(dtype: torch.dtype = torch.float32) -> SD3Transformer2DModel:
    """The tiny SD3 network of the registry, dropout probabilities above 0 included."""
    config, weights = start()
    network = SD3Transformer2DModel.from_config(config)
    network.load_state_dict({name: tensor.clone() for name, tensor in weights.items()})
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    for p in network.parameters():
        p.data = p.data.to(dtype)
    return network.eval()


def inputs(rows: int = 2) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(rows, 4, 8, 8, generator=draw),
        "encoder_hidden_states": torch.randn(rows, 5, 32, generator=draw),
        "pooled_projections": torch.randn(rows, 32, generator=draw),
        "timestep": torch.full((rows,), 601.5),
    }


def run(network: nn.Module) -> Tensor:
    return network(**inputs(), return_dict=False)[0]


def policy(network: nn.Module, adapter: AdapterConfig = LORA, **options: Any) -> Policy:
    return Policy({"transformer": network}, adapter, **options)


def train(subject: Policy, network: nn.Module, updates: int = 5) -> None:
    optimizer = torch.optim.AdamW(subject.parameters().values(), lr=1e-2)
    for _ in range(updates):
        with subject.compute(), subject.acting():
            loss = run(network).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        subject.update_ema()


def digest(tensors: dict[str, Any]) -> str:
    h = hashlib.sha256()
    for name, tensor in tensors.items():
        h.update(name.encode() + tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()
