"""The shape of the code: who may import whom, how large a file may be, what every file must say."""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, python_files

LEAF_FOLDERS = {
    "flowrl.kernels": "flowrl/kernels",
    "flowrl.advantages": "flowrl/advantages",
    "flowrl.objectives": "flowrl/objectives",
    "flowrl.pipelines": "pipelines",
    "flowrl.rewards": "rewards",
}
CITED = ("flowrl.kernels", "flowrl.advantages", "flowrl.objectives")
MAX_LEAF_LINES = 250
MAX_SPINE_LINES = 400
BELOW_TRAINING = ("flowrl.training", "flowrl.build", "flowrl.tools", "flowrl.cli")
ENGINE = "flowrl.training.distributed"
TRACKING = "flowrl.training.tracking"
INVISIBLE = {*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xA0, 0xAD, 0xFEFF}


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("flowrl") else f"flowrl.{name}"


FILES = {_module(path): path for path in python_files("flowrl", "pipelines", "rewards", "configs")}
LEAVES = {m: p for m, p in FILES.items() if m.rpartition(".")[0] in LEAF_FOLDERS and p.name != "__init__.py"}
SPINE = {module: path for module, path in FILES.items() if module not in LEAVES}


def each(files: dict[str, Path]) -> pytest.MarkDecorator:
    """One test for each file, named by its module."""
    return pytest.mark.parametrize("module", sorted(files))


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def _targets(node: ast.AST, module: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            inside = parts if FILES[module].name == "__init__.py" else parts[:-1]
            base = ".".join([*inside[: len(inside) - node.level + 1], *filter(None, [base])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def imports(module: str, top_level_only: bool = False) -> set[str]:
    """Names of all modules that a file imports, those inside functions included."""
    nodes = tree(module).body if top_level_only else ast.walk(tree(module))
    return {target for node in nodes for target in _targets(node, module)}


def within(name: str, packages: tuple[str, ...] | list[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_every_file_is_found() -> None:
    assert {"flowrl", "flowrl.registry", "flowrl.pipelines", "flowrl.rewards", "flowrl.configs"} <= set(FILES)


@each(SPINE)
def test_the_spine_names_no_leaf(module: str) -> None:
    named = {name for name in imports(module) if within(name, [*LEAF_FOLDERS])}
    assert not named, f"{module} imports {sorted(named)}; components are reached through the registry"


@each(LEAVES)
def test_a_leaf_stands_alone(module: str) -> None:
    forbidden = [*LEAF_FOLDERS, *BELOW_TRAINING]
    named = {name for name in imports(module) if within(name, forbidden)}
    assert not named, f"{module} imports {sorted(named)}; a leaf imports the spine only, never a leaf"


@each({module: path for module, path in FILES.items() if within(module, ("flowrl.mdp",))})
def test_mdp_is_the_ground_floor(module: str) -> None:
    named = {name for name in imports(module) if within(name, BELOW_TRAINING)}
    assert not named, f"{module} imports {sorted(named)}"


@each({module: path for module, path in FILES.items() if within(module, ("flowrl.training",))})
def test_training_does_not_know_who_builds_it(module: str) -> None:
    named = {name for name in imports(module) if within(name, BELOW_TRAINING[1:])}
    assert not named, f"{module} imports {sorted(named)}"


def test_imports_have_no_circles() -> None:
    graph = {
        module: {name for name in imports(module, top_level_only=True) if name in FILES and name != module}
        for module in FILES
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


@each(FILES)
def test_only_the_engine_knows_accelerate(module: str) -> None:
    named = {name for name in imports(module) if within(name, ("accelerate",))}
    if module == ENGINE:
        return
    if module == TRACKING:
        assert all(within(name, ("accelerate.tracking",)) for name in named), sorted(named)
        at_import = {n for n in imports(module, top_level_only=True) if within(n, ("accelerate",))}
        assert not at_import, f"{module} imports {sorted(at_import)} at the top; do so where it is used"
        return
    assert not named, f"{module} imports {sorted(named)}; only {ENGINE} may"


@each(FILES)
def test_file_size(module: str) -> None:
    lines = len(FILES[module].read_text(encoding="utf-8").splitlines())
    limit = MAX_LEAF_LINES if module in LEAVES else MAX_SPINE_LINES
    assert lines <= limit, f"{FILES[module].relative_to(ROOT)} has {lines} lines, at most {limit} are allowed"


@each(FILES)
def test_library_code_does_not_print(module: str) -> None:
    calls = [
        node.lineno
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not calls, f"{module}: print( in line {calls}"


def _unreadable(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    problems = [f"invisible U+{ord(character):04X}" for character in text if ord(character) in INVISIBLE]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NAME) and not token.string.isascii():
            problems.append(f"line {token.start[0]}: {token.string}")
    return problems


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_and_names_are_ascii_and_nothing_is_invisible(path: Path) -> None:
    problems = _unreadable(path)
    assert not problems, f"{path.relative_to(ROOT)}: {problems}"


def _public(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Public functions and classes, and the public methods and classes within them."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if child.name.startswith("_"):
            continue
        yield f"{prefix}{child.name}", child
        if isinstance(child, ast.ClassDef):
            yield from _public(child, f"{prefix}{child.name}.")


def _first_line(node: ast.AST) -> str:
    assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    text = ast.get_docstring(node) or ""
    return text.splitlines()[0] if text else ""


def _is_sentence(line: str) -> bool:
    return (
        bool(line)
        and line.rstrip("`)")[-1:] in tuple(".:?;")
        and (not line[0].isalpha() or line[0].isupper())
    )


def test_what_counts_as_a_sentence() -> None:
    assert _is_sentence("The noise of a step.") and _is_sentence("``mean + std * noise``.")
    assert not _is_sentence("") and not _is_sentence("the noise") and not _is_sentence("The noise of")


@each(FILES)
def test_docstrings_start_with_a_sentence(module: str) -> None:
    documented = [("module", tree(module)), *_public(tree(module))]
    bad = [
        f"{name}: {_first_line(node)!r}" for name, node in documented if not _is_sentence(_first_line(node))
    ]
    if FILES[module].name == "__init__.py":
        bad = [line for line in bad if not line.startswith("module: 'flowrl")]
    assert not bad, f"{module}: {bad}"


@each({module: path for module, path in LEAVES.items() if within(module, CITED)})
def test_formulas_name_their_source(module: str) -> None:
    docstring = ast.get_docstring(tree(module)) or ""
    assert "Source:" in docstring, f"{module}: the module docstring gives the formula and its 'Source:'"


def _imported_by(module: str, suspects: tuple[str, ...]) -> set[str]:
    code = f"import sys, {module}; print(*(n for n in {suspects!r} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@each(
    {m: p for m, p in SPINE.items() if m in ("flowrl", "flowrl.errors", "flowrl.registry", "flowrl.config")}
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    heavy = ("torch", "numpy", "diffusers", "transformers", "accelerate", "peft", "matplotlib")
    assert not _imported_by(module, heavy)


@each({module: path for module, path in SPINE.items() if module == "flowrl.cli"})
def test_the_command_line_starts_fast(module: str) -> None:
    assert not _imported_by(
        module, ("torch", "diffusers", "transformers", "accelerate", "peft", "open_clip", "cv2")
    )


@each(
    {
        module: path
        for module, path in FILES.items()
        if within(module, ("flowrl.kernels", "flowrl.objectives"))
    }
)
def test_mathematics_imports_no_model_library(module: str) -> None:
    named = {
        n for n in imports(module) if within(n, ("diffusers", "transformers", "accelerate", "peft", "yaml"))
    }
    assert not named, f"{module} imports {sorted(named)}"
