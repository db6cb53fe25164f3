"""The causal pipeline: cache against mask, causality, eviction, streaming, prompt switches, memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from tiny_video import CALL, PROMPTS, STEPS, causal_wan
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.causal_attention import CausalContext, CausalRope, FrameCache, causal
from flowrl.mdp.chunks import Window, chunk_weights, packed_mask, packed_order, prompts_by_chunk
from flowrl.pipelines.causal_wan import CausalWanPipeline

CHUNKS = 6
LAYOUTS = [
    (1, {}),
    (2, {}),
    (3, {}),
    (1, {"window_frames": 4}),
    (1, {"window_frames": 4, "sink_frames": 1}),
    (2, {"window_frames": 4}),
    (2, {"window_frames": 6, "sink_frames": 2}),
    (3, {"window_frames": 6}),
    (3, {"window_frames": 9, "sink_frames": 3}),
    (2, {"window_frames": 6, "sink_frames": 2, "resident_frames": 10}),
]


def generate(
    pipe: CausalWanPipeline, prompts: list[str] = PROMPTS, chunks: int = CHUNKS, **options: Any
) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """Latents of a call, and (velocity, time, state) of each of its steps."""
    taken: list[tuple[Tensor, Tensor, Tensor]] = []
    own = pipe.scheduler.step

    def step(velocity: Tensor, time: Tensor, state: Tensor, **rest: Any) -> Any:
        taken.append((velocity, time, state))
        return own(velocity, time, state, **rest)

    pipe.scheduler.step = step
    frames = chunks * pipe.layout.frames_per_chunk
    arguments = {"generator": [torch.Generator().manual_seed(s) for s in range(len(prompts))]} | options
    try:
        made = pipe(
            prompts,
            num_frames=frames,
            num_inference_steps=STEPS,
            output_type="latent",
            return_dict=False,
            **CALL,
            **arguments,
        )[0]
    finally:
        del pipe.scheduler.step
    return made, taken


def side_by_side(taken: list[tuple[Tensor, Tensor, Tensor]], k: int, which: int) -> Tensor:
    """Step k of all chunks."""
    return torch.cat([taken[n][which] for n in range(k, len(taken), STEPS)], dim=2)


def draws(rows: int, frames: int, seed: int = 5) -> Tensor:
    return torch.randn(rows, 4, frames, 16, 16, generator=torch.Generator().manual_seed(seed))


# -- cache and mask ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "layout"), LAYOUTS)
def test_cached_equals_packed(length: int, layout: dict[str, Any]) -> None:
    """Every chunk and step, with prompts that switch in one row, also after eviction."""
    pipe = causal_wan(length, **layout)
    made, taken = generate(pipe)
    assert len(taken) == CHUNKS * STEPS
    for k in range(STEPS):
        with torch.no_grad():
            packed = pipe.packed(side_by_side(taken, k, 2), made, taken[k][1], PROMPTS, 24)
        cached = side_by_side(taken, k, 0)
        for n in range(CHUNKS):
            chunk = slice(n * length, (n + 1) * length)
            assert float((packed[:, :, chunk] - cached[:, :, chunk]).abs().max()) < 1e-5, (k, n)


@pytest.mark.parametrize(("length", "layout"), LAYOUTS)
def test_cached_equals_uncached(length: int, layout: dict[str, Any]) -> None:
    """All clean chunks so far, and the noisy one, in one plain forward under a mask built entry by entry."""
    pipe = causal_wan(length, **layout)
    made, taken = generate(pipe, ["a tree"])
    context, size = causal(pipe.transformer), layout.get("window_frames")
    sink, tokens = layout.get("sink_frames", 0), 64
    embeds = pipe._embeds(["a tree"], 24)
    for n in (0, 1, 3, CHUNKS - 1):
        frames = (n + 1) * length
        mask = torch.zeros(frames, frames, dtype=torch.bool)
        for query in range(frames):
            start = query // length * length  # of the query's chunk
            for key in range(start + length):
                near = size is None or key >= start + length - (size - sink)
                mask[query, key] = key >= start or key < sink or near
        for k in (0, STEPS - 1):
            velocity, time, state = taken[n * STEPS + k]
            states = torch.cat([made[:, :, : n * length], state], dim=2)
            times = torch.cat([torch.zeros(n * length * tokens), time.expand(length * tokens)])[None]
            wide = mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)
            with torch.no_grad(), context.set(mask=wide, frames=tuple(range(frames))):
                found = pipe.transformer(states, times, embeds, return_dict=False)[0]
            assert float((found[:, :, n * length :] - velocity).abs().max()) < 1e-5


@pytest.mark.parametrize("window", [Window(), Window(4), Window(5, 2)])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_packed_mask_entry_by_entry(window: Window, length: int) -> None:
    chunks = [tuple(range(n * length, (n + 1) * length)) for n in range(4)]
    if window.size is not None and window.size < window.sink + length:
        return
    order = packed_order(4)
    assert order == [(0, False), (0, True), (1, False), (1, True), (2, False), (2, True), (3, False)]
    mask = packed_mask(chunks, window, 1)
    places = [(i, n, clean, f) for i, (n, clean) in enumerate(order) for f in chunks[n]]
    for row, (i, n, _, _) in enumerate(places):
        for column, (j, m, clean, frame) in enumerate(places):
            far = window.size is not None and frame < (n + 1) * length - (window.size - window.sink)
            earlier = clean and m < n and (frame < window.sink or not far)
            assert bool(mask[row, column]) == (i == j or earlier)


def test_rope_is_that_of_diffusers_and_has_no_end() -> None:
    own = WanRotaryPosEmbed(16, (1, 2, 2), 32)
    context = CausalContext()
    mine = CausalRope(own, context)
    states = torch.zeros(1, 4, 5, 8, 8)
    for ours, theirs in zip(mine(states), own(states), strict=True):
        torch.testing.assert_close(ours, theirs)
    whole = mine(torch.zeros(1, 4, 9, 8, 8))[0].unflatten(1, (9, 16))
    with context.set(frames=(8, 2, 2, 0, 5)):
        picked = mine(states)[0].unflatten(1, (5, 16))
    assert torch.equal(picked, whole[:, [8, 2, 2, 0, 5]])
    with context.set(frames=(1000, 1001, 1002, 1003, 1004)):
        assert mine(states)[0].isfinite().all()
    with context.set(frames=(1, 2)), pytest.raises(ValueError, match="5 frames where the context names 2"):
        mine(states)


def test_the_frame_cache() -> None:
    cache = FrameCache(resident=4, sink=1)
    for start in range(0, 8, 2):
        keys = torch.arange(start, start + 2).repeat_interleave(3).view(1, 6, 1, 1).float()
        cache.write(0, (start, start + 1), keys, -keys)
        assert len(cache.frames) <= 4
    assert cache.frames == (0, 5, 6, 7)
    keys, values = cache.read(0, (0, 6))
    assert keys.flatten().tolist() == [0, 0, 0, 6, 6, 6] and torch.equal(values, -keys)
    with pytest.raises(KeyError):
        cache.read(0, (4,))
    two = FrameCache()
    for frame in range(3):
        keys = torch.stack([torch.full((2, 1, 1), float(frame)), torch.full((2, 1, 1), 10.0 + frame)])
        two.write(0, (frame,), keys, keys)
    found = two.read(0, torch.tensor([[0, 2], [2, 1]]))[0]
    assert found[..., 0, 0].tolist() == [[0, 0, 2, 2], [12, 12, 11, 11]]


# -- causality -----------------------------------------------------------------------------------------------


def test_a_chunk_changes_nothing_before_it() -> None:
    pipe = causal_wan(2)
    noise = draws(1, 12)
    before = generate(pipe, ["a tree"], latents=noise)[0]
    other = noise.clone()
    other[:, :, 6:8] += 1
    after = generate(pipe, ["a tree"], latents=other)[0]
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert all(not torch.equal(before[:, :, f], after[:, :, f]) for f in range(6, 12))


def test_an_evicted_chunk_is_forgotten_within_the_reach_of_the_layers() -> None:
    """Each layer passes on what its window holds: with L layers a chunk reaches L windows ahead, no more."""
    noise = draws(1, 20)
    other = noise.clone()
    other[:, :, 2:4] += 1  # chunk 1
    for layers, reach in ((1, 1), (2, 2)):
        pipe = causal_wan(2, layers=layers, window_frames=4)  # a chunk sees one chunk before it
        embeds = pipe._embeds(["a tree"], 24)
        window = pipe.layout.window
        assert window.visible(6, 2) == (4, 5)

        def clean_passes(latents: Tensor, pipe: Any = pipe, embeds: Tensor = embeds) -> list[Tensor]:
            """The network's output for each clean chunk after the ones before it."""
            context, cache, found = causal(pipe.transformer), FrameCache(pipe.layout.resident), []
            for n, chunk in enumerate(latents.split(2, dim=2)):
                with torch.no_grad(), context.set(cache=cache, **pipe.layout.place(n), write=True):
                    found.append(pipe._velocity(chunk, torch.zeros(()), embeds))
            return found

        pairs = zip(clean_passes(noise), clean_passes(other), strict=True)
        changed = [not torch.equal(a, b) for a, b in pairs]
        assert changed == [n == 1 or 1 < n <= 1 + reach for n in range(10)]


