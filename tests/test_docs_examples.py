"""The documentation: its Python examples run as written, its YAML parses, its links lead somewhere."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from flowrl import registry
from flowrl.config import RunConfig
from flowrl.safe_yaml import parse_yaml

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")
FILE_NAME = re.compile(r"# (?P<name>\w+\.py)$")


def blocks(page: Path, language: str) -> list[str]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [match["body"] for match in found if match["language"] == language]


def examples(page: Path) -> dict[str, str]:
    """Python blocks by the file name in their first line; one without a name is ``page_<number>.py``."""
    named = {}
    for number, text in enumerate(blocks(page, "python")):
        match = FILE_NAME.match(text.partition("\n")[0])
        named[match["name"] if match else f"{page.stem}_{number}.py"] = text
    return named


def anchors(page: Path) -> set[str]:
    """The fragments that a page's headings give, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


WITH_CODE = [page for page in PAGES if examples(page)]


@pytest.fixture
def _restored() -> Iterator[None]:
    for kind in registry.PACKAGES:
        registry.names(kind)
    components = {kind: dict(known) for kind, known in registry._components.items()}
    modules = set(sys.modules)
    yield
    for kind, known in components.items():
        registry._components[kind].clear()
        registry._components[kind].update(known)
    for name in set(sys.modules) - modules:
        if name.startswith("flowrl_plugin_"):
            del sys.modules[name]


def uses(text: str, name: str) -> bool:
    """Whether an example loads or imports the file of another."""
    return (
        f'load_plugin("{name}")' in text
        or re.search(rf"^from {name[:-3]} import", text, re.MULTILINE) is not None
    )


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _restored: None
) -> None:
    files = examples(page)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "assets").symlink_to(ROOT / "assets")  # examples run at the top of the project
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in files:
        if not any(uses(text, name) for text in files.values()):  # else it runs with those that use it
            runpy.run_path(name)
    for name in files:
        sys.modules.pop(name[:-3], None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_yaml_of_a_page_uses_the_keys_of_a_recipe(page: Path) -> None:
    for text in blocks(page, "yaml"):
        tree = parse_yaml(text)
        assert set(tree) <= {*RunConfig.model_fields, "extends"}, text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = match["target"] or match["image"]
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, fragment = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists():
            broken.append(target)
        elif fragment and place.suffix == ".md" and fragment not in anchors(place):
            broken.append(target)
    assert not broken, f"{page.relative_to(ROOT)}: {broken}"
