"""YAML for recipes and overrides: the safe loader, with less trust and fewer surprises.

Beyond what ``yaml.safe_load`` refuses (tags that name Python objects), anchors and aliases, deep nesting
and repeated keys are errors: the first two can blow up a small file, the last silently loses settings.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_NESTING = 16


def parse_yaml(text: str) -> Any:
    """The value that a YAML text stands for.

    Raises:
        ValueError: one line that says what is wrong and where.
    """
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).replace('"<unicode string>", ', "").split())) from None


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refusal("anchors and aliases are not allowed", event)
        if self.depth >= MAX_NESTING:
            raise _refusal(f"nested deeper than {MAX_NESTING} levels", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise _refusal(f"key {key.value!r} is repeated", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-4 as a string; here it is the number that its writer means.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _refusal(problem: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)
