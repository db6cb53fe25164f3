"""Reward ``clip_score``: how near an image is to its prompt in the joint space of an open_clip model.

    reward = scale * max(cos(image, text), 0)        (without the max if not `clamp`)

Source: CLIPScore, arXiv 2104.08718, section 3 (there `scale` = 2.5; torchmetrics uses 100).
Differs from the authors' code: any open_clip model, no "A photo depicts" before the prompt, `scale` = 1.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, nearest, register
from flowrl.reward import Samples

CONFIG_FILE = "open_clip_config.json"

logger = logging.getLogger(__name__)


@register("reward", "clip_score")
class ClipScore:
    """Cosine of image and prompt under an open_clip model, in [0, scale]; higher is better."""

    class Config(ComponentConfig):
        """Options of the ``clip_score`` reward.

        ``model`` is a folder with ``open_clip_config.json`` and weights, ``hf-hub:owner/name``, or the
        name of an open_clip architecture; for an architecture ``weights`` is a file or an open_clip tag.
        ``quick_gelu`` states the activation that the weights were trained with, if you know it. Train
        with ``clamp: false`` where the model puts mismatches below 0, or they all score the same.
        """

        model: str
        weights: str | None = None
        quick_gelu: bool | None = None
        precision: Literal["fp32", "fp16", "bf16"] = "fp32"
        device: str = "auto"
        batch_size: int = Field(default=32, ge=1)
        scale: float = 1.0
        clamp: bool = True

    def __init__(self, config: Config) -> None:
        """Loads the model.

        Raises:
            UserError: if model or weights are missing or do not fit together; the message names the key.
                Nothing is downloaded before all that can be checked is checked.
        """
        self.config = config
        name = _model_name(config)
        import open_clip

        _check_weights(open_clip, name, config)
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(found if config.device == "auto" else config.device)
        self.dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[config.precision]
        try:
            _check_model(open_clip, name, config)
            self.model = open_clip.create_model(
                name, config.weights, precision=config.precision, device=self.device, require_pretrained=True
            )
            self.tokenizer = open_clip.get_tokenizer(name)
        except UserError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise UserError(
                f"reward clip_score: model = {config.model!r}, weights = {config.weights!r} cannot be "
                f"loaded: {type(error).__name__}: {reason}"
            ) from error
        self.model.eval().requires_grad_(False)
        self.preprocess_config = dict(self.model.visual.preprocess_cfg)
        if self.preprocess_config["resize_mode"] not in ("shortest", "squash"):
            raise UserError(
                f"reward clip_score: model = {config.model!r} wants resize_mode "
                f"{self.preprocess_config['resize_mode']!r}; supported: shortest, squash"
            )
        self._truncated: set[str] = set()

    @property
    def num_truncated(self) -> int:
        """The number of different prompts so far that the text encoder could not read to the end."""
        return len(self._truncated)

    @torch.no_grad()
    def __call__(
        self, samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        """Scores (B,), float32; image k is compared with prompt k.

        Raises:
            UserError: for video, or if there is not one prompt for each image.
        """
        images = samples.images
        if images.ndim != 4 or images.shape[1] != 3:
            raise UserError(f"reward clip_score: needs images (B, 3, H, W), got {tuple(images.shape)}")
        if len(prompts) != len(images):
            raise UserError(f"reward clip_score: {len(images)} images but {len(prompts)} prompts")
        distinct = list(dict.fromkeys(prompts))
        texts = self.encode_text(distinct)[[distinct.index(prompt) for prompt in prompts]]
        cosines = (self.encode_images(images) * texts).sum(1)
        return self.config.scale * (cosines.clamp_min(0) if self.config.clamp else cosines)

    def encode_images(self, images: Tensor) -> Tensor:
        """Unit vectors (B, D), float32 on the CPU, of images float in [0, 1] (B, 3, H, W)."""
        features = [
            self.model.encode_image(self.preprocess(chunk.to(self.device)).to(self.dtype))
            for chunk in images.split(self.config.batch_size)
        ]
        return F.normalize(torch.cat(features).float(), dim=1).cpu()

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors (N, D), float32 on the CPU; texts that are too long are cut, counted and logged."""
        features = []
        for start in range(0, len(texts), self.config.batch_size):
            chunk = list(texts[start : start + self.config.batch_size])
            self._note_truncation(chunk)
            features.append(self.model.encode_text(self.tokenizer(chunk).to(self.device)))
        return F.normalize(torch.cat(features).float(), dim=1).cpu()

    def preprocess(self, images: Tensor) -> Tensor:
        """Resizes, crops and normalises images float in [0, 1] (B, 3, H, W) as the model wants them.

        The same as open_clip's transform of PIL images, 8-bit rounding included, up to one level in 255.
        """
        from torchvision.transforms import InterpolationMode, functional

        config = self.preprocess_config
        size = config["size"] if isinstance(config["size"], tuple | list) else (config["size"],) * 2
        height, width = images.shape[2:]
        if config["resize_mode"] == "squash":
            target = list(size)
        elif size[0] == size[1]:
            target = [int(size[0] * side / min(height, width)) for side in (height, width)]
        else:
            ratio = min(height / size[0], width / size[1])
            target = [round(height / ratio), round(width / ratio)]
        mode = InterpolationMode(
            config["interpolation"] if config["interpolation"] != "random" else "bicubic"
        )
        pixels = (images.float() * 255).round()
        for step in ([height, target[1]], target):  # PIL resizes the rows first, and rounds after each step
            pixels = functional.resize(pixels, step, interpolation=mode, antialias=True).clamp(0, 255).round()
        images = functional.center_crop(pixels, list(size)) / 255
        return functional.normalize(images, config["mean"], config["std"])

    def _note_truncation(self, texts: list[str]) -> None:
        length = self.tokenizer.context_length
        # With one place more, the last place is filled only by texts that do not fit.
        last = self.tokenizer(texts, context_length=length + 1)[:, -1]
        padding = getattr(getattr(self.tokenizer, "tokenizer", None), "pad_token_id", None) or 0
        cut = {text for text, token in zip(texts, last.tolist(), strict=True) if token != padding}
        if cut and not self._truncated:
            logger.warning(
                "reward clip_score: a prompt of %d characters is longer than the %d tokens of %s and is cut; "
                "further ones are only counted (num_truncated)",
                max(map(len, cut)),
                length,
                self.config.model,
            )
        self._truncated |= cut


