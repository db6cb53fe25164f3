"""The policy inside a network: reference, old policy, average, precision, checkpoint tensors."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from tiny import TINY
from torch import Tensor, nn

from flowrl.config import AdapterConfig, EmaConfig
from flowrl.errors import UserError
from flowrl.mdp.adapters import POLICY, add_lora, lora_layers
from flowrl.mdp.policy import Policy

torch.set_num_threads(1)
LORA = AdapterConfig(rank=4, alpha=12)
FULL = AdapterConfig(kind="full")
KINDS = {"lora": LORA, "full": FULL}
AVERAGE = EmaConfig(decay=0.5, warmup=False)


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


CONTEXTS: dict[str, Callable[[Policy], AbstractContextManager[None]]] = {
    "acting": Policy.acting,
    "reference": Policy.reference,
    "old": Policy.old,
    "average": Policy.ema_weights,
}


@pytest.mark.parametrize("outer", CONTEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_g18_contexts_put_everything_back(kind: str, outer: str) -> None:
    network = fresh()
    subject = policy(network, KINDS[kind], needs_reference=True, needs_old=True, ema=AVERAGE)
    train(subject, network, updates=1)
    some = next(iter(subject.parameters().values()))
    some.requires_grad_(False)  # an odd flag has to survive too
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
