"""Discrete flow pipelines on the seam: ratio 1, the deployed law, saving and loading, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_wrapper import check_ratio, reached, request
from tiny_tokens import CODES, KERNELS, PATHS, SIDE, token_pipeline, wrap_tokens

from flowrl.build import build_run, pipeline_class
from flowrl.config import AdapterConfig, load
from flowrl.errors import UserError
from flowrl.mdp.policy import DTYPES, Policy
from flowrl.mdp.steps import StepPlan
from flowrl.mdp.token_logits import reshape_logits
from flowrl.mdp.token_paths import MixturePath
from flowrl.pipelines.discrete_flow import DiscreteFlowPipeline
from flowrl.tools.doctor import examine

ROOT = Path(__file__).parent.parent
ALL = StepPlan((0, 1, 2), (0, 1, 2))
PROMPTS = ["a photo of a red circle", "a cat"]


def policy_of(pipe: DiscreteFlowPipeline, dtype: str = "fp32", kind: str = "full") -> Policy:
    adapter = AdapterConfig(kind="full") if kind == "full" else AdapterConfig(rank=2)
    return Policy({"transformer": pipe.transformer}, adapter, dtype=dtype)


@pytest.mark.parametrize("guidance", [{}, {"guidance_scale": 3.0, "temperature": 0.7}], ids=["plain", "cfg"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("path", "kernel"), KERNELS)
def test_replay_equals_the_rollout(
    path: str, kernel: dict[str, Any], dtype: str, guidance: dict[str, float]
) -> None:
    pipe = token_pipeline(path, DTYPES[dtype])
    policy = policy_of(pipe, dtype, "full" if dtype == "fp32" else "lora")
    wrapper = wrap_tokens(pipe, kernel, **guidance)
    # At t = 0 the authors' rate of a metric path is 0: a forced stay, whose gradient would be noise.
    stays = path == "metric" and kernel.get("rule") == "exponential"
    stds = wrapper.stds(wrapper.schedule())
    assert (stds[0] == 0) == stays and all(std > 0 for std in stds[1:])
    plan = StepPlan(ALL.stochastic, (1, 2)) if stays else ALL
    trajectory = check_ratio(wrapper, policy, plan)
    assert reached(policy) > 0.9
    assert trajectory.latents is not None and trajectory.latents.dtype == torch.long
    assert trajectory.latents.min() >= 0 and trajectory.latents.max() < CODES  # no mask is left
    pixels = wrapper.decode(trajectory).images
    assert torch.equal(pixels, pipe.decode_tokens(trajectory.latents).float())


@pytest.mark.parametrize("path", PATHS)
def test_every_row_has_its_own_noise(path: str) -> None:
    """The same row alone and in a batch, and another member of the group."""
    kernel = {"name": "discrete_metric" if path == "metric" else "discrete_mixture"}
    wrapper = wrap_tokens(token_pipeline(path), kernel)
    both, alone = wrapper.rollout(request(0, 1), ALL), wrapper.rollout(request(1), ALL)
    assert torch.equal(both.latents[1:], alone.latents)
    assert not torch.equal(both.latents[0], both.latents[1])


def test_steps_outside_the_window_follow_the_initial_noise() -> None:
    """Members that share their initial noise share the steps that are not explored."""
    wrapper = wrap_tokens(token_pipeline("uniform"), {"name": "discrete_mixture"})
    shared = request(0, 0)
    shared = type(shared)(shared.prompts, shared.metadata, (0, 0), (7, 7), (1, 2))
    same = wrapper.rollout(shared, StepPlan((), ()))
    assert torch.equal(same.latents[0], same.latents[1])
    late = wrapper.rollout(shared, StepPlan((2,), (2,)))
    assert torch.equal(late.states[2][0], late.states[2][1])
    assert not torch.equal(late.latents[0], late.latents[1])


@pytest.mark.parametrize(("path", "kernel"), [KERNELS[0], KERNELS[4], KERNELS[6]])
def test_the_rollout_has_the_law_of_the_deployed_sampler(path: str, kernel: dict[str, Any]) -> None:
    """Frequencies of the tokens of many samples: of the seam, and of the pipeline with its own scheduler."""
    pipe = token_pipeline(path)
    pipe.scheduler.register_to_config(rule=kernel.get("rule", "integrated"))
    rows = 400
    many = request(*(0 for _ in range(rows)))
    many = type(many)(many.prompts, many.metadata, many.groups, tuple(range(rows)), tuple(range(rows)))
    wrapper = wrap_tokens(pipe, kernel, num_steps=2)
    seam = wrapper.rollout(many, StepPlan((0, 1), ())).latents
    generators = [torch.Generator().manual_seed(row) for row in range(rows)]
    own = pipe(
        prompt=list(many.prompts), num_inference_steps=2, generator=generators, output_type="latent"
    ).images
    counts = [torch.bincount(tokens.flatten(), minlength=CODES).double() for tokens in (seam, own)]
    total = rows * SIDE**2
    expected = (counts[0] + counts[1]) / 2
    chi2 = float(((counts[0] - counts[1]).square() / (2 * expected.clamp(min=1))).sum())
    # Tokens of one sample are not independent: a loose bound on a statistic of about CODES - 1.
    assert chi2 < 6 * CODES, (chi2, counts, total)


def test_a_saved_pipeline_is_the_same(tmp_path: Path) -> None:
    pipe = token_pipeline("metric")
    pipe.save_pretrained(tmp_path)
    loaded = pipeline_class(str(tmp_path)).from_pretrained(tmp_path)
    assert type(loaded) is DiscreteFlowPipeline
    loaded.set_progress_bar_config(disable=True)
    arguments = {"prompt": PROMPTS, "num_inference_steps": 3, "output_type": "pt", "return_dict": False}
    first, second = (
        p(**arguments, generator=[torch.Generator().manual_seed(i) for i in range(2)])[0]
        for p in (pipe, loaded)
    )
    assert torch.equal(first, second) and first.shape == (2, 3, 8, 8)
    assert 0 <= float(first.min()) and float(first.max()) <= 1


@pytest.mark.parametrize("option", [{"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_what_has_no_probability_is_refused(option: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(option))):
        wrap_tokens(token_pipeline(), {"name": "discrete_mixture"}, **option)


def test_kernels_of_another_kind_are_refused() -> None:
    with pytest.raises(UserError, match="flow kernel cannot drive the tokens"):
        wrap_tokens(token_pipeline(), {"name": "flow_sde"})
    wrapper = wrap_tokens(token_pipeline("metric"), {"name": "discrete_mixture"})
    with pytest.raises(UserError, match="use discrete_metric"):
        wrapper.stds(wrapper.schedule())


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": "abc"},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 2.0},
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"{next(iter(options))} = .*: must be"):
        reshape_logits(torch.zeros(1, CODES), **options)


def test_reshaped_logits() -> None:
    """Against definitions: softmax(logits / T); the k likeliest; the smallest set that holds the mass."""
    logits = torch.randn(5, CODES, generator=torch.Generator().manual_seed(0))
    assert torch.equal(reshape_logits(logits), logits)
    assert torch.equal(reshape_logits(logits, temperature=0.5), logits / 0.5)
    greedy = reshape_logits(logits, temperature=0.0).softmax(-1)
    assert torch.equal(greedy, torch.nn.functional.one_hot(logits.argmax(-1), CODES).float())
    kept = torch.isfinite(reshape_logits(logits, top_k=3))
    assert bool((kept.sum(-1) == 3).all())
    for row, probs in zip(reshape_logits(logits, top_p=0.6), logits.softmax(-1), strict=True):
        ordered = sorted(range(CODES), key=lambda i: -float(probs[i]))
        mass, chosen = 0.0, set()
        for token in ordered:
            if mass >= 0.6:
                break
            chosen.add(token)
            mass += float(probs[token])
        assert {i for i in range(CODES) if torch.isfinite(row[i])} == chosen


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.9}])
def test_the_mask_takes_no_place_among_the_likeliest(options: dict[str, Any]) -> None:
    """A network may give the mask, which is no data, its largest logit."""
    path = MixturePath(6, "mask", mask_id=5)
    logits = torch.tensor([[[0.0, 0.0, 1.0, 0.0, 0.0, 9.0]]])
    cut = reshape_logits(logits, **options, never=path.mask_id)
    posterior = path.log_posterior(cut, torch.full((1, 1), 5)).exp()
    assert posterior.isfinite().all() and float(posterior.sum()) == pytest.approx(1.0)
    assert int(posterior.argmax()) == 2 and float(posterior[..., 5]) == 0.0
    assert torch.equal(cut[..., :5], reshape_logits(logits[..., :5], **options))


@pytest.mark.parametrize("objective", [{"name": "dflow_grpo", "kl_coef": 0.01}, {"name": "grpo"}])
@pytest.mark.parametrize(("path", "kernel"), [KERNELS[0], KERNELS[2], KERNELS[6], KERNELS[8]])
def test_a_run_trains(path: str, kernel: dict[str, Any], objective: dict[str, Any]) -> None:
    """Doctor finds nothing, the first update starts at ratio 1, weights move, evaluation goes on."""
    recipe = ROOT / "configs" / f"dflow_grpo_shapes_{'metric' if path == 'metric' else 'masked'}.yaml"
    config = load(
        recipe,
        [
            f"sampler.kernel={kernel}",
            f"objective={objective}",
            "rewards=[{name: jpeg_compressibility}]",
            "evaluation.rewards=[]",
            "evaluation.max_prompts=2",
            "evaluation.samples_per_prompt=2",
            "training.prompts_per_iteration=2",
            "training.group_size=4",
            "training.micro_batch_size=4",
            "training.updates_per_pass=1",
            "sampler.num_steps=3",
        ],
    )
    run = build_run(config, recipe, pipe=token_pipeline(path))
    diagnosis = examine(run)
    assert not diagnosis.problems and diagnosis.facts["ratio"]["max"] == 0
    before = {name: p.detach().clone() for name, p in run.policy.parameters().items()}
    for _ in range(2):
        assert run.trainer.run_iteration().metrics["optimizer/skipped"] == 0
    assert run.trainer.state.ratio_first_max == 0
    moved = [name for name, p in run.policy.parameters().items() if not torch.equal(p, before[name])]
    assert len(moved) > len(before) / 2
    assert run.evaluator is not None and run.evaluator.evaluate().scores.shape == (4, 1)
