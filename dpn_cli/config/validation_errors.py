"""Messages about wrong configs, key by key: the key, what is allowed, what was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dpn_cli.arch import nearest
from dpn_cli.config.allowed import allowed, refusal

Path = tuple[int | str, ...]


def explain(
    schema: type[BaseModel], plain: Mapping[str, Any], error: ValidationError, options: Mapping[str, str]
) -> str:
    """Return all mistakes that validation found in `plain`, on one line.

    `options` has the option of every key that was given as one: a mistake is named as it was written.
    """
    return "; ".join(dict.fromkeys(_mistake(schema, plain, detail, options) for detail in error.errors()))


def _mistake(schema: type[BaseModel], plain: Mapping[str, Any], detail: Any, options: Mapping[str, str]) -> str:
    path, annotation, metadata = _locate(schema, detail["loc"])
    dotted = ".".join(map(str, path))
    dotted = options.get(dotted, dotted)
    if detail["type"] == "extra_forbidden":
        unknown = ".".join(map(str, detail["loc"]))
        close = nearest_key(unknown, schema)
        return f"{unknown}: unknown key; " + (f"did you mean {close!r}?" if close else "see dpn configs show")
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{dotted}: {message}" if dotted else message
    if detail["type"] == "missing" and path == detail["loc"]:  # not a place in a list
        return f"{dotted}: missing; {allowed(annotation, metadata)}"
    if dotted.startswith("--"):  # an option is left out and never null
        types = (
            [part for part in get_args(annotation) if part is not NoneType] if NoneType in get_args(annotation) else []
        )
        annotation = types[0] if len(types) == 1 else annotation
    return f"{dotted}: {refusal(_value(plain, path, detail['input']), annotation, metadata)}"


def _locate(schema: type[BaseModel], location: Sequence[int | str]) -> tuple[Path, Any, tuple[Any, ...]]:
    """Return the path of the key that an error lies in, the type of its values, and their constraints.

    What pydantic appends to the path, places in a list and members of a union, is left out; the key is the config's.
    """
    path: list[int | str] = []
    annotation: Any = schema
    metadata: tuple[Any, ...] = ()
    for part in location:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and part in annotation.model_fields:
            field = annotation.model_fields[str(part)]
            metadata = (*field.metadata, *([field.description] if field.description else []))
            annotation = field.annotation
        elif isinstance(part, int) and _section_of(annotation):
            annotation, metadata = _section_of(annotation), ()
        elif get_origin(annotation) is dict and isinstance(part, str):
            annotation, metadata = get_args(annotation)[1], ()
        else:
            break
        path.append(part)
    return tuple(path), annotation, metadata


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section type that a list type contains."""
    first = get_args(annotation)[0] if get_origin(annotation) is tuple else None
    return first if isinstance(first, type) and issubclass(first, BaseModel) else None


def _value(plain: object, path: Path, otherwise: object) -> object:
    """Return what stands at a path as it was written, before any validator changed it."""
    try:
        for part in path:
            plain = plain[part]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return otherwise
    return plain


def nearest_key(unknown: str, schema: type[BaseModel]) -> str | None:
    """Return the key that was meant: one of this name in another section, else one like it in the same or any section.

    None where there is none, or several.
    """
    names = {key: key.rpartition(".")[2] for key in _keys(schema)}
    section, _, name = unknown.rpartition(".")
    siblings = [own for key, own in names.items() if key.rpartition(".")[0] == section]
    if name not in names.values() and (close := nearest(name, siblings)):
        return f"{section}.{close}" if section else close
    elsewhere = name if name in names.values() else nearest(name, set(names.values()))
    found = [key for key, own in names.items() if own == elsewhere]
    return found[0] if len(found) == 1 else None


def dotted_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a schema that hold values, in its order."""
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from dotted_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield prefix + name
        for inside in (field.annotation, *get_args(field.annotation)):  # a section may be null
            if isinstance(inside, type) and issubclass(inside, BaseModel):
                yield from _keys(inside, f"{prefix}{name}.")
