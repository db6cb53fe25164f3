"""A causal Wan: text to video chunk by chunk, each chunk made in few steps after a cache of the earlier ones.

An ordinary diffusers pipeline over diffusers' own ``WanTransformer3DModel``, which `causal` makes causal. For
every chunk it runs its scheduler's steps, and asks it for each next state, which is the action. Then the
finished chunk goes through the network once more at time 0, and that pass's keys and values are what later
chunks attend to, never those of a noisy pass. `stream` gives chunks as they are made, with bounded memory; a
prompt switch takes effect at a chunk's start and leaves the cache as it is.

    parts of a prompt, joined by " | ", share the chunks evenly: "a cat sits | the cat jumps"

Source: Self Forcing, arXiv 2506.08009 (rollout with a cache of clean chunks, window); LongLive, arXiv
2509.22622 (sink frames, prompt switches); RAVEN, arXiv 2605.15190 (packed forward).
Differs from LongLive: its cache is made anew under the new prompt at a switch.
Shapes: B rows, C latent channels, F latent frames, h and w latent sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline, WanPipeline
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from diffusers.video_processor import VideoProcessor
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.causal_attention import FrameCache, causal
from flowrl.mdp.chunks import SWITCH, ChunkLayout, packed_forward, prompts_by_chunk
from flowrl.mdp.wan_decoder import decode, decode_stream

Prompts = Callable[[int], list[str]]  # of a chunk, for all rows
Generators = torch.Generator | list[torch.Generator] | None


class CausalWanPipeline(WanPipeline):  # type: ignore[misc]
    """Text to video by a causal Wan transformer; without a VAE its latents are pixels in [-1, 1]."""

    model_cpu_offload_seq = "text_encoder->transformer->vae"
    _optional_components: ClassVar[list[str]] = ["vae"]

    def __init__(
        self,
        tokenizer: Any,
        text_encoder: Any,
        scheduler: Any,
        transformer: Any,
        vae: AutoencoderKLWan | None = None,
        frames_per_chunk: int = 3,
        window_frames: int | None = None,
        sink_frames: int = 0,
        resident_frames: int | None = None,
    ) -> None:
        """Takes the components, and how chunks see each other, in latent frames.

        Args:
            tokenizer, text_encoder: as of a Wan.
            scheduler: of a few-step model a ``FlowMatchLCMScheduler``.
            transformer: a ``WanTransformer3DModel``; it is made causal.
            vae: an ``AutoencoderKLWan``, or None.
            frames_per_chunk, window_frames, sink_frames, resident_frames: see `ChunkLayout`.
        """
        DiffusionPipeline.__init__(self)  # WanPipeline's own is for two transformers
        self.register_modules(tokenizer=tokenizer, text_encoder=text_encoder, scheduler=scheduler)
        self.register_modules(transformer=transformer, vae=vae)
        patch = transformer.config.patch_size[0]
        self.layout = ChunkLayout(frames_per_chunk, window_frames, sink_frames, resident_frames, patch)
        self.register_to_config(
            frames_per_chunk=frames_per_chunk,
            window_frames=window_frames,
            sink_frames=sink_frames,
            resident_frames=resident_frames,
        )
        self.vae_scale_factor_temporal = 1 if vae is None else vae.config.scale_factor_temporal
        self.vae_scale_factor_spatial = 1 if vae is None else vae.config.scale_factor_spatial
        self.video_processor = VideoProcessor(vae_scale_factor=self.vae_scale_factor_spatial)
        causal(transformer)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        num_inference_steps: int = 4,
        generator: Generators = None,
        latents: Tensor | None = None,
        frame_rate: float = 16.0,
        max_sequence_length: int = 512,
        output_type: str = "np",
        return_dict: bool = True,
    ) -> Any:
        """Makes one clip a prompt.

        Args:
            prompt: one or several texts, of one or more parts each.
            height, width: in pixels.
            num_frames: of pixels; its latent frames must be whole chunks.
            num_inference_steps: steps of a chunk.
            generator: one, or one a row.
            latents: (B, C, F, h, w) initial noise, in place of the generator's.
            frame_rate: frames a second, of what is made; it changes nothing here.
            max_sequence_length: tokens of a prompt's part.
            output_type: "np", "pil", "pt" (B, F, 3, H, W), or "latent" for (B, C, F, h, w).
            return_dict: False for a tuple.

        Raises:
            UserError: for frames that are no whole number of chunks.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        latents = self._noise(len(prompts), height, width, num_frames, generator, latents)
        noises = self.layout.split(latents)
        parts = prompts_by_chunk(prompts, len(noises))
        made = self._chunks(noises, parts.__getitem__, num_inference_steps, generator, max_sequence_length)
        with self.progress_bar(total=len(noises)) as bar:
            finished = []
            for chunk in made:
                finished.append(chunk)
                bar.update()
        latents = torch.cat(finished, dim=2)
        video = latents if output_type == "latent" else self._finished(decode(self.vae, latents), output_type)
        self.maybe_free_model_hooks()
        return WanPipelineOutput(frames=video) if return_dict else (video,)

    @torch.no_grad()
    def stream(
        self,
        prompt: str | list[str] | Prompts,
        num_chunks: int | None = None,
        height: int = 480,
        width: int = 832,
        num_inference_steps: int = 4,
        generator: Generators = None,
        latents: Tensor | None = None,
        max_sequence_length: int = 512,
        output_type: str = "pt",
    ) -> Iterator[Any]:
        """Makes clips of some chunks, or without end, and gives each chunk when it is finished.

        Args:
            prompt: texts; or a function from a chunk's number to the texts of all rows, for prompts that come
                while the video is being made.
            num_chunks: None: until the caller stops; then texts must have one part.
            height, width, num_inference_steps, generator, max_sequence_length, output_type: see `__call__`.
            latents: (B, C, F, h, w) initial noise of all chunks, in place of the generator's, which draws
                chunk by chunk and so makes another clip than in `__call__`.

        Yields:
            The frames of one chunk, in the form of ``output_type``.
        """
        if callable(prompt):
            prompts: Prompts = prompt
        else:
            texts = [prompt] if isinstance(prompt, str) else list(prompt)
            if num_chunks is None and any(SWITCH in text for text in texts):
                raise UserError("a stream without end cannot share its chunks among the parts of a prompt")
            prompts = prompts_by_chunk(texts, num_chunks).__getitem__ if num_chunks else lambda _: texts
        rows = len(prompts(0))
        frames = (self.config.frames_per_chunk - 1) * self.vae_scale_factor_temporal + 1
        numbers: Iterable[int] = itertools.count() if num_chunks is None else range(num_chunks)
        noises: Iterable[Tensor] = (self._noise(rows, height, width, frames, generator) for _ in numbers)
        if latents is not None:
            noises = self.layout.split(latents)
        made = self._chunks(noises, prompts, num_inference_steps, generator, max_sequence_length)
        if output_type == "latent":
            yield from made
            return
        for pixels in decode_stream(self.vae, made):
            yield self._finished(pixels, output_type)

    def packed(
        self,
        noisy: Tensor,
        clean: Tensor,
        time: Tensor,
        prompt: list[str],
        max_sequence_length: int = 512,
        constant_history: bool = False,
    ) -> Tensor:
        """Velocities (B, C, F, h, w) of all chunks of `noisy`, each given the `clean` ones before it.

        One forward: see `flowrl.mdp.chunks.packed_forward`.
        """
        noises, history = self.layout.split(noisy), self.layout.split(clean)
        embeds: list[Tensor] = []
        before: list[str] = []
        for texts in prompts_by_chunk(prompt, len(noises)):
            embeds.append(embeds[-1] if texts == before else self._embeds(texts, max_sequence_length))
            before = texts
        window = self.layout.window
        return packed_forward(self.transformer, noises, history, time, embeds, window, constant_history)

    def _chunks(
        self,
        noises: Iterable[Tensor],
        prompts: Prompts,
        num_inference_steps: int,
        generator: Generators,
        max_sequence_length: int,
    ) -> Iterator[Tensor]:
        """Finished chunks (B, C, f, h, w), one for each chunk of noise."""
        context, layout = causal(self.transformer), self.layout
        cache = FrameCache(layout.resident, layout.window.sink)
        levels = [1 - step / num_inference_steps for step in range(num_inference_steps)]
        text_cache: dict[int, tuple[Tensor, Tensor]] = {}
        texts: list[str] = []
        embeds = finished = torch.empty(0)
        for number, chunk in enumerate(noises):
            if number > 0:  # only now: nobody sees the last chunk
                place = layout.place(number - 1)
                with context.set(cache=cache, text_cache=text_cache, **place, write=True):
                    self._velocity(finished, torch.zeros(()), embeds)
            if prompts(number) != texts:
                texts = list(prompts(number))
                embeds, text_cache = self._embeds(texts, max_sequence_length), {}
            self.scheduler.set_timesteps(sigmas=levels, device=self._execution_device)
            finished = chunk
            with context.set(cache=cache, text_cache=text_cache, **layout.place(number)):
                for time in self.scheduler.timesteps:
                    velocity = self._velocity(finished, time, embeds)
                    finished = self.scheduler.step(velocity, time, finished, generator=generator)[0]
            yield finished

    def _velocity(self, latents: Tensor, time: Tensor, embeds: Tensor) -> Tensor:
        dtype = self.transformer.dtype
        velocity: Tensor = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=time.to(latents.device).expand(len(latents)),
            encoder_hidden_states=embeds.to(dtype),
            return_dict=False,
        )[0]
        return velocity

    def _noise(self, rows: int, height: int, width: int, frames: int, *source: Any) -> Tensor:
        size = (height, width, frames, torch.float32, self._execution_device)
        noise: Tensor = self.prepare_latents(rows, self.transformer.config.in_channels, *size, *source)
        return noise

    def _embeds(self, texts: list[str], max_sequence_length: int) -> Tensor:
        embeds: Tensor = self.encode_prompt(
            texts, None, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )[0]
        return embeds

    def _finished(self, pixels: Tensor, output_type: str) -> Any:
        return self.video_processor.postprocess_video(pixels, output_type=output_type)
