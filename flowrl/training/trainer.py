"""The training loop: one straight line from prompts to an optimizer step.

prompts -> rollout -> decode -> score -> gather -> advantage -> for each micro-batch and unit: replay ->
objective -> backward -> (accumulated) sum over ranks -> clip -> optimizer step -> averages -> log -> every
n iterations: evaluate, checkpoint. One iteration is one rollout; nothing later in the line writes into an
earlier object. Everything it uses is built outside and passed in.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.advantage import Advantage, Advantages
from flowrl.config import RunConfig
from flowrl.mdp.policy import Policy
from flowrl.mdp.scheduler import as_state
from flowrl.mdp.seeds import generator
from flowrl.mdp.steps import StepPlan, StepSelector, trainable
from flowrl.mdp.trajectory import Request, Trajectory
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.objective import ForwardStep, Metrics, Objective, TrajectoryStep
from flowrl.reward import RewardSet
from flowrl.training.data import PromptSampler
from flowrl.training.distributed import Engine
from flowrl.training.meters import image_meters

logger = logging.getLogger(__name__)

# Metrics of which the largest value matters, over units and ranks.
MAXIMA = ("log_ratio_max",)


@dataclass
class TrainState:
    """The counters that a checkpoint keeps beside tensors.

    Attributes:
        iteration: iterations completed.
        updates: optimizer steps taken.
        bad_updates: non-finite updates in a row.
        ratio_first_max: max |log ratio| of the run's first update; None before it, 0 where the objective
            has no ratio.
    """

    iteration: int = 0
    updates: int = 0
    bad_updates: int = 0
    ratio_first_max: float | None = None


class Part(NamedTuple):
    """What belongs to one micro-batch: its number in the iteration, its rows' advantages and validity."""

    number: int
    advantages: Tensor
    valid: Tensor


