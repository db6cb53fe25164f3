"""Held-out evaluation: the deployed pipeline's own pictures, of the same prompts and seeds every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import TINY
from tiny_run import brightness, judged_by, tiny_run, weights
from torch import Tensor

from flowrl.build import Run
from flowrl.errors import UserError
from flowrl.mdp.seeds import derive_seed
from flowrl.reward import RewardSet, Samples, WeightedReward
from flowrl.training.data import Prompt
from flowrl.training.evaluate import Evaluator

PROMPTS = [
    Prompt("a red circle", {"prompt": "a red circle", "tag": "single_object"}),
    Prompt("two blue squares", {"prompt": "two blue squares", "tag": "counting"}),
    Prompt("a green star", {"prompt": "a green star", "tag": "single_object"}),
    Prompt("a cat", {"prompt": "a cat"}),
    Prompt("a dog", {"prompt": "a dog", "tag": "counting"}),
]
NAN = float("nan")


def evaluator(run: Run, *judges: Any, **options: Any) -> Evaluator:
    given = {
        "num_steps": 3,
        "guidance": dict(run.wrapper.guidance),
        "samples_per_prompt": 2,
        "batch_size": 2,
        "seed": 11,
        "grid_prompts": 12,
    }
    rewards = RewardSet([WeightedReward(j.__name__, j, 1.0) for j in judges or (brightness,)])
    prompts = options.pop("prompts", PROMPTS)
    return Evaluator(run.wrapper, prompts, rewards, run.engine, **(given | options))


def by_hand(tiny: str, run: Run, prompt: str, member: int, seed: int = 11, num_steps: int = 3) -> Tensor:
    """What a user of diffusers gets: a pipeline call with the generator of that seed."""
    noise = torch.Generator().manual_seed(derive_seed(seed, "evaluation", prompt, member))
    options = TINY[tiny].call | run.wrapper.guidance
    if "negative_prompt" in options:
        options["negative_prompt"] = [options["negative_prompt"]]
    call = {"prompt": [prompt], "generator": [noise], "num_inference_steps": num_steps, **options}
    with torch.no_grad():
        return run.wrapper.pipe(**call, output_type="pt", return_dict=False)[0]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # a scheduler of diffusers
@pytest.mark.parametrize("tiny", ["sd3_no_t5", "flux", "qwen_image", "sana", "wan"])
@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
def test_it_is_the_pipeline_as_its_users_call_it(tiny: str, cfg: bool) -> None:
    """Bit for bit, one prompt a call, after training has changed the weights."""
    run = judged_by(tiny_run("training.micro_batch_size=2", tiny=tiny, cfg=cfg), brightness)
    run.trainer.run_iteration()
    samples, rows = evaluator(run, batch_size=1, prompts=PROMPTS[:2]).sample()
    assert [(p.text, member) for p, member in rows] == [(p.text, m) for p in PROMPTS[:2] for m in (0, 1)]
    for image, (prompt, member) in zip(samples.images, rows, strict=True):
        mine = by_hand(tiny, run, prompt.text, member)[0]
        if mine.ndim == 4 and len(mine) == 1:  # a clip of one frame is an image
            mine = mine[0]
        assert torch.equal(image, mine.float())


def test_the_same_pictures_each_time_and_others_for_other_weights() -> None:
    run = judged_by(tiny_run("ema={decay: 0.5, warmup: false}"), brightness)
    mine = evaluator(run)
    first, again = mine.evaluate(), mine.evaluate()
    assert torch.equal(first.scores, again.scores) and torch.equal(first.grid, again.grid)
    assert first.metrics == again.metrics
    start = weights(run)
    run.trainer.run_iteration()
    torch.manual_seed(5)
    after = mine.evaluate()
    assert not torch.equal(first.scores, after.scores)
    for name, p in run.policy.parameters().items():
        p.data.copy_(start[name])
    assert torch.equal(mine.evaluate().scores, first.scores)
    assert not torch.equal(evaluator(run, seed=12).evaluate().scores, first.scores)


def test_g16_g25_an_evaluation_leaves_no_trace() -> None:
    """Training with evaluations in between equals training without, bit for bit."""
    found = []
    for evaluates in (False, True):
        run = judged_by(tiny_run("ema={decay: 0.5, warmup: false}"), brightness)
        for _ in range(2):
            if evaluates:
                with run.policy.ema_weights():
                    evaluator(run).evaluate()
            run.trainer.run_iteration()
        assert all(p.dtype == torch.float32 and p.requires_grad for p in run.policy.parameters().values())
        assert run.wrapper.pipe.scheduler is not None and run.policy.ema is not None
        found.append((weights(run), run.policy.ema.shadow))
    for plain, evaluated in zip(*found, strict=True):
        assert all(torch.equal(plain[name], evaluated[name]) for name in plain)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 64])
def test_g31_scores_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    """Neither does their order or number: the last batch is short for 3 and 4."""
    run = tiny_run()
    expected = evaluator(run, batch_size=2).evaluate()
    found = evaluator(run, batch_size=batch_size).evaluate()
    assert found.scores.shape == (10, 1)
    assert torch.allclose(found.scores, expected.scores, atol=1e-5)
    assert torch.allclose(found.grid, expected.grid, atol=1e-5) and found.captions == expected.captions
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-4)


def by_number(samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
    """Known scores: the prompt's place in the file; none for the cat."""
    places = [[p.text for p in PROMPTS].index(prompt) for prompt in prompts]
    return torch.tensor([NAN if place == 3 else float(place) for place in places])


