"""Answers by discrete flows: actions, ratio 1, the deployed law, backbones, rewards, questions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from test_wrapper import check_ratio
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from flowrl import registry
from flowrl.build import build_run, pipeline_class
from flowrl.config import AdapterConfig, load
from flowrl.errors import UserError
from flowrl.mdp.policy import DTYPES, Policy
from flowrl.mdp.steps import StepPlan
from flowrl.mdp.trajectory import Request
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.objective import TrajectoryStep
from flowrl.pictures import data_uri, open_picture
from flowrl.pipelines.discrete_text import DiscreteTextPipeline
from flowrl.pipelines.token_scheduler import DiscreteFlowScheduler
from flowrl.pipelines.token_transformer import TextTransformer
from flowrl.reward import Samples
from flowrl.shapes.detector import read_scene
from flowrl.shapes.questions import COUNTS, KINDS, WORDS, question_records
from flowrl.tools.doctor import examine
from flowrl.training.data import read_prompts
from flowrl.training.meters import text_diversity

RECIPE = ROOT / "configs" / "dflow_grpo_shapes_answers.yaml"
ANSWER = 3
STEPS = 3
PARTS = ("train", "heldout")
ALL = StepPlan((0, 1, 2), (0, 1, 2))
SPECIAL = ("[PAD]", "[UNK]", "[MASK]", "[EOS]")
KERNELS = {
    "mask": {"name": "discrete_mixture"},
    "uniform": {"name": "discrete_mixture", "rule": "exponential", "corrector": 0.3},
    "metric": {"name": "discrete_metric"},
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({w: k for k, w in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "mask", "eos")}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, **names, model_input_names=["input_ids", "attention_mask"]
    )


def answering(backbone: str = "own", path: str = "mask", dtype: torch.dtype = torch.float32) -> Any:
    """Tiny random pipelines: our transformer with pictures, or a masked language model of transformers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reader = tokenizer()
        size = len(reader)
        mask = reader.mask_token_id if path == "mask" else None
        scheduler = DiscreteFlowScheduler(num_tokens=size, path=path, mask_token_id=mask, metric_power=1.0)
        if backbone == "own":
            network: Any = TextTransformer(
                num_states=size, side=4, patch_width=48, width=16, num_layers=2, num_heads=2
            )
        else:
            network = BertForMaskedLM(
                BertConfig(
                    vocab_size=size,
                    hidden_size=16,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    intermediate_size=32,
                    max_position_embeddings=32,
                )
            )
        if path == "metric" and backbone == "own":
            scheduler.set_embeddings(network.tokens.weight)
        pipe = DiscreteTextPipeline(
            tokenizer=reader,
            transformer=network,
            scheduler=scheduler,
            image_size=16 if backbone == "own" else None,
            patch_size=4,
            answer_length=ANSWER,
        )
        pipe.transformer.eval()
        return pipe.to(dtype=dtype)


def wrap(pipe: Any, kernel: dict[str, Any], **guidance: Any) -> SamplerWrapper:
    return registry.build(
        "wrapper",
        {"name": "discrete_text"},
        "model.wrapper",
        pipe=pipe,
        kernel=registry.build("kernel", kernel, "sampler.kernel"),
        deterministic=registry.build("kernel", {"name": "ode"}, "sampler.kernel"),
        num_steps=STEPS,
        call={},
        guidance=guidance,
    )


def ask(*seeds: int) -> Request:
    records = question_records(4, 0, size=16)
    chosen = [records[seed % 4] for seed in seeds]
    return Request(
        tuple(r["prompt"] for r in chosen), tuple(chosen), tuple(seeds), tuple(seeds), tuple(seeds)
    )


def step_of(wrapper: SamplerWrapper, rows: Request, index: int = 0) -> TrajectoryStep:
    trajectory = wrapper.rollout(rows, ALL)
    replay = wrapper.replay(trajectory, index)
    return TrajectoryStep(
        index=index,
        sigma=trajectory.sigmas[index],
        sigma_next=trajectory.sigmas[index + 1],
        transition=replay.transition,
        reference=None,
        log_prob=replay.log_prob,
        old_log_prob=trajectory.log_probs[index],
        action=trajectory.action(index),
        noise=replay.noise,
        old_projection=None,
        advantages=torch.tensor([1.0, -0.5][: len(rows)]),
        valid=torch.ones(len(rows), dtype=torch.bool),
        old_token_log_probs=trajectory.token_log_probs[index],
    )


