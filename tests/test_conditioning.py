"""Embeddings made once per prompt, and CFG whose unconditional half has no gradient."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_wrapper import ALL, PROMPTS, built, check_ratio, reached, request, wrap
from tiny import NEGATIVE, TINY, TinyPipeline
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flowrl.config import AdapterConfig
from flowrl.errors import UserError
from flowrl.mdp import conditioning
from flowrl.mdp.conditioning import ConditionalGradient, PromptCache
from flowrl.mdp.policy import Policy
from flowrl.mdp.trajectory import Replay, Request, Trajectory
from flowrl.mdp.wrapper import SamplerWrapper

LONG = "a photo of a red circle and two blue squares above one big green triangle on the left"

# -- the gradient of CFG -------------------------------------------------------------------------------------


def watch(wrapper: SamplerWrapper, around: Callable[..., Any]) -> Any:
    """Puts ``around(forward, *args, **kwargs)`` in place of the network's forward."""
    network = wrapper.networks["transformer"]
    forward = network.forward
    return patch.object(network, "forward", lambda *args, **kwargs: around(forward, *args, **kwargs))


def without_gradient_of_the_negative_prompt(entry: TinyPipeline) -> Callable[..., Any]:
    """The network as it is, but its output for the negative prompt is a constant; by the registry's facts."""
    calls = itertools.count()

    def forward(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)[0]
        if not entry.batched_cfg:
            is_positive = (next(calls) % 2 == 0) == entry.positive_first
            return (output if is_positive else output.detach(),)
        half = len(output) // 2
        rows = [
            row if (i < half) == entry.positive_first else row.detach()
            for i, row in enumerate(output if isinstance(output, list) else output.unbind())
        ]
        return (rows if isinstance(output, list) else torch.stack(rows),)

    return forward


def gradient(wrapper: SamplerWrapper, policy: Policy, trajectory: Trajectory, step: int) -> Tensor:
    for parameter in policy.parameters().values():
        parameter.grad = None
    with policy.compute():
        prediction = wrapper.replay(trajectory, step).prediction
        weights = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(5))
        (prediction.float() * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters().values() if p.grad is not None])


