"""Short answers: what a record says is right, and when two texts are the same answer."""

from __future__ import annotations

import re
from typing import Any

from flowrl.errors import UserError

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = re.compile(r"[^\w\s]")


def normalized(text: str) -> str:
    """Lower case, without punctuation and articles, words parted by one space."""
    return " ".join(ARTICLES.sub(" ", PUNCTUATION.sub(" ", text.lower())).split())


def right_answers(record: dict[str, Any], reward: str) -> list[str]:
    """The right texts of a record.

    Raises:
        UserError: if ``answer`` is missing, or neither a text nor a list of texts.
    """
    answer = record.get("answer")
    answers: list[Any] = answer if isinstance(answer, list) else [answer]
    if not answers or not all(isinstance(text, str) and text.strip() for text in answers):
        raise UserError(
            f"reward {reward}: the record of {record.get('prompt')!r} has answer = {answer!r}; "
            "a text or a list of texts is needed"
        )
    return answers
