"""The policy under training: gradients, precision, and tensors of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_policy import AVERAGE, CONTEXTS, FULL, KINDS, digest, fresh, policy, run, train
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.mdp.policy import Policy


def _gradients(subject: Policy, network: nn.Module, between: bool = False) -> dict[str, Tensor]:
    with subject.compute():
        loss = run(network).float().square().mean()
        if between:
            for context in (subject.reference, subject.old):
                with context():
                    run(network)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in subject.parameters().items() if p.grad is not None}
    for p in subject.parameters().values():
        p.grad = None
    return gradients


@pytest.mark.parametrize("kind", KINDS)
def test_g19_gradient_checkpointing_gives_the_same_gradients(kind: str) -> None:
    found = []
    for checkpointing in (False, True):
        network = fresh()
        subject = policy(
            network, KINDS[kind], needs_reference=True, needs_old=True, gradient_checkpointing=checkpointing
        )
        for name, p in subject.parameters().items():
            if name.endswith("lora_B.weight"):
                nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        found.append(_gradients(subject, network, between=True))
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-6, atol=1e-6)


def test_g19_every_lora_layer_learns_with_frozen_inputs() -> None:
    network = fresh()
    subject = policy(network, gradient_checkpointing=True)
    gradients = _gradients(subject, network)
    silent = {
        name
        for name in subject.parameters()
        if name.endswith("lora_B.weight") and not (name in gradients and gradients[name].abs().max() > 0)
    }
    # SD3 computes the text queries of its last block and throws their result away
    assert silent == {"transformer.transformer_blocks.1.attn.add_q_proj.lora_B.weight"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["reference", "old", "average"])
def test_g19_backward_under_another_policy_is_refused(kind: str, context: str) -> None:
    network = fresh()
    subject = policy(
        network,
        KINDS[kind],
        needs_reference=True,
        needs_old=True,
        ema=AVERAGE,
        gradient_checkpointing=True,
    )
    with subject.compute():
        loss = run(network).square().mean()
    with CONTEXTS[context](subject), pytest.raises(RuntimeError, match="close it first"):
        loss.backward()
    with subject.compute():
        loss = run(network).square().mean()
    network.train()
    with pytest.raises(RuntimeError, match="mode changed"):
        loss.backward()
    assert all(p.grad is None for p in subject.parameters().values())


def test_gradient_checkpointing_without_support_is_refused() -> None:
    network = fresh()
    network._supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="gradient_checkpointing"):
        policy(network, gradient_checkpointing=True)


@pytest.mark.parametrize("kind", KINDS)
def test_g22_g23_restore_goes_into_the_existing_tensors(kind: str) -> None:
    network = fresh()
    options = {"needs_reference": True, "needs_old": True, "ema": AVERAGE}
    subject = policy(network, KINDS[kind], **options)
    train(subject, network, updates=3)
    subject.update_old(0.5)
    saved = {g: {n: t.clone() for n, t in ts.items()} for g, ts in subject.tensors().items()}

    other_network = fresh()
    other = policy(other_network, KINDS[kind], **options)
    before = dict(other.parameters())
    adapters = list(getattr(other_network, "peft_config", {}))
    with other.reference():
        reference = run(other_network)
    other.load_tensors(saved)
    assert list(getattr(other_network, "peft_config", {})) == adapters
    assert other.num_trainable == subject.num_trainable
    assert all(other.parameters()[name] is p for name, p in before.items())  # the optimizer's own objects
    assert other.ema is not None and other.ema.updates == 3
    assert {g: digest(ts) for g, ts in other.tensors().items()} == {g: digest(ts) for g, ts in saved.items()}
    assert torch.equal(run(other_network), run(network))
    for context in (Policy.old, Policy.ema_weights):
        with context(other), context(subject):
            assert torch.equal(run(other_network), run(network))
    with other.reference():
        assert torch.equal(run(other_network), reference)


def test_g23_restore_is_strict() -> None:
    subject = policy(fresh(), ema=AVERAGE)
    saved = {g: dict(ts) for g, ts in subject.tensors().items()}
    before = digest(subject.parameters())
    name, tensor = next(iter(saved["policy"].items()))
    wrong: list[dict[str, dict[str, Tensor]]] = [
        {"policy": saved["policy"]},
        saved | {"old": {}},
        saved | {"policy": saved["policy"] | {"default_0.weight": tensor}},
        saved | {"policy": {n: t for n, t in saved["policy"].items() if n != name}},
        saved | {"policy": saved["policy"] | {name: tensor.half() + 1}},
        saved | {"policy": saved["policy"] | {name: tensor[:-1] + 1}},
    ]
    for groups in wrong:
        with pytest.raises(UserError, match="checkpoint"):
            subject.load_tensors(groups)
    assert digest(subject.parameters()) == before


def test_g24_an_update_after_restore_starts_from_the_restored_weights() -> None:
    network = fresh(torch.bfloat16)
    subject = policy(network, dtype="bf16")
    optimizer = torch.optim.AdamW(subject.parameters().values(), lr=1e-2, weight_decay=0.0)
    saved = {g: {n: torch.randn_like(t) for n, t in ts.items()} for g, ts in subject.tensors().items()}
    subject.load_tensors(saved)
    for p in subject.parameters().values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert digest(subject.parameters()) == digest(saved["policy"])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_g25_trained_weights_stay_float32(kind: str, dtype: str) -> None:
    stored = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    network = fresh(stored)
    subject = policy(network, KINDS[kind], dtype=dtype, needs_reference=True, needs_old=True, ema=AVERAGE)
    assert network.dtype == (stored if kind == "lora" else torch.float32)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "fp16")
    optimizer = torch.optim.AdamW(subject.parameters().values(), lr=1e-2)
    before = digest(subject.parameters())
    for _ in range(2):
        with subject.compute():
            for context in CONTEXTS.values():
                with context(subject):
                    assert run(network).dtype in (stored, torch.float32)
                assert {p.dtype for p in subject.parameters().values()} == {torch.float32}
            loss = run(network).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert digest(subject.parameters()) != before
    assert {t.dtype for t in subject.tensors()["policy"].values()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_passes_repeat_exactly_and_see_the_right_weights(kind: str) -> None:
    """Autocast caches casts of trained weights by object: swapped weights have to get past it."""
    network = fresh(torch.bfloat16)
    subject = policy(network, KINDS[kind], dtype="bf16", needs_reference=True, needs_old=True, ema=AVERAGE)
    with subject.compute():
        start_output = run(network).detach()
    train(subject, network, updates=2)
    alone = {}
    for name, context in CONTEXTS.items():
        with subject.compute(), context(subject):
            alone[name] = run(network).detach()
    assert torch.equal(alone["reference"], start_output)
    assert torch.equal(alone["old"], start_output)
    assert not torch.equal(alone["acting"], start_output)
    with subject.compute():
        for name in ("acting", "reference", "acting", "average", "old", "acting"):
            with CONTEXTS[name](subject):
                assert torch.equal(run(network), alone[name]), name


class Probe(nn.Module):
    """Notes what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: dict[str, Any] = {}

    def forward(self, hidden_states: Any, timestep: Tensor, **rest: Any) -> Tensor:
        self.seen = {"hidden_states": hidden_states, "timestep": timestep} | rest
        return self.linear(torch.ones(1, 2))


