"""Runs the trials of a sweep, several trainings of one config: ``--compare`` and ``--seeds``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from dpn_cli.config.cost import Cost
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import dump
from dpn_cli.errors import DataError, DpnError, NonFiniteError, OutOfMemoryError, StoppedError
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World, from_leader
from dpn_cli.run.files import replace_json, replace_text
from dpn_cli.run.run import Run, open_run, run_name, with_weights_of
from dpn_cli.run.run_dir import RunFolder, describe_device
from dpn_cli.sweep.engines.dispatch import create_backend, dispatch
from dpn_cli.sweep.engines.local import LOGS
from dpn_cli.sweep.grid import SweepConfig, Trial, format_network
from dpn_cli.sweep.pairs import Result, build_result, print_tables
from dpn_cli.sweep.scheduler import Work
from dpn_cli.sweep.score_names import score_name, score_value
from dpn_cli.weights.backbone import backbone_of
from dpn_cli.weights.load_report import LoadReport
from dpn_cli.weights.resolve_stem import resolve_stem

# Files in the folder of a trial that has ended, and in that of a sweep in which some have failed.
RESULT, PARTIAL = "result.json", "partial.json"
# Key of run.json: the network of each trial with its weights, by name.
NETWORKS = "networks"
DATA_CHANGED = "the data have changed since this comparison started; start another with -o"


class SweepTrainer(Protocol):
    """Module of a task that can be swept.

    Optional: ``load(config)`` loads the weights to check when they are not the network's own (a teacher, a frozen
    tower). ``prepare(config, console)`` does work that all trials share, before processes start.
    """

    def run(self, config: Any, launch: LaunchOptions, console: Console) -> Result | None:
        """Train and return the result; None on ranks that do not lead and after a dry run."""

    def default_folder(self, config: Any) -> Path:
        """Return the folder of a training without ``-o``."""


@dataclass(frozen=True)
class SweepRunner:
    """Trains every network of a config from every seed, each trial in a folder of its own.

    Args:
        command: the words after ``dpn`` that train one trial.
        trainer: module of the task.
        finalize: decides what needs more than one key; gets a config, the console, and whether it is a dry run.
        scores: keys of the scores that are compared.
    """

    command: str
    trainer: SweepTrainer
    finalize: Callable[[Any, Console, bool], Any]
    scores: Sequence[str]

    def run(self, config: SweepConfig, launch: LaunchOptions, console: Console) -> Result | None:
        """Train and return the result; None on ranks that do not lead, for ``--trial``, and after a dry run.

        All networks are loaded before anything is trained. A trial that runs out of memory or diverges is noted in the
        result and tried again when the sweep is resumed; everything else raises `DpnError`.
        """
        trials = self._make_trials(config, console, launch.dry_run)
        check_trial_number(launch.trial, len(trials))
        with open_run(config, config.runtime, "comparison", launch, self._folder(config, trials), console) as run:
            if launch.dry_run:
                firsts = _first_trials(trials)
                self._dry_run(firsts, len(trials) // len(firsts), launch, console)
                return None
            result = run.folder.result if is_complete(run.folder, trials) else None
            if result is None:
                trials = _restore_networks(run, trials, launch)
                self._load_networks(run, _first_trials(trials))
                if launch.trial is not None:
                    trial = trials[launch.trial]
                    console.info(trial.label)
                    self.trainer.run(trial.config, LaunchOptions(run.folder.path / trial.folder, resume=True), console)
                    return None
                failed = self._dispatch(run, trials, launch) if launch.starts_processes else {}
                result = self._train(run, trials, failed)
            return result if run.world.leads else None

    def trial_names(self, config: SweepConfig) -> list[str]:
        """Return the names of the trials, in the order of their numbers."""
        return [trial.folder for trial in self._make_trials(config, Console(quiet=True))]

    def show(self, result: Result) -> None:
        """Print the tables of a sweep on stdout."""
        print_tables(result)

    def _dry_run(self, trials: Sequence[Trial], seeds: int, launch: LaunchOptions, console: Console) -> None:
        """Measure the first trial of each network; those of other seeds cost the same."""
        for trial in trials:
            console.info(f"{format_network(trial.network)}:")
            costs = list[Cost]()
            _reset_compiler(trial)
            self.trainer.run(trial.config, replace(launch, on_cost=costs.append), console)
            for cost in costs:
                launch.on_cost(replace(cost.times(seeds), name=trial.network))

    def _make_trials(self, config: SweepConfig, console: Console, dry_run: bool = False) -> list[Trial]:
        trials = []
        for name, network_config in config.by_network().items():
            with prefix_errors(name):
                finalized = self.finalize(network_config, console, dry_run)
                backbone = resolve_stem(finalized.backbone, console)
            for seed, trial_config in finalized.model_copy(update={"backbone": backbone}).by_seed().items():
                network, folder = (name, f"{config.folders[name]}/") if config.compare else (backbone.stem, "")
                trials.append(Trial(network, seed, f"{folder}seed{seed}", trial_config))
        return trials

    def _folder(self, config: SweepConfig, trials: Sequence[Trial]) -> Path:
        """Return the default folder of the sweep: that of a single trial, renamed after all of them."""
        folder, name = self.trainer.default_folder(trials[0].config), run_name(trials[0].config.backbone)
        if not config.compare:
            sweep_name = f"{name}-{len(trials)}-seeds"
        elif config.backbone.arch or config.backbone.checkpoint:
            sweep_name = run_name(config.backbone, config.joined_networks)
        else:
            sweep_name = config.joined_networks
        return folder.with_name(folder.name.replace(name, sweep_name, 1))

    def _load_networks(self, run: Run[SweepConfig], trials: Sequence[Trial]) -> None:
        """Load the network of each trial, log its report and save its settings; a resumed sweep has the same weights.

        Raises `DataError` when they have changed, and as `load_backbone` does.
        """
        load = getattr(self.trainer, "load", _load_backbone)
        with run.claim_unless("digests"):
            networks = {trial.network: trial.config.backbone.model_dump(mode="json") for trial in trials}
            digests: dict[str, str] = {}
            for trial in trials:
                with prefix_errors(trial.network):
                    report = load(trial.config)
                run.console.info(f"{format_network(trial.network)}: {report.summary()}")
                digests[trial.network] = report.digest
            check_weights(run.folder, digests)
            if run.world.leads and not (run.one_trial and run.folder.facts.get("digests")):
                save_start(run, digests, {NETWORKS: networks})

    def _dispatch(self, run: Run[SweepConfig], trials: Sequence[Trial], launch: LaunchOptions) -> dict[str, str]:
        """Run the trials in processes; return, by folder, why some diverged or ran out of memory.

        Raises `DpnError` for every other failure, when all have been stopped.
        """
        folder, console = run.folder.path, run.console
        backend = create_backend(run, launch)
        works = []
        for trial in trials:
            path, config = folder / trial.folder, folder / LOGS / f"{trial.folder.replace('/', '-')}.yaml"
            if not (path / RESULT).is_file():
                replace_text(config, dump(trial.config))
                line = (*self.command.split(), "--config", str(config), "-o", str(path), "--resume", "--no-report")
                works.append(Work(trial.folder, line, network=trial.network, label=trial.label))
        prepare = getattr(self.trainer, "prepare", None)
        one_network = len({trial.network for trial in trials}) == 1
        if works and launch.engine == "local" and run.world.device.type == "cpu" and prepare and one_network:
            prepare(trials[0].config, console)  # with all cores, and not with those of one of the processes
        failed = dispatch(works, backend, console).failed
        return {trial.folder: f"{trial.label}: {failed[trial.folder]}" for trial in trials if trial.folder in failed}

    def _train(self, run: Run[SweepConfig], trials: Sequence[Trial], failed: dict[str, str]) -> Result:
        """Run the trials that have not failed, which takes no time for those that are finished."""
        folder, world, console = run.folder, run.world, run.console
        results: dict[str, Result] = {}
        for number, trial in enumerate(trials, 1):
            if trial.folder in failed:
                continue
            signals.check()
            console.info(f"{trial.label} ({number} of {len(trials)})")
            _reset_compiler(trial)
            with catch_failure(trial.label, world, console) as errors:
                launch = LaunchOptions(folder.path / trial.folder, resume=True)
                result = results[trial.folder] = from_leader(self.trainer.run(trial.config, launch, console) or {})
                self._log_scores(trial, result, console)
                if result["data"] != next(iter(results.values()))["data"]:
                    raise DataError(f"{folder.path}: {DATA_CHANGED}")
            if errors:
                failed[trial.folder] = f"{trial.label}: {errors[0]}"
        precisions = sorted({result["precision"] for result in results.values() if "precision" in result})
        if len(precisions) > 1:
            computed = " and in ".join(precisions)
            console.warn(
                f"{folder.path}: trainings were computed in {computed}, by their machines or widths; --precision sets "
                "one for all"
            )
        result = build_result(self.scores, trials, results, failed, compared=bool(run.config.compare))
        result["differs_from_paper"] = run.differs
        if world.leads:
            save_result(folder, result)
        return result

    def _log_scores(self, trial: Trial, result: Result, console: Console) -> None:
        """Log the scores of a trial that has ended."""
        values = {key: value for key in self.scores if (value := score_value(result, key)) is not None}
        if values:
            scores = ", ".join(f"{score_name(key)} {value:.2f} %" for key, value in values.items())
            console.info(f"{trial.label}: {scores}")


def check_trial_number(number: int | None, count: int) -> None:
    """Raise `DpnError` for a number of ``--trial`` that no trial has."""
    if number is not None and number >= count:
        raise DpnError(f"--trial {number}: there are {count}, 0 to {count - 1}; --list-trials lists them")


def is_complete(folder: RunFolder, trials: Sequence[Trial]) -> bool:
    """Return whether every trial has its result, whatever the sweep's own says."""
    return all((folder.path / trial.folder / RESULT).is_file() for trial in trials)


