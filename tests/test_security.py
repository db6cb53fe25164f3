"""What untrusted input can do: nothing is unpickled, no recipe names code, no file blows up memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, python_files

from flowrl import config
from flowrl.errors import UserError
from flowrl.safe_yaml import MAX_NESTING

SERIALIZERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "joblib",
    "dill",
    "cloudpickle",
    "jsonpickle",
}
# Modules that read pickles behind a friendlier name.
UNPICKLERS = {"torch.package", "multiprocessing.connection"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "commands.getoutput"}
YAML_LOADERS = {
    f"yaml.{name}"
    for name in (
        "load",
        "load_all",
        "full_load",
        "full_load_all",
        "unsafe_load",
        "unsafe_load_all",
        "Loader",
        "FullLoader",
        "UnsafeLoader",
        "CLoader",
    )
}
FILES = python_files()
MINIMAL = "model: {path: m}\ndata: {train: prompts.txt}\nrewards: [{name: scene}]\n"


def _dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> full name, for names that imports bind."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _call_problems(call: ast.Call, name: str) -> Iterator[str]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}

    def is_constant(key: str, value: object) -> bool:
        given = keywords.get(key)
        return isinstance(given, ast.Constant) and given.value is value

    if name == "torch.load" and not is_constant("weights_only", True):
        yield "torch.load without weights_only=True"
    if name in BUILTINS:
        yield f"{name}("
    if name in SHELLS:
        yield name
    if is_constant("shell", True):
        yield "shell=True"
    if is_constant("trust_remote_code", True):
        yield "trust_remote_code=True"
    if is_constant("allow_pickle", True):
        yield "allow_pickle=True"
    if "custom_pipeline" in keywords:
        yield "custom_pipeline="
    if is_constant("use_safetensors", False):
        yield "use_safetensors=False"


def problems(source: str) -> list[str]:
    """Lines of a file that could run what a data file says."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    found = []
    for node in ast.walk(tree):
        said: list[str] = []
        if isinstance(node, ast.Import):
            said = [alias.name for alias in node.names if alias.name.split(".")[0] in SERIALIZERS]
            said += [alias.name for alias in node.names if alias.name in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            said = [node.module] if node.module.split(".")[0] in SERIALIZERS or names & UNPICKLERS else []
            said += sorted(names & (YAML_LOADERS | SHELLS))
        elif isinstance(node, ast.Attribute) and _dotted(node) in YAML_LOADERS | SHELLS:
            said = [_dotted(node)]
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            head, _, rest = name.partition(".")
            full = ".".join(filter(None, [aliases.get(head, head), rest]))
            said = list(_call_problems(node, full))
        found += [f"line {node.lineno}: {what}" for what in said]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_data(path: Path) -> None:
    found = problems(path.read_text(encoding="utf-8"))
    assert not found, f"{path.relative_to(ROOT)}: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from joblib import load",
        "def f():\n    import dill",
        "import torch\ntorch.load(p)",
        "import torch\ntorch.load(p, weights_only=False)",
        "import torch\ntorch.load(p, weights_only=flag)",
        "from torch import load\nload(p)",
        "import torch as t\nt.load(p)",
        "eval(text)",
        "exec(text)",
        "compile(text, 'x', 'exec')",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load",
        "import yaml\nclass L(yaml.FullLoader): pass",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "import os\nos.system(text)",
        "from os import system",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "DiffusionPipeline.from_pretrained(p, custom_pipeline=name)",
        "import numpy\nnumpy.load(p, allow_pickle=True)",
    ],
)
def test_the_check_sees_what_it_must(source: str) -> None:
    assert problems(source)


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile(text)",
        "import torch\ntorch.compile(model)\nmodel.eval()",
        "import torch\ntorch.load(p, weights_only=True)",
        "import yaml\nyaml.safe_load(text)",
        "AutoModel.from_pretrained(p, trust_remote_code=allowed)",
        "import subprocess\nsubprocess.run(['ls'])",
    ],
)
def test_the_check_leaves_harmless_code_alone(source: str) -> None:
    assert not problems(source)


def _refused(tmp_path: Path, text: str, *overrides: str) -> str:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        config.load(recipe, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:pathlib.Path.touch [MARKER]",
        "!!python/object/new:os.system ['touch MARKER']",
        "!!python/object:pathlib.Path {}",
        "!!python/name:os.system",
        "!!python/module:os",
        "!include MARKER",
    ],
)
def test_a_recipe_cannot_make_python_objects(tmp_path: Path, value: str) -> None:
    marker = tmp_path / "marker"
    value = value.replace("MARKER", str(marker))
    message = _refused(tmp_path, f"{MINIMAL}description: {value}\n")
    assert "could not determine a constructor" in message
    _refused(tmp_path, MINIMAL, f"model.call.x={value}")
    assert not marker.exists()


@pytest.mark.parametrize("anchor", ["a", "-a", "_a", "1"])
def test_alias_bombs_are_refused(tmp_path: Path, anchor: str) -> None:
    lines = [f"x0: &{anchor}0 [lol, lol]"]
    lines += [f"x{n}: &{anchor}{n} [*{anchor}{n - 1}, *{anchor}{n - 1}]" for n in range(1, 60)]
    message = _refused(tmp_path, MINIMAL + "\n".join(lines))
    assert "anchors and aliases are not allowed" in message and "line 4" in message
    assert "anchors" in _refused(tmp_path, MINIMAL, f"model.call.x=[&{anchor} 1, *{anchor}]")
    assert "anchors" in _refused(tmp_path, f"{MINIMAL}training: {{<<: *{anchor}}}\n")


def test_an_ampersand_or_a_star_in_a_text_is_no_anchor(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"# see *this* & that\n{MINIMAL}description: R&D, two * three, a &b and *c\n")
    assert config.load(recipe).description == "R&D, two * three, a &b and *c"


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused(tmp_path: Path, opening: str) -> None:
    text = f"{MINIMAL}description:\n  {opening * 10_000}"
    assert f"nested deeper than {MAX_NESTING} levels" in _refused(tmp_path, text)


def test_oversize_recipes_are_refused_unread(tmp_path: Path) -> None:
    message = _refused(tmp_path, MINIMAL + "#" * config.MAX_RECIPE_BYTES)
    assert "larger than" in message and str(config.MAX_RECIPE_BYTES) in message


@pytest.mark.parametrize("key", ["_target_", "model._target_", "sampler._partial_", "training.__class__"])
def test_import_paths_are_unknown_keys(tmp_path: Path, key: str) -> None:
    message = _refused(tmp_path, MINIMAL, f"{key}=os.system")
    assert f"unknown key {key}" in message and "legal keys" in message


def test_the_environment_is_not_interpolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_SECRET", "hunter2")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"{MINIMAL}description: ${{env:FLOWRL_SECRET}} $FLOWRL_SECRET ${{oc.env:FLOWRL_SECRET}}\n"
    )
    assert "hunter2" not in repr(config.load(recipe))


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/b", "..", ".hidden", "a\\b", "a\0b", "a\nb", ""])
def test_a_run_name_is_one_folder_name(tmp_path: Path, name: str) -> None:
    message = _refused(tmp_path, yaml.safe_dump({**yaml.safe_load(MINIMAL), "name": name}))
    assert "name of one folder" in message


def test_remote_code_is_no_recipe_key(tmp_path: Path) -> None:
    assert "unknown key model.trust_remote_code" in _refused(
        tmp_path, MINIMAL, "model.trust_remote_code=true"
    )
