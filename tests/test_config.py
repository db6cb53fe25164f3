"""Recipes: reading, overriding, extending, and every recipe under configs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from flowrl import config, registry
from flowrl.config import Component, RunConfig, TrainingConfig, load
from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, parse
from flowrl.safe_yaml import parse_yaml
from flowrl.training.distributed import Engine

RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
MINIMAL: dict[str, Any] = {
    "model": {"path": "some/model"},
    "data": {"train": "prompts.txt"},
    "rewards": [{"name": "scene"}],
}
# Where a recipe holds components, and of which kind; "*" is an index.
COMPONENTS = {
    "model.wrapper": "wrapper",
    "sampler.kernel": "kernel",
    "sampler.steps": "steps",
    "rewards.*": "reward",
    "advantage": "advantage",
    "objective": "objective",
    "evaluation.rewards.*": "reward",
}
ON_EVERY_REWARD = ("weight", "label")  # read by the set of rewards, not by the reward


def write(folder: Path, tree: object, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path, MINIMAL)


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    assert "\n" not in str(caught.value), "one clear line"
    return str(caught.value)


# ------------------------------------------------------------------------------------------------- reading


def test_a_minimal_recipe_gets_every_default(recipe: Path) -> None:
    run = load(recipe)
    assert run.name == "recipe"
    assert run.sampler.kernel == {"name": "flow_sde"}
    assert run.training == TrainingConfig()
    with pytest.raises(ValueError, match="frozen"):
        run.seed = 1


@pytest.mark.parametrize("key", ["model", "model.path", "data", "data.train", "rewards"])
def test_what_has_no_default_must_be_said(tmp_path: Path, key: str) -> None:
    tree = yaml.safe_load(yaml.safe_dump(MINIMAL))
    section, _, last = key.rpartition(".")
    del (tree[section] if section else tree)[last]
    assert refused(write(tmp_path, tree)) == f"{key} is missing"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("sede", "seed"),
        ("trainning.iterations", "training"),
        ("training.iteration", "iterations"),
        ("optimizer.learning_rate", None),
        ("model.adapter.rnak", "rank"),
        ("sampler.num_step", "num_steps"),
        ("evaluation.evry", "every"),
    ],
)
def test_unknown_keys_give_the_nearest_spelling_and_the_legal_ones(
    recipe: Path, key: str, nearest: str | None
) -> None:
    message = refused(recipe, f"{key}=1")
    unknown = key.split(".")[0] if nearest == "training" else key
    assert message.startswith(f"unknown key {unknown}")
    assert "legal keys: " in message
    assert (f"(did you mean '{nearest}'?)" in message) == (nearest is not None)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.iterations=0", "greater than 0"),
        ("training.iterations=true", "a number is needed"),
        ("training.iterations=many", "training.iterations = 'many'"),
        ("training.group_size=1", "greater than or equal to 2"),
        ("optimizer.lr=-1", "optimizer.lr = -1"),
        ("optimizer.lr=.inf", "finite"),
        ("optimizer.lr=.nan", "optimizer.lr"),
        ("optimizer.betas=[0.9, 1.5]", "optimizer.betas.1 = 1.5"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("ema.decay=1", "ema.decay = 1"),
        ("model.dtype=float32", "'fp32', 'bf16' or 'fp16'"),
        ("model.adapter.kind=loar", "'lora' or 'full'"),
        ("sampler.cfg_gradient=none", "'both' or 'conditional'"),
        ("sampler.kernel=cps", "sampler.kernel = 'cps'"),
        ("training=3", "training = 3"),
        ("rewards=[]", "at least 1 item"),
        ("rewards=[{weight: 2}]", "a reward needs a name"),
        ("name=a/b", "name of one folder"),
    ],
)
def test_values_out_of_range_are_named(recipe: Path, override: str, said: str) -> None:
    assert said in refused(recipe, override)


def test_a_missing_recipe_lists_its_neighbours(recipe: Path) -> None:
    recipe.with_name(".draft.yaml").write_text("")
    message = refused(recipe.with_name("recipes.yaml"))
    assert "no recipe" in message and message.endswith("there are: recipe.yaml")
    assert refused(recipe.parent / "nowhere" / "x.yaml").endswith("x.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a recipe is a mapping"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("model: [", "line 1"),
        ("model: {path: m}\nmodel: {path: n}\n", "key 'model' is repeated"),
        ("model: {path: m, path: n}\n", "key 'path' is repeated"),
        ("description: 2024-13-45\n", "month"),
        ("seed: " + "9" * 5000, "recipe.yaml: "),
    ],
)
def test_malformed_recipes_are_refused_with_the_file_named(tmp_path: Path, text: str, said: str) -> None:
    message = refused(write(tmp_path, text))
    assert said in message and "recipe.yaml" in message


def test_a_recipe_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "utf-8" in refused(path)


def test_numbers_in_scientific_notation_are_numbers(recipe: Path) -> None:
    run = load(recipe, ["optimizer.lr=1e-4", "model.call.strength=5e-1", "sampler.kernel.noise_level=1E0"])
    assert run.optimizer.lr == 1e-4
    assert run.model.call == {"strength": 0.5}
    assert run.sampler.kernel["noise_level"] == 1.0
    assert parse_yaml("[1e3, -2E+2, 1.5e-3, 1e, e3, '1e3']") == [1000.0, -200.0, 0.0015, "1e", "e3", "1e3"]


def test_a_component_without_a_name_is_the_default_one(tmp_path: Path) -> None:
    tree = {**MINIMAL, "sampler": {"kernel": {"noise_level": 0.3}}}
    run = load(write(tmp_path, tree), ["objective.kl_coef=0.1"])
    assert run.sampler.kernel == {"name": "flow_sde", "noise_level": 0.3}
    assert run.objective == {"name": "grpo", "kl_coef": 0.1}


# ---------------------------------------------------------------------------------------------- overriding


def test_overrides_reach_nested_keys_list_elements_and_whole_sections(recipe: Path) -> None:
    run = load(
        recipe,
        [
            "training.group_size=4",
            "model.adapter.targets=[to_q, to_k]",
            "rewards.0.weight=2.5",
            "rewards.0.name=other",
            "sampler.kernel={name: cps, noise_level: 0.8}",
            "sampler.kernel.noise_level=0.9",
            "model.adapter={kind: full}",
            "description=a = b",
            "data.held_out=",
        ],
    )
    assert run.training.group_size == 4
    assert run.rewards == [{"name": "other", "weight": 2.5}]
    assert run.sampler.kernel == {"name": "cps", "noise_level": 0.9}
    assert run.model.adapter.kind == "full" and run.model.adapter.targets is None
    assert run.description == "a = b"
    assert run.data.held_out is None


@pytest.mark.parametrize("override", ["", "=", "=3", "seed", "training.=3", ".seed=3", "a..b=3"])
def test_badly_written_overrides(recipe: Path, override: str) -> None:
    assert refused(recipe, override) == f"override {override!r}: write it as section.key=value"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rewards.1.weight=3", "1 is not an index into a list of 1"),
        ("rewards.first.weight=3", "first is not an index"),
        ("rewards.-1.weight=3", "-1 is not an index"),
        ("rewards.\u00b2.weight=3", "is not an index"),
        ("rewards.7={name: x}", "7 is not an index"),
        ("model.path.deeper=3", "path is not a section"),
        ("seed=[1", "not valid YAML"),
        ("seed={a: 1, a: 2}", "key 'a' is repeated"),
    ],
)
def test_overrides_that_lead_nowhere(recipe: Path, override: str, said: str) -> None:
    message = refused(recipe, override)
    assert said in message and "override" in message


# ----------------------------------------------------------------------------------------------- extending


def test_extends_merges_sections_and_replaces_other_components(tmp_path: Path) -> None:
    base = {
        **MINIMAL,
        "name": "base",
        "seed": 7,
        "sampler": {"num_steps": 6, "kernel": {"name": "cps", "noise_level": 0.8}},
        "objective": {"name": "grpo", "kl_coef": 0.04},
    }
    child = {
        "extends": "sub/base.yaml",
        "sampler": {"kernel": {"name": "dance_sde"}},
        "objective": {"clip_low": 1e-3},
        "rewards": [{"name": "other"}],
    }
    write(tmp_path, base, "sub/base.yaml")
    run = load(write(tmp_path, child, "child.yaml"), ["seed=8"])
    assert run.name == "child", "a child does not inherit its base's run folder"
    assert run.seed == 8
    assert run.sampler.num_steps == 6
    assert run.sampler.kernel == {"name": "dance_sde"}
    assert run.objective == {"name": "grpo", "kl_coef": 0.04, "clip_low": 1e-3}
    assert run.rewards == [{"name": "other"}]


def test_extends_is_one_level_deep(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "a.yaml")
    write(tmp_path, {"extends": "a.yaml"}, "b.yaml")
    assert load(tmp_path / "b.yaml").model.path == "some/model"
    message = refused(write(tmp_path, {"extends": "b.yaml"}, "c.yaml"))
    assert "c.yaml" in message and "extends a.yaml: one level only" in message
    assert "one level only" in refused(write(tmp_path, {"extends": "d.yaml"}, "d.yaml"))


def test_extends_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    message = refused(write(tmp_path, {"extends": "bsae.yaml"}, "child.yaml"))
    assert "no recipe" in message and "bsae.yaml" in message and "there are: child.yaml" in message
    assert "unknown key extends" in refused(write(tmp_path, MINIMAL), "extends=child.yaml")


# ------------------------------------------------------------------------------------------------ geometry


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((8, 8, 7, 1), "micro_batch_size 7 does not divide the 64 samples"),
        ((8, 8, 7, 1), "nearest that fit: 2, 4, 8"),
        ((1, 3, 64, 1), "nearest that fit: 1, 3"),
        ((4, 6, 4, 1), "one must divide the other"),
        ((4, 6, 4, 1), "nearest micro_batch_size that fits: 2, 3, 6"),
        ((8, 8, 8, 3), "updates_per_pass 3 does not divide the 8 micro-batches"),
        ((8, 8, 8, 3), "nearest that do: 1, 2, 4"),
    ],
)
def test_geometry_errors_give_the_nearest_legal_values(
    recipe: Path, sizes: tuple[int, int, int, int], said: str
) -> None:
    keys = ("prompts_per_iteration", "group_size", "micro_batch_size", "updates_per_pass")
    message = refused(recipe, *(f"training.{key}={size}" for key, size in zip(keys, sizes, strict=True)))
    assert message.startswith("training: ") and said in message


def test_the_legal_values_that_geometry_errors_give_are_legal(recipe: Path) -> None:
    for prompts in (1, 2, 3, 8):
        for group in (2, 3, 4, 6, 9):
            for micro in range(1, prompts * group + 2):
                sizes = {"prompts_per_iteration": prompts, "group_size": group}
                try:
                    TrainingConfig(**sizes, micro_batch_size=micro)
                except ValueError as error:
                    listed = str(error).split("fit")[1].split("[")[0].lstrip("s: ").split(", ")
                    for value in listed:
                        TrainingConfig(**sizes, micro_batch_size=int(value))


def test_derived_sizes() -> None:
    training = TrainingConfig(prompts_per_iteration=6, group_size=4, micro_batch_size=8)
    assert (training.samples, training.micro_batches) == (24, 3)


# ---------------------------------------------------------------------------------------------- the digest


def test_the_digest_tells_recipes_apart(tmp_path: Path) -> None:
    recipe = write(tmp_path, MINIMAL)
    same = write(
        tmp_path, {**MINIMAL, "seed": 0, "sampler": {"kernel": {"name": "flow_sde"}}}, "b/recipe.yaml"
    )
    assert load(recipe).digest() == load(same).digest()
    assert load(recipe).digest() != load(recipe, ["seed=1"]).digest()
    assert len(load(recipe, ["model.call={day: 2024-01-02, table: {1: 2, a: 3}}"]).digest()) == 64


def test_resolve_path_looks_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "configs").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    recipe = write(tmp_path / "project" / "configs", MINIMAL)
    prompts = tmp_path / "project" / "prompts.txt"
    prompts.write_text("a red circle\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert config.resolve_path("prompts.txt") is None
    assert config.resolve_path("prompts.txt", recipe) == prompts
    assert config.resolve_path("prompts.text", recipe) is None


# --------------------------------------------------------------------------------------- shipped recipes


def default_valued(given: Any, default: Any, where: str = "") -> list[str]:
    """Keys of a recipe's tree that say what the defaults say already."""
    if isinstance(given, dict) and isinstance(default, dict):
        same = []
        for key, value in given.items():
            if key in default and key != "name":
                same += default_valued(value, default[key], f"{where}.{key}".lstrip("."))
        return same or ([where] if given and given == default and where else [])
    return [where] if given == default else []


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    """The default of every key that has one, nested; sections without a default give their keys'."""
    tree = {}
    for key, field in model.model_fields.items():
        annotation = field.annotation
        if field.get_default(call_default_factory=True) is not PydanticUndefined:
            tree[key] = _plain(field.get_default(call_default_factory=True))
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            tree[key] = defaults_of(annotation)
    return tree


