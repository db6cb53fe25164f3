"""Autoregressive video on the seam: rollout, both replays, their gradients, chunk weights, a training run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from test_wrapper import check_ratio, reached
from tiny import TINY
from tiny_video import CALL, STEPS, causal_wan
from torch import Tensor

from flowrl import registry
from flowrl.config import AdapterConfig
from flowrl.errors import UserError
from flowrl.mdp.causal_attention import causal
from flowrl.mdp.policy import DTYPES, Policy
from flowrl.mdp.seeds import standard_noise
from flowrl.mdp.steps import StepPlan
from flowrl.mdp.trajectory import Request, Trajectory
from flowrl.mdp.transitions import Gaussian
from flowrl.mdp.wrapper import SamplerWrapper

CHUNKS, LENGTH = 4, 2
PLAN = StepPlan((0, 1, 2, 3), (0, 1, 2))
TEXTS = ("a cat sits | the dog jumps", "a tree")


def wrap(pipe: Any = None, kernel: str = "consistency", **options: Any) -> SamplerWrapper:
    made: SamplerWrapper = registry.build(
        "wrapper",
        {"name": "autoregressive_video", **options},
        "model.wrapper",
        pipe=causal_wan(LENGTH) if pipe is None else pipe,
        kernel=registry.build("kernel", {"name": kernel}, "sampler.kernel"),
        deterministic=registry.build("kernel", {"name": "ode"}, "sampler.kernel"),
        num_steps=STEPS,
        call={**CALL, "num_frames": CHUNKS * LENGTH},
        guidance={},
    )
    return made


def request(*rows: int) -> Request:
    return Request(
        prompts=tuple(TEXTS[row] for row in rows),
        metadata=tuple({} for _ in rows),
        groups=rows,
        initial_seeds=tuple(10 + row for row in rows),
        step_seeds=tuple(100 + row for row in rows),
    )


def policy_of(pipe: Any, dtype: str = "fp32", **adapter: Any) -> Policy:
    return Policy(
        {"transformer": pipe.transformer}, AdapterConfig(**adapter or {"kind": "full"}), dtype=dtype
    )


@pytest.mark.parametrize("layout", [{}, {"window_frames": 4}, {"window_frames": 6, "sink_frames": 2}])
@pytest.mark.parametrize("replay", ["packed", "cached"])
@pytest.mark.parametrize("kernel", ["consistency", "flow_sde"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_ratio_is_one_before_the_first_update(
    dtype: str, kernel: str, replay: str, layout: dict[str, Any]
) -> None:
    pipe = causal_wan(LENGTH, **layout)
    pipe.to(DTYPES[dtype])
    policy = policy_of(pipe, dtype, **({} if dtype == "fp32" else {"rank": 2}))
    check_ratio(wrap(pipe, kernel, replay=replay), policy, PLAN, request(0, 1))
    assert reached(policy) > 0.8


def test_a_rollout_is_the_pipelines_own_loop() -> None:
    """The noises are the seeds', the levels those of shift 5, and the states come out of its formula."""
    wrapper = wrap()
    trajectory = wrapper.rollout(request(0, 1), PLAN)
    assert trajectory.sigmas == pytest.approx((1, 0.9375, 1 / 1.2, 0.625, 0))
    assert sorted(trajectory.states) == [0, 1, 2, 3, 4]
    assert all(state.shape == (2, 4, CHUNKS * LENGTH, 16, 16) for state in trajectory.states.values())
    assert trajectory.latents is not None and torch.equal(trajectory.latents, trajectory.states[4])
    for n in range(CHUNKS):
        chunk = slice(n * LENGTH, (n + 1) * LENGTH)
        for k in PLAN.trained:
            replay = wrapper.replay(trajectory, k)
            seeds = trajectory.request.step_seeds
            noise = standard_noise(seeds, n * STEPS + k, (4, LENGTH, 16, 16), torch.device("cpu"))
            assert isinstance(replay.transition, Gaussian)
            assert torch.equal(replay.noise[:, :, chunk], noise)
            expected = replay.transition.mean[:, :, chunk] + trajectory.sigmas[k + 1] * noise
            torch.testing.assert_close(trajectory.states[k + 1][:, :, chunk], expected, atol=1e-5, rtol=1e-5)


