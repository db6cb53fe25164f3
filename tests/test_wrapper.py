"""Rollout, replay, prediction and decoding through every supported pipeline, against the pipeline itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny import NEGATIVE, TINY
from torch import Tensor, nn

from flowrl import registry
from flowrl.config import AdapterConfig
from flowrl.mdp.policy import DTYPES, Policy
from flowrl.mdp.steps import StepPlan, trainable
from flowrl.mdp.trajectory import Request, Trajectory
from flowrl.mdp.wrapper import SamplerWrapper

PROMPTS = ("a photo of a red circle", "two blue squares above a xyzzy", "a cat")
STEPS = 2
ALL = StepPlan((0, 1), (0, 1))
NONE = StepPlan((), ())
MULTISTEP = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
GUIDANCE = [(False, "both"), (True, "both"), (True, "conditional")]


@functools.cache
def built(name: str, dtype: str = "fp32") -> tuple[Any, Policy]:
    """A pipeline and its policy: full fine-tuning in float32, else a LoRA."""
    pipe = TINY[name].build(DTYPES[dtype])
    networks = {network: getattr(pipe, network) for network in TINY[name].networks}
    adapter = AdapterConfig(kind="full") if dtype == "fp32" else AdapterConfig(rank=2)
    return pipe, Policy(networks, adapter, dtype=dtype)


def wrap(
    name: str,
    pipe: Any = None,
    *,
    cfg: bool = False,
    cfg_gradient: str = "both",
    num_steps: int = STEPS,
    kernel: str = "flow_sde",
    **options: Any,
) -> SamplerWrapper:
    entry = TINY[name]
    negative = {"negative_prompt": NEGATIVE} if entry.negative_prompt else {}
    wrapper: SamplerWrapper = registry.build(
        "wrapper",
        {"name": "flow_matching"},
        "model.wrapper",
        pipe=built(name)[0] if pipe is None else pipe,
        kernel=registry.build("kernel", {"name": kernel, **options}, "sampler.kernel"),
        deterministic=registry.build("kernel", {"name": "ode"}, "sampler.kernel"),
        num_steps=num_steps,
        call=entry.call,
        guidance=entry.guided | negative if cfg else entry.no_cfg,
        cfg_gradient=cfg_gradient,
    )
    return wrapper


def request(*rows: int) -> Request:
    return Request(
        prompts=tuple(PROMPTS[row] for row in rows),
        metadata=({},) * len(rows),
        groups=rows,
        initial_seeds=tuple(10 + row for row in rows),
        step_seeds=tuple(100 + row for row in rows),
    )


def plain(name: str, pipe: Any, rows: int, cfg: bool, **kwargs: Any) -> tuple[Any, Tensor]:
    """What the pipeline alone makes of ``request(*range(rows))``: its output and its last state."""
    states: list[Tensor] = []

    def keep(_: Any, step: int, time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        states.append(tensors["latents"])
        return {}

    kwargs = {"num_inference_steps": STEPS, "callback_on_step_end": keep} | kwargs
    generators = [torch.Generator().manual_seed(10 + row) for row in range(rows)]
    prompts = list(PROMPTS[:rows])
    output = pipe(prompt=prompts, generator=generators, **TINY[name].kwargs(cfg, rows), **kwargs)[0]
    return output, states[-1] if states else output


def train_mode(wrapper: SamplerWrapper) -> None:
    for network in wrapper.networks.values():
        network.train()


def check_ratio(
    wrapper: SamplerWrapper, policy: Policy, plan: StepPlan, rows: Request | None = None
) -> Trajectory:
    """Rolls out and replays as the trainer does, from networks left in train mode; backward at the end."""
    train_mode(wrapper)
    with policy.compute():
        trajectory = wrapper.rollout(rows or request(0, 1), plan)
    assert set(trajectory.log_probs) == set(plan.trained)
    train_mode(wrapper)
    for parameter in policy.parameters().values():
        parameter.grad = None
    for step in plan.trained:
        with policy.compute():
            replay = wrapper.replay(trajectory, step)
            assert replay.log_prob.dtype == torch.float64 and replay.log_prob.requires_grad
            assert replay.log_prob.isfinite().all()
            assert torch.equal(replay.log_prob, trajectory.log_probs[step]), step
            (replay.log_prob.sum() / replay.transition.event_size).backward()
    return trajectory


def reached(policy: Policy) -> float:
    """The share of the trained parameters that got a gradient; a LoRA's A has none while its B is zero."""
    grads = [p.grad for name, p in policy.parameters().items() if ".lora_A." not in name]
    assert all(grad is None or bool(grad.isfinite().all()) for grad in grads)
    return sum(grad is not None and bool(grad.abs().max() > 0) for grad in grads) / len(grads)


