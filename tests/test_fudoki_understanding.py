"""FUDOKI's answers: its backbone and picture encoder against transformers' Janus, conversion, training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from PIL import Image
from test_fudoki import TARGETS, Said
from test_wrapper import check_ratio, reached
from tiny_janus import IMAGE, janus_model, janus_tokenizer, original_names, text_config, write_original
from torch import Tensor
from transformers import JanusConfig, JanusForConditionalGeneration, LlamaConfig
from typer.testing import CliRunner

from flowrl import convert_janus, registry
from flowrl.build import build_run, pipeline_class
from flowrl.cli import app
from flowrl.config import AdapterConfig, RunConfig, load
from flowrl.errors import UserError
from flowrl.mdp import metric_path
from flowrl.mdp.policy import DTYPES, Policy
from flowrl.mdp.steps import StepPlan
from flowrl.mdp.trajectory import Request
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.pictures import data_uri, padded
from flowrl.pipelines.discrete_text import DiscreteTextPipeline
from flowrl.pipelines.janus_backbone import JanusPictureEncoder, JanusTextBackbone
from flowrl.rewards import option_match
from flowrl.tools.convert import convert
from flowrl.tools.doctor import examine

RECIPE = ROOT / "configs" / "dflow_grpo_fudoki_understanding.yaml"
TEMPLATE = "User: <begin_of_image><image_placeholder><end_of_image>\n{}\n\nAssistant:"
QUESTIONS = ["is the circle red or blue", "what"]
ANSWER = 5
LENGTH = 64
PLAN = StepPlan((0, 1, 2), (1, 2))
KERNEL = {"name": "discrete_metric", "rule": "exponential", "estimator": "joint"}


def converted(source: Path, out: Path, *options: str) -> str:
    console: Any = Said()
    given = ["task=understanding", f"image_size={IMAGE}", f"answer_length={ANSWER}", *options]
    convert("fudoki", str(source), given, out, console)
    return str(console.text)


@pytest.fixture(scope="module", autouse=True)
def _tiny_siglip() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(convert_janus.SIGLIP_HEADS, "siglip_tiny", 2)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, _tiny_siglip: Any) -> dict[str, Path]:
    """Pipelines converted from the same weights, by original names and by those of transformers."""
    root = tmp_path_factory.mktemp("fudoki")
    model = janus_model(tied=False)
    model.save_pretrained(root / "transformers_source")
    janus_tokenizer().save_pretrained(root / "transformers_source")
    write_original(root / "original_source", original_names(model))
    for name in ("transformers", "original"):
        converted(root / f"{name}_source", root / name)
    return {name: root / name for name in ("transformers", "original")}


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> DiscreteTextPipeline:
    pipe = pipeline_class(str(folder)).from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pictures(count: int = 2) -> list[Image.Image]:
    colors = [(200, 30, 30), (20, 60, 220)]
    drawn = [Image.new("RGB", (IMAGE, IMAGE), colors[k % 2]) for k in range(count)]
    for k, picture in enumerate(drawn):
        picture.putpixel((k, 2), (255, 255, 0))
    return drawn


def noisy(rows: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(text_config()["vocab_size"], (rows, ANSWER), generator=generator)


def logits_of(pipe: DiscreteTextPipeline, tokens: Tensor, length: int = LENGTH) -> Tensor:
    ids, mask = pipe.encode_prompt(QUESTIONS, length)
    return pipe._logits(tokens, ids, mask, pipe.encode_image(pictures(), 2))


# -- the networks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["original", "transformers"])
@torch.no_grad()
def test_logits_equal_those_of_transformers(folders: dict[str, Path], names: str) -> None:
    """A padded batch of two against transformers' own forward of each row, unpadded, with a full mask."""
    pipe, model = loaded(folders[names]), janus_model(tied=False)
    assert not torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)
    tokens = noisy()
    logits = logits_of(pipe, tokens)
    assert logits.shape == (2, ANSWER, text_config()["vocab_size"])
    placeholder = model.config.image_token_id
    for row, question in enumerate(QUESTIONS):
        ids = janus_tokenizer()(TEMPLATE.replace("{}", question)).input_ids
        assert ids[0] == janus_tokenizer().bos_token_id
        at = ids.index(placeholder)
        patches = model.config.vision_config.num_image_tokens
        ids = [*ids[:at], *[placeholder] * patches, *ids[at + 1 :], *tokens[row].tolist()]
        values = torch.tensor(pipe.fit_pictures(pictures()[row : row + 1])).permute(0, 3, 1, 2) / 127.5 - 1
        expected = model(
            input_ids=torch.tensor([ids]),
            pixel_values=values,
            attention_mask=torch.zeros(1, 1, len(ids), len(ids)),
            position_ids=torch.arange(len(ids))[None],
            use_cache=False,
        ).logits[0, -ANSWER - 1 : -1]
        assert expected.std() > 0.1
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_both_namings_give_the_same_output(folders: dict[str, Path]) -> None:
    first, second = (loaded(folders[name]) for name in ("original", "transformers"))
    assert torch.equal(logits_of(first, noisy()), logits_of(second, noisy()))
    for name in ("transformer", "image_encoder"):
        ours, theirs = (getattr(pipe, name).state_dict() for pipe in (first, second))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


