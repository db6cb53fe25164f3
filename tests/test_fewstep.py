"""Diffusion, consistency and flow-map pipelines on the seam: ratio 1, their own samplers, what is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import pytest
import torch
from peft import get_peft_model_state_dict
from test_wrapper import NONE, PROMPTS, check_pixels, check_ratio, reached, traces
from tiny import NEGATIVE
from tiny_fewstep import FEWSTEP, RELEASED, SD
from torch import Tensor

from flowrl import registry
from flowrl.build import build_run, find_adapter
from flowrl.config import AdapterConfig, RunConfig
from flowrl.errors import UserError
from flowrl.mdp.adapters import add_lora, load_base_adapter, lora_slots
from flowrl.mdp.policy import DTYPES, Policy
from flowrl.mdp.seeds import standard_noise
from flowrl.mdp.steps import StepPlan, trainable
from flowrl.mdp.trajectory import Request
from flowrl.mdp.wrapper import SamplerWrapper

DDIM = [name for name in FEWSTEP if FEWSTEP[name].wrapper["name"] == "diffusion"]
FEW = [name for name in FEWSTEP if name not in DDIM]
MAPS = ("anyflow", "anyflow_tcd")


@functools.cache
def built(name: str, dtype: str = "fp32") -> tuple[Any, Policy]:
    """A pipeline and its policy: full fine-tuning in float32, else a LoRA."""
    tiny = FEWSTEP[name].tiny
    pipe = tiny.build(DTYPES[dtype])
    networks = {network: getattr(pipe, network) for network in tiny.networks}
    full = dtype == "fp32" or not hasattr(networks[tiny.networks[0]], "add_adapter")
    adapter = AdapterConfig(kind="full") if full else AdapterConfig(rank=2)
    return pipe, Policy(networks, adapter, dtype=dtype)


def wrap(
    name: str, pipe: Any = None, cfg: bool = False, cfg_gradient: str = "both", **options: Any
) -> SamplerWrapper:
    entry = FEWSTEP[name]
    negative = {"negative_prompt": NEGATIVE} if entry.tiny.negative_prompt else {}
    arguments: dict[str, Any] = {
        "wrapper": entry.wrapper,
        "kernel": entry.kernel,
        "num_steps": entry.num_steps,
        "call": entry.tiny.call,
    } | options
    wrapper: SamplerWrapper = registry.build(
        "wrapper",
        arguments.pop("wrapper"),
        "model.wrapper",
        pipe=built(name)[0] if pipe is None else pipe,
        kernel=registry.build("kernel", arguments.pop("kernel"), "sampler.kernel"),
        deterministic=registry.build("kernel", {"name": "ode"}, "sampler.kernel"),
        guidance=entry.tiny.guided | negative if cfg else entry.tiny.no_cfg,
        cfg_gradient=cfg_gradient,
        **arguments,
    )
    return wrapper


def request(*rows: int) -> Request:
    return Request(
        prompts=tuple(PROMPTS[row] for row in rows),
        metadata=tuple({"class_label": row + 1} for row in rows),
        groups=rows,
        initial_seeds=tuple(10 + row for row in rows),
        step_seeds=tuple(100 + row for row in rows),
    )


def every(wrapper: SamplerWrapper, name: str) -> StepPlan:
    return StepPlan(tuple(range(wrapper.num_steps)), FEWSTEP[name].trainable)


# -- the ratio is 1 before the first update ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FEWSTEP)
def test_replay_equals_the_rollout(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 with guidance, where the model has any that can be turned off."""
    cfg = dtype == "bf16" and FEWSTEP[name].tiny.supports_cfg
    monkeypatch.setattr("test_wrapper.request", request)
    pipe, policy = built(name, dtype)
    wrapper = wrap(name, pipe, cfg=cfg)
    check_ratio(wrapper, policy, every(wrapper, name))
    assert reached(policy) > 0.8


@pytest.mark.parametrize("name", ["sd15_ddim", "sdxl_lcm"])
def test_replay_equals_the_rollout_with_a_conditional_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_wrapper.request", request)
    pipe, policy = built(name)
    wrapper = wrap(name, pipe, cfg=True, cfg_gradient="conditional")
    check_ratio(wrapper, policy, every(wrapper, name))


