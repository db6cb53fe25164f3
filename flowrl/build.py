"""From a recipe to objects: the one place that knows how the parts fit together.

Cheap checks come first, so that a wrong recipe is refused before any weights are loaded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from flowrl import registry
from flowrl.config import RunConfig, resolve_path
from flowrl.errors import UserError
from flowrl.mdp.adapters import find_networks, load_base_adapter
from flowrl.mdp.policy import Policy
from flowrl.mdp.schedules import on_flow
from flowrl.mdp.steps import trainable
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.reward import RewardSet, WeightedReward
from flowrl.training.data import PromptSampler, read_prompts
from flowrl.training.distributed import Engine
from flowrl.training.evaluate import Evaluator
from flowrl.training.trainer import Trainer

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class Run:
    """Everything that a recipe describes, built."""

    config: RunConfig
    engine: Engine
    wrapper: SamplerWrapper
    policy: Policy
    trainer: Trainer
    evaluator: Evaluator | None


def build_run(config: RunConfig, recipe: Path | None = None, pipe: Any = None, trust: bool = False) -> Run:
    """Builds a run.

    Args:
        config: the recipe.
        recipe: its file, against which relative paths are also tried.
        pipe: a pipeline to use in place of ``model.path``.
        trust: allow a hub repository to run its own code; from the command line only.

    Raises:
        UserError: for anything in the recipe that does not fit, before long work starts.
    """
    # Without weights: names, options, files.
    kernel = registry.build("kernel", config.sampler.kernel, "sampler.kernel")
    deterministic = registry.build("kernel", {"name": "ode"}, "sampler.kernel")
    selector = registry.build("steps", config.sampler.steps, "sampler.steps")
    advantage = registry.build("advantage", config.advantage, "advantage")
    objective = registry.build("objective", config.objective, "objective")
    prompts = read_prompts(_file(config.data.train, "data.train", recipe), "data.train")
    held_out = (
        read_prompts(_file(config.data.held_out, "data.held_out", recipe), "data.held_out")
        if config.data.held_out
        else []
    )
    check_objective(config, objective, kernel)
    engine = Engine(config.model.device, config.distributed.timeout_s, config.distributed.sharding)
    engine.check_geometry(config.training.micro_batches, config.training.updates_per_pass)
    rewards = build_rewards(config.rewards, "rewards", recipe)
    judges = (
        build_rewards(config.evaluation.rewards, "evaluation.rewards", recipe)
        if config.evaluation.rewards
        else rewards
    )

    # With weights.
    pipe = pipe if pipe is not None else load_pipeline(config, recipe, trust)
    wrapper: SamplerWrapper = registry.build(
        "wrapper",
        config.model.wrapper,
        "model.wrapper",
        pipe=pipe,
        kernel=kernel,
        deterministic=deterministic,
        num_steps=config.sampler.num_steps,
        call=config.model.call,
        guidance=config.sampler.guidance,
        cfg_gradient=config.sampler.cfg_gradient,
        networks=config.model.networks,
    )
    if objective.unit == "forward" and wrapper.no_matching:
        raise UserError(
            f"objective {config.objective.get('name')!r} on model.wrapper "
            f"{config.model.wrapper.get('name')!r}: {wrapper.no_matching}; use grpo or cm_grpo"
        )
    policy = build_policy(config, pipe, objective, recipe)
    if engine.sharded and objective.unit == "forward" and len(policy.networks) > 1:
        raise UserError(
            f"distributed.sharding = full, objective {config.objective.get('name')!r} and the networks "
            f"{', '.join(policy.networks)}: processes would draw noise levels that need different networks "
            "at the same time; use distributed.sharding=none, one network, or an objective on sampler steps "
            "(grpo)"
        )
    engine.shard(policy.networks.values())
    pipe.to(engine.device)
    policy.snapshot()
    with policy.compute():
        sigmas = wrapper.schedule()
    if objective.unit == "trajectory":
        selector.plan(0, wrapper.stds(sigmas), config.seed)  # refuses a plan that trains nothing
    sampler = PromptSampler(
        prompts,
        prompts_per_iteration=config.training.prompts_per_iteration,
        group_size=config.training.group_size,
        micro_batch_size=config.training.micro_batch_size,
        seed=config.seed,
        shared_initial_noise=config.sampler.shared_initial_noise,
    )
    trainer = Trainer(
        config,
        wrapper=wrapper,
        policy=policy,
        rewards=rewards,
        advantage=advantage,
        objective=objective,
        selector=selector,
        sampler=sampler,
        engine=engine,
        sigmas=sigmas,
    )
    evaluator = build_evaluator(config, wrapper, held_out, judges, engine) if held_out else None
    return Run(config, engine, wrapper, policy, trainer, evaluator)


def load_pipeline(config: RunConfig, recipe: Path | None = None, trust: bool = False) -> Any:
    """Loads ``model.path``, a local folder or a hub id, with safetensors weights only.

    Raises:
        UserError: for a missing path, or a pipeline that cannot be loaded; the message names the cause.
    """
    source = find_model(config.model.path, recipe)
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.model.dtype]
    try:
        return pipeline_class(source, config.model.revision).from_pretrained(
            source,
            dtype=dtype,
            revision=config.model.revision,
            variant=config.model.variant,
            use_safetensors=True,
            trust_remote_code=trust,
        )
    except Exception as error:
        text = str(error).strip().splitlines()
        raise UserError(
            f"model.path = {config.model.path!r} cannot be loaded: {type(error).__name__}: "
            f"{text[0] if text else 'no reason given'}"
        ) from error


def pipeline_class(source: str, revision: str | None = None) -> Any:
    """The class that loads a pipeline: diffusers', or by its name one from flowrl/pipelines or a plugin."""
    import diffusers

    name = diffusers.DiffusionPipeline.load_config(source, revision=revision).get("_class_name")
    if hasattr(diffusers, str(name)):
        return diffusers.DiffusionPipeline
    registry.names("wrapper")  # imports flowrl/pipelines
    known = {cls.__name__: cls for cls in diffusers.DiffusionPipeline.__subclasses__()}
    return known.get(str(name), diffusers.DiffusionPipeline)


