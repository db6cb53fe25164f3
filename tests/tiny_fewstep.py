"""Tiny random pipelines that are no flows, or few-step ones: diffusion, consistency and flow-map models.

``FEWSTEP[name]`` says which wrapper serves a class of pipelines, with the scheduler of its released
checkpoints; sizes and weights are those of tests/tiny.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tiny_parts as parts
from diffusers import (
    AnyFlowPipeline,
    AnyFlowTransformer3DModel,
    CMStochasticIterativeScheduler,
    ConsistencyModelPipeline,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMapEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    PNDMScheduler,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SCMScheduler,
    StableDiffusionXLPipeline,
    TCDScheduler,
    UNet2DConditionModel,
    UNet2DModel,
)
from tiny import BATCHED, HEAD_DIM, HEADS, IMAGE, SHORT, TINY, TINY_WRONG, VIDEO, WIDTH, TinyPipeline

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
RELEASED = SD | {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}


@dataclass(frozen=True)
class FewStep:
    """One class of pipelines, as a recipe would have it.

    Attributes:
        tiny: how to build it and its call arguments.
        wrapper: the spec of its wrapper.
        kernel: the spec of its usual kernel.
        num_steps: sampler steps.
        trainable: the steps that have a density.
    """

    tiny: TinyPipeline
    wrapper: dict[str, Any]
    kernel: dict[str, Any]
    num_steps: int
    trainable: tuple[int, ...]


def _with(make: Callable[[], DiffusionPipeline], scheduler: Any) -> Callable[[], DiffusionPipeline]:
    def made() -> DiffusionPipeline:
        pipe = make()
        pipe.scheduler = scheduler
        return pipe

    return made


def _unet(**kwargs: Any) -> UNet2DConditionModel:
    sizes = {
        "sample_size": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "attention_head_dim": 2,
        "cross_attention_dim": parts.HIDDEN,
        "norm_num_groups": 4,
    }
    return UNet2DConditionModel(**sizes | kwargs)


def _vae() -> Any:
    return parts.kl_vae(use_quant_conv=True, use_post_quant_conv=True, scaling_factor=0.18215)


def _lcm() -> LatentConsistencyModelPipeline:
    return LatentConsistencyModelPipeline(
        unet=_unet(time_cond_proj_dim=16),
        scheduler=LCMScheduler.from_config(RELEASED),
        vae=_vae(),
        text_encoder=parts.clip_text(projection=False),
        tokenizer=parts.clip_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl() -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline(
        unet=_unet(
            cross_attention_dim=2 * parts.HIDDEN,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + parts.HIDDEN,
        ),
        scheduler=EulerDiscreteScheduler.from_config(RELEASED | {"timestep_spacing": "leading"}),
        vae=_vae(),
        text_encoder=parts.clip_text(projection=False),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_text(projection=True),
        tokenizer_2=parts.clip_tokenizer(),
        add_watermarker=False,
    )


def _sana_sprint() -> SanaSprintPipeline:
    return SanaSprintPipeline(
        transformer=SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            num_layers=2,
            num_cross_attention_heads=HEADS,
            cross_attention_head_dim=HEAD_DIM,
            cross_attention_dim=WIDTH,
            caption_channels=parts.HIDDEN,
            sample_size=8,
            guidance_embeds=True,
            qk_norm="rms_norm_across_heads",
            timestep_scale=1000.0,
        ),
        scheduler=SCMScheduler(),
        vae=parts.dc_vae(),
        text_encoder=parts.gemma2_text(),
        tokenizer=parts.gemma_tokenizer(),
    )


def _anyflow() -> AnyFlowPipeline:
    return AnyFlowPipeline(
        transformer=AnyFlowTransformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            in_channels=4,
            out_channels=4,
            text_dim=2 * parts.HIDDEN,
            freq_dim=32,
            ffn_dim=2 * WIDTH,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        scheduler=FlowMapEulerDiscreteScheduler(shift=5.0),
        vae=parts.wan_vae(),
        text_encoder=parts.umt5_text(),
        tokenizer=parts.t5_tokenizer(),
    )


def _consistency_model() -> ConsistencyModelPipeline:
    return ConsistencyModelPipeline(
        unet=UNet2DModel(
            sample_size=16,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(8, 16),
            layers_per_block=1,
            attention_head_dim=4,
            norm_num_groups=4,
            num_class_embeds=10,
            resnet_time_scale_shift="scale_shift",
        ),
        scheduler=CMStochasticIterativeScheduler(),
    )


def _entry(
    name: str,
    make: Callable[[], DiffusionPipeline],
    wrapper: str,
    kernel: str,
    trainable: tuple[int, ...],
    *,
    scheduler: str | None = None,
    call: dict[str, Any] = IMAGE,
    num_steps: int = 4,
    network: str = "unet",
    eta: float | None = None,
    **facts: Any,
) -> FewStep:
    replaced = {} if scheduler is None else {"scheduler": scheduler}
    options = {} if eta is None else {"eta": eta}
    return FewStep(
        TinyPipeline(name=name, make=make, call=call, networks=(network,), **(BATCHED | facts)),
        {"name": wrapper, **replaced},
        {"name": kernel, **options},
        num_steps,
        trainable,
    )


ALL, BUT_LAST = (0, 1, 2, 3), (0, 1, 2)
MAP = {"call": VIDEO | SHORT, "network": "transformer"}
LCM, TCD = {"scheduler": "LCMScheduler"}, {"scheduler": "TCDScheduler", "call": IMAGE | {"eta": 0.3}}
SD15 = TINY_WRONG["sd15"].make
V = DDIMScheduler(**RELEASED, prediction_type="v_prediction")
UNGUIDED = {"guided": {}, "no_cfg": {}, "negative_prompt": False, "supports_cfg": False}
SPRINT = IMAGE | SHORT | {"use_resolution_binning": False, "complex_human_instruction": None}
EMBEDDED = {"guided": {"guidance_scale": 4.5}, "no_cfg": {"guidance_scale": 4.5}} | UNGUIDED

_ENTRIES = (
    _entry("sd15_ddim", SD15, "diffusion", "ddim", ALL),
    _entry("sd21_ddim", _with(SD15, V), "diffusion", "ddim", ALL),
    _entry(
        "sd14_pndm",
        _with(SD15, PNDMScheduler.from_config(RELEASED | {"skip_prk_steps": True})),
        "diffusion",
        "ddim",
        ALL,
        scheduler="DDIMScheduler",
    ),
    _entry("sdxl_ddim", _sdxl, "diffusion", "ddim", ALL, scheduler="DDIMScheduler"),
    _entry("lcm", _lcm, "consistency", "consistency", BUT_LAST, **EMBEDDED),
    _entry("sd15_lcm", SD15, "consistency", "consistency", BUT_LAST, **LCM),
    _entry("sdxl_lcm", _sdxl, "consistency", "consistency", BUT_LAST, **LCM),
    _entry(
        "sd15_tcd", SD15, "consistency", "tcd", BUT_LAST, scheduler="TCDScheduler", call=IMAGE | {"eta": 0.3}
    ),
    _entry(
        "sdxl_tcd",
        _with(_sdxl, TCDScheduler.from_config(RELEASED)),
        "consistency",
        "tcd",
        BUT_LAST,
        call=IMAGE | {"eta": 0.6},
        eta=0.6,
    ),
    _entry(
        "sana_sprint",
        _sana_sprint,
        "consistency",
        "consistency",
        (0,),
        call=SPRINT,
        num_steps=2,
        network="transformer",
        **EMBEDDED,
    ),
    _entry(
        "sana_sprint_4",
        _sana_sprint,
        "consistency",
        "consistency",
        BUT_LAST,
        call=SPRINT | {"intermediate_timesteps": None},
        network="transformer",
        **EMBEDDED,
    ),
    _entry(
        "flux_lcm",
        TINY["flux"].make,
        "consistency",
        "consistency",
        BUT_LAST,
        scheduler="FlowMatchLCMScheduler",
        call=TINY["flux"].call,
        network="transformer",
        guided=TINY["flux"].guided,
        no_cfg=TINY["flux"].no_cfg,
    ),
    _entry(
        "sd3_lcm",
        _with(TINY["sd3"].make, FlowMatchLCMScheduler(shift=3.0)),
        "consistency",
        "consistency",
        BUT_LAST,
        call=TINY["sd3"].call,
        network="transformer",
    ),
    _entry("anyflow", _anyflow, "consistency", "consistency", BUT_LAST, **MAP),
    _entry("anyflow_tcd", _anyflow, "consistency", "tcd", BUT_LAST, **MAP),
    _entry(
        "consistency_model",
        _consistency_model,
        "consistency",
        "consistency",
        BUT_LAST,
        call={},
        **UNGUIDED,
    ),
)

FEWSTEP: dict[str, FewStep] = {entry.tiny.name: entry for entry in _ENTRIES}
