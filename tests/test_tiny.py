"""The tiny pipelines run, are deterministic, and have the facts that their registry states."""

from __future__ import annotations

import functools

import pytest
import torch
from diffusers import DiffusionPipeline
from tiny import TINY

PROMPTS = ["a photo of a red circle", "two blue squares above a xyzzy"]


@functools.cache
def built(name: str) -> DiffusionPipeline:
    return TINY[name].build()


def sample(
    name: str,
    cfg: bool,
    rows: tuple[int, ...] = (0, 1),
    output_type: str = "latent",
    pipe: DiffusionPipeline | None = None,
) -> torch.Tensor:
    return (pipe or built(name))(
        prompt=[PROMPTS[i] for i in rows],
        num_inference_steps=3,
        generator=[torch.Generator().manual_seed(10 + i) for i in rows],
        output_type=output_type,
        **TINY[name].kwargs(cfg, len(rows)),
    )[0]


@pytest.mark.parametrize("name", TINY)
def test_samples(name: str) -> None:
    plain, guided = sample(name, cfg=False), sample(name, cfg=True)
    assert plain.isfinite().all() and guided.isfinite().all()
    assert plain.shape[0] == 2 and plain.shape == guided.shape
    assert (plain - guided).abs().max() > 1e-2
    assert 0.3 < plain.std() < 10


@pytest.mark.parametrize("cfg", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_row_is_independent_of_the_batch(name: str, cfg: bool) -> None:
    both = sample(name, cfg)
    for row in (0, 1):
        torch.testing.assert_close(sample(name, cfg, (row,))[0], both[row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TINY)
def test_builds_are_equal(name: str) -> None:
    before = torch.get_rng_state()
    again = TINY[name].build()
    assert torch.equal(before, torch.get_rng_state())
    for key, component in built(name).components.items():
        if isinstance(component, torch.nn.Module):
            other = again.components[key].state_dict()
            for tensor, value in component.state_dict().items():
                assert torch.equal(value, other[tensor]), (key, tensor)


@pytest.mark.parametrize("name", TINY)
def test_decodes(name: str) -> None:
    out = sample(name, cfg=False, output_type="pt")
    assert out.isfinite().all()
    assert out.shape[-3:] == (3, 32, 32) and out.shape[0] == 2
    assert 0 <= out.min() < out.max() <= 1


@pytest.mark.parametrize("name", TINY)
def test_bfloat16(name: str) -> None:
    pipe = TINY[name].build(torch.bfloat16)
    out = sample(name, cfg=True, pipe=pipe)
    assert out.isfinite().all()
    assert out.dtype == (torch.float32 if TINY[name].float32_latents else torch.bfloat16)
    assert all(getattr(pipe, network).dtype == torch.bfloat16 for network in TINY[name].networks)
