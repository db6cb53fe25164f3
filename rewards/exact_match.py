"""Reward ``exact_match``: is the answer the right one, word for word?

Both texts are compared after `normalized`: lower case, punctuation and articles left out, spaces made one, as
usual for short answers (SQuAD, arXiv 1606.05250). The record's ``answer`` is a text or a list of right texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.answers import normalized, right_answers
from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, register
from flowrl.reward import Samples


@register("reward", "exact_match")
class ExactMatch:
    """1 if the sampled text is one of the record's right answers, else 0; higher is better."""

    class Config(ComponentConfig):
        """No options."""

    def __init__(self, config: Config) -> None:
        """Nothing to keep."""

    def __call__(
        self, samples: Samples, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        """Scores (B,), float32; reads the texts and the ``answer`` of each record.

        Raises:
            UserError: for samples that are no texts, or a record without ``answer``.
        """
        if samples.texts is None:
            raise UserError("reward exact_match: scores texts, and these samples are pictures")
        scores = []
        for text, record in zip(samples.texts, metadata, strict=True):
            right = right_answers(record, "exact_match")
            scores.append(float(normalized(text) in {normalized(answer) for answer in right}))
        return torch.tensor(scores, dtype=torch.float32)