@pytest.mark.parametrize("kernel", ["flow_sde", "cps", "tcd", "ddim"])
@pytest.mark.parametrize("name", ["sd15_ddim", "lcm", "sana_sprint_4", "consistency_model"])
def test_every_kernel_runs_on_every_schedule(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_wrapper.request", request)
    wrapper = wrap(name, kernel={"name": kernel})
    steps = tuple(trainable(wrapper.stds(wrapper.schedule())))
    assert set(steps) >= {0, 1, 2}
    check_ratio(wrapper, built(name)[1], StepPlan((0, 1, 2, 3), steps))


@pytest.mark.parametrize("name", FEWSTEP)
def test_the_transitions_with_a_density(name: str) -> None:
    wrapper = wrap(name)
    levels = wrapper.schedule()
    stds = wrapper.stds(levels)
    assert tuple(trainable(stds)) == FEWSTEP[name].trainable
    trajectory = wrapper.rollout(request(0, 1), every(wrapper, name))
    assert trajectory.sigmas == levels
    for step in FEWSTEP[name].trainable:
        transition = wrapper.replay(trajectory, step).transition
        assert transition.std == pytest.approx(stds[step], rel=1e-12)  # type: ignore[attr-defined]


# -- the samplers are diffusers' own -------------------------------------------------------------------------


def own_noise(seeds: tuple[int, ...]) -> Any:
    """Stands in for diffusers' noise: that of the rows' seeds, call by call."""
    calls = iter(range(1000))

    def draw(shape: Any, generator: Any = None, device: Any = None, dtype: Any = None, **_: Any) -> Tensor:
        return standard_noise(seeds, next(calls), tuple(shape)[1:], torch.device("cpu")).to(dtype)

    return draw


@pytest.mark.parametrize("name", [name for name in FEWSTEP if name not in MAPS])
def test_with_the_same_noise_it_is_the_pipelines_own_sampler(name: str) -> None:
    """A whole call of the untouched pipeline, the noise of whose scheduler is replaced by ours."""
    entry = FEWSTEP[name]
    wrapper = wrap(name)
    call = dict(entry.tiny.call)
    if name in DDIM:
        call["eta"] = 1.0
    wrapper.call |= call
    rows = request(0, 1)
    latents = wrapper.rollout(rows, StepPlan(tuple(range(wrapper.num_steps)), ())).latents
    module = type(wrapper.pipe.scheduler).__module__
    arguments = wrapper.arguments(rows) | {"output_type": wrapper.raw_output}
    with patch(f"{module}.randn_tensor", own_noise(rows.step_seeds)):
        expected = wrapper.pipe(**arguments, return_dict=False)[0]
    if wrapper.raw_output == "pt":  # pixels of consistency models, from [-1, 1]
        latents = (latents / 2 + 0.5).clamp(0, 1)
    if "sana" in name:
        latents = latents / 0.5  # the pipeline's own last line: over sigma_data
    scale = float(expected.abs().max())
    torch.testing.assert_close(latents / scale, expected / scale, rtol=0, atol=5e-6)
    assert (latents[0] - latents[1]).abs().max() > 1e-2


@pytest.mark.parametrize("name", [*DDIM, *MAPS])
def test_without_noise_it_is_the_pipelines_own_sampler(name: str) -> None:
    wrapper = wrap(name)
    rows = request(0, 1)
    latents = wrapper.rollout(rows, NONE).latents
    expected = wrapper.pipe(**wrapper.arguments(rows), output_type="latent", return_dict=False)[0]
    if name in MAPS:
        latents = latents.permute(0, 2, 1, 3, 4)
    torch.testing.assert_close(latents, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def loop(scheduler: Any, prediction: Any, start: Tensor, **kwargs: Any) -> Tensor:
    """A whole loop of a scheduler of diffusers, in float64."""
    state = start
    for time in scheduler.timesteps:
        state = scheduler.step(prediction(state, int(time)), time, state, **kwargs).prev_sample
    return state


@pytest.mark.parametrize(
    "options", [{}, {"clip_sample": True}, {"thresholding": True, "sample_max_value": 2.0}]
)
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("law", ["ddim", "lcm"])
def test_whole_clipped_loops_equal_diffusers_to_1e6(law: str, kind: str, options: dict[str, Any]) -> None:
    check_loop(law, kind, options)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("law", ["ddim", "lcm", "tcd"])
def test_whole_loops_equal_diffusers_to_1e6(law: str, kind: str) -> None:
    check_loop(law, kind, {})


def check_loop(law: str, kind: str, options: dict[str, Any]) -> None:
    """50 steps of DDIM without noise, 4 of LCM and TCD with the same noise: conversions and kernel alone."""
    settings = RELEASED | {"prediction_type": kind} | options
    classes = {"ddim": "DDIMScheduler", "lcm": "LCMScheduler", "tcd": "TCDScheduler"}
    scheduler = getattr(diffusers, classes[law])(**settings)
    scheduler.set_timesteps(50 if law == "ddim" else 4)
    name, kernel = ("sd15_ddim", "ode") if law == "ddim" else ("sd15_lcm", "consistency")
    pipe = built(name)[0]
    start = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def prediction(state: Tensor, time: int) -> Tensor:
        return torch.tanh(state.flip(1) + time / 1000)

    with patch.object(pipe, "scheduler", scheduler):
        wrapper = wrap(
            name,
            pipe,
            wrapper={"name": FEWSTEP[name].wrapper["name"]},
            kernel={"name": "tcd" if law == "tcd" else kernel},
        )
        levels = wrapper.read_sigmas(scheduler)
        state = start
        for index, time in enumerate(scheduler.timesteps.tolist()):
            law_of_step = wrapper.kernel(
                *wrapper.to_flow(prediction(state, time), state, levels[index]),
                levels[index],
                levels[index + 1],
            )
            scale = levels[index + 1].alpha + levels[index + 1].sigma  # type: ignore[attr-defined]
            noise = standard_noise((3, 4), index, (4, 8, 8), torch.device("cpu")).double()
            state = law_of_step.scaled(scale).sample(noise)
    with patch(f"{type(scheduler).__module__}.randn_tensor", own_noise((3, 4))):
        expected = loop(scheduler, prediction, start)
    torch.testing.assert_close(state, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


# -- flow maps -----------------------------------------------------------------------------------------------


def test_a_flow_map_is_told_where_the_kernel_wants_to_land() -> None:
    """The data for consistency, (1 - eta) of the next level for TCD, the next level without noise."""
    ends = {"anyflow": lambda level: 0.0, "anyflow_tcd": lambda level: 0.7 * level}
    for name, end in ends.items():
        wrapper = wrap(name)
        levels = wrapper.schedule()
        for plan in (every(wrapper, name), NONE):
            told: list[float] = []

            def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], told: list[float] = told) -> None:
                told.append(float(kwargs["r_timestep"][0, 0]) / 1000)

            with wrapper.networks["transformer"].register_forward_pre_hook(note, with_kwargs=True):
                trajectory = wrapper.rollout(request(0), plan)
                if plan.trained:
                    wrapper.replay(trajectory, 2)
            expected = [end(level) if plan.stochastic else float(level) for level in levels[1:]]
            assert told[:4] == pytest.approx(expected, abs=1e-6)
            if plan.trained:
                assert told[4] == pytest.approx(expected[2], abs=1e-6)


def test_a_flow_map_refuses_kernels_without_a_destination() -> None:
    with pytest.raises(UserError, match=r"where its jump ends.*consistency or tcd"):
        wrap("anyflow", kernel={"name": "flow_sde"})


# -- decoding, and the pipeline left as it was found ---------------------------------------------------------


@pytest.mark.parametrize("name", FEWSTEP)
def test_decode_equals_the_pipelines_pictures(name: str) -> None:
    wrapper = wrap(name)
    rows = request(0, 1)
    trajectory = wrapper.rollout(rows, every(wrapper, name))
    before, found = wrapper.forwards, traces(wrapper.pipe)
    assert before == 2 * wrapper.num_steps
    images = wrapper.decode(trajectory).images
    assert wrapper.forwards == before and traces(wrapper.pipe) == found
    if name == "consistency_model":
        assert torch.equal(images, (trajectory.latents / 2 + 0.5).clamp(0, 1))
        return
    check_pixels(images, FEWSTEP[name].tiny)
    latents = trajectory.latents
    if name in MAPS:
        latents = latents.permute(0, 2, 1, 3, 4)
    latents = latents / (0.5 if "sana" in name else 1.0)
    with torch.no_grad():
        torch.testing.assert_close(images, pixels(wrapper.pipe, latents), rtol=0, atol=3e-5)


def pixels(pipe: Any, latents: Tensor) -> Tensor:
    """The pipeline's VAE by hand."""
    config = pipe.vae.config
    if hasattr(config, "latents_mean") and config.latents_mean is not None:
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
        video = pipe.vae.decode(latents * std + mean, return_dict=False)[0]
        return (video / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    if hasattr(pipe, "_unpack_latents"):
        latents = pipe._unpack_latents(latents, 32, 32, pipe.vae_scale_factor)
    latents = latents / config.scaling_factor
    if hasattr(pipe, "transformer"):  # pipelines with a UNet know no shift
        latents = latents + (getattr(config, "shift_factor", None) or 0)
    return (pipe.vae.decode(latents, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)


@pytest.mark.parametrize("name", ["lcm", "sana_sprint", "consistency_model", "anyflow"])
def test_evaluation_does_not_change_the_next_rollout(name: str) -> None:
    wrapper = wrap(name)
    plan = every(wrapper, name)
    before = wrapper.rollout(request(0, 1), plan)
    wrapper.pipe(**wrapper.arguments(request(0)), output_type="pt", return_dict=False)
    after = wrapper.rollout(request(0, 1), plan)
    assert torch.equal(before.latents, after.latents)
    assert torch.equal(wrapper.replay(before, 0).log_prob, after.log_probs[0])


# -- the whole loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd21_ddim", "lcm", "sdxl_tcd", "anyflow", "consistency_model"])
def test_two_iterations_of_training_and_an_evaluation(name: str, tmp_path: Path) -> None:
    entry = FEWSTEP[name]
    single = {"num_frames": 1} if name in MAPS else {}  # the reward sees pictures
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text, "class_label": row}) for row, text in enumerate(PROMPTS)]
    prompts.write_text("\n".join(lines))
    tree = {
        "name": "x",
        "model": {
            "path": "in memory",
            "device": "cpu",
            "wrapper": entry.wrapper,
            "adapter": {"kind": "full"},
            "call": entry.tiny.call | single,
        },
        "sampler": {
            "num_steps": entry.num_steps,
            "kernel": entry.kernel,
            "steps": {"name": "random_subset", "count": 1},
            "guidance": entry.tiny.no_cfg,
        },
        "data": {"train": str(prompts), "held_out": str(prompts)},
        "rewards": [{"name": "jpeg_compressibility"}],
        "objective": {"name": "cm_grpo"},
        "optimizer": {"lr": 1e-3},
        "training": {"prompts_per_iteration": 2, "group_size": 2, "micro_batch_size": 2},
        "evaluation": {"batch_size": 2, "max_prompts": 2},
    }
    run = build_run(RunConfig.model_validate(tree), pipe=entry.tiny.build())
    before = {key: p.detach().clone() for key, p in run.policy.parameters().items()}
    for _ in range(2):
        metrics = run.trainer.run_iteration().metrics
        assert metrics["optimizer/skipped"] == 0 and metrics["optimizer/grad_norm"] > 0
        assert metrics["count/nfe_rollout"] == entry.num_steps and metrics["count/nfe_train"] == 1
    assert run.trainer.state.ratio_first_max == 0
    assert any(not torch.equal(p, before[key]) for key, p in run.policy.parameters().items())
    assert run.evaluator is not None
    assert run.evaluator.evaluate().scores.isfinite().all()


