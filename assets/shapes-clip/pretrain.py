"""Pretrains the shapes CLIP from nothing: a contrast of each scene with every caption that is false of it.

    python assets/shapes-clip/pretrain.py --out runs/shapes-clip

Writes a folder that open_clip loads as ``local-dir:<folder>``: ``open_clip_config.json``, float16 weights
and a tokenizer of whole words; metrics as JSON lines beside them. The last line of the metrics is the
accuracy, on held-out prompts, at picking the true caption among eight hard negatives.

Source: CLIP, arXiv 2103.00020; negatives that differ in one fact, arXiv 2210.01936 (section 4); an image
encoder first and a text encoder tuned to it, arXiv 2111.07991.
Differs from CLIP: every phrase of the domain is a negative at every step unless it is true of the scene,
which takes in all the hard ones (colour, shape or count changed, objects swapped, relation turned). And
the image encoder first learns against one free vector a phrase: a text encoder from nothing gives captions
that differ in word order nearly the same vector, so that neither side learns relations for a long time.

Shapes: B scenes per step, V phrases of the domain, D width of the joint space.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flowrl.shapes.domain import POSITION_MARGIN, RELATIONS, Scene, sample_scene
from flowrl.shapes.prompts import TAGS, TEMPLATES, all_prompts, split_prompts
from flowrl.shapes.render import render

SIDE = 64  # of the scenes as rendered
NUM_NEGATIVES = 8
WEIGHTS = "open_clip_model.safetensors"
STAGES = ("images", "texts", "both")

logger = logging.getLogger("pretrain")
Record = dict[str, Any]


def phrase(record: Record) -> str:
    """The prompt without its template: ``a red circle``."""
    return record["prompt"].split(" of ", 1)[1]


def shape_counts(record: Record) -> tuple[tuple[str, int], ...]:
    """How many of each shape a caption names, in order of their names."""
    return tuple(sorted((entry["class"], entry["count"]) for entry in record["include"]))


def holds(record: Record, scene: Scene) -> bool:
    """Whether a caption is true of a scene and names all of it."""
    if Counter(dict(shape_counts(record))) != Counter(item.shape for item in scene):
        return False
    for entry in record["include"]:
        mine = [item for item in scene if item.shape == entry["class"]]
        if "color" in entry and any(item.color != entry["color"] for item in mine):
            return False
        if "position" in entry:
            relation, index = entry["position"]
            dx, dy = RELATIONS[relation]
            other = next(item for item in scene if item.shape == record["include"][index]["class"])
            if (mine[0].x - other.x) * dx + (mine[0].y - other.y) * dy <= POSITION_MARGIN:
                return False
    return True


def build_tokenizer(context_length: int) -> PreTrainedTokenizerFast:
    """One token per word of the domain; the end mark has the highest index, where open_clip pools."""
    words = sorted({word for record in all_prompts() for word in record["prompt"].split()})
    vocabulary = {token: k for k, token in enumerate(["<pad>", "<unk>", *words, "<start>", "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>",
        special_tokens=[(token, vocabulary[token]) for token in ("<start>", "<end>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<start>",
        eos_token="<end>",
        model_max_length=context_length,
        padding_side="right",
    )


def build_config(args: argparse.Namespace, vocabulary_size: int) -> dict[str, Any]:
    """The contents of ``open_clip_config.json``."""
    return {
        "model_cfg": {
            "embed_dim": args.embed_dim,
            "vision_cfg": {
                "image_size": args.image_size,
                "layers": [1, 1, 1, 1],  # a list makes it open_clip's residual network
                "width": args.vision_width,
                "head_width": 64,
            },
            "text_cfg": {
                "context_length": args.context_length,
                "vocab_size": vocabulary_size,
                # open_clip reads the tokenizer from the folder itself; the name only has to be there.
                "hf_tokenizer_name": "shapes-clip",
                "width": args.text_width,
                "heads": args.text_width // 32,
                "layers": args.text_layers,
            },
        },
        "preprocess_cfg": {
            "mean": [0.8, 0.8, 0.8],
            "std": [0.25, 0.25, 0.25],
            "interpolation": "bicubic",
            "resize_mode": "shortest",
        },
    }


def build_model(args: argparse.Namespace) -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    """Writes config and tokenizer into the folder, and has open_clip make the model from them."""
    tokenizer = build_tokenizer(args.context_length)
    tokenizer.save_pretrained(args.out)
    config = build_config(args, len(tokenizer))
    (args.out / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    model = open_clip.create_model(f"local-dir:{args.out}", load_weights=False)
    return model, open_clip.get_tokenizer(f"local-dir:{args.out}")


def draw_batch(
    by_tag: dict[str, list[Record]], count: int, rng: np.random.Generator
) -> tuple[list[Record], list[Scene], torch.Tensor]:
    """Records of balanced tags, a scene for each, and its image (B, 3, H, W) with noise and blur."""
    records, scenes, images = [], [], []
    for _ in range(count):
        of_tag = by_tag[TAGS[rng.integers(len(TAGS))]]
        record = of_tag[rng.integers(len(of_tag))]
        scene = sample_scene(record, rng)
        image = render(scene, SIDE).astype(np.float32) / 255
        if rng.random() < 0.3:
            image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 1.2))
        if rng.random() < 0.5:
            image = image + rng.normal(0, rng.uniform(0, 0.08), image.shape).astype(np.float32)
        records.append(record)
        scenes.append(scene)
        images.append(image.clip(0, 1))
    return records, scenes, torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def preprocess(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Resizes and normalises images (B, 3, H, W) in [0, 1] as the config of the model says."""
    config = model.visual.preprocess_cfg
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    resized = F.interpolate(images, size=config["size"], mode="bicubic", antialias=True)
    return ((resized.clamp(0, 1) - mean) / std).contiguous(memory_format=torch.channels_last)


