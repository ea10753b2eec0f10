"""Several trainings of one recipe side by side, ``--compare`` and ``--seeds``, and the table of their differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from rich import box
from rich.console import Console as RichConsole
from rich.table import Table

from dpn_cli.commands.training import Result, Training, TrainingModule
from dpn_cli.errors import DataError, DpnError, NonFiniteError, OutOfMemoryError, StoppedError
from dpn_cli.recipe.compare import ComparedTraining, settings_of, spoken
from dpn_cli.recipe.start import Place
from dpn_cli.report.comparison import SCORES
from dpn_cli.run import stopping
from dpn_cli.run.console import Console, cell
from dpn_cli.run.distributed import from_leader
from dpn_cli.run.files import replace_json
from dpn_cli.run.folder import describe_device
from dpn_cli.run.session import Session, run_name, session
from dpn_cli.statistics import PERCENT, Summary, paired_difference, summarize
from dpn_cli.weights.backbone import LoadReport, backbone_of
from dpn_cli.weights.origin import with_own_stem

LEGEND = (
    "{score} in %: mean and standard deviation over n trainings with different seeds. The difference is the mean over "
    "pairs with the same seed ± its standard error, with the 95 % t-interval."
)


class _Comparable(TrainingModule, Protocol):
    """The module of a task whose trainings can be compared."""

    def default_folder(self, recipe: Any) -> Path:
        """Return the folder of a run without ``-o``."""


@dataclass(frozen=True)
class _Run:
    """One of the trainings: its network by name, its settled recipe, and its folder below the comparison's."""

    network: str
    recipe: ComparedTraining
    folder: str

    @property
    def label(self) -> str:
        return f"{spoken(self.network)}, seed {self.recipe.seed}"


class SideBySide:
    """Trains every network of a recipe from every seed, each in a run folder of its own."""

    def __init__(self, training: Training) -> None:
        self.training, self.trainer = training, cast(_Comparable, import_module(training.module))

    def run(self, recipe: ComparedTraining, place: Place, console: Console) -> Result | None:
        """Train and return the comparison; None on ranks that do not lead and after a dry run.

        All networks are loaded before anything is trained. A training that runs out of memory or diverges is noted in
        the result and tried again when the comparison is resumed; everything else raises `DpnError`.
        """
        runs = self._runs(recipe, console)
        with session(recipe, recipe.runtime, "comparison", place, self._folder(recipe, runs), console) as begun:
            firsts = [run for run in runs if run.recipe.seed == runs[0].recipe.seed]
            if place.dry_run:
                for run in firsts:
                    console.info(f"{run.label}:")
                    self.trainer.run(run.recipe, place, console)
                console.info(f"dry run passed: {len(runs)} trainings of {len(firsts)} networks")
                return None
            result = begun.folder.result
            if result is None:
                _load(begun, firsts, getattr(self.trainer, "load", _load_backbone))
                result = self._train(begun, runs)
            return result if begun.world.leads else None

    def show(self, result: Result) -> None:
        """Print the table of a comparison on stdout."""
        console = RichConsole(highlight=False)
        console.print(_table(result))
        for line in result["failed"]:
            console.print(f"[red]failed:[/] {cell(line)}")
        console.print(LEGEND.format(score=SCORES[result["score"]]))

    def _runs(self, recipe: ComparedTraining, console: Console) -> list[_Run]:
        runs = []
        for name, each in recipe.each().items():
            with _named(name):
                each = self.training.settle(each, console)
                each = each.model_copy(update={"backbone": with_own_stem(each.backbone, console)})
            for seed, one in each.with_seeds().items():
                network, folder = (name, f"{recipe.folders[name]}/") if recipe.compare else (each.backbone.stem, "")
                runs.append(_Run(network, one, f"{folder}seed{seed}"))
        return runs

    def _folder(self, recipe: ComparedTraining, runs: Sequence[_Run]) -> Path:
        """Return the folder beside that of one of the trainings alone, named after all of them."""
        one = runs[0].recipe
        alone, name = self.trainer.default_folder(one), run_name(one.backbone)
        if not recipe.compare:
            several = f"{name}-{len(runs)}-seeds"
        elif recipe.backbone.arch or recipe.backbone.checkpoint:
            several = run_name(recipe.backbone, recipe.versus)
        else:
            several = recipe.versus
        return alone.with_name(alone.name.replace(name, several, 1))

    def _train(self, begun: Session[ComparedTraining], runs: Sequence[_Run]) -> Result:
        recipe, folder, world, console = begun.recipe, begun.folder, begun.world, begun.console
        results: dict[str, Result] = {}
        failed: dict[str, str] = {}
        for number, run in enumerate(runs, 1):
            stopping.check()
            console.info(f"{run.label} ({number} of {len(runs)})")
            if recipe.runtime.compile:
                torch.compiler.reset()  # the compiler gives up after eight networks
            try:
                place = Place(folder.path / run.folder, resume=True)
                done = results[run.folder] = from_leader(self.trainer.run(run.recipe, place, console) or {})
                if done["data"] != next(iter(results.values()))["data"]:
                    raise DataError(
                        f"{folder.path}: the data have changed since this comparison began; start another with -o"
                    )
            except (NonFiniteError, OutOfMemoryError) as error:
                if world.size > 1 and isinstance(error, OutOfMemoryError):
                    raise  # the other ranks are waiting for this one's gradients
                console.warn(f"{run.label} failed: {error}")
                failed[run.folder] = f"{run.label}: {error}"
        result = build_result(self.training.score, recipe, runs, results, failed)
        result["differs_from_paper"] = begun.differs
        if world.leads and failed:
            replace_json(folder.path / "partial.json", result)
            folder.update(status="some trainings failed")
        elif world.leads:
            (folder.path / "partial.json").unlink(missing_ok=True)
            folder.finish(result)
        return result


