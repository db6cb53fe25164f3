"""Discrete flow pipelines as MDPs: pictures made of tokens by a continuous-time Markov chain.

The pipeline below is an ordinary diffusers pipeline: text encoder, a backbone that predicts clean tokens, and
a VQ decoder; it asks its scheduler for the next tokens, as every other one does, and that call is the action.
Guidance and temperature act on the logits before, so that they are part of the scored distribution.

Shapes: B rows, L positions, V data tokens, S states.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.token_logits import reshape_logits
from flowrl.mdp.token_wrapper import TokenWrapper
from flowrl.registry import ComponentConfig, register


class DiscreteFlowPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Text to image by a discrete flow over the tokens of a VQ model."""

    model_cpu_offload_seq = "text_encoder->transformer->vae"

    def __init__(
        self,
        tokenizer: Any,
        text_encoder: Any,
        transformer: Any,
        vae: Any,
        scheduler: Any,
        prompt_template: str | None = None,
        pad_unconditional: bool = False,
    ) -> None:
        """Takes the components.

        Args:
            tokenizer, text_encoder: of transformers; the encoder's last hidden states are the condition.
            transformer: called with ``hidden_states`` (tokens), ``encoder_hidden_states``, ``timestep`` and
                ``encoder_attention_mask``, returns logits.
            vae: a ``VQModel``; its codes are the tokens, row by row.
            scheduler: a ``DiscreteFlowScheduler``.
            prompt_template: what a prompt is put into, in place of ``{}``; None: nothing.
            pad_unconditional: without a negative prompt, guidance takes the prompt with all tokens but the
                first and the last replaced by padding (Janus), not the empty text.
        """
        super().__init__()
        self.register_to_config(prompt_template=prompt_template, pad_unconditional=pad_unconditional)
        self.register_modules(
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            transformer=transformer,
            vae=vae,
            scheduler=scheduler,
        )
        scheduler.set_embeddings(vae.quantize.embedding.weight)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        num_inference_steps: int = 16,
        guidance_scale: float = 1.0,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        negative_prompt: str | list[str] | None = None,
        max_sequence_length: int = 16,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """Makes one image a prompt.

        Args:
            prompt: one or several texts.
            num_inference_steps: steps of the chain.
            guidance_scale: w of logits = uncond + w (cond - uncond); 1 is without.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k, top_p: cut the posterior down to its likeliest tokens.
            negative_prompt: of the unconditional logits; the empty text by default.
            max_sequence_length: tokens of a text.
            generator: one, or one a row.
            output_type: "pil", "pt", "np", or "latent" for the tokens.
            return_dict: False for a tuple.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        guided = guidance_scale != 1.0
        embeds, mask, negative, negative_mask = self.encode_prompt(
            prompts, negative_prompt, guided, max_sequence_length
        )
        tokens = self.prepare_latents(len(prompts), generator)
        self.scheduler.set_timesteps(num_inference_steps, device=self._execution_device)
        self._num_timesteps = len(self.scheduler.timesteps)
        with self.progress_bar(total=self._num_timesteps) as bar:
            for time in self.scheduler.timesteps:
                times = time.expand(len(prompts))
                logits = self._logits(tokens, embeds, times, mask)
                if negative is not None:
                    empty = self._logits(tokens, negative, times, negative_mask)
                    logits = empty + guidance_scale * (logits - empty)
                logits = reshape_logits(logits, temperature, top_k, top_p, self.scheduler.path.mask_id)
                tokens = self.scheduler.step(logits, time, tokens, generator=generator, return_dict=False)[0]
                bar.update()
        images = tokens if output_type == "latent" else self.decode_tokens(tokens, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _logits(self, tokens: Tensor, embeds: Tensor, times: Tensor, mask: Tensor | None) -> Tensor:
        return self.transformer(
            hidden_states=tokens,
            encoder_hidden_states=embeds,
            timestep=times,
            encoder_attention_mask=mask,
            return_dict=False,
        )[0].float()

    def encode_prompt(
        self,
        prompt: list[str],
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = False,
        max_sequence_length: int = 16,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Hidden states (B, M, D) and mask (B, M) of the prompts, and those of the negative ones."""
        embeds, mask = self._encode(prompt, max_sequence_length)
        if not do_classifier_free_guidance:
            return embeds, mask, None, None
        if negative_prompt is None and self.config.pad_unconditional:
            return embeds, mask, *self._encode(prompt, max_sequence_length, blank=True)
        negative = (
            negative_prompt if isinstance(negative_prompt, list) else [negative_prompt or ""] * len(prompt)
        )
        return embeds, mask, *self._encode(negative, max_sequence_length)

    def _encode(self, texts: list[str], length: int, blank: bool = False) -> tuple[Tensor, Tensor]:
        device = self._execution_device
        if (template := self.config.prompt_template) is not None:
            texts = [template.replace("{}", text.strip()) for text in texts]
            longest = max(len(ids) for ids in self.tokenizer(texts).input_ids)
            if longest > length:  # cutting off the template's end would change what the model is asked for
                raise UserError(f"max_sequence_length = {length}: a prompt has {longest} tokens")
        tokens = self.tokenizer(
            texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).to(device)
        ids = tokens.input_ids
        if blank:
            count = tokens.attention_mask.cumsum(-1)
            ids = ids.masked_fill((count > 1) & (count < count[:, -1:]), self.tokenizer.pad_token_id)
        states = self.text_encoder(ids, attention_mask=tokens.attention_mask)[0]
        return states, tokens.attention_mask

    def prepare_latents(
        self, batch_size: int, generator: torch.Generator | list[torch.Generator] | None = None
    ) -> Tensor:
        """Tokens (B, L) at t = 0."""
        length = self.transformer.config.side**2
        generators = generator if isinstance(generator, list) else [generator] * batch_size
        rows = [self.scheduler.path.prior((length,), source) for source in generators]
        return torch.stack(rows).to(self._execution_device)

    def decode_tokens(self, tokens: Tensor, output_type: str = "pt") -> Any:
        """Pictures of tokens (B, L): "pt" float (B, 3, H, W) in [0, 1], "np", or "pil"."""
        side = self.transformer.config.side
        codes = self.vae.quantize.get_codebook_entry(
            tokens.flatten(), (len(tokens), side, side, self.vae.config.vq_embed_dim)
        )
        pixels = self.vae.decode(codes.to(self.vae.dtype), force_not_quantize=True, return_dict=False)[0]
        images = (pixels.float() / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return images
        arrays = images.permute(0, 2, 3, 1).cpu().numpy()
        return self.numpy_to_pil(arrays) if output_type == "pil" else arrays


@register("wrapper", "discrete_flow")
class DiscreteFlow(TokenWrapper):
    """A `DiscreteFlowPipeline`, or any other that makes pictures and whose scheduler walks a token path."""

    class Config(ComponentConfig):
        """No options: everything is the pipeline's own."""

    def __init__(self, config: Config, **collaborators: Any) -> None:
        """See `TokenWrapper`."""
        super().__init__(**collaborators)
