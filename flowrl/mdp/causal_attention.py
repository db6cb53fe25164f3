"""Block-causal attention for a Wan transformer of diffusers: rotary positions, a key/value cache, a mask.

`causal` gives a ``WanTransformer3DModel`` what it lacks to make video chunk by chunk, without a change to its
code: a ``rope`` that takes frame indices, and attention processors that use a cache or apply a mask.
They all follow one `CausalContext`, which says what the next forward is:

    a chunk    attends to the cached frames that it may see, and to itself; its keys and values are written
               into the cache if it is a clean chunk at time 0
    packed     noisy and clean chunks of a whole video side by side under a mask (flowrl/mdp/chunks.py)

Keys enter the cache with the rotary position that they have in the video. Frames are counted after patching.
Shapes: B rows, N tokens of a forward, H heads, D head width, P tokens a frame, L tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor, nn

Frames = tuple[int, ...]


class FrameCache:
    """Keys and values of earlier frames by layer: sink frames stay, of the others the newest.

    Whole frames come and go, so that a chunk can never overwrite a part of what is still seen.
    """

    def __init__(self, resident: int | None = None, sink: int = 0) -> None:
        """``resident``: frames that are held at most, sink included; None: all."""
        self.resident, self.sink = resident, sink
        self._layers: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}

    @property
    def frames(self) -> Frames:
        """The frames that are held, ascending."""
        return tuple(sorted(self._layers.get(0, {})))

    def write(self, layer: int, frames: Frames, keys: Tensor, values: Tensor) -> None:
        """Takes in keys and values (B, frames * P, H, D), and lets the oldest frames go."""
        held = self._layers.setdefault(layer, {})
        parts = zip(keys.chunk(len(frames), dim=1), values.chunk(len(frames), dim=1), strict=True)
        held.update(zip(frames, parts, strict=True))
        if self.resident is not None:
            oldest = frames[-1] + 1 - (self.resident - self.sink)
            for frame in [frame for frame in held if self.sink <= frame < oldest]:
                del held[frame]

    def read(self, layer: int, frames: Frames | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, n * P, H, D) of n frames: the same for all rows, or by row (B, n).

        Raises:
            KeyError: for a frame that is not held.
        """
        held = self._layers.get(layer, {})
        if isinstance(frames, Tensor):
            known = sorted(held)
            place = {frame: number for number, frame in enumerate(known)}
            picked = [[place[int(frame)] for frame in row] for row in frames]
            return _by_row(held, known, picked, 0), _by_row(held, known, picked, 1)
        parts = [held[frame] for frame in frames]
        return torch.cat([key for key, _ in parts], dim=1), torch.cat([value for _, value in parts], dim=1)


def _by_row(held: dict[int, Any], known: list[int], picked: list[list[int]], which: int) -> Tensor:
    stacked = torch.stack([held[frame][which] for frame in known])
    return torch.stack([stacked[row, b].flatten(0, 1) for b, row in enumerate(picked)])


@dataclass
class CausalContext:
    """What the next forward of the transformer is.

    Attributes:
        frames: the frame of each patch along time.
        visible: the cached frames that are attended to: of all rows, or (B, n).
        cache: of the earlier frames; None without.
        write: whether keys and values of this forward enter the cache.
        mask: (N, N) bool, True where a query may see a key, in place of a cache.
        constant: (N,) bool, tokens whose keys and values get no gradient; None: none.
        constant_history: whether keys and values enter the cache without gradient.
        text_mask: (B or 1, 1, N, L) bool, which text each token sees; None: all of it.
        text_cache: by layer, keys and values of the text; None: they are made anew at every forward.
    """

    frames: Frames = ()
    visible: Frames | Tensor = ()
    cache: FrameCache | None = None
    write: bool = False
    mask: Tensor | None = None
    constant: Tensor | None = None
    constant_history: bool = False
    text_mask: Tensor | None = None
    text_cache: dict[int, tuple[Tensor, Tensor]] | None = None

    @contextmanager
    def set(self, **fields: Any) -> Iterator[None]:
        """Sets some attributes for the forwards within."""
        before = {name: getattr(self, name) for name in fields}
        try:
            for name, value in fields.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


