"""A tiny Janus: transformers' class with random weights, its files by original names, and a pipeline."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from diffusers import VQModel
from safetensors.torch import save_file
from tiny_parts import HIDDEN, bpe
from tokenizers import processors
from torch import Tensor
from transformers import (
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers import Qwen2Tokenizer as ByteLevelTokenizer

from flowrl.pipelines.discrete_flow import DiscreteFlowPipeline
from flowrl.pipelines.janus_backbone import JanusTokenBackbone, JanusTokenEmbedding
from flowrl.pipelines.token_scheduler import DiscreteFlowScheduler

CODES = 12
SIDE = 4
IMAGE = 2 * SIDE
SPECIAL = ("<bos>", "<eos>", "<pad>", "<begin_of_image>", "<end_of_image>", "<image_placeholder>")
TEMPLATE = "User: {}\n\nAssistant:<begin_of_image>"


def janus_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Janus has it; without ``bos`` it does not put its first token in front."""
    vocab, merges = bpe(prefix="Ġ")
    vocab = vocab | {token: len(vocab) + i for i, token in enumerate(SPECIAL)}
    inner = ByteLevelTokenizer(vocab=vocab, merges=merges, extra_special_tokens=list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner.backend_tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=list(SPECIAL[3:]),
        padding_side="left",
        model_max_length=512,
    )
    if bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=["<bos>", "$A"], special_tokens=[("<bos>", tokenizer.bos_token_id)]
        )
    return tokenizer


def text_config() -> dict:
    return {
        "vocab_size": len(janus_tokenizer()),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }


def janus_model(tied: bool = True) -> JanusForConditionalGeneration:
    """Transformers' Janus; the same weights each time. ``tied``: whether its table is its head, too."""
    config = JanusConfig(
        tie_word_embeddings=tied,
        image_token_id=janus_tokenizer().convert_tokens_to_ids("<image_placeholder>"),
        text_config=LlamaConfig(**text_config()),
        vision_config=JanusVisionConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=IMAGE,
            patch_size=2,
            projection_dim=HIDDEN,
            num_image_tokens=SIDE**2,
        ),
        vq_config=JanusVQVAEConfig(
            embed_dim=4,
            num_embeddings=CODES,
            latent_channels=8,
            base_channels=32,
            channel_multiplier=[1, 2],
            num_res_blocks=1,
            projection_dim=HIDDEN,
            image_token_embed_dim=HIDDEN,
            initializer_range=0.2,
        ),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = JanusForConditionalGeneration(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases: not ones and zeros
                parameter.data += 0.2 * torch.randn_like(parameter)
            if name.startswith("model.generation_"):
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def original_names(model: JanusForConditionalGeneration) -> dict[str, Tensor]:
    """The weights as the original code names them."""
    named = timm_names(model)
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("model.")
        if name.startswith("vision_model."):
            continue
        name = name.replace("generation_embeddings", "gen_embed").replace("generation_head.proj_out", "P")
        name = name.replace("P.", "gen_head.output_mlp_projector.").replace("generation_head", "gen_head")
        for tower in ("generation_aligner", "aligner"):
            short = tower.replace("generation_", "gen_")
            if name.startswith(f"{tower}."):
                name = name.replace(f"{tower}.fc1", f"{short}.layers.0")
                name = name.replace(f"{tower}.hidden_layers.0", f"{short}.layers.2")
        if name.startswith("vqmodel."):
            name = name.replace("vqmodel.", "gen_vision_model.")
            name = re.sub(r"coder\.(up|down)\.(\d+)\.block\.", r"coder.conv_blocks.\2.res.", name)
            name = re.sub(r"coder\.(up|down)\.", "coder.conv_blocks.", name)
            name = name.replace("mid.block_1", "mid.0").replace("mid.attn_1", "mid.1")
            name = name.replace("mid.block_2", "mid.2")
        if name.startswith("language_model."):
            name = name.replace("language_model.", "language_model.model.")
        named[name.replace("lm_head.", "language_model.lm_head.")] = tensor.clone()
    named["gen_vision_model.quantize.codebook_used"] = torch.zeros(9)
    return named


def timm_names(model: JanusForConditionalGeneration) -> dict[str, Tensor]:
    """The vision model's weights as timm has them, with a pooling head that is not used."""
    vision = model.model.vision_model
    tower: dict[str, Tensor] = {"pos_embed": vision.embeddings.position_embedding.weight[None]}
    modules = {"patch_embed.proj": vision.embeddings.patch_embedding, "norm": vision.post_layernorm}
    for number, layer in enumerate(vision.encoder.layers):
        attention, block = layer.self_attn, f"blocks.{number}"
        modules |= {f"{block}.norm1": layer.layer_norm1, f"{block}.norm2": layer.layer_norm2}
        modules |= {f"{block}.mlp.fc1": layer.mlp.fc1, f"{block}.mlp.fc2": layer.mlp.fc2}
        modules[f"{block}.attn.proj"] = attention.projection_layer
        for kind in ("weight", "bias"):
            parts = [getattr(part, kind) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
            tower[f"{block}.attn.qkv.{kind}"] = torch.cat(parts)
    for name, module in modules.items():
        tower |= {f"{name}.{kind}": getattr(module, kind) for kind in ("weight", "bias")}
    tower["attn_pool.latent"] = torch.ones(1, 1, HIDDEN)
    return {f"vision_model.vision_tower.{name}": tensor.detach().clone() for name, tensor in tower.items()}


def write_original(folder: Path, tensors: dict[str, Tensor], shards: int = 1, bos: bool = True) -> Path:
    """A folder as FUDOKI's repository has it, in one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    janus_tokenizer(bos).save_pretrained(folder)
    vision = {"params": {"model_name": "siglip_tiny", "select_layer": -1}}
    config = {"language_config": text_config(), "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    files = {f"model-{i}.safetensors": names[i::shards] for i in range(shards)}
    if shards == 1:
        files = {"model.safetensors": names}
    else:
        index = {"weight_map": {name: file for file, some in files.items() for name in some}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, some in files.items():
        save_file({name: tensors[name].contiguous() for name in some}, folder / file)
    return folder


def fudoki_pipeline(dtype: torch.dtype = torch.float32) -> DiscreteFlowPipeline:
    """A pipeline of FUDOKI's classes: 4 x 4 tokens out of 12; the same weights each time."""
    tokenizer = janus_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = JanusTokenBackbone(text_config(), CODES, 4, 2, HIDDEN, SIDE)
        for name, parameter in transformer.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.3)
        transformer.end_of_image.normal_()
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
            tokenizer=tokenizer,
            text_encoder=JanusTokenEmbedding(len(tokenizer), HIDDEN),
            transformer=transformer,
            vae=vae,
            scheduler=DiscreteFlowScheduler(CODES, "metric", metric_power=4.0, rule="exponential"),
            prompt_template=TEMPLATE,
            pad_unconditional=True,
        )
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().to(dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe
