"""The recipe: what a YAML file under configs/ may say, and how it is read.

A recipe holds only what differs from the defaults below. Components are written as
``{name: <registered name>, <its own options>}`` and validated by their own ``Config`` when they are built.
``a.b=value`` on the command line overrides a key; ``extends: other.yaml`` takes another recipe as the
base, one level deep. YAML is read by the safe loader without anchors, deep nesting or repeated keys;
nothing in a recipe can name code that is not registered.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, parse
from flowrl.safe_yaml import parse_yaml

MAX_RECIPE_BYTES = 256 * 1024
Component = dict[str, Any]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(ComponentConfig, BaseModel):
    """Base of all sections: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _default_names(cls, data: Any) -> Any:
        """A component written without a name is the default one with other options."""
        if not isinstance(data, dict):
            return data
        named = dict(data)
        for key, value in data.items():
            field = cls.model_fields.get(key)
            default = field.default if field is not None else None
            if isinstance(value, dict) and isinstance(default, dict) and "name" in default:
                named[key] = {"name": default["name"], **value}
        return named


class AdapterConfig(Section):
    """What is trained: a LoRA, or all weights of the networks."""

    kind: Literal["lora", "full"] = "lora"
    rank: Positive = 32
    alpha: Annotated[float, Field(gt=0)] = 64.0
    targets: list[str] | None = Field(None, description="module name endings; None: every linear layer")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="ignored: dropout is always off")
    init: Literal["gaussian", "default"] = "gaussian"


class ModelConfig(Section):
    """The pipeline that is trained and deployed."""

    path: str = Field(description="a diffusers pipeline folder or a hub id")
    revision: str | None = None
    variant: str | None = None
    wrapper: Component = Field({"name": "flow_matching"}, description="how its sampler becomes an MDP")
    networks: list[str] | None = Field(None, description="components to train; None: the denoisers")
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    adapter: AdapterConfig = AdapterConfig()
    base_adapters: list[str] = Field([], description="LoRA folders that belong to the frozen start policy")
    gradient_checkpointing: bool = False
    call: dict[str, Any] = Field({}, description="keyword arguments of the pipeline call, always given")


class SamplerConfig(Section):
    """How the rollout samples, and which of its steps are trained."""

    num_steps: Positive = 10
    kernel: Component = {"name": "flow_sde"}
    steps: Component = {"name": "all"}
    guidance: dict[str, Any] = Field({}, description="the pipeline's own guidance arguments")
    cfg_gradient: Literal["both", "conditional"] = Field(
        "both", description="conditional: the unconditional forward of CFG carries no gradient"
    )
    shared_initial_noise: bool = Field(False, description="all members of a group start from one noise")


class DataConfig(Section):
    """Prompt files: JSONL in GenEval's metadata schema, or plain text with one prompt a line."""

    train: str
    held_out: str | None = None


class OptimizerConfig(Section):
    """AdamW with linear warm-up."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    warmup_updates: NonNegative = 0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class EmaConfig(Section):
    """Average of the trained weights; what evaluation and export use when it is on."""

    decay: Decay = Field(0.0, description="0: no average is kept")
    warmup: bool = Field(True, description="decay grows as (1 + n) / (10 + n) up to its value")


class OldPolicyConfig(Section):
    """The acting policy of forward-process objectives: a slow copy of the trained one."""

    max_decay: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5, description="share of the old kept per update"
    )
    growth: Annotated[float, Field(ge=0)] = Field(0.001, description="decay = min(max_decay, growth * n)")


class TrainingConfig(Section):
    """The size of an iteration: P prompts with G samples each, cut into micro-batches."""

    iterations: Positive = 100
    prompts_per_iteration: Positive = 8
    group_size: Annotated[int, Field(ge=2)] = 8
    micro_batch_size: Positive = 8
    inner_passes: Positive = Field(1, description="how often the samples of an iteration are trained on")
    updates_per_pass: Positive = Field(1, description="optimizer steps per pass")
    max_bad_updates: Positive = Field(3, description="abort after so many non-finite updates in a row")

    @property
    def samples(self) -> int:
        """Samples of an iteration over all ranks, N = P G."""
        return self.prompts_per_iteration * self.group_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an iteration over all ranks."""
        return self.samples // self.micro_batch_size

    @model_validator(mode="after")
    def _geometry(self) -> TrainingConfig:
        legal = [n for n in _divisors(self.samples) if self.group_size % n == 0 or n % self.group_size == 0]
        if self.samples % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} does not divide the {self.samples} samples of an "
                f"iteration (prompts_per_iteration {self.prompts_per_iteration} x group_size "
                f"{self.group_size}); nearest that fit: {_nearest(self.micro_batch_size, legal)}"
            )
        if self.micro_batch_size not in legal:
            raise ValueError(
                f"group_size {self.group_size} and micro_batch_size {self.micro_batch_size}: one must divide "
                "the other, so that a micro-batch holds whole groups or equal parts of one; nearest "
                f"micro_batch_size that fits: {_nearest(self.micro_batch_size, legal)}"
            )
        if self.micro_batches % self.updates_per_pass:
            raise ValueError(
                f"updates_per_pass {self.updates_per_pass} does not divide the {self.micro_batches} "
                "micro-batches of an iteration; nearest that do: "
                f"{_nearest(self.updates_per_pass, _divisors(self.micro_batches))}"
            )
        return self


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _nearest(value: int, legal: list[int]) -> str:
    return ", ".join(map(str, sorted(sorted(legal, key=lambda n: abs(n - value))[:3])))


