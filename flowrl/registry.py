"""Names for components: ``@register("kernel", "cps")`` above a class with a nested ``Config``.

A component is a class with a nested pydantic ``Config`` (a subclass of `ComponentConfig`) and an
``__init__(self, config, ...)``. In a recipe it is written as ``{name: cps, noise_level: 0.8}``. The
packages that hold built-in components are imported only when a kind is first asked for, so that naming
one kind does not pay for the imports of the others. Third parties add theirs by ``--plugin``.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from flowrl.errors import UserError

PACKAGES: dict[str, str] = {
    "kernel": "flowrl.kernels",
    "steps": "flowrl.mdp.steps",
    "advantage": "flowrl.advantages",
    "objective": "flowrl.objectives",
    "wrapper": "flowrl.pipelines",
    "reward": "flowrl.rewards",
    "converter": "flowrl.pipelines",
}

_components: dict[str, dict[str, type[Any]]] = {kind: {} for kind in PACKAGES}
_loaded: set[str] = set()
T = TypeVar("T", bound=type[Any])


class ComponentConfig(BaseModel):
    """Base of every component's ``Config``: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes ``true`` for 1; here it is a slip."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, float, int | None, float | None):
            raise ValueError("a number is needed, not true or false")
        return value


def register(kind: str, name: str) -> Callable[[T], T]:
    """Class decorator that makes a component known as ``name`` among its kind.

    Raises:
        UserError: if the kind is unknown, the name is taken, or the class has no ``Config``.
    """
    known = _of_kind(kind)

    def add(cls: T) -> T:
        config = getattr(cls, "Config", None)
        if not (isinstance(config, type) and issubclass(config, ComponentConfig)):
            raise UserError(f"{kind} {name!r}: {cls.__name__} needs a nested `Config(ComponentConfig)`")
        taken = known.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(f"{kind} {name!r} is already registered by {taken.__module__}")
        known[name] = cls
        return cls

    return add


def names(kind: str) -> list[str]:
    """The registered names of a kind, sorted."""
    _load(kind)
    return sorted(_of_kind(kind))


def get(kind: str, name: str) -> type[Any]:
    """The class registered under a name.

    Raises:
        UserError: for an unknown name; the message gives the nearest spelling and the known names.
    """
    _load(kind)
    known = _of_kind(kind)
    if name not in known:
        raise UserError(f"unknown {kind} {name!r}{nearest(name, known)}; known: {', '.join(sorted(known))}")
    return known[name]


def build(kind: str, spec: dict[str, Any], where: str, **collaborators: Any) -> Any:
    """Builds a component from its spec.

    Args:
        kind: one of `PACKAGES`.
        spec: ``{"name": ..., **config}``.
        where: the config key, for error messages, e.g. ``sampler.kernel``.
        collaborators: keyword arguments that the constructor takes beside its config.

    Raises:
        UserError: naming the key, the value and what is legal.
    """
    options = dict(spec)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"{where}: a {kind} needs a name; known: {', '.join(names(kind))}")
    try:
        cls = get(kind, name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return cls(parse(cls.Config, options, where), **collaborators)


def parse(model: type[BaseModel], options: dict[str, Any], where: str) -> Any:
    """Validates options into a pydantic model, with one clear message for the first problem."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in (where, *first["loc"]) if part != "")
        if first["type"] == "extra_forbidden":
            owner = _owner(model, first["loc"])
            last = str(first["loc"][-1])
            raise UserError(
                f"unknown key {key}{nearest(last, owner)}; legal keys: {', '.join(sorted(owner)) or 'none'}"
            ) from None
        if first["type"] == "missing":
            raise UserError(f"{key} is missing") from None
        given = "" if isinstance(first["input"], dict) else f" = {first['input']!r}"
        raise UserError(f"{key}{given}: {first['msg'].removeprefix('Value error, ')}") from None


def nearest(word: str, known: Any) -> str:
    """`` (did you mean 'x'?)`` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def load_plugin(target: str) -> None:
    """Imports a user's module or file, whose ``@register`` lines then take effect.

    Args:
        target: a path that ends in ``.py``, or the name of an importable module.

    Raises:
        UserError: if it cannot be found or its import fails.
    """
    path = Path(target).resolve()
    if target.endswith(".py") and not path.is_file():
        raise UserError(f"--plugin {target}: no such file")
    try:
        if target.endswith(".py"):
            _import_file(path)
        else:
            importlib.import_module(target)
    except Exception as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        at = f", line {lines[-1]}" if lines else ""
        raise UserError(f"--plugin {target}{at}: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> None:
    name = f"flowrl_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _of_kind(kind: str) -> dict[str, type[Any]]:
    if kind not in _components:
        raise UserError(
            f"unknown kind of component {kind!r}{nearest(kind, PACKAGES)}; known: {', '.join(PACKAGES)}"
        )
    return _components[kind]


def _load(kind: str) -> None:
    if kind in _loaded:
        return
    _of_kind(kind)
    package = importlib.import_module(PACKAGES[kind])
    for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
        importlib.import_module(f"{PACKAGES[kind]}.{module.name}")
    _loaded.add(kind)


def _owner(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The legal keys at the place of an unknown key."""
    owner: Any = model
    for part in location[:-1]:
        field = owner.model_fields.get(part) if hasattr(owner, "model_fields") else None
        annotation = field.annotation if field is not None else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        owner = next((c for c in candidates if hasattr(c, "model_fields")), owner)
    return list(owner.model_fields)
