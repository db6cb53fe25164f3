"""Small transformers that predict the clean tokens: of a picture for a text, or of an answer about a picture.

One stream: the grid of the picture and text tokens attend to each other; convolutions over the grid, at the
start and in every MLP, tell it what lies where. Without them a model of this size hardly learns shapes.

Shapes: B rows, L = side^2 picture tokens, M text tokens, V data tokens, S states (V, and a mask).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn


class TokenTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Logits of the clean tokens, for noisy tokens, a time and a text."""

    _supports_gradient_checkpointing = False

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_tokens: int = 256,
        num_states: int = 257,
        side: int = 8,
        width: int = 128,
        num_layers: int = 6,
        num_heads: int = 4,
        mlp_ratio: float = 3.0,
        text_width: int = 96,
    ) -> None:
        """Makes the layers.

        Args:
            num_tokens: data tokens V, the logits of a position.
            num_states: states S that a position may have.
            side: of the grid.
            width: of the stream.
            num_layers, num_heads, mlp_ratio: of the blocks.
            text_width: of the text encoder's states.
        """
        super().__init__()
        self.tokens = nn.Embedding(num_states, width)
        self.places = nn.Parameter(0.02 * torch.randn(side * side, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.stem = nn.Conv2d(width, width, 3, padding=1, groups=4)
        self.text = nn.Linear(text_width, width)
        self.blocks = nn.ModuleList(
            TokenBlock(width, num_heads, int(mlp_ratio * width), side) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        encoder_attention_mask: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Logits (B, L, V) of the clean tokens.

        Args:
            hidden_states: (B, L) noisy tokens.
            encoder_hidden_states: (B, M, text_width).
            timestep: (B,) times t in [0, 1], 1 = data.
            encoder_attention_mask: (B, M), 1 where there is text.
            return_dict: has no effect; a tuple is returned.
        """
        side, width = self.config.side, self.config.width
        dtype = self.places.dtype
        x = self.tokens(hidden_states) + self.places
        x = x + self.time(time_features(timestep, width).to(dtype))[:, None]
        grid = x.transpose(1, 2).unflatten(2, (side, side))
        x = x + self.stem(grid).flatten(2).transpose(1, 2)
        length = x.shape[1]
        x = torch.cat([x, self.text(encoder_hidden_states.to(dtype))], dim=1)
        mask = None
        if encoder_attention_mask is not None:
            mask = F.pad(encoder_attention_mask.bool(), (length, 0), value=True)[:, None, None]
        for block in self.blocks:
            x = block(x, length, mask)
        return (self.head(self.norm(x[:, :length])),)


class TextTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Logits of the clean tokens of an answer. Like other masked language models, it is not told the time."""

    _supports_gradient_checkpointing = False

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_states: int,
        side: int = 8,
        patch_width: int = 192,
        prompt_length: int = 12,
        answer_length: int = 3,
        width: int = 96,
        num_layers: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 3.0,
    ) -> None:
        """Makes the layers.

        Args:
            num_states: tokens of the vocabulary, special ones among them.
            side: of the grid of patches.
            patch_width: numbers of a patch.
            prompt_length, answer_length: tokens of a question (at most) and of an answer.
            width: of the stream.
            num_layers, num_heads, mlp_ratio: of the blocks.
        """
        super().__init__()
        self.tokens = nn.Embedding(num_states, width)
        self.places = nn.Parameter(0.02 * torch.randn(prompt_length + answer_length, width))
        self.patches = nn.Linear(patch_width, width)
        self.patch_places = nn.Parameter(0.02 * torch.randn(side * side, width))
        self.blocks = nn.ModuleList(
            TokenBlock(width, num_heads, int(mlp_ratio * width), side) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_states)
        nn.init.normal_(self.tokens.weight, std=0.5)

    def forward(
        self,
        hidden_states: Tensor,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        image_features: Tensor,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Logits (B, A, S) of the clean tokens of an answer.

        Args:
            hidden_states: (B, A) noisy tokens.
            prompt_ids: (B, Q) tokens of the question.
            prompt_mask: (B, Q), 1 where there is text.
            image_features: (B, side^2, patch_width) patches of the picture.
            return_dict: has no effect; a tuple is returned.
        """
        answer = self.places[-hidden_states.shape[1] :] + self.tokens(hidden_states)
        question = self.places[: prompt_ids.shape[1]] + self.tokens(prompt_ids)
        picture = self.patches(image_features.to(self.places.dtype)) + self.patch_places
        x = torch.cat([picture, answer, question], dim=1)
        length, start = picture.shape[1], picture.shape[1] + answer.shape[1]
        mask = F.pad(prompt_mask.bool(), (start, 0), value=True)[:, None, None]
        for block in self.blocks:
            x = block(x, length, mask)
        return (self.head(self.norm(x[:, length:start])),)


class TokenBlock(nn.Module):
    """Attention over picture and text, and an MLP that looks at neighbours in the picture."""

    def __init__(self, width: int, num_heads: int, hidden: int, side: int) -> None:
        """``hidden``: width of the MLP."""
        super().__init__()
        self.num_heads, self.side = num_heads, side
        self.norm_attention = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.near = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor, length: int, mask: Tensor | None) -> Tensor:
        """(B, L + M, width), of which the first ``length`` positions are the grid."""
        qkv = self.to_qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.to_out(attended.transpose(1, 2).flatten(2))
        hidden = self.up(self.norm_mlp(x))
        picture, text = hidden[:, :length], hidden[:, length:]
        grid = picture.transpose(1, 2).unflatten(2, (self.side, self.side))
        picture = picture + self.near(grid).flatten(2).transpose(1, 2)
        return x + self.down(F.gelu(torch.cat([picture, text], dim=1)))


def time_features(timestep: Tensor, width: int) -> Tensor:
    """Sines and cosines (B, width) of times (B,) in [0, 1], at frequencies from 1 to 1000."""
    half = width // 2
    frequencies = torch.exp(math.log(1000.0) * torch.arange(half, device=timestep.device) / half)
    angles = timestep.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