@contextmanager
def prefix_errors(network: str) -> Iterator[None]:
    """Begin the messages of errors with a network's name."""
    try:
        yield
    except StoppedError:
        raise
    except DpnError as error:
        raise type(error)(f"{format_network(network)}: {error}") from error


@contextmanager
def catch_failure(label: str, world: World, console: Console) -> Iterator[list[DpnError]]:
    """Warn when the work called `label` diverges or runs out of memory, so that other work goes on.

    Yields a list that has the error afterwards, and is empty without one. With several ranks, running out of memory
    ends all of them.
    """
    errors: list[DpnError] = []
    try:
        yield errors
    except (NonFiniteError, OutOfMemoryError) as error:
        if world.size > 1 and isinstance(error, OutOfMemoryError):
            raise  # the other ranks are waiting for this one's gradients
        console.warn(f"{label} failed: {error}")
        errors.append(error)


def check_weights(folder: RunFolder, digests: Mapping[str, str]) -> None:
    """Raise `DataError` when a network's weights are not those that the sweep began with."""
    saved = from_leader(folder.facts).get("digests", digests)
    if changed := next((name for name in digests if digests[name] != saved[name]), None):
        raise DataError(
            f"{format_network(changed)}: the weights have changed since this comparison started; start another with -o"
        )


