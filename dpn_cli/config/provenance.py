"""Sources of a config's values, and differences between a run and the paper. Imports no torch.

A config file may have a section ``sources``, which maps dotted keys to a `ValueSource` each. It describes the config
and is not a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, reduce
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from dpn_cli.config.load import PHASES, Plain, build, read_config, read_document, shipped_configs
from dpn_cli.config.schema import Config, Section
from dpn_cli.config.validation_errors import dotted_keys, nearest_key
from dpn_cli.errors import DpnError

NOT_IN_PAPER = "not in the paper"
# Column of the comments that `dump_with_sources` writes.
COMMENT_COLUMN = 36


class ValueSource(Section):
    """Source of the value of a config key; in a file a mapping, or `source` alone as a string.

    Args:
        source: a section of the paper, or "not in the paper: " and the reason for the value.
        paper: the paper's value, where it is not the config's.
        same: other values that agree with the paper, such as null for a value that is worked out.
        unlike: the only values that disagree with the paper, where it names a kind of thing and not a value.
        differs: a sentence about a difference that the value does not show.
    """

    source: Annotated[str, Field(min_length=1)]
    paper: Any = None
    same: tuple[Any, ...] = ()
    unlike: tuple[Any, ...] = ()
    differs: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_mapping(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_claim(self) -> ValueSource:
        if not self.in_paper and self.model_fields_set - {"source"}:
            raise ValueError(f"{NOT_IN_PAPER!r} leaves no value to compare with; give the source alone")
        return self

    @property
    def in_paper(self) -> bool:
        """Return whether the paper states the value or another one."""
        return not self.source.startswith(NOT_IN_PAPER)

    def comment(self) -> str:
        """Return the source, the paper's value where there is another one, and the difference as one line."""
        paper = [f"paper: {format_value(self.paper)}"] if "paper" in self.model_fields_set else []
        return " ".join("; ".join([self.source, *paper, *([self.differs] if self.differs else [])]).split())

    def disagrees(self, value: object, paper: object) -> bool:
        """Return whether the value of a run differs from the paper's."""
        return value in self.unlike if self.unlike else value != paper and value not in self.same


class _Sources(Section):
    sources: dict[str, ValueSource] = Field(default_factory=dict)


def read_sources(name: str, schema: type[Section]) -> dict[str, ValueSource]:
    """Read the section ``sources`` of a shipped config or a YAML file; empty without one.

    Raises `DpnError` for a key that `schema` does not have, and for an entry that is not a `ValueSource`.
    """
    sources = build(_Sources, {"sources": read_document(name).get("sources") or {}}, name).sources
    keys = set(dotted_keys(schema))
    for key in sources:
        if key not in keys:
            close = nearest_key(key, schema)
            raise DpnError(
                f"{name}: sources.{key}: not a config key" + (f"; did you mean {close!r}?" if close in keys else "")
            )
    return sources


def flatten_keys(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of nested mappings."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flatten_keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def differences(config: Config, precision: str) -> list[str] | None:
    """Return where a run of `config` in a precision ("bf16", "fp32") differs from the paper.

    Each entry is ``"key: value (paper: value)"`` or a sentence. None where there is nothing to compare with: demos, own
    images, and architectures that the paper does not have.
    """
    name, of_arch = shipped_of(config.about.table), config.in_paper()
    if config.demo or name is None or of_arch is None:
        return None
    schema = type(config)
    paper, values = _values(build(schema, read_config(name), name)), {**_values(config), "runtime.precision": precision}
    sources = read_sources(name, schema)
    lines, sentences = list[str](), list[str]()
    for key in [key for key in dotted_keys(schema) if key in sources and sources[key].in_paper]:
        source = sources[key]
        paper_value = of_arch.get(key, source.paper if "paper" in source.model_fields_set else paper[key])
        counted = values.get("epochs") not in (None, paper.get("epochs"))
        if source.disagrees(values[key], paper_value) and not (counted and key in _STEPS):
            lines.append(f"{key}: {format_value(values[key])} (paper: {format_value(paper_value)})")
        if source.differs:
            sentences.append(source.differs)
    return lines + sentences


def _values(config: Section) -> Plain:
    """Return the values of a config by dotted key."""
    plain = config.model_dump(mode="json")
    return {
        key: reduce(lambda section, name: section[name], key.split("."), plain) for key in dotted_keys(type(config))
    }


# Keys that other epochs than the paper's decide.
_STEPS = {f"schedule.{name}" for name in ("steps", *PHASES)}


@cache
def shipped_of(table: str) -> str | None:
    """Return the shipped config of a table, as ``about.table`` names it, or None."""
    tables = (
        {} if table.startswith("none") else {read_config(name)["about"]["table"]: name for name in shipped_configs()}
    )
    return tables.get(table)


def format_value(value: object) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, list | tuple | Mapping):
        plain = dict(value) if isinstance(value, Mapping) else list(value)
        return str(yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=float("inf"))).strip()
    return str(yaml.safe_dump({"": value}, width=float("inf"))).partition(": ")[2].strip()


def dump_with_sources(config: Section, sources: Mapping[str, ValueSource], paper_values: Mapping[str, Any]) -> str:
    """Return a config as YAML with every key resolved, each value followed by its source as a comment.

    Values without a source that are not among `stated`, the keys of the config's file, are marked as defaults.
    """
    keys = {key for key, _ in flatten_keys(paper_values)}

    def lines(section: Plain, prefix: str, indent: str, otherwise: str) -> Iterator[str]:
        for name, value in section.items():
            key = prefix + name
            is_section = isinstance(value, dict) and bool(value)
            comment_text = sources[key].comment() if key in sources else "" if is_section or key in keys else otherwise
            line = f"{indent}{name}:" if is_section else f"{indent}{name}: {format_value(value)}"
            yield f"{line.ljust(COMMENT_COLUMN)}  # {comment_text}" if comment_text else line
            if is_section:  # the source of a mapping is that of all its values
                yield from lines(value, f"{key}.", f"{indent}  ", "" if comment_text else otherwise)

    return "\n".join(lines(config.model_dump(mode="json"), "", "", "default")) + "\n"
