"""Reward ``option_match``: does the answer name the right option and no other one?

The record's ``options`` are texts, its ``answer`` is one of them. An option is named by its text, as whole
words anywhere in the answer, or by its letter (A, B, ...) if that is all there is or stands first: "b",
"(B)", "B. blue". Texts are normalised as by ``exact_match``.

Source: the reward of dFlowGRPO's understanding task (arXiv 2605.09291): 1 for the right option, else 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.answers import normalized, right_answers
from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, register
from flowrl.reward import Samples

LETTER = re.compile(r"\s*(?:\(([A-Za-z])\)|([A-Za-z])(?:[.):]|\s*$))")


@register("reward", "option_match")
class OptionMatch:
    """1 if the right option, and only that, is named, else 0; higher is better. NaN without options."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config) -> None:
        """Nothing to keep."""

    def __call__(
        self, samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        """Scores (B,), float32; reads the texts, and ``options`` and ``answer`` of each record.

        Raises:
            UserError: for samples that are no texts, or an ``answer`` that is none of the ``options``.
        """
        if samples.texts is None:
            raise UserError("reward option_match: scores texts, and these samples are pictures")
        scores = [option_score(text, record) for text, record in zip(samples.texts, metadata, strict=True)]
        return torch.tensor(scores, dtype=torch.float32)


def option_score(text: str, record: dict[str, Any]) -> float:
    """1 or 0; NaN without options."""
    options = record.get("options")
    if not options:
        return float("nan")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise UserError(f"reward option_match: options = {options!r}; a list of texts is needed")
    (answer, *_) = right_answers(record, "option_match")
    if answer not in options:
        raise UserError(
            f"reward option_match: answer = {answer!r} of {record.get('prompt')!r} is none of the options "
            + ", ".join(options)
        )
    return float(named_options(text, options) == {options.index(answer)})


def named_options(text: str, options: Sequence[str]) -> set[int]:
    """Which options a text names, by their numbers."""
    letter = LETTER.match(text)
    if letter:
        number = ord((letter[1] or letter[2]).upper()) - ord("A")
        if number < len(options):
            return {number}
    words = f" {normalized(text)} "
    found = [k for k, option in enumerate(options) if f" {normalized(option)} " in words]
    # "dark red" is not also "red".
    return {
        k
        for k in found
        if not any(
            other != k and f" {normalized(options[k])} " in f" {normalized(options[other])} "
            for other in found
        )
    }
