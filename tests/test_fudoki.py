"""FUDOKI: its backbone against transformers' Janus, the pipeline around it, and the conversion of weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import VQModel
from safetensors.torch import load_file, save_file
from test_wrapper import check_ratio, reached
from tiny_janus import (
    CODES,
    IMAGE,
    SIDE,
    TEMPLATE,
    fudoki_pipeline,
    janus_model,
    janus_tokenizer,
    original_names,
    text_config,
    write_original,
)
from torch import Tensor
from transformers import JanusConfig, JanusForConditionalGeneration, LlamaConfig
from transformers.models.janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAE
from typer.testing import CliRunner

from flowrl import registry
from flowrl.build import pipeline_class
from flowrl.cli import app
from flowrl.config import AdapterConfig
from flowrl.convert_janus import (
    EMBEDDINGS,
    backbone_names,
    language_config,
    open_source,
    vq_config,
    vq_names,
    vq_sizes,
    vq_weights,
)
from flowrl.errors import UserError
from flowrl.mdp import metric_path
from flowrl.mdp.policy import DTYPES, Policy
from flowrl.mdp.steps import StepPlan
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.pipelines.discrete_flow import DiscreteFlowPipeline
from flowrl.pipelines.janus_backbone import JanusTokenBackbone
from flowrl.tools.convert import Part, convert, make

PROMPTS = ["a photo of a red circle", "a cat"]
RATE_MC = {"name": "discrete_metric", "rule": "exponential", "estimator": "rate_mc", "num_draws": 4}
TARGETS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]  # as published
LENGTH = 48


class Said:
    """A console that keeps what is printed."""

    def __init__(self) -> None:
        self.text = ""

    def print(self, text: str, **_: Any) -> None:
        self.text += text + "\n"


def converted(source: Path, out: Path, *options: str) -> str:
    console: Any = Said()
    convert("fudoki", str(source), [f"image_size={IMAGE}", *options], out, console)
    return str(console.text)


def loaded(folder: Path) -> DiscreteFlowPipeline:
    pipe = pipeline_class(str(folder)).from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pipelines converted from the same weights: in original names, sharded, and in transformers' names."""
    root = tmp_path_factory.mktemp("fudoki")
    model = janus_model()
    model.save_pretrained(root / "transformers_source")
    janus_tokenizer().save_pretrained(root / "transformers_source")
    write_original(root / "original_source", original_names(model))
    write_original(root / "sharded_source", original_names(model), shards=3, bos=False)
    for name in ("transformers", "original", "sharded"):
        converted(root / f"{name}_source", root / name)
    return {name: root / name for name in ("transformers", "original", "sharded")}


def by_hand(model: JanusForConditionalGeneration, text: list[int], tokens: Tensor) -> Tensor:
    """Logits (L, V) of one row through transformers' own modules: a full mask, and a shift by one."""
    inner = model.model
    table = inner.language_model.get_input_embeddings()
    end = janus_tokenizer().convert_tokens_to_ids("<end_of_image>")
    sequence = torch.cat(
        [
            table(torch.tensor(text)),
            model.prepare_embeddings_for_image_generation(tokens),
            table(torch.tensor([end])),
        ]
    )
    full = torch.zeros(1, 1, len(sequence), len(sequence))
    states = inner.language_model(
        inputs_embeds=sequence[None],
        attention_mask=full,
        position_ids=torch.arange(len(sequence))[None],
        use_cache=False,
    ).last_hidden_state
    logits = inner.generation_head(states)[0]
    return logits[len(text) - 1 : len(text) - 1 + len(tokens)]


