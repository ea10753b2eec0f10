"""Error messages about configs and options: the key, the values it takes, the value given."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dpn_cli.arch import MOST_INTEGER, did_you_mean, find_nearest

KeyPath = tuple[int | str, ...]
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxlevel = 80, 80, 8, 4, 3
WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
COUNTS = {1: "one value", 2: "two values", 3: "three values"}


def explain(
    schema: type[BaseModel], plain: Mapping[str, Any], error: ValidationError, options: Mapping[str, str]
) -> str:
    """Return all mistakes that validation found in `plain`, on one line.

    `options` has the option of every key that was given as one: a mistake is named as it was written.
    """
    return "; ".join(dict.fromkeys(_mistake(schema, plain, detail, options) for detail in error.errors()))


def _mistake(schema: type[BaseModel], plain: Mapping[str, Any], detail: Any, options: Mapping[str, str]) -> str:
    path, annotation, metadata = _locate(schema, detail["loc"])
    key = ".".join(map(str, path))
    key = options.get(key, key)
    if detail["type"] == "extra_forbidden":
        unknown = ".".join(map(str, detail["loc"]))
        close = nearest_key(unknown, schema)
        return f"{unknown}: unknown key; " + (f"did you mean {close!r}?" if close else "see dpn configs show")
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{key}: {message}" if key else message
    if detail["type"] == "missing" and path == detail["loc"]:  # not a place in a list
        return f"{key}: missing; {describe_allowed(annotation, metadata)}"
    if key.startswith("--"):  # an option is left out and never null
        types = (
            [part for part in get_args(annotation) if part is not NoneType] if NoneType in get_args(annotation) else []
        )
        annotation = types[0] if len(types) == 1 else annotation
    return f"{key}: {refusal(_value(plain, path, detail['input']), annotation, metadata)}"


def _locate(schema: type[BaseModel], location: Sequence[int | str]) -> tuple[KeyPath, Any, tuple[Any, ...]]:
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


def _value(plain: object, path: KeyPath, otherwise: object) -> object:
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
    siblings = [option_name for key, option_name in names.items() if key.rpartition(".")[0] == section]
    if name not in names.values() and (close := find_nearest(name, siblings)):
        return f"{section}.{close}" if section else close
    key_name = name if name in names.values() else find_nearest(name, set(names.values()))
    matches = [key for key, option_name in names.items() if option_name == key_name]
    return matches[0] if len(matches) == 1 else None


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
        for annotation in (field.annotation, *get_args(field.annotation)):  # a section may be null
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from _keys(annotation, f"{prefix}{name}.")


def refusal(value: object, annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Say what a setting of this type may be, and that `value` is not that."""
    plain_annotation, _ = _unwrap_annotation(annotation, ())
    options = [option for part in _members(plain_annotation) for option in _options(part)]
    close = did_you_mean(value, options) if isinstance(value, str) else ""
    infinite = isinstance(value, float) and not math.isfinite(value)
    try:
        shown_value = _SHORT.repr(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        shown_value = "a number too long to print"
    # A command line's number is text where words are allowed, too; Python reads none of more than 4300 digits.
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 4300 else value
    if isinstance(number, int) and number > MOST_INTEGER:
        shown_value += f", which is above {MOST_INTEGER}"
    return f"{describe_allowed(annotation, metadata, finite=infinite)} (got {shown_value}){close}"


def describe_allowed(annotation: Any, metadata: Iterable[Any] = (), *, finite: bool = False) -> str:
    """Describe the values that a type allows: "a number above 0 and below 1, or null".

    A ``Field(description=...)`` next to the type is the description; `finite` stresses that numbers have to be.
    """
    annotation, metadata = _unwrap_annotation(annotation, tuple(metadata))
    for constraint in metadata:
        if isinstance(constraint, str):
            return constraint
    members = _members(annotation)
    if len(members) > 1:
        *first, last = (describe_allowed(member, metadata, finite=finite) for member in members)
        return f"{', '.join(first)}, or {last}"
    if annotation in (int, float):
        kind = "a whole number" if annotation is int else "a finite number" if finite else "a number"
        return f"{kind}{_bounds(metadata)}"
    if options := _options(annotation):
        return options[0] if len(options) == 1 else f"one of {', '.join(options)}"
    if get_origin(annotation) in (tuple, list):
        return _sequence(annotation, metadata, finite=finite)
    if get_origin(annotation) is dict:
        return f"keys with values, each {describe_allowed(get_args(annotation)[1], finite=finite)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section of keys ({', '.join(annotation.model_fields)})"
    words: dict[Any, str] = {bool: "true or false", NoneType: "null", str: "text"}
    return words.get(annotation, "another kind of value")


def _sequence(annotation: Any, metadata: tuple[Any, ...], *, finite: bool) -> str:
    parts = [describe_allowed(part, finite=finite) for part in get_args(annotation) if part is not Ellipsis]
    if get_origin(annotation) is list or get_args(annotation)[1:] == (Ellipsis,):
        is_nonempty = any(getattr(constraint, "min_length", 0) for constraint in metadata)
        return f"a list{' of one or more' if is_nonempty else ''}, each {parts[0]}"
    count = COUNTS.get(len(parts), f"{len(parts)} values")
    return f"{count}, {'each ' + parts[0] if len(set(parts)) == 1 else ' and '.join(parts)}"


def _bounds(metadata: Iterable[Any]) -> str:
    bounds = {name: getattr(constraint, name) for constraint in metadata for name in WORDS if hasattr(constraint, name)}
    if bounds.get("le") == MOST_INTEGER:
        del bounds["le"]  # nobody comes near it
    if "ge" in bounds and "le" in bounds:
        return f" from {bounds['ge']} to {bounds['le']}"
    limits = " and ".join(f"{word} {bounds[name]}" for name, word in WORDS.items() if name in bounds)
    return f" {'of ' * limits.startswith('at')}{limits}" if limits else ""


def _unwrap_annotation(annotation: Any, metadata: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Take ``Annotated`` and ``Field`` apart into a type and its constraints, a description among them as text."""
    while get_origin(annotation) is Annotated:
        annotation, *notes = get_args(annotation)
        metadata += tuple(notes)
    plain: list[Any] = []
    for constraint in metadata:
        if isinstance(constraint, FieldInfo):
            plain += [*constraint.metadata, *([constraint.description] if constraint.description else [])]
        else:
            plain.append(constraint)
    return annotation, tuple(plain)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _options(annotation: Any) -> list[str]:
    return [str(option) for option in get_args(annotation)] if get_origin(annotation) is Literal else []
