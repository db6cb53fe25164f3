"""The image half of Janus as a backbone of discrete flows: FUDOKI's network.

A Llama reads one sequence, text, picture, end of image, and every token attends to every other: no causal
mask, and no time. The logits of a picture token are read one position before it, those of the first at the
last token of the text, which is the begin of image. Text and picture have vocabularies of their own: the text
comes as embeddings (`JanusTokenEmbedding`, the pipeline's text encoder), tokens of the picture as code
vectors through an MLP.

Weights, by the names of transformers' Janus without its prefixes: ``layers.N.*`` and ``norm`` of the language
model, ``generation_embeddings``, ``generation_aligner``, ``generation_head``; and ``end_of_image``, a row of
the language model's table.

Source: arXiv 2410.13848 (Janus), 2505.20147 (FUDOKI).
Shapes: B rows, M text tokens, L = side^2 picture tokens, V codes, D width of the language model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAEAlignerMLP, JanusVQVAEHead
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


class JanusTokenBackbone(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Logits of the clean picture tokens, for noisy ones and a text."""

    _supports_gradient_checkpointing = True
    _no_split_modules = ("LlamaDecoderLayer",)

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        text_config: dict[str, Any],
        num_tokens: int = 16384,
        code_width: int = 8,
        aligner_layers: int = 2,
        head_width: int = 2048,
        side: int = 24,
    ) -> None:
        """Makes the layers.

        Args:
            text_config: options of transformers' ``LlamaConfig``.
            num_tokens: codes V of a picture, the logits of a position.
            code_width: of their embeddings.
            aligner_layers: linear layers from there to the width of the language model.
            head_width: of the hidden layer in front of the logits.
            side: of the grid.
        """
        super().__init__()
        text = LlamaConfig(**{**text_config, "attn_implementation": "sdpa"})
        width = text.hidden_size
        self.generation_embeddings = nn.Embedding(num_tokens, code_width)
        self.generation_aligner = JanusVQVAEAlignerMLP(
            JanusVQVAEConfig(embed_dim=code_width, projection_dim=width, num_hidden_layers=aligner_layers)
        )
        self.layers = nn.ModuleList(LlamaDecoderLayer(text, i) for i in range(text.num_hidden_layers))
        self.norm = LlamaRMSNorm(width, eps=text.rms_norm_eps)
        self.generation_head = JanusVQVAEHead(
            JanusVQVAEConfig(
                image_token_embed_dim=width, projection_dim=head_width, num_embeddings=num_tokens
            )
        )
        self.register_buffer("end_of_image", torch.zeros(width))
        self.gradient_checkpointing = False
        # In a list, so that it is no submodule and no cast of the network touches its frequencies: bfloat16
        # ones are wrong by whole radians at the end of the sequence.
        with torch.device("cpu"):
            self._rotary = [LlamaRotaryEmbedding(text)]

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Logits (B, L, V) of the clean tokens.

        Args:
            hidden_states: (B, L) noisy tokens.
            encoder_hidden_states: (B, M, D) embeddings of the text, padded on either side.
            timestep: has no effect; the network is not told the time.
            encoder_attention_mask: (B, M), 1 where there is text; positions count these tokens only.
            return_dict: has no effect; a tuple is returned.
        """
        picture = self.generation_aligner(self.generation_embeddings(hidden_states))
        rows, length, width = picture.shape
        text = encoder_hidden_states.to(picture.dtype)
        count = text.shape[1]
        end = self.end_of_image.to(picture.dtype).expand(rows, 1, width)
        x = torch.cat([text, picture, end], dim=1)
        if encoder_attention_mask is None:
            encoder_attention_mask = torch.ones(rows, count, device=x.device)
        is_text = encoder_attention_mask.bool()
        known = F.pad(is_text, (0, length + 1), value=True)
        positions = (known.cumsum(-1) - 1).clamp(min=0)
        # A mask is always given: without one these layers are causal.
        layer_options = {
            "attention_mask": known[:, None, None].expand(-1, 1, x.shape[1], -1),
            "position_ids": positions,
            "position_embeddings": self._rotary[0](x, positions),
        }
        for layer in self.layers:
            bound = partial(layer, **layer_options)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(bound, x)
            else:
                x = bound(x)
        x = self.norm(x)
        last = (is_text * torch.arange(1, count + 1, device=x.device)).argmax(-1)
        first = x[torch.arange(rows, device=x.device), last]
        before = torch.cat([first[:, None], x[:, count : count + length - 1]], dim=1)
        return (self.generation_head(before),)


class JanusTokenEmbedding(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """The language model's table of token embeddings, frozen, as a text encoder."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, vocab_size: int = 102400, width: int = 2048) -> None:
        """Of so many tokens, so wide."""
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, width).requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        """Embeddings (B, M, width) of tokens (B, M); the mask has no effect."""
        return (self.embed_tokens(input_ids),)