# -- a LoRA that makes the model a few-step one --------------------------------------------------------------


def test_an_lcm_lora_is_a_frozen_part_of_the_start_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It acts in rollout, replay and reference alike; the policy's own adapter is trained on top."""
    monkeypatch.setattr("test_wrapper.request", request)
    entry = FEWSTEP["sdxl_lcm"].tiny
    donor = entry.build().unet
    add_lora(donor, AdapterConfig(rank=2), "lcm")
    for module, attribute in lora_slots(donor, "lcm").values():
        torch.nn.init.normal_(getattr(module, attribute), std=0.2)
    weights = get_peft_model_state_dict(donor, adapter_name="lcm")
    diffusers.StableDiffusionXLPipeline.save_lora_weights(tmp_path, unet_lora_layers=weights)

    pipe = entry.build()
    load_base_adapter(pipe, {"unet": pipe.unet}, find_adapter(str(tmp_path), None), "base_0")
    policy = Policy({"unet": pipe.unet}, AdapterConfig(rank=2), base_adapters=["base_0"])
    wrapper = wrap("sdxl_lcm", pipe)
    trajectory = check_ratio(wrapper, policy, every(wrapper, "sdxl_lcm"))
    assert not any("base_0" in name for name in policy.parameters())
    for parameter in policy.parameters().values():
        parameter.data.add_(0.1)
    bare = wrap("sdxl_lcm").rollout(request(0, 1), every(wrapper, "sdxl_lcm"))
    assert (trajectory.states[1] - bare.states[1]).abs().max() > 1e-3
    with torch.no_grad():
        moved = wrapper.replay(trajectory, 0).log_prob
        with policy.reference():
            kept = wrapper.replay(trajectory, 0).log_prob
    assert torch.equal(kept, trajectory.log_probs[0]) and not torch.equal(moved, kept)


