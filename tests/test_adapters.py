"""LoRA inside a network: targets, initial weights, and LoRA folders of the start policy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import PeftAdapterMixin
from safetensors.torch import load_file, save_file
from tiny import TINY
from torch import Tensor, nn

from flowrl.config import AdapterConfig
from flowrl.errors import UserError
from flowrl.mdp.adapters import (
    POLICY,
    activate,
    add_lora,
    load_base_adapter,
    lora_layers,
    lora_slots,
    resolve_targets,
)
from flowrl.mdp.policy import Policy
from flowrl.tools.export import LORA_FILE, export_lora, render

LORA = AdapterConfig(rank=4, alpha=12)


class Block(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.to_q = nn.Linear(4, 4)
        self.to_k = nn.Linear(4, 4)
        self.out = last


class Net(nn.Module, PeftAdapterMixin):
    """``out`` names a linear layer at the top, and another kind of layer inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(nn.Linear(4, 4)), Block(nn.LayerNorm(4))])
        self.conv = nn.Conv2d(1, 1, 3)
        self.out = nn.Linear(4, 4)
        self.mixer = nn.MultiheadAttention(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.out(block.to_q(x) + block.to_k(x))
        return self.out(x)


def adapted(network: nn.Module, name: str = POLICY) -> list[str]:
    return [layer_name for layer_name, layer in lora_layers(network) if name in layer.lora_A]


EVERY = ["blocks.0.to_q", "blocks.0.to_k", "blocks.0.out", "blocks.1.to_q", "blocks.1.to_k", "out"]


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        (None, EVERY),
        (["to_q"], ["blocks.0.to_q", "blocks.1.to_q"]),
        (["0.to_q", "conv"], ["blocks.0.to_q", "conv"]),
        (["out"], ["blocks.0.out", "out"]),
        (["blocks.1.to_k"], ["blocks.1.to_k"]),
    ],
)
def test_targets_are_exactly_the_named_layers(endings: list[str] | None, expected: list[str]) -> None:
    network = Net()
    assert resolve_targets(network, endings) == expected
    add_lora(network, AdapterConfig(rank=2, targets=endings), POLICY)
    assert adapted(network) == expected
    assert resolve_targets(network, endings) == expected  # adapters do not hide layers, nor add any


@pytest.mark.parametrize(
    ("ending", "near"), [("to_w", "to_q"), ("blocks.0.to_qq", "blocks.0.to_q"), ("blocks", ""), ("mixer", "")]
)
def test_a_target_that_names_nothing_is_refused_with_near_names(ending: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"'{ending}' names no linear.*{near}"):
        resolve_targets(Net(), ["to_q", ending])


def test_networks_that_cannot_carry_a_lora_are_refused() -> None:
    with pytest.raises(UserError, match="kind=full"):
        add_lora(nn.Sequential(nn.Linear(2, 2)), LORA, POLICY)
    with pytest.raises(UserError, match="kind=full"):
        resolve_targets(nn.Sequential(nn.ReLU()), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("init", ["gaussian", "default"])
def test_a_new_lora_is_float32_and_without_effect(init: str, dtype: torch.dtype) -> None:
    network = Net().to(dtype)
    x = torch.randn(2, 4, dtype=dtype)
    before = network(x)
    add_lora(network, AdapterConfig(rank=2, alpha=3, init=init), POLICY)
    assert torch.equal(network(x), before)
    slots = {name: getattr(*slot) for name, slot in lora_slots(network, POLICY).items()}
    assert len(slots) == 2 * len(EVERY)
    for name, weight in slots.items():
        assert weight.dtype == torch.float32
        assert bool(weight.any()) == ("lora_A" in name)
    assert all(layer.scaling[POLICY] == 1.5 for _, layer in lora_layers(network))


def test_a_switch_leaves_requires_grad_alone() -> None:
    network = Net()
    add_lora(network, LORA, "first")
    add_lora(network, LORA, "second")
    before = [p.requires_grad for p in network.parameters()]
    layers = [layer for _, layer in lora_layers(network)]
    for names in ([], ["first"], ["first", "second"], ["absent"]):
        activate(layers, names)
        network(torch.randn(2, 4))
        assert [p.requires_grad for p in network.parameters()] == before


def _trained(name: str, folder: Path, seed: int = 0) -> tuple[Any, Tensor]:
    """A pipeline with a LoRA that does something, its folder, and its pictures."""
    entry = TINY[name]
    pipe = entry.build()
    subject = Policy({part: getattr(pipe, part) for part in entry.networks}, LORA)
    draw = torch.Generator().manual_seed(seed)
    for p in subject.parameters().values():
        p.data.add_(0.05 * torch.randn(p.shape, generator=draw))
    export_lora(pipe, subject.networks, folder)
    return pipe, render(pipe, call(name))


def call(name: str) -> dict[str, Any]:
    entry = TINY[name]
    return {"prompt": ["a cat", "a red circle"], "num_inference_steps": 2, **entry.kwargs()}


@pytest.mark.parametrize("name", ["sd3", "wan22"])
def test_g18_a_loaded_lora_is_part_of_the_reference(name: str, tmp_path: Path) -> None:
    _, pictures = _trained(name, tmp_path / "lora")
    entry = TINY[name]
    pipe = entry.build()
    networks = {part: getattr(pipe, part) for part in entry.networks}
    load_base_adapter(pipe, networks, tmp_path / "lora", "base_0")
    assert not any(p.requires_grad for n in networks.values() for p in _matrices(n, "base_0"))
    subject = Policy(networks, LORA, base_adapters=["base_0"])
    assert torch.equal(render(pipe, call(name)), pictures)
    for p in subject.parameters().values():
        p.data.add_(0.05 * torch.randn(p.shape))
    assert not torch.equal(render(pipe, call(name)), pictures)
    with subject.reference():
        assert torch.equal(render(pipe, call(name)), pictures)


def _matrices(network: nn.Module, name: str) -> list[Tensor]:
    return [getattr(*slot) for slot in lora_slots(network, name).values()]


def test_a_lora_that_does_not_fit_is_an_error_not_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    _trained("sd3", folder)
    file = folder / LORA_FILE
    weights = load_file(file)
    pipe = TINY["sd3"].build()
    networks = {"transformer": pipe.transformer}

    some = next(name for name in weights if name.endswith("lora_A.weight"))
    stranger = some.replace("transformer.", "transformer.strange.", 1)
    both = {stranger: weights[some].clone(), stranger.replace("lora_A", "lora_B"): torch.zeros(32, 4)}
    unprefixed = {f"base_model.model.{name.removeprefix('transformer.')}": w for name, w in weights.items()}
    cut = weights | {some: weights[some][:, :-1].contiguous()}
    verbosity = logging.getLogger("diffusers").level
    logging.getLogger("diffusers").setLevel(logging.ERROR)  # silence must not hide the message
    try:
        for number, bad in enumerate((weights | both, unprefixed, cut)):
            save_file(bad, file)
            with pytest.raises(UserError):
                load_base_adapter(pipe, networks, folder, f"base_{number}")
        assert logging.getLogger("diffusers").level == logging.ERROR
    finally:
        logging.getLogger("diffusers").setLevel(verbosity)
    with pytest.raises(UserError, match="no file or folder"):
        load_base_adapter(pipe, networks, tmp_path / "nothing", "base")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError):
        load_base_adapter(pipe, networks, tmp_path / "empty", "base")
    with pytest.raises(UserError, match="cannot load LoRAs"):
        load_base_adapter(object(), networks, folder, "base")
