"""Samplers of tokens as MDPs: what all pipelines whose scheduler walks a token path have in common.

Guidance and temperature act on the logits before the scheduler, so that they are part of the scored
distribution.

Shapes: B rows, L positions, S states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.token_paths import PathLevel, TokenPath
from flowrl.mdp.trajectory import Request
from flowrl.mdp.wrapper import SamplerWrapper


class TokenWrapper(SamplerWrapper):
    """A pipeline that asks a scheduler with a token path for its next tokens."""

    family: ClassVar[str] = "tokens"

    def __init__(self, **collaborators: Any) -> None:
        """See `SamplerWrapper` for the collaborators.

        Raises:
            UserError: for sampling options whose actions have no probability that can be trained.
        """
        collaborators["deterministic"] = collaborators["kernel"]  # every step of the chain is a draw
        super().__init__(**collaborators)
        options = {**self.call, **self.guidance}
        for name in ("top_k", "top_p"):
            if options.get(name) is not None:
                raise UserError(
                    f"sampler.guidance.{name} = {options[name]}: which tokens it keeps moves with the "
                    "weights, so that a recorded token may become impossible; leave it out (temperature and "
                    "guidance_scale are part of the scored distribution), or use it in evaluation.guidance"
                )
        if options.get("temperature") == 0:
            raise UserError(
                "sampler.guidance.temperature = 0: a greedy step has no probability; use a temperature above "
                "0, or 0 in evaluation.guidance only"
            )

    def check_scheduler(self, scheduler: Any) -> None:
        """Raises UserError unless the scheduler has a token path."""
        if not isinstance(getattr(scheduler, "path", None), TokenPath):
            raise UserError(
                f"model.wrapper: {type(scheduler).__name__} walks no token path; a DiscreteFlowScheduler "
                "is needed"
            )

    def read_sigmas(self, scheduler: Any) -> tuple[PathLevel, ...]:
        """1 - t of every step, with the path."""
        return tuple(PathLevel(float(sigma), scheduler.path) for sigma in scheduler.sigmas)

    def to_flow(self, prediction: Tensor, state: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
        """The posterior's log-probabilities (B, L, S) for logits, and the tokens."""
        assert isinstance(sigma, PathLevel)
        return sigma.path.log_posterior(prediction, state), state

    def predict(self, request: Request, state: Tensor, sigma: float) -> Tensor:
        """Log-probabilities (B, L, S) of the clean tokens, for noisy ones (B, L)."""
        path: TokenPath = self.pipe.scheduler.path
        return path.log_posterior(super().predict(request, state, sigma), state)

    def noising(self, generator: torch.Generator) -> Callable[[Tensor, float], Tensor]:
        """By the path: tokens (B, L) and a level to noisy tokens."""
        path: TokenPath = self.pipe.scheduler.path

        def noised(tokens: Tensor, sigma: float) -> Tensor:
            times = torch.full((len(tokens),), 1 - sigma, dtype=torch.float64)
            return path.noised(tokens.cpu(), times, generator).to(tokens.device)

        return noised

    def _time_of(self, sigma: float) -> Tensor:
        return torch.tensor([1 - sigma])
