"""Numbers of the paper's tables, each over trainings of the ordinary commands. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from dpn_cli.errors import DataError, DpnError

# Path of keys to a score in result.json: a number in percent or a list of them.
Score = tuple[str | int, ...]
RESULT = "result.json"
# Locations that are no files: of the hub, of timm, and patterns of shards.
ELSEWHERE = re.compile("(hf|hf-hub|timm|wds):")


@dataclass(frozen=True)
class PaperTrial:
    """One training of an ordinary command.

    Args:
        name: its folder below the output folder, ``"imagenet/B-32-dpn/seed0"``.
        command: the words after ``dpn``: ``"finetune vtab"``.
        words: its arguments and options, without data, weights and folders.
        data: options for data sets, with the names of the sets: ``("--data", "imagenet")``.
        start: the training whose network it starts from, given by the option `start_option`.
        network: architecture and stem, by which the weights folder may hold its network.
    """

    name: str
    command: str
    words: tuple[str, ...]
    data: tuple[tuple[str, str], ...] = ()
    start: PaperTrial | None = None
    network: tuple[str, str] | None = None
    start_option: str = "--checkpoint"

    @property
    def group(self) -> str:
        """The name without the seed, which weights that stand for the training are given for."""
        return self.name.rpartition("/")[0]

    def line(self, locations: Locations) -> list[str]:
        """Return the words of the whole command line after ``dpn``."""
        folder = str(locations.out / self.name)
        weights = locations.weights_of(self.start) if self.start else None
        data = [word for option, name in self.data for word in (option, locations.data.get(name, name))]
        start = [self.start_option, str(weights)] if weights else []
        options = [*self.words, *start, *data, *locations.settings]
        return [*self.command.split(), *options, "--output-dir", folder, "--resume"]


@dataclass(frozen=True)
class Locations:
    """Folders of data, weights and trainings.

    Args:
        out: the folder of all trainings.
        data: the data sets that are here, by name.
        weights: networks that need no training, by the name of the group of their trainings.
        settings: options that every training gets.
    """

    out: Path
    data: dict[str, str]
    weights: dict[str, str]
    settings: tuple[str, ...] = ()

    def weights_of(self, trial: PaperTrial) -> str:
        """Return what another training starts from: weights that are here, or the training's folder."""
        return self.weights.get(trial.group) or str(self.out / trial.name)

    def missing_data(self, trial: PaperTrial) -> list[str]:
        """Return the names of the missing data sets of a trial and of the training that it starts from."""
        names = [name for _, name in trial.data if name not in self.data]
        if trial.start and trial.start.group not in self.weights and not self.is_finished(trial.start):
            names += self.missing_data(trial.start)
        return list(dict.fromkeys(names))

    def is_finished(self, trial: PaperTrial) -> bool:
        """Return whether a trial has its result."""
        return (self.out / trial.name / RESULT).is_file()


@dataclass(frozen=True)
class Number:
    """A number of a table: the mean of a score over trainings, or of its difference to other trainings.

    Args:
        row, column: where it stands.
        trials: the trainings, one for each seed.
        score: where each of them has it.
        paper: the paper's number, and `stderr` its standard error over `seeds`, where it is printed.
        minus: the trainings that are subtracted, in pairs.
    """

    row: str
    column: str
    trials: tuple[PaperTrial, ...]
    score: Score
    paper: float | None = None
    stderr: float | None = None
    seeds: int = 3
    minus: tuple[PaperTrial, ...] = ()


@dataclass(frozen=True)
class Drawing:
    """A page about trainings in a folder of its own: by ``dpn report``, or by ``dpn inspect`` about networks."""

    name: str
    page_kind: Literal["report", "inspect"]
    trials: tuple[PaperTrial, ...]

    def ready(self, locations: Locations) -> list[PaperTrial]:
        """Return the trials that can be shown: those with a result, and networks that are here."""
        available = locations.weights if self.page_kind == "inspect" else {}
        return [trial for trial in self.trials if trial.group in available or locations.is_finished(trial)]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Args:
        name: as the command line has it, ``"table1"``.
        title: its heading.
        unit: of its numbers.
    """

    name: str
    title: str
    unit: str
    numbers: Sequence[Number] = ()
    drawings: Sequence[Drawing] = ()

    def trials(self, weights: Mapping[str, str]) -> list[PaperTrial]:
        """Return all trials, each once, after the trials that they start from; `weights` replace some of `networks`."""
        trials: dict[str, PaperTrial] = {}
        inspected = (trial for trial in self._inspected() if trial.group not in weights)
        for trial in (*self._scored(), *inspected):
            for required_trial in chain(trial, weights):
                previous = trials.setdefault(required_trial.name, required_trial)
                assert previous == required_trial, f"two trainings have the name {required_trial.name}"
        return list(trials.values())

    def networks(self) -> dict[str, PaperTrial]:
        """Return the trials whose network alone is used, by group; weights can replace them."""
        starts = (trial.start for trial in self.trials({}) if trial.start)
        return {trial.group: trial for trial in (*starts, *self._inspected())}

    def _scored(self) -> Iterator[PaperTrial]:
        for number in self.numbers:
            yield from (*number.trials, *number.minus)
        for drawing in self.drawings:
            if drawing.page_kind == "report":
                yield from drawing.trials

    def _inspected(self) -> Iterator[PaperTrial]:
        for drawing in self.drawings:
            if drawing.page_kind == "inspect":
                yield from drawing.trials


def chain(trial: PaperTrial, weights: Mapping[str, str] = MappingProxyType({})) -> list[PaperTrial]:
    """Return what a trial starts from, in the order of training, and the trial itself; `weights` need no training."""
    start = trial.start if trial.start and trial.start.group not in weights else None
    return [*(chain(start, weights) if start else []), trial]


def parse_locations(values: Sequence[str], option: str, names: Sequence[str], example: str) -> dict[str, str]:
    """Read ``NAME=PLACE`` of an option.

    Raises `DpnError` for another form and for a name that is not `known`, `DataError` for a file that is not there.
    """
    locations: dict[str, str] = {}
    for value in values:
        name, equals, location = value.partition("=")
        if not equals or not location:
            raise DpnError(f"{option} {value!r}: write NAME=PLACE, e.g. {example}")
        if name not in names:
            choices = f"{name!r} is none of {', '.join(names)}" if names else "there is none to name for these"
            raise DpnError(f"{option} {value!r}: {choices}")
        if not ELSEWHERE.match(location) and not Path(location).expanduser().exists():
            raise DataError(f"{option} {value!r}: no such file or folder")
        locations[name] = location
    return locations
