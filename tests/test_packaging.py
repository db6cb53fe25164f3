"""The wheel: what is in it, and that it imports from somewhere else than this folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, python_files

SOURCES = ("flowrl", "pipelines", "rewards", "configs")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = set(PROJECT["tool"]["setuptools"]["packages"])


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout's own build folder neither helps nor changes."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), ".", cwd=copy)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    run(*command, "--disable-pip-version-check", "--target", str(target), str(wheel), cwd=target)
    return target


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def in_the_wheel(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return name if name.startswith("flowrl/") else f"flowrl/{name}"


def test_every_package_folder_is_declared() -> None:
    folders = {in_the_wheel(path).rpartition("/")[0].replace("/", ".") for path in python_files(*SOURCES)}
    assert folders == PACKAGES


def test_the_wheel_holds_every_module_recipe_and_template(wheel: Path) -> None:
    data = [path for pattern in ("configs/*.yaml", "flowrl/**/*.j2") for path in ROOT.glob(pattern)]
    expected = {in_the_wheel(path) for path in [*python_files(*SOURCES), *data]}
    assert not expected - contents(wheel)


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    top = {name.split("/")[0] for name in contents(wheel)}
    (metadata,) = top - {"flowrl"}
    assert metadata.endswith(".dist-info")
    kinds = {Path(name).suffix for name in contents(wheel) if name.startswith("flowrl/")}
    assert kinds <= {".py", ".yaml", ".j2", ".typed"}
    assert wheel.stat().st_size < 2_000_000


def test_the_wheel_carries_its_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        read = {name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist()}
    assert "License-Expression: Apache-2.0" in read["METADATA"]
    assert "Apache License" in read["LICENSE"]
    assert "flowrl = flowrl.cli:main" in read["entry_points.txt"]


def test_it_imports_from_another_folder(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, importlib.resources, json, flowrl\n"
        f"found = [importlib.import_module(n).__file__ for n in {sorted(PACKAGES)!r}]\n"
        "recipes = [r.name for r in importlib.resources.files('flowrl.configs').iterdir()]\n"
        "print(json.dumps([found, recipes, flowrl.__version__]))\n"
    )
    # An editable install of the checkout puts finders before the path; -S leaves site-packages out, and
    # they come back behind the installed wheel.
    path = os.pathsep.join([str(installed), *(p for p in sys.path if p.endswith("-packages"))])
    files, recipes, version = json.loads(run(sys.executable, "-S", "-c", code, cwd=tmp_path, PYTHONPATH=path))
    assert all(Path(file).is_relative_to(installed) for file in files), files
    assert {path.name for path in ROOT.glob("configs/*.yaml")} <= set(recipes)
    assert (installed / f"flowrl_suite-{version}.dist-info").is_dir()


def test_components_resolve_in_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    from flowrl import registry

    code = (
        "import json, flowrl\nfrom flowrl import registry\n"
        "print(json.dumps([flowrl.__file__, {k: registry.names(k) for k in registry.PACKAGES}]))\n"
    )
    path = os.pathsep.join([str(installed), *(p for p in sys.path if p.endswith("-packages"))])
    file, names = json.loads(run(sys.executable, "-S", "-c", code, cwd=tmp_path, PYTHONPATH=path))
    assert Path(file).is_relative_to(installed)
    for kind in registry.PACKAGES:
        assert set(names[kind]) <= set(registry.names(kind))
        assert names[kind] or not registry.names(kind)
