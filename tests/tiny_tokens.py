"""Tiny discrete flow pipelines: every path, real classes, random weights."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import VQModel
from tiny_parts import HIDDEN, gemma2_text, gemma_tokenizer

from flowrl import registry
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.pipelines.discrete_flow import DiscreteFlowPipeline
from flowrl.pipelines.token_scheduler import DiscreteFlowScheduler
from flowrl.pipelines.token_transformer import TokenTransformer

CODES = 12
SIDE = 4
PATHS = ("mask", "uniform", "metric")
KERNELS = [
    ("mask", {"name": "discrete_mixture"}),
    ("mask", {"name": "discrete_mixture", "rule": "exponential", "corrector": 0.5}),
    ("mask", {"name": "discrete_mixture", "estimator": "rate_mc", "num_draws": 4}),
    ("mask", {"name": "discrete_mixture", "estimator": "joint"}),
    ("uniform", {"name": "discrete_mixture", "rule": "euler"}),
    ("uniform", {"name": "discrete_marginal_euler"}),
    ("metric", {"name": "discrete_metric"}),
    ("metric", {"name": "discrete_metric", "rule": "exponential", "estimator": "rate_mc", "num_draws": 4}),
    ("metric", {"name": "discrete_metric", "estimator": "joint"}),
]


def token_pipeline(path: str = "mask", dtype: torch.dtype = torch.float32) -> DiscreteFlowPipeline:
    """A pipeline of 4 x 4 tokens out of 12; the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = TokenTransformer(
            num_tokens=CODES,
            num_states=CODES + (path == "mask"),
            side=SIDE,
            width=16,
            num_layers=2,
            num_heads=2,
            text_width=HIDDEN,
        )
        torch.nn.init.normal_(transformer.head.weight, std=0.5)
        vae = VQModel(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            num_vq_embeddings=CODES,
            vq_embed_dim=4,
            mid_block_add_attention=False,
        )
        torch.nn.init.normal_(vae.quantize.embedding.weight)
        pipe = DiscreteFlowPipeline(
            tokenizer=gemma_tokenizer(),
            text_encoder=gemma2_text(),
            transformer=transformer,
            vae=vae,
            scheduler=DiscreteFlowScheduler(num_tokens=CODES, path=path),
        )
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def wrap_tokens(
    pipe: DiscreteFlowPipeline, kernel: dict[str, Any], num_steps: int = 3, **guidance: Any
) -> SamplerWrapper:
    """The pipeline as an MDP."""
    wrapper: SamplerWrapper = registry.build(
        "wrapper",
        {"name": "discrete_flow"},
        "model.wrapper",
        pipe=pipe,
        kernel=registry.build("kernel", kernel, "sampler.kernel"),
        deterministic=registry.build("kernel", {"name": "ode"}, "sampler.kernel"),
        num_steps=num_steps,
        call={},
        guidance=guidance,
    )
    return wrapper