def test_packed_and_cached_replay_agree() -> None:
    """Log-probabilities, and the gradients with and without that of the history."""
    pipe = causal_wan(LENGTH, window_frames=6, sink_frames=2)
    trajectory = wrap(pipe).rollout(request(0, 1), PLAN)
    parameters = [p for p in pipe.transformer.parameters() if p.requires_grad]
    whole: dict[bool, list[Tensor]] = {}
    for history in (True, False):
        found = {}
        for replay in ("packed", "cached"):
            wrapper = wrap(pipe, replay=replay, history_gradient=history)
            got = wrapper.replay(trajectory, 1)
            grads = torch.autograd.grad(got.log_prob.sum() / 1000, parameters, allow_unused=True)
            found[replay] = (got.log_prob.detach(), got.prediction.detach(), grads)
        (log, prediction, grads), (log_, prediction_, grads_) = found["packed"], found["cached"]
        assert float((prediction - prediction_).abs().max()) < 1e-5
        torch.testing.assert_close(log, log_, rtol=1e-6, atol=1e-3)
        for mine, theirs in zip(grads, grads_, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
        whole[history] = list(grads)
    assert any(float((a - b).abs().max()) > 1e-3 for a, b in zip(whole[True], whole[False], strict=True))


def test_the_gradient_is_that_of_the_documented_objective() -> None:
    """By finite differences of the log-probability along a random direction, history included."""
    pipe = causal_wan(LENGTH)
    pipe.transformer.double()
    pipe.text_encoder.double()
    wrapper = wrap(pipe)
    trajectory = wrapper.rollout(request(0), PLAN)
    weights = dict(pipe.transformer.named_parameters())["blocks.0.attn1.to_k.weight"]
    way = torch.randn(weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (grad,) = torch.autograd.grad(wrapper.replay(trajectory, 1).log_prob.sum(), [weights])
    start, step = weights.detach().clone(), 5e-3
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weights.copy_(start + sign * step * way)
            values.append(float(wrapper.replay(trajectory, 1).log_prob.sum()))
    assert float((grad * way).sum()) == pytest.approx((values[0] - values[1]) / (2 * step), rel=5e-3)


def test_log_probabilities_add_up_over_chunks() -> None:
    """Chunk by chunk, from the normal density; with weights, times them."""
    pipe = causal_wan(LENGTH)
    plain, heavy = wrap(pipe), wrap(pipe, chunk_weighting=-1.0)
    trajectory = plain.rollout(request(0, 1), PLAN)
    replay = plain.replay(trajectory, 1)
    assert isinstance(replay.transition, Gaussian)
    law = torch.distributions.Normal(replay.transition.mean.double(), replay.transition.std)
    dims = law.log_prob(trajectory.states[2].double())
    chunks = torch.stack([part.flatten(1).sum(1) for part in dims.split(LENGTH, dim=2)])
    torch.testing.assert_close(replay.log_prob, chunks.sum(0))
    raw = [1 / 4, 1 / 3, 1 / 2, 1]
    weights = torch.tensor([w * 4 / sum(raw) for w in raw], dtype=torch.float64)
    torch.testing.assert_close(
        heavy.replay(trajectory, 1).log_prob, (chunks * weights[:, None]).sum(0), rtol=1e-6, atol=1e-3
    )


def test_a_weighted_kl_and_regression_agree_with_their_formulas() -> None:
    mean, other = (torch.randn(2, 3, 4, 2, 2, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    weights = torch.tensor([0.5, 0.5, 1.0, 2.0]).view(1, 4, 1, 1)
    law = Gaussian(mean, 0.7, weights)
    expected = ((mean - other).double().square() * weights).flatten(1).sum(1) / (2 * 0.7**2)
    torch.testing.assert_close(law.kl(Gaussian(other, 0.7)), expected)
    assert law.scaled(2.0).weights is weights


def test_decoding_and_frame_rate() -> None:
    wrapper = wrap(causal_wan(1, vae=True))
    wrapper.call = {**CALL, "num_frames": 5, "frame_rate": 8.0}
    with torch.no_grad():
        trajectory = wrapper.rollout(request(0, 1), PLAN)
    assert trajectory.latents is not None
    samples = wrapper.decode(trajectory)
    assert samples.images.shape == (2, 5, 3, 16, 16) and samples.fps == 8.0
    forwards = wrapper.forwards
    wrapper.decode(trajectory)
    assert wrapper.forwards == forwards


def test_gradients_of_trajectories_are_not_kept() -> None:
    wrapper = wrap()
    trajectory: Trajectory = wrapper.rollout(request(0, 1), PLAN)
    tensors = [*trajectory.states.values(), *trajectory.log_probs.values()]
    assert all(tensor.grad_fn is None for tensor in tensors)
    assert causal(wrapper.pipe.transformer).cache is None


def test_what_does_not_fit_is_refused() -> None:
    pipe = causal_wan(LENGTH)
    with pytest.raises(UserError, match=r"model.wrapper.replay"):
        wrap(pipe, replay="stepwise")
    with pytest.raises(UserError, match="StableDiffusion3Pipeline makes no video in chunks"):
        wrap(TINY["sd3_no_t5"].build())
    pipe.scheduler = UniPCMultistepScheduler()
    with pytest.raises(UserError, match="autoregressive_video: UniPCMultistepScheduler; legal: FlowMatchLCM"):
        wrap(pipe)
