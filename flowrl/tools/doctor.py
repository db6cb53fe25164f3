"""Looks a recipe over before it costs anything: ratio, step noise, geometry, memory, rewards, guidance.

`examine` rolls out one micro-batch and replays its trained steps without an update; what it measures is
what training will do. `preflight_check` is its short form before every training run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flowrl.build import Run
from flowrl.errors import UserError
from flowrl.mdp.transitions import MIN_STD
from flowrl.reward import Samples

GAIN_SPREAD = 100.0  # ratio of largest to smallest per-step gradient factor that is worth a warning
NOISE_MARGIN = 3.0  # a clip range within so many times the replay noise clips noise


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        facts: measured and derived figures, ready for JSON.
        warnings: what may go wrong.
        problems: what will go wrong.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def preflight_check(run: Run, console: Console) -> None:
    """The short check before training.

    Raises:
        UserError: with the first problem found.
    """
    diagnosis = examine(run, short=True)
    for warning in diagnosis.warnings:
        console.print(f"[yellow]warning:[/] {warning}", highlight=False, soft_wrap=True)
    if diagnosis.problems:
        raise UserError(diagnosis.problems[0])


def examine(run: Run, short: bool = False) -> Diagnosis:
    """Examines a built run; changes nothing in it.

    Args:
        run: what `flowrl.build.build_run` made.
        short: replay only the first and the last trained step.
    """
    diagnosis = Diagnosis()
    trainer, wrapper = run.trainer, run.wrapper
    trajectory_kind = trainer.objective.unit == "trajectory"
    plan = trainer.plan(0)
    with run.policy.compute():
        trajectory = wrapper.rollout(trainer.sampler.requests(0)[0], plan)
    samples = wrapper.decode(trajectory)
    diagnosis.facts["schedule"] = _schedule(run, plan)
    if trajectory_kind:
        trained = plan.trained if not short else sorted({plan.trained[0], plan.trained[-1]})
        _examine_ratio(run, trajectory, list(trained), diagnosis)
    _examine_rewards(run, samples, diagnosis)
    _examine_geometry(run, diagnosis)
    _examine_guidance(run, diagnosis)
    _examine_stability(run, diagnosis)
    diagnosis.facts["memory"] = _memory(run, trajectory)
    diagnosis.facts["trainable_parameters"] = run.policy.num_trainable
    return diagnosis


def _schedule(run: Run, plan: Any) -> list[dict[str, Any]]:
    rows = []
    gaussian = run.wrapper.family == "flow"
    for k, std in enumerate(run.trainer.stds):
        sigma, sigma_next = run.trainer.sigmas[k], run.trainer.sigmas[k + 1]
        rows.append(
            {
                "step": k,
                "sigma": sigma,
                "sigma_next": sigma_next,
                "std": std,
                "gradient_factor": _gain(run, sigma, sigma_next) / std
                if gaussian and std >= MIN_STD
                else None,
                "stochastic": k in plan.stochastic,
                "trained": k in plan.trained,
            }
        )
    return rows


def _gain(run: Run, sigma: float, sigma_next: float) -> float:
    """|d mean / d prediction| of a step; over std it is the factor of the policy gradient."""
    zero, small = torch.zeros(1, 1), torch.full((1, 1), 1e-3)  # small: some samplers clip the predicted data
    means = [run.wrapper.transition(v, zero, sigma, sigma_next).sample(zero) for v in (zero, small)]
    return float((means[1] - means[0]).abs() / small)


def _examine_ratio(run: Run, trajectory: Any, steps: list[int], diagnosis: Diagnosis) -> None:
    rows = []
    for k in steps:
        with run.policy.compute():
            replay = run.wrapper.replay(trajectory, k)
            size = replay.transition.event_size
            difference = ((replay.log_prob - trajectory.log_probs[k]) / size).detach().abs().max()
        finite = bool(torch.isfinite(replay.log_prob).all())
        rows.append({"step": k, "log_ratio_max": float(difference), "finite": finite})
        if not finite:
            diagnosis.problems.append(f"step {k}: the log-probability is not finite")
    worst = max(row["log_ratio_max"] for row in rows)
    diagnosis.facts["ratio"] = {"before_first_update": rows, "max": worst}
    clip = getattr(getattr(run.trainer.objective, "config", None), "clip_low", None)
    if worst > 0:
        rows_text = f"{len(trajectory.request)} rows, dtype {run.config.model.dtype}"
        diagnosis.warnings.append(
            f"max |log ratio| before the first update is {worst:.3g}, not 0 ({rows_text}): rollout and "
            "replay differ; is something in the network random, or does the pipeline use the step number?"
        )
        if clip is not None and clip < NOISE_MARGIN * worst:
            diagnosis.problems.append(
                f"objective.clip_low = {clip:g} is less than {NOISE_MARGIN:g} times the replay noise "
                f"{worst:.3g}: clipping would act on noise"
            )


def _examine_rewards(run: Run, samples: Samples, diagnosis: Diagnosis) -> None:
    """Scores samples, noise and plain grey; a reward that is not a number or constant is a problem.

    A sparse reward may give a whole micro-batch one value. Only if it seems constant are the iteration's
    other micro-batches rolled out too, until it varies.
    """
    rewards = run.trainer.rewards
    request, *others = run.trainer.sampler.requests(0)
    shape = samples.images.shape
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    probes = {"samples": samples, "noise": replace(samples, images=noise)}
    probes["grey"] = replace(samples, images=torch.full(shape, 0.5))
    if samples.texts is not None:
        probes = {"samples": samples, "empty": replace(samples, texts=("",) * len(samples))}
    scores = {name: rewards.score(probe, request.prompts, request.metadata) for name, probe in probes.items()}
    for other in others:
        if not any(_is_constant(column) for column in torch.cat(list(scores.values())).unbind(1)):
            break
        with run.policy.compute():
            trajectory = run.wrapper.rollout(other, run.trainer.plan(0))
        more = rewards.score(run.wrapper.decode(trajectory), other.prompts, other.metadata)
        scores["samples"] = torch.cat([scores["samples"], more])
    facts = {}
    for column, name in enumerate(rewards.names):
        values = torch.cat([table[:, column] for table in scores.values()])
        own = scores["samples"][:, column]
        finite = own[torch.isfinite(own)]
        facts[name] = {
            "weight": float(rewards.weights[column]),
            **{probe: _mean(table[:, column]) for probe, table in scores.items()},
            "samples_std": float(finite.double().std(unbiased=False)) if len(finite) else None,
        }
        if len(finite) < len(own) / 2:
            diagnosis.problems.append(
                f"reward {name!r} gave no finite score for {len(own) - len(finite)} of {len(own)} "
                "samples; a reward must return a number for what it can score"
            )
        elif _is_constant(values):
            diagnosis.problems.append(
                f"reward {name!r} is constant: {float(finite[0]):g} for {len(own)} samples, and for "
                f"{' and for '.join(list(scores)[1:])}; nothing could be learnt from it"
            )
    diagnosis.facts["rewards"] = facts


def _is_constant(values: Tensor) -> bool:
    """Whether there are finite values, all of them equal but for rounding."""
    finite = values[torch.isfinite(values)]
    return len(finite) > 0 and float(finite.max() - finite.min()) <= 1e-9 * max(
        1.0, float(finite.abs().max())
    )


def _examine_geometry(run: Run, diagnosis: Diagnosis) -> None:
    training = run.config.training
    prompts = len(run.trainer.sampler.prompts)
    diagnosis.facts["geometry"] = {
        "prompts": prompts,
        "prompts_per_iteration": training.prompts_per_iteration,
        "group_size": training.group_size,
        "samples_per_iteration": training.samples,
        "micro_batch_size": training.micro_batch_size,
        "micro_batches": training.micro_batches,
        "processes": run.engine.world,
        "updates_per_iteration": training.inner_passes * training.updates_per_pass,
        "iterations_per_epoch": prompts / training.prompts_per_iteration,
    }
    if prompts < training.prompts_per_iteration:
        diagnosis.warnings.append(
            f"training.prompts_per_iteration {training.prompts_per_iteration} is more than the {prompts} "
            "prompts of data.train: prompts repeat within an iteration"
        )


def _examine_guidance(run: Run, diagnosis: Diagnosis) -> None:
    config = run.config
    evaluation = config.sampler.guidance if config.evaluation.guidance is None else config.evaluation.guidance
    diagnosis.facts["guidance"] = {
        "rollout": config.sampler.guidance,
        "replay": config.sampler.guidance,
        "reference": config.sampler.guidance,
        "evaluation": evaluation,
        "cfg_gradient": config.sampler.cfg_gradient,
    }
    scales = ("guidance_scale", "true_cfg_scale", "guidance")
    if any(evaluation.get(key) != config.sampler.guidance.get(key) for key in scales):
        diagnosis.warnings.append(
            f"evaluation.guidance {evaluation} differs from the rollout's {config.sampler.guidance}: "
            "training without guidance distils it, and guidance at evaluation then over-sharpens"
        )


def _examine_stability(run: Run, diagnosis: Diagnosis) -> None:
    """Settings that are known to be unstable."""
    factors = [
        row["gradient_factor"]
        for row in diagnosis.facts["schedule"]
        if row["trained"] and row["gradient_factor"] is not None
    ]
    if factors and max(factors) > GAIN_SPREAD * min(factors):
        diagnosis.warnings.append(
            f"the policy gradient's factor differs by {max(factors) / min(factors):.0f} times between "
            "trained steps (a strong time shift does this); narrow sampler.steps or weight the steps"
        )
    training = run.config.training
    if training.inner_passes > 1 and getattr(run.trainer.objective, "unit", "") == "trajectory":
        diagnosis.warnings.append(
            f"training.inner_passes = {training.inner_passes}: later passes are off-policy; watch clip_frac"
        )
    if training.updates_per_pass > 1 and getattr(run.trainer.objective, "on_policy", False):
        diagnosis.warnings.append(
            f"training.updates_per_pass = {training.updates_per_pass}: the objective has no importance "
            "ratio, and all updates of an iteration but the first see samples of an older policy; use "
            "training.updates_per_pass=1, or an objective with a ratio (objective.form=ratio, or grpo)"
        )
    if training.group_size < 4:
        diagnosis.warnings.append(
            f"training.group_size = {training.group_size}: advantages of so small a group are mostly noise"
        )
    no_average = run.policy.ema is None
    if no_average and run.config.optimizer.lr >= 3e-4 and run.config.model.adapter.kind == "full":
        diagnosis.warnings.append(
            f"optimizer.lr = {run.config.optimizer.lr:g} on all weights without ema: late collapse is likely"
        )


def _memory(run: Run, trajectory: Any) -> dict[str, Any]:
    """Bytes of what training holds, activations apart."""
    components = {
        name: _bytes(module.parameters())
        for name, module in run.wrapper.pipe.components.items()
        if isinstance(module, torch.nn.Module)
    }
    trainable = list(run.policy.parameters().values())
    numbers = sum(p.numel() for p in trainable)
    stored = _bytes([*trajectory.states.values(), *trajectory.log_probs.values()])
    rows = len(trajectory.request)
    extra = {group: _bytes(t.values()) for group, t in run.policy.tensors().items() if group != "policy"}
    return {
        "weights_bytes": components,
        "gradients_bytes": 4 * numbers,
        "optimizer_bytes": 8 * numbers,
        "copies_bytes": extra,
        "trajectory_bytes_per_sample": stored / rows,
        "trajectory_bytes_per_iteration": stored / rows * run.config.training.samples / run.engine.world,
        "latents_stored_per_sample": trajectory.stored_latents(),
    }


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _mean(values: Tensor) -> float | None:
    finite = values[torch.isfinite(values)]
    return float(finite.double().mean()) if len(finite) else None


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Tables for people."""
    facts = diagnosis.facts
    ratios = {row["step"]: row for row in facts.get("ratio", {}).get("before_first_update", [])}
    table = Table(title="steps", title_justify="left")
    for column in ("step", "sigma", "next", "std", "gradient factor", "trained", "|log ratio|"):
        table.add_column(column, justify="right")
    for row in facts["schedule"]:
        factor = row["gradient_factor"]
        ratio = ratios.get(row["step"])
        table.add_row(
            str(row["step"]),
            f"{row['sigma']:.4f}",
            f"{row['sigma_next']:.4f}",
            f"{row['std']:.4f}",
            f"{factor:.3f}" if factor is not None else "-",
            "yes" if row["trained"] else ("noise only" if row["stochastic"] else "no"),
            f"{ratio['log_ratio_max']:.3g}" if ratio else "-",
        )
    console.print(table)
    _print_mapping("groups", facts["geometry"], console)
    for name, row in facts["rewards"].items():
        _print_mapping(f"reward {name}", row, console)
    _print_mapping("guidance", facts["guidance"], console)
    memory = {"trainable parameters": f"{facts['trainable_parameters']:,}"}
    memory |= {f"weights {name}": _size(n) for name, n in facts["memory"]["weights_bytes"].items()}
    memory |= {f"copy {name}": _size(n) for name, n in facts["memory"]["copies_bytes"].items()}
    memory |= {
        name.removesuffix("_bytes"): _size(facts["memory"][name])
        for name in ("gradients_bytes", "optimizer_bytes", "trajectory_bytes_per_iteration")
    }
    _print_mapping("memory, activations apart", memory, console)
    for warning in diagnosis.warnings:
        console.print(f"[yellow]warning:[/] {warning}", highlight=False, soft_wrap=True)
    for problem in diagnosis.problems:
        console.print(f"[red]problem:[/] {problem}", highlight=False, soft_wrap=True)
    if not diagnosis.problems:
        console.print("[green]ready to train[/]")


def _print_mapping(title: str, rows: Mapping[str, Any], console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.3g} {unit}"
        number /= 1000
    return ""