class CausalRope(nn.Module):
    """Rotary positions of the frames that the context names, in place of 0, 1, 2, ...

    Differs from diffusers' own: no limit to the number of frames.
    """

    def __init__(self, own: Any, context: CausalContext) -> None:
        """``own``: the transformer's ``WanRotaryPosEmbed``."""
        super().__init__()
        self.patch_size = own.patch_size
        self.dims = (own.t_dim, own.h_dim, own.w_dim)
        self.context = context

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (1, N, 1, D) for latents (B, C, F, height, width)."""
        counts = [side // patch for side, patch in zip(hidden_states.shape[2:], self.patch_size, strict=True)]
        frames = self.context.frames or tuple(range(counts[0]))
        if len(frames) != counts[0]:
            raise ValueError(f"{counts[0]} frames where the context names {len(frames)}")
        places = (torch.tensor(frames), torch.arange(counts[1]), torch.arange(counts[2]))
        tables = [
            get_1d_rotary_pos_embed(
                dim, place, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64
            )
            for dim, place in zip(self.dims, places, strict=True)
        ]
        size = (*counts, -1)
        shapes = ((-1, 1, 1), (1, -1, 1), (1, 1, -1))
        cos, sin = (
            torch.cat(
                [t[i].view(*s, t[i].shape[-1]).expand(size) for t, s in zip(tables, shapes, strict=True)], -1
            )
            for i in (0, 1)
        )
        return tuple(  # type: ignore[return-value]
            table.reshape(1, -1, 1, table.shape[-1]).to(hidden_states.device) for table in (cos, sin)
        )


class CausalSelfAttention:
    """Attention processor: keys of the cache, then its own."""

    def __init__(self, layer: int, context: CausalContext) -> None:
        """``layer``: its place in the cache."""
        self.layer, self.context = layer, context

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The output (B, N, H * D) of self-attention."""
        context = self.context
        assert rotary_emb is not None
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        query = _rotated(attn.norm_q(query).unflatten(2, (attn.heads, -1)), *rotary_emb)
        key = _rotated(attn.norm_k(key).unflatten(2, (attn.heads, -1)), *rotary_emb)
        value = value.unflatten(2, (attn.heads, -1))
        if context.constant is not None:
            constant = context.constant[None, :, None, None]
            key = torch.where(constant, key.detach(), key)
            value = torch.where(constant, value.detach(), value)
        if context.cache is not None:
            own_key, own_value = key, value
            if len(context.visible):
                earlier = context.cache.read(self.layer, context.visible)
                key, value = torch.cat([earlier[0], key], dim=1), torch.cat([earlier[1], value], dim=1)
            if context.write:
                if context.constant_history:
                    own_key, own_value = own_key.detach(), own_value.detach()
                context.cache.write(self.layer, context.frames, own_key, own_value)
        return _output(attn, _attention(query, key, value, context.mask))


class CausalCrossAttention:
    """Attention processor: the text of each token's chunk, its keys and values kept between forwards."""

    def __init__(self, layer: int, context: CausalContext) -> None:
        """``layer``: its place in the text cache."""
        self.layer, self.context = layer, context

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The output (B, N, H * D) of cross-attention."""
        context = self.context
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        kept = None if context.text_cache is None else context.text_cache.get(self.layer)
        if kept is None:
            key = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1))
            kept = key, attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1))
            if context.text_cache is not None:
                context.text_cache[self.layer] = kept
        return _output(attn, _attention(query, *kept, context.text_mask))


def causal(transformer: Any) -> CausalContext:
    """The context of a Wan transformer, which is made causal if it is not yet.

    Raises:
        ValueError: for a transformer that also attends to an image.
    """
    if isinstance(transformer.rope, CausalRope):
        return transformer.rope.context
    if transformer.config.added_kv_proj_dim is not None:
        raise ValueError("a causal Wan is text-to-video; this transformer attends to an image as well")
    context = CausalContext()
    transformer.rope = CausalRope(transformer.rope, context)
    for layer, block in enumerate(transformer.blocks):
        block.attn1.set_processor(CausalSelfAttention(layer, context))
        block.attn2.set_processor(CausalCrossAttention(layer, context))
    return context


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """States (B, N, H, D) turned pair by pair."""
    first, second = states.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(-2).type_as(states)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """(B, N, H, D), by PyTorch's own kernels."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def _output(attn: Any, hidden_states: Tensor) -> Tensor:
    hidden_states = attn.to_out[0](hidden_states.flatten(2, 3))
    projected: Tensor = attn.to_out[1](hidden_states)
    return projected
