"""The baselines diffu_grpo and token_dpo: gradients by hand, pairs, invalid rows, whole runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_discrete_flow import ROOT
from tiny_tokens import token_pipeline
from torch import Tensor

from flowrl import registry
from flowrl.build import build_run
from flowrl.config import load
from flowrl.errors import UserError
from flowrl.mdp.token_paths import MixturePath
from flowrl.objective import ForwardStep
from flowrl.objectives.token_dpo import preferred_pairs

V, L, B = 5, 3, 4
PATH = MixturePath(V, "mask")
GENERATOR = torch.Generator().manual_seed(0)
CLEAN = torch.randint(V, (B, L), generator=GENERATOR)
LOGITS = torch.randn(B, L, V, generator=GENERATOR, dtype=torch.float64)
OTHER = LOGITS + 0.1 * torch.randn(B, L, V, generator=GENERATOR, dtype=torch.float64)
SEED = 4  # its first draw of t is near the middle
A = torch.tensor([1.0, -0.5, 2.0, -1.5])


def unit(
    logits: Tensor,
    old: Tensor = LOGITS,
    reference: Tensor = LOGITS,
    advantages: Tensor = A,
    valid: Tensor | None = None,
    seed: int = SEED,
) -> ForwardStep:
    """A unit of a network that says the same of every state: logits in float32 on the way, as in a run."""
    draws = torch.Generator().manual_seed(seed)

    def noised(tokens: Tensor, sigma: float) -> Tensor:
        return PATH.noised(tokens, torch.full((len(tokens),), 1 - sigma), draws)

    return ForwardStep(
        latents=CLEAN,
        predict=lambda x, sigma: PATH.log_posterior(logits, x),
        predict_old=lambda x, sigma: PATH.log_posterior(old, x),
        predict_reference=lambda x, sigma: PATH.log_posterior(reference, x),
        sigmas=(1.0, 0.5),
        generator=draws,
        advantages=advantages,
        valid=torch.ones(B, dtype=torch.bool) if valid is None else valid,
        groups=(0, 0, 1, 1),
        noised=noised,
    )


def build(name: str, **options: Any) -> Any:
    return registry.build("objective", {"name": name, **options}, "objective")


def log_likelihood(logits: Tensor) -> Tensor:
    """Log p(x1) position by position, (B, L)."""
    return logits.log_softmax(-1).gather(-1, CLEAN[..., None])[..., 0]


def test_diffu_grpo_is_the_policy_gradient_at_ratio_one() -> None:
    logits = LOGITS.clone().requires_grad_()
    loss, metrics = build("diffu_grpo")(unit(logits))
    (found,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(-(A * log_likelihood(logits).mean(1)).mean(), logits)
    assert torch.allclose(found, expected, atol=1e-6)
    assert metrics["log_ratio_max"] == 0 and metrics["ratio_mean"] == 1


def test_diffu_grpo_clips_as_ppo() -> None:
    logits = OTHER.clone().requires_grad_()
    loss, metrics = build("diffu_grpo", clip_low=1e-3, clip_high=1e-3)(unit(logits))
    ratio = (log_likelihood(OTHER) - log_likelihood(LOGITS)).mean(1).exp()
    rows = [
        max(-a * r, -a * min(max(r, 0.999), 1.001)) for a, r in zip(A.tolist(), ratio.tolist(), strict=True)
    ]
    assert float(loss) == pytest.approx(sum(rows) / B, abs=1e-6)
    assert metrics["clip_frac_low"] == float((ratio < 0.999).double().mean())
    (gradient,) = torch.autograd.grad(loss, logits)
    stopped = [(a > 0 and r > 1.001) or (a < 0 and r < 0.999) for a, r in zip(A, ratio, strict=True)]
    assert [bool((g == 0).all()) for g in gradient] == stopped


def test_diffu_grpo_adds_the_exact_kl() -> None:
    loss, metrics = build("diffu_grpo", kl_coef=0.5)(unit(OTHER, old=OTHER, reference=LOGITS))
    p, q = OTHER.softmax(-1), LOGITS.softmax(-1)
    kl = float((p * (p / q).log()).sum(-1).mean())
    assert metrics["kl"] == pytest.approx(kl, rel=1e-4)
    assert float(loss) == pytest.approx(float(-A.mean()) + 0.5 * kl, abs=1e-5)


def test_token_dpo_at_the_reference() -> None:
    """The loss is log 2 and the gradient -(beta / 2) of the margin's, over positions that are masked."""
    logits = LOGITS.clone().requires_grad_()
    loss, metrics = build("token_dpo", beta=4.0)(unit(logits))
    assert float(loss) == pytest.approx(math.log(2), abs=1e-6) and metrics["pairs"] == 2
    (found,) = torch.autograd.grad(loss, logits)
    draws = torch.Generator().manual_seed(SEED)
    t = float(torch.rand((), generator=draws, dtype=torch.float64))
    noisy = PATH.noised(CLEAN, torch.full((B,), t), draws)
    masked = (noisy == V).double()
    assert 0 < masked.sum() < B * L
    scores = (masked * log_likelihood(logits)).sum(1) / masked.sum(1).clamp(min=1)
    margin = ((scores[0] - scores[1]) + (scores[2] - scores[3])) / 2
    (expected,) = torch.autograd.grad(-(4.0 / 2) * margin, logits)
    assert torch.allclose(found, expected, atol=1e-6)