@pytest.mark.parametrize("backbone", ["own", "bert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("path", KERNELS)
def test_replay_equals_the_rollout(path: str, dtype: str, backbone: str) -> None:
    pipe = answering(backbone, path, DTYPES[dtype])
    policy = Policy({"transformer": pipe.transformer}, AdapterConfig(kind="full"), dtype=dtype)
    trajectory = check_ratio(wrap(pipe, KERNELS[path], temperature=0.8), policy, ALL, ask(0, 1))
    assert trajectory.latents is not None and trajectory.latents.shape == (2, ANSWER)
    assert all(probs.shape == (2, ANSWER) for probs in trajectory.token_log_probs.values())
    assert trajectory.latents.max() < len(pipe.tokenizer)
    if path == "mask":
        assert not bool((trajectory.latents == pipe.tokenizer.mask_token_id).any())


@pytest.mark.parametrize("average", ["all", "changeable"])
def test_the_question_and_its_padding_are_no_actions(average: str) -> None:
    """G34: however long questions are padded, the loss, its denominator and the gradient are the same."""
    found = []
    for length in (7, 12):
        pipe = answering()
        wrapper = wrap(pipe, KERNELS["mask"])
        wrapper.call["max_sequence_length"] = length
        step = step_of(wrapper, ask(0, 1), index=1)
        loss, metrics = registry.build("objective", {"name": "dflow_grpo", "average": average}, "o")(step)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in pipe.transformer.parameters() if p.grad is not None])
        found.append((loss.detach(), metrics["positions"], gradient, step.action))
        assert step.log_prob.shape == (2,) and step.transition.event_size == ANSWER
    (loss, positions, gradient, action), (same, padded, other, again) = found
    assert torch.equal(action, again) and positions == padded <= ANSWER
    assert torch.allclose(loss, same, atol=1e-12) and float(gradient.abs().max()) > 0
    assert torch.allclose(gradient, other, atol=1e-6 * float(gradient.abs().max()))


def test_known_tokens_of_an_answer_have_no_gradient() -> None:
    """On a masked path the logits of tokens that are known change neither the loss nor its gradient."""
    pipe = answering()
    wrapper = wrap(pipe, KERNELS["mask"])
    trajectory = wrapper.rollout(ask(0, 1, 2, 3), ALL)
    state = trajectory.states[2]
    known = state != pipe.tokenizer.mask_token_id
    assert bool(known.any()) and not bool(known.all())
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, ANSWER, len(pipe.tokenizer), generator=generator, requires_grad=True)
    other = (logits + known[..., None] * torch.randn(logits.shape, generator=generator)).detach()
    levels = trajectory.sigmas[2:4]
    first = wrapper.transition(logits, state, *levels).log_prob(trajectory.action(2))
    second = wrapper.transition(other, state, *levels).log_prob(trajectory.action(2))
    assert torch.equal(first.detach(), second)
    first.sum().backward()
    assert logits.grad is not None and float(logits.grad[known].abs().max()) == 0
    assert float(logits.grad[~known].abs().max()) > 0


def test_the_rollout_has_the_law_of_the_deployed_sampler() -> None:
    """Frequencies of whole answers: of the seam, and of the pipeline with its own scheduler."""
    pipe = answering()
    torch.nn.init.normal_(pipe.transformer.head.weight, std=0.5)
    record = ask(0)
    rows = 600
    many = Request(
        record.prompts * rows, record.metadata * rows, (0,) * rows, tuple(range(rows)), tuple(range(rows))
    )
    seam = wrap(pipe, KERNELS["mask"]).rollout(many, StepPlan((0, 1, 2), ())).latents
    generators = [torch.Generator().manual_seed(row) for row in range(rows)]
    own = pipe(
        list(many.prompts),
        image=[r["image"] for r in many.metadata],
        num_inference_steps=STEPS,
        generator=generators,
        output_type="pt",
    ).answers
    for position in range(ANSWER):
        counts = [torch.bincount(t[:, position], minlength=len(pipe.tokenizer)).double() for t in (seam, own)]
        expected = ((counts[0] + counts[1]) / 2).clamp(min=1)
        chi2 = float(((counts[0] - counts[1]).square() / (2 * expected)).sum())
        degrees = int(((counts[0] + counts[1]) > 0).sum()) - 1
        assert chi2 < degrees + 4 * (2 * degrees) ** 0.5, (position, chi2, degrees)