@dataclass
class IterationResult:
    """What one iteration hands to logging: reproducible metrics and wall-clock seconds by phase."""

    metrics: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Runs iterations; knows neither files nor the command line."""

    def __init__(
        self,
        config: RunConfig,
        *,
        wrapper: SamplerWrapper,
        policy: Policy,
        rewards: RewardSet,
        advantage: Advantage,
        objective: Objective,
        selector: StepSelector,
        sampler: PromptSampler,
        engine: Engine,
        sigmas: Sequence[float],
    ) -> None:
        """Takes the collaborators that `flowrl.build` makes from a recipe.

        ``sigmas``: (T + 1,) noise levels of the rollout's sampler.
        """
        self.config = config
        self.wrapper = wrapper
        self.policy = policy
        self.rewards = rewards
        self.advantage = advantage
        self.objective = objective
        self.selector = selector
        self.sampler = sampler
        self.engine = engine
        self.sigmas = tuple(sigmas)
        self.stds = wrapper.stds(sigmas)
        self.state = TrainState()
        self.parameters = list(policy.parameters().values())
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(engine.device.type, enabled=config.model.dtype == "fp16")
        self.clock = time.perf_counter
        self._seconds: dict[str, float] = defaultdict(float)

    # -- the line ----------------------------------------------------------------------------------------

    def run_iteration(self) -> IterationResult:
        """One rollout and the optimizer steps on it.

        Raises:
            UserError: for a reward of the wrong shape.
            FloatingPointError: for non-finite pixels, no finite reward at all, or several non-finite
                updates in a row.
        """
        self._seconds.clear()
        started = self.clock()
        iteration = self.state.iteration
        forwards = self.wrapper.forwards
        plan = self.plan(iteration)
        requests = self.engine.share(self.sampler.requests(iteration))
        trajectories = [self._rollout(request, plan) for request in requests]
        nfe_rollout = self.wrapper.forwards - forwards
        scores, meters = self._score(trajectories)
        with self._phase("advantage"):
            advantages = self.advantage(scores, self.rewards.weights, self.sampler.groups())
            if not bool(advantages.valid.any()):
                raise FloatingPointError(f"iteration {iteration + 1}: no sample has a finite reward")
        metrics = self._reward_metrics(scores, advantages)
        metrics |= {f"samples/{name}": value for name, value in self.engine.mean(meters).items()}
        metrics |= self._optimize(trajectories, advantages)
        if self.objective.acts == "old":
            follow = self.config.old_policy
            self.policy.update_old(min(follow.max_decay, follow.growth * iteration))
        samples = self.config.training.samples / self.engine.world
        metrics["count/nfe_rollout"] = nfe_rollout / samples
        metrics["count/nfe_train"] = (self.wrapper.forwards - forwards - nfe_rollout) / samples
        metrics["count/stored_latents"] = max(t.stored_latents() for t in trajectories)
        self.state.iteration += 1
        self._seconds["total"] = self.clock() - started
        return IterationResult(metrics, dict(self._seconds))

    def plan(self, iteration: int) -> StepPlan:
        """Which steps are stochastic and which are trained; forward-process objectives train none."""
        if self._needs_steps:
            return self.selector.plan(iteration, self.stds, self.config.seed)
        return StepPlan(tuple(trainable(self.stds)), ())

    @property
    def _needs_steps(self) -> bool:
        return self.objective.unit == "trajectory"

    def _rollout(self, request: Request, plan: StepPlan) -> Trajectory:
        who = {"policy": self.policy.acting, "old": self.policy.old, "reference": self.policy.reference}
        with self._phase("rollout"), self.policy.compute(), who[self.objective.acts]():
            return self.wrapper.rollout(request, plan)

    def _score(self, trajectories: list[Trajectory]) -> tuple[Tensor, dict[str, float]]:
        """Raw scores (N, R) of all ranks, and meters of this rank's pictures."""
        scores, meters = [], defaultdict(list)
        for trajectory in trajectories:
            with self._phase("decode"):
                samples = self.wrapper.decode(trajectory)
                if self._needs_steps:
                    trajectory.latents = None  # replay does not need it
            with self._phase("reward"):
                request = trajectory.request
                scores.append(self.rewards.score(samples, request.prompts, request.metadata))
                frames = samples.images if samples.images.ndim == 4 else samples.images.flatten(0, 1)
                for name, value in image_meters(frames).items():
                    meters[name].append(value)
        with self._phase("advantage"):
            everyone = self.engine.gather_shares(scores)
        return everyone, {name: sum(values) / len(values) for name, values in meters.items()}

    def _optimize(self, trajectories: list[Trajectory], advantages: Advantages) -> dict[str, float]:
        """All passes over the samples of an iteration; metrics averaged over units, updates and ranks."""
        size = self.config.training.micro_batch_size
        rows = advantages.values.split(size)
        valid = advantages.valid.split(size)
        parts = [Part(number, *advantage) for number, advantage in enumerate(zip(rows, valid, strict=True))]
        work = list(zip(self.engine.share(parts), trajectories, strict=True))
        per_update = len(work) // self.config.training.updates_per_pass
        collected: dict[str, list[float]] = defaultdict(list)
        for number in range(self.config.training.inner_passes):
            for first in range(0, len(work), per_update):
                update = self._update(work[first : first + per_update], number)
                for name, value in update.items():
                    collected[name].append(value)
        return {
            name: max(values) if name.rsplit("/", 1)[-1] in MAXIMA else sum(values) / len(values)
            for name, values in collected.items()
        } | {"optimizer/updates": float(self.state.updates)}

    def _update(self, work: list[tuple[Part, Trajectory]], inner_pass: int) -> dict[str, float]:
        """Accumulates the gradient of some micro-batches and takes one optimizer step."""
        collected: dict[str, list[float]] = defaultdict(list)
        self.optimizer.zero_grad(set_to_none=True)
        units = [(part, trajectory, unit) for part, trajectory in work for unit in self._units(trajectory)]
        share = 1.0 / (len(units) * self.engine.world)
        for part, trajectory, unit in units:
            with self._phase("replay"), self.policy.compute():
                step, gradient = self._step(part, trajectory, unit, inner_pass)
                loss, metrics = self.objective(step)
                self.scaler.scale(loss * share).backward()
            # A clamp turns the gradient of what is not finite into 0, which must not pass for a good one.
            if not all(map(math.isfinite, (loss.item(), *metrics.values()))):
                self.parameters[0].grad = torch.full_like(self.parameters[0], math.nan)
            for key, value in self._unit_metrics(step, metrics, gradient).items():
                collected[key].append(value)
        merged = {
            key: max(values) if key.rsplit("/", 1)[-1] in MAXIMA else sum(values) / len(values)
            for key, values in collected.items()
        }
        highest = frozenset(key for key in merged if key.rsplit("/", 1)[-1] in MAXIMA)
        merged = self.engine.mean(merged, highest)
        if self.state.ratio_first_max is None:
            self.state.ratio_first_max = merged.get("objective/log_ratio_max", 0.0)
        with self._phase("optimizer"):
            return merged | self._optimizer_step()

    def _units(self, trajectory: Trajectory) -> Sequence[int]:
        if self._needs_steps:
            return trajectory.plan.trained
        return range(self.objective.units_per_micro_batch)

    def _step(
        self, part: Part, trajectory: Trajectory, unit: int, inner_pass: int
    ) -> tuple[TrajectoryStep | ForwardStep, list[Tensor]]:
        """One work unit, and a box that backward fills with the gradient at the network's output."""
        rows, valid = part.advantages.to(self.engine.device), part.valid.to(self.engine.device)
        gradient: list[Tensor] = []
        if not self._needs_steps:
            # Named by what is trained on, not by who does it: the draws are the same for any number of ranks.
            name = (self.config.seed, "unit", self.state.iteration, inner_pass, part.number, unit)
            return self._forward_step(trajectory, rows, valid, generator(*name)), gradient
        reference = None
        if self.objective.needs_reference:
            with torch.no_grad(), self.policy.reference():
                reference = self.wrapper.replay(trajectory, unit).transition
        replay = self.wrapper.replay(trajectory, unit)
        replay.prediction.register_hook(gradient.append)
        step = TrajectoryStep(
            index=unit,
            sigma=trajectory.sigmas[unit],
            sigma_next=trajectory.sigmas[unit + 1],
            transition=replay.transition,
            reference=reference,
            log_prob=replay.log_prob,
            old_log_prob=trajectory.log_probs[unit],
            action=trajectory.action(unit),
            noise=replay.noise,
            old_projection=trajectory.projections.get(unit),
            old_token_log_probs=trajectory.token_log_probs.get(unit),
            advantages=rows,
            valid=valid,
        )
        return step, gradient

    def _forward_step(
        self, trajectory: Trajectory, rows: Tensor, valid: Tensor, draws: torch.Generator
    ) -> ForwardStep:
        assert trajectory.latents is not None

        def predict(state: Tensor, sigma: float) -> Tensor:
            return self.wrapper.predict(trajectory.request, state, sigma)

        def predict_old(state: Tensor, sigma: float) -> Tensor:
            with torch.no_grad(), self.policy.old():
                return predict(state, sigma)

        def predict_reference(state: Tensor, sigma: float) -> Tensor:
            with torch.no_grad(), self.policy.reference():
                return predict(state, sigma)

        return ForwardStep(
            latents=as_state(trajectory.latents),
            predict=predict,
            predict_old=predict_old,
            predict_reference=predict_reference,
            sigmas=trajectory.sigmas[:-1],
            generator=draws,
            advantages=rows,
            valid=valid,
            groups=trajectory.request.groups,
            noised=self.wrapper.noising(draws),
        )

    def _optimizer_step(self) -> dict[str, float]:
        """Sums gradients over ranks, clips, steps; a non-finite gradient changes nothing on any rank."""
        options = self.config.optimizer
        self.engine.sum_gradients(self.parameters)
        self.scaler.unscale_(self.optimizer)
        norm = self.engine.clip_gradients(self.parameters, options.max_grad_norm)
        lr = options.lr * min(1.0, (self.state.updates + 1) / max(1, options.warmup_updates))
        for group in self.optimizer.param_groups:
            # The recipe's, whatever a checkpoint says: a resumed run may go on with changed ones.
            group.update(lr=lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)
        finite = math.isfinite(norm)
        if finite:
            self.scaler.step(self.optimizer)
            self.state.updates += 1
            self.state.bad_updates = 0
            self.policy.update_ema()
        else:
            self.state.bad_updates += 1
            logger.warning("update skipped: gradient norm %s (%d in a row)", norm, self.state.bad_updates)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        # fp16 finds its loss scale by overflowing; below 1 the scale is no longer to blame.
        searching = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if not searching and self.state.bad_updates >= self.config.training.max_bad_updates:
            raise FloatingPointError(
                f"{self.state.bad_updates} updates in a row had a non-finite gradient; weights are unchanged "
                "since; lower optimizer.lr or sampler.kernel.noise_level, or use model.dtype fp32"
            )
        return {
            "optimizer/grad_norm": norm if finite else float("nan"),
            "optimizer/lr": lr,
            "optimizer/skipped": float(not finite),
        }

    # -- figures -----------------------------------------------------------------------------------------

    def _reward_metrics(self, scores: Tensor, advantages: Advantages) -> dict[str, float]:
        metrics: dict[str, float] = {}
        total = torch.zeros(len(scores), dtype=torch.float64)
        for column, name in enumerate(self.rewards.names):
            raw = scores[:, column].double()
            weight = float(self.rewards.weights[column])
            finite = raw[torch.isfinite(raw)]
            metrics[f"reward/{name}/raw_mean"] = float(finite.mean())
            metrics[f"reward/{name}/raw_std"] = float(finite.std(unbiased=False))
            metrics[f"reward/{name}/weighted_mean"] = weight * float(finite.mean())
            total += weight * raw
        metrics["reward/total_mean"] = float(total[advantages.valid].mean())
        metrics["rows/invalid"] = float((~advantages.valid).sum())
        return metrics | {f"advantage/{name}": value for name, value in advantages.metrics.items()}

    def _unit_metrics(
        self, step: TrajectoryStep | ForwardStep, metrics: Metrics, gradient: list[Tensor]
    ) -> dict[str, float]:
        named = {f"objective/{name}": value for name, value in metrics.items()}
        if isinstance(step, TrajectoryStep):
            prefix = f"step/{step.index}"
            named[f"{prefix}/std"] = self.stds[step.index]
            named[f"{prefix}/log_ratio_max"] = metrics.get("log_ratio_max", 0.0)
            if gradient:
                scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
                named[f"{prefix}/output_grad_norm"] = float(gradient[0].norm()) / scale
        return named

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = self.clock()
        try:
            yield
        finally:
            self._seconds[name] += self.clock() - started
