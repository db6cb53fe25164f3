"""Weights of Janus, by the names of its releases and by those of the networks that take them.

The converter's own names are those of transformers' Janus without "model.". The files have these, or those of
the original code. There the vision model is timm's SigLIP: query, key and value in one matrix, and a pooling
head that Janus does not use. The VQ model becomes diffusers' ``VQModel``, the same network: its codes are
normalised here, since Janus does so whenever it looks one up, and its 1 x 1 convolutions of attention are
linear layers there.

Source: arXiv 2410.13848 (Janus) and its code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import JanusVisionConfig, LlamaConfig

from flowrl.convert import Source
from flowrl.errors import UserError

ALIGNER = "generation_aligner"
EMBEDDINGS = "language_model.embed_tokens.weight"
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
LAYER = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
HEADS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
TOLD = (*HEADS, "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters")
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD = "lm_head.weight"
TOWER = "vision_model.vision_tower"
VISION_ATTENTION = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "projection_layer"))
VISION_LAYER = (*VISION_ATTENTION, "layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")
SIGLIP_HEADS = {"siglip_large_patch16_384": 16, "siglip_large_patch16_256": 16}
RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")}
ATTENTION_BLOCK = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
# Of the names in the files, without "model.", those that a task has no use for.
UNUSED = {
    "generation": ("vision_model.", "aligner.", "lm_head.", "language_model.lm_head."),
    "understanding": ("generation_", "vqmodel.", "gen_", f"{TOWER}.attn_pool."),
}
# From transformers' names, without "model.", to the original ones.
ORIGINAL: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^language_model\.", "language_model.model."),
    (r"^lm_head", "language_model.lm_head"),
    (r"^generation_embeddings", "gen_embed"),
    (r"^generation_aligner", "gen_aligner"),
    (r"^((?:gen_)?aligner)\.fc1", r"\1.layers.0"),
    (r"^((?:gen_)?aligner)\.hidden_layers\.(\d+)", lambda m: f"{m[1]}.layers.{2 * int(m[2]) + 2}"),
    (r"^generation_head\.proj_out", "gen_head.output_mlp_projector"),
    (r"^generation_head", "gen_head"),
    (r"^vqmodel\.((?:en|de)coder)\.(?:up|down)\.", r"vqmodel.\1.conv_blocks."),
    (r"(?<=conv_blocks\.)(\d+)\.block\.", r"\1.res."),
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
    (r"^vqmodel\.", "gen_vision_model."),
    (r"^vision_model\.embeddings\.position_embedding\.weight", f"{TOWER}.pos_embed"),
    (r"^vision_model\.embeddings\.patch_embedding", f"{TOWER}.patch_embed.proj"),
    (r"^vision_model\.post_layernorm", f"{TOWER}.norm"),
    (r"^vision_model\.encoder\.layers\.", f"{TOWER}.blocks."),
    (r"(?<=\.)layer_norm(?=[12]\.)", "norm"),
    (r"(?<=blocks\.)(\d+)\.self_attn\.[qkv]_proj", r"\1.attn.qkv"),
    (r"(?<=blocks\.)(\d+)\.self_attn\.projection_layer", r"\1.attn.proj"),
)


def open_source(tensors: dict[str, Tensor], task: str) -> Source:
    """The tensors by transformers' names without "model.", less what only the other task needs."""
    original = any(name.startswith("language_model.model.") for name in tensors)
    endings = (".rotary_emb.inv_freq", ".quantize.codebook_used")

    def name(ours: str) -> str:
        if not original:
            return ours if ours == HEAD else f"model.{ours}"
        for pattern, replacement in ORIGINAL:
            ours = re.sub(pattern, replacement, ours)
        return ours

    def unused(key: str) -> bool:
        return key.removeprefix("model.").startswith(UNUSED[task]) or key.endswith(endings)

    return Source(tensors, name, unused)