def find_model(path: str, recipe: Path | None) -> str:
    """The local folder of a model, or its hub id.

    Raises:
        UserError: if it is neither.
    """
    local = resolve_path(path, recipe)
    if local is not None:
        if not (local / "model_index.json").is_file():
            raise UserError(f"model.path = {path!r}: {local} is no diffusers pipeline (no model_index.json)")
        return str(local)
    first = path.split("/")[0]
    if not HUB_ID.fullmatch(path) or first in (".", "..") or resolve_path(first, recipe) is not None:
        raise UserError(f"model.path = {path!r}: no such folder, and not a hub id (owner/name)")
    return path


def find_adapter(path: str, recipe: Path | None) -> str | Path:
    """The local folder or file of a LoRA, or its hub id.

    Raises:
        UserError: if it is neither.
    """
    local = resolve_path(path, recipe)
    if local is None and not HUB_ID.fullmatch(path):
        raise UserError(f"model.base_adapters = {path!r}: no such file, and not a hub id (owner/name)")
    return local or path


def build_policy(config: RunConfig, pipe: Any, objective: Any, recipe: Path | None) -> Policy:
    """The policy over the pipeline's denoisers; frozen base adapters are loaded first."""
    networks = find_networks(pipe, config.model.networks)
    names = []
    for number, folder in enumerate(config.model.base_adapters):
        name = f"base_{number}"
        load_base_adapter(pipe, networks, find_adapter(folder, recipe), name)
        names.append(name)
    return Policy(
        networks,
        config.model.adapter,
        dtype=config.model.dtype,
        needs_reference=objective.needs_reference,
        needs_old=objective.acts == "old",
        gradient_checkpointing=config.model.gradient_checkpointing,
        base_adapters=names,
        ema=config.ema,
        seed=config.seed,
    )