@torch.no_grad()
def test_padding_changes_nothing_and_everything_else_is_seen(folders: dict[str, Path]) -> None:
    pipe, tokens = loaded(folders["original"]), noisy()
    plain = logits_of(pipe, tokens)
    torch.testing.assert_close(logits_of(pipe, tokens, LENGTH + 30), plain, atol=1e-5, rtol=1e-5)
    ids, mask = pipe.encode_prompt(QUESTIONS, LENGTH)
    features = pipe.encode_image(pictures(), 2)
    assert int(mask[0].sum()) > int(mask[1].sum()) and not mask[:, 0].any() and mask[:, -1].all()
    other = torch.where(mask.bool(), ids, pipe.tokenizer.eos_token_id)  # what stands in the padding
    torch.testing.assert_close(pipe._logits(tokens, other, mask, features), plain, atol=1e-6, rtol=1e-6)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % text_config()["vocab_size"]
    swapped = pipe.encode_image(pictures()[::-1], 2)
    for logits in (
        pipe._logits(changed, ids, mask, features),  # no causal mask
        pipe._logits(tokens, ids, mask, swapped),
        pipe._logits(tokens, ids[:, [*range(LENGTH - 2), LENGTH - 1, LENGTH - 2]], mask, features),
    ):
        assert bool(((logits - plain).abs().amax(-1) > 1e-6).all())


def test_the_picture_and_the_table_are_frozen(folders: dict[str, Path]) -> None:
    """Gradients reach the language model and its head; the metric's table and the picture's side stay."""
    pipe = loaded(folders["original"])
    pipe.transformer.enable_gradient_checkpointing()
    features = pipe.encode_image(pictures(), 2)
    assert features is not None and not features.requires_grad
    ids, mask = pipe.encode_prompt(QUESTIONS, LENGTH)
    pipe._logits(noisy(), ids, mask, features).square().mean().backward()
    grads = {name: p.grad for name, p in pipe.transformer.named_parameters()}
    assert "lm_head.weight" in grads and not any("embed_tokens" in name for name in grads)
    assert all(grad is not None and bool(grad.abs().max() > 0) for grad in grads.values())


# -- the policy ----------------------------------------------------------------------------------------------


def wrap(pipe: Any, length: int = LENGTH, **guidance: Any) -> SamplerWrapper:
    return registry.build(
        "wrapper",
        {"name": "discrete_text"},
        "model.wrapper",
        pipe=pipe,
        kernel=registry.build("kernel", KERNEL, "sampler.kernel"),
        deterministic=registry.build("kernel", {"name": "ode"}, "sampler.kernel"),
        num_steps=3,
        call={"max_sequence_length": length},
        guidance=guidance,
    )


def ask(*questions: str) -> Request:
    records = tuple({"image": data_uri(picture)} for picture in pictures(len(questions)))
    numbers = tuple(range(len(questions)))
    return Request(questions, records, numbers, numbers, numbers)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tables", [True, False], ids=["tables", "rows"])
