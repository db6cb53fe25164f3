"""The scheduler of discrete flow pipelines: which path, and how a step is taken in deployment.

A step draws x1 from the posterior and then the next token from the law K of the path, which is exactly what
the kernels score (flowrl/mdp/token_paths.py).
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from flowrl.errors import UserError
from flowrl.mdp.metric_path import MetricPath
from flowrl.mdp.token_paths import MixturePath, TokenPath

PATHS = ("mask", "uniform", "metric")


class DiscreteFlowScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """Even steps from t = 0 to t = 1 along a mixture or metric path."""

    order = 1

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_tokens: int = 256,
        path: str = "mask",
        mask_token_id: int | None = None,
        kappa_power: float = 1.0,
        metric_scale: float = 3.0,
        metric_exponent: float = 0.9,
        metric_power: float = 2.0,
        metric_normalized: bool = True,
        rule: str = "integrated",
        corrector: float = 0.0,
    ) -> None:
        """Keeps the options.

        Args:
            num_tokens: data tokens V.
            path: "mask", "uniform" or "metric".
            mask_token_id: the mask; None: a state of its own, V.
            kappa_power: of a mixture path, kappa_t = t^kappa_power.
            metric_scale, metric_exponent: beta_t = scale (t / (1 - t))^exponent.
            metric_power: d = (Euclidean distance of embeddings)^metric_power; FUDOKI's code has 4.
            metric_normalized: whether embeddings are brought to unit length first.
            rule: "integrated", "exponential" or "euler".
            corrector: noising rate c of a mixture path.

        Raises:
            UserError: for another path.
        """
        if path not in PATHS:
            raise UserError(f"path = {path!r}: one of {', '.join(PATHS)}")
        self.embeddings: Tensor | None = None
        self._path: TokenPath | None = None
        self.set_timesteps(10)

    @property
    def path(self) -> TokenPath:
        """The path; a metric path needs the token embeddings (`set_embeddings`)."""
        if self._path is None:
            config = self.config
            if config.path == "metric":
                if self.embeddings is None:
                    raise UserError("a metric path needs the embeddings of the tokens: set_embeddings")
                points = self.embeddings
                if config.metric_normalized:
                    points = torch.nn.functional.normalize(points, dim=-1)
                self._path = MetricPath(
                    points, config.metric_power, config.metric_scale, config.metric_exponent
                )
            else:
                self._path = MixturePath(
                    config.num_tokens, config.path, config.mask_token_id, config.kappa_power
                )
        return self._path

    def set_embeddings(self, embeddings: Tensor) -> None:
        """Gives the embeddings (V, D) by which a metric path measures distances."""
        self.embeddings = embeddings.detach().float()
        self._path = None

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        """Times t from 0, evenly; ``sigmas`` are 1 - t and end with 0. The path's tables go to the device."""
        moved = self.embeddings.to(device) if self.embeddings is not None else None
        if moved is not None and moved is not self.embeddings:
            self.set_embeddings(moved)
        times = torch.arange(num_inference_steps + 1, dtype=torch.float64) / num_inference_steps
        self.num_inference_steps = num_inference_steps
        self.sigmas = 1 - times
        self.timesteps = times[:-1].float().to(device)
        self._step_index = 0

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """The next tokens (B, L), for logits (B, L, V) and tokens (B, L)."""
        index = int((self.timesteps - timestep).abs().argmin())
        t, t_next = (1 - float(s) for s in self.sigmas[index : index + 2])
        law = self.path.law(t, t_next, self.config.rule, self.config.corrector)
        posterior = self.path.log_posterior(model_output, sample).exp()
        generators = generator if isinstance(generator, list) else [generator] * len(sample)
        rows = []
        for probs, x, source in zip(posterior, sample, generators, strict=True):
            x1 = _draw(probs, source)
            rows.append(_draw(law.rows(x, x1), source))
        return (torch.stack(rows),)


def _draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One state of each row (N, S), on the generator's device and back."""
    device = probs.device if generator is None else generator.device
    return torch.multinomial(probs.to(device), 1, generator=generator)[:, 0].to(probs.device)