def test_means_and_tags() -> None:
    """The cat has neither a tag nor a score; means are over what has one."""
    run = tiny_run()
    result = evaluator(run, by_number, brightness).evaluate()
    assert result.scores.shape == (10, 2)
    column = result.scores[:, 0]
    assert column[:6].tolist() == [0, 0, 1, 1, 2, 2] and column[6:8].isnan().all()
    metrics = result.metrics
    assert metrics["eval/by_number/mean"] == (0 + 1 + 2 + 4) / 4
    assert metrics["eval/by_number/tag/single_object"] == 1.0
    assert metrics["eval/by_number/tag/counting"] == 2.5
    light = result.scores[:, 1].double()
    assert metrics["eval/brightness/mean"] == pytest.approx(float(light.mean()))
    assert metrics["eval/brightness/tag/counting"] == pytest.approx(float(light[[2, 3, 8, 9]].mean()))
    assert sorted(k for k in metrics if "/tag/" in k) == [
        f"eval/{judge}/tag/{tag}"
        for judge in ("brightness", "by_number")
        for tag in ("counting", "single_object")
    ]


def test_diversity_is_within_prompts_and_between_them_if_each_has_one() -> None:
    run = tiny_run()

    def distances(images: Tensor, pairs: list[tuple[int, int]]) -> float:
        return sum(float((images[a] - images[b]).square().mean().sqrt()) for a, b in pairs) / len(pairs)

    mine = evaluator(run)
    within = distances(mine.sample()[0].images, [(2 * k, 2 * k + 1) for k in range(5)])
    assert mine.evaluate().metrics["eval/diversity"] == pytest.approx(within, rel=1e-5)
    single = evaluator(run, samples_per_prompt=1)
    between = distances(single.sample()[0].images, [(a, b) for a in range(5) for b in range(a)])
    assert single.evaluate().metrics["eval/diversity"] == pytest.approx(between, rel=1e-5)


@pytest.mark.parametrize(("count", "places"), [(1, [0]), (2, [0, 2]), (3, [0, 1, 3]), (9, [0, 1, 2, 3, 4])])
def test_the_grid_is_spread_over_the_file(count: int, places: list[int]) -> None:
    mine = evaluator(tiny_run(), grid_prompts=count)
    result, images = mine.evaluate(), mine.sample()[0].images
    assert result.captions == [PROMPTS[place].text for place in places]
    assert torch.equal(result.grid, images[[2 * place for place in places]])


def test_settings_stand_beside_the_scores() -> None:
    run = tiny_run(cfg=True)
    settings = evaluator(run).settings
    assert settings["pipeline"] == "StableDiffusion3Pipeline"
    assert settings["scheduler"] == type(run.wrapper.pipe.scheduler).__name__
    assert settings["scheduler_shift"] == run.wrapper.pipe.scheduler.config.shift == 3.0
    assert (settings["num_inference_steps"], settings["seed"]) == (3, 11)
    assert settings["guidance"] == run.wrapper.guidance != {}
    assert (settings["prompts"], settings["samples_per_prompt"]) == (5, 2)


# ------------------------------------------------------------------------------------------ from a recipe


def test_a_recipe_decides_the_evaluation() -> None:
    run = tiny_run(
        "evaluation={num_steps: 2, guidance: {guidance_scale: 3.0}, seed: 4, max_prompts: 2}",
        "evaluation.rewards=[{name: jpeg_compressibility, label: size}]",
    )
    mine = run.evaluator
    assert mine is not None and len(mine.prompts) == 2 and mine.judges.names == ("size",)
    samples, rows = mine.sample()
    run.wrapper.guidance = {"guidance_scale": 3.0}
    for image, (prompt, member) in zip(samples.images, rows, strict=True):
        expected = by_hand("sd3_no_t5", run, prompt.text, member, seed=4, num_steps=2)[0]
        assert torch.allclose(image, expected, atol=1e-5)
    plain = tiny_run("evaluation={max_prompts: null}").evaluator
    assert plain is not None and plain.guidance == {"guidance_scale": 1.0} and plain.num_steps == 3
    assert len(plain.prompts) == 240 and plain.judges.names == ("jpeg_compressibility",)


@pytest.mark.parametrize(
    ("guidance", "said"),
    [
        ("{guidence_scale: 3}", r"unknown key evaluation\.guidance\.guidence_scale .*'guidance_scale'"),
        ("{negative_prompt: [a, b]}", r"evaluation\.guidance\.negative_prompt = .*one text"),
    ],
)
def test_wrong_guidance_is_refused_when_the_run_is_built(guidance: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny_run(f"evaluation.guidance={guidance}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.call.height=-3", r"refuses model\.call = \{.*-3.*divisible"),
        ("rewards.0.weight=.inf", r"rewards\.0\.weight = inf: a finite number"),
    ],
)
def test_wrong_values_are_refused_when_the_run_is_built(override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny_run(override)


def test_evaluation_may_skip_layers_by_position_though_training_may_not() -> None:
    options = "{skip_guidance_layers: [1], guidance_scale: 2.0}"
    assert tiny_run(f"evaluation.guidance={options}").evaluator is not None
    with pytest.raises(UserError, match="by their position in the sampler's loop"):
        tiny_run(f"sampler.guidance={options}")