# -- the backbone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["original", "sharded", "transformers"])
@torch.no_grad()
def test_logits_equal_those_of_transformers(folders: dict[str, Path], names: str) -> None:
    """Two prompts of different lengths in one padded batch, against each alone and unpadded."""
    pipe, model = loaded(folders[names]), janus_model()
    embeds, mask, _, _ = pipe.encode_prompt(PROMPTS, max_sequence_length=LENGTH)
    assert mask[0].sum() != mask[1].sum()
    tokens = torch.randint(CODES, (2, SIDE**2), generator=torch.Generator().manual_seed(0))
    logits = pipe.transformer(tokens, embeds, torch.zeros(2), mask)[0]
    assert logits.shape == (2, SIDE**2, CODES)
    for row, prompt in enumerate(PROMPTS):
        text = janus_tokenizer()(TEMPLATE.replace("{}", prompt)).input_ids
        assert text[0] == janus_tokenizer().bos_token_id
        expected = by_hand(model, text, tokens[row])
        assert expected.std() > 0.1
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing_and_everything_else_is_seen(side: str) -> None:
    network = fudoki_pipeline().transformer
    tokens, text = torch.arange(SIDE**2)[None] % CODES, torch.randn(1, 5, 16)
    plain = network(tokens, text)[0]
    pads = (3, 0) if side == "left" else (0, 3)
    padded = torch.nn.functional.pad(text, (0, 0, *pads), value=9.0)
    mask = torch.nn.functional.pad(torch.ones(1, 5), pads)
    torch.testing.assert_close(network(tokens, padded, torch.ones(1), mask)[0], plain, atol=1e-5, rtol=1e-5)
    changed = tokens.clone()
    changed[0, -1] += 1
    assert bool(((network(changed % CODES, text)[0] - plain).abs().amax(-1) > 1e-6).all())  # no causal mask
    assert torch.equal(network(tokens, text, torch.full((1,), 0.7))[0], plain)  # no time


def test_a_cast_leaves_the_positions_alone() -> None:
    """In bfloat16 the frequencies would be rounded, and position 600 would be off by whole radians."""
    network = fudoki_pipeline(torch.bfloat16).transformer
    assert network.dtype == torch.bfloat16
    assert network._rotary[0].inv_freq.dtype == torch.float32
    assert not any("rotary" in name for name in network.state_dict())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_with_and_without_checkpointing(checkpointing: bool) -> None:
    network = fudoki_pipeline().transformer
    if checkpointing:
        network.enable_gradient_checkpointing()
    tokens, text = torch.arange(SIDE**2)[None] % CODES, torch.ones(1, 5, 16)
    network(tokens, text)[0].square().mean().backward()
    grads = {name: p.grad for name, p in network.named_parameters()}
    assert all(grad is not None and bool(grad.abs().max() > 0) for grad in grads.values())
    total = sum(float(grad.double().square().sum()) for grad in grads.values())
    assert total == pytest.approx(_gradient_norm(), rel=1e-9)


@functools.cache
def _gradient_norm() -> float:
    network = fudoki_pipeline().transformer
    network(torch.arange(SIDE**2)[None] % CODES, torch.ones(1, 5, 16))[0].square().mean().backward()
    return sum(float(p.grad.double().square().sum()) for p in network.parameters())


# -- the VQ model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [[1, 2], [1, 1, 2]])
@torch.no_grad()
def test_the_vq_model_is_that_of_diffusers(multiplier: list[int]) -> None:
    """Same pictures, same latents, same tokens: random weights, 1e-5."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 4, "num_embeddings": CODES, "latent_channels": 8, "base_channels": 32}
    theirs = JanusVQVAE(
        JanusVQVAEConfig(**sizes, channel_multiplier=multiplier, num_res_blocks=2, num_patches=SIDE)
    ).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            parameter += 0.2 * torch.randn_like(parameter)
    torch.nn.init.normal_(theirs.quantize.embedding.weight)
    source = open_source(
        {f"model.vqmodel.{name}": tensor for name, tensor in theirs.state_dict().items()}, "generation"
    )
    channels, blocks = vq_sizes(source)
    names = dict(vq_names(channels, blocks))
    source.check(names)
    ours = make(
        "vae", Part("diffusers:VQModel", vq_config(channels, blocks, source), vq_weights(names, source))
    )
    tokens = torch.randint(CODES, (2, SIDE**2))
    codes = ours.quantize.get_codebook_entry(tokens.flatten(), (2, SIDE, SIDE, 4))
    pixels = ours.decode(codes, force_not_quantize=True).sample
    expected = theirs.decode(tokens)
    assert expected.std() > 0.01
    torch.testing.assert_close(pixels, expected, atol=1e-5, rtol=1e-5)
    picture = torch.rand(1, 3, *pixels.shape[2:]) * 2 - 1
    latents = theirs.quant_conv(theirs.encoder(picture))
    torch.testing.assert_close(ours.encode(picture).latents, latents, atol=1e-5, rtol=1e-5)
    assert ours.quantize.embedding.weight.norm(dim=-1) == pytest.approx(torch.ones(CODES))


# -- the policy ----------------------------------------------------------------------------------------------


def wrap(pipe: DiscreteFlowPipeline, **guidance: Any) -> SamplerWrapper:
    wrapper: SamplerWrapper = registry.build(
        "wrapper",
        {"name": "discrete_flow"},
        "model.wrapper",
        pipe=pipe,
        kernel=registry.build("kernel", RATE_MC, "sampler.kernel"),
        deterministic=registry.build("kernel", {"name": "ode"}, "sampler.kernel"),
        num_steps=3,
        call={"max_sequence_length": LENGTH},
        guidance=guidance,
    )
    return wrapper


@pytest.mark.parametrize("guidance", [{}, {"guidance_scale": 6.0}], ids=["plain", "cfg"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tables", [True, False], ids=["tables", "rows"])
def test_replay_equals_the_rollout(
    tables: bool, dtype: str, guidance: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the published adapter; also by rows, as 16384 tokens are."""
    if not tables:
        monkeypatch.setattr(metric_path, "TABLE_TOKENS", CODES - 1)
    pipe = fudoki_pipeline(DTYPES[dtype])
    adapter = AdapterConfig(rank=48, alpha=96.0, targets=TARGETS)
    policy = Policy({"transformer": pipe.transformer}, adapter, dtype=dtype)
    wrapper = wrap(pipe, **guidance)
    trajectory = check_ratio(wrapper, policy, StepPlan((0, 1, 2), (1, 2)))
    assert len(policy.parameters()) == 2 * len(TARGETS) * text_config()["num_hidden_layers"]
    assert reached(policy) == 1
    law = pipe.scheduler.path.law(1 / 3, 2 / 3, "exponential")
    assert type(law) is (metric_path.MetricTables if tables else metric_path.MetricRows)
    assert trajectory.latents.min() >= 0 and trajectory.latents.max() < CODES


