"""What samplers of tokens do to logits before they draw: temperature, top-k and top-p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrl.errors import UserError


def reshape_logits(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    never: int | None = None,
) -> Tensor:
    """Logits (..., V) after temperature, top-k and top-p; what is cut off has -inf.

    ``top_p`` keeps the smallest set of likeliest tokens whose mass reaches it. ``never`` is a token that is
    no data, the mask: it takes no place among the likeliest.

    Raises:
        UserError: for a temperature, top_k or top_p that means nothing.
    """
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
        if not isinstance(value, int | float | None):
            raise UserError(f"{name} = {value!r}: must be a number")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature = {temperature!r}: must be a finite number of at least 0")
    if top_k is not None and (top_k < 1 or top_k != int(top_k)):
        raise UserError(f"top_k = {top_k!r}: must be an integer of at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p = {top_p!r}: must be above 0 and at most 1")
    if never is not None and never < logits.shape[-1]:
        never_here = torch.arange(logits.shape[-1], device=logits.device) == never
        logits = logits.masked_fill(never_here, float("-inf"))
    if temperature == 0:
        top_k = 1
    elif temperature != 1:
        logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), float("-inf"))
    return logits
