"""The layers of a config, and what a duration changes: defaults < config < ``--config`` < flags < ``--set``.

One rule for all tasks. A duration is steps or epochs; the later layer decides. A training shorter than the config's has
its share of the warm-up, the cool-down and the other steps of the schedule, and says so; a longer one keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpn_cli.config.load import Plain, Say, merge, read_config, unsaid
from dpn_cli.config.schema import Schedule
from dpn_cli.errors import DpnError

# Keys of a schedule that count steps, beside its length.
PHASES = ("warmup", "cooldown", "decay_from")


def layered(shipped: Plain, config_file: Plain, command: Plain, shown: str, say: Say = unsaid) -> Plain:
    """Merge a configuration file and a command's options over a shipped config.

    `config` is ``--config``'s file, `command` the flags and settings, which win. In a file with both, epochs decide, as
    in the shipped configs. `shown` is the config that errors refer to.

    Raises `DpnError` for a section that is a value, for steps and epochs in one command, and for a phase in steps when
    epochs decide how many steps there are.
    """
    for layer in (config_file, command):
        for section in ("data", "backbone", "schedule"):
            if not isinstance(layer.get(section, {}), dict):
                raise DpnError(f"{section}: a section of keys, not a value; see dpn configs show {shown}")
    schedule = command.get("schedule", {})
    steps, epochs = schedule.get("steps"), command.get("epochs")
    if steps is not None and epochs is not None:
        raise DpnError(f"--steps {steps} and --epochs {epochs}: give one of them")
    if epochs is not None and (phase := next((name for name in (*PHASES, "stairs") if name in schedule), None)):
        raise DpnError(
            f"--epochs {epochs} and schedule.{phase}={schedule[phase]}: epochs turn into steps once images are counted "
            f"and decide the {phase} too; give --steps to set both"
        )
    merged = merge(shipped, _in_its_own_steps(config_file, shipped, say), config_file)
    return merge(merged, _in_its_own_steps(command, merged, say), command)


def over_shipped(shipped: str, config_file: str | None, flags: Plain, settings: Plain, say: Say = unsaid) -> Plain:
    """Merge the layers of a command over a shipped config, given by its name. Raises as `layered` does."""
    file = read_config(config_file) if config_file else {}
    return layered(read_config(shipped), file, merge(flags, settings), shipped, say)


def last_given(section: str, key: str, *layers: Plain) -> Any:
    """Return the value that the last layer with one gives a key of a section; None without one."""
    sections = [layer.get(section) for layer in layers]
    return next((each[key] for each in reversed(sections) if isinstance(each, dict) and each.get(key)), None)


def _in_its_own_steps(layer: Plain, below: Plain, say: Say) -> Plain:
    """Return what the steps of a layer change beside the steps themselves."""
    schedule, usual = layer.get("schedule", {}), below["schedule"]
    steps = schedule.get("steps")
    if steps is None or layer.get("epochs") is not None:
        return {}
    if not isinstance(steps, int):
        raise DpnError(f"schedule.steps: a whole number of steps (got {steps!r})")
    epochs: Plain = {"epochs": None} if "epochs" in below else {}
    # What is wrong with the steps below is said when the whole config is checked.
    if steps < 1 or not isinstance(usual.get("steps"), int):
        return epochs
    return {**epochs, "schedule": _shares(usual, usual["steps"], steps, set(schedule), say)}


def _shares(schedule: Mapping[str, Any], usual: int, steps: int, given: set[str], say: Say) -> Plain:
    """Return the phases of a schedule of `usual` steps in a training of `steps`, without those that are `given`."""
    if steps >= usual:
        return {}
    phases = {name: schedule.get(name) for name in PHASES if name not in given}
    shares: Plain = {name: value * steps // usual for name, value in phases.items() if isinstance(value, int) and value}
    if shares:
        changed = ", ".join(f"{name} {share}, not {phases[name]}" for name, share in shares.items())
        say(f"the training has {steps} steps and the config's phases are for {usual}, so they are shorter: {changed}")
    stairs = schedule.get("stairs")
    if stairs and "stairs" not in given:
        shares["stairs"] = tuple((at * steps // usual, factor) for at, factor in stairs)
    return shares


def counted(schedule: Schedule, steps: int, say: Say = unsaid) -> Schedule:
    """Return the schedule of a duration that was counted from epochs; shorter ones have their share of every phase."""
    shares = _shares(schedule.model_dump(), schedule.steps, steps, set(), say)
    return schedule.model_copy(update={"steps": steps, **shares})


def steps_of(epochs: float | None, schedule: Schedule, steps_per_epoch: float, say: Say = unsaid) -> Schedule:
    """Return the schedule in steps: its own without epochs, else their rounded number, at least one step."""
    return schedule if epochs is None else counted(schedule, max(1, round(epochs * steps_per_epoch)), say)
