"""What a setting may be, in plain words, from its type and bounds: the text of errors about configs and options."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dpn_cli.arch import MOST_INTEGER, did_you_mean

_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxlevel = 80, 80, 8, 4, 3
WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
COUNTS = {1: "one value", 2: "two values", 3: "three values"}


def refusal(value: object, annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Say what a setting of this type may be, and that `value` is not that."""
    bare, _ = _unwrapped(annotation, ())
    options = [option for part in _members(bare) for option in _options(part)]
    close = did_you_mean(value, options) if isinstance(value, str) else ""
    infinite = isinstance(value, float) and not math.isfinite(value)
    try:
        shown = _SHORT.repr(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        shown = "a number too long to print"
    # A command line's number is text where words are allowed, too; Python reads none of more than 4300 digits.
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 4300 else value
    if isinstance(number, int) and number > MOST_INTEGER:
        shown += f", which is above {MOST_INTEGER}"
    return f"{allowed(annotation, metadata, finite=infinite)} (got {shown}){close}"


def allowed(annotation: Any, metadata: Iterable[Any] = (), *, finite: bool = False) -> str:
    """Describe the values that a type allows: "a number above 0 and below 1, or null".

    A ``Field(description=...)`` beside the type is the description; `finite` stresses that numbers have to be.
    """
    annotation, metadata = _unwrapped(annotation, tuple(metadata))
    for note in metadata:
        if isinstance(note, str):
            return note
    members = _members(annotation)
    if len(members) > 1:
        *first, last = (allowed(member, metadata, finite=finite) for member in members)
        return f"{', '.join(first)}, or {last}"
    if annotation in (int, float):
        kind = "a whole number" if annotation is int else "a finite number" if finite else "a number"
        return f"{kind}{_bounds(metadata)}"
    if options := _options(annotation):
        return options[0] if len(options) == 1 else f"one of {', '.join(options)}"
    if get_origin(annotation) in (tuple, list):
        return _sequence(annotation, metadata, finite=finite)
    if get_origin(annotation) is dict:
        return f"keys with values, each {allowed(get_args(annotation)[1], finite=finite)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section of keys ({', '.join(annotation.model_fields)})"
    words: dict[Any, str] = {bool: "true or false", NoneType: "null", str: "text"}
    return words.get(annotation, "another kind of value")


def _sequence(annotation: Any, metadata: tuple[Any, ...], *, finite: bool) -> str:
    parts = [allowed(part, finite=finite) for part in get_args(annotation) if part is not Ellipsis]
    if get_origin(annotation) is list or get_args(annotation)[1:] == (Ellipsis,):
        some = any(getattr(note, "min_length", 0) for note in metadata)
        return f"a list{' of one or more' if some else ''}, each {parts[0]}"
    count = COUNTS.get(len(parts), f"{len(parts)} values")
    return f"{count}, {'each ' + parts[0] if len(set(parts)) == 1 else ' and '.join(parts)}"


def _bounds(metadata: Iterable[Any]) -> str:
    bounds = {name: getattr(note, name) for note in metadata for name in WORDS if hasattr(note, name)}
    if bounds.get("le") == MOST_INTEGER:
        del bounds["le"]  # nobody comes near it
    if "ge" in bounds and "le" in bounds:
        return f" from {bounds['ge']} to {bounds['le']}"
    both = " and ".join(f"{word} {bounds[name]}" for name, word in WORDS.items() if name in bounds)
    return f" {'of ' * both.startswith('at')}{both}" if both else ""


def _unwrapped(annotation: Any, metadata: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Take ``Annotated`` and ``Field`` apart into a type and its constraints, a description among them as text."""
    while get_origin(annotation) is Annotated:
        annotation, *notes = get_args(annotation)
        metadata += tuple(notes)
    plain: list[Any] = []
    for note in metadata:
        if isinstance(note, FieldInfo):
            plain += [*note.metadata, *([note.description] if note.description else [])]
        else:
            plain.append(note)
    return annotation, tuple(plain)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _options(annotation: Any) -> list[str]:
    return [str(option) for option in get_args(annotation)] if get_origin(annotation) is Literal else []