def components(tree: dict[str, Any]) -> list[tuple[str, str, Component]]:
    """(kind, place, spec) of every component that a recipe's tree writes down."""
    found = []
    for place, kind in COMPONENTS.items():
        nodes: list[tuple[str, Any]] = [("", tree)]
        for part in place.split("."):
            following: list[tuple[str, Any]] = []
            for where, node in nodes:
                if part == "*":
                    following += [(f"{where}.{number}", child) for number, child in enumerate(node)]
                elif isinstance(node, dict) and part in node:
                    following.append((f"{where}.{part}".lstrip("."), node[part]))
            nodes = following
        found += [(kind, where, spec) for where, spec in nodes]
    return found


def component_defaults(kind: str, name: str) -> dict[str, Any]:
    shared = {"weight": 1.0, "label": name} if kind == "reward" else {}
    return {**defaults_of(registry.get(kind, name).Config), **shared}


def test_the_table_of_components_is_complete() -> None:
    def places(model: type[BaseModel], where: str) -> set[str]:
        found = set()
        for key, field in model.model_fields.items():
            at, default, kind = f"{where}{key}", field.default, field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= places(kind, f"{at}.")
            elif isinstance(default, dict) and "name" in default:
                found.add(at)
            elif kind == list[Component]:
                found.add(f"{at}.*")
        return found

    assert places(RunConfig, "") == set(COMPONENTS)


