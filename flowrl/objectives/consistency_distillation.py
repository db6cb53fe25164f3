"""Consistency distillation: a few-step student from a flow model, without data.

The student keeps the teacher's network and its velocity, read as a consistency function f(x, sigma) =
x - sigma v(x, sigma), which is x itself at sigma = 0. f shall be constant along the teacher's ODE. With two
neighbouring noise levels sigma > s of the rollout's grid, a teacher sample x0 and noise eps,

    x_sigma = (1 - sigma) x0 + sigma eps
    x_s     = x_sigma + (s - sigma) v_teacher(x_sigma, sigma)               one Euler step of the teacher
    d       = f_student(x_sigma, sigma) - stop_gradient(f_student(x_s, s))
    loss    = mean over rows of (sqrt(|d|^2 + c^2) - c) / (sigma - s) / sqrt(D),    c = huber sqrt(D)

At s = 0 the second term is x_s: there the student learns the teacher's own endpoint, and from there it
spreads to higher levels. The samples x0 are the teacher's (the rollout acts by the reference policy), so a
prompt file is all that is needed. Teacher and student are both called with the recipe's guidance, with which
the student is to be deployed: classifier-free guidance still costs it two forward passes a step. It is
deployed by the consistency sampler x_s = (1 - s) f + s noise (``FlowMatchLCMScheduler``).

Source: consistency distillation, arXiv 2303.01469; latent consistency models, arXiv 2310.04378; the
pseudo-Huber distance, the weight 1 / (sigma - s) and the target without an average, arXiv 2310.14189
(published: c = 0.00054 sqrt(D)).
Differs from the authors' code: samples of the teacher in the place of a dataset; the network's own velocity
in the place of new boundary coefficients; one noise level for all rows of a unit; the distance over
sqrt(D), so that its gradient does not grow with the resolution.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowrl.objective import ForwardStep, Metrics, masked_mean, to_metrics, valid_mean
from flowrl.registry import ComponentConfig, register


@register("objective", "consistency_distillation")
class ConsistencyDistillation:
    """The student's prediction of the clean sample, held equal at neighbouring noise levels."""

    unit: ClassVar[Literal["trajectory", "forward"]] = "forward"
    acts: ClassVar[Literal["policy", "old", "reference"]] = "reference"
    family: ClassVar[Literal["flow", "tokens", "any"]] = "flow"
    needs_reference = True

    class Config(ComponentConfig):
        """Options of `ConsistencyDistillation`."""

        huber: float = Field(5.4e-4, gt=0, description="where the distance turns from square to absolute")
        units_per_micro_batch: int = Field(4, ge=1, description="noise levels per micro-batch and pass")

    def __init__(self, config: Config) -> None:
        """Keeps the options."""
        self.config = config
        self.units_per_micro_batch = config.units_per_micro_batch

    def __call__(self, step: ForwardStep) -> tuple[Tensor, Metrics]:
        """The loss, a scalar, and metrics over valid rows; rewards play no part."""
        clean, valid = step.latents, step.valid
        levels = (*step.sigmas, 0.0)
        device = step.generator.device
        drawn = int(torch.randint(len(step.sigmas), (), generator=step.generator, device=device))
        sigma, sigma_next = levels[drawn], levels[drawn + 1]
        noise = torch.randn(clean.shape, generator=step.generator, device=device).to(clean)
        noisy = (1 - sigma) * clean + sigma * noise
        with torch.no_grad():
            target = noisy + (sigma_next - sigma) * step.predict_reference(noisy, sigma)
            if sigma_next > 0:
                target = target - sigma_next * step.predict(target, sigma_next)
        student = noisy - sigma * step.predict(noisy, sigma)

        size = clean[0].numel()
        squares = (student - target).square().flatten(1).sum(dim=1) / size
        distance = (squares + self.config.huber**2).sqrt() - self.config.huber
        loss = masked_mean(distance, valid) / (sigma - sigma_next)
        rms = valid_mean(squares, valid).sqrt()
        return loss, to_metrics(distillation_loss=loss, endpoint_error=rms)