def contrast(logits: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every true pair against the false ones of its scene, and of its phrase.

    Args:
        logits: (B, V).
        true: whether a phrase is true of a scene (B, V).
    """
    false = logits.masked_fill(true, -math.inf)
    losses = []
    for axis in (1, 0):
        each = F.softplus(false.logsumexp(axis, keepdim=True) - logits)
        # A scene has one say, whatever the number of its true phrases, and so has a phrase that is used.
        share = true / true.sum(axis, keepdim=True).clamp_min(1)
        losses.append((each * share).sum() / share.sum())
    return (losses[0] + losses[1]) / 2


class Phrases:
    """The phrases of the train split: their records, and which of them are true of a scene."""

    def __init__(self, records: list[Record]) -> None:
        """Groups the records by phrase, and the phrases by the shapes they name."""
        self.records: dict[str, list[Record]] = {}
        for record in records:
            self.records.setdefault(phrase(record), []).append(record)
        self.firsts = [of_phrase[0] for of_phrase in self.records.values()]
        self.index = {text: k for k, text in enumerate(self.records)}
        self.of_shapes: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for k, record in enumerate(self.firsts):
            self.of_shapes.setdefault(shape_counts(record), []).append(k)

    def true_of(self, batch: list[Record], scenes: list[Scene]) -> torch.Tensor:
        """Whether each phrase is true of each scene, bool (B, V); only those of its shapes can be."""
        true = torch.zeros(len(batch), len(self.records), dtype=torch.bool)
        for row, (record, scene) in enumerate(zip(batch, scenes, strict=True)):
            for k in self.of_shapes[shape_counts(record)]:
                true[row, k] = holds(self.firsts[k], scene)
        return true


def warmup_cosine(step: int, steps: int, warmup: int) -> float:
    """The learning rate over its peak."""
    return min((step + 1) / warmup, 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)


def train_images(
    stage: str,
    model: torch.nn.Module,
    phrases: Phrases,
    say: Callable[[], torch.Tensor],
    parameters: list[torch.nn.Parameter],
    lr: float,
    steps: int,
    args: argparse.Namespace,
    log: Callable[[Record], None],
) -> None:
    """Trains on scenes drawn on the fly against the unit vectors (V, D) that `say` has for the phrases."""
    rng = np.random.default_rng([args.seed, STAGES.index(stage)])
    by_tag: dict[str, list[Record]] = {tag: [] for tag in TAGS}
    for of_phrase in phrases.records.values():
        for record in of_phrase:
            by_tag[record["tag"]].append(record)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: warmup_cosine(k, steps, args.warmup))
    start, losses = time.monotonic(), []
    hits: dict[str, list[float]] = {tag: [] for tag in TAGS}
    model.train()
    for step in range(steps):
        batch, scenes, images = draw_batch(by_tag, args.batch_size, rng)
        true = phrases.true_of(batch, scenes)
        seen = model.encode_image(preprocess(model, images), normalize=True)
        logits = model.logit_scale.exp() * seen @ say().T
        loss = contrast(logits, true)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        losses.append(loss.item())
        own = logits[range(len(batch)), [phrases.index[phrase(record)] for record in batch]]
        best_false = logits.masked_fill(true, -math.inf).amax(1)
        for record, hit in zip(batch, (own > best_false).tolist(), strict=True):
            hits[record["tag"]].append(float(hit))
        if (step + 1) % 25 == 0:
            accuracy = {tag: float(np.mean(values[-200:])) for tag, values in hits.items()}
            record = {"stage": stage, "step": step + 1, "loss": float(np.mean(losses[-25:])), **accuracy}
            record |= {"grad_norm": norm.item(), "logit_scale": model.logit_scale.exp().item()}
            log(record | {"seconds": time.monotonic() - start})


def train_texts(
    model: torch.nn.Module,
    tokens: list[torch.Tensor],
    prototypes: torch.Tensor,
    args: argparse.Namespace,
    log: Callable[[Record], None],
) -> None:
    """Teaches the text encoder to say each phrase's prototype (V, D), whatever the template."""
    rng = np.random.default_rng([args.seed, STAGES.index("texts")])
    ids = torch.cat(tokens)
    target = prototypes[[k for k, rows in enumerate(tokens) for _ in rows]]
    parameters = text_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=args.text_lr, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: warmup_cosine(k, args.text_steps, args.warmup)
    )
    start, cosines = time.monotonic(), []
    for step in range(args.text_steps):
        chosen = torch.from_numpy(rng.integers(len(ids), size=args.text_batch_size))
        cosine = (model.encode_text(ids[chosen], normalize=True) * target[chosen]).sum(1).mean()
        optimizer.zero_grad()
        (1 - cosine).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        cosines.append(cosine.item())
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - start
            mean = float(np.mean(cosines[-100:]))
            log({"stage": "texts", "step": step + 1, "cosine": mean, "seconds": seconds})