def test_only_states_and_embeddings_are_rounded() -> None:
    probe = Probe()
    subject = Policy({"unet": probe}, FULL, dtype="bf16")
    state_in = torch.randn(1, 2, 2)
    with subject.compute():
        probe(
            [state_in, state_in],
            torch.tensor([601.3]),
            embeds=state_in,
            guidance=torch.tensor([3.5]),
            pooled=torch.randn(1, 2),
            img_ids=torch.full((1, 2, 3), 257.0),
            image_rotary_emb=(state_in, state_in),
            counts=torch.ones(1, 2, 2, dtype=torch.int64),
            options={"scale": 1.0},
        )
    seen = probe.seen
    assert [t.dtype for t in seen["hidden_states"]] == [torch.bfloat16] * 2
    assert seen["embeds"].dtype == torch.bfloat16
    for name in ("timestep", "guidance", "pooled", "img_ids"):
        assert seen[name].dtype == torch.float32, name
    assert seen["image_rotary_emb"][0] is state_in and seen["counts"].dtype == torch.int64
    assert state_in.dtype == torch.float32
    probe(state_in, torch.tensor([1.0]))  # outside of compute the weights are float32
    assert probe.seen["hidden_states"].dtype == torch.float32


def test_float32_inputs_pass_untouched() -> None:
    probe = Probe()
    subject = Policy({"unet": probe}, FULL)
    given = torch.randn(1, 2, 2, dtype=torch.float64)
    with subject.compute():
        probe(given, torch.tensor([1.0]), embeds=given)
        assert not torch.is_autocast_enabled("cpu")
    assert probe.seen["hidden_states"] is given and probe.seen["embeds"] is given
