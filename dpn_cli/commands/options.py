"""Options of commands, made from the schema of a config: names, help, defaults and completion have no other home."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dpn_cli.commands.one_screen import MOST_SHOWN, Brief, show_all
from dpn_cli.config.load import Plain, merge
from dpn_cli.config.option import OUTPUT, PANELS, Flag
from dpn_cli.config.schema import Section

Parameter = inspect.Parameter
# Help writes the values of a choice in the place of its type when there are at most as many.
MOST_CHOICES = 4


@dataclass(frozen=True)
class Key:
    """A config key that is an option: its dotted name, its field, and what makes it an option."""

    name: str
    field: FieldInfo
    flag: Flag

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        return self.flag.parameter or self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Variant:
    """One of the configs that a command may start from; `label` tells in help when: "demo", "B/16".

    `follows` is the option that decides for it, where that is not ``--data``.
    """

    label: str
    config: Plain
    follows: str = ""


def keys_of(schema: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield the options of a schema, those of its sections first, in the order of the fields."""
    fields = schema.model_fields.items()
    for name, field in fields:
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        for metadata in field.metadata:
            if isinstance(metadata, Flag):
                yield Key(prefix + name, field, metadata)


def parameter_of(key: Key, default: str | None) -> Parameter:
    """Return the parameter of a command's signature; `default` is what help says, None says nothing."""
    required = key.field.is_required() and default is None
    default_text = "" if default is None else f" \\[default: {_escape_markup(default)}]"
    shared: Any = {
        "help": _escape_markup(key.flag.help) + default_text,
        "rich_help_panel": key.flag.panel,
        "show_default": False,
        "autocompletion": key.flag.complete or _choices_completed(key.field.annotation),
        "metavar": _metavar(key.field.annotation),
    }
    info = typer.Option(*key.flag.names, **shared) if key.flag.names else typer.Argument(**shared)
    kind: Any = _typer_type(key.field)
    annotation: Any = Annotated[kind if required else kind | None, info, *_marks(key.flag.brief)]
    return Parameter(
        key.parameter, Parameter.KEYWORD_ONLY, default=Parameter.empty if required else None, annotation=annotation
    )


def default_of(key: Key, schema: type[Section], variants: Sequence[Variant]) -> str | None:
    """Return the default of an option as help says it: one value, or each variant's where they differ.

    None for what has to be given.
    """
    if not key.flag.names or _value(schema, variants[0].config, key.name) is PydanticUndefined:
        return None
    defaults = [
        (variant, _format_default(key, _value(schema, variant.config, key.name), variant)) for variant in variants
    ]
    usual_default = defaults[0][1]
    labels: dict[str, list[str]] = {}
    for variant, text in defaults:
        if text != usual_default:
            labels.setdefault(text, []).append(variant.label)
    followed_key = next(
        (variant.follows for variant, text in defaults if text != usual_default and variant.follows), ""
    )
    prefix = f"by {followed_key}: " if followed_key else ""
    return prefix + "; ".join([usual_default, *(f"{', '.join(names)}: {text}" for text, names in labels.items())])


def explicit_options(keys: Sequence[Key], arguments: Mapping[str, object]) -> Plain:
    """Return the config layer of a command's arguments, without those that were not given."""
    plain: Plain = {}
    for key in keys:
        value = arguments.get(key.parameter)
        if value is not None:
            *sections, last = key.name.split(".")
            layer: Plain = {last: value}
            for section in reversed(sections):
                layer = {section: layer}
            plain = merge(plain, layer)
    return plain


def option_names(keys: Sequence[Key], arguments: Mapping[str, object]) -> dict[str, str]:
    """Return, by config key, how the options are written that a command was given."""
    return {
        key.name: key.flag.names[0].partition("/")[0] if key.flag.names else key.name
        for key in keys
        if arguments.get(key.parameter) is not None
    }


def with_signature(function: Callable[..., Any], parameters: Sequence[Parameter]) -> Callable[..., None]:
    """Give a function that takes keywords the signature from which Typer makes the command, panel by panel.

    Where there are many options, help is that of `OneScreenCommand`, which is the class for the command.
    """
    briefs = {
        parameter.name: mark.text
        for parameter in parameters
        for mark in parameter.annotation.__metadata__
        if isinstance(mark, Brief)
    }
    if briefs and len(parameters) > MOST_SHOWN:
        parameters = [*parameters, HELP_ALL]
        function.briefs = {HELP_ALL.name: HELP_ALL_TEXT, **briefs}  # type: ignore[attr-defined]
    ordered = sorted(parameters, key=_place)
    function.__signature__ = inspect.Signature(ordered, return_annotation=None)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return function