def test_token_dpo_away_from_the_reference() -> None:
    loss, metrics = build("token_dpo", beta=4.0)(unit(OTHER))
    assert float(loss) == pytest.approx(
        sum(math.log1p(math.exp(-4.0 * m)) for m in margins(OTHER)) / 2, abs=1e-5
    )
    assert metrics["margin"] == pytest.approx(sum(margins(OTHER)) / 2, abs=1e-6)


def margins(logits: Tensor) -> list[float]:
    draws = torch.Generator().manual_seed(SEED)
    t = float(torch.rand((), generator=draws, dtype=torch.float64))
    masked = (PATH.noised(CLEAN, torch.full((B,), t), draws) == V).double()
    gain = masked * (log_likelihood(logits) - log_likelihood(LOGITS))
    scores = gain.sum(1) / masked.sum(1).clamp(min=1)
    return [float(scores[0] - scores[1]), float(scores[2] - scores[3])]


def test_pairs() -> None:
    yes = torch.ones(4, dtype=torch.bool)
    assert preferred_pairs((0, 0, 1, 1), A, yes) == [(0, 1), (2, 3)]
    assert preferred_pairs((0, 0, 0, 0), A, yes) == [(2, 3)]
    assert preferred_pairs((0, 0, 1, 1), torch.tensor([1.0, 1.0, 0.0, 2.0]), yes) == [(3, 2)]
    assert preferred_pairs((0, 0, 0, 1), A, torch.tensor([True, True, False, True])) == [(0, 1)]


@pytest.mark.parametrize("name", ["diffu_grpo", "token_dpo"])
def test_invalid_rows_leave_no_trace(name: str) -> None:
    valid = torch.tensor([True, True, False, False])
    bad = A.clone()
    bad[2:] = math.nan
    logits = LOGITS.clone().requires_grad_()
    loss, metrics = build(name)(unit(logits, advantages=bad, valid=valid))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert all(map(math.isfinite, metrics.values())) and bool(gradient.isfinite().all())
    assert not gradient[2:].any() and gradient[:2].any()


@pytest.mark.parametrize("path", ["mask", "uniform"])
@pytest.mark.parametrize("objective", [{"name": "diffu_grpo", "kl_coef": 0.01}, {"name": "token_dpo"}])
def test_a_run_trains(path: str, objective: dict[str, Any]) -> None:
    run = build_run(small(objective), pipe=token_pipeline(path))
    before = {name: p.detach().clone() for name, p in run.policy.parameters().items()}
    for _ in range(2):
        assert run.trainer.run_iteration().metrics["optimizer/skipped"] == 0
    assert run.trainer.state.ratio_first_max == 0
    moved = [name for name, p in run.policy.parameters().items() if not torch.equal(p, before[name])]
    assert len(moved) > len(before) / 2


@pytest.mark.parametrize("name", ["nft", "awm", "cm_grpo", "consistency_distillation"])
def test_objectives_of_flows_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"states of kind flow.*diffu_grpo, grpo, token_dpo"):
        build_run(small({"name": name}), pipe=token_pipeline())


def small(objective: dict[str, Any]) -> Any:
    return load(
        ROOT / "configs" / "dflow_grpo_shapes_masked.yaml",
        [
            f"objective={objective}",
            "rewards=[{name: jpeg_compressibility}]",
            "data.held_out=null",
            "training.prompts_per_iteration=2",
            "training.group_size=4",
            "training.micro_batch_size=4",
            "training.updates_per_pass=1",
            "sampler.num_steps=3",
        ],
    )