def build_rewards(specs: list[dict[str, Any]], where: str, recipe: Path | None) -> RewardSet:
    """A reward set; each spec is a reward's own options, plus ``weight`` and ``label`` (column name)."""
    members = []
    for number, spec in enumerate(specs):
        options = dict(spec)
        weight = options.pop("weight", 1.0)
        name = str(options.get("name", ""))
        label = options.pop("label", name)
        key = f"{where}.{number}"
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
            raise UserError(f"{key}.weight = {weight!r}: a finite number is needed")
        if not isinstance(label, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", label):
            raise UserError(f"{key}.label = {label!r}: letters, digits, '_', '-' and '.' only")
        for path_key in ("model", "weights"):
            found = (
                resolve_path(options[path_key], recipe) if isinstance(options.get(path_key), str) else None
            )
            if found is not None:
                options[path_key] = str(found)
        members.append(WeightedReward(label, registry.build("reward", options, key), float(weight)))
    return RewardSet(members)


def build_evaluator(
    config: RunConfig, wrapper: SamplerWrapper, prompts: list[Any], judges: RewardSet, engine: Engine
) -> Evaluator:
    """The held-out evaluation of a recipe."""
    options = config.evaluation
    guidance = config.sampler.guidance if options.guidance is None else options.guidance
    wrapper.check_arguments("evaluation.guidance", guidance, replayed=False)
    num_steps = options.num_steps or config.sampler.num_steps
    sigmas = guidance.get("sigmas", wrapper.call.get("sigmas"))
    if isinstance(sigmas, list) and len(sigmas) != num_steps:
        raise UserError(
            f"evaluation.num_steps = {num_steps}: the call's sigmas {sigmas} make {len(sigmas)} steps; give "
            "as many in evaluation.guidance, or leave num_steps out"
        )
    return Evaluator(
        wrapper,
        prompts[: options.max_prompts],
        judges,
        engine,
        num_steps=num_steps,
        guidance=guidance,
        samples_per_prompt=options.samples_per_prompt,
        batch_size=options.batch_size,
        seed=options.seed,
        grid_prompts=options.grid_prompts,
        scheduler=deployed_scheduler(config, wrapper.pipe),
    )


def deployed_scheduler(config: RunConfig, pipe: Any) -> Any:
    """The scheduler that evaluation and export use: the pipeline's own, or ``evaluation.scheduler``.

    Raises:
        UserError: if diffusers has no such scheduler, or only one of the two has the noise levels of a flow.
    """
    name = config.evaluation.scheduler
    if name is None:
        return pipe.scheduler
    import diffusers

    cls: Any = getattr(diffusers, name, None)
    known = isinstance(cls, type) and issubclass(cls, diffusers.SchedulerMixin)
    if not known:
        legal = [n for n in dir(diffusers) if n.endswith("Scheduler")]
        raise UserError(
            f"evaluation.scheduler = {name!r}: no scheduler of diffusers{registry.nearest(name, legal)}"
        )
    known_options = signature(cls.__init__).parameters
    scheduler = cls.from_config({k: v for k, v in pipe.scheduler.config.items() if k in known_options})
    if on_flow(scheduler) != on_flow(pipe.scheduler):
        raise UserError(
            f"evaluation.scheduler = {name!r}: {type(pipe).__name__} has a {type(pipe.scheduler).__name__}, "
            f"whose noise schedule {name} cannot take over; its samples would be noise"
        )
    return scheduler


def check_objective(config: RunConfig, objective: Any, kernel: Any) -> None:
    """Raises UserError for a recipe whose samples the objective cannot train on."""
    if objective.family not in ("any", kernel.family):
        legal = [n for n in registry.names("objective") if _family(n) in ("any", kernel.family)]
        raise UserError(
            f"objective {config.objective.get('name')!r} trains on states of kind {objective.family}, "
            f"sampler.kernel {config.sampler.kernel.get('name')!r} makes {kernel.family}; objectives for "
            f"those: {', '.join(legal)}"
        )
    tokens = kernel.family == "tokens"  # their kernels are draws, always
    if objective.unit == "trajectory" and not tokens and not trainable([kernel.std(0.8, 0.6)]):
        raise UserError(
            f"sampler.kernel {config.sampler.kernel.get('name')!r} is deterministic: no step has a density, "
            f"so objective {config.objective.get('name')!r} has nothing to train; use a stochastic kernel "
            "(flow_sde, dance_sde, cps, consistency, ddim, or tcd with eta above 0) or a forward-process "
            "objective (nft)"
        )
    if getattr(objective, "on_policy", False) and config.training.inner_passes > 1:
        raise UserError(
            f"training.inner_passes = {config.training.inner_passes}: objective "
            f"{config.objective.get('name')!r} has no importance ratio here, so later passes would train on "
            "stale samples uncorrected; use training.inner_passes=1, or an objective with a ratio "
            "(objective.form=ratio, or grpo)"
        )


def _file(value: str, key: str, recipe: Path | None) -> Path:
    found = resolve_path(value, recipe)
    if found is None:
        raise UserError(f"{key} = {value!r}: no such file")
    return found


def _family(name: str) -> str:
    return str(registry.get("objective", name).family)
