"""Prompts of the shapes task in GenEval's metadata schema, and their split into train and held-out.

A record has ``prompt``, ``tag`` (one of GenEval's six tasks), ``include`` and ``exclude``, as in the
GenEval benchmark's metadata files (arXiv 2310.11513), so that files of either kind can be read alike.
``exclude`` bounds the count of every shape, so that a scene with anything extra in it is wrong.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.shapes.domain import COLORS, RELATIONS, SHAPES

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
TEMPLATES = (
    "a photo of {}",
    "an image of {}",
    "a picture of {}",
    "a drawing of {}",
    "a sketch of {}",
    "a painting of {}",
)
NUMBERS = {2: "two", 3: "three", 4: "four"}
HELD_OUT_FRACTION = 0.25


def all_prompts() -> list[dict[str, Any]]:
    """Every prompt of the domain, in a fixed order."""
    return [
        _record(tag, template.format(phrase), include)
        for tag, phrase, include in _phrases()
        for template in TEMPLATES
    ]


def split_prompts(held_out: bool, per_tag: int | None = None) -> list[dict[str, Any]]:
    """The train or the held-out prompts; the two are disjoint, and complete if ``per_tag`` is None.

    A quarter of each task is held out: those whose text hashes lowest, so nothing has to be stored.

    Args:
        held_out: which of the two.
        per_tag: at most so many prompts of each task, those that hash lowest.
    """
    chosen: list[dict[str, Any]] = []
    for tag in TAGS:
        records = sorted((r for r in all_prompts() if r["tag"] == tag), key=_text_hash)
        cut = round(HELD_OUT_FRACTION * len(records))
        chosen.extend((records[:cut] if held_out else records[cut:])[:per_tag])
    return chosen


def write_jsonl(records: list[dict[str, Any]], path: Path) -> None:
    """Writes one record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _phrases() -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    pairs = list(itertools.permutations(SHAPES, 2))
    for shape in SHAPES:
        yield "single_object", f"a {shape}", [{"class": shape, "count": 1}]
    for a, b in pairs:
        yield (
            "two_object",
            f"a {a} and a {b}",
            [{"class": a, "count": 1}, {"class": b, "count": 1}],
        )
    for shape, (count, word) in itertools.product(SHAPES, NUMBERS.items()):
        yield "counting", f"{word} {shape}s", [{"class": shape, "count": count}]
    for shape, color in itertools.product(SHAPES, COLORS):
        yield "colors", f"a {color} {shape}", [{"class": shape, "count": 1, "color": color}]
    for (a, b), relation in itertools.product(pairs, RELATIONS):
        yield (
            "position",
            f"a {a} {relation} a {b}",
            # GenEval lists the reference object first and gives the position to the second entry.
            [
                {"class": b, "count": 1},
                {"class": a, "count": 1, "position": [relation, 0]},
            ],
        )
    for (a, b), (color_a, color_b) in itertools.product(pairs, itertools.permutations(COLORS, 2)):
        yield (
            "color_attr",
            f"a {color_a} {a} and a {color_b} {b}",
            [
                {"class": a, "count": 1, "color": color_a},
                {"class": b, "count": 1, "color": color_b},
            ],
        )


def _record(tag: str, prompt: str, include: list[dict[str, Any]]) -> dict[str, Any]:
    allowed = {shape: 0 for shape in SHAPES}
    for entry in include:
        allowed[entry["class"]] += entry["count"]
    exclude = [{"class": shape, "count": count + 1} for shape, count in allowed.items()]
    return {"tag": tag, "include": include, "exclude": exclude, "prompt": prompt}


def _text_hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(record["prompt"].encode()).hexdigest()
