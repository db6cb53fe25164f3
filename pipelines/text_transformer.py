"""A small transformer that predicts the tokens of an answer from noisy ones, a question and a picture.

One stream: patches of the picture (a grid), question and answer attend to each other.

Shapes: B rows, A answer tokens, M question tokens, P = side^2 patches, S states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from flowrl.pipelines.token_transformer import TokenBlock


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
        """Logits (B, A, S) of the clean tokens.

        Args:
            hidden_states: (B, A) noisy tokens of the answer.
            prompt_ids: (B, M) tokens of the question.
            prompt_mask: (B, M), 1 where there is text.
            image_features: (B, P, patch_width).
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