# -- the pipeline --------------------------------------------------------------------------------------------


def test_a_saved_pipeline_is_the_same(tmp_path: Path) -> None:
    pipe = fudoki_pipeline()
    pipe.save_pretrained(tmp_path)
    other = loaded(tmp_path)
    assert other.config.prompt_template == TEMPLATE and other.config.pad_unconditional
    first, second = (
        p(
            prompt=PROMPTS,
            num_inference_steps=3,
            guidance_scale=6.0,
            max_sequence_length=LENGTH,
            generator=[torch.Generator().manual_seed(i) for i in range(2)],
            output_type="pt",
        ).images
        for p in (pipe, other)
    )
    assert torch.equal(first, second) and first.shape == (2, 3, IMAGE, IMAGE)


def test_the_template_and_the_padded_unconditional_text() -> None:
    """Guidance is against the prompt with padding in place of all its tokens but the first and the last."""
    pipe = fudoki_pipeline()
    tokenizer, table = pipe.tokenizer, pipe.text_encoder.embed_tokens
    embeds, mask, negative, negative_mask = pipe.encode_prompt(PROMPTS[:1], None, True, LENGTH)
    ids = tokenizer(TEMPLATE.replace("{}", PROMPTS[0])).input_ids
    assert torch.equal(embeds[0, mask[0].bool()], table(torch.tensor(ids)))
    assert torch.equal(mask, negative_mask) and int(mask.sum()) == len(ids)
    blank = [ids[0], *[tokenizer.pad_token_id] * (len(ids) - 2), ids[-1]]
    assert torch.equal(negative[0, mask[0].bool()], table(torch.tensor(blank)))
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<begin_of_image>")
    named, named_mask = pipe.encode_prompt(PROMPTS[:1], "a dog", True, LENGTH)[2:]
    wanted = tokenizer(TEMPLATE.replace("{}", "a dog")).input_ids
    assert torch.equal(named[0, named_mask[0].bool()], table(torch.tensor(wanted)))
    with pytest.raises(UserError, match="max_sequence_length = 8: a prompt has"):
        pipe.encode_prompt(PROMPTS, max_sequence_length=8)


# -- the converter -------------------------------------------------------------------------------------------


