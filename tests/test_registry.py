"""Components by name: unknown and taken names, plugins by file and by module, plugins that fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import Field

from flowrl import registry
from flowrl.errors import UserError
from flowrl.registry import ComponentConfig, build, get, load_plugin, names, register

PLUGIN = '''
from flowrl.registry import ComponentConfig, register

@register("advantage", "{name}")
class Mine:
    """A user's own."""

    class Config(ComponentConfig):
        """Options."""

        scale: float = 2.0

    def __init__(self, config: Config) -> None:
        self.config = config
'''


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Registrations and imports of a test end with it."""
    for kind in registry.PACKAGES:
        names(kind)
    components = {kind: dict(known) for kind, known in registry._components.items()}
    modules = set(sys.modules)
    yield
    for kind, known in components.items():
        registry._components[kind].clear()
        registry._components[kind].update(known)
    for name in set(sys.modules) - modules:
        if name.startswith(("flowrl_plugin_", "my_plugin")):
            del sys.modules[name]


def plugin(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def fails(*args: object, **kwargs: object) -> str:
    function, *rest = args
    with pytest.raises(UserError) as caught:
        function(*rest, **kwargs)  # type: ignore[operator]
    return str(caught.value)


def test_built_in_names_resolve() -> None:
    for kind in registry.PACKAGES:
        for name in names(kind):
            cls = get(kind, name)
            assert issubclass(cls.Config, ComponentConfig)
            assert cls.__doc__ or sys.modules[cls.__module__].__doc__, f"{kind} {name} has no docs entry"


def test_every_option_of_a_component_has_a_default() -> None:
    """So that a bare name is a complete spec; what cannot have a default is an argument, not an option."""
    missing = {
        f"{kind} {name}: {key}"
        for kind in ("kernel", "steps", "advantage", "objective", "wrapper")
        for name in names(kind)
        for key, field in get(kind, name).Config.model_fields.items()
        if field.is_required()
    }
    assert not missing


def test_unknown_names_give_the_nearest_spelling_and_the_known_ones() -> None:
    message = fails(get, "kernel", "flow_sed")
    assert "unknown kernel 'flow_sed' (did you mean 'flow_sde'?)" in message
    assert f"known: {', '.join(names('kernel'))}" in message
    assert "did you mean" not in fails(get, "kernel", "zzzzzz")


def test_unknown_kinds_give_the_nearest_spelling() -> None:
    message = fails(names, "kernels")
    assert "unknown kind of component 'kernels' (did you mean 'kernel'?)" in message
    assert ", ".join(registry.PACKAGES) in message
    assert "unknown kind" in fails(register, "sampler", "x")


def test_a_build_error_names_the_config_key() -> None:
    where = "sampler.kernel"
    assert "sampler.kernel: unknown kernel 'cpss'" in fails(build, "kernel", {"name": "cpss"}, where)
    assert "sampler.kernel: a kernel needs a name" in fails(build, "kernel", {"noise_level": 1.0}, where)
    assert "sampler.kernel: a kernel needs a name" in fails(build, "kernel", {"name": ["cps"]}, where)
    message = fails(build, "kernel", {"name": "cps", "noise_levle": 1.0}, where)
    assert "unknown key sampler.kernel.noise_levle (did you mean 'noise_level'?)" in message
    assert "legal keys: " in message
    message = fails(build, "kernel", {"name": "cps", "noise_level": "loud"}, where)
    assert "sampler.kernel.noise_level = 'loud'" in message and "valid number" in message


def test_a_spec_is_not_changed_and_collaborators_reach_the_constructor() -> None:
    @register("kernel", "with_friend")
    class WithFriend:
        class Config(ComponentConfig):
            size: int = Field(1, ge=1)

        def __init__(self, config: Config, friend: str) -> None:
            self.config, self.friend = config, friend

    spec = {"name": "with_friend", "size": 3}
    built = build("kernel", spec, "x", friend="bob")
    assert (built.config.size, built.friend) == (3, "bob")
    assert spec == {"name": "with_friend", "size": 3}
    with pytest.raises(ValueError, match="frozen"):
        built.config.size = 4
    assert "x.size = 0" in fails(build, "kernel", {**spec, "size": 0}, "x", friend="bob")


def test_a_component_without_options_says_so() -> None:
    @register("kernel", "bare")
    class Bare:
        class Config(ComponentConfig):
            pass

    assert "legal keys: none" in fails(build, "kernel", {"name": "bare", "x": 1}, "k")


def test_a_name_is_given_once() -> None:
    def first() -> None:
        @register("kernel", "mine")
        class Kernel:
            class Config(ComponentConfig):
                pass

    def second() -> None:
        @register("kernel", "mine")
        class Kernel:
            class Config(ComponentConfig):
                pass

    first()
    first()  # a module that is imported again brings the same class again
    assert "kernel 'mine' is already registered by" in fails(second)


def test_two_modules_may_not_share_a_name_even_if_their_classes_are_called_alike(tmp_path: Path) -> None:
    load_plugin(plugin(tmp_path / "a" / "plugin_a.py", PLUGIN.format(name="mine")))
    message = fails(load_plugin, plugin(tmp_path / "b" / "plugin_a.py", PLUGIN.format(name="mine")))
    assert "already registered" in message and "plugin_a.py, line" in message
    assert "flow_sde" in names("kernel")


def test_a_component_needs_a_config_class() -> None:
    class NoConfig:
        pass

    class WrongConfig:
        Config = dict

    for cls in (NoConfig, WrongConfig):
        assert f"{cls.__name__} needs a nested `Config(ComponentConfig)`" in fails(
            register("kernel", "n"), cls
        )


def test_a_plugin_file_registers_once_however_often_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plugin(tmp_path / "my_plugin.py", PLUGIN.format(name="from_file"))
    load_plugin(path)
    cls = get("advantage", "from_file")
    monkeypatch.chdir(tmp_path)
    load_plugin("my_plugin.py")
    assert get("advantage", "from_file") is cls
    assert build("advantage", {"name": "from_file", "scale": 3}, "advantage").config.scale == 3.0


def test_a_plugin_module_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path / "my_plugin_package" / "__init__.py", "")
    plugin(tmp_path / "my_plugin_package" / "parts.py", PLUGIN.format(name="from_module"))
    monkeypatch.syspath_prepend(tmp_path)
    load_plugin("my_plugin_package.parts")
    assert "from_module" in names("advantage")


def test_a_plugin_may_be_loaded_before_the_built_in_components(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_loaded", set())
    load_plugin(plugin(tmp_path / "plugin_early.py", PLUGIN.format(name="early")))
    assert {"early", "group_relative"} <= set(names("advantage"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import no_such_module_of_mine",
            "line 1: ModuleNotFoundError: No module named 'no_such_module_of_mine'",
        ),
        ("x = 1\nx.y", "line 2: AttributeError"),
        ("x = (", "SyntaxError"),
        (
            "from flowrl.registry import register\n\nregister('kernle', 'x')",
            "line 3: UserError: unknown kind",
        ),
    ],
)
def test_a_plugin_that_fails_is_named_each_time(tmp_path: Path, text: str, said: str) -> None:
    path = plugin(tmp_path / "my_plugin.py", text)
    for _ in range(2):
        message = fails(load_plugin, path)
        assert f"--plugin {path}" in message and said in message


def test_a_mended_plugin_loads(tmp_path: Path) -> None:
    path = plugin(tmp_path / "my_plugin.py", "raise RuntimeError('no')")
    assert "RuntimeError: no" in fails(load_plugin, path)
    plugin(tmp_path / "my_plugin.py", PLUGIN.format(name="mended"))
    load_plugin(path)
    assert "mended" in names("advantage")


def test_a_plugin_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "plugin.py")
    assert f"--plugin {missing}: no such file" in fails(load_plugin, missing)
    assert "No module named 'no_plugin_of_mine'" in fails(load_plugin, "no_plugin_of_mine")
