"""Diffusion pipelines as MDPs: SD 1.x, SD 2.x, SDXL and others with a table of alpha_bar, sampled by DDIM.

Convention: x = sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) eps at the training steps of the table; the network
predicts eps, v = sqrt(alpha_bar) eps - sqrt(1 - alpha_bar) x0, or x0, as the scheduler's config says, which
also says whether the predicted x0 is clipped. `flowrl.mdp.schedules` takes both to the flow, where kernels
live: ``ddim`` is the classic choice, and every other one works as well.

Differs from diffusers' DDIMScheduler in one place: a step ends at the level of the next step, whereas theirs
ends at t - N // T, which is the same if timestep_spacing is "leading", or "trailing" and T divides N.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.schedules import (
    check_falling,
    is_table,
    predicted_endpoints,
    replace_scheduler,
    to_flow,
    variance_preserving,
)
from flowrl.mdp.wrapper import SamplerWrapper
from flowrl.registry import ComponentConfig, register


@register("wrapper", "diffusion")
class Diffusion(SamplerWrapper):
    """Any pipeline whose scheduler is a DDIMScheduler."""

    family: ClassVar[str] = "flow"
    no_matching: ClassVar[str] = "its states are not (1 - t) x0 + t eps, and its network predicts no velocity"

    class Config(ComponentConfig):
        """Options of `Diffusion`."""

        scheduler: Literal["DDIMScheduler"] | None = Field(
            None, description="replaces the pipeline's own, on its noise schedule; None keeps it"
        )

    def __init__(self, config: Config, **collaborators: Any) -> None:
        """See `SamplerWrapper` for the collaborators."""
        if config.scheduler is not None:
            replace_scheduler(collaborators["pipe"], config.scheduler, "model.wrapper.scheduler")
        super().__init__(**collaborators)

    def check_scheduler(self, scheduler: Any) -> None:
        """Raises UserError unless the scheduler is DDIM's, on a table of alpha_bar."""
        name = type(scheduler).__name__
        if name == "DDIMScheduler" and is_table(scheduler):
            return
        hint = "wrapper: {name: diffusion, scheduler: DDIMScheduler} replaces it on the same noise schedule"
        if not is_table(scheduler):
            hint = "a flow model needs model.wrapper flow_matching, a few-step model consistency"
        raise UserError(
            f"model.wrapper diffusion: {type(self.pipe).__name__} has a {name} (prediction_type "
            f"{scheduler.config.get('prediction_type')!r}), not a DDIMScheduler; {hint}"
        )

    def read_sigmas(self, scheduler: Any) -> tuple[float, ...]:
        """The levels of the scheduler's training steps, and its own final one."""
        final = float(scheduler.final_alpha_cumprod)
        levels = variance_preserving(scheduler.alphas_cumprod, scheduler.timesteps.tolist(), final)
        check_falling(levels)
        return levels

    def to_flow(self, prediction: Tensor, state: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        """By the data and noise that the prediction implies, x0 clipped as the scheduler does."""
        return to_flow(*predicted_endpoints(self.pipe.scheduler, prediction, state, sigma), sigma)