def test_the_command_converts(tmp_path: Path) -> None:
    source = write_original(tmp_path / "source", original_names(janus_model()))
    (source / "image_embedding.pt").write_bytes(b"no pickle is ever opened")
    arguments = ["convert", "fudoki", str(source), f"image_size={IMAGE}", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "left out:" in result.output and "vision_model" in result.output
    config = json.loads((tmp_path / "out" / "scheduler" / "scheduler_config.json").read_text())
    wanted = {"path": "metric", "metric_scale": 3.0, "metric_exponent": 0.9, "metric_power": 4.0}
    assert config.items() >= (wanted | {"rule": "exponential", "num_tokens": CODES}).items()
    assert loaded(tmp_path / "out").transformer.config.side == SIDE
    with pytest.raises(UserError, match="does not overwrite"):
        converted(source, tmp_path / "out")


@pytest.mark.parametrize("original", [True, False])
def test_the_names_and_shapes_of_janus_at_its_size(original: bool) -> None:
    """Transformers' Janus of FUDOKI's size, without memory: every tensor of generation has its place."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    llama = LlamaConfig(vocab_size=102400, max_position_embeddings=16384, **sizes)
    with torch.device("meta"):
        model = JanusForConditionalGeneration(JanusConfig(text_config=llama))
    source = open_source(original_names(model) if original else model.state_dict(), "generation")
    text = language_config({"language_config": llama.to_dict()}, source)
    channels, blocks = vq_sizes(source)
    names, vq = dict(backbone_names(24, source)), dict(vq_names(channels, blocks))
    source.check([EMBEDDINGS, *names, *vq])
    assert (channels, blocks) == ([128, 128, 256, 256, 512], 2)
    with torch.device("meta"):
        network, vae = JanusTokenBackbone(text), VQModel(**vq_config(channels, blocks, source))
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    expected = {target: source[name].shape for name, target in names.items()}
    assert shapes == expected | {"end_of_image": torch.Size([2048])}
    assert sum(p.numel() for p in network.parameters()) == 1_275_338_752
    assert vae.state_dict().keys() == set(vq.values())


def test_a_hub_id_is_downloaded_without_its_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_original(tmp_path / "source", original_names(janus_model()))
    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, *allow_patterns))
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    converted(Path("owner/name"), tmp_path / "out")
    assert asked == [("owner/name", "*.safetensors", "*.json")]
    assert loaded(tmp_path / "out").transformer.config.num_tokens == CODES


GATE = "language_model.model.layers.1.mlp.gate_proj.weight"
ATTENTION = "gen_vision_model.decoder.conv_blocks.0.attn.1.q.weight"


@pytest.mark.parametrize("key", [GATE, ATTENTION, "gen_embed.weight", "gen_aligner.layers.2.bias"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    tensors = original_names(janus_model())
    del tensors[key]
    write_original(tmp_path / "source", tensors)
    with pytest.raises(UserError, match=f"missing key.*{key}"):
        converted(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["gen_head.extra.weight", "language_model.model.layers.2.mlp.up_proj.weight"])
def test_an_unexpected_key_is_named(tmp_path: Path, key: str) -> None:
    tensors = original_names(janus_model()) | {key: torch.zeros(2)}
    write_original(tmp_path / "source", tensors)
    with pytest.raises(UserError, match=f"unexpected key.*{key}"):
        converted(tmp_path / "source", tmp_path / "out")


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    tensors = original_names(janus_model())
    tensors[GATE] = torch.zeros(7, 16)
    write_original(tmp_path / "source", tensors)
    with pytest.raises(UserError, match=r"transformer:.*layers\.1\.mlp\.gate_proj"):
        converted(tmp_path / "source", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "source"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=f"{name}: a pickle can run code"):
            converted(source, tmp_path / "out")


def test_other_sources_that_do_not_fit(tmp_path: Path) -> None:
    tensors = original_names(janus_model())
    source = write_original(tmp_path / "source", tensors, shards=2)
    out = tmp_path / "out"

    def refused(message: str, *options: str, where: Path = source) -> None:
        with pytest.raises(UserError, match=message):
            converted(where, out, *options)
        assert not out.exists()

    refused("no such folder, and not a hub id", where=tmp_path / "nowhere" / "at" / "all")
    refused("is a file: give the folder", where=source / "model-0.safetensors")
    refused("has no .*safetensors", where=tmp_path)
    refused(r"image_size = 7: a multiple of 2", "image_size=7")
    refused("unknown key convert.size", "size=3")
    refused("write it as key=value", "size")
    (source / "model-1.safetensors").rename(source / "elsewhere")
    refused("model-1.safetensors is missing")
    (source / "elsewhere").rename(source / "model-1.safetensors")
    (source / "config.json").write_text("{}")
    refused("language_config")
    (source / "config.json").unlink()
    refused("has no config.json")
    (source / "config.json").write_text(json.dumps({"language_config": text_config()}))
    (source / "tokenizer.json").unlink()
    refused("tokenizer.json")
    (source / "model.safetensors.index.json").unlink()
    save_file(load_file(source / "model-0.safetensors"), source / "model-2.safetensors")
    refused("is in several files")
    (source / "model-2.safetensors").write_bytes(b"0123456789")
    refused("is no safetensors file")
    with pytest.raises(UserError, match=r"unknown converter 'fudok' \(did you mean 'fudoki'\?\)"):
        convert("fudok", str(source), [], out, Said())
