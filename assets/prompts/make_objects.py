"""Writes objects_train.jsonl and objects_heldout.jsonl: prompts of everyday objects for large models.

    python assets/prompts/make_objects.py

The six tasks and the metadata schema are GenEval's (arXiv 2310.11513); objects, colours and wording are our
own lists. The two files share no prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flowrl.shapes.prompts import write_jsonl

OBJECTS = (
    "apple", "backpack", "banana", "bench", "bicycle", "bird", "boat", "book", "bottle", "bowl", "bus",
    "cake",
    "car", "cat", "chair", "clock", "couch", "cow", "cup", "dog", "elephant", "fork", "giraffe", "horse",
    "kite",
    "knife", "laptop", "motorcycle", "orange", "oven", "pizza", "scissors", "sheep", "sink", "skateboard",
    "spoon", "suitcase", "surfboard", "toaster", "train", "truck", "umbrella", "vase", "zebra",
)  # fmt: skip
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
TRAIN, HELD_OUT = 2000, 240
IRREGULAR = {"knife": "knives", "sheep": "sheep", "scissors": "scissors"}


def article(noun: str) -> str:
    """The noun phrase with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def plural(noun: str) -> str:
    """The plural of a noun of the list."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    return noun + ("es" if noun.endswith(("s", "sh", "ch", "x")) else "s")


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """One record of a task drawn by lot."""
    tag = ("single_object", "two_object", "counting", "colors", "position", "color_attr")[rng.integers(6)]
    a, b = (str(noun) for noun in rng.choice(OBJECTS, 2, replace=False))
    hue, other = (str(color) for color in rng.choice(COLORS, 2, replace=False))
    count, relation = int(rng.integers(2, 5)), RELATIONS[rng.integers(4)]
    first: dict[str, Any] = {"class": a, "count": 1}
    second: dict[str, Any] = {"class": b, "count": 1}
    include, exclude = [first], []
    if tag == "single_object":
        phrase = article(a)
    elif tag == "two_object":
        phrase, include = f"{article(a)} and {article(b)}", [first, second]
    elif tag == "counting":
        phrase, include = f"{NUMBERS[count]} {plural(a)}", [first | {"count": count}]
        exclude = [{"class": a, "count": count + 1}]
    elif tag == "colors":
        phrase, include = article(f"{hue} {a}"), [first | {"color": hue}]
    elif tag == "position":
        phrase = f"{article(a)} {relation} {article(b)}"
        include = [second, first | {"position": [relation, 0]}]
    else:
        phrase = f"{article(f'{hue} {a}')} and {article(f'{other} {b}')}"
        include = [first | {"color": hue}, second | {"color": other}]
    return {"tag": tag, "include": include, "exclude": exclude, "prompt": f"a photo of {phrase}"}


def main() -> None:
    """Draws distinct prompts with a fixed seed and writes both files."""
    rng = np.random.default_rng(0)
    records: dict[str, dict[str, Any]] = {}
    while len(records) < TRAIN + HELD_OUT:
        record = draw(rng)
        records.setdefault(record["prompt"], record)
    chosen = list(records.values())
    folder = Path(__file__).parent
    write_jsonl(chosen[:HELD_OUT], folder / "objects_heldout.jsonl")
    write_jsonl(chosen[HELD_OUT:], folder / "objects_train.jsonl")


if __name__ == "__main__":
    main()
