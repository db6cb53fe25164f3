"""The stand-in for the pipeline's scheduler, and what the wrapper refuses before it runs anything."""

from __future__ import annotations

import copy
import inspect
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import diffusers
import pytest
import torch
from diffusers import CMStochasticIterativeScheduler, FlowMatchEulerDiscreteScheduler, SCMScheduler
from test_wrapper import ALL, NONE, built, request, wrap
from tiny import TINY, TINY_WRONG
from torch import Tensor

from flowrl import registry
from flowrl.errors import UserError
from flowrl.mdp import wrapper as wrapper_module
from flowrl.mdp.adapters import find_networks
from flowrl.mdp.scheduler import PolicyScheduler, idle, layout_of, unrounded
from flowrl.mdp.wrapper import SamplerWrapper

# The live value of a fault: shift=3 acts twice, in the constructor and in set_timesteps.
SHIFTED_TWICE = (1.0, 0.857692, 0.602151, 0.008929, 0.0)


def wrapped(pipe: Any, call: dict[str, Any] | None = None, **options: Any) -> SamplerWrapper:
    arguments: dict[str, Any] = {
        "kernel": registry.build("kernel", {"name": "flow_sde"}, "sampler.kernel"),
        "deterministic": registry.build("kernel", {"name": "ode"}, "sampler.kernel"),
        "num_steps": 2,
        "call": call or {},
        "guidance": {},
    } | options
    wrapper: SamplerWrapper = registry.build(
        "wrapper", {"name": "flow_matching"}, "model.wrapper", pipe=pipe, **arguments
    )
    return wrapper


def no_step(call: int, prediction: Tensor, sample: Tensor) -> Tensor:
    raise AssertionError("no step was asked for")


# -- the stand-in --------------------------------------------------------------------------------------------


def test_everything_but_timesteps_and_step_is_the_schedulers_own() -> None:
    base = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler = PolicyScheduler(base, no_step)
    assert scheduler.config is base.config and scheduler.order == 1
    parameters = set(inspect.signature(scheduler.set_timesteps).parameters)
    assert {"sigmas", "timesteps", "mu"} <= parameters
    scheduler.set_timesteps(4)
    scheduler.set_begin_index(0)
    assert scheduler.sigmas is base.sigmas and base.begin_index == 0
    assert torch.equal(scheduler.timesteps, base.timesteps)
    with pytest.raises(AttributeError):
        _ = scheduler.no_such_thing


def test_timesteps_are_narrowed() -> None:
    base = FlowMatchEulerDiscreteScheduler()
    scheduler = PolicyScheduler(base, no_step)
    scheduler.show(slice(1, 2))
    scheduler.set_timesteps(4)
    assert torch.equal(scheduler.timesteps, base.timesteps[1:2])
    scheduler.show(slice(4, None))
    assert len(scheduler.timesteps) == 0
    scheduler.show(torch.tensor([123.0]))
    assert scheduler.timesteps.tolist() == [123.0]
    assert len(base.timesteps) == 4


@pytest.mark.parametrize("return_dict", [True, False])
def test_steps_are_counted_and_the_base_takes_none(return_dict: bool) -> None:
    calls: list[int] = []

    def on_step(call: int, prediction: Tensor, sample: Tensor) -> Tensor:
        calls.append(call)
        return sample + prediction

    base = FlowMatchEulerDiscreteScheduler()
    scheduler = PolicyScheduler(base, on_step)
    scheduler.set_timesteps(3)
    sample = torch.ones(1, 2)
    for time in scheduler.timesteps:
        made = scheduler.step(0.5 * sample.bfloat16(), time, sample, return_dict=return_dict, generator=None)
        following = made.prev_sample if return_dict else made[0]
        assert following.dtype == torch.float32 and torch.equal(following, 1.5 * sample)
    assert calls == [0, 1, 2] and base.step_index is None


def test_what_a_step_returns_can_be_named_indexed_and_unpacked() -> None:
    scheduler = PolicyScheduler(FlowMatchEulerDiscreteScheduler(), lambda call, made, sample: 2 * sample)
    one = torch.ones(1, 2)
    made = scheduler.step(one, 1.0, one)
    following, denoised = made
    for value in (following, denoised, made[0], made.prev_sample):
        assert torch.equal(value, 2 * one)


