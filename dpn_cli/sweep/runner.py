"""Several trainings of one config side by side: ``--compare`` and ``--seeds``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from dpn_cli.commands.train import Result, Training, TrainingModule
from dpn_cli.commands.trainers import TRAININGS
from dpn_cli.config.cost import Cost
from dpn_cli.config.launch import Place
from dpn_cli.config.load import dump
from dpn_cli.errors import DataError, DpnError, NonFiniteError, OutOfMemoryError
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import from_leader
from dpn_cli.run.files import read_object, replace_json, replace_text
from dpn_cli.run.leases import LeaseLostError
from dpn_cli.run.run import Session, pause, run_name, session, with_weights_of
from dpn_cli.run.run_dir import describe_device
from dpn_cli.sweep.engines.joining import backend_for
from dpn_cli.sweep.engines.local import LOGS, last_error
from dpn_cli.sweep.grid import ComparedTraining, spoken
from dpn_cli.sweep.pairs import Cell, build_result, check_weights, keep_result, named, show_comparison
from dpn_cli.sweep.scheduler import Work, run_all
from dpn_cli.weights.backbone import LoadReport, backbone_of
from dpn_cli.weights.resolve_stem import with_own_stem

# Files in the folder of a training that has ended, one way or the other, for processes that share the work.
RESULT, FAILED = "result.json", "failed.json"
# Key of run.json: the network of each training with its weights, by name.
NETWORKS = "networks"


class _Comparable(TrainingModule, Protocol):
    """The module of a task whose trainings can be compared."""

    def default_folder(self, config: Any) -> Path:
        """Return the folder of a run without ``-o``."""


@dataclass(frozen=True)
class _Run(Cell):
    """One of the trainings, with its settled config."""

    config: ComparedTraining


class SideBySide:
    """Trains every network of a config from every seed, each in a run folder of its own."""

    def __init__(self, training: Training) -> None:
        self.training, self.trainer = training, cast(_Comparable, import_module(training.module))

    def run(self, config: ComparedTraining, place: Place, console: Console) -> Result | None:
        """Train and return the comparison; None on ranks that do not lead and after a dry run.

        All networks are loaded before anything is trained. A training that runs out of memory or diverges is noted in
        the result and tried again when the comparison is resumed; everything else raises `DpnError`.
        """
        runs = self._runs(config, console, place.dry_run)
        if place.cell is not None and place.cell >= len(runs):
            raise DpnError(
                f"--cell {place.cell}: there are {len(runs)}, 0 to {len(runs) - 1}; --print-cells lists them"
            )
        with session(config, config.runtime, "comparison", place, self._folder(config, runs), console) as begun:
            if place.dry_run:
                firsts = _firsts(runs)
                self._rehearse(firsts, len(runs) // len(firsts), place, console)
                return None
            result = begun.folder.result if _complete(begun.folder.path, runs) else None
            if result is None:
                runs = _as_begun(begun, runs, place)
                with begun.alone_unless("digests"):
                    _load(begun, _firsts(runs), getattr(self.trainer, "load", _load_backbone))
                failed = self._at_once(begun, runs, place) if place.starts_processes else {}
                if place.join:
                    failed = self._along_with_others(begun, runs if place.cell is None else [runs[place.cell]])
                if place.cell is not None:
                    return None
                result = self._train(begun, runs, failed)
            return result if begun.world.leads else None

    def _rehearse(self, firsts: Sequence[_Run], seeds: int, place: Place, console: Console) -> None:
        """Tell what the trainings of each network take, of which one is rehearsed: seeds make no difference to that."""
        for run in firsts:
            console.info(f"{spoken(run.network)}:")
            costs = list[Cost]()
            _forget_compiled(run)
            self.trainer.run(run.config, replace(place, costed=costs.append), console)
            for cost in costs:
                place.costed(replace(cost.times(seeds), name=run.network))

    def cells(self, config: ComparedTraining) -> list[str]:
        """Return what the numbers of ``--cell`` stand for."""
        return [run.folder for run in self._runs(config, Console(quiet=True))]

    def show(self, result: Result) -> None:
        """Print the table of a comparison on stdout."""
        show_comparison(result)

    def _runs(self, config: ComparedTraining, console: Console, dry_run: bool = False) -> list[_Run]:
        runs = []
        for name, each in config.each().items():
            with named(name):
                each = self.training.settle(each, console, dry_run)
                each = each.model_copy(update={"backbone": with_own_stem(each.backbone, console)})
            for seed, one in each.with_seeds().items():
                network, folder = (name, f"{config.folders[name]}/") if config.compare else (each.backbone.stem, "")
                runs.append(_Run(network, seed, f"{folder}seed{seed}", one))
        return runs

    def _folder(self, config: ComparedTraining, runs: Sequence[_Run]) -> Path:
        """Return the folder beside that of one of the trainings alone, named after all of them."""
        one = runs[0].config
        alone, name = self.trainer.default_folder(one), run_name(one.backbone)
        if not config.compare:
            several = f"{name}-{len(runs)}-seeds"
        elif config.backbone.arch or config.backbone.checkpoint:
            several = run_name(config.backbone, config.versus)
        else:
            several = config.versus
        return alone.with_name(alone.name.replace(name, several, 1))

    def _at_once(self, begun: Session[ComparedTraining], runs: Sequence[_Run], place: Place) -> dict[str, str]:
        """Run the trainings in processes; return, by folder, why some diverged or ran out of memory.

        Raises `DpnError` for every other failure, when all have been stopped.
        """
        folder, console = begun.folder.path, begun.console
        backend = backend_for(begun, place)
        words = next(name for name, one in TRAININGS.items() if one is self.training).split()
        works, failed = dict[str, Work](), dict[str, str]()
        for run in runs:
            (folder / run.folder / FAILED).unlink(missing_ok=True)
            path, config = folder / run.folder, folder / LOGS / f"{run.folder.replace('/', '-')}.yaml"
            if not (path / RESULT).is_file():
                replace_text(config, dump(run.config))
                line = (*words, "--config", str(config), "-o", str(path), "--resume", "--no-report")
                works[run.folder] = Work(run.folder, line, network=run.network)
        if works and place.engine == "local" and begun.world.device.type == "cpu":
            self._prepare(runs, console)
        labels = {run.folder: run.label for run in runs}

        def on_start(work: Work) -> None:
            console.info(f"{labels[work.name]}: {backend.log_of(work.name)}")

        def on_end(work: Work, code: int) -> None:
            error = last_error(backend.log_of(work.name))
            if code in (NonFiniteError.exit_code, OutOfMemoryError.exit_code):
                console.warn(f"{labels[work.name]} failed: {error}")
                failed[work.name] = f"{labels[work.name]}: {error}"
            elif code:
                raise DpnError(f"{labels[work.name]}: {error} (exit code {code}; {backend.log_of(work.name)})")

        run_all(list(works.values()), backend, on_start, on_end, signals.check_here)
        return {run.folder: failed[run.folder] for run in runs if run.folder in failed}

    def _prepare(self, runs: Sequence[_Run], console: Console) -> None:
        """Do with all cores what all trainings wait for otherwise, while one of them does it with its part of them."""
        prepare = getattr(self.trainer, "prepare", None)
        if prepare and len({run.network for run in runs}) == 1:
            prepare(runs[0].config, console)

    def _along_with_others(self, begun: Session[ComparedTraining], runs: Sequence[_Run]) -> dict[str, str]:
        """Train what no other process trains until nothing is left; return, by folder, why some have failed."""
        folder, console = begun.folder.path, begun.console
        while left := [run for run in runs if not _ended(folder / run.folder)]:
            trained = False
            for run in left:
                if (lease := begun.take(run.folder)) is None:
                    continue
                try:
                    if not _ended(folder / run.folder):
                        trained = True
                        console.info(run.label)
                        _forget_compiled(run)
                        place = Place(folder / run.folder, resume=True, check=lease.check)
                        self.trainer.run(run.config, place, console)
                except (NonFiniteError, OutOfMemoryError) as error:
                    console.warn(f"{run.label} failed: {error}")
                    replace_json(folder / run.folder / FAILED, {"error": str(error)})
                except LeaseLostError as error:
                    console.warn(f"{run.label}: {error}")
                finally:
                    lease.release()
            if not trained:
                pause()
        failed = [run for run in runs if not (folder / run.folder / RESULT).is_file()]
        reasons = {run.folder: (read_object(folder / run.folder / FAILED) or {}).get("error") for run in failed}
        return {run.folder: f"{run.label}: {reasons[run.folder]}" for run in failed}

    def _train(self, begun: Session[ComparedTraining], runs: Sequence[_Run], failed: dict[str, str]) -> Result:
        """Run the trainings that have not failed, which takes no time for those that are done."""
        config, folder, world, console = begun.config, begun.folder, begun.world, begun.console
        results: dict[str, Result] = {}
        for number, run in enumerate(runs, 1):
            if run.folder in failed:
                continue
            signals.check()
            console.info(f"{run.label} ({number} of {len(runs)})")
            _forget_compiled(run)
            try:
                place = Place(folder.path / run.folder, resume=True)
                done = results[run.folder] = from_leader(self.trainer.run(run.config, place, console) or {})
                if done["data"] != next(iter(results.values()))["data"]:
                    raise DataError(
                        f"{folder.path}: the data have changed since this comparison began; start another with -o"
                    )
            except (NonFiniteError, OutOfMemoryError) as error:
                if world.size > 1 and isinstance(error, OutOfMemoryError):
                    raise  # the other ranks are waiting for this one's gradients
                console.warn(f"{run.label} failed: {error}")
                failed[run.folder] = f"{run.label}: {error}"
        result = build_result(self.training.scores, runs, results, failed, compared=bool(config.compare))
        result["differs_from_paper"] = begun.differs
        if world.leads:
            with begun.alone("result"):
                keep_result(folder, result)
        return result


def _firsts(runs: Sequence[_Run]) -> list[_Run]:
    """Return the first training of every network."""
    return [run for run in runs if run.seed == runs[0].seed]


def _as_begun(begun: Session[ComparedTraining], runs: Sequence[_Run], place: Place) -> list[_Run]:
    """Return the trainings with the networks that the comparison began with."""
    saved = from_leader(begun.folder.facts).get(NETWORKS, {})
    found = {
        run.network: with_weights_of(run.config, saved.get(run.network), place.given, begun.console).backbone
        for run in _firsts(runs)
    }
    return [replace(run, config=run.config.model_copy(update={"backbone": found[run.network]})) for run in runs]


def _forget_compiled(run: _Run) -> None:
    if run.config.runtime.compile:
        torch.compiler.reset()  # the compiler gives up after eight networks


def _ended(folder: Path) -> bool:
    return (folder / RESULT).is_file() or (folder / FAILED).is_file()


def _complete(folder: Path, runs: Sequence[_Run]) -> bool:
    """Tell whether every training has its result, whatever the comparison's own says."""
    return all((folder / run.folder / RESULT).is_file() for run in runs)


def _load_backbone(config: ComparedTraining) -> LoadReport:
    return backbone_of(config.backbone).report


def _load(
    begun: Session[ComparedTraining], runs: Sequence[_Run], load: Callable[[ComparedTraining], LoadReport]
) -> None:
    """Load the network of each run and say how that went; a resumed comparison starts from the weights it began with.

    `load` loads the weights that a run depends on: its network's own, unless the task's module has another function of
    this name. Raises `DataError` when they have changed, and as `load_backbone` does.
    """
    folder, world = begun.folder, begun.world
    digests: dict[str, str] = {}
    networks = {run.network: run.config.backbone.model_dump(mode="json") for run in runs}
    for run in runs:
        with named(run.network):
            report = load(run.config)
        begun.console.info(f"{spoken(run.network)}: {report.summary()}")
        digests[run.network] = report.digest
    check_weights(folder, digests)
    if world.leads and not (begun.leases and folder.facts.get("digests")):
        facts = {"digests": digests, NETWORKS: networks, "ranks": world.size, "device": describe_device(world.device)}
        folder.update(**facts, status="running")
