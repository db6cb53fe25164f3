"""Janus as a backbone of discrete flows, for pictures and for answers: FUDOKI's network.

A Llama reads one sequence in which every token attends to every other: no causal mask, and no time. The
logits of a token are read one position before it, those of the first at the last token of the text in front.

To make a picture, the sequence is text, picture, end of image: the text comes as embeddings
(`JanusTokenEmbedding`, the pipeline's text encoder), tokens of the picture as code vectors through an MLP. To
answer, it is a question, features of a picture (`JanusPictureEncoder`) for one of its tokens, and the answer.

Weights have the names of transformers' Janus without its prefixes; ``end_of_image`` is a row of the table.

Source: arXiv 2410.13848 (Janus), 2505.20147 (FUDOKI).
Shapes: B rows, M text tokens, L = side^2 picture tokens, A tokens of an answer, P features of a picture, V
codes or tokens, D width of the language model.
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
from transformers import JanusVisionConfig, LlamaConfig
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import (
    JanusVisionAlignerMLP,
    JanusVisionEncoder,
    JanusVQVAEAlignerMLP,
    JanusVQVAEHead,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from flowrl.errors import UserError


class JanusLanguageModel(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """The layers of the Llama without its causal mask: what both backbones are built on."""

    _supports_gradient_checkpointing = True
    _no_split_modules = ("LlamaDecoderLayer",)

    def __init__(self, text_config: dict[str, Any]) -> None:
        """Makes the layers, from options of transformers' ``LlamaConfig``."""
        super().__init__()
        text = LlamaConfig(**{**text_config, "attn_implementation": "sdpa"})
        self.layers = nn.ModuleList(LlamaDecoderLayer(text, i) for i in range(text.num_hidden_layers))
        self.norm = LlamaRMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.gradient_checkpointing = False
        # In a list, so that it is no submodule and no cast of the network touches its frequencies: bfloat16
        # ones are wrong by whole radians at the end of the sequence.
        with torch.device("cpu"):
            self._rotary = [LlamaRotaryEmbedding(text)]

    def states_before(self, text: Tensor, is_text: Tensor, rest: Tensor, length: int) -> Tensor:
        """Last states (B, length, D), each one position before one of the first tokens of ``rest``.

        Args:
            text: (B, M, D) embeddings, padded on either side.
            is_text: (B, M) bool, where there is text; positions count these tokens only.
            rest: (B, N, D) embeddings of what follows.
            length: how many of them are asked for.
        """
        rows, count = is_text.shape
        x = torch.cat([text, rest], dim=1)
        known = F.pad(is_text, (0, rest.shape[1]), value=True)
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
        return torch.cat([first[:, None], x[:, count : count + length - 1]], dim=1)


class JanusTokenBackbone(JanusLanguageModel):
    """Logits of the clean picture tokens, for noisy ones and a text."""

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
        super().__init__(text_config)
        width = text_config["hidden_size"]
        self.generation_embeddings = nn.Embedding(num_tokens, code_width)
        self.generation_aligner = JanusVQVAEAlignerMLP(
            JanusVQVAEConfig(embed_dim=code_width, projection_dim=width, num_hidden_layers=aligner_layers)
        )
        head = {"image_token_embed_dim": width, "projection_dim": head_width, "num_embeddings": num_tokens}
        self.generation_head = JanusVQVAEHead(JanusVQVAEConfig(**head))
        self.register_buffer("end_of_image", torch.zeros(width))

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
        end = self.end_of_image.to(picture.dtype).expand(rows, 1, width)
        if encoder_attention_mask is None:
            encoder_attention_mask = torch.ones(text.shape[:2], device=text.device)
        rest = torch.cat([picture, end], dim=1)
        return (self.generation_head(self.states_before(text, encoder_attention_mask.bool(), rest, length)),)


class JanusTextBackbone(JanusLanguageModel):
    """Logits of the clean tokens of an answer, for noisy ones, a question and a picture."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, text_config: dict[str, Any], image_token_id: int = 100581) -> None:
        """Takes options of transformers' ``LlamaConfig``, and the token that stands for the picture."""
        super().__init__(text_config)
        sizes = text_config["vocab_size"], text_config["hidden_size"]
        # The table is a buffer, never trained: the metric path's distances are measured in it.
        self.embed_tokens = nn.Embedding(*sizes)
        del self.embed_tokens.weight
        self.embed_tokens.register_buffer("weight", torch.zeros(sizes))
        self.lm_head = nn.Linear(sizes[1], sizes[0], bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """The table of token embeddings."""
        return self.embed_tokens

    def forward(
        self,
        hidden_states: Tensor,
        prompt_ids: Tensor,
        prompt_mask: Tensor | None = None,
        image_features: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Logits (B, A, V) of the clean tokens.

        Args:
            hidden_states: (B, A) noisy tokens of the answer.
            prompt_ids: (B, M) tokens of the question, padded on either side; one of them is the picture's.
            prompt_mask: (B, M), 1 where there is text.
            image_features: (B, P, D) of the picture; None: there is none, and no token of it.
            return_dict: has no effect.

        Raises:
            UserError: unless every question has as many tokens for pictures as it has pictures.
        """
        is_text = torch.ones_like(prompt_ids) if prompt_mask is None else prompt_mask
        is_picture = prompt_ids == self.config.image_token_id
        wanted = int(image_features is not None)
        if bool((is_picture.sum(-1) != wanted).any()):
            raise UserError(
                f"each question needs {wanted} token(s) <image_placeholder>: prompt_template puts it there, "
                f"and a question itself has none; got {is_picture.sum(-1).tolist()}"
            )
        text, is_text = self.embed_tokens(prompt_ids), is_text.bool()
        if image_features is not None:
            text, is_text = _merged(text, is_text, is_picture, image_features.to(text.dtype))
        answer = self.embed_tokens(hidden_states)
        return (self.lm_head(self.states_before(text, is_text, answer, hidden_states.shape[1])),)


def _merged(text: Tensor, is_text: Tensor, is_picture: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings and mask with P features in place of one token a row, (B, M - 1 + P)."""
    count, length = text.shape[1], features.shape[1]
    at = is_picture.int().argmax(-1, keepdim=True)
    place = torch.arange(count + length - 1, device=text.device).expand(len(text), -1)
    inside = (place >= at) & (place < at + length)
    old = torch.where(place < at, place, (place - length + 1).clamp(min=0))
    index = torch.where(inside, count + place - at, old)
    merged = torch.cat([text, features], dim=1).gather(1, index[..., None].expand(-1, -1, text.shape[2]))
    return merged, inside | is_text.gather(1, old)


class JanusPictureEncoder(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Features of a picture for the language model, frozen: SigLIP's vision transformer and an MLP."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, vision_config: dict[str, Any]) -> None:
        """From options of transformers' ``JanusVisionConfig``."""
        super().__init__()
        config = JanusVisionConfig(**{**vision_config, "attn_implementation": "sdpa"})
        width, patch = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, width, patch, stride=patch)
        self.position_embedding = nn.Embedding((config.image_size // patch) ** 2, width)
        self.encoder = JanusVisionEncoder(config)
        self.post_layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.aligner = JanusVisionAlignerMLP(config)
        self.requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features (B, P, D) of pixels (B, 3, H, W) in [-1, 1]."""
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        x = self.encoder(patches + self.position_embedding.weight).last_hidden_state
        features: Tensor = self.aligner(self.post_layernorm(x))
        return features


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
