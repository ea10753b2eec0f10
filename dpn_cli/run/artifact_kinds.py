"""The kinds of runs and weight files, and the commands that accept each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from dpn_cli.errors import DataError
from dpn_cli.run.files import read_object

Kind = Literal["classifier", "segmenter", "towers", "sweep", "comparison", "network"]
KEY, WEIGHTS, DIGEST = "kind", "weights.safetensors", "weights_sha256"
# Older files do not name their kind; their metadata has one of these keys or none.
DESCRIPTIONS: dict[str, Kind] = {"classifier": "classifier", "segmenter": "segmenter", "lit": "towers"}

# Names of each kind in messages: of a run's folder, and of a weight file.
NAMES: dict[Kind, tuple[str, str]] = {
    "classifier": ("a classification run", "a classifier"),
    "segmenter": ("a segmentation run", "a segmentation network"),
    "towers": ("a LiT run", "a file of two LiT towers"),
    "sweep": ("a VTAB run", "a VTAB run"),
    "comparison": ("a comparison of several trainings", "a comparison of several trainings"),
    "network": ("a run of one network", "a single network"),
}
# How to make what a command takes from a single network.
MAKERS: dict[Kind, str] = {
    "segmenter": "'dpn segment ade20k' or 'dpn segment folder' with --checkpoint {location} trains one",
    "towers": "'dpn lit train --checkpoint {location}' trains them",
}
# What each command is for, and the kinds that it takes.
COMMANDS: dict[str, tuple[str, tuple[Kind, ...]]] = {
    "dpn predict": ("predict", ("classifier", "network")),
    "dpn segment predict": ("predict", ("segmenter",)),
    "dpn lit predict": ("predict", ("towers",)),
    "dpn eval": ("eval", ("classifier", "network")),
    "dpn segment eval": ("eval", ("segmenter",)),
    "dpn lit eval": ("eval", ("towers",)),
    "dpn export": ("export", ("classifier", "network")),
    "dpn lit export": ("export", ("towers",)),
    "dpn lit search": ("search", ("towers",)),
    "dpn eval fewshot": ("probe", ("classifier", "network")),
    "dpn distill": ("distil", ("classifier", "network")),
    "dpn lit train": ("frozen tower", ("classifier", "network")),
    "dpn inspect": ("inspect", ("classifier", "segmenter", "network")),
    "dpn checkpoint fold": ("fold", ("classifier", "network")),
    "dpn checkpoint retrofit": ("retrofit", ("classifier", "network")),
    "--checkpoint": ("start", ("classifier", "segmenter", "network")),
}
# Prefixes of sources that are no paths.
REMOTE_PREFIXES = ("timm:", "hf-hub:")


def kind_of(metadata: Mapping[str, str]) -> Kind:
    """Return the kind of a weight file with this safetensors metadata."""
    for kind in NAMES:
        if metadata.get(KEY) == kind:
            return kind
    return next((kind for key, kind in DESCRIPTIONS.items() if key in metadata), "network")


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run of ours, finished or unfinished."""
    return any((folder / name).is_file() for name in ("run.json", "config.yaml"))


def resolve(location: str, command: str) -> str:
    """Return what `command` opens for `location`: the weights of a run's folder, or `location` itself.

    Raises `DataError` for a kind that the command does not take, naming the command that does, for an unfinished run,
    and for a missing file.
    """
    try:
        path = Path(location).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # the name is too long, or the home folder is unknown
        raise DataError(f"{location}: {getattr(error, 'strerror', None) or error}") from error
    if is_run(path):
        weights = path / (read_object(path / "result.json") or {}).get("weights", WEIGHTS)
        recorded_kind = (read_object(path / "run.json") or {}).get(KEY)
        kind = (
            kind_of({KEY: recorded_kind})
            if recorded_kind
            else kind_of(_metadata(weights))
            if weights.is_file()
            else None
        )
        if kind:
            _check(location, kind, command, run=True)
        if not weights.is_file():
            raise DataError(f"{location}: the run has not finished training; finish it with --resume")
        return str(weights)
    if (path / WEIGHTS).is_file():  # an export's folder
        path = path / WEIGHTS
    if path.is_file():
        _check(location, kind_of(_metadata(path)), command, run=False)
        return str(path)
    if location != "none" and not path.exists() and not location.startswith(REMOTE_PREFIXES):
        raise DataError(f"{location}: no such file or folder; name a run's folder ('dpn runs' lists them) or weights")
    return location


def digest_in_run(weights: Path) -> str | None:
    """Return the SHA-256 that a run recorded for its weight file, or None when it is not known."""
    run = read_object(weights.parent / "run.json") if weights.name == WEIGHTS else None
    return (run or {}).get(DIGEST)


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        with path.open("rb") as file:
            if file.read(9)[8:] != b"{":
                return {}  # a file of another container
        raise DataError(f"{path}: truncated, damaged or not a safetensors file ({error}); fetch it again") from error


def _check(location: str, kind: Kind, command: str, *, run: bool) -> None:
    purpose, accepted_kinds = COMMANDS[command]
    if kind in accepted_kinds:
        return
    source_text = f"{location} is {NAMES[kind][0 if run else 1]}"
    if kind == "sweep":
        raise DataError(f"{source_text}: it keeps scores and no network for '{command}'; they are in its result.json")
    if kind == "comparison":
        raise DataError(f"{source_text}: each of them has a folder below it, such as NETWORK/seed0; name one of those")
    if kind == "network":
        needed_kind = accepted_kinds[0]
        raise DataError(f"{location} is not {NAMES[needed_kind][1]}; {MAKERS[needed_kind].format(location=location)}")
    accepting_commands = {
        name: use for name, (use, kinds) in COMMANDS.items() if kind in kinds and name.startswith("dpn")
    }
    similar_commands = [name for name, use in accepting_commands.items() if use == purpose]
    if similar_commands:
        raise DataError(f"{source_text}; use '{similar_commands[0]}'")
    raise DataError(f"{source_text}, which '{command}' does not take; commands for it: {', '.join(accepting_commands)}")
