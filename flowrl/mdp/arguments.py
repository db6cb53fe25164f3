"""Which arguments of a pipeline's call a recipe may give."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from flowrl.errors import UserError
from flowrl.registry import nearest

# Arguments of pipeline calls that the wrapper gives itself, and the one value that replay can honour of
# those by which a pipeline treats the steps of its loop differently.
GIVEN = {"self", "prompt", "num_inference_steps", "generator", "latents", "output_type", "return_dict"}
POSITIONAL = {"cfg_trunc_ratio": 1.0, "skip_guidance_layers": None}


def check_arguments(
    call: Callable[..., Any], pipeline: str, section: str, options: dict[str, Any], replayed: bool
) -> None:
    """Raises UserError for arguments that a pipeline's call cannot take from a recipe.

    Args:
        call: the pipeline's ``__call__``.
        pipeline: its class, for the message.
        section: the config key of the arguments.
        options: the arguments.
        replayed: whether the steps of such a call are replayed, which rules out some arguments.
    """
    legal = set(signature(call).parameters) - GIVEN
    for key, value in options.items():
        if key not in legal:
            raise UserError(
                f"unknown key {section}.{key}{nearest(key, legal)}: "
                f"not an argument of {pipeline} that a recipe can give"
            )
        if key == "negative_prompt" and not isinstance(value, str | None):
            raise UserError(f"{section}.{key} = {value!r}: one text for all samples is needed")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{section}.{key} = {value!r}: must be a finite number")
        if replayed and key in POSITIONAL and value != POSITIONAL[key]:
            raise UserError(
                f"{section}.{key} = {value!r} treats steps by their position in the sampler's "
                f"loop, which a replayed step does not have; legal: {POSITIONAL[key]!r}"
            )


@contextmanager
def refusals(pipe: Any, call: dict[str, Any], guidance: dict[str, Any]) -> Iterator[None]:
    """Makes a UserError of what the pipeline's own check of its arguments raises."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not any(frame.name == "check_inputs" for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise UserError(
            f"{type(pipe).__name__} refuses model.call = {call} with sampler.guidance = {guidance}: {error}"
        ) from error