def _load_backbone(recipe: ComparedTraining) -> LoadReport:
    return backbone_of(recipe.backbone).report


def _load(
    begun: Session[ComparedTraining], runs: Sequence[_Run], load: Callable[[ComparedTraining], LoadReport]
) -> None:
    """Load the network of each run and say how that went; a resumed comparison starts from the weights it began with.

    `load` loads the weights that a run depends on: its network's own, unless the task's module has another function of
    this name. Raises `DataError` when they have changed, and as `load_backbone` does.
    """
    folder, world = begun.folder, begun.world
    digests: dict[str, str] = {}
    for run in runs:
        with _named(run.network):
            report = load(run.recipe)
        begun.console.info(f"{spoken(run.network)}: {report.summary()}")
        digests[run.network] = report.digest
    before = from_leader(folder.facts).get("digests", digests)
    if changed := next((name for name in digests if digests[name] != before[name]), None):
        raise DataError(
            f"{spoken(changed)}: the weights have changed since this comparison began; start another with -o"
        )
    if world.leads:
        folder.update(device=describe_device(world.device), ranks=world.size, status="running", digests=digests)


@contextmanager
def _named(network: str) -> Iterator[None]:
    """Put the network's name before what is wrong with it."""
    try:
        yield
    except StoppedError:
        raise
    except DpnError as error:
        raise type(error)(f"{spoken(network)}: {error}") from error


def build_result(
    score: str,
    recipe: ComparedTraining,
    runs: Sequence[_Run],
    results: Mapping[str, Result],
    failed: Mapping[str, str],
) -> Result:
    """Return what result.json holds; `results` and `failed`, the reasons, are by folder, and scores in percent."""
    networks: dict[str, Any] = {}
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        own = settings_of(run.network) if recipe.compare else {}
        network = networks.setdefault(run.network, {"network": own, "runs": {}})
        found = values.setdefault(run.network, {})
        if run.folder in results:
            network["runs"][run.folder] = results[run.folder]
            if results[run.folder][score] is not None:
                found[run.recipe.seed] = results[run.folder][score]
    first, *others = networks
    for name, found in values.items():
        networks[name][score] = _described(summarize(list(found.values()), PERCENT)) if found else None
    differences = []
    for name in others:
        seeds = [seed for seed in values[name] if seed in values[first]]
        pairs = ([values[which][seed] for seed in seeds] for which in (name, first))
        difference = _described(paired_difference(*pairs)) if seeds else None
        differences.append({"network": name, "minus": first, "seeds": seeds, score: difference})
    return {
        "task": next((result["task"] for result in results.values()), None),
        "score": score,
        "unit": "percent",
        "seeds": list(recipe.seeds or (recipe.seed,)),
        "compare": {"networks": networks, "differences": differences},
        "failed": list(failed.values()),
    }


def _described(summary: Summary) -> dict[str, Any]:
    deviation = None if summary.stderr is None else round(summary.stderr * math.sqrt(len(summary.values)), 4)
    return {**summary.to_dict(), "std": deviation}


def _table(result: Result) -> Table:
    score, compared = result["score"], result["compare"]
    differences = {each["network"]: each[score] for each in compared["differences"]}
    minus = f", and the difference to {next(iter(compared['networks']))}, paired by seed" if differences else ""
    title = cell(f"{result['task']}: {SCORES[score]} in %{minus}")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("network", overflow="fold")
    for name in (SCORES[score], "std", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    if differences:
        for name in ("difference", "95 %", "n"):
            table.add_column(name, justify="right", no_wrap=True)
    for name, network in compared["networks"].items():
        found, difference = network[score], differences.get(name)
        row = ["-"] * 3 if found is None else [f"{found['mean']:.2f}", _number(found["std"]), str(found["n"])]
        if difference:
            low, high = difference["ci95"] or (None, None)
            error = "" if difference["stderr"] is None else f" ± {difference['stderr']:.2f}"
            interval = "-" if low is None else f"{low:.1f} … {high:.1f}"
            row += [f"{difference['mean']:.2f}{error}", interval, str(difference["n"])]
        table.add_row(cell(name), *row)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
