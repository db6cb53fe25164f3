"""Tiny random causal video pipelines."""

from __future__ import annotations

from typing import Any

import tiny_parts as parts
import torch
from diffusers import FlowMatchLCMScheduler, WanTransformer3DModel
from tiny import HEAD_DIM, HEADS, WIDTH

from flowrl.pipelines.causal_wan import CausalWanPipeline

CALL = {"height": 16, "width": 16, "max_sequence_length": 24}
PROMPTS = ["a cat sits | the dog jumps", "a tree"]
STEPS = 4


def causal_wan(
    frames_per_chunk: int = 2, vae: bool = False, layers: int = 2, **layout: Any
) -> CausalWanPipeline:
    """Seeded, in eval mode; without a VAE the 16 x 16 pixels are the latents, 64 tokens a frame."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        text_dim=2 * parts.HIDDEN,
        freq_dim=32,
        ffn_dim=2 * WIDTH,
        rope_max_seq_len=32,
    )
    pipe = CausalWanPipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.umt5_text().eval(),
        scheduler=FlowMatchLCMScheduler(shift=5.0),
        transformer=transformer.eval(),
        vae=parts.wan_vae().eval() if vae else None,
        frames_per_chunk=frames_per_chunk,
        **layout,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
