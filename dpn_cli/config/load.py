"""Configs as files, options and text: YAML in, one validated and frozen object out.

Layers, later ones win: schema defaults < shipped config < ``--config`` < flags < ``--set a.b=c``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from dpn_cli.arch import did_you_mean
from dpn_cli.config.schema import Section
from dpn_cli.config.validation_errors import explain
from dpn_cli.config.yaml_text import DEEPEST, read_yaml
from dpn_cli.errors import DpnError

Plain = dict[str, Any]


# Prints a line for the user.
Say = Callable[[str], None]


# Bytes of a config's file at most.
MOST_BYTES = 1_000_000


EMPTY = "an empty value (is a shell variable unset?); write null for none"


def unsaid(line: str) -> None:
    """Drop a line: used where no terminal is attached."""


SectionT = TypeVar("SectionT", bound=Section)


def config_dir() -> Traversable:
    """Return the folder of shipped configs: dpn_cli/configs in a wheel, ./configs in a checkout."""
    shipped = files("dpn_cli") / "configs"
    return shipped if shipped.is_dir() else Path(__file__).parents[2] / "configs"


def shipped_configs() -> Iterator[str]:
    """Yield the names of the shipped configs in alphabetical order."""
    yield from sorted(
        entry.name.removesuffix(".yaml") for entry in config_dir().iterdir() if entry.name.endswith(".yaml")
    )


def read_config(name: str) -> Plain:
    """Read the keys and values of a shipped config by name, or of a YAML file by path.

    Its section ``sources`` is left out: it describes values (`dpn_cli.config.provenance`) and is not one.
    Raises `DpnError` for an unknown config, and for a file that is not a YAML mapping.
    """
    return {key: value for key, value in read_document(name).items() if key != "sources"}


def read_document(name: str) -> Plain:
    """Read all sections of a shipped config or a YAML file. Raises as `read_config` does."""
    if Path(name).suffix in {".yaml", ".yml"}:
        text = _read_text(name)
    elif name in set(shipped_configs()):
        text = (config_dir() / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise DpnError(
            f"config {name!r}: not a shipped config ({', '.join(shipped_configs())}) "
            f"and not a .yaml file{did_you_mean(name, shipped_configs())}"
        )
    try:
        plain = read_yaml(text)
    except ValueError as error:
        raise DpnError(f"{name}: {error}") from error
    if not isinstance(plain, dict):
        raise DpnError(f"{name}: a config is a mapping of keys to values; see 'dpn configs show vtab'")
    if (empty := _empty_in(plain)) is not None:
        raise DpnError(f"{name}: {empty}: {EMPTY}")
    return plain


def _read_text(name: str) -> str:
    """Read a config's file. Raises `DpnError` for one that is not there, not readable, too large or not UTF-8."""
    try:
        with Path(name).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DpnError(f"--config {name}: no such file; shipped configs are {', '.join(shipped_configs())}") from error
    except (OSError, ValueError) as error:
        raise DpnError(f"--config {name}: not readable ({getattr(error, 'strerror', None) or error})") from error
    if len(data) > MOST_BYTES:
        raise DpnError(f"--config {name}: larger than {MOST_BYTES // 1000} kB, which no config is")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DpnError(
            f"--config {name}: not UTF-8 text (byte {data[error.start]:#04x} at {error.start}); save it as UTF-8"
        ) from error


def _empty_in(value: object, key: str = "") -> str | None:
    """Return the dotted key of an empty text in a value, or None: what is left out in a config is null."""
    if value == "":
        return key
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next(
        (place for name, part in parts if (place := _empty_in(part, f"{key}.{name}".lstrip("."))) is not None), None
    )


def from_flags(flags: Mapping[str, object]) -> Plain:
    """Turn ``{"optim.lr": 0.1, ...}`` into nested form, leaving out flags that were not given (None)."""
    plain: Plain = {}
    for key, value in flags.items():
        if value is not None:
            _put(plain, key, value)
    return plain


def from_settings(settings: Sequence[str], option: str = "--set", example: str = "optim.clip_norm=0.5") -> Plain:
    """Parse ``--set a.b=c`` items; the value is YAML, so ``[1, 2]``, ``true`` and ``null`` work."""
    plain: Plain = {}
    for item in settings:
        key, equals, value = item.partition("=")
        if not equals or not all(key.split(".")):
            raise DpnError(f"{option} {item!r}: write KEY=VALUE, e.g. {option} {example}")
        if key.count(".") >= DEEPEST:
            raise DpnError(f"{option} {item!r}: no key of a config is nested that deep")
        try:
            parsed = read_yaml(value)
        except ValueError as error:
            raise DpnError(f"{option} {item!r}: {error}; quote a value that holds : or #") from error
        if not value or _empty_in(parsed) is not None:
            raise DpnError(f"{option} {item!r}: {EMPTY}")
        _put(plain, key, parsed)
    return plain


def merge(*layers: Mapping[str, Any]) -> Plain:
    """Merge nested mappings; later layers win key by key, and lists are replaced as a whole."""
    merged: Plain = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merge(merged[key], value) if both else value
    return merged


def build(
    schema: type[SectionT], plain: Mapping[str, Any], source: str, options: Mapping[str, str] | None = None
) -> SectionT:
    """Validate a merged config.

    Args:
        schema: the class of the config.
        plain: nested keys and values.
        source: where they come from.
        options: by dotted key, the option that gave the value.

    Raises:
        DpnError: names every wrong key or option, what was given and what is allowed.
    """
    try:
        return schema.model_validate(dict(plain))
    except ValidationError as error:
        mistakes = explain(schema, plain, error, options or {})
        raise DpnError(mistakes if mistakes.startswith("--") else f"{source}: {mistakes}") from error


def dump(config: Section) -> str:
    """Return a config as YAML with every key resolved."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100)


def _put(plain: Plain, dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        plain = plain.setdefault(parent, {})
        if not isinstance(plain, dict):
            raise DpnError(f"--set {dotted!r}: {parent!r} is a value, not a section")
    plain[last] = value