def test_replay_equals_the_rollout(
    folders: dict[str, Path], tables: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the published adapter; also by rows, as 102400 tokens are."""
    if not tables:
        monkeypatch.setattr(metric_path, "TABLE_TOKENS", 8)
    pipe = loaded(folders["original"], DTYPES[dtype])
    adapter = AdapterConfig(rank=48, alpha=96.0, targets=TARGETS)
    policy = Policy({"transformer": pipe.transformer}, adapter, dtype=dtype)
    trajectory = check_ratio(wrap(pipe), policy, PLAN, ask(*QUESTIONS))
    assert reached(policy) == 1
    assert trajectory.latents is not None and trajectory.latents.shape == (2, ANSWER)
    assert all(probs.shape == (2, ANSWER) for probs in trajectory.token_log_probs.values())


def test_prompt_and_padding_are_no_actions(folders: dict[str, Path]) -> None:
    """The same answer, the same log-probability of its tokens alone, however the question is padded."""
    found = []
    for length in (LENGTH, LENGTH + 20):
        wrapper = wrap(loaded(folders["original"]), length)
        trajectory = wrapper.rollout(ask(*QUESTIONS), PLAN)
        replay = wrapper.replay(trajectory, 1)
        assert replay.transition.event_size == ANSWER
        found.append((trajectory.latents, replay.log_prob))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-5)


def test_a_question_of_200_tokens(folders: dict[str, Path]) -> None:
    pipe = loaded(folders["original"])
    words = " ".join("a" * 200)
    assert len(pipe.tokenizer(words).input_ids) > 200
    policy = Policy({"transformer": pipe.transformer}, AdapterConfig(rank=2, targets=TARGETS))
    check_ratio(wrap(pipe, 300), policy, PLAN, ask(words, "what"))
    with pytest.raises(UserError, match="max_sequence_length = 200: a prompt has"):
        pipe.encode_prompt([words], 200)


def test_the_recipe_trains_and_the_doctor_accepts_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own questions; random answers are never right, so that each is scored by its letters here."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(option_match, "option_score", lambda text, record: float(sum(map(ord, text)) % 97))
    tree: dict[str, Any] = load(RECIPE).model_dump()
    tree["model"] |= {"device": "cpu", "dtype": "fp32", "path": str(folders["original"])}
    tree["model"]["adapter"] |= {"rank": 2, "alpha": 4.0}
    tree["optimizer"]["lr"] = 1e-3
    tree["training"] |= {"prompts_per_iteration": 2, "group_size": 2, "micro_batch_size": 2}
    run = build_run(RunConfig.model_validate(tree), RECIPE)
    diagnosis = examine(run)
    assert not diagnosis.problems and diagnosis.facts["ratio"]["max"] == 0
    before = {name: p.detach().clone() for name, p in run.policy.parameters().items()}
    for _ in range(2):
        assert run.trainer.run_iteration().metrics["optimizer/skipped"] == 0
    assert run.trainer.state.ratio_first_max == 0
    moved = [name for name, p in run.policy.parameters().items() if not torch.equal(p, before[name])]
    assert len(moved) > len(before) / 4


# -- the pipeline --------------------------------------------------------------------------------------------


def test_a_saved_pipeline_is_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    pipe = loaded(folders["transformers"])
    pipe.save_pretrained(tmp_path)
    other = loaded(tmp_path)
    assert other.config.prompt_template == TEMPLATE and other.config.pad_images
    first, second = (
        p(
            prompt=QUESTIONS,
            image=pictures(),
            num_inference_steps=3,
            max_sequence_length=LENGTH,
            generator=[torch.Generator().manual_seed(i) for i in range(2)],
            output_type="pt",
        ).answers
        for p in (pipe, other)
    )
    assert torch.equal(first, second) and first.shape == (2, ANSWER)
    assert all(isinstance(text, str) for text in pipe.decode_tokens(first))
    table = pipe.transformer.get_input_embeddings().weight
    assert torch.equal(pipe.scheduler.path.embeddings, torch.nn.functional.normalize(table, dim=-1))


def test_pictures_are_padded_to_a_square() -> None:
    wide = padded(Image.new("RGB", (20, 10), (255, 0, 0)), 8)
    assert wide.size == (8, 8)
    assert wide.getpixel((0, 0)) == (127, 127, 127) and wide.getpixel((0, 4)) == (255, 0, 0)
    assert padded(Image.new("RGB", (1, 50)), 8).size == (8, 8)


def test_questions_and_pictures_must_fit(folders: dict[str, Path]) -> None:
    pipe = loaded(folders["original"])
    ids, mask = pipe.encode_prompt(["what"], LENGTH)
    with pytest.raises(UserError, match=r"needs 0 token\(s\) <image_placeholder>.*got \[1\]"):
        pipe._logits(noisy(1), ids, mask, None)
    with pytest.raises(UserError, match=r"needs 1 token\(s\) <image_placeholder>.*got \[2\]"):
        pipe("what is <image_placeholder>", image=pictures(1), max_sequence_length=LENGTH)
    with pytest.raises(UserError, match="1 questions need as many pictures, got 0"):
        pipe("what", max_sequence_length=LENGTH)


# -- the converter -------------------------------------------------------------------------------------------


def test_the_command_converts(tmp_path: Path) -> None:
    source = write_original(tmp_path / "source", original_names(janus_model(tied=False)))
    options = ["task=understanding", f"image_size={IMAGE}", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["convert", "fudoki", str(source), *options])
    assert result.exit_code == 0, result.output
    assert "left out:" in result.output and "gen_vision_model" in result.output
    config = json.loads((tmp_path / "out" / "scheduler" / "scheduler_config.json").read_text())
    wanted = {"path": "metric", "metric_scale": 3.0, "metric_exponent": 0.9, "metric_power": 4.0}
    size = text_config()["vocab_size"]
    assert config.items() >= (wanted | {"rule": "exponential", "num_tokens": size}).items()
    assert loaded(tmp_path / "out").config.answer_length == 64


@pytest.mark.parametrize("original", [True, False])
def test_the_names_and_shapes_of_janus_at_its_size(original: bool) -> None:
    """Transformers' Janus of FUDOKI's size, without memory: every tensor of understanding has its place."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    llama = LlamaConfig(vocab_size=102400, max_position_embeddings=16384, **sizes)
    with torch.device("meta"):
        model = JanusForConditionalGeneration(JanusConfig(text_config=llama))
        tensors = original_names(model) if original else model.state_dict()
    source = convert_janus.open_source(tensors, "understanding")
    names = dict(convert_janus.vision_names(source))
    told = {"params": {"model_name": "siglip_large_patch16_384", "select_layer": -1}} if original else {}
    config = convert_janus.vision_config({"vision_config": told}, source)
    text = convert_janus.language_config({"language_config": llama.to_dict()}, source)
    backbone = convert_janus.language_names(24)
    source.check([convert_janus.EMBEDDINGS, convert_janus.HEAD, *backbone, *names])
    with torch.device("meta"):
        encoder, network = JanusPictureEncoder(config), JanusTextBackbone(text)
        given = {target: convert_janus.vision_tensor(name, source).shape for name, target in names.items()}
    assert {name: tensor.shape for name, tensor in encoder.state_dict().items()} == given
    assert network.state_dict().keys() == {*backbone.values(), "embed_tokens.weight", "lm_head.weight"}
    assert (config["image_size"], config["num_attention_heads"], config["depth"]) == (384, 16, 2)


@torch.no_grad()
def test_a_tied_head_is_the_table(tmp_path: Path) -> None:
    model = janus_model()
    model.save_pretrained(tmp_path / "source")
    janus_tokenizer().save_pretrained(tmp_path / "source")
    converted(tmp_path / "source", tmp_path / "out")
    network = loaded(tmp_path / "out").transformer
    assert torch.equal(network.lm_head.weight, model.get_input_embeddings().weight)


TOWER = "vision_model.vision_tower"


@pytest.mark.parametrize(
    "key",
    [
        f"{TOWER}.blocks.0.attn.qkv.weight",
        f"{TOWER}.pos_embed",
        f"{TOWER}.norm.bias",
        "aligner.layers.2.bias",
        "language_model.lm_head.weight",
        "language_model.model.layers.1.mlp.gate_proj.weight",
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    tensors = original_names(janus_model(tied=False))
    del tensors[key]
    write_original(tmp_path / "source", tensors)
    with pytest.raises(UserError, match=f"missing key.*{key}"):
        converted(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", [f"{TOWER}.blocks.0.attn.q_norm.weight", "aligner.extra.bias", "head.weight"])
def test_an_unexpected_key_is_named(tmp_path: Path, key: str) -> None:
    tensors = original_names(janus_model(tied=False)) | {key: torch.zeros(2)}
    write_original(tmp_path / "source", tensors)
    with pytest.raises(UserError, match=f"unexpected key.*{key}"):
        converted(tmp_path / "source", tmp_path / "out")


def test_other_sources_that_do_not_fit(tmp_path: Path) -> None:
    source = write_original(tmp_path / "source", original_names(janus_model(tied=False)))
    config = json.loads((source / "config.json").read_text())

    def refused(message: str, *options: str, **changed: Any) -> None:
        (source / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(UserError, match=message):
            converted(source, tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()

    refused("image_size = 384: the vision model reads 8 pixels", "image_size=384")
    refused(r"convert\.task", "task=other")
    refused("vision_config is missing", vision_config=None)
    refused("model_name = 'vit'", vision_config={"params": {"model_name": "vit"}})
    refused("= -2", vision_config={"params": {"model_name": "siglip_tiny", "select_layer": -2}})
    file = source / "tokenizer.json"
    file.write_text(file.read_text().replace("<image_placeholder>", "<elsewhere>"))
    config_file = source / "tokenizer_config.json"
    config_file.write_text(config_file.read_text().replace("<image_placeholder>", "<elsewhere>"))
    refused("has no <image_placeholder>")
