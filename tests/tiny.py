"""Tiny random pipelines of every supported class, built from configs, for registry-driven tests.

``TINY[name].build()`` gives a pipeline in eval mode with the same weights each time;
``pipe(prompt=[...], num_inference_steps=3, **entry.call, **entry.cfg)`` runs it on one CPU thread in well
under a second. The classes of the networks, text encoders, VAEs and schedulers are those of the released
checkpoints, with such settings of the scheduler; only the sizes are small and the weights random. No flow
pipeline scales the latents between ``prepare_latents`` and the first forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tiny_parts as parts
import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    ChromaPipeline,
    ChromaTransformer2DModel,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    ModelMixin,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
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
        guided: kwargs that turn classifier-free guidance (CFG) on, beside the negative prompt.
        no_cfg: kwargs that turn it off.
        negative_prompt: whether ``__call__`` takes a negative prompt.
        networks: names of the trainable components.
        batched_cfg: True if CFG is one forward of 2B rows, False if it is two forwards.
        positive_first: whether the positive prompt's rows, or its forward, come first.
        scheduler: class name of the released checkpoint's scheduler.
        integer_timesteps: whether ``scheduler.timesteps`` are rounded to int64.
        shifted_timesteps: whether sigma is t / 1000, but for the rounding.
        sets_begin_index: whether ``__call__`` calls ``scheduler.set_begin_index(0)``; where it does not, the
            scheduler looks the first timestep up.
        fixed_length: whether ``encode_prompt`` pads to ``max_sequence_length`` rather than to the longest.
        latents_tuple: whether ``prepare_latents`` returns a tuple, with the latents first.
        packed: whether the latents of the loop are (B, tokens, channels).
        transformed_output: whether ``output_type="latent"`` gives something else than the last latents.
        float32_noise: whether ``prepare_latents`` gives float32 whatever the dtype of the weights.
        float32_latents: whether the latents are in float32 after each step whatever the dtype of the weights.
            Euler's step returns the dtype of the prediction, so that it decides.
        supports_cfg: whether the class can do CFG at all.
        notes: anything else.
    """

    name: str
    make: Callable[[], DiffusionPipeline]
    call: dict[str, Any]
    guided: dict[str, Any]
    no_cfg: dict[str, Any]
    negative_prompt: bool = True
    networks: tuple[str, ...] = ("transformer",)
    batched_cfg: bool = False
    positive_first: bool = True
    scheduler: str = "FlowMatchEulerDiscreteScheduler"
    integer_timesteps: bool = False
    shifted_timesteps: bool = True
    sets_begin_index: bool = True
    fixed_length: bool = True
    latents_tuple: bool = False
    packed: bool = False
    transformed_output: bool = False
    float32_noise: bool = False
    float32_latents: bool = False
    supports_cfg: bool = True
    notes: str = ""

    def build(self, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
        """The pipeline in eval mode, as ``from_pretrained`` leaves it; the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = self.make()
            for network in self.networks:
                _liven(getattr(pipe, network))
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                _cast(component.eval(), dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @property
    def cfg(self) -> dict[str, Any]:
        """Kwargs that turn CFG on, for two prompts."""
        return self._cfg(rows=2)

    def kwargs(self, cfg: bool = False, rows: int = 2) -> dict[str, Any]:
        """``call`` with ``cfg`` or ``no_cfg``, for so many prompts."""
        return self.call | (self._cfg(rows) if cfg else self.no_cfg)

    def _cfg(self, rows: int) -> dict[str, Any]:
        # A new list each time, since Z-Image writes into it.
        return self.guided | ({"negative_prompt": [NEGATIVE] * rows} if self.negative_prompt else {})


def _liven(network: torch.nn.Module) -> None:
    """Makes the prompt, the time and all parameters matter, which a fresh network may hardly let them."""
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)


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


def _flux2_klein() -> Flux2KleinPipeline:
    return Flux2KleinPipeline(
        transformer=Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=3 * parts.HIDDEN,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        scheduler=_euler(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15),
        vae=parts.flux2_vae(),
        text_encoder=parts.qwen3_text(lm_head=True),
        tokenizer=parts.qwen_tokenizer(),
        is_distilled=False,
    )


def _z_image() -> ZImagePipeline:
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=WIDTH,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=parts.HIDDEN,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token, std=0.5)
    return ZImagePipeline(
        transformer=transformer,
        scheduler=_euler(shift=3.0),
        vae=parts.kl_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=parts.qwen3_text(lm_head=False),
        tokenizer=parts.qwen_tokenizer(),
    )


def _lumina2() -> Lumina2Pipeline:
    return Lumina2Pipeline(
        transformer=Lumina2Transformer2DModel(
            sample_size=4,
            in_channels=4,
            hidden_size=WIDTH,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=HEADS,
            num_kv_heads=1,
            multiple_of=8,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(64, 16, 16),
            cap_feat_dim=parts.HIDDEN,
        ),
        scheduler=_euler(shift=6.0),
        vae=parts.kl_vae(levels=4, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=parts.gemma2_text(),
        tokenizer=parts.gemma_tokenizer(),
    )


def _aura_flow() -> AuraFlowPipeline:
    return AuraFlowPipeline(
        transformer=AuraFlowTransformer2DModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=2 * parts.HIDDEN,
            caption_projection_dim=WIDTH,
            pos_embed_max_size=64,
        ),
        scheduler=_euler(shift=1.73),
        vae=parts.kl_vae(
            use_quant_conv=True, use_post_quant_conv=True, scaling_factor=0.13025, shift_factor=None
        ),
        text_encoder=parts.umt5_text(),
        tokenizer=parts.t5_tokenizer(),
    )


def _chroma() -> ChromaPipeline:
    return ChromaPipeline(
        transformer=ChromaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=2 * parts.HIDDEN,
            axes_dims_rope=(4, 6, 6),
            approximator_num_channels=16,
            approximator_hidden_dim=WIDTH,
            approximator_layers=1,
        ),
        scheduler=_euler(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15),
        vae=parts.kl_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=parts.t5_text(),
        tokenizer=parts.t5_tokenizer(),
    )


def _ltx() -> LTXPipeline:
    return LTXPipeline(
        transformer=LTXVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            cross_attention_dim=WIDTH,
            caption_channels=2 * parts.HIDDEN,
        ),
        scheduler=_euler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
        vae=parts.ltx_vae(),
        text_encoder=parts.t5_text(),
        tokenizer=parts.t5_tokenizer(),
    )


def _hunyuan_video() -> HunyuanVideoPipeline:
    return HunyuanVideoPipeline(
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            mlp_ratio=2.0,
            text_embed_dim=parts.HIDDEN,
            pooled_projection_dim=parts.HIDDEN,
            rope_axes_dim=(4, 6, 6),
            guidance_embeds=True,
        ),
        scheduler=_euler(shift=7.0),
        vae=parts.hunyuan_vae(),
        text_encoder=parts.llama_text(),
        tokenizer=parts.llama_tokenizer(),
        text_encoder_2=parts.clip_text(projection=False, max_length=77),
        tokenizer_2=parts.clip_tokenizer(max_length=77),
    )


def _cogview4() -> CogView4Pipeline:
    return CogView4Pipeline(
        transformer=CogView4Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            text_embed_dim=parts.HIDDEN,
            time_embed_dim=16,
            condition_dim=8,
            pos_embed_max_size=8,
            sample_size=8,
            rope_axes_dim=(8, 8),
        ),
        scheduler=_euler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
        vae=parts.kl_vae(scaling_factor=1.0, shift_factor=0.0),
        text_encoder=parts.glm_text(),
        tokenizer=parts.glm_tokenizer(),
    )


def _sd15() -> StableDiffusionPipeline:
    return StableDiffusionPipeline(
        unet=UNet2DConditionModel(
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(8, 16),
            layers_per_block=1,
            attention_head_dim=2,
            cross_attention_dim=parts.HIDDEN,
            norm_num_groups=4,
        ),
        scheduler=DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        vae=parts.kl_vae(use_quant_conv=True, use_post_quant_conv=True, scaling_factor=0.18215),
        text_encoder=parts.clip_text(projection=False),
        tokenizer=parts.clip_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
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
FLOAT32 = {"float32_noise": True, "float32_latents": True}
GUIDED = {"guided": {"guidance_scale": 4.0}, "no_cfg": {"guidance_scale": 1.0}}
TRUE_CFG = {"guided": {"true_cfg_scale": 4.0}, "no_cfg": {"true_cfg_scale": 1.0}}
BATCHED = GUIDED | {"batched_cfg": True, "positive_first": False}
UNIPC = FLOAT32 | {"scheduler": "UniPCMultistepScheduler", "integer_timesteps": True}

_ENTRIES = (
    TinyPipeline(
        name="sd3",
        make=lambda: _sd3(t5=True),
        call=IMAGE | SHORT,
        **BATCHED,
        sets_begin_index=False,
        notes="CLIP embeddings have tokenizer.model_max_length tokens, T5's max_sequence_length.",
    ),
    TinyPipeline(
        name="sd3_no_t5",
        make=lambda: _sd3(t5=False),
        call=IMAGE | SHORT,
        **BATCHED,
        sets_begin_index=False,
        notes="text_encoder_3 and tokenizer_3 are None, which from_pretrained has to be told; the T5 tokens "
        "are max_sequence_length zero rows.",
    ),
    TinyPipeline(
        name="flux",
        make=_flux,
        call=IMAGE | SHORT | {"guidance_scale": 3.5},
        **TRUE_CFG,
        latents_tuple=True,
        packed=True,
        notes="guidance_scale is an input of the network (guidance_embeds), not CFG. CFG needs a negative "
        "prompt, a row each. Sigmas depend on the number of tokens. The network gets t / 1000.",
    ),
    TinyPipeline(
        name="flux2_klein",
        make=_flux2_klein,
        call=IMAGE | {"max_sequence_length": 32, "text_encoder_out_layers": (1, 2, 3)},
        **GUIDED,
        negative_prompt=False,
        latents_tuple=True,
        packed=True,
        transformed_output=True,
        notes="The negative prompt is always the empty one. No CFG if config.is_distilled. "
        "output_type='latent' gives unpacked latents times the VAE's statistics. Sigmas depend on the number "
        "of tokens and of steps. The network gets t / 1000.",
    ),
    TinyPipeline(
        name="qwen_image",
        make=_qwen_image,
        call=IMAGE | SHORT,
        **TRUE_CFG,
        fixed_length=False,
        packed=True,
        notes="CFG scales the result to the norm of the positive prediction, per token; it needs a negative "
        "prompt, a row each. encode_prompt cuts 34 tokens of a template; its mask is None when all rows are "
        "equally long. Sigmas depend on the number of tokens. The network gets t / 1000.",
    ),
    TinyPipeline(
        name="z_image",
        make=_z_image,
        call=IMAGE | {"max_sequence_length": 32},
        guided={"guidance_scale": 3.0},
        no_cfg={"guidance_scale": 0.0},
        batched_cfg=True,
        fixed_length=False,
        **FLOAT32,
        notes="encode_prompt writes the templated prompts into the caller's list, and gives a list of rows "
        "of different lengths. The network takes and gives lists, gets 1 - t / 1000 and predicts the "
        "negative velocity. CFG is on from any scale above 0, and is pos + scale * (pos - neg).",
    ),
    TinyPipeline(
        name="sana",
        make=_sana,
        call=IMAGE | SHORT | {"use_resolution_binning": False, "complex_human_instruction": None},
        **BATCHED,
        **FLOAT32,
        scheduler="DPMSolverMultistepScheduler",
        integer_timesteps=True,
        sets_begin_index=False,
        notes="encode_prompt also returns attention masks. The prediction is cast to float32.",
    ),
    TinyPipeline(
        name="lumina2",
        make=_lumina2,
        call=IMAGE | {"max_sequence_length": 48},
        **GUIDED,
        notes="A system prompt of about 30 tokens is put before the positive prompts only. The network gets "
        "1 - t / 1000 and predicts the negative velocity. CFG scales the result to the norm of the positive "
        "prediction along the last axis, and is off past cfg_trunc_ratio of the steps. The factor of the VAE "
        "is taken to be 8 whatever it is.",
    ),
    TinyPipeline(
        name="aura_flow",
        make=_aura_flow,
        call=IMAGE | SHORT,
        **BATCHED,
        notes="Text embeddings are zero past the prompt; the network has no text mask. It gets t / 1000.",
    ),
    TinyPipeline(
        name="chroma",
        make=_chroma,
        call=IMAGE | SHORT,
        **GUIDED,
        latents_tuple=True,
        packed=True,
        notes="encode_prompt returns six values; the mask has one token past the prompt. Sigmas depend on "
        "the number of tokens. The network gets t / 1000.",
    ),
    TinyPipeline(
        name="wan",
        make=_wan,
        call=VIDEO | SHORT,
        **GUIDED,
        **UNIPC,
        notes="Text embeddings are zero past the prompt; the network has no text mask.",
    ),
    TinyPipeline(
        name="wan22",
        make=lambda: _wan(boundary_ratio=0.875),
        call=VIDEO | SHORT,
        guided={"guidance_scale": 4.0, "guidance_scale_2": 3.0},
        no_cfg={"guidance_scale": 1.0},
        networks=("transformer", "transformer_2"),
        **UNIPC,
        notes="transformer where t >= boundary_ratio * 1000, else transformer_2, with guidance_scale_2; "
        "whether CFG is on depends on guidance_scale alone.",
    ),
    TinyPipeline(
        name="ltx",
        make=_ltx,
        call=VIDEO | SHORT,
        **BATCHED,
        **FLOAT32,
        packed=True,
        sets_begin_index=False,
        notes="Sigmas depend on the number of tokens. __call__ takes timesteps, but no sigmas.",
    ),
    TinyPipeline(
        name="hunyuan_video",
        make=_hunyuan_video,
        call=VIDEO
        | {
            "max_sequence_length": 24,
            "guidance_scale": 6.0,
            "prompt_template": {"template": "Describe the theme of the video: {}", "crop_start": 8},
        },
        **TRUE_CFG,
        float32_noise=True,
        notes="guidance_scale is an input of the network (guidance_embeds), times 1000, not CFG. CFG needs a "
        "negative prompt, a row each. The released template crops 95 tokens. CLIP always gets 77 tokens.",
    ),
    TinyPipeline(
        name="cogview4",
        make=_cogview4,
        call=IMAGE | {"max_sequence_length": 32},
        **GUIDED,
        float32_noise=True,
        fixed_length=False,
        sets_begin_index=False,
        shifted_timesteps=False,
        notes="Prompts are padded on the left to the longest, then to a multiple of 16, without any mask: a "
        "row's embedding depends on the batch if the multiples differ. Timesteps are whole numbers that are "
        "not shifted, sigmas are. callback_on_step_end gets a sigma in place of t.",
    ),
)

TINY: dict[str, TinyPipeline] = {entry.name: entry for entry in _ENTRIES}

TINY_WRONG: dict[str, TinyPipeline] = {
    "sd15": TinyPipeline(
        name="sd15",
        make=_sd15,
        call=IMAGE,
        **BATCHED,
        networks=("unet",),
        scheduler="DDIMScheduler",
        integer_timesteps=True,
        sets_begin_index=False,
        shifted_timesteps=False,
        notes="Not a flow: predicts the noise. Has no max_sequence_length.",
    )
}