def test_default_valued_keys_are_found() -> None:
    tree = {
        "seed": 0,
        "model": {"path": "x", "dtype": "fp32", "adapter": {"rank": 32, "alpha": 8}},
        "optimizer": {"betas": [0.9, 0.999]},
        "sampler": {"kernel": {"name": "flow_sde"}, "guidance": {"guidance_scale": 1.0}},
        "training": {"iterations": 7},
    }
    expected = {"seed", "model.dtype", "model.adapter.rank", "optimizer.betas", "sampler.kernel"}
    assert set(default_valued(tree, defaults_of(RunConfig))) == expected


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_and_its_components_exist(path: Path) -> None:
    run = load(path)
    for kind, where, spec in components(run.model_dump()):
        options = {key: value for key, value in spec.items() if key != "name"}
        if kind == "reward":
            options = {key: value for key, value in options.items() if key not in ON_EVERY_REWARD}
        built: ComponentConfig = parse(registry.get(kind, spec["name"]).Config, options, where)
        assert isinstance(built, ComponentConfig)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_says_only_what_differs(path: Path) -> None:
    tree = parse_yaml(path.read_text(encoding="utf-8"))
    base, inherited = defaults_of(RunConfig), {}
    if "extends" in tree:
        base = load(path.parent / tree.pop("extends")).model_dump(mode="json")
        base.pop("name")
        inherited = {where: spec for _, where, spec in components(base) if "rewards." not in where}
    same = default_valued(tree, base)
    names = {where: spec["name"] for _, where, spec in components(load(path).model_dump())}
    for kind, where, spec in components(tree):
        name = names[where]
        defaults = component_defaults(kind, name)
        if inherited.get(where, {}).get("name") == name:
            defaults |= inherited[where]
        same += default_valued({key: spec[key] for key in spec if key != "name"}, defaults, where)
    assert not same, f"{path.name} repeats defaults: {sorted(set(same))}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_says_where_it_comes_from(path: Path) -> None:
    run = load(path)
    assert run.description or run.source
    assert run.name == path.stem, "a recipe's run is called as its file"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_finds_its_files(path: Path) -> None:
    run = load(path)
    for value in filter(None, (run.data.train, run.data.held_out)):
        assert config.resolve_path(value, path) is not None, f"{path.name}: no file {value}"


def test_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.device = 'gpu'; legal: auto, cpu, cuda, cuda:N"):
        Engine("gpu")
