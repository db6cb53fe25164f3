"""FUDOKI, or another Janus that was trained as a discrete flow, as a pipeline that draws or one that answers.

Which tensor of the files is which is in flowrl/convert_janus.py. What only the other task needs is left out.

Numbers that tensors do not tell (heads, layers, positions) come from config.json, all others from the shapes.

Source: arXiv 2410.13848 (Janus), 2505.20147 (FUDOKI: metric path with scale 3, exponent .9, fourth power of
the distance of normalised codes or text embeddings; "User: ...\\n\\nAssistant:" and <begin_of_image>;
guidance against a prompt of padding; pictures asked about are padded to a square).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from tokenizers import processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from flowrl.convert import Part, Parts, Source, read_json
from flowrl.convert_janus import (
    ALIGNER,
    EMBEDDINGS,
    HEAD,
    backbone_names,
    is_tied,
    language_config,
    language_names,
    open_source,
    vision_config,
    vision_names,
    vision_tensor,
    vq_config,
    vq_names,
    vq_sizes,
    vq_weights,
)
from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, register

HERE = "flowrl.pipelines"
JANUS = f"{HERE}.janus_backbone:Janus"
PLACEHOLDER = "<image_placeholder>"
TEMPLATES = {
    "generation": "User: {}\n\nAssistant:<begin_of_image>",
    "understanding": f"User: <begin_of_image>{PLACEHOLDER}<end_of_image>\n{{}}\n\nAssistant:",
}


@register("converter", "fudoki")
class ConvertFudoki:
    """Janus weights to a pipeline with FUDOKI's path: `DiscreteFlowPipeline` or `DiscreteTextPipeline`."""

    class Config(ComponentConfig):
        """Options of `ConvertFudoki`."""

        task: Literal["generation", "understanding"] = Field(
            "generation", description="pictures from texts, or answers to questions about pictures"
        )
        image_size: int = Field(384, gt=0, description="pixels of a side")
        prompt_template: str | None = Field(
            None, description="what a prompt or question is put into, at {}; null: FUDOKI's of the task"
        )
        metric_power: float = Field(4.0, gt=0, description="of the distance; FUDOKI's paper has 1")
        answer_length: int = Field(64, gt=0, description="tokens of an answer, with its end")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config

    def __call__(self, folder: Path, tensors: dict[str, Tensor]) -> Parts:
        """The pipeline; see `flowrl.convert.Converter`."""
        source = open_source(tensors, self.config.task)
        config = read_json(folder / "config.json")
        text = language_config(config, source)
        template = self.config.prompt_template or TEMPLATES[self.config.task]
        if self.config.task == "generation":
            return self._generation(folder, source, text, template)
        return self._understanding(folder, source, text, template, config)

    def _path(self, num_tokens: int) -> Part:
        power = self.config.metric_power
        path = {"num_tokens": num_tokens, "path": "metric", "metric_power": power, "rule": "exponential"}
        return Part(f"{HERE}.token_scheduler:DiscreteFlowScheduler", path)

    def _generation(self, folder: Path, source: Source, text: dict[str, Any], template: str) -> Parts:
        backbone = dict(backbone_names(text["num_hidden_layers"], source))
        channels, blocks = vq_sizes(source)
        vq = dict(vq_names(channels, blocks))
        source.check([EMBEDDINGS, *backbone, *vq])
        scale = 2 ** (len(channels) - 1)
        if self.config.image_size % scale:
            raise UserError(f"convert.image_size = {self.config.image_size}: a multiple of {scale} is needed")
        tokenizer = load_tokenizer(folder)
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
        weights["end_of_image"] = table[tokenizer.convert_tokens_to_ids("<end_of_image>")].clone()
        sizes = {"vocab_size": len(table), "width": table.shape[1]}
        components = {
            "tokenizer": tokenizer,
            "text_encoder": Part(f"{JANUS}TokenEmbedding", sizes, {"embed_tokens.weight": table}),
            "transformer": Part(f"{JANUS}TokenBackbone", network, weights),
            "vae": Part("diffusers:VQModel", vq_config(channels, blocks, source), vq_weights(vq, source)),
            "scheduler": self._path(num_tokens),
        }
        options = {"prompt_template": template, "pad_unconditional": True}
        return Parts(f"{HERE}.discrete_flow:DiscreteFlowPipeline", components, options, source.notes())

    def _understanding(
        self, folder: Path, source: Source, text: dict[str, Any], template: str, config: dict[str, Any]
    ) -> Parts:
        backbone = {
            EMBEDDINGS: "embed_tokens.weight",
            HEAD: HEAD,
            **language_names(text["num_hidden_layers"]),
        }
        vision = dict(vision_names(source))
        tied = source.name(HEAD) not in source.tensors and is_tied(config, source)
        if tied:
            del backbone[HEAD]
        source.check([*backbone, *vision])
        weights = {target: source[name] for name, target in backbone.items()}
        if tied:
            weights[HEAD] = source[EMBEDDINGS].clone()  # it may be trained, and the table is not
        encoder = vision_config(config, source)
        if self.config.image_size != encoder["image_size"]:
            raise UserError(
                f"convert.image_size = {self.config.image_size}: the vision model reads "
                f"{encoder['image_size']} pixels"
            )
        tokenizer = load_tokenizer(folder, PLACEHOLDER)
        network = {"text_config": text, "image_token_id": tokenizer.convert_tokens_to_ids(PLACEHOLDER)}
        features = {target: vision_tensor(name, source) for name, target in vision.items()}
        components = {
            "tokenizer": tokenizer,
            "transformer": Part(f"{JANUS}TextBackbone", network, weights),
            "image_encoder": Part(f"{JANUS}PictureEncoder", {"vision_config": encoder}, features),
            "scheduler": self._path(text["vocab_size"]),
        }
        options = {
            "prompt_template": template,
            "image_size": encoder["image_size"],
            "pad_images": True,
            "answer_length": self.config.answer_length,
        }
        return Parts(f"{HERE}.discrete_text:DiscreteTextPipeline", components, options, source.notes())


def load_tokenizer(folder: Path, *needed: str) -> PreTrainedTokenizerFast:
    """The tokenizer, which pads on the left and begins with its BOS token; ``needed`` are further tokens."""
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    except Exception as error:
        raise UserError(f"{folder} has no tokenizer.json that can be read: {error}") from error
    for kind in ("bos_token", "eos_token", "pad_token", "<begin_of_image>", "<end_of_image>", *needed):
        token = kind if kind.startswith("<") else getattr(tokenizer, kind)
        if token is None or len(tokenizer.encode(token, add_special_tokens=False)) != 1:
            raise UserError(f"the tokenizer of {folder} has no {kind}, or not as a single token")
    bos = str(tokenizer.bos_token)
    if tokenizer.encode("a")[0] != tokenizer.bos_token_id:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    return tokenizer
