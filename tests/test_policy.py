"""The policy inside a network: the start, the contexts that show other policies, and what they leave."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from tiny_policy import AVERAGE, CONTEXTS, FULL, KINDS, LORA, digest, fresh, policy, run, train
from torch import nn

from flowrl.config import AdapterConfig
from flowrl.errors import UserError
from flowrl.mdp.adapters import POLICY, add_lora, lora_layers
from flowrl.mdp.policy import Policy


def state(network: nn.Module) -> list[Any]:
    """All that a context could leave behind."""
    layers = [layer for _, layer in lora_layers(network)]
    return [
        [(name, p.requires_grad, p.data_ptr(), p.dtype) for name, p in network.named_parameters()],
        [module.training for module in network.modules()],
        [(layer.active_adapters, layer.disable_adapters) for layer in layers],
        digest(network.state_dict()),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_stays_what_it_was(kind: str) -> None:
    network = fresh()
    before = run(network)
    config = dict(network.config)
    subject = policy(network, KINDS[kind], needs_reference=True, needs_old=True, ema=AVERAGE)
    assert type(network) is SD3Transformer2DModel and dict(network.config) == config
    assert network.dtype == torch.float32
    assert torch.equal(run(network), before)
    trained = [p for p in network.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in subject.parameters().values()}
    assert subject.num_trainable == sum(p.numel() for p in trained)
    assert all(name.startswith("transformer.") for name in subject.parameters())


def test_lora_keeps_no_second_copy_of_the_model() -> None:
    network = fresh()
    size = sum(p.numel() for p in network.parameters())
    subject = policy(network, needs_reference=True, needs_old=True, ema=AVERAGE)
    assert sum(p.numel() for p in network.parameters()) == size + 2 * subject.num_trainable
    assert sum(t.numel() for group in subject.tensors().values() for t in group.values()) == (
        3 * subject.num_trainable + 1
    )
    storages = {p.untyped_storage().data_ptr() for p in network.parameters()}
    mine = subject.tensors()
    assert all(t.untyped_storage().data_ptr() in storages for t in mine["policy"].values())
    assert all(t.untyped_storage().data_ptr() in storages for t in mine["old"].values())


def test_the_seed_alone_decides_the_initial_lora() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    network = fresh()
    torch.manual_seed(7)
    first = policy(network, seed=3).tensors()["policy"]
    assert torch.equal(torch.rand(1), expected)  # the global generator is left alone
    second, third = (policy(fresh(), seed=seed).tensors()["policy"] for seed in (3, 4))
    assert digest(first) == digest(second) != digest(third)


def test_g13_dropout_is_off_in_train_mode() -> None:
    network = fresh()
    add_lora(network, LORA, "base")
    for _, layer in lora_layers(network):
        layer.lora_dropout["base"] = nn.Dropout(0.5)
        nn.init.normal_(layer.lora_B["base"].weight, std=0.1)
    subject = policy(network, AdapterConfig(rank=4, alpha=12, dropout=0.1), base_adapters=["base"])
    assert all(isinstance(layer.lora_dropout[POLICY], nn.Identity) for _, layer in lora_layers(network))
    network.train()
    assert not torch.equal(run(network), run(network))
    with subject.compute(), torch.no_grad():
        rollout = run(network)
    network.train()
    with subject.compute():
        replay = run(network)
        assert torch.equal(rollout, replay)
        with subject.reference():
            assert torch.equal(run(network), replay)  # before any update
    assert not any(module.training for module in network.modules())


def _base(network: nn.Module) -> list[str]:
    add_lora(network, LORA, "base")
    for _, layer in lora_layers(network):
        nn.init.normal_(layer.lora_B["base"].weight, std=0.1)
    return ["base"]


@pytest.mark.parametrize("kind", ["lora", "loaded_lora", "full"])
def test_g18_reference_is_the_frozen_start_policy(kind: str) -> None:
    network = fresh()
    base = _base(network) if kind == "loaded_lora" else []
    before = run(network).detach()
    subject = policy(
        network,
        FULL if kind == "full" else LORA,
        needs_reference=True,
        needs_old=True,
        base_adapters=base,
        ema=AVERAGE,
    )
    with subject.reference():
        assert torch.equal(run(network), before)
    train(subject, network)
    subject.update_old(0.5)
    trained = run(network)
    assert (trained - before).abs().max() > 1e-2
    with subject.reference():
        assert torch.equal(run(network), before)
        with subject.old():
            assert not torch.equal(run(network), before)
            with subject.reference(), subject.reference():
                assert torch.equal(run(network), before)
            with subject.acting():
                assert torch.equal(run(network), trained)
        assert torch.equal(run(network), before)
    with subject.ema_weights():
        average = run(network)
        with subject.reference():
            assert torch.equal(run(network), before)
        assert torch.equal(run(network), average)
    assert not torch.equal(average, trained)
    assert torch.equal(run(network), trained)


def test_g18_adapters_that_cannot_be_switched_off_are_refused() -> None:
    network = fresh()
    _base(network)
    with pytest.raises(UserError, match="base_adapters"):
        policy(network)  # a leftover adapter would be part of the reference in silence
    network.peft_config["base"].bias = "lora_only"
    with pytest.raises(UserError, match="biases"):
        policy(network, base_adapters=["base"])
    network.peft_config["base"].bias = "none"
    network.peft_config["base"].modules_to_save = ["proj_out"]
    with pytest.raises(UserError, match="modules_to_save"):
        policy(network, base_adapters=["base"])
    network.peft_config["base"].modules_to_save = None
    with pytest.raises(UserError, match="full"):
        policy(network, FULL, base_adapters=["base"])
    policy(network, base_adapters=["base"])
    with pytest.raises(UserError, match="fresh pipeline"):
        policy(network, base_adapters=["base"])


@pytest.mark.parametrize("outer", CONTEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_g18_contexts_put_everything_back(kind: str, outer: str) -> None:
    network = fresh()
    subject = policy(network, KINDS[kind], needs_reference=True, needs_old=True, ema=AVERAGE)
    train(subject, network, updates=1)
    some = next(iter(subject.parameters().values()))
    some.requires_grad_(False)  # odd states have to survive, too
    if kind == "lora":
        lora_layers(network)[0][1].set_adapter(["old", POLICY], inference_mode=True)
    before = state(network)
    for inner in CONTEXTS:
        with ExitStack() as stack:
            stack.enter_context(CONTEXTS[outer](subject))
            between = state(network)
            if inner == outer == "average":
                with pytest.raises(RuntimeError, match="nest"), CONTEXTS[inner](subject):
                    pass
            else:
                with pytest.raises(ZeroDivisionError), CONTEXTS[inner](subject):
                    network.train()
                    if kind == "lora":
                        network.disable_adapters()  # peft's switches change requires_grad
                        network.set_adapter("old")
                    raise ZeroDivisionError
            assert state(network) == between, inner
        assert state(network) == before, inner


@pytest.mark.parametrize("kind", KINDS)
def test_g16_nothing_leaks_into_the_trained_weights(kind: str) -> None:
    network = fresh()
    subject = policy(network, KINDS[kind], needs_reference=True, needs_old=True, ema=AVERAGE)
    train(subject, network, updates=2)
    before = digest(subject.parameters())
    {group: {n: t.clone() for n, t in tensors.items()} for group, tensors in subject.tensors().items()}
    for context in CONTEXTS.values():
        with context(subject), torch.no_grad():
            run(network)
        with pytest.raises(KeyboardInterrupt), context(subject):
            raise KeyboardInterrupt
    assert digest(subject.parameters()) == before
    with subject.ema_weights():
        for forbidden in (subject.tensors, subject.update_ema, lambda: subject.update_old(0.5)):
            with pytest.raises(RuntimeError, match="average"):
                forbidden()
    with subject.reference(), pytest.raises(RuntimeError, match="reference"):
        subject.tensors()
    assert digest(subject.parameters()) == before


def test_g16_the_average_and_the_old_policy_are_two_things() -> None:
    network = fresh()
    subject = policy(network, needs_old=True, ema=AVERAGE)
    train(subject, network, updates=2)
    name, now = next(iter(subject.tensors()["policy"].items()))
    assert not torch.equal(subject.tensors()["ema"][name], now)
    assert not torch.equal(subject.tensors()["old"][name], now)
    old = subject.tensors()["old"][name].clone()
    subject.update_old(0.25)
    torch.testing.assert_close(subject.tensors()["old"][name], 0.25 * old + 0.75 * now)
    subject.update_old(0.0)
    assert torch.equal(subject.tensors()["old"][name], now)
    with subject.old():
        shown = run(network)
    assert torch.equal(run(network), shown)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_policies_are_an_error(kind: str) -> None:
    subject = policy(fresh(), KINDS[kind])
    for context in (subject.old, subject.ema_weights, *([subject.reference] if kind == "full" else [])):
        with pytest.raises(RuntimeError), context():
            pass
    with pytest.raises(RuntimeError, match="needs_old"):
        subject.update_old(0.5)


def test_two_networks_have_names_of_their_own() -> None:
    first, second = fresh(), fresh()
    subject = Policy({"transformer": first, "transformer_2": second}, LORA, needs_reference=True)
    names = list(subject.parameters())
    halves = [[n for n in names if n.startswith(p + ".")] for p in ("transformer", "transformer_2")]
    assert len(halves[0]) == len(halves[1]) == len(names) // 2
    before = run(second).detach()
    with torch.no_grad():
        for p in subject.parameters().values():
            p.add_(0.1)
    with subject.reference():
        assert torch.equal(run(second), before) and torch.equal(run(first), before)
    assert not torch.equal(run(second), before)


def test_snapshot_takes_the_present_start() -> None:
    network = fresh()
    subject = policy(network, FULL, needs_reference=True, ema=AVERAGE)
    with torch.no_grad():
        network.proj_out.weight.mul_(2)
    present = run(network)
    subject.snapshot()
    with subject.reference():
        assert torch.equal(run(network), present)
    with subject.ema_weights():
        assert torch.equal(run(network), present)
