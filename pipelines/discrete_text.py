"""Questions answered by a discrete flow over text tokens, as an MDP.

The state is the answer alone, a fixed number of tokens. The question and the picture it is about are
conditions, as a prompt is elsewhere: they are no actions, have no log-probability, and enter no mean. What
comes after the end-of-text token of an answer is cut off when it is read.

Shapes: B rows, A tokens of an answer, M of a question, P picture features, S states.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from PIL import Image
from torch import Tensor
from torch.nn.functional import unfold
from transformers import PreTrainedModel

from flowrl.errors import UserError
from flowrl.mdp.token_logits import reshape_logits
from flowrl.mdp.token_wrapper import TokenWrapper
from flowrl.mdp.trajectory import Request
from flowrl.pictures import data_uri, open_picture, padded, stretched
from flowrl.registry import ComponentConfig, register
from flowrl.reward import Samples

BLANK = data_uri(Image.new("RGB", (1, 1)))


class DiscreteTextPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Answers questions, about a picture or without one."""

    model_cpu_offload_seq = "image_encoder->transformer"
    _optional_components: ClassVar[list[str]] = ["image_encoder"]

    def __init__(
        self,
        tokenizer: Any,
        transformer: Any,
        scheduler: Any,
        image_encoder: Any = None,
        image_size: int | None = None,
        patch_size: int = 8,
        answer_length: int = 16,
        prompt_template: str | None = None,
        pad_images: bool = False,
    ) -> None:
        """Takes the components.

        Args:
            tokenizer: of transformers.
            transformer: called with ``hidden_states`` (tokens of the answer), ``prompt_ids``, ``prompt_mask``
                and ``image_features``, returns logits of the answer; or a masked language model of
                transformers, which reads the question and the answer as one text, without a picture.
            scheduler: a ``DiscreteFlowScheduler``.
            image_encoder: features (B, P, D) of pixels in [-1, 1]; None: the patches themselves.
            image_size: side of the pictures; None: there are none.
            patch_size: side of a patch, without an encoder.
            answer_length: tokens A of an answer.
            prompt_template: what a question is put into, in place of ``{}``; None: nothing.
            pad_images: whether pictures keep their shape, on grey, or are stretched to a square.

        Raises:
            UserError: for pictures with a language model that reads text only.
        """
        super().__init__()
        self.register_to_config(
            image_size=image_size,
            patch_size=patch_size,
            answer_length=answer_length,
            prompt_template=prompt_template,
            pad_images=pad_images,
        )
        self.register_modules(
            tokenizer=tokenizer, transformer=transformer, scheduler=scheduler, image_encoder=image_encoder
        )
        if isinstance(transformer, PreTrainedModel) and image_size is not None:
            raise UserError(f"image_size = {image_size}: {type(transformer).__name__} reads text only")
        if hasattr(transformer, "get_input_embeddings"):
            scheduler.set_embeddings(transformer.get_input_embeddings().weight)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        image: Any = None,
        num_inference_steps: int = 4,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        max_sequence_length: int = 12,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "text",
        return_dict: bool = True,
    ) -> Any:
        """Answers one question a row.

        Args:
            prompt: one or several questions.
            image: a picture a question: each a PIL image, a path or a data URI.
            num_inference_steps: steps of the chain.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k, top_p: cut the posterior down to its likeliest tokens.
            max_sequence_length: tokens of a question.
            generator: one, or one a row.
            output_type: "text", or the tokens: "pt" or "latent".
            return_dict: False for a tuple.

        Raises:
            UserError: for a question that is too long, or pictures that are missing or not wanted.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        ids, mask = self.encode_prompt(prompts, max_sequence_length)
        features = self.encode_image(image, len(prompts))
        tokens = self.prepare_latents(len(prompts), generator)
        self.scheduler.set_timesteps(num_inference_steps, device=self._execution_device)
        with self.progress_bar(total=len(self.scheduler.timesteps)) as bar:
            for time in self.scheduler.timesteps:
                logits = self._logits(tokens, ids, mask, features)
                logits = reshape_logits(logits, temperature, top_k, top_p, self.scheduler.path.mask_id)
                tokens = self.scheduler.step(logits, time, tokens, generator=generator, return_dict=False)[0]
                bar.update()
        answers = self.decode_tokens(tokens) if output_type == "text" else tokens
        self.maybe_free_model_hooks()
        return DiscreteTextOutput(answers=answers) if return_dict else (answers,)

    def _logits(self, tokens: Tensor, ids: Tensor, mask: Tensor, features: Tensor | None) -> Tensor:
        if isinstance(self.transformer, PreTrainedModel):
            logits = self.transformer(
                input_ids=torch.cat([ids, tokens], dim=1),
                attention_mask=torch.cat([mask, torch.ones_like(tokens)], dim=1),
                return_dict=False,
            )[0][:, ids.shape[1] :]
        else:
            logits = self.transformer(
                hidden_states=tokens,
                prompt_ids=ids,
                prompt_mask=mask,
                image_features=features,
                return_dict=False,
            )[0]
        return logits.float()

    def encode_prompt(self, prompt: list[str], max_sequence_length: int = 12) -> tuple[Tensor, Tensor]:
        """Tokens (B, M) and mask (B, M) of the questions, padded to ``max_sequence_length``."""
        template = self.config.prompt_template
        texts = [text if template is None else template.replace("{}", text.strip()) for text in prompt]
        longest = max(len(ids) for ids in self.tokenizer(texts).input_ids)
        if longest > max_sequence_length:  # an end that is cut off changes what is asked
            raise UserError(f"max_sequence_length = {max_sequence_length}: a prompt has {longest} tokens")
        tokens = self.tokenizer(
            texts, padding="max_length", max_length=max_sequence_length, return_tensors="pt"
        ).to(self._execution_device)
        return tokens.input_ids, tokens.attention_mask

    def encode_image(self, image: Any, batch_size: int) -> Tensor | None:
        """Features (B, P, D) of the pictures; None where there are none."""
        size = self.config.image_size
        if size is None:
            if image is not None:
                raise UserError("image: this pipeline answers without pictures")
            return None
        pictures = image if isinstance(image, list) else [image]
        if image is None or len(pictures) != batch_size:
            raise UserError(
                f"image: {batch_size} questions need as many pictures, got {len(pictures) if image else 0}"
            )
        opened = [p if isinstance(p, Image.Image) else open_picture(p) for p in pictures]
        pixels = self.fit_pictures(opened)
        values = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(self._execution_device) / 127.5 - 1
        if self.image_encoder is None:
            return unfold(values, self.config.patch_size, stride=self.config.patch_size).transpose(1, 2)
        features: Tensor = self.image_encoder(values.to(self.image_encoder.dtype))
        return features

    def fit_pictures(self, pictures: list[Image.Image]) -> np.ndarray:
        """Pixels (B, image_size, image_size, 3) of pictures of any size, 0 to 255."""
        fit = padded if self.config.pad_images else stretched
        return np.stack([np.asarray(fit(p.convert("RGB"), self.config.image_size)) for p in pictures])

    def prepare_latents(
        self, batch_size: int, generator: torch.Generator | list[torch.Generator] | None = None
    ) -> Tensor:
        """Tokens (B, A) at t = 0."""
        generators = generator if isinstance(generator, list) else [generator] * batch_size
        rows = [self.scheduler.path.prior((self.config.answer_length,), source) for source in generators]
        return torch.stack(rows).to(self._execution_device)

    def decode_tokens(self, tokens: Tensor) -> list[str]:
        """Texts of tokens (B, A), up to the first end-of-text token."""
        end = self.tokenizer.eos_token_id
        rows = [row[: row.index(end)] if end in row else row for row in tokens.tolist()]
        texts: list[str] = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return [text.strip() for text in texts]


class DiscreteTextOutput(BaseOutput):  # type: ignore[misc]
    """What `DiscreteTextPipeline` returns: ``answers``, texts or tokens (B, A)."""

    answers: Any


@register("wrapper", "discrete_text")
class DiscreteText(TokenWrapper):
    """A `DiscreteTextPipeline`; pictures come from the ``image`` of the prompts' records."""

    probe: ClassVar[Request] = Request(("schedule",), ({"image": BLANK},), (0,), (0,), (0,))

    class Config(ComponentConfig):
        """No options: everything is the pipeline's own."""

    def __init__(self, config: Config, **collaborators: Any) -> None:
        """See `TokenWrapper`; raises UserError for a pipeline that samples no text."""
        name = type(collaborators["pipe"]).__name__
        if name != "DiscreteTextPipeline":
            raise UserError(f"model.wrapper discrete_text: {name} samples no text; use DiscreteTextPipeline")
        super().__init__(**collaborators)

    def arguments(
        self, request: Request, guidance: dict[str, Any] | None = None, num_steps: int | None = None
    ) -> dict[str, Any]:
        """Those of every wrapper, and the pictures.

        Raises:
            UserError: for a record without a picture where the pipeline needs one.
        """
        arguments = super().arguments(request, guidance, num_steps)
        if self.pipe.config.image_size is not None:
            for prompt, record in zip(request.prompts, request.metadata, strict=True):
                if not record.get("image"):
                    raise UserError(f"the record of {prompt!r} has no `image`: a path or a data URI")
            arguments["image"] = [record["image"] for record in request.metadata]
        return arguments

    def to_samples(self, output: Tensor, request: Request) -> Samples:
        """The answers (B, A) as texts, and the pictures they are about."""
        size = self.pipe.config.image_size
        texts = tuple(self.pipe.decode_tokens(output.cpu()))
        if size is None:
            return Samples(torch.full((len(texts), 3, 1, 1), 0.5), texts=texts)
        pictures = self.pipe.fit_pictures([open_picture(r["image"]) for r in request.metadata])
        images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
        return Samples(images, texts=texts)
