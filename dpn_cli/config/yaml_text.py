"""Parse YAML from users into plain values, and refuse input that would exhaust memory or the stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import yaml

# A config is four levels deep and has a hundred values; aliases count as often as they are used.
DEEPEST, MOST_VALUES = 20, 10_000


# The parser in C takes a tenth of the time; PyYAML has it wherever it was built with libyaml.
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Parser):  # type: ignore[misc]  # its class is known when PyYAML is
    """PyYAML's safe loader, to which a key that is given twice in a mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        inside = range(node.start_mark.index, node.end_mark.index)  # keys merged by << stand elsewhere
        own = (key for key, _ in node.value if key.start_mark.index in inside and isinstance(key, yaml.ScalarNode))
        for key, times in Counter(key.value for key in own if key.value != "<<").items():
            if times > 1:
                raise ValueError(f"the key {key!r} is given twice (mapping in line {node.start_mark.line + 1})")
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(text: str) -> Any:
    """Parse YAML. Raises `ValueError` with a message of one line."""
    depth = deepest = 0
    try:
        for event in yaml.parse(text, _Parser):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            deepest = max(depth, deepest)
            if depth > DEEPEST:
                break  # PyYAML would descend into it by recursion
        value = yaml.load(text, _Loader) if deepest <= DEEPEST else None
    except (yaml.YAMLError, ValueError) as error:  # what looks like a date or a number may be none
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error
    if deepest > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    _count(value, 0, 0)
    return value


def _count(value: object, depth: int, count: int) -> int:
    """Count values, those behind an alias each time."""
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep, or an alias inside what it stands for")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | set | tuple) else ()
    for part in parts:
        count = _count(part, depth + 1, count)
    if count >= MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    return count + 1
