"""FUDOKI, or another Janus that was trained as a discrete flow, as a discrete flow pipeline.

Takes the names of the original code (``language_model.model.*``, ``gen_embed``, ``gen_aligner``,
``gen_head``, ``gen_vision_model.*``) or those of transformers' Janus (``model.language_model.*``,
``model.vqmodel.*``). What only understanding needs is left out. The VQ model becomes diffusers' ``VQModel``,
the same network: its codes are normalised here, since Janus does so whenever it looks one up, and its 1 x 1
convolutions of attention are linear layers there.

Numbers that tensors do not tell (heads, layers, positions) come from config.json, all others from the shapes.

Source: arXiv 2410.13848 (Janus), 2505.20147 (FUDOKI: metric path with scale 3, exponent .9, fourth power of
the distance of normalised codes; "User: ...\\n\\nAssistant:" and <begin_of_image>; guidance against a prompt
of padding).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from pydantic import Field
from tokenizers import processors
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from flowrl.convert import Part, Parts, Source, read_json
from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, register

HERE = "flowrl.pipelines"
ALIGNER = "generation_aligner"
EMBEDDINGS = "language_model.embed_tokens.weight"
JANUS = f"{HERE}.janus_backbone:JanusToken"
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
LAYER = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
HEADS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
TOLD = (*HEADS, "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters")
NORMS = ("input_layernorm", "post_attention_layernorm")
RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")}
ATTENTION_BLOCK = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
# From transformers' names, without "model.", to the original ones.
ORIGINAL = (
    (r"^language_model\.", "language_model.model."),
    (r"^generation_embeddings", "gen_embed"),
    (r"^generation_aligner\.fc1", "gen_aligner.layers.0"),
    (r"^generation_aligner\.hidden_layers\.(\d+)", lambda m: f"gen_aligner.layers.{2 * int(m[1]) + 2}"),
    (r"^generation_head\.proj_out", "gen_head.output_mlp_projector"),
    (r"^generation_head", "gen_head"),
    (r"^vqmodel\.((?:en|de)coder)\.(?:up|down)\.", r"vqmodel.\1.conv_blocks."),
    (r"(?<=conv_blocks\.)(\d+)\.block\.", r"\1.res."),
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
    (r"^vqmodel\.", "gen_vision_model."),
)


@register("converter", "fudoki")
class ConvertFudoki:
    """Janus weights to a `DiscreteFlowPipeline` with FUDOKI's path."""

    class Config(ComponentConfig):
        """Options of `ConvertFudoki`."""

        image_size: int = Field(384, gt=0, description="pixels of a side")
        prompt_template: str = Field(
            "User: {}\n\nAssistant:<begin_of_image>", description="what a prompt is put into, at {}"
        )
        metric_power: float = Field(4.0, gt=0, description="of the distance; FUDOKI's text has 1")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config

    def __call__(self, folder: Path, tensors: dict[str, Tensor]) -> Parts:
        """The pipeline; see `flowrl.convert.Converter`."""
        source = open_source(tensors)
        text = language_config(read_json(folder / "config.json"), source)
        backbone = dict(backbone_names(text["num_hidden_layers"], source))
        channels, blocks = vq_sizes(source)
        vq = dict(vq_names(channels, blocks))
        source.check([EMBEDDINGS, *backbone, *vq])
        scale = 2 ** (len(channels) - 1)
        if self.config.image_size % scale:
            raise UserError(f"convert.image_size = {self.config.image_size}: a multiple of {scale} is needed")
        tokenizer, end = load_tokenizer(folder)
        table = source[EMBEDDINGS]
        num_tokens, code_width = source["generation_embeddings.weight"].shape
        network = {
            "text_config": text,
            "num_tokens": num_tokens,
            "code_width": code_width,
            "aligner_layers": 1 + source.count(f"{ALIGNER}.hidden_layers"),
            "head_width": len(source["generation_head.proj_out.bias"]),
            "side": self.config.image_size // scale,
        }
        weights = {target: source[name] for name, target in backbone.items()}
        weights["end_of_image"] = table[end].clone()
        power = self.config.metric_power
        path = {"num_tokens": num_tokens, "path": "metric", "metric_power": power, "rule": "exponential"}
        sizes = {"vocab_size": len(table), "width": table.shape[1]}
        components = {
            "tokenizer": tokenizer,
            "text_encoder": Part(f"{JANUS}Embedding", sizes, {"embed_tokens.weight": table}),
            "transformer": Part(f"{JANUS}Backbone", network, weights),
            "vae": Part("diffusers:VQModel", vq_config(channels, blocks, source), vq_weights(vq, source)),
            "scheduler": Part(f"{HERE}.token_scheduler:DiscreteFlowScheduler", path),
        }
        options = {"prompt_template": self.config.prompt_template, "pad_unconditional": True}
        return Parts(f"{HERE}.discrete_flow:DiscreteFlowPipeline", components, options, source.notes())


def open_source(tensors: dict[str, Tensor]) -> Source:
    """The tensors by transformers' names without "model.", less what only understanding needs."""
    original = any(name.startswith("language_model.model.") for name in tensors)
    prefix, head = ("", "language_model.lm_head.") if original else ("model.", "lm_head.")
    unused = (f"{prefix}vision_model.", f"{prefix}aligner.", head)
    endings = (".rotary_emb.inv_freq", ".quantize.codebook_used")

    def name(ours: str) -> str:
        if not original:
            return f"model.{ours}"
        for pattern, replacement in ORIGINAL:
            ours = re.sub(pattern, replacement, ours)
        return ours

    return Source(tensors, name, lambda key: key.startswith(unused) or key.endswith(endings))


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


def backbone_names(num_layers: int, source: Source) -> Iterator[tuple[str, str]]:
    """Names of the backbone's tensors, and what they are called there."""
    for number in range(num_layers):
        for name in (*LAYER, *NORMS):
            yield f"language_model.layers.{number}.{name}.weight", f"layers.{number}.{name}.weight"
    yield "language_model.norm.weight", "norm.weight"
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


def load_tokenizer(folder: Path) -> tuple[PreTrainedTokenizerFast, int]:
    """The tokenizer, which pads on the left and begins with its BOS token; and the id of the end of image."""
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    except Exception as error:
        raise UserError(f"{folder} has no tokenizer.json that can be read: {error}") from error
    for token in ("<begin_of_image>", "<end_of_image>", tokenizer.bos_token, tokenizer.pad_token):
        if token is None or len(tokenizer.encode(token, add_special_tokens=False)) != 1:
            raise UserError(
                f"the tokenizer of {folder} needs single tokens: begin and end of image, bos, pad"
            )
    bos = str(tokenizer.bos_token)
    if tokenizer.encode("a")[0] != tokenizer.bos_token_id:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    return tokenizer, tokenizer.convert_tokens_to_ids("<end_of_image>")
