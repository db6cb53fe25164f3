"""The tiny pipelines run, are deterministic, and have the facts that their registry states."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import DiffusionPipeline
from tiny import TINY, TINY_WRONG, TinyPipeline

ALL = TINY | TINY_WRONG
PROMPTS = ("a photo of a red circle", "two blue squares above a xyzzy")
LONG = "a photo of a red circle and two blue squares above one big green triangle on the left"


@functools.cache
def built(name: str) -> DiffusionPipeline:
    return ALL[name].build()


def run(pipe: DiffusionPipeline, prompts: list[str], seeds: list[int], **kwargs: Any) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    kwargs = {"output_type": "latent", "num_inference_steps": 3} | kwargs
    return pipe(prompt=prompts, generator=generators, **kwargs)[0]


@functools.cache
def sample(name: str, cfg: bool, rows: tuple[int, ...] = (0, 1), output_type: str = "latent") -> torch.Tensor:
    entry, prompts, seeds = ALL[name], [PROMPTS[i] for i in rows], [10 + i for i in rows]
    kwargs = entry.call | (entry.cfg if cfg else entry.no_cfg) if len(rows) == 2 else entry.kwargs(cfg, 1)
    return run(built(name), prompts, seeds, output_type=output_type, **kwargs)


class Record:
    """What the pipeline's calls of its networks, ``prepare_latents`` and ``encode_prompt`` saw."""

    def __init__(self, entry: TinyPipeline, pipe: DiffusionPipeline, prompts: list[str], cfg: bool) -> None:
        self.inputs: list[tuple[tuple, dict]] = []
        self.outputs: list[torch.Tensor] = []
        self.latents: list[torch.Tensor] = []
        self.returned: dict[str, Any] = {}
        self.network = getattr(pipe, entry.networks[0])
        hook = self.network.register_forward_hook(self._forward, with_kwargs=True)
        try:
            with (
                patch.object(pipe, "prepare_latents", self._returns("latents", pipe.prepare_latents)),
                patch.object(pipe, "encode_prompt", self._returns("embeds", pipe.encode_prompt)),
                patch.object(pipe.scheduler, "set_begin_index", self._returns("index", int), create=True),
            ):
                callback = {"callback_on_step_end": self._step_end}
                kwargs = entry.kwargs(cfg, len(prompts)) | callback | {"num_inference_steps": 2}
                self.result = run(pipe, prompts, [0] * len(prompts), **kwargs)
        finally:
            hook.remove()

    def _forward(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        self.inputs.append((args, kwargs))
        self.outputs.append(rows_of(output[0]))

    def _returns(self, key: str, function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            self.returned.setdefault(key, value)
            return value

        return wrapped

    def _step_end(self, pipe: DiffusionPipeline, step: int, t: Any, kwargs: dict) -> dict:
        self.latents.append(kwargs["latents"])
        return {}


def rows_of(tensors: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors) if isinstance(tensors, list) else tensors


@pytest.mark.parametrize("name", ALL)
def test_samples(name: str) -> None:
    plain, guided = sample(name, cfg=False), sample(name, cfg=True)
    assert plain.isfinite().all() and guided.isfinite().all()
    assert plain.shape[0] == 2 and plain.shape == guided.shape
    assert (plain - guided).abs().max() > 5e-2
    assert 0.5 < plain.std() < 5 and guided.std() < 10


@pytest.mark.parametrize("name", ALL)
def test_prompt_matters(name: str) -> None:
    out = run(built(name), list(PROMPTS), [10, 10], **ALL[name].kwargs())
    assert (out[0] - out[1]).abs().max() > 1e-2


@pytest.mark.parametrize("cfg", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_row_is_independent_of_the_batch(name: str, cfg: bool) -> None:
    both = sample(name, cfg)
    for row in (0, 1):
        torch.testing.assert_close(sample(name, cfg, (row,))[0], both[row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_builds_are_equal(name: str) -> None:
    state = torch.get_rng_state()
    again = ALL[name].build()
    assert torch.equal(state, torch.get_rng_state())
    for key, component in built(name).components.items():
        if isinstance(component, torch.nn.Module):
            assert not component.training
            other = again.components[key].state_dict()
            for tensor, value in component.state_dict().items():
                assert torch.equal(value, other[tensor]), (key, tensor)


@pytest.mark.parametrize("name", ALL)
def test_decodes(name: str) -> None:
    out = sample(name, cfg=False, output_type="pt")
    assert out.isfinite().all()
    assert out.shape[-3:] == (3, 32, 32) and out.shape[0] == 2
    assert 0 <= out.min() < out.max() <= 1


@pytest.mark.parametrize("name", ALL)
def test_bfloat16(name: str) -> None:
    entry = ALL[name]
    record = Record(entry, entry.build(torch.bfloat16), list(PROMPTS), cfg=True)
    assert record.result.isfinite().all()
    prepared = record.returned["latents"]
    prepared = prepared[0] if entry.latents_tuple else prepared
    assert prepared.dtype == (torch.float32 if entry.float32_noise else torch.bfloat16)
    assert record.latents[-1].dtype == (torch.float32 if entry.float32_latents else torch.bfloat16)
    assert record.network.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ALL)
def test_facts(name: str) -> None:
    entry, pipe = ALL[name], built(name)
    plain, guided = (Record(entry, pipe, list(PROMPTS), cfg) for cfg in (False, True))
    prepared = plain.returned["latents"]
    assert isinstance(prepared, tuple) == entry.latents_tuple
    prepared = prepared[0] if entry.latents_tuple else prepared
    assert (prepared.ndim == 3) == entry.packed
    args, kwargs = plain.inputs[0]
    first = rows_of(args[0] if args else kwargs.get("hidden_states", kwargs.get("sample")))
    assert torch.equal(first.flatten(), prepared.flatten())
    same = plain.latents[-1].shape == plain.result.shape and torch.equal(plain.latents[-1], plain.result)
    assert same != entry.transformed_output

    scheduler = pipe.scheduler
    assert type(scheduler).__name__ == entry.scheduler
    assert scheduler.timesteps.is_floating_point() != entry.integer_timesteps
    assert ("index" in plain.returned) == entry.sets_begin_index
    if name in TINY:
        error = (scheduler.sigmas[:-1] - scheduler.timesteps / 1000).abs().max()
        assert (error < (1.1e-3 if entry.integer_timesteps else 1e-6)) == entry.shifted_timesteps

    positive = plain.outputs[0]
    if entry.batched_cfg:
        halves = guided.outputs[0].chunk(2)
    else:
        halves = guided.outputs[0], guided.outputs[1]
    close = [torch.allclose(half, positive, atol=1e-5) for half in halves]
    assert close == [entry.positive_first, not entry.positive_first]


@pytest.mark.parametrize("name", TINY)
def test_length_of_the_embeddings(name: str) -> None:
    entry, pipe = TINY[name], built(name)
    short, long = (Record(entry, pipe, [prompt], cfg=False).returned["embeds"][0] for prompt in ("a", LONG))
    assert isinstance(short, list) == (name == "z_image")
    lengths = [x[0].shape[-2] if isinstance(x, list) else x.shape[1] for x in (short, long)]
    assert (lengths[0] == lengths[1]) == entry.fixed_length


@pytest.mark.parametrize("name", ALL)
def test_gradients_reach_the_parameters(name: str) -> None:
    entry, pipe = ALL[name], built(name)
    for key in entry.networks:
        record = Record(TinyPipeline(**{**vars(entry), "networks": (key,)}), pipe, list(PROMPTS), cfg=False)
        args, kwargs = record.inputs[0]
        rows_of(record.network(*args, **kwargs)[0]).pow(2).mean().backward()
        grads = [p.grad for p in record.network.parameters()]
        reached = sum(g is not None and bool(g.abs().max() > 1e-8) for g in grads)
        assert reached > 0.8 * len(grads)
        assert all(g.isfinite().all() for g in grads if g is not None)
        record.network.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", ["sd3", "sana"])
def test_dropout_shows_in_train_mode(name: str) -> None:
    pipe = TINY[name].build()
    pipe.transformer.train()
    out = run(pipe, list(PROMPTS), [10, 11], **TINY[name].kwargs())
    assert (out - sample(name, cfg=False)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["sd3", "flux2_klein", "sana", "wan22"])
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    built(name).save_pretrained(tmp_path)
    pipe = type(built(name)).from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    out = run(pipe, list(PROMPTS), [10, 11], **TINY[name].kwargs(cfg=True))
    torch.testing.assert_close(out, sample(name, cfg=True))


def test_templates_are_cropped_at_the_prompt() -> None:
    qwen, hunyuan = built("qwen_image"), built("hunyuan_video")
    prefix = qwen.prompt_template_encode.split("{}")[0]
    assert len(qwen.tokenizer(prefix).input_ids) == qwen.prompt_template_encode_start_idx
    template = TINY["hunyuan_video"].call["prompt_template"]
    prefix = template["template"].split("{}")[0].rstrip()
    assert len(hunyuan.tokenizer(prefix).input_ids) == template["crop_start"]