def test_levels_are_narrowed_as_times_are() -> None:
    """A pipeline that reads sigmas[i + 1] in its loop finds the end of the visible step i."""
    base = FlowMatchEulerDiscreteScheduler()
    scheduler = PolicyScheduler(base, no_step, jumps=lambda levels: 0.5 * levels[1:])
    scheduler.set_timesteps(4)
    own = base.sigmas
    assert torch.equal(scheduler.sigmas, torch.cat([own[:1], 0.5 * own[1:]]))
    scheduler.show(slice(2, 3))
    assert scheduler.sigmas[0] == own[2] and scheduler.sigmas[1] == 0.5 * own[3]
    scheduler.show(slice(4, None))
    assert len(scheduler.timesteps) == 0
    scheduler.show(torch.tensor([123.0]))
    assert scheduler.sigmas is own


def test_times_that_the_loop_leaves_out_stay_visible() -> None:
    base = SCMScheduler()
    scheduler = PolicyScheduler(base, no_step, spare_times=1)
    scheduler.set_timesteps(4, intermediate_timesteps=None)
    assert len(scheduler.timesteps) == 5
    for step in range(4):
        scheduler.show(slice(step, step + 1))
        assert torch.equal(scheduler.timesteps[:-1], base.timesteps[step : step + 1])


def test_the_input_is_scaled_for_the_step_that_is_next() -> None:
    """Consistency models scale by the level of a counter, which nobody else advances."""
    base = CMStochasticIterativeScheduler()
    scheduler = PolicyScheduler(base, lambda call, made, sample: sample)
    scheduler.set_timesteps(4)
    sample, data = torch.ones(1, 3, 2, 2), base.config.sigma_data
    for first in (0, 2):
        scheduler._calls = 0
        scheduler.show(slice(first, None))
        for index, time in enumerate(scheduler.timesteps, start=first):
            scaled = scheduler.scale_model_input(sample, time)
            torch.testing.assert_close(scaled, sample / (base.sigmas[index] ** 2 + data**2) ** 0.5)
            scheduler.step(sample, time, sample)


# -- latents on their way to the loop and within it ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("axes", "scale"), [((0, 1, 2), 1.0), ((0, 2, 1), 1.0), ((0, 1, 2), 0.5)])
def test_the_layout_of_latents_is_found_and_undone(
    axes: tuple[int, ...], scale: float, dtype: torch.dtype
) -> None:
    for shape in ((2, 3, 5), (2, 4, 4)):
        prepared = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).float()
        sample = (scale * prepared.permute(axes)).to(dtype)
        layout = layout_of(prepared, sample)
        assert (layout.axes, layout.scale) == (axes, scale)
        assert torch.equal(layout.undo(sample.float()), prepared)


def test_another_change_of_the_latents_is_refused() -> None:
    prepared = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    for sample in (prepared + 0.1, prepared.reshape(2, 15), prepared.flip(1)):
        with pytest.raises(UserError, match="more than a permutation of axes and a constant factor"):
            layout_of(prepared, sample)


def test_the_state_between_steps_may_be_rounded_and_no_more() -> None:
    state = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    assert unrounded(state, state.bfloat16()) is state
    for sample in (state + 1e-3, (1.01 * state).bfloat16()):
        with pytest.raises(UserError, match="changes its latents between two steps"):
            unrounded(state, sample)


def test_idle_networks_give_zeros_of_the_shape_of_their_state() -> None:
    network = torch.nn.Linear(3, 7)
    with idle([network]):
        assert torch.equal(network(torch.ones(2, 3))[0], torch.zeros(2, 3))
        assert [row.shape for row in network(hidden_states=[torch.ones(3), torch.ones(4)])[0]] == [(3,), (4,)]
    assert network(torch.ones(2, 3)).shape == (2, 7)


def test_copies_do_not_recurse() -> None:
    scheduler = PolicyScheduler(FlowMatchEulerDiscreteScheduler(shift=3.0), no_step)
    for twin in (copy.copy(scheduler), copy.deepcopy(scheduler)):
        assert twin.config.shift == 3.0


# -- noise levels and times ----------------------------------------------------------------------------------


class Recorder(PolicyScheduler):
    """Notes the time that each step was called with."""

    times: list[float]

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        Recorder.times.append(float(timestep))
        return super().step(model_output, timestep, sample, *args, **kwargs)