def test_rows_do_not_share_a_cache() -> None:
    """A row alone makes what it makes beside another, and other rows' noise and prompts change nothing."""
    pipe = causal_wan(2, window_frames=6, sink_frames=2)
    noise = draws(2, 12)
    both = generate(pipe, PROMPTS, latents=noise, generator=None)[1]
    noise[1] += 1
    other = generate(pipe, [PROMPTS[0], "a house"], latents=noise, generator=None)[1]
    assert torch.equal(both[0][0][0], other[0][0][0])
    alone = generate(pipe, PROMPTS[:1])[0]
    beside = generate(pipe, PROMPTS)[0]
    torch.testing.assert_close(alone[0], beside[0], atol=1e-5, rtol=1e-5)


def test_the_cache_holds_the_clean_pass_and_is_new_in_every_call() -> None:
    pipe = causal_wan(2)
    first, second = generate(pipe)[0], generate(pipe)[0]
    assert torch.equal(first, second)
    seen: list[tuple[float, bool]] = []
    context = causal(pipe.transformer)

    def watch(_: Any, args: Any, kwargs: Any) -> None:
        seen.append((float(kwargs["timestep"].max()), context.write))

    with pipe.transformer.register_forward_pre_hook(watch, with_kwargs=True):
        generate(pipe, chunks=3)
    assert [write for _, write in seen] == ([False] * STEPS + [True]) * 2 + [False] * STEPS
    assert all(time == 0 for time, write in seen if write) and all(
        time > 0 for time, write in seen if not write
    )