def save_start(run: Run[Any], digests: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    """Write into run.json what a sweep runs on, the digests of its weights, and more facts."""
    world = run.world
    facts = {"digests": digests, **facts, "ranks": world.size, "device": describe_device(world.device)}
    run.folder.update(**facts, status="running")


def save_result(folder: RunFolder, result: Result) -> None:
    """Write the result of a sweep: result.json when nothing failed, else partial.json."""
    if result["failed"]:
        replace_json(folder.path / PARTIAL, result)
        (folder.path / RESULT).unlink(missing_ok=True)  # of a training that was deleted and failed this time
        folder.update(status="some trainings failed")
    else:
        (folder.path / PARTIAL).unlink(missing_ok=True)
        folder.finish(result)


def _first_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Return the first trial of every network."""
    return [trial for trial in trials if trial.seed == trials[0].seed]


def _restore_networks(run: Run[SweepConfig], trials: Sequence[Trial], launch: LaunchOptions) -> list[Trial]:
    """Return the trials with the networks that the sweep began with."""
    saved = from_leader(run.folder.facts).get(NETWORKS, {})
    networks = {
        trial.network: with_weights_of(trial.config, saved.get(trial.network), launch.explicit_keys, run.console)
        for trial in _first_trials(trials)
    }
    return [
        replace(trial, config=trial.config.model_copy(update={"backbone": networks[trial.network].backbone}))
        for trial in trials
    ]


def _reset_compiler(trial: Trial) -> None:
    if trial.config.runtime.compile:
        torch.compiler.reset()  # the compiler gives up after eight networks


def _load_backbone(config: SweepConfig) -> LoadReport:
    return backbone_of(config.backbone).report