def text_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """All parameters but those of the image encoder and the temperature."""
    return [p for n, p in model.named_parameters() if not n.startswith("visual.") and n != "logit_scale"]


def train(
    model: torch.nn.Module,
    tokenizer: Callable[..., torch.Tensor],
    args: argparse.Namespace,
    log: Callable[[Record], None],
) -> None:
    """The three stages: scenes against free prototypes, texts towards these, both together."""
    phrases = Phrases(split_prompts(held_out=False))
    tokens = [tokenizer([r["prompt"] for r in of_phrase]) for of_phrase in phrases.records.values()]
    model.visual.to(memory_format=torch.channels_last)
    with torch.no_grad():
        model.logit_scale.fill_(math.log(args.logit_scale))
    free = torch.nn.Parameter(0.1 * torch.randn(len(tokens), args.embed_dim))
    parameters = [*model.visual.parameters(), model.logit_scale, free]
    train_images(
        "images", model, phrases, lambda: F.normalize(free, dim=1), parameters, args.lr, args.steps, args, log
    )
    train_texts(model, tokens, F.normalize(free.detach(), dim=1), args, log)
    rng = np.random.default_rng([args.seed, len(STAGES)])

    def say() -> torch.Tensor:
        spoken = [rows[rng.integers(len(rows))] for rows in tokens]  # one template for each phrase
        return model.encode_text(torch.stack(spoken), normalize=True)

    everything = list(model.parameters())
    train_images("both", model, phrases, say, everything, args.both_lr, args.both_steps, args, log)