def test_the_picture_and_the_question_matter() -> None:
    wrapper = wrap(answering(), KERNELS["mask"])
    rows = ask(0)
    base = wrapper.predict(rows, torch.full((1, ANSWER), 2), 1.0)
    record = {**rows.metadata[0], "image": data_uri(Image.new("RGB", (16, 16), (200, 10, 10)))}
    repainted = Request(rows.prompts, (record,), (0,), (0,), (0,))
    asked = Request(("how many squares are there",), rows.metadata, (0,), (0,), (0,))
    for other in (repainted, asked):
        assert not torch.allclose(base, wrapper.predict(other, torch.full((1, ANSWER), 2), 1.0))


def test_saved_loaded_decoded(tmp_path: Path) -> None:
    pipe = answering()
    pipe.save_pretrained(tmp_path)
    loaded = pipeline_class(str(tmp_path)).from_pretrained(tmp_path)
    assert type(loaded) is DiscreteTextPipeline and loaded.image_encoder is None
    records = question_records(2, 5)
    arguments = {"prompt": [r["prompt"] for r in records], "image": [r["image"] for r in records]}
    answers = [
        p(**arguments, generator=[torch.Generator().manual_seed(i) for i in range(2)]).answers
        for p in (pipe, loaded)
    ]
    assert answers[0] == answers[1] and all(isinstance(text, str) for text in answers[0])
    reader = pipe.tokenizer
    red, end, pad = reader.convert_tokens_to_ids(["red", "[EOS]", "[PAD]"])
    assert pipe.decode_tokens(torch.tensor([[red, end, red], [red, red, pad], [end, red, red]])) == [
        "red",
        "red red",
        "",
    ]


def test_clear_refusals(tmp_path: Path) -> None:
    pipe, records = answering(), question_records(1, 0)
    question = [records[0]["prompt"]]
    with pytest.raises(UserError, match="1 questions need as many pictures, got 0"):
        pipe(question)
    with pytest.raises(UserError, match="answers without pictures"):
        answering("bert")(question, image=[records[0]["image"]])
    with pytest.raises(UserError, match="max_sequence_length = 2: a prompt has"):
        pipe(question, image=[records[0]["image"]], max_sequence_length=2)
    with pytest.raises(UserError, match="reads text only"):
        DiscreteTextPipeline(tokenizer(), answering("bert").transformer, pipe.scheduler, image_size=16)
    wrapper = wrap(pipe, KERNELS["mask"])
    with pytest.raises(UserError, match="has no `image`"):
        wrapper.rollout(Request(("what",), ({},), (0,), (0,), (0,)), ALL)
    for source in ("missing.png", "data:image/png;base64,@@", "data:image/png;base64,AAAA", "data:x", 3):
        with pytest.raises(UserError, match="image = "):
            open_picture(source)
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"prompt": "what", "image": "missing.png"}) + "\n")
    with pytest.raises(UserError, match=r"data\.train: .* line 1: image = .*missing\.png"):
        read_prompts(file, "data.train")
    Image.new("RGB", (4, 4), (255, 0, 0)).save(tmp_path / "missing.png")
    (prompt,) = read_prompts(file, "data.train")
    assert open_picture(prompt.metadata["image"]).getpixel((0, 0)) == (255, 0, 0)


# -- rewards -----------------------------------------------------------------------------------------------


def scores(name: str, texts: list[str], records: list[dict[str, Any]]) -> list[float]:
    reward = registry.build("reward", {"name": name}, "rewards.0")
    samples = Samples(torch.zeros(len(texts), 3, 1, 1), texts=tuple(texts))
    return reward(samples, ["?"] * len(texts), records).tolist()


def test_exact_match_by_hand() -> None:
    texts = ["red circle", "The  Red, circle!", "red", "circle red", "", "two"]
    right = {"answer": "a red circle"}
    assert scores("exact_match", texts, [right] * 5 + [{"answer": ["2", "two"]}]) == [1, 1, 0, 0, 0, 1]
    for bad in ({}, {"answer": 3}, {"answer": []}, {"answer": ""}):
        with pytest.raises(UserError, match=r"exact_match.*answer"):
            scores("exact_match", ["red"], [bad])
    with pytest.raises(UserError, match="scores texts"):
        registry.build("reward", {"name": "exact_match"}, "r")(
            Samples(torch.zeros(1, 3, 4, 4)), ["?"], [right]
        )