def times_and_levels(wrapper: SamplerWrapper) -> tuple[list[float], tuple[float, ...]]:
    Recorder.times = []
    with patch.object(wrapper_module, "PolicyScheduler", Recorder):
        trajectory = wrapper.rollout(request(0), NONE)
    return Recorder.times, trajectory.sigmas


@pytest.mark.parametrize("name", TINY)
def test_the_network_sees_the_time_of_the_noise_level(name: str) -> None:
    wrapper = wrap(name, num_steps=3)
    times, levels = times_and_levels(wrapper)
    assert len(times) == 3 and len(levels) == 4
    assert levels[0] == pytest.approx(1, abs=1e-3) and levels[3] == 0
    assert all(high > low for high, low in pairwise(levels))
    error = max(abs(time - 1000 * level) for time, level in zip(times, levels[:-1], strict=True))
    if TINY[name].shifted_timesteps:
        assert error <= (1.0 if TINY[name].integer_timesteps else 1e-3)
    else:  # CogView4's own times
        assert error > 1
    assert wrapper.schedule() == levels


@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0, None])
def test_the_network_sees_the_time_of_the_noise_level_at_any_shift(shift: float | None) -> None:
    pipe = built("sd3")[0]
    dynamic = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
    scheduler = FlowMatchEulerDiscreteScheduler(**(dynamic if shift is None else {"shift": shift}))
    with patch.object(pipe, "scheduler", scheduler):
        for call in ({}, {"sigmas": [1.0, 0.4, 0.1]}):
            wrapper = wrap("sd3", num_steps=3)
            wrapper.call |= call
            times, levels = times_and_levels(wrapper)
            for time, level in zip(times, levels[:-1], strict=True):
                assert time == pytest.approx(1000 * level, abs=1e-3)
            replay = wrapper.replay(wrapper.rollout(request(0), ALL), 1)
            assert replay.transition.std == wrapper.kernel.std(levels[1], levels[2])


def test_levels_are_read_as_the_scheduler_has_them() -> None:
    wrapper = wrap("sd3", num_steps=4)
    assert wrapper.pipe.scheduler.config.shift == 3.0
    assert wrapper.schedule() == pytest.approx(SHIFTED_TWICE, abs=1e-6)
    trajectory = wrapper.rollout(request(0), NONE)
    assert trajectory.sigmas == wrapper.schedule()
    assert trajectory.sigmas == tuple(wrapper.pipe.scheduler.sigmas.tolist())


def test_given_times_that_do_not_belong_to_the_levels_are_refused() -> None:
    pipe, euler = built("sana")[0], FlowMatchEulerDiscreteScheduler
    times = [1000, 2.994]
    with patch.object(pipe, "scheduler", euler(shift=3.0)):
        wrapper = wrapped(pipe, TINY["sana"].call | {"timesteps": times})
        for call in (wrapper.schedule, lambda: wrapper.rollout(request(0), NONE)):
            with pytest.raises(UserError, match=r"step 1: the network sees time 2\.994 .* give sigmas"):
                call()
        assert not isinstance(pipe.scheduler, PolicyScheduler)
    with patch.object(pipe, "scheduler", euler(shift=1.0)):  # here they do belong to them
        wrapper = wrapped(pipe, TINY["sana"].call | {"timesteps": times})
        assert wrapper.schedule() == pytest.approx((1, 0.002994, 0), abs=1e-6)


@pytest.mark.parametrize("sigmas", [[1.0, 0.0], [0.5, 0.7], [80.0, 1.0], [1.0, 1.0]])
def test_levels_that_do_not_fall_from_1_to_0_are_refused(sigmas: list[float]) -> None:
    with patch.object(built("sd3")[0], "scheduler", FlowMatchEulerDiscreteScheduler()):
        wrapper = wrapped(built("sd3")[0], TINY["sd3"].call | {"sigmas": sigmas})
        with pytest.raises(UserError, match="noise levels"):
            wrapper.schedule()


def test_another_number_of_steps_than_asked_for_is_refused() -> None:
    wrapper = wrapped(built("sd3")[0], TINY["sd3"].call | {"sigmas": [1.0, 0.6, 0.2]}, num_steps=2)
    with pytest.raises(UserError, match="num_steps 2: StableDiffusion3Pipeline made 3 steps"):
        wrapper.rollout(request(0), ALL)


# -- what is refused -----------------------------------------------------------------------------------------