@pytest.mark.parametrize("name", TINY)
def test_gradient_of_the_conditional_half_only(name: str) -> None:
    policy = built(name)[1]
    both, conditional = (wrap(name, cfg=True, cfg_gradient=kind) for kind in ("both", "conditional"))
    trajectory = both.rollout(request(0, 1), ALL)
    with watch(both, without_gradient_of_the_negative_prompt(TINY[name])):
        expected = gradient(both, policy, trajectory, 0)
    found = gradient(conditional, policy, trajectory, 0)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * scale)
    assert (found - gradient(both, policy, trajectory, 0)).abs().max() > 1e-2 * scale

    modes: list[tuple[bool, int]] = []

    def note(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        modes.append((torch.is_grad_enabled(), conditioning.rows_of_call(args, kwargs)))
        return own(*args, **kwargs)

    with watch(conditional, note):
        replay = conditional.replay(trajectory, 0)
        with torch.no_grad():
            conditional.replay(trajectory, 0)
    assert modes[:2] == [(TINY[name].positive_first, 2), (not TINY[name].positive_first, 2)]
    assert modes[2:] == [(False, 2), (False, 2)]
    whole = both.replay(trajectory, 0)
    torch.testing.assert_close(replay.prediction, whole.prediction, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(replay.transition.mean, whole.transition.mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_the_halves_are_found_with_a_row_of_another_number(name: str) -> None:
    """The layout is found in a call of one row, as the trainer makes first, and holds for all others."""
    policy = built(name)[1]
    wrapper = wrap(name, cfg=True, cfg_gradient="conditional")
    wrapper.schedule()
    blank = Request((NEGATIVE,) * 2, ({},) * 2, (0, 0), (1, 2), (3, 4))
    trajectory = wrapper.rollout(blank, ALL)
    found = gradient(wrapper, policy, trajectory, 0)
    both = wrap(name, cfg=True)
    with watch(both, without_gradient_of_the_negative_prompt(TINY[name])):
        expected = gradient(both, policy, trajectory, 0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    fresh = wrap(name, cfg=True, cfg_gradient="conditional")
    with pytest.raises(UserError, match="cannot tell"):
        fresh.rollout(blank, ALL)


def test_guidance_that_ends_within_the_schedule() -> None:
    """Z-Image's cfg_truncation: the first step has 2B rows, the second B."""
    wrapper = wrap("z_image", cfg=True, cfg_gradient="conditional")
    wrapper.call["cfg_truncation"] = 0.2
    check_ratio(wrapper, built("z_image")[1], ALL)
    assert wrapper.forwards == 2 * (2 * 2 + 2 * 1)
    assert reached(built("z_image")[1]) > 0.8


@pytest.mark.parametrize(("kind", "saved"), [("lora", 0.25), ("full", 0.33)])
def test_compute_saved(kind: str, saved: float) -> None:
    """Half of the backward pass, whatever it costs."""
    pipe = TINY["sd3"].build()
    policy = Policy({"transformer": pipe.transformer}, AdapterConfig(kind=kind, rank=2))
    forward, both, conditional = 0, 0, 0
    for cfg_gradient in ("both", "conditional"):
        wrapper = wrap("sd3", pipe, cfg=True, cfg_gradient=cfg_gradient)
        with policy.compute():
            trajectory = wrapper.rollout(request(0, 1), ALL)
            with FlopCounterMode(display=False) as counter:
                log_prob = wrapper.replay(trajectory, 1).log_prob
                forward = counter.get_total_flops()
                log_prob.sum().backward()
        both, conditional = conditional, counter.get_total_flops()
    assert conditional <= (1 - saved) * both
    assert conditional - forward == pytest.approx((both - forward) / 2, rel=1e-3)


class Network(nn.Module):
    """Takes states and embeddings and shows whether gradients were on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden_states: Tensor, embeds: Tensor, extra: Any = None) -> tuple[Tensor]:
        return (hidden_states * self.scale + embeds.mean(),)


def split_of(positive: Tensor | None, rows: int) -> tuple[ConditionalGradient, Network]:
    split = ConditionalGradient()
    split.cache = SimpleNamespace(positive=positive)  # type: ignore[assignment]
    split.rows = rows
    return split, Network()


def test_an_existing_forward_is_wrapped_and_put_back() -> None:
    positive = torch.ones(2, 3)
    split, network = split_of(positive, 2)
    own = network.forward
    network.forward = lambda *args, **kwargs: own(*args, **kwargs)  # as offloading or compiling does
    replaced = network.forward
    with pytest.raises(RuntimeError, match="on purpose"), split.installed({"network": network}):
        assert network.forward is not replaced
        states = torch.arange(4.0)[:, None]
        expected = torch.tensor([[-1.0], [0.0], [3.0], [4.0]])
        output = network(states, torch.cat([-positive, positive]), extra={"of_the_batch": states})[0]
        assert output.requires_grad and torch.equal(output.detach(), expected)
        raise RuntimeError("on purpose")
    assert network.forward is replaced


@pytest.mark.parametrize("positive", [None, torch.full((2, 3), 7.0)], ids=["no_encode_prompt", "changed"])
def test_halves_that_cannot_be_told_apart_are_refused(positive: Tensor | None) -> None:
    split, network = split_of(positive, 2)
    with split.installed({"network": network}):
        network(torch.ones(2, 1), torch.ones(2, 3))
        with pytest.raises(UserError, match="use cfg_gradient: both"):
            split.next_step()
    split, network = split_of(positive, 2)
    with split.installed({"network": network}):
        for rows in (4, 3):
            with pytest.raises(UserError, match="use cfg_gradient: both"):
                network(torch.ones(rows, 1), torch.ones(rows, 3))


# -- prompts are encoded once --------------------------------------------------------------------------------


class EncodingDoneError(Exception):
    """Raised where the pipeline has all its embeddings."""


def encodings(name: str, prompts: list[str]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments with which the pipeline calls its ``encode_prompt``, CFG on."""
    pipe, calls = built(name)[0], []
    encode = pipe.encode_prompt

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append(copy.deepcopy((args, kwargs)))
        return encode(*args, **kwargs)

    def stop(*_: Any, **__: Any) -> Any:
        raise EncodingDoneError

    kwargs = TINY[name].kwargs(cfg=True, rows=len(prompts))
    with (
        patch.object(pipe, "encode_prompt", note),
        patch.object(pipe, "prepare_latents", stop),
        pytest.raises(EncodingDoneError),
    ):
        pipe(prompt=list(prompts), num_inference_steps=2, **kwargs)
    return calls


def tensors(value: Any) -> Iterator[Tensor | None]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    else:
        yield value


@pytest.mark.parametrize("name", TINY)
def test_embeddings_are_the_pipelines_own(name: str) -> None:
    encode = built(name)[0].encode_prompt
    cache = PromptCache(encode)
    for prompts in ([PROMPTS[0], PROMPTS[1]], [LONG, "a"], [PROMPTS[1], LONG, PROMPTS[1]], ["a"]):
        for args, kwargs in encodings(name, prompts):
            with torch.no_grad():  # as the pipeline runs it
                expected = encode(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            for _ in range(2):
                given = copy.deepcopy((args, kwargs))
                found = cache(*given[0], **given[1])
                assert type(found) is type(expected)
                pairs = list(zip(tensors(found), tensors(expected), strict=True))
                for mine, own in pairs:
                    if own is None:
                        assert mine is None
                        continue
                    assert mine.dtype == own.dtype
                    torch.testing.assert_close(mine, own, rtol=1e-5, atol=1e-5)
                    assert not mine.requires_grad
                if len(prompts) == 1:
                    assert all(own is None or torch.equal(mine, own) for mine, own in pairs)


@pytest.mark.parametrize("name", TINY)
def test_encoders_run_once_for_each_prompt(name: str) -> None:
    wrapper = wrap(name, cfg=True)
    wrapper.schedule()
    before = wrapper.encoder_calls
    runs: list[int] = []
    hook = wrapper.pipe.text_encoder.register_forward_hook(lambda *_: runs.append(1))
    try:
        first = wrapper.rollout(request(0, 1), ALL)
        calls, count = wrapper.encoder_calls, len(runs)
        assert 2 <= calls - before <= 3 and count >= 2  # two prompts, and the batch if rows differ in length
        again = wrapper.rollout(request(0, 1), ALL)
        replay = wrapper.replay(first, 1)
        wrapper.predict(first.request, first.states[0], 0.5)
        wrapper.decode(first)
        if TINY[name].fixed_length:  # then also in other batches
            wrapper.replay(wrapper.rollout(request(1, 0, 1), ALL), 0)
        assert wrapper.encoder_calls == calls and len(runs) == count
    finally:
        hook.remove()
    assert torch.equal(again.latents, first.latents)
    assert torch.equal(replay.log_prob, first.log_probs[1])


class Encoder:
    """An ``encode_prompt`` that pads to the longest prompt, or to eight characters."""

    def __init__(self, longest: bool = False) -> None:
        self.longest = longest
        self.batches: list[list[str]] = []

    def encode_prompt(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        prompt_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if prompt_embeds is not None:
            return prompt_embeds, None, torch.zeros(8, 3)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        self.batches.append(list(prompts))
        embeds = self._embed(prompts)
        negative = None
        if negative_prompt is not None:
            negative = self._embed([negative_prompt] if isinstance(negative_prompt, str) else negative_prompt)
        for i in range(len(prompts)):
            if isinstance(prompt, list):
                prompt[i] = "templated"  # as Z-Image does
        return embeds, negative, torch.zeros(8, 3)

    def _embed(self, prompts: list[str]) -> Tensor:
        width = max(map(len, prompts)) if self.longest else 8
        return torch.tensor([[float(ord(c)) for c in text.ljust(width)] for text in prompts])


def test_batches_are_put_together_from_rows() -> None:
    encoder = Encoder()
    cache = PromptCache(encoder.encode_prompt)
    prompts = ["red", "blue"]
    embeds, negative, ids = cache(prompts, negative_prompt=["x", "yy"], scale=1)
    assert torch.equal(embeds, encoder._embed(["red", "blue"]))
    assert torch.equal(negative, encoder._embed(["x", "yy"]))
    assert ids.shape == (8, 3)  # of the batch, not of a row
    assert prompts == ["red", "blue"]
    again = cache(prompt=["blue", "green", "red"], negative_prompt=["yy", "x", "x"], scale=1)
    assert torch.equal(again[0], encoder._embed(["blue", "green", "red"]))
    assert encoder.batches == [["red"], ["blue"], ["green"]]
    assert cache.encoder_calls == 3
    cache(["red"], negative_prompt=["other"], scale=1)
    cache(["red"], negative_prompt=["x"], scale=2)
    assert cache.encoder_calls == 5


def test_batches_padded_to_the_longest_prompt_are_encoded_together() -> None:
    encoder = Encoder(longest=True)
    cache = PromptCache(encoder.encode_prompt)
    for _ in range(2):
        embeds, negative, _ = cache(["red", "green"])
        assert torch.equal(embeds, encoder._embed(["red", "green"])) and negative is None
    assert encoder.batches == [["red"], ["green"], ["red", "green"]]
    cache(["red", "red"])
    assert cache.encoder_calls == 3


def test_given_embeddings_and_single_texts() -> None:
    encoder = Encoder()
    cache = PromptCache(encoder.encode_prompt)
    given = torch.ones(1, 8)
    assert cache(None, prompt_embeds=given)[0] is given
    assert cache(None, prompt_embeds=2 * given)[0].max() == 2
    assert torch.equal(cache("red")[0], encoder._embed(["red"]))
    cache("red")
    assert encoder.batches == [["red"]]


def test_positive_is_the_first_embedding_of_a_pipeline_call() -> None:
    cache = PromptCache(Encoder().encode_prompt)
    first = cache(["red"])[0]
    cache(["blue"])
    assert cache.positive is first


def test_the_least_recently_used_embeddings_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder()
    cache = PromptCache(encoder.encode_prompt)
    size = 4 * (8 + 8 * 3)
    monkeypatch.setattr(conditioning, "MAX_CACHED_BYTES", 2 * size)
    for text in ("a", "b", "a", "c", "a", "b"):
        cache([text])
    assert encoder.batches == [["a"], ["b"], ["c"], ["b"]]
    assert len(cache._cache) == 2 and cache._bytes == 2 * size
    monkeypatch.setattr(conditioning, "MAX_CACHED_BYTES", 0)
    embeds = cache(["d", "e", "f"])[0]  # more than fits: still right
    assert torch.equal(embeds, encoder._embed(["d", "e", "f"]))
    assert len(cache._cache) == 1


def test_z_image_writes_into_its_own_lists_only() -> None:
    wrapper = wrap("z_image", cfg=True)
    asked = request(0, 1)
    cache = wrapper._prompts
    assert cache is not None
    prompts, negative = list(PROMPTS[:2]), [NEGATIVE] * 2
    first, again = (
        cache(prompt=prompts, negative_prompt=negative, do_classifier_free_guidance=True) for _ in range(2)
    )
    assert prompts == list(PROMPTS[:2]) and negative == [NEGATIVE] * 2 and cache.encoder_calls == 2
    for mine, other in zip(tensors(first), tensors(again), strict=True):
        assert torch.equal(mine, other)
    replay: Replay = wrapper.replay(wrapper.rollout(asked, ALL), 0)
    assert replay.log_prob.isfinite().all() and asked.prompts == PROMPTS[:2]
