"""Several trainings of one config side by side: ``--compare`` and ``--seeds``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from dpn_cli.commands.train_command import Result, TrainCommand, TrainingModule
from dpn_cli.commands.trainers import TRAIN_COMMANDS
from dpn_cli.config.cost import Cost
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import dump
from dpn_cli.errors import DataError, DpnError, NonFiniteError, OutOfMemoryError
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import from_leader
from dpn_cli.run.files import replace_text
from dpn_cli.run.run import Run, open_run, run_name, with_weights_of
from dpn_cli.run.run_dir import describe_device
from dpn_cli.sweep.engines.dispatch import backend_for, dispatch
from dpn_cli.sweep.engines.local import LOGS
from dpn_cli.sweep.grid import SweepConfig, format_network
from dpn_cli.sweep.pairs import ComparedTrial, build_result, check_weights, keep_result, prefix_errors, show_comparison
from dpn_cli.sweep.scheduler import Work
from dpn_cli.weights.backbone import LoadReport, backbone_of
from dpn_cli.weights.resolve_stem import with_own_stem

# File in the folder of a training that has ended.
RESULT = "result.json"
# Key of trial.json: the network of each training with its weights, by name.
NETWORKS = "networks"


class _Comparable(TrainingModule, Protocol):
    """The module of a task whose trainings can be compared."""

    def default_folder(self, config: Any) -> Path:
        """Return the folder of a trial without ``-o``."""


@dataclass(frozen=True)
class _SweepTrial(ComparedTrial):
    """One of the trainings, with its settled config."""

    config: SweepConfig


class SweepRunner:
    """Trains every network of a config from every seed, each in a trial folder of its own."""

    def __init__(self, training: TrainCommand) -> None:
        self.training, self.trainer = training, cast(_Comparable, import_module(training.module))

    def run(self, config: SweepConfig, launch: LaunchOptions, console: Console) -> Result | None:
        """Train and return the comparison; None on ranks that do not lead and after a dry trial.

        All networks are loaded before anything is trained. A training that runs out of memory or diverges is noted in
        the result and tried again when the comparison is resumed; everything else raises `DpnError`.
        """
        trials = self._runs(config, console, launch.dry_run)
        if launch.trial is not None and launch.trial >= len(trials):
            raise DpnError(
                f"--trial {launch.trial}: there are {len(trials)}, 0 to {len(trials) - 1}; --list-trials lists them"
            )
        with open_run(config, config.runtime, "comparison", launch, self._folder(config, trials), console) as run:
            if launch.dry_run:
                firsts = _firsts(trials)
                self._dry_run(firsts, len(trials) // len(firsts), launch, console)
                return None
            result = run.folder.result if _complete(run.folder.path, trials) else None
            if result is None:
                trials = _with_saved_networks(run, trials, launch)
                with run.claim_unless("digests"):
                    _load(run, _firsts(trials), getattr(self.trainer, "load", _load_backbone))
                if launch.trial is not None:
                    one = trials[launch.trial]
                    console.info(one.label)
                    self.trainer.run(one.config, LaunchOptions(run.folder.path / one.folder, resume=True), console)
                    return None
                failed = self._dispatch(run, trials, launch) if launch.starts_processes else {}
                result = self._train(run, trials, failed)
            return result if run.world.leads else None

    def _dry_run(self, firsts: Sequence[_SweepTrial], seeds: int, launch: LaunchOptions, console: Console) -> None:
        """Tell what the trainings of each network take, of which one is dry-run: seeds make no difference to that."""
        for trial in firsts:
            console.info(f"{format_network(trial.network)}:")
            costs = list[Cost]()
            _forget_compiled(trial)
            self.trainer.run(trial.config, replace(launch, on_cost=costs.append), console)
            for cost in costs:
                launch.on_cost(replace(cost.times(seeds), name=trial.network))

    def trials(self, config: SweepConfig) -> list[str]:
        """Return what the numbers of ``--trial`` stand for."""
        return [trial.folder for trial in self._runs(config, Console(quiet=True))]

    def show(self, result: Result) -> None:
        """Print the table of a comparison on stdout."""
        show_comparison(result)

    def _runs(self, config: SweepConfig, console: Console, dry_run: bool = False) -> list[_SweepTrial]:
        trials = []
        for name, each in config.each().items():
            with prefix_errors(name):
                each = self.training.finalize(each, console, dry_run)
                each = each.model_copy(update={"backbone": with_own_stem(each.backbone, console)})
            for seed, one in each.with_seeds().items():
                network, folder = (name, f"{config.folders[name]}/") if config.compare else (each.backbone.stem, "")
                trials.append(_SweepTrial(network, seed, f"{folder}seed{seed}", one))
        return trials

    def _folder(self, config: SweepConfig, trials: Sequence[_SweepTrial]) -> Path:
        """Return the folder beside that of one of the trainings alone, named after all of them."""
        one = trials[0].config
        alone, name = self.trainer.default_folder(one), run_name(one.backbone)
        if not config.compare:
            several = f"{name}-{len(trials)}-seeds"
        elif config.backbone.arch or config.backbone.checkpoint:
            several = run_name(config.backbone, config.versus)
        else:
            several = config.versus
        return alone.with_name(alone.name.replace(name, several, 1))

    def _dispatch(self, run: Run[SweepConfig], trials: Sequence[_SweepTrial], launch: LaunchOptions) -> dict[str, str]:
        """Run the trainings in processes; return, by folder, why some diverged or ran out of memory.

        Raises `DpnError` for every other failure, when all have been stopped.
        """
        folder, console = run.folder.path, run.console
        backend = backend_for(run, launch)
        words = next(name for name, one in TRAIN_COMMANDS.items() if one is self.training).split()
        works = []
        for trial in trials:
            path, config = folder / trial.folder, folder / LOGS / f"{trial.folder.replace('/', '-')}.yaml"
            if not (path / RESULT).is_file():
                replace_text(config, dump(trial.config))
                line = (*words, "--config", str(config), "-o", str(path), "--resume", "--no-report")
                works.append(Work(trial.folder, line, network=trial.network, label=trial.label))
        if works and launch.engine == "local" and run.world.device.type == "cpu":
            self._prepare(trials, console)
        failed = dispatch(run, works, backend)
        return {one.folder: f"{one.label}: {failed[one.folder]}" for one in trials if one.folder in failed}

    def _prepare(self, trials: Sequence[_SweepTrial], console: Console) -> None:
        """Do with all cores what all trainings wait for otherwise, while one of them does it with its part of them."""
        prepare = getattr(self.trainer, "prepare", None)
        if prepare and len({trial.network for trial in trials}) == 1:
            prepare(trials[0].config, console)

    def _train(self, run: Run[SweepConfig], trials: Sequence[_SweepTrial], failed: dict[str, str]) -> Result:
        """Run the trainings that have not failed, which takes no time for those that are done."""
        config, folder, world, console = run.config, run.folder, run.world, run.console
        results: dict[str, Result] = {}
        for number, trial in enumerate(trials, 1):
            if trial.folder in failed:
                continue
            signals.check()
            console.info(f"{trial.label} ({number} of {len(trials)})")
            _forget_compiled(trial)
            try:
                launch = LaunchOptions(folder.path / trial.folder, resume=True)
                done = results[trial.folder] = from_leader(self.trainer.run(trial.config, launch, console) or {})
                if done["data"] != next(iter(results.values()))["data"]:
                    raise DataError(
                        f"{folder.path}: the data have changed since this comparison began; start another with -o"
                    )
            except (NonFiniteError, OutOfMemoryError) as error:
                if world.size > 1 and isinstance(error, OutOfMemoryError):
                    raise  # the other ranks are waiting for this one's gradients
                console.warn(f"{trial.label} failed: {error}")
                failed[trial.folder] = f"{trial.label}: {error}"
        result = build_result(self.training.scores, trials, results, failed, compared=bool(config.compare))
        result["differs_from_paper"] = run.differs
        if world.leads:
            keep_result(folder, result)
        return result


def _firsts(trials: Sequence[_SweepTrial]) -> list[_SweepTrial]:
    """Return the first training of every network."""
    return [trial for trial in trials if trial.seed == trials[0].seed]


def _with_saved_networks(
    run: Run[SweepConfig], trials: Sequence[_SweepTrial], launch: LaunchOptions
) -> list[_SweepTrial]:
    """Return the trainings with the networks that the comparison began with."""
    saved = from_leader(run.folder.facts).get(NETWORKS, {})
    found = {
        trial.network: with_weights_of(
            trial.config, saved.get(trial.network), launch.explicit_keys, run.console
        ).backbone
        for trial in _firsts(trials)
    }
    return [
        replace(trial, config=trial.config.model_copy(update={"backbone": found[trial.network]})) for trial in trials
    ]


def _forget_compiled(trial: _SweepTrial) -> None:
    if trial.config.runtime.compile:
        torch.compiler.reset()  # the compiler gives up after eight networks


def _complete(folder: Path, trials: Sequence[_SweepTrial]) -> bool:
    """Return whether every training has its result, whatever the comparison's own says."""
    return all((folder / trial.folder / RESULT).is_file() for trial in trials)


def _load_backbone(config: SweepConfig) -> LoadReport:
    return backbone_of(config.backbone).report


def _load(run: Run[SweepConfig], trials: Sequence[_SweepTrial], load: Callable[[SweepConfig], LoadReport]) -> None:
    """Load the network of each trial and say how that went; a resumed comparison starts from the weights it began with.

    `load` loads the weights that a trial depends on: its network's own, unless the task's module has another function
    of this name. Raises `DataError` when they have changed, and as `load_backbone` does.
    """
    folder, world = run.folder, run.world
    digests: dict[str, str] = {}
    networks = {trial.network: trial.config.backbone.model_dump(mode="json") for trial in trials}
    for trial in trials:
        with prefix_errors(trial.network):
            report = load(trial.config)
        run.console.info(f"{format_network(trial.network)}: {report.summary()}")
        digests[trial.network] = report.digest
    check_weights(folder, digests)
    if world.leads and not (run.one_trial and folder.facts.get("digests")):
        facts = {"digests": digests, NETWORKS: networks, "ranks": world.size, "device": describe_device(world.device)}
        folder.update(**facts, status="running")
