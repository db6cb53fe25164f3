"""Few-step pipelines as MDPs: the sampler of a distilled model is a policy with a density.

A consistency sampler jumps to the predicted x0 and re-noises it to the next level: a Gaussian transition
(kernel ``consistency``). Here stands how each scheduler of that kind counts its levels, and how its
prediction gives x0; model output types, w embeddings and added conditions stay the pipeline's own.

    scheduler                        pipelines                          x0
    LCMScheduler                     LCM; SD 1.5, SDXL with LCM-LoRA    c_out x0(eps, v or x0) + c_skip x
    TCDScheduler                     SD 1.5, SDXL with TCD-LoRA         x0(eps, v or x0)
    SCMScheduler                     SANA-Sprint (TrigFlow)             cos(t) x - sin(t) F
    CMStochasticIterativeScheduler   consistency models                 c_out F + c_skip x, clipped
    FlowMatchLCMScheduler            distilled FLUX, SD3 and others     x - sigma v
    FlowMapEulerDiscreteScheduler    AnyFlow (flow map)                 x - sigma u

The last step lands on the data and has no density, so T steps give T - 1 trainable transitions. A flow map
learns the mean velocity u of a jump from sigma to any lower level, which its network is told: on stochastic
steps that is the kernel's destination (the data for ``consistency``), on the others the next level.

Source: arXiv 2310.04378 (LCM), 2402.19159 (TCD), 2410.11081 (sCM), 2303.01469 (consistency models),
2605.13724 (AnyFlow); as a policy: 2605.15190 (CM-GRPO).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.schedules import (
    Level,
    check_falling,
    is_table,
    predicted_endpoints,
    replace_scheduler,
    to_flow,
    variance_preserving,
)
from flowrl.mdp.trajectory import Request
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.registry import ComponentConfig, register

TABLES = ("LCMScheduler", "TCDScheduler")
SCM, CM, FLOW_MAP = "SCMScheduler", "CMStochasticIterativeScheduler", "FlowMapEulerDiscreteScheduler"
LEGAL = (*TABLES, SCM, CM, "FlowMatchLCMScheduler", FLOW_MAP)
LCM_SIGMA_DATA = 0.5  # LCM's own, in its boundary conditions


@register("wrapper", "consistency")
class Consistency(SamplerWrapper):
    """Any pipeline whose scheduler jumps to the data and re-noises."""

    family: ClassVar[str] = "flow"
    no_matching: ClassVar[str] = "the matching loss of a forward process undoes a few-step distillation"
    probe: ClassVar[Request] = Request(("schedule",), ({"class_label": 0},), (0,), (0,), (0,))
    decoding_steps: ClassVar[int] = 1  # LCM and SANA-Sprint decode the denoised sample of the last step

    class Config(ComponentConfig):
        """Options of `Consistency`."""

        scheduler: Literal["LCMScheduler", "TCDScheduler", "FlowMatchLCMScheduler"] | None = Field(
            None, description="replaces the pipeline's own, on its noise schedule; None keeps it"
        )

    def __init__(self, config: Config, **collaborators: Any) -> None:
        """See `SamplerWrapper` for the collaborators."""
        if config.scheduler is not None:
            replace_scheduler(collaborators["pipe"], config.scheduler, "model.wrapper.scheduler")
        super().__init__(**collaborators)
        self._scheduler = type(self.pipe.scheduler).__name__
        self._by_class = "prompt" not in signature(self._plain_call).parameters
        if self._by_class:
            self.raw_output = "pt"  # consistency models work on pixels and know no other
        if self._scheduler == SCM:
            self.spare_times = 1  # it keeps the final time among its times
        if self._scheduler == FLOW_MAP and not hasattr(self.kernel, "destination"):
            raise UserError(
                "sampler.kernel: a flow map's network must be told where its jump ends, which this kernel "
                "does not say; use consistency or tcd"
            )

    def check_scheduler(self, scheduler: Any) -> None:
        """Raises UserError unless the scheduler is one of the above, with settings that are a policy's."""
        name, config = type(scheduler).__name__, scheduler.config
        if name not in LEGAL or (name in TABLES and not is_table(scheduler)):
            raise UserError(
                f"model.wrapper consistency: {name} (prediction_type {config.get('prediction_type')!r}) is "
                f"no few-step scheduler; legal: {', '.join(LEGAL)}, or "
                "wrapper: {name: consistency, scheduler: LCMScheduler} for a model with an LCM-LoRA"
            )
        if config.get("scale_factors") or config.get("invert_sigmas") or config.get("s_noise", 1.0) != 1:
            raise UserError(
                f"model.wrapper consistency: {name} with scale_factors, invert_sigmas or an s_noise other "
                "than 1 does not re-noise to the level of its next step"
            )
        if name == "TCDScheduler" and (config.clip_sample or config.thresholding):
            raise UserError(
                "model.wrapper consistency: a TCDScheduler with clip_sample or thresholding ignores them; "
                "turn them off in its config"
            )

    def arguments(
        self, request: Request, guidance: dict[str, Any] | None = None, num_steps: int | None = None
    ) -> dict[str, Any]:
        """Of a pipeline without prompts: the rows, and their classes from ``class_label`` of the prompts."""
        arguments = super().arguments(request, guidance, num_steps)
        if self._by_class:
            prompts = arguments.pop("prompt")
            arguments["batch_size"] = len(prompts)
            if self.pipe.unet.config.num_class_embeds is not None:
                arguments["class_labels"] = [_class_label(record) for record in request.metadata]
        return arguments

    def read_sigmas(self, scheduler: Any) -> tuple[float, ...]:
        """The levels as ``set_timesteps`` left them; the last is the data, or TCD's lowest level."""
        levels: tuple[float, ...]
        if self._scheduler in TABLES:
            final = float(scheduler.alphas_cumprod[0]) if self._scheduler == "TCDScheduler" else 1.0
            levels = variance_preserving(scheduler.alphas_cumprod, scheduler.timesteps.tolist(), final)
        elif self._scheduler == SCM:
            levels = _trigonometric(scheduler.timesteps.tolist(), scheduler.config.sigma_data)
        elif self._scheduler == CM:
            levels = _exploding(scheduler.sigmas.tolist(), scheduler.config.sigma_min)
        else:
            levels = tuple(float(level) for level in scheduler.sigmas)
        check_falling(levels)
        return levels

    def to_flow(self, prediction: Tensor, state: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        """By the data that the scheduler makes of the prediction, boundary conditions included."""
        if not isinstance(sigma, Level):
            return prediction, state
        config, time = self.pipe.scheduler.config, sigma.time
        if self._scheduler in TABLES:
            x0, eps = predicted_endpoints(self.pipe.scheduler, prediction, state, sigma)
            if self._scheduler == "LCMScheduler":
                scaled = time * config.timestep_scaling
                length = math.hypot(scaled, LCM_SIGMA_DATA)
                x0 = scaled / length * x0 + (LCM_SIGMA_DATA / length) ** 2 * state
        elif self._scheduler == CM:
            x0 = _consistency_model(prediction, state, time, config)
            eps = (state - x0) / sigma.sigma
        else:
            x0 = math.cos(time) * state - math.sin(time) * prediction
            eps = (math.sin(time) * state + math.cos(time) * prediction) / config.sigma_data
        return to_flow(x0, eps, sigma)

    def jumps(self, levels: Tensor, stochastic: Sequence[int]) -> Tensor:
        """For a flow map's stochastic steps the destination of the kernel, else the next level."""
        ends = levels[1:].clone()
        if self._scheduler == FLOW_MAP:
            for step in stochastic:
                ends[step] = self.kernel.destination(float(ends[step]))  # type: ignore[attr-defined]
        return ends


def _trigonometric(times: list[float], sigma_data: float) -> tuple[Level, ...]:
    """x = cos(t) x0 + sigma_data sin(t) eps; released schedules start a little above pi / 2."""

    def roots(time: float) -> tuple[float, float]:
        return max(math.cos(time), 0.0), sigma_data * math.sin(time)

    def curve(time: float) -> float:
        alpha, sigma = roots(time)
        return sigma / (alpha + sigma)

    return tuple(Level(*roots(time), time, curve) for time in times)


def _exploding(sigmas: list[float], sigma_min: float) -> tuple[Level, ...]:
    """x = x0 + sigma eps, re-noised up to sqrt(sigma^2 - sigma_min^2), so that sigma_min is the data."""

    def roots(sigma: float) -> float:
        return math.sqrt(max(sigma**2 - sigma_min**2, 0.0))

    ends = [0.0 if number == len(sigmas) - 1 else sigma for number, sigma in enumerate(sigmas)]
    levels = zip(sigmas, ends, strict=True)
    return tuple(
        Level(1.0, roots(sigma), time, lambda t: roots(t) / (1 + roots(t))) for sigma, time in levels
    )


def _consistency_model(output: Tensor, state: Tensor, sigma: float, config: Any) -> Tensor:
    """x0 under the boundary condition f(x, sigma_min) = x (arXiv 2303.01469, appendix C)."""
    data, past = config.sigma_data, sigma - config.sigma_min
    skip = data**2 / (past**2 + data**2)
    x0 = past * data / math.hypot(sigma, data) * output + skip * state
    return torch.clamp(x0, -1, 1) if config.clip_denoised else x0


def _class_label(record: dict[str, Any]) -> int:
    label = record.get("class_label")
    if not isinstance(label, int):
        raise UserError(f"a class-conditional model needs an integer class_label in data.train, got {record}")
    return label
