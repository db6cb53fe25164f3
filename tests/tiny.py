"""Tiny random pipelines of every supported class, built from configs, for registry-driven tests.

``TINY[name].build()`` gives a pipeline in eval mode with the same weights each time;
``pipe(prompt=[...], num_inference_steps=3, **entry.call, **entry.cfg)`` runs it on one CPU thread in well
under a second. The classes of the networks, text encoders, tokenizers, VAEs and schedulers are those of the
released checkpoints, and so are the scheduler settings; only the sizes are small and the weights random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tiny_parts as parts
import torch
from diffusers import (
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    ModelMixin,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

HEADS, HEAD_DIM = 2, 16
WIDTH = HEADS * HEAD_DIM
NEGATIVE = "blurry, low quality"


@dataclass(frozen=True)
class TinyPipeline:
    """A recipe of a tiny pipeline, and the facts of its class that callers have to know.

    Attributes:
        name: key in the registry.
        make: makes the pipeline from torch's global random state.
        call: kwargs of ``__call__`` beside the prompt, the steps, the generators and the output type.
        cfg: kwargs that turn classifier-free guidance (CFG) with a negative prompt on, for two prompts.
        no_cfg: kwargs that turn it off.
        networks: names of the trainable components.
        batched_cfg: True if CFG is one forward of 2B rows, False if it is two forwards.
        positive_first: whether the positive prompt's rows, or its forward, come first.
        scheduler: class name of the released checkpoint's scheduler.
        integer_timesteps: whether ``scheduler.timesteps`` are rounded to int64, so sigma != t / 1000.
        fixed_length: whether ``encode_prompt`` pads to ``max_sequence_length`` rather than to the longest.
        latents_tuple: whether ``prepare_latents`` returns a tuple, with the latents first.
        packed: whether the latents of the loop are (B, tokens, channels).
        float32_latents: whether the loop keeps latents in float32 whatever the dtype of the weights.
        supports_cfg: whether the class can do CFG at all.
        notes: anything else.
    """

    name: str
    make: Callable[[], DiffusionPipeline]
    call: dict[str, Any]
    cfg: dict[str, Any]
    no_cfg: dict[str, Any]
    networks: tuple[str, ...] = ("transformer",)
    batched_cfg: bool = False
    positive_first: bool = True
    scheduler: str = "FlowMatchEulerDiscreteScheduler"
    integer_timesteps: bool = False
    fixed_length: bool = True
    latents_tuple: bool = False
    packed: bool = False
    float32_latents: bool = False
    supports_cfg: bool = True
    notes: str = ""

    def build(self, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
        """The pipeline in eval mode, as ``from_pretrained`` leaves it; the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = self.make()
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                _cast(component.eval(), dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def kwargs(self, cfg: bool = False, rows: int = 2) -> dict[str, Any]:
        """``call`` with ``cfg`` or ``no_cfg``, for so many prompts."""
        guidance = self.cfg if cfg else self.no_cfg
        negative = {"negative_prompt": [NEGATIVE] * rows} if "negative_prompt" in guidance else {}
        return self.call | guidance | negative


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """What loading in ``dtype`` does: some modules, of Wan for instance, stay in float32."""
    keep = set(module._keep_in_fp32_modules or ()) if isinstance(module, ModelMixin) else set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not keep & {*name.split(".")}:
            tensor.data = tensor.data.to(dtype)


def _euler(**kwargs: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, **kwargs)


def _sd3(t5: bool) -> StableDiffusion3Pipeline:
    transformer = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=2 * parts.HIDDEN,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * parts.HIDDEN,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    # The released network has these modules with p = 0; in train mode they have to show up in tests.
    for module in transformer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=_euler(shift=3.0),
        vae=parts.kl_vae(),
        text_encoder=parts.clip_text(projection=True),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_text(projection=True),
        tokenizer_2=parts.clip_tokenizer(),
        text_encoder_3=parts.t5_text() if t5 else None,
        tokenizer_3=parts.t5_tokenizer() if t5 else None,
    )


def _flux() -> FluxPipeline:
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=2 * parts.HIDDEN,
            pooled_projection_dim=parts.HIDDEN,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=_euler(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15),
        vae=parts.kl_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=parts.clip_text(projection=False),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.t5_text(),
        tokenizer_2=parts.t5_tokenizer(),
    )


def _qwen_image() -> QwenImagePipeline:
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=parts.HIDDEN,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=_euler(
            shift=1.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
            time_shift_type="exponential",
        ),
        vae=parts.qwen_vae(),
        text_encoder=parts.qwen_vl_text(),
        tokenizer=parts.qwen_tokenizer(),
    )