def test_option_match_by_hand() -> None:
    record = {"answer": "red", "options": ["red", "blue", "dark red"]}
    cases = {"red": 1, "it is red.": 1, "red or blue": 0, "blue": 0, "dark red": 0, "": 0, "reddish": 0,
             "A": 1, "(a)": 1, "a. red": 1, "B": 0, "c)": 0, "a blue one": 0, "z": 0}  # fmt: skip
    assert scores("option_match", list(cases), [record] * len(cases)) == list(map(float, cases.values()))
    assert (
        scores("option_match", ["red"], [{"answer": "red"}])[0]
        != scores("option_match", ["red"], [record])[0]
    )
    with pytest.raises(UserError, match="none of the options"):
        scores("option_match", ["red"], [{"answer": "green", "options": ["red"]}])


def test_text_diversity() -> None:
    groups = torch.tensor([0, 0, 0, 1, 1])
    assert text_diversity(["a", "a", "b", "c", "c"], groups) == pytest.approx((2 / 3 + 0) / 2)


# -- questions ---------------------------------------------------------------------------------------------


def test_questions_have_the_answer_that_the_picture_shows() -> None:
    """Answers against what a detector finds in the picture, which knows nothing of how it was drawn."""
    records = question_records(300, 7)
    assert {r["tag"] for r in records} == set(KINDS)
    for record in records:
        found = read_scene(np.asarray(open_picture(record["image"]))).objects
        words, answer = record["prompt"].split(), record["answer"]
        assert set(words) | set(answer.split()) <= set(WORDS)
        if record["tag"] == "count":
            shape = words[2][:-1]
            assert answer == COUNTS[sum(item.shape == shape for item in found)], record["prompt"]
        elif record["tag"] in ("color", "choice"):
            shape = words[-1] if record["tag"] == "color" else words[2]
            assert [item.color for item in found if item.shape == shape] == [answer]
            assert answer in record.get("options", [answer])
        elif record["tag"] == "shape":
            assert [item.shape for item in found if item.color == words[-1]] == [answer]
        elif record["tag"] == "object":
            assert answer in {f"{item.color} {item.shape}" for item in found}
            assert words[-1] not in answer
        else:
            at = {item.shape: item for item in found}
            a, b = at[words[2]], at[words[-1]]
            way = " ".join(words[3:-2])
            gap = {"left of": b.x - a.x, "right of": a.x - b.x, "above": b.y - a.y, "below": a.y - b.y}[way]
            assert (answer == "yes") == (gap > 0), record["prompt"]


def test_the_files_are_those_of_the_script(tmp_path: Path) -> None:
    script = ROOT / "assets" / "shapes-answer" / "pretrain.py"
    subprocess.run([sys.executable, script, "--questions", tmp_path], check=True)
    texts = []
    for name in (f"shapes_{kind}_{part}.jsonl" for kind in ("questions", "choices") for part in PARTS):
        assert (tmp_path / name).read_bytes() == (ROOT / "assets" / "prompts" / name).read_bytes()
        texts.append((tmp_path / name).read_text().splitlines())
    assert not set(texts[0]) & set(texts[1])
    assert all("options" in json.loads(line) for line in (*texts[2], *texts[3]))


def test_the_asset_answers_and_a_run_trains() -> None:
    """Far above chance; two iterations of the recipe start at ratio 1 and move the weights."""
    config = load(
        RECIPE,
        [
            "training.prompts_per_iteration=4",
            "training.micro_batch_size=16",
            "evaluation.max_prompts=60",
            "evaluation.samples_per_prompt=2",
        ],
    )
    run = build_run(config, RECIPE)
    diagnosis = examine(run)
    assert not diagnosis.problems and diagnosis.facts["ratio"]["max"] == 0
    assert diagnosis.facts["rewards"]["exact_match"]["empty"] == 0
    assert run.evaluator is not None
    before = run.evaluator.evaluate()
    assert before.metrics["eval/exact_match/mean"] > 0.4
    assert 0 < before.metrics["eval/diversity"] < 1 and "eval/brightness" not in before.metrics
    assert len(before.captions) == len(before.grid) and ": " in before.captions[0]
    weights = {name: p.detach().clone() for name, p in run.policy.parameters().items()}
    for _ in range(2):
        assert run.trainer.run_iteration().metrics["optimizer/skipped"] == 0
    assert run.trainer.state.ratio_first_max == 0
    moved = [name for name, p in run.policy.parameters().items() if not torch.equal(p, weights[name])]
    assert len(moved) > 0.9 * len(weights)