def _place(parameter: Parameter) -> int:
    """Return the place of a parameter's panel in help; arguments come first."""
    panel = parameter.annotation.__metadata__[0].rich_help_panel
    return PANELS.index(panel) if panel in PANELS else -1


def _value(schema: type[Section], config: Plain, name: str) -> object:
    """Return the value of a key in a config, or its field's default."""
    value: Any = config
    section: Any = schema
    for part in name.split("."):
        field = section.model_fields[part]
        value = value.get(part, Ellipsis) if isinstance(value, Mapping) else getattr(value, part)
        if value is Ellipsis:
            value = field.get_default(call_default_factory=True)
        section = field.annotation
    return value


def _format_default(key: Key, value: object, variant: Variant) -> str:
    if key.name == "schedule.steps" and variant.config.get("epochs") is not None:
        return "counted from the epochs"
    if value is None or value == () or value == [] or key.name == "data.source":
        return key.flag.unset
    if isinstance(value, bool):
        name_on, _, name_off = key.flag.names[0].partition("/")
        return (name_on if value else name_off or "no").removeprefix("--")
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return _text(value)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _members(annotation: Any) -> list[Any]:
    """Return the types that a field takes, `Annotated` and None taken away."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    members: list[Any] = []
    for part in parts:
        members += _members(part) if get_origin(part) is Annotated else [part]
    return [member for member in members if member is not type(None)]


def _typer_type(field: FieldInfo) -> type:
    """Return what Typer parses a field from: numbers, switches and paths as such, all else as text for the schema."""
    members = _members(field.annotation)
    parsed = any(isinstance(metadata, BeforeValidator) for metadata in field.metadata)
    return (
        members[0] if len(members) == 1 and members[0] in (int, float, bool, Path, list[Path]) and not parsed else str
    )


def _choices(annotation: Any) -> list[str]:
    return [str(value) for part in _members(annotation) if get_origin(part) is Literal for value in get_args(part)]


def _metavar(annotation: Any) -> str | None:
    """Return how help writes the value of a choice: ``[exact|pillow]``."""
    choices, members = _choices(annotation), _members(annotation)
    has_other_types = any(get_origin(part) is not Literal for part in members)
    return None if not 0 < len(choices) <= MOST_CHOICES or has_other_types else f"[{'|'.join(choices)}]"


def _choices_completed(annotation: Any) -> Callable[[str], list[str]] | None:
    choices = _choices(annotation)
    return (lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]) if choices else None


def _escape_markup(text: str) -> str:
    return text.replace("[", "\\[")


def _marks(brief: str | None) -> tuple[Brief, ...]:
    """Return the mark of an option that ``--help`` shows; none for others."""
    return () if brief is None else (Brief(brief),)


def option(
    name: str,
    kind: Any,
    default: object,
    *names: str,
    help: str,
    panel: str | None = OUTPUT,
    brief: str | None = None,
    **settings: Any,
) -> Parameter:
    """Return an option that is not a config key; see `Flag` for `brief`."""
    typer_option = typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **settings)
    annotation: Any = Annotated[kind, typer_option, *_marks(brief)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def switch(name: str, *names: str, help: str, brief: str | None = None) -> Parameter:
    """Return a switch that is not a config key."""
    return option(name, bool, False, *names, help=help, brief=brief)


HELP_ALL_TEXT = "Show all options and defaults, and exit."
HELP_ALL = option(
    "help_all",
    bool,
    False,
    "--help-all",
    help=HELP_ALL_TEXT,
    panel=None,
    is_eager=True,
    expose_value=False,
    callback=show_all,
)


SET = option(
    "set",
    list[str] | None,
    None,
    "--set",
    metavar="KEY=VALUE",
    help="Set one config key, e.g. --set optim.clip_norm=0.5; repeatable.",
    brief="Set one config key; repeatable.",
)
CONFIG_OPTIONS = (
    option(
        "config",
        str | None,
        None,
        "--config",
        "-c",
        help="Shipped config or YAML file that overrides the command's default config.",
        brief="Shipped config or YAML file.",
    ),
    SET,
)
JSON = switch("json", "--json", help="Print the result as JSON instead of text.")
QUIET = switch("quiet", "--quiet", "-q", help="Hide progress on stderr.")
VERBOSE = switch("verbose", "--verbose", "-v", help="Print the traceback of errors.")
PRINTING = (JSON, QUIET, VERBOSE)