def hard_negatives(record: Record, scene: Scene, rng: np.random.Generator) -> list[str]:
    """The captions false of a scene that differ least from its own: fewest words changed, ties by lot."""
    template = record["prompt"].split(" of ", 1)[0] + " of {}"
    own = phrase(record).split()
    rivals = [r for r in all_prompts() if r["prompt"].startswith(template.format("")) and not holds(r, scene)]
    cost = [(_word_edits(own, phrase(r).split()), rng.random(), r["prompt"]) for r in rivals]
    return [prompt for _, _, prompt in sorted(cost)[:NUM_NEGATIVES]]


def _word_edits(a: list[str], b: list[str]) -> float:
    """Levenshtein distance in words; the same words in another order count as one edit."""
    if sorted(a) == sorted(b):
        return 1.0
    previous = list(range(len(b) + 1))
    for i, word in enumerate(a, start=1):
        row = [i]
        for k, other in enumerate(b, start=1):
            row.append(min(previous[k] + 1, row[-1] + 1, previous[k - 1] + (word != other)))
        previous = row
    return float(previous[-1])


@torch.no_grad()
def evaluate(folder: Path, scenes_per_prompt: int, noise: float, seed: int) -> dict[str, float]:
    """Accuracy of the saved model on held-out prompts, for each tag and as a mean over tags.

    Args:
        folder: the model.
        scenes_per_prompt: scenes for each prompt.
        noise: standard deviation of the noise on the pixels, in [0, 1] units.
        seed: of scenes, noise and negatives.
    """
    model = open_clip.create_model(f"local-dir:{folder}").eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    rng = np.random.default_rng(seed)
    hits: dict[str, list[float]] = {tag: [] for tag in TAGS}
    for record in split_prompts(held_out=True):
        for _ in range(scenes_per_prompt):
            scene = sample_scene(record, rng)
            image = render(scene, SIDE) / 255 + rng.normal(0, noise, (SIDE, SIDE, 3))
            pixels = torch.from_numpy(image.clip(0, 1)).float().permute(2, 0, 1)
            texts = [record["prompt"], *hard_negatives(record, scene, rng)]
            seen = model.encode_image(preprocess(model, pixels[None]), normalize=True)
            cosines = seen @ model.encode_text(tokenizer(texts), normalize=True).T
            hits[record["tag"]].append(float(cosines.argmax() == 0))
    by_tag = {tag: float(np.mean(values)) for tag, values in hits.items()}
    return {**by_tag, "mean": float(np.mean(list(by_tag.values())))}


def parse_args() -> argparse.Namespace:
    """The command line; the defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600, help="of the images against prototypes")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--text-batch-size", type=int, default=256)
    parser.add_argument("--text-steps", type=int, default=1500)
    parser.add_argument("--text-lr", type=float, default=2e-3)
    parser.add_argument("--both-steps", type=int, default=200, help="of images and texts together")
    parser.add_argument("--both-lr", type=float, default=3e-4)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--logit-scale", type=float, default=30.0, help="at the start; learnt, at most 100")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--vision-width", type=int, default=16)
    parser.add_argument("--text-width", type=int, default=64)
    parser.add_argument("--text-layers", type=int, default=2)
    parser.add_argument("--embed-dim", type=int, default=128)
    parser.add_argument("--context-length", type=int, default=16)
    return parser.parse_args()


def main() -> None:
    """Trains, saves and evaluates."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    cv2.setNumThreads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    assert len({phrase(r) for r in all_prompts()}) * len(TEMPLATES) == len(all_prompts())
    with (args.out / "metrics.jsonl").open("w", encoding="utf-8", buffering=1) as metrics:

        def log(record: Record) -> None:
            line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()})
            metrics.write(line + "\n")
            logger.info(line)

        model, tokenizer = build_model(args)
        logger.info("%.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)
        train(model, tokenizer, args, log)
        weights = {
            name: (value.half() if value.is_floating_point() else value).contiguous()
            for name, value in model.state_dict().items()
        }
        save_file(weights, args.out / WEIGHTS, metadata={"format": "pt"})
        for name, noise in (("held_out", 0.0), ("held_out_noise", 15 / 255)):
            log({"evaluation": name, **evaluate(args.out, 3, noise, args.seed + 1)})


if __name__ == "__main__":
    main()