class EvaluationConfig(Section):
    """Held-out evaluation with the deployed pipeline and its own scheduler."""

    every: NonNegative = Field(10, description="iterations between evaluations; 0: only before and after")
    num_steps: Positive | None = Field(None, description="None: as in the rollout")
    scheduler: str | None = Field(None, description="a diffusers scheduler to deploy with; None: the model's")
    guidance: dict[str, Any] | None = Field(None, description="None: as in the rollout")
    samples_per_prompt: Positive = 1
    max_prompts: Positive | None = None
    batch_size: Positive = 16
    seed: int = 20_000
    grid_prompts: Positive = 12
    rewards: list[Component] = Field([], description="judges; the first is the headline; empty: as trained")


class CheckpointConfig(Section):
    """Atomic, checksummed checkpoints."""

    every: Positive = 10
    keep: Positive = 2


class DistributedConfig(Section):
    """Several processes; how many there are is the launcher's business."""

    timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="seconds without a word from another process after which a run ends"
    )
    sharding: Literal["none", "full"] = Field(
        "none", description="full: weights, gradients and optimizer state are spread over processes (FSDP2)"
    )


class TrackingConfig(Section):
    """Where curves go beside metrics.jsonl."""

    tensorboard: bool = True
    wandb: bool = False
    project: str = "flowrl"


class RunConfig(Section):
    """A whole recipe."""

    description: str = ""
    source: str = Field("", description="paper and published settings that the recipe follows")
    name: str = Field("", description="run name; default: the recipe's file name")
    output: str = Field("runs", description="runs are written to <output>/<name>")
    seed: int = 0
    model: ModelConfig
    sampler: SamplerConfig = SamplerConfig()
    data: DataConfig
    rewards: list[Component] = Field(min_length=1)
    advantage: Component = {"name": "group_relative"}
    objective: Component = {"name": "grpo"}
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    old_policy: OldPolicyConfig = OldPolicyConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("rewards")
    @classmethod
    def _named(cls, value: list[Component]) -> list[Component]:
        for spec in value:
            if "name" not in spec:
                raise ValueError(f"a reward needs a name, got {spec}")
        return value

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str) -> str:
        if not re.fullmatch(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*", value):
            raise ValueError("a run's name is the name of one folder: no / or \\, no leading dot")
        return value

    def digest(self) -> str:
        """SHA-256 of the resolved recipe."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Reads a recipe.

    Args:
        path: the YAML file.
        overrides: ``a.b=value`` strings, values in YAML.

    Raises:
        UserError: for a missing or malformed file, an unknown key (with the nearest spelling), or a value
            out of range; the message names the key.
    """
    path = Path(path)
    tree = _read(path)
    base = tree.pop("extends", None)
    if base is not None:
        parent = _read(path.parent / str(base))
        if "extends" in parent:
            raise UserError(
                f"{path}: extends {base}, which itself extends {parent['extends']}: one level only"
            )
        parent.pop("name", None)  # two recipes never share a run folder by inheritance
        tree = _merge(parent, tree)
    for override in overrides:
        _override(tree, override)
    tree.setdefault("name", path.stem)
    config: RunConfig = parse(RunConfig, tree, "")
    return config


def resolve_path(value: str, recipe: Path | None = None) -> Path | None:
    """A path in a recipe: relative to the working folder, else to the recipe's folder or its parent."""
    places = [Path.cwd()]
    if recipe is not None:
        places += [recipe.resolve().parent, recipe.resolve().parent.parent]
    return next((place / value for place in places if (place / value).exists()), None)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        found = path.parent.glob("*.yaml") if path.parent.is_dir() else []
        siblings = sorted(p.name for p in found if not p.name.startswith("."))
        raise UserError(f"no recipe {path}" + (f"; there are: {', '.join(siblings)}" if siblings else ""))
    if path.stat().st_size > MAX_RECIPE_BYTES:
        raise UserError(f"{path} is larger than {MAX_RECIPE_BYTES} bytes: not a recipe")
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections")
    return tree


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Sections merge key by key; a component whose name changes is replaced as a whole."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        if (
            isinstance(old, dict)
            and isinstance(value, dict)
            and value.get("name", old.get("name")) == old.get("name")
        ):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"override {override!r}: write it as section.key=value")
    *sections, last = key.split(".")
    if not all((*sections, last)):
        raise UserError(f"override {override!r}: write it as section.key=value")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML: {error}") from None
    node: Any = tree
    for section in sections:
        if isinstance(node, list):
            node = _element(node, section, override)
            continue
        node = node.setdefault(section, {})
        if not isinstance(node, dict | list):
            raise UserError(f"override {override!r}: {section} is not a section")
    if isinstance(node, list):
        _element(node, last, override)
        node[int(last)] = value
    else:
        node[last] = value


def _element(node: list[Any], index: str, override: str) -> Any:
    if not index.isdecimal() or int(index) >= len(node):
        raise UserError(f"override {override!r}: {index} is not an index into a list of {len(node)}")
    return node[int(index)]
