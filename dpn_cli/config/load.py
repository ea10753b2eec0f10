"""Load configs: YAML in, layers merged, one validated and frozen object out.

Layers, later ones win: schema defaults < shipped config < ``--config`` < flags < ``--set a.b=c``.

All tasks follow one rule for durations. A duration is steps or epochs, and the later layer decides. A training shorter
than the config's has its warm-up, cool-down and other phases scaled down, and logs it. A longer one keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from dpn_cli.arch import did_you_mean
from dpn_cli.config.schema import Schedule, Section
from dpn_cli.config.validation_errors import explain
from dpn_cli.errors import DpnError

Plain = dict[str, Any]


# Prints a line for the user.
Logger = Callable[[str], None]


# Bytes of a config's file at most.
MOST_BYTES = 1_000_000


EMPTY = "an empty value (is a shell variable unset?); write null for none"


def discard_message(line: str) -> None:
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
    if (empty := _find_empty_text(plain)) is not None:
        raise DpnError(f"{name}: {empty}: {EMPTY}")
    return plain


def _read_text(name: str) -> str:
    """Read the file of a config. Raises `DpnError` when it is missing, unreadable, too large or not UTF-8."""
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


def _find_empty_text(value: object, key: str = "") -> str | None:
    """Return the dotted key of an empty text in a value, or None: what is left out in a config is null."""
    if value == "":
        return key
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next(
        (
            location
            for name, part in parts
            if (location := _find_empty_text(part, f"{key}.{name}".lstrip("."))) is not None
        ),
        None,
    )


def from_flags(flags: Mapping[str, object]) -> Plain:
    """Turn ``{"optim.lr": 0.1, ...}`` into nested form, fast_exit out flags that were not given (None)."""
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
        if not value or _find_empty_text(parsed) is not None:
            raise DpnError(f"{option} {item!r}: {EMPTY}")
        _put(plain, key, parsed)
    return plain


def merge(*layers: Mapping[str, Any]) -> Plain:
    """Merge nested mappings; later layers win key by key, and lists are replaced as a whole."""
    merged: Plain = {}
    for layer in layers:
        for key, value in layer.items():
            are_mappings = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merge(merged[key], value) if are_mappings else value
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


def _put(plain: Plain, key: str, value: object) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        plain = plain.setdefault(parent, {})
        if not isinstance(plain, dict):
            raise DpnError(f"--set {key!r}: {parent!r} is a value, not a section")
    plain[last] = value


# Keys of a schedule, other than its length, that count steps.
PHASES = ("warmup", "cooldown", "decay_from")


def merge_layers(
    shipped: Plain, config_file: Plain, command: Plain, command_text: str, log: Logger = discard_message
) -> Plain:
    """Merge a configuration file and a command's options over a shipped config.

    `config` is ``--config``'s file, `command` the flags and settings, which win. In a file with both, epochs decide, as
    in the shipped configs. `shown` is the config that errors refer to.

    Raises `DpnError` for a section that is a value, for steps and epochs in one command, and for a phase in steps when
    epochs decide how many steps there are.
    """
    for layer in (config_file, command):
        for section in ("data", "backbone", "schedule"):
            if not isinstance(layer.get(section, {}), dict):
                raise DpnError(f"{section}: a section of keys, not a value; see dpn configs show {command_text}")
    schedule = command.get("schedule", {})
    steps, epochs = schedule.get("steps"), command.get("epochs")
    if steps is not None and epochs is not None:
        raise DpnError(f"--steps {steps} and --epochs {epochs}: give one of them")
    if epochs is not None and (phase := next((name for name in (*PHASES, "stairs") if name in schedule), None)):
        raise DpnError(
            f"--epochs {epochs} and schedule.{phase}={schedule[phase]}: epochs turn into steps once images are counted "
            f"and decide the {phase} too; give --steps to set both"
        )
    merged = merge(shipped, _select_scaled_steps(config_file, shipped, log), config_file)
    return merge(merged, _select_scaled_steps(command, merged, log), command)


def merge_with_shipped(
    shipped: str, config_file: str | None, flags: Plain, settings: Plain, log: Logger = discard_message
) -> Plain:
    """Merge the layers of a command over a shipped config, given by its name. Raises as `merge_layers` does."""
    file = read_config(config_file) if config_file else {}
    return merge_layers(read_config(shipped), file, merge(flags, settings), shipped, log)


def find_last_value(section: str, key: str, *layers: Plain) -> Any:
    """Return the value that the last layer with one gives a key of a section; None without one."""
    sections = [layer.get(section) for layer in layers]
    return next((layer[key] for layer in reversed(sections) if isinstance(layer, dict) and layer.get(key)), None)


def _select_scaled_steps(layer: Plain, below: Plain, log: Logger) -> Plain:
    """Return the settings that the steps of a layer change, other than the steps."""
    schedule, shipped_schedule = layer.get("schedule", {}), below["schedule"]
    steps = schedule.get("steps")
    if steps is None or layer.get("epochs") is not None:
        return {}
    if not isinstance(steps, int):
        raise DpnError(f"schedule.steps: a whole number of steps (got {steps!r})")
    epochs: Plain = {"epochs": None} if "epochs" in below else {}
    # Invalid steps of the layers below are reported when the whole config is checked.
    if steps < 1 or not isinstance(shipped_schedule.get("steps"), int):
        return epochs
    return {
        **epochs,
        "schedule": _scaled_phases(shipped_schedule, shipped_schedule["steps"], steps, set(schedule), log),
    }


def _scaled_phases(
    schedule: Mapping[str, Any], base_steps: int, steps: int, explicit_keys: set[str], log: Logger
) -> Plain:
    """Return the phases of a schedule of `base_steps` scaled to `steps`, without explicit keys."""
    if steps >= base_steps:
        return {}
    phases = {name: schedule.get(name) for name in PHASES if name not in explicit_keys}
    scaled: Plain = {
        name: value * steps // base_steps for name, value in phases.items() if isinstance(value, int) and value
    }
    if scaled:
        changes = ", ".join(f"{name} scaled from {phases[name]:,} to {value:,}" for name, value in scaled.items())
        log(f"{steps:,} steps instead of the config's {base_steps:,}: {changes}")
    stairs = schedule.get("stairs")
    if stairs and "stairs" not in explicit_keys:
        scaled["stairs"] = tuple((stair_step * steps // base_steps, factor) for stair_step, factor in stairs)
    return scaled


def scale_schedule(schedule: Schedule, steps: int, log: Logger = discard_message) -> Schedule:
    """Return the schedule of a duration that was counted from epochs; shorter ones have their share of every phase."""
    shares = _scaled_phases(schedule.model_dump(), schedule.steps, steps, set(), log)
    return schedule.model_copy(update={"steps": steps, **shares})


def steps_of(
    epochs: float | None, schedule: Schedule, steps_per_epoch: float, log: Logger = discard_message
) -> Schedule:
    """Return the schedule in steps: its own without epochs, else their rounded number, at least one step."""
    return schedule if epochs is None else scale_schedule(schedule, max(1, round(epochs * steps_per_epoch)), log)


# A config is four levels deep and has a hundred values; aliases count as often as they are used.
DEEPEST, MOST_VALUES = 20, 10_000


# The parser in C takes a tenth of the time; PyYAML has it wherever it was built with libyaml.
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Parser):  # type: ignore[misc]  # its class is known when PyYAML is
    """PyYAML's safe loader, to which a key that is given twice in a mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        own_positions = range(node.start_mark.index, node.end_mark.index)  # keys merged by << stand elsewhere
        own_keys = (
            key for key, _ in node.value if key.start_mark.index in own_positions and isinstance(key, yaml.ScalarNode)
        )
        for key, times in Counter(key.value for key in own_keys if key.value != "<<").items():
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
        raise ValueError(f"nested more than {DEEPEST} levels deep, or an alias inside its own value")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | set | tuple) else ()
    for part in parts:
        count = _count(part, depth + 1, count)
    if count >= MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    return count + 1
