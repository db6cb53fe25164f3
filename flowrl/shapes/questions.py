"""Questions about scenes of the shapes domain, with their answers: a small task of understanding.

A record has ``prompt`` (the question), ``image`` (a data URI), ``answer``, ``options`` where a choice is
asked for, and ``tag``, the kind of question. Only questions with one right answer are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from flowrl.pictures import data_uri
from flowrl.shapes.domain import COLORS, POSITION_MARGIN, RELATIONS, SHAPES, Scene, SceneObject, sample_scene
from flowrl.shapes.prompts import split_prompts
from flowrl.shapes.render import render

COUNTS = ("zero", "one", "two", "three", "four")
WORDS = sorted(
    {*"what color is the how many are there which shape or what yes no".split(), *COUNTS, *COLORS, *SHAPES}
    | {f"{shape}s" for shape in SHAPES}
    | {word for relation in RELATIONS for word in relation.split()}
)

Question = tuple[str, str, tuple[str, ...]]  # text, answer, options


def ask(scene: Scene, rng: np.random.Generator) -> tuple[str, Question]:
    """A kind of question that the scene allows, all equally likely, and one of that kind."""
    possible = [(tag, made) for tag, make in KINDS.items() if (made := make(scene, rng)) is not None]
    return possible[rng.integers(len(possible))]


def question_records(count: int, seed: int, size: int = 64) -> list[dict[str, Any]]:
    """So many questions about new scenes; the prompts of the scenes are the training ones."""
    rng = np.random.default_rng(seed)
    prompts = split_prompts(held_out=False)
    records = []
    for _ in range(count):
        scene = sample_scene(prompts[rng.integers(len(prompts))], rng)
        tag, (text, answer, options) = ask(scene, rng)
        picture = data_uri(Image.fromarray(render(scene, size)))
        record: dict[str, Any] = {"prompt": text, "tag": tag, "answer": answer, "image": picture}
        records.append(record | ({"options": list(options)} if options else {}))
    return records


def _color(scene: Scene, rng: np.random.Generator) -> Question | None:
    item = _any_of(_unique(scene), rng)
    return item and (f"what color is the {item.shape}", item.color, ())


def _choice(scene: Scene, rng: np.random.Generator) -> Question | None:
    item = _any_of(_unique(scene), rng)
    if item is None:
        return None
    other = _any_of([color for color in COLORS if color != item.color], rng)
    options = (item.color, other) if rng.random() < 0.5 else (other, item.color)
    return f"is the {item.shape} {options[0]} or {options[1]}", item.color, options


def _shape(scene: Scene, rng: np.random.Generator) -> Question | None:
    colors = [item.color for item in scene]
    item = _any_of([item for item in scene if colors.count(item.color) == 1], rng)
    return item and (f"which shape is {item.color}", item.shape, ())


def _count(scene: Scene, rng: np.random.Generator) -> Question | None:
    shape = SHAPES[rng.integers(len(SHAPES))]
    count = sum(item.shape == shape for item in scene)
    return f"how many {shape}s are there", COUNTS[count], ()


def _position(scene: Scene, rng: np.random.Generator) -> Question | None:
    found = _related(scene, rng)
    if found is None:
        return None
    a, relation, b = found
    if rng.random() < 0.5:
        return f"is the {a.shape} {relation} the {b.shape}", "yes", ("yes", "no")
    return f"is the {b.shape} {relation} the {a.shape}", "no", ("yes", "no")


def _object(scene: Scene, rng: np.random.Generator) -> Question | None:
    found = _related(scene, rng)
    if found is None:
        return None
    a, relation, b = found
    return f"what is {relation} the {b.shape}", f"{a.color} {a.shape}", ()


KINDS: dict[str, Callable[[Scene, np.random.Generator], Question | None]] = {
    "color": _color,
    "choice": _choice,
    "shape": _shape,
    "count": _count,
    "position": _position,
    "object": _object,
}


def _any_of(items: Sequence[Any], rng: np.random.Generator) -> Any:
    return items[int(rng.integers(len(items)))] if items else None


def _unique(scene: Scene) -> list[SceneObject]:
    """The objects whose shape is there once."""
    shapes = [item.shape for item in scene]
    return [item for item in scene if shapes.count(item.shape) == 1]


def _related(scene: Scene, rng: np.random.Generator) -> tuple[SceneObject, str, SceneObject] | None:
    """Two objects of a scene of two, and how the first clearly lies to the second."""
    if len(scene) != 2 or len(_unique(scene)) != 2:
        return None
    pairs = [
        (a, relation, b)
        for a, b in (scene, scene[::-1])
        for relation, (dx, dy) in RELATIONS.items()
        if (along := (a.x - b.x) * dx + (a.y - b.y) * dy) > 2 * POSITION_MARGIN
        and along > abs((a.x - b.x) * dy) + abs((a.y - b.y) * dx)
    ]
    return _any_of(pairs, rng)
