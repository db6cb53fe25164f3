"""Flow-matching pipelines as MDPs: any diffusers pipeline whose scheduler has flow noise levels.

Convention: sigma in [0, 1], 1 = noise; x_sigma = (1 - sigma) x0 + sigma eps; the network predicts
v = eps - x0. SD3, FLUX, Qwen-Image, Sana, Wan and the others need no code of their own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

from flowrl.errors import UserError
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.registry import ComponentConfig, register

# Schedulers with integer model times truncate 1000 sigma; float ones must agree to rounding.
INTEGER_TOLERANCE = 1.0
FLOAT_TOLERANCE = 0.01


@register("wrapper", "flow_matching")
class FlowMatching(SamplerWrapper):
    """Any pipeline whose scheduler is a FlowMatchEuler or a multistep solver on flow sigmas."""

    family: ClassVar[str] = "flow"

    class Config(ComponentConfig):
        """No options: everything is the pipeline's own."""

    def __init__(self, config: Config, **collaborators: Any) -> None:
        """See `SamplerWrapper` for the collaborators."""
        super().__init__(**collaborators)

    def check_scheduler(self, scheduler: Any) -> None:
        """Raises UserError unless the scheduler has flow noise levels and one call per step."""
        name = type(scheduler).__name__
        config = scheduler.config
        on_flow_sigmas = config.get("use_flow_sigmas", False) and (
            config.get("prediction_type") == "flow_prediction"
        )
        if not (name.startswith("FlowMatch") or on_flow_sigmas):
            raise UserError(
                f"model.wrapper flow_matching: {name} is not a flow-matching scheduler (prediction_type "
                f"{config.get('prediction_type')!r}); legal: FlowMatchEulerDiscreteScheduler, or a solver "
                "with use_flow_sigmas=True and prediction_type='flow_prediction'"
            )
        if name == "FlowMatchLCMScheduler":
            raise UserError(
                f"model.wrapper flow_matching: {name} re-noises the predicted data; use wrapper consistency"
            )
        if getattr(scheduler, "order", 1) != 1:
            raise UserError(
                f"model.wrapper flow_matching: {name} calls the network {scheduler.order} times a step; "
                "use FlowMatchEulerDiscreteScheduler"
            )
        if config.get("invert_sigmas", False) or config.get("stochastic_sampling", False):
            raise UserError(
                f"model.wrapper flow_matching: {name} with invert_sigmas or stochastic_sampling is no ODE "
                "sampler from noise to data"
            )

    def read_sigmas(self, scheduler: Any) -> tuple[float, ...]:
        """The noise levels as ``set_timesteps`` left them.

        Raises:
            UserError: if ``timesteps`` in model.call made times that do not belong to the noise levels. A
                pipeline may give its network such times itself: CogView4 does, by design.
        """
        sigmas = [float(value) for value in scheduler.sigmas]
        times = scheduler.timesteps
        tolerance = FLOAT_TOLERANCE if times.is_floating_point() else INTEGER_TOLERANCE
        scale = scheduler.config.num_train_timesteps
        own_times = zip(times.tolist(), sigmas, strict=False) if "timesteps" in self.call else ()
        for step, (time, sigma) in enumerate(own_times):
            if abs(time - scale * sigma) > tolerance:
                raise UserError(
                    f"step {step}: the network sees time {time:g} where the noise level is {sigma:g} (time "
                    f"{scale * sigma:g}); give sigmas, not timesteps, in model.call"
                )
        if len(sigmas) != len(times) + 1 or any(a <= b for a, b in pairwise(sigmas)):
            raise UserError(f"the scheduler's noise levels do not fall step by step: {sigmas}")
        if sigmas[0] > 1 + 1e-6 or sigmas[-1] < 0:
            raise UserError(f"the scheduler's noise levels are not those of a flow, from 1 to 0: {sigmas}")
        return tuple(sigmas)