# -- gradients of the history --------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [False, True])
def test_packed_gradients_reach_the_encoding_of_the_history(constant: bool) -> None:
    """The last chunk's loss; equal to that of the chunk loop, whose cache keeps its graph, or cuts it."""
    pipe = causal_wan(2)
    made, taken = generate(pipe, ["a tree"], chunks=3)
    states, weights = side_by_side(taken, 1, 2), draws(1, 2, seed=9)
    names = [f"blocks.{layer}.attn1.to_{part}.weight" for layer in range(2) for part in "kv"]
    picked = [dict(pipe.transformer.named_parameters())[name] for name in names]
    velocity = pipe.packed(states, made, taken[1][1], ["a tree"], 24, constant_history=constant)
    packed = torch.autograd.grad((velocity[:, :, 4:] * weights).sum(), picked, retain_graph=True)
    context, cache, embeds = causal(pipe.transformer), FrameCache(), pipe._embeds(["a tree"], 24)
    for n in range(2):
        with context.set(cache=cache, **pipe.layout.place(n), write=True, constant_history=constant):
            pipe._velocity(made[:, :, 2 * n : 2 * n + 2], torch.zeros(()), embeds)
    with context.set(cache=cache, **pipe.layout.place(2)):
        last = pipe._velocity(states[:, :, 4:], taken[1][1], embeds)
    cached = torch.autograd.grad((last * weights).sum(), picked)
    for mine, theirs in zip(packed, cached, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    through = pipe.packed(states, made, taken[1][1], ["a tree"], 24, constant_history=not constant)
    other = torch.autograd.grad((through[:, :, 4:] * weights).sum(), picked)
    assert any(float((a - b).abs().max()) > 1e-4 for a, b in zip(packed, other, strict=True))


# -- streams, prompts, files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vae", [False, True])
def test_a_stream_gives_the_chunks_of_the_call(vae: bool) -> None:
    pipe = causal_wan(1, vae=vae)
    pipe.scheduler = pipe.scheduler.from_config(pipe.scheduler.config)
    size = 2 if vae else 16
    noise = torch.randn(2, 4, 4, size, size, generator=torch.Generator().manual_seed(3))
    arguments = {"num_inference_steps": 1, "latents": noise, **CALL}
    frames = (4 - 1) * pipe.vae_scale_factor_temporal + 1
    whole = pipe(PROMPTS, num_frames=frames, output_type="pt", return_dict=False, **arguments)[0]
    assert whole.shape[:3] == (2, frames, 4 if not vae else 3)
    parts = list(pipe.stream(PROMPTS, 4, **arguments))
    assert len(parts) == 4
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_prompts_switch_between_chunks() -> None:
    assert prompts_by_chunk(["a | b", "c", "d | e | f"], 6) == [
        ["a", "c", "d"],
        ["a", "c", "d"],
        ["a", "c", "e"],
        ["b", "c", "e"],
        ["b", "c", "f"],
        ["b", "c", "f"],
    ]
    with pytest.raises(UserError, match="has 3 parts for 2 chunks"):
        prompts_by_chunk(["d | e | f"], 2)
    pipe = causal_wan(2)
    noise = draws(1, 8)
    one, two = (
        generate(pipe, [text], chunks=4, latents=noise, generator=torch.Generator().manual_seed(1))[0]
        for text in ("a cat", "a cat | a dog")
    )
    assert torch.equal(one[:, :, :4], two[:, :, :4]) and not torch.equal(one[:, :, 4:6], two[:, :, 4:6])
    live = pipe.stream(
        lambda n: ["a cat"] if n < 2 else ["a dog"],
        latents=noise,
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
        **CALL,
    )
    assert torch.equal(torch.cat(list(live), dim=2), two)
    with pytest.raises(UserError, match="stream without end"):
        next(pipe.stream("a cat | a dog", **CALL))


def test_memory_does_not_grow_with_the_video() -> None:
    """Frames held by the cache, and their bytes, from chunk 8 to chunk 64."""
    pipe = causal_wan(2, window_frames=6, sink_frames=2)
    context, held = causal(pipe.transformer), []

    def watch(*_: Any) -> None:
        if context.write and context.cache is not None:
            kept = context.cache._layers[0].values()
            held.append((len(kept), sum(key.nbytes + value.nbytes for key, value in kept)))

    stream = pipe.stream("a tree", generator=torch.Generator().manual_seed(0), num_inference_steps=1, **CALL)
    with pipe.transformer.register_forward_hook(watch):
        for _ in range(64):
            next(stream)
    assert len(held) == 63 and held[7] == held[-1] and held[-1][0] <= 6


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    pipe = causal_wan(2, window_frames=6, sink_frames=2)
    pipe.save_pretrained(tmp_path)
    again = CausalWanPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert again.layout == pipe.layout and again.vae is None
    assert torch.equal(generate(pipe)[0], generate(again)[0])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="window_frames = 3: must hold sink_frames 2 and frames_per_chunk 2"):
        causal_wan(2, window_frames=3, sink_frames=2)
    with pytest.raises(UserError, match="5 latent frames are no whole number of chunks of 2"):
        causal_wan(2)("a cat", num_frames=5, **CALL)


def test_chunk_weights() -> None:
    """Published for seven chunks at -1, and the definition for others."""
    assert chunk_weights(7, -1.0) == pytest.approx(
        [0.386, 0.450, 0.540, 0.675, 0.900, 1.350, 2.700], abs=6e-4
    )
    assert chunk_weights(7, 1.0) == pytest.approx([(7 - j) / 4 for j in range(7)])
    assert chunk_weights(5, 0.0) == [1.0] * 5
    for a in (-3.0, -1.0, 0.5, 2.0):
        assert math.fsum(chunk_weights(9, a)) == pytest.approx(9)