def test_base_adapters_are_files_or_hub_ids() -> None:
    assert find_adapter("latent-consistency/lcm-lora-sdxl", None) == "latent-consistency/lcm-lora-sdxl"
    with pytest.raises(UserError, match=r"model\.base_adapters = '/nowhere/at/all': no such file"):
        find_adapter("/nowhere/at/all", None)


# -- what is refused -----------------------------------------------------------------------------------------


def test_g32_a_flow_model_has_no_ddim() -> None:
    for spec in ({"name": "diffusion"}, {"name": "diffusion", "scheduler": "DDIMScheduler"}):
        pipe = FEWSTEP["sd3_lcm"].tiny.build()
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        with pytest.raises(UserError, match=r"FlowMatchEulerDiscreteScheduler.*(flow_matching|noise)"):
            wrap("sd3_lcm", pipe, wrapper=spec)
        assert type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"


@pytest.mark.parametrize(
    ("name", "wrapper", "message"),
    [
        ("sd15_ddim", {"name": "consistency"}, "DDIMScheduler.*no few-step scheduler; legal: LCMScheduler"),
        ("sd14_pndm", {"name": "diffusion"}, "PNDMScheduler.*scheduler: DDIMScheduler"),
        ("sd3_lcm", {"name": "flow_matching"}, "FlowMatchLCMScheduler re-noises.*consistency"),
        ("flux_lcm", {"name": "consistency", "scheduler": "LCMScheduler"}, "cannot take over"),
        ("lcm", {"name": "consistency", "scheduler": "FlowMatchLCMScheduler"}, "cannot take over"),
    ],
)
def test_unfit_schedulers_are_refused(name: str, wrapper: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrap(name, FEWSTEP[name].tiny.build(), wrapper=wrapper)


def test_a_replaced_scheduler_keeps_the_schedule_and_does_not_start_to_clip() -> None:
    """DDIMScheduler clips by default, Stable Diffusion's own schedulers do not."""
    pipe = wrap("sdxl_ddim", FEWSTEP["sdxl_ddim"].tiny.build()).pipe
    config = pipe.scheduler.config
    assert type(pipe.scheduler).__name__ == "DDIMScheduler"
    assert config.beta_end == 0.012 and config.beta_schedule == "scaled_linear"
    assert not config.clip_sample and config.steps_offset == 1 and not config.set_alpha_to_one


def test_noise_that_is_not_that_of_the_schedule_is_refused() -> None:
    pipe = FEWSTEP["consistency_model"].tiny.build()
    pipe.scheduler = diffusers.CMStochasticIterativeScheduler(s_noise=1.01)
    with pytest.raises(UserError, match="s_noise"):
        wrap("consistency_model", pipe)


def test_clipping_that_a_scheduler_only_claims_is_refused() -> None:
    pipe = FEWSTEP["sdxl_tcd"].tiny.build()
    pipe.scheduler = diffusers.TCDScheduler(**SD, clip_sample=True)
    with pytest.raises(UserError, match="TCDScheduler with clip_sample or thresholding ignores them"):
        wrap("sdxl_tcd", pipe)


def test_class_labels_are_those_of_the_prompts() -> None:
    wrapper = wrap("consistency_model")
    assert wrapper.arguments(request(0, 2))["class_labels"] == [1, 3]
    unlabelled = Request(("a",), ({},), (0,), (0,), (0,))
    with pytest.raises(UserError, match=r"integer class_label in data\.train"):
        wrapper.arguments(unlabelled)