def test_a_scheduler_of_another_family_is_refused() -> None:
    with pytest.raises(UserError, match=r"DDIMScheduler is not a flow.*legal: FlowMatchEulerDiscrete"):
        wrapped(TINY_WRONG["sd15"].build())


REFUSED = [
    ("FlowMatchHeunDiscreteScheduler", {}, "2 times a step; use FlowMatchEulerDiscreteScheduler"),
    ("UniPCMultistepScheduler", {}, "'epsilon'.*legal: FlowMatchEuler"),
    ("UniPCMultistepScheduler", {"use_flow_sigmas": True}, "prediction_type='flow_prediction'"),
    ("DPMSolverMultistepScheduler", {"prediction_type": "v_prediction"}, "is not a flow-matching scheduler"),
    ("EulerDiscreteScheduler", {}, "is not a flow-matching scheduler"),
    ("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}, "no ODE sampler"),
    ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, "no ODE sampler"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_unfit_schedulers_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    pipe = built("sd3")[0]
    with patch.object(pipe, "scheduler", getattr(diffusers, name)(**options)):
        with pytest.raises(UserError, match=rf"model\.wrapper flow_matching: {name}.*{message}"):
            wrapped(pipe)


@pytest.mark.parametrize("name", TINY)
def test_released_schedulers_are_taken(name: str) -> None:
    wrapped(built(name)[0])


def test_a_kernel_of_another_family_is_refused() -> None:
    kernel = SimpleNamespace(family="diffusion")
    with pytest.raises(UserError, match=r"sampler\.kernel: a diffusion kernel cannot drive the flow"):
        wrapped(built("sd3")[0], kernel=kernel)


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ("call", {"heigth_": 32}, r"unknown key model\.call\.heigth_ \(did you mean 'height'\?\)"),
        (
            "guidance",
            {"guidence_scale": 2},
            r"unknown key sampler\.guidance\.guidence_scale .*'guidance_scale'",
        ),
        ("guidance", {"true_cfg_scale": 2.0}, r"unknown key sampler\.guidance\.true_cfg_scale"),
        ("call", {"output_type": "pil"}, r"unknown key model\.call\.output_type"),
        ("call", {"num_inference_steps": 3}, r"unknown key model\.call\.num_inference_steps"),
        ("call", {"generator": 1}, r"unknown key model\.call\.generator"),
        ("guidance", {"negative_prompt": ["a", "b"]}, "one text for all samples"),
        ("guidance", {"skip_guidance_layers": [1]}, r"by their position in the sampler's loop.*legal: None"),
    ],
)
def test_arguments_are_checked(section: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrapped(built("sd3")[0], **{section: options})
    allowed = {"height": 32, "skip_guidance_layers": None, "negative_prompt": "bad"}
    wrapped(built("sd3")[0], **{section: allowed})


def test_guidance_that_ends_at_a_share_of_the_loop_is_refused() -> None:
    """Lumina 2 compares (i + 1) / len(timesteps) with it, which is 1 in a replayed step."""
    pipe = built("lumina2")[0]
    with pytest.raises(UserError, match=r"sampler\.guidance\.cfg_trunc_ratio = 0\.5 .*legal: 1\.0"):
        wrapped(pipe, guidance={"cfg_trunc_ratio": 0.5})
    wrapped(pipe, guidance={"cfg_trunc_ratio": 1.0})


def test_networks_are_found_or_named() -> None:
    assert list(find_networks(built("wan22")[0], None)) == ["transformer", "transformer_2"]
    assert list(find_networks(built("wan22")[0], ["transformer_2"])) == ["transformer_2"]
    assert list(find_networks(built("wan")[0], None)) == ["transformer"]
    with pytest.raises(UserError, match=r"model\.networks: .* no network 'unet'; it has: .*transformer"):
        find_networks(built("sd3")[0], ["unet"])
    with pytest.raises(UserError, match="no network 'scheduler'"):
        find_networks(built("sd3")[0], ["scheduler"])
    with pytest.raises(UserError, match="no denoiser found"):
        find_networks(SimpleNamespace(components={}), None)


def test_a_pipeline_whose_call_is_not_decorated_is_refused() -> None:
    class Own:
        scheduler = FlowMatchEulerDiscreteScheduler()
        transformer = torch.nn.Linear(1, 1)

        def __call__(self, prompt: str) -> None:
            pass

    with pytest.raises(UserError, match="not decorated"):
        wrapped(Own())
