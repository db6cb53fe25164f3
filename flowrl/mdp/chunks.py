"""Video in chunks: their layout, what a chunk sees, the texts that it follows, and all chunks in one forward.

Frames of a window are counted after patching, those of a `ChunkLayout` before.
Shapes: B rows, C latent channels, F latent frames, h and w latent sides, N tokens, P tokens a frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.causal_attention import Frames, causal

SWITCH = " | "  # between the parts of a prompt


@dataclass(frozen=True)
class Window:
    """Which earlier frames a chunk sees.

    Attributes:
        size: frames that are attended to at most, sink and the chunk itself included; None: all earlier ones.
        sink: the first frames of the video, which are always seen.
    """

    size: int | None = None
    sink: int = 0

    def visible(self, start: int, length: int) -> Frames:
        """The earlier frames that the chunk [start, start + length) sees, ascending."""
        if self.size is None:
            return tuple(range(start))
        nearest = start + length - (self.size - self.sink)
        return tuple(frame for frame in range(start) if frame < self.sink or frame >= nearest)


@dataclass(frozen=True)
class ChunkLayout:
    """How the frames of a video are shared among chunks, in latent frames.

    Attributes:
        frames_per_chunk: frames that are made together.
        window_frames: what a chunk attends to at most, sink and itself included; None: all before it.
        sink_frames: the first frames, which are always attended to.
        resident_frames: what the cache holds at most; None: what the window needs.
        patch: latent frames of a patch.

    Raises:
        UserError: if these numbers do not fit together, or are no multiples of the patch's frames.
    """

    frames_per_chunk: int
    window_frames: int | None
    sink_frames: int
    resident_frames: int | None
    patch: int

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("frames_per_chunk", "window_frames", "sink_frames", "resident_frames"):
            value = getattr(self, name)
            if value is not None and (value % self.patch or value < 0):
                raise UserError(f"{name} = {value}: must be a multiple of the {self.patch} frames of a patch")
        needed = self.sink_frames + self.frames_per_chunk
        if self.frames_per_chunk < 1 or (self.window_frames is not None and self.window_frames < needed):
            raise UserError(
                f"window_frames = {self.window_frames}: must hold sink_frames {self.sink_frames} and "
                f"frames_per_chunk {self.frames_per_chunk}, which is at least 1"
            )

    @property
    def window(self) -> Window:
        """What chunks see, in frames after patching."""
        size = self.window_frames
        return Window(None if size is None else size // self.patch, self.sink_frames // self.patch)

    @property
    def resident(self) -> int | None:
        """What the cache must hold, in frames after patching; None: everything."""
        if self.window_frames is None:
            return None
        needed = max(self.window_frames - self.frames_per_chunk, self.resident_frames or 0)
        return needed // self.patch

    def place(self, number: int) -> dict[str, Frames]:
        """The ``frames`` of a chunk, and the earlier ones that it sees (``visible``), after patching."""
        length = self.frames_per_chunk // self.patch
        frames = tuple(range(number * length, (number + 1) * length))
        return {"frames": frames, "visible": self.window.visible(frames[0], length)}

    def split(self, latents: Tensor) -> tuple[Tensor, ...]:
        """Latents (B, C, F, h, w) cut into chunks.

        Raises:
            UserError: if they are no whole number of chunks.
        """
        frames = latents.shape[2]
        if frames % self.frames_per_chunk:
            raise UserError(
                f"num_frames: {frames} latent frames are no whole number of chunks of {self.frames_per_chunk}"
            )
        return latents.split(self.frames_per_chunk, dim=2)


def chunk_weights(num_chunks: int, a: float) -> list[float]:
    """Weights of equal chunks in a loss, of mean 1.

    With p_j the share of frames in chunk j and later and pi_a(p) = a p / (1 + (a - 1) p), chunk j weighs
    pi_a(p_j) for a > 0, pi_|a|(p_last / p_j) for a < 0, and 1 for a = 0, over the mean of these. Published
    (arXiv 2605.15190): a = -1, of seven chunks .386, .450, .540, .675, .900, 1.350, 2.700.
    """
    shares = [(num_chunks - j) / num_chunks for j in range(num_chunks)]
    points = shares if a > 0 else [shares[-1] / share for share in shares]
    raw = [1.0 if a == 0 else abs(a) * p / (1 + (abs(a) - 1) * p) for p in points]
    return [weight * num_chunks / sum(raw) for weight in raw]


def prompts_by_chunk(prompts: list[str], num_chunks: int) -> list[list[str]]:
    """The texts of all rows for each chunk: the parts of a prompt share the chunks evenly.

    Raises:
        UserError: for more parts than chunks.
    """
    parts = [prompt.split(SWITCH) for prompt in prompts]
    most = max(parts, key=len)
    if len(most) > num_chunks:
        raise UserError(f"prompt {SWITCH.join(most)!r} has {len(most)} parts for {num_chunks} chunks")
    return [[row[n * len(row) // num_chunks] for row in parts] for n in range(num_chunks)]


def packed_order(num_chunks: int) -> list[tuple[int, bool]]:
    """The chunks of a packed forward: (chunk, whether clean), in the order z1, x1, z2, x2, ..., zT."""
    return [(n, clean) for n in range(num_chunks) for clean in (False, True)][:-1]


def packed_mask(chunks: Sequence[Frames], window: Window, tokens: int) -> Tensor:
    """Which token sees which in a packed forward: bool (N, N).

    A chunk sees itself, and of the clean chunks the frames before it that its window holds. Noisy chunks are
    seen by nobody else. This is what a chunk sees in the cache, so both give the same output.

    Args:
        chunks: the frames of each chunk.
        window: of the frames.
        tokens: P.
    """
    order = packed_order(len(chunks))
    frame = torch.tensor([f for n, _ in order for f in chunks[n]])
    chunk = torch.tensor([i for i, (n, _) in enumerate(order) for _ in chunks[n]])
    clean = torch.tensor([c for n, c in order for _ in chunks[n]])
    seen = chunk[:, None] == chunk[None]
    for i, (n, _) in enumerate(order):
        visible = torch.tensor(window.visible(chunks[n][0], len(chunks[n])), dtype=torch.long)
        seen[chunk == i] |= clean & torch.isin(frame, visible)
    return seen.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def packed_forward(
    transformer: Any,
    noisy: Sequence[Tensor],
    clean: Sequence[Tensor],
    time: Tensor,
    texts: Sequence[Tensor],
    window: Window,
    constant_history: bool = False,
) -> Tensor:
    """The velocity of every noisy chunk, given the clean ones before it, in one forward.

    Args:
        transformer: a causal Wan.
        noisy: T chunks (B, C, f, h, w) at one time.
        clean: T chunks, of which the last is not used; they are data, but their keys and values are made
            here, so a loss on later chunks trains how history is encoded.
        time: of the noisy chunks, a scalar, or (B,).
        texts: T embeddings (B, L, width); chunks with the same text share the tensor.
        window: of the frames, after patching.
        constant_history: stop the gradient at the keys and values of clean chunks.

    Returns:
        (B, C, F, h, w), all chunks in a row.
    """
    context, patch = causal(transformer), transformer.config.patch_size
    rows, _, length, height, width = noisy[0].shape
    per_chunk = length // patch[0]
    chunks = [tuple(range(n * per_chunk, (n + 1) * per_chunk)) for n in range(len(noisy))]
    order = packed_order(len(noisy))
    states = torch.cat([clean[n] if is_clean else noisy[n] for n, is_clean in order], dim=2)
    tokens = (height // patch[1]) * (width // patch[2])
    is_clean = torch.tensor([c for _, c in order]).repeat_interleave(per_chunk * tokens).to(states.device)
    times = torch.where(is_clean, 0.0, time.to(states.device, torch.float32).view(-1, 1).expand(rows, 1))
    different = [texts[0]]
    spoken = [0]
    for before, text in itertools.pairwise(texts):
        if text is not before:
            different.append(text)
        spoken.append(len(different) - 1)
    text_mask = None
    if len(different) > 1:
        said = torch.tensor([spoken[n] for n, _ in order]).repeat_interleave(per_chunk * tokens)
        heard = torch.arange(len(different)).repeat_interleave(texts[0].shape[1])
        text_mask = (said[:, None] == heard[None]).to(states.device)
    with context.set(
        frames=tuple(f for n, _ in order for f in chunks[n]),
        cache=None,
        text_cache=None,
        mask=packed_mask(chunks, window, tokens).to(states.device),
        constant=is_clean if constant_history else None,
        text_mask=text_mask,
    ):
        velocity: Tensor = transformer(
            hidden_states=states.to(transformer.dtype),
            timestep=times,
            encoder_hidden_states=torch.cat(different, dim=1).to(transformer.dtype),
            return_dict=False,
        )[0]
    parts = velocity.split(length, dim=2)
    return torch.cat([part for part, (_, c) in zip(parts, order, strict=True) if not c], dim=2)