def seen_times(wrapper: SamplerWrapper, call: Callable[[], Any]) -> list[float]:
    times: list[float] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        times.append(float(kwargs["timestep"][0]))

    with wrapper.networks["transformer"].register_forward_pre_hook(record, with_kwargs=True):
        call()
    return times


# -- the ratio is 1 before the first update ------------------------------------------------------------------


@pytest.mark.parametrize(("cfg", "cfg_gradient"), GUIDANCE)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TINY)
def test_replay_equals_the_rollout(name: str, dtype: str, cfg: bool, cfg_gradient: str) -> None:
    pipe, policy = built(name, dtype)
    check_ratio(wrap(name, pipe, cfg=cfg, cfg_gradient=cfg_gradient), policy, ALL)
    assert reached(policy) > 0.8  # the last block of some networks makes text that nothing reads


@pytest.mark.parametrize("kernel", ["dance_sde", "cps"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replay_equals_the_rollout_of_every_kernel(dtype: str, kernel: str) -> None:
    pipe, policy = built("sd3", dtype)
    wrapper = wrap("sd3", pipe, cfg=True, kernel=kernel, num_steps=3)
    steps = tuple(trainable(wrapper.stds(wrapper.schedule())))
    assert steps == ((0, 1) if kernel == "cps" else (0, 1, 2))
    check_ratio(wrapper, policy, StepPlan((0, 1, 2), steps))


@pytest.mark.parametrize(
    "plan", [StepPlan((1,), (1,)), StepPlan((0, 1, 2), (0, 2))], ids=["window", "subset"]
)
@pytest.mark.parametrize("name", ["sd3", "wan22"])
def test_replay_equals_the_rollout_of_every_plan(name: str, plan: StepPlan) -> None:
    check_ratio(wrap(name, num_steps=3), built(name)[1], plan)


@pytest.mark.parametrize("name", ["flux", "aura_flow"])
def test_times_are_not_rounded_with_the_weights(name: str) -> None:
    """Some pipelines cast the time to the dtype of the latents, which must not be that of the weights."""
    pipe, policy = built(name, "bf16")
    wrapper = wrap(name, pipe)
    wrapper.call["sigmas"] = [0.7771, 0.3333]
    trajectories: list[Trajectory] = []
    times = seen_times(wrapper, lambda: trajectories.append(check_ratio(wrapper, policy, ALL)))
    levels = trajectories[0].sigmas[:2]
    assert times == pytest.approx([*levels, *levels], abs=1e-6)


def test_dropout_would_break_the_ratio() -> None:
    """Nothing but the policy's eval mode stands between the networks' dropout and the ratio."""
    wrapper = wrap("sd3")
    trajectory = wrapper.rollout(request(0, 1), ALL)
    train_mode(wrapper)
    try:
        assert not torch.equal(wrapper.replay(trajectory, 0).log_prob, trajectory.log_probs[0])
    finally:
        wrapper.networks["transformer"].eval()


def test_replay_carries_what_objectives_need() -> None:
    wrapper = wrap("sd3")
    trajectory = wrapper.rollout(request(0, 1), ALL)
    for step in ALL.trained:
        replay = wrapper.replay(trajectory, step)
        action = replay.transition.sample(replay.noise)
        torch.testing.assert_close(action, trajectory.states[step + 1], rtol=0, atol=1e-5)
        projections = (replay.noise * replay.transition.mean).double().flatten(1).sum(1)
        torch.testing.assert_close(trajectory.projections[step], projections, rtol=1e-12, atol=1e-12)
        assert replay.prediction.requires_grad and replay.prediction.shape == trajectory.states[0].shape


# -- without noise it is the pipeline itself -----------------------------------------------------------------


@pytest.mark.parametrize("cfg", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_without_noise_it_is_the_plain_sampler(name: str, cfg: bool) -> None:
    """Multistep solvers take other steps than Euler's by design: there both sides get Euler's."""
    pipe = built(name)[0]
    euler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler = euler if TINY[name].scheduler in MULTISTEP else pipe.scheduler
    with patch.object(pipe, "scheduler", scheduler):
        expected = plain(name, pipe, 2, cfg, output_type="latent")[1]
        for kernel, plan in (("ode", NONE), ("flow_sde", StepPlan((0, 1), ()))):
            options = {"noise_level": 0.0} if kernel == "flow_sde" else {}
            wrapper = wrap(name, cfg=cfg, kernel=kernel, **options)
            latents = wrapper.rollout(request(0, 1), plan).latents
            torch.testing.assert_close(latents, expected, rtol=1e-5, atol=1e-5)


# -- decoding ------------------------------------------------------------------------------------------------


def check_pixels(images: Tensor, entry: Any) -> None:
    assert images.device.type == "cpu" and images.dtype == torch.float32
    assert images.isfinite().all() and images.min() >= 0 and images.max() <= 1
    assert images.shape == ((2, 5, 3, 32, 32) if "num_frames" in entry.call else (2, 3, 32, 32))


@pytest.mark.parametrize("name", TINY)
def test_decode_equals_the_pipelines_pictures(name: str) -> None:
    """The pipeline alone gets the same last state through its own callback, and decodes it."""
    pipe = built(name)[0]
    wrapper = wrap(name)
    trajectory = wrapper.rollout(request(0, 1), NONE)
    before = wrapper.forwards
    samples = wrapper.decode(trajectory)
    assert wrapper.forwards == before
    check_pixels(samples.images, TINY[name])
    assert (samples.fps is not None) == (samples.images.ndim == 5)

    def replace(*_: Any) -> dict[str, Tensor]:
        return {"latents": trajectory.latents}

    kwargs = {"callback_on_step_end": replace, "output_type": "pt"}
    expected = plain(name, pipe, 2, False, **kwargs)[0]
    torch.testing.assert_close(samples.images, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_decode_in_the_vaes_dtype(name: str) -> None:
    pipe, policy = built(name, "bf16")
    wrapper = wrap(name, pipe)
    own, seen = pipe.vae.decode, []

    def decode(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((latents.dtype, torch.is_autocast_enabled("cpu")))
        return own(latents, *args, **kwargs)

    with policy.compute(), patch.object(pipe.vae, "decode", decode):
        trajectory = wrapper.rollout(request(0, 1), NONE)
        check_pixels(wrapper.decode(trajectory).images, TINY[name])
        assert pipe.vae.dtype == torch.bfloat16
        pipe.vae.float()  # as Wan's VAE is loaded beside a network in bfloat16
        try:
            check_pixels(wrapper.decode(trajectory).images, TINY[name])
        finally:
            pipe.vae.bfloat16()
    assert seen == [(torch.bfloat16, False), (torch.float32, False)]


def test_decode_needs_the_last_state() -> None:
    wrapper = wrap("sd3")
    trajectory = wrapper.rollout(request(0), NONE)
    trajectory.latents = None
    with pytest.raises(ValueError, match="given up"):
        wrapper.decode(trajectory)


# -- the pipeline is left as it was found --------------------------------------------------------------------


def traces(pipe: Any) -> dict[str, Any]:
    """Everything that a call of the seam changes for its duration."""
    found: dict[str, Any] = {}
    for key in ("scheduler", "prepare_latents", "encode_prompt"):
        found[key] = pipe.__dict__.get(key)
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            found[name] = [component.__dict__.get(key) for key in ("forward", "decode")]
            found[name] += [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in component.modules()]
    return found


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


def break_kernel(wrapper: SamplerWrapper) -> Any:
    return patch.object(wrapper, "kernel", fail)


def break_network(wrapper: SamplerWrapper) -> Any:
    return patch.object(wrapper.networks["transformer"], "forward", fail)


def break_vae(wrapper: SamplerWrapper) -> Any:
    return patch.object(wrapper.pipe.vae, "decode", fail)


def break_encoder(wrapper: SamplerWrapper) -> Any:
    wrapper._prompts._cache.clear()
    return patch.object(wrapper._prompts, "_encode", fail)


@pytest.mark.parametrize("name", ["sd3", "flux2_klein", "wan22", "z_image"])
def test_the_pipeline_is_left_as_found(name: str) -> None:
    wrapper = wrap(name, cfg=True, cfg_gradient="conditional")
    found = traces(wrapper.pipe)
    trajectory = wrapper.rollout(request(0, 1), ALL)
    assert traces(wrapper.pipe) == found
    calls: dict[str, Callable[[], Any]] = {
        "replay": lambda: wrapper.replay(trajectory, 0),
        "predict": lambda: wrapper.predict(trajectory.request, trajectory.states[0], 0.95),
        "decode": lambda: wrapper.decode(trajectory),
        "rollout": lambda: wrapper.rollout(request(0, 1), ALL),
    }
    for call in calls.values():
        call()
        assert traces(wrapper.pipe) == found
    breaks = {break_kernel: ["replay", "rollout"], break_network: ["replay", "predict", "rollout"]}
    breaks |= {break_vae: ["decode"], break_encoder: list(calls)}
    for broken, names in breaks.items():
        for key in names:
            with broken(wrapper):
                inside = traces(wrapper.pipe)
                with pytest.raises(RuntimeError, match="on purpose"):
                    calls[key]()
                assert traces(wrapper.pipe) == inside, (broken, key)
    assert traces(wrapper.pipe) == found
    again = wrapper.rollout(request(0, 1), ALL)
    assert torch.equal(again.latents, trajectory.latents)


@pytest.mark.parametrize("name", TINY)
def test_evaluation_does_not_change_the_next_rollout(name: str) -> None:
    pipe = built(name)[0]
    wrapper = wrap(name, cfg=True)
    before = wrapper.rollout(request(0, 1), ALL)
    plain(name, pipe, 1, False, num_inference_steps=3, output_type="latent")
    log_prob = wrapper.replay(before, 1).log_prob
    assert torch.equal(log_prob, before.log_probs[1])
    after = wrapper.rollout(request(0, 1), ALL)
    assert after.sigmas == before.sigmas and torch.equal(after.latents, before.latents)


# -- noise belongs to samples --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    wrapper = wrap(name)
    batch, alone = (wrapper.rollout(request(*rows), ALL) for rows in ((0, 1), (1,)))
    torch.testing.assert_close(batch.latents[1:], alone.latents, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batch.states[1][1:], alone.states[1], rtol=1e-4, atol=1e-4)
    assert (batch.latents[0] - batch.latents[1]).abs().max() > 0.1


def test_members_of_a_group_share_at_most_the_initial_noise() -> None:
    wrapper = wrap("sd3")
    group = Request((PROMPTS[0],) * 2, ({}, {}), (0, 0), initial_seeds=(7, 7), step_seeds=(1, 2))
    trajectory = wrapper.rollout(group, ALL)
    assert torch.equal(trajectory.states[0][0], trajectory.states[0][1])
    assert (trajectory.states[1][0] - trajectory.states[1][1]).abs().max() > 0.1
    noise = [wrapper.replay(trajectory, step).noise for step in (0, 1)]
    rows = torch.cat(noise).flatten(1)
    assert rows.std(dim=1).sub(1).abs().max() < 0.2
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.3
    apart = wrapper.rollout(Request(group.prompts, ({}, {}), (0, 0), (7, 8), (1, 2)), ALL)
    assert (apart.states[0][0] - apart.states[0][1]).abs().max() > 0.1


# -- predictions at any noise level --------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_predict_is_the_networks_velocity(name: str) -> None:
    wrapper = wrap(name, cfg=True)
    trajectory = wrapper.rollout(request(0, 1), ALL)
    for step in (0, 1):
        predicted = wrapper.predict(trajectory.request, trajectory.states[step], trajectory.sigmas[step])
        assert predicted.dtype == torch.float32 and predicted.requires_grad
        assert torch.equal(predicted, wrapper.replay(trajectory, step).prediction.float())
    with torch.no_grad():
        state, sigma = trajectory.states[1], trajectory.sigmas[1]
        near, between = (wrapper.predict(trajectory.request, state, s) for s in (sigma + 1e-4, sigma / 2))
    assert near.isfinite().all() and between.isfinite().all()
    assert (near - predicted).abs().max() < 0.1 * predicted.abs().max()
    assert 0 < (near - predicted).norm() < (between - predicted).norm()


def test_predict_at_the_times_of_the_pipelines_own_grid() -> None:
    """CogView4's network gets times that are not 1000 sigma, so those between must not be either."""
    for name, by_sigma in (("sd3", True), ("cogview4", False)):
        wrapper = wrap(name)
        trajectories: list[Trajectory] = []
        grid = seen_times(wrapper, lambda w=wrapper, t=trajectories: t.append(w.rollout(request(0), ALL)))
        state, (first, second, _) = trajectories[0].states[0], trajectories[0].sigmas
        assert (max(abs(t - 1000 * s) for t, s in zip(grid, (first, second), strict=True)) < 0.01) == by_sigma
        wrapper.schedule()
        middle = (first + second) / 2
        (time,) = seen_times(wrapper, lambda w=wrapper, s=state, m=middle: w.predict(request(0), s, m))
        assert time == pytest.approx(sum(grid) / 2, rel=1e-6)
        (time,) = seen_times(wrapper, lambda w=wrapper, s=state, m=second: w.predict(request(0), s, m / 2))
        assert time == pytest.approx(grid[1] / 2, rel=1e-6)


def test_predict_refuses_states_of_another_shape() -> None:
    wrapper = wrap("sd3")
    with pytest.raises(ValueError, match="latents are"):
        wrapper.predict(request(0), torch.zeros(1, 4, 4, 4), 0.5)


# -- what a trajectory keeps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "latents"),
    [
        (StepPlan((0, 1, 2), (0, 1, 2)), 4),
        (StepPlan((0, 1, 2), (0, 1)), 3),
        (StepPlan((1, 2), (1, 2)), 3),
        (StepPlan((1,), (1,)), 2),
        (StepPlan((0, 1, 2), (0, 2)), 4),
        (StepPlan((0, 1, 2), ()), 0),
    ],
    ids=["all", "first_two", "last_two", "one", "apart", "forward_process"],
)
@pytest.mark.parametrize("name", ["sd3", "flux2_klein"])
def test_trajectories_keep_no_more_than_replay_needs(name: str, plan: StepPlan, latents: int) -> None:
    wrapper = wrap(name, num_steps=3)
    trajectory = wrapper.rollout(request(0, 1), plan)
    last_is_a_state = 3 in trajectory.states
    assert trajectory.stored_latents() == latents + (not last_is_a_state)
    trajectory.latents = None
    assert trajectory.stored_latents() == latents
    kept = list(trajectory.states.values())
    tensors = [*kept, *trajectory.log_probs.values(), *trajectory.projections.values()]
    assert not any(tensor.requires_grad or tensor.grad_fn is not None for tensor in tensors)
    assert all(tensor.dtype == torch.float32 for tensor in kept)
    size = 2 * 4 * 8 * 8 * 4  # bytes of two float32 latents
    assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values()) == (
        size * latents
    )
    assert {t.shape for t in tensors if t.ndim == 1} <= {torch.Size([2])}


def test_replay_keeps_nothing() -> None:
    wrapper = wrap("sd3")
    trajectory = wrapper.rollout(request(0, 1), ALL)
    trajectory.latents = None
    before = dict(vars(trajectory)), dict(trajectory.states)
    for step in ALL.trained:
        wrapper.replay(trajectory, step)
    assert (vars(trajectory), trajectory.states) == before


def test_forwards_are_counted_by_row_and_conditioning() -> None:
    for name in ("sd3", "flux", "z_image"):
        for cfg in (False, True):
            wrapper = wrap(name, cfg=cfg)
            trajectory = wrapper.rollout(request(0, 1, 2), ALL)
            assert wrapper.forwards == 3 * STEPS * (1 + cfg)
            wrapper.replay(trajectory, 1)
            assert wrapper.forwards == 3 * (STEPS + 1) * (1 + cfg)