def language_config(config: dict[str, Any], source: Source) -> dict[str, Any]:
    """Options of the Llama: from config.json, and from shapes what they tell."""
    given = config.get("language_config", config.get("text_config"))
    if not isinstance(given, dict):
        raise UserError(
            "config.json: language_config (or text_config) is missing; tensors do not tell the heads"
        )
    embed = source[EMBEDDINGS]
    sizes = {
        "vocab_size": len(embed),
        "hidden_size": embed.shape[1],
        "intermediate_size": len(source["language_model.layers.0.mlp.gate_proj.weight"]),
    }
    llama = LlamaConfig(**{**given, **sizes})
    return sizes | {name: getattr(llama, name) for name in TOLD}


def language_names(num_layers: int) -> dict[str, str]:
    """Names of the language model's layers, and what they are called in both backbones."""
    layers = [f"layers.{n}.{name}.weight" for n in range(num_layers) for name in (*LAYER, *NORMS)]
    return {f"language_model.{name}": name for name in (*layers, "norm.weight")}


def is_tied(config: dict[str, Any], source: Source) -> bool:
    """Whether the table of embeddings is the head, too; transformers leaves it out of its files then."""
    return bool(config.get("tie_word_embeddings", source.name(HEAD) == HEAD))


def vision_names(source: Source) -> Iterator[tuple[str, str]]:
    """Names of the vision model's and its aligner's tensors, and what the picture encoder calls them."""
    layers = range(source.count("vision_model.encoder.layers"))
    hidden = range(source.count("aligner.hidden_layers"))
    names = [f"vision_model.encoder.layers.{n}.{name}" for n in layers for name in VISION_LAYER]
    names += ["vision_model.embeddings.patch_embedding", "vision_model.post_layernorm", "aligner.fc1"]
    names += [f"aligner.hidden_layers.{k}" for k in hidden]
    every = [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
    for name in (*every, "vision_model.embeddings.position_embedding.weight"):
        yield name, name.removeprefix("vision_model.").removeprefix("embeddings.")


def vision_tensor(name: str, source: Source) -> Tensor:
    """A tensor of the vision model: of the original one's qkv a third, of its positions the only row."""
    tensor, original = source[name], source.name(name)
    if ".attn.qkv." in original:
        part = next(i for i, letter in enumerate("qkv") if f".{letter}_proj." in name)
        tensor = tensor.chunk(3)[part]
    return (tensor[0] if original == f"{TOWER}.pos_embed" else tensor).clone()


def vision_config(config: dict[str, Any], source: Source) -> dict[str, Any]:
    """Options of the picture encoder: heads by config.json or the original name, the rest from shapes."""
    given = config.get("vision_config")
    if not isinstance(given, dict):
        raise UserError("config.json: vision_config is missing; tensors do not tell the heads")
    if isinstance(params := given.get("params"), dict):
        name, layer = params.get("model_name"), params.get("select_layer", -1)
        if name not in SIGLIP_HEADS or layer != -1:
            raise UserError(
                f"config.json: vision_config.params has model_name = {name!r}, select_layer = {layer}; "
                f"known are {', '.join(SIGLIP_HEADS)}, with the last layer, -1"
            )
        given = {"num_attention_heads": SIGLIP_HEADS[name]}
    told = JanusVisionConfig(**given)
    width, channels, patch, _ = source["vision_model.embeddings.patch_embedding.weight"].shape
    positions = source["vision_model.embeddings.position_embedding.weight"].shape[-2]
    mlp = len(source["vision_model.encoder.layers.0.mlp.fc1.bias"])
    return {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": patch,
        "image_size": patch * math.isqrt(positions),
        "num_hidden_layers": source.count("vision_model.encoder.layers"),
        "mlp_ratio": mlp / width,
        "projection_dim": len(source["aligner.fc1.bias"]),
        "depth": 1 + source.count("aligner.hidden_layers"),
        **{name: getattr(told, name) for name in ("num_attention_heads", "hidden_act", "layer_norm_eps")},
    }


def backbone_names(num_layers: int, source: Source) -> Iterator[tuple[str, str]]:
    """Names of the generation backbone's tensors, and what they are called there."""
    yield from language_names(num_layers).items()
    yield "generation_embeddings.weight", "generation_embeddings.weight"
    hidden = range(source.count(f"{ALIGNER}.hidden_layers"))
    aligner = [f"{ALIGNER}.fc1", *(f"{ALIGNER}.hidden_layers.{k}" for k in hidden)]
    for name in (*aligner, "generation_head.proj_out", "generation_head.vision_head"):
        for kind in ("weight", "bias"):
            yield f"{name}.{kind}", f"{name}.{kind}"


def vq_sizes(source: Source) -> tuple[list[int], int]:
    """Channels of each level of the VQ model, and residual blocks of a level of its encoder."""
    levels = source.count("vqmodel.encoder.down")
    name = "vqmodel.encoder.down.{}.block.0.conv1.weight"
    channels = [len(source[name.format(level)]) for level in range(max(levels, 1))]
    return channels, source.count("vqmodel.encoder.down.0.block")


def vq_names(channels: list[int], blocks: int) -> Iterator[tuple[str, str]]:
    """Names of the VQ model's tensors, and what diffusers calls them."""
    levels = len(channels)
    for side, outer, count in (("encoder", "down", blocks), ("decoder", "up", blocks + 1)):
        order = channels if side == "encoder" else channels[::-1]
        before = order[0]
        for level, width in enumerate(order):
            ours, theirs = f"vqmodel.{side}.{outer}.{level}", f"{side}.{outer}_blocks.{level}"
            deepest = level == (levels - 1 if side == "encoder" else 0)
            for block in range(count):
                names = RESNET | ({"nin_shortcut": "conv_shortcut"} if before != width else {})
                yield from _pairs(f"{ours}.block.{block}", f"{theirs}.resnets.{block}", names)
                if deepest:
                    yield from _pairs(f"{ours}.attn.{block}", f"{theirs}.attentions.{block}", ATTENTION_BLOCK)
                before = width
            if level < levels - 1:
                step = f"{outer}sample"
                yield from _pairs(f"{ours}.{step}", f"{theirs}.{step}rs.0", {"conv": "conv"})
        yield from _pairs(f"vqmodel.{side}.mid.block_1", f"{side}.mid_block.resnets.0", RESNET)
        yield from _pairs(f"vqmodel.{side}.mid.attn_1", f"{side}.mid_block.attentions.0", ATTENTION_BLOCK)
        yield from _pairs(f"vqmodel.{side}.mid.block_2", f"{side}.mid_block.resnets.1", RESNET)
        ends = {"conv_in": "conv_in", "norm_out": "conv_norm_out", "conv_out": "conv_out"}
        yield from _pairs(f"vqmodel.{side}", side, ends)
    for name in ("quant_conv", "post_quant_conv"):
        yield from _pairs("vqmodel", "", {name: name})
    yield "vqmodel.quantize.embedding.weight", "quantize.embedding.weight"


def _pairs(ours: str, theirs: str, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, target in names.items():
        for kind in ("weight", "bias"):
            yield f"{ours}.{name}.{kind}", f"{theirs}.{target}.{kind}".removeprefix(".")


def vq_config(channels: list[int], blocks: int, source: Source) -> dict[str, Any]:
    """The config of diffusers' ``VQModel``: attention in the deepest level only."""
    levels = len(channels)
    book = source["vqmodel.quantize.embedding.weight"]
    return {
        "in_channels": source["vqmodel.encoder.conv_in.weight"].shape[1],
        "out_channels": len(source["vqmodel.decoder.conv_out.weight"]),
        "down_block_types": ["DownEncoderBlock2D"] * (levels - 1) + ["AttnDownEncoderBlock2D"],
        "up_block_types": ["AttnUpDecoderBlock2D"] + ["UpDecoderBlock2D"] * (levels - 1),
        "block_out_channels": channels,
        "layers_per_block": blocks,
        "latent_channels": len(source["vqmodel.encoder.conv_out.weight"]),
        "num_vq_embeddings": len(book),
        "vq_embed_dim": book.shape[1],
    }


def vq_weights(names: dict[str, str], source: Source) -> dict[str, Tensor]:
    """Its weights: normalised codes, and the 1 x 1 convolutions of attention as linear layers."""
    weights = {target: source[name] for name, target in names.items()}
    for name, tensor in weights.items():
        if ".attentions." in name and tensor.ndim == 4:
            weights[name] = tensor[:, :, 0, 0]
    codes = weights["quantize.embedding.weight"]
    weights["quantize.embedding.weight"] = F.normalize(codes.float(), dim=-1).to(codes.dtype)
    return weights