def _sana() -> SanaPipeline:
    return SanaPipeline(
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
            dropout=0.1,
            sample_size=8,
        ),
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=parts.dc_vae(),
        text_encoder=parts.gemma2_text(),
        tokenizer=parts.gemma_tokenizer(),
    )


def _wan_network() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        text_dim=2 * parts.HIDDEN,
        freq_dim=32,
        ffn_dim=2 * WIDTH,
        rope_max_seq_len=32,
    )


def _wan(boundary_ratio: float | None = None) -> WanPipeline:
    return WanPipeline(
        transformer=_wan_network(),
        transformer_2=None if boundary_ratio is None else _wan_network(),
        boundary_ratio=boundary_ratio,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=parts.wan_vae(),
        text_encoder=parts.umt5_text(),
        tokenizer=parts.t5_tokenizer(),
    )


IMAGE = {"height": 32, "width": 32}
VIDEO = IMAGE | {"num_frames": 5}
SHORT = {"max_sequence_length": 16}
GUIDED = {"guidance_scale": 4.0, "negative_prompt": [NEGATIVE, NEGATIVE]}
TRUE_CFG = {"true_cfg_scale": 4.0, "negative_prompt": [NEGATIVE, NEGATIVE]}

_ENTRIES = (
    TinyPipeline(
        name="sd3",
        make=lambda: _sd3(t5=True),
        call=IMAGE | SHORT,
        cfg=GUIDED,
        no_cfg={"guidance_scale": 1.0},
        batched_cfg=True,
        positive_first=False,
        notes="CLIP embeddings have tokenizer.model_max_length tokens, T5's max_sequence_length.",
    ),
    TinyPipeline(
        name="sd3_no_t5",
        make=lambda: _sd3(t5=False),
        call=IMAGE | SHORT,
        cfg=GUIDED,
        no_cfg={"guidance_scale": 1.0},
        batched_cfg=True,
        positive_first=False,
        notes="text_encoder_3 and tokenizer_3 are None; the T5 tokens are max_sequence_length zero rows.",
    ),
    TinyPipeline(
        name="flux",
        make=_flux,
        call=IMAGE | SHORT | {"guidance_scale": 3.5},
        cfg=TRUE_CFG,
        no_cfg={"true_cfg_scale": 1.0},
        latents_tuple=True,
        packed=True,
        notes="guidance_scale is an input of the network (guidance_embeds), not CFG. CFG needs a negative "
        "prompt, a row each. Dynamic shift: sigmas depend on the number of tokens. The network gets t / 1000.",
    ),
    TinyPipeline(
        name="qwen_image",
        make=_qwen_image,
        call=IMAGE | SHORT,
        cfg=TRUE_CFG,
        no_cfg={"true_cfg_scale": 1.0},
        fixed_length=False,
        packed=True,
        notes="CFG rescales the result to the norm of the positive prediction, per token; it needs a negative "
        "prompt, a row each. encode_prompt cuts 34 tokens of a template; its mask is None when all rows are "
        "equally long. Dynamic shift. The network gets t / 1000.",
    ),
    TinyPipeline(
        name="sana",
        make=_sana,
        call=IMAGE | SHORT | {"use_resolution_binning": False, "complex_human_instruction": None},
        cfg=GUIDED,
        no_cfg={"guidance_scale": 1.0},
        batched_cfg=True,
        positive_first=False,
        scheduler="DPMSolverMultistepScheduler",
        integer_timesteps=True,
        float32_latents=True,
        notes="encode_prompt also returns attention masks. The prediction is cast to float32.",
    ),
    TinyPipeline(
        name="wan",
        make=_wan,
        call=VIDEO | SHORT,
        cfg=GUIDED,
        no_cfg={"guidance_scale": 1.0},
        scheduler="UniPCMultistepScheduler",
        integer_timesteps=True,
        float32_latents=True,
        notes="Text embeddings are zero past the prompt; the network has no text mask.",
    ),
    TinyPipeline(
        name="wan22",
        make=lambda: _wan(boundary_ratio=0.875),
        call=VIDEO | SHORT,
        cfg=GUIDED | {"guidance_scale_2": 3.0},
        no_cfg={"guidance_scale": 1.0},
        networks=("transformer", "transformer_2"),
        scheduler="UniPCMultistepScheduler",
        integer_timesteps=True,
        float32_latents=True,
        notes="transformer where t >= boundary_ratio * 1000, else transformer_2, with guidance_scale_2; "
        "whether CFG is on depends on guidance_scale alone.",
    ),
)

TINY: dict[str, TinyPipeline] = {entry.name: entry for entry in _ENTRIES}