def _model_name(config: ClipScore.Config) -> str:
    """The model in open_clip's words; a folder is checked before open_clip is even imported."""
    model = config.model.removeprefix("local-dir:")
    if config.model.startswith("hf-hub:") or not (
        Path(model).exists() or "/" in model or model != config.model
    ):
        return config.model
    if not (Path(model) / CONFIG_FILE).is_file():
        missing = f"has no {CONFIG_FILE}" if Path(model).is_dir() else "is not a folder"
        raise UserError(
            f"reward clip_score: model = {config.model!r} {missing}; legal: an open_clip folder, "
            "hf-hub:owner/name, or the name of an open_clip architecture"
        )
    return f"local-dir:{model}"


def _check_weights(open_clip: Any, name: str, config: ClipScore.Config) -> None:
    weights = config.weights
    if ":" in name:
        if weights is not None:
            raise UserError(
                f"reward clip_score: weights = {weights!r}: a folder or hub model brings its own weights; "
                "leave `weights` out, or name an architecture in `model`"
            )
        return
    known = open_clip.list_models()
    if name not in known:
        raise UserError(
            f"reward clip_score: model = {name!r} is no folder and no open_clip architecture"
            f"{nearest(name, known)}"
        )
    tags = open_clip.list_pretrained_tags_by_model(name)
    if weights is None or not (Path(weights).is_file() or open_clip.get_pretrained_cfg(name, weights)):
        raise UserError(
            f"reward clip_score: weights = {weights!r} is no file and no tag of {name}; "
            f"its tags: {', '.join(tags) or 'none'}"
        )


def _check_model(open_clip: Any, name: str, config: ClipScore.Config) -> None:
    """Refuses an activation that the weights were not trained with, and code from a model folder."""
    architecture = open_clip.get_model_config(name)
    if (architecture["text_cfg"].get("tokenizer_kwargs") or {}).get("trust_remote_code"):
        raise UserError(f"reward clip_score: model = {config.model!r} wants to run code of its own; refused")
    own = bool(architecture.get("quick_gelu", False))
    trained = config.quick_gelu
    if trained is None and config.weights is not None:
        trained = _recorded_activation(open_clip, name, config.weights)
        if trained is None:
            logger.warning(
                "reward clip_score: nothing says whether %s needs QuickGELU, so %s is taken as it is, with "
                "quick_gelu=%s; state `quick_gelu` to have it checked",
                config.weights,
                name,
                own,
            )
    if trained not in (None, own):
        raise UserError(
            f"reward clip_score: model = {config.model!r} has quick_gelu={own}, but weights = "
            f"{config.weights!r} were trained with quick_gelu={trained}; scores would be quietly wrong "
            "(open_clip names the QuickGELU architectures '<name>-quickgelu')"
        )


def _recorded_activation(open_clip: Any, name: str, weights: str) -> bool | None:
    """What is on record: a tag's own entry, or the config that lies beside a file of weights."""
    if not Path(weights).is_file():
        return bool(open_clip.get_pretrained_cfg(name, weights).get("quick_gelu", False))
    beside = Path(weights).parent / CONFIG_FILE
    if not beside.is_file():
        return None
    recorded = json.loads(beside.read_text(encoding="utf-8"))
    return bool(recorded.get("model_cfg", recorded).get("quick_gelu", False))
