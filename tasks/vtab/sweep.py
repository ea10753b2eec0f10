"""The sweep: every (task, lr, seed) is a trial with a folder of its own; only the chosen trials see the test split."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DataError, OutOfMemoryError, SaveError, SweepError
from dpn_cli.run import distributed
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.run.files import replace_json
from dpn_cli.run.run import Run
from dpn_cli.run.run_dir import RunFolder, describe_device
from dpn_cli.sweep.engines.dispatch import create_backend, dispatch
from dpn_cli.sweep.grid import format_network
from dpn_cli.sweep.runner import catch_failure
from dpn_cli.sweep.scheduler import Work
from dpn_cli.weights.backbone import Backbone
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import TaskData, check_images, open_task
from tasks.vtab.result_tables import build_result, write_csv
from tasks.vtab.task_sweep import TaskSweep, shared_pixels
from tasks.vtab.tasks import Task, choose_tasks
from tasks.vtab.train import check_crops, load_network
from tasks.vtab.trials import Json, TaskOutcome, read_json


@dataclass(frozen=True)
class SweepPart:
    """A network on a task, or one of its trainings where `lr` and `seed` are given: what a process of a sweep runs."""

    network: str
    task: Task
    lr: float | None = None
    seed: int = 0

    def name(self, config: VtabConfig) -> str:
        """Return NETWORK/TASK, with the learning rate and the seed of a single training."""
        full_name = f"{config.folders[self.network]}/{self.task.name}"
        return full_name if self.lr is None else f"{full_name}/lr{self.lr:g}_seed{self.seed}"


def sweep_parts(config: VtabConfig) -> list[SweepPart]:
    """Return the parts that ``--trial`` numbers: every network on every task, then each of their trainings."""
    tasks = choose_tasks(config.data.tasks, config.demo)
    task_parts = [SweepPart(network, task) for network in config.networks for task in tasks]
    return task_parts + [
        replace(part, lr=lr, seed=seed) for part in task_parts for lr in config.lrs for seed in config.seeds
    ]


def sweep(run: Run[VtabConfig], launch: LaunchOptions) -> Json | None:
    """Run or finish the sweep in the run's folder; write its result there and return it.

    Data are checked for all tasks before anything is trained. A trial that runs out of memory or diverges is noted in
    the result and tried again when the run is resumed; everything else raises `DpnError`. The `launch` says whether
    processes do the work. With the number of a part, this is all that is done, and the result None.

    Raises `SweepError` when trainings of that part failed, and `OutOfMemoryError` when all else is done, for those that
    had a part of a GPU only: with a whole one they are tried again.
    """
    config, folder = run.config, run.folder
    with run.claim_unless("data"):
        data, fingerprints = _check(run)
    if launch.starts_processes:
        _forget_failures(folder)
        _dispatch(run, data, launch)
    selected = [part for part in sweep_parts(config) if part.lr is None]
    if launch.trial is not None:
        selected = [sweep_parts(config)[launch.trial]]
    track, outcomes = run.tracker(config.runtime.report_to), []
    for part in selected:
        trials = TaskSweep(run, part.network, part.task, data[part.task], dispatched=launch.starts_processes)
        with closing(
            trials.iter_trials() if part.lr is None else trials.iter_one_trial(part.lr, part.seed)
        ) as to_train:
            for trial in to_train:
                with catch_failure(trial.label, run.world, run.console) as errors:
                    with run.outputs(trial.label, track, trial.path) as outputs:
                        job = trials.trainer.job(trial, outputs)
                        result = engine.fit(trials.trainer.trainable, job)
                    trials.save(trial, result)
                if errors:
                    trials.save_failure(trial, errors[0])
        outcomes.append(trials.outcome)
    if launch.trial is None:
        return _finish(run, outcomes, fingerprints)
    if trials.failures:
        kind = OutOfMemoryError if trials.needs_whole_gpu else SweepError
        raise kind("; ".join(f"{label}: {reason}" for label, reason in trials.failures.items()))
    return None


def _dispatch(run: Run[VtabConfig], data: Mapping[Task, TaskData], launch: LaunchOptions) -> None:
    """Have processes run the parts of the sweep; where these are fewer than the processes, each training by itself."""
    config, folder = run.config, run.folder.path
    backend = create_backend(run, launch)
    parts = sweep_parts(config)
    task_parts, trial_parts = (
        [part for part in parts if part.lr is None],
        [part for part in parts if part.lr is not None],
    )
    line = ("finetune", "vtab", "--config", str(folder / "config.yaml"), "-o", str(folder), "--no-report", "--trial")
    works = list[Work]()
    for part in task_parts:
        trials, dependencies = TaskSweep(run, part.network, part.task, data[part.task]), list[str]()
        if trials.is_scored:
            continue
        for trial_part in trial_parts if len(task_parts) < backend.slots else ():
            is_same = (trial_part.network, trial_part.task) == (part.network, part.task)
            if is_same and trial_part.lr is not None and trials.is_unfinished(trial_part.lr, trial_part.seed):
                dependencies.append(trial_part.name(config))
                works.append(Work(dependencies[-1], (*line, str(parts.index(trial_part))), network=part.network))
        works.append(Work(part.name(config), (*line, str(parts.index(part))), tuple(dependencies), part.network))
    dispatch(works, backend, run.console)


def _finish(run: Run[VtabConfig], outcomes: list[TaskOutcome], fingerprints: Json) -> Json:
    """Write the result of a sweep and return it."""
    config, folder = run.config, run.folder
    facts = folder.facts
    arch = config.backbone.arch or facts.get("arch", "")
    if pixels := shared_pixels(run):
        shutil.rmtree(pixels, ignore_errors=True)
    result = build_result(config, outcomes, arch, fingerprints, timing(folder), run.differs)
    result["precision"] = folder.precision
    result["image_size"] = config.backbone.image_size or facts.get("image_size")
    if run.world.leads:
        write_csv(folder.path / "result.csv", outcomes)
        if any(outcome.failed for outcome in outcomes):
            replace_json(folder.path / "partial.json", result)
            folder.update(status="some trials failed")
        else:
            folder.finish(result)
    return result


def _check(run: Run[VtabConfig]) -> tuple[dict[Task, TaskData], Json]:
    """Check data and networks, and return the data of every task with their fingerprints."""
    config, folder, world, console = run.config, run.folder, run.world, run.console
    tasks = choose_tasks(config.data.tasks, config.demo)
    data = {task: open_task(config.data, task) for task in tasks}
    fingerprints = {task.name: entry.fingerprints for task, entry in data.items()}
    facts = distributed.from_leader(folder.facts)
    if facts.get("data", fingerprints) != fingerprints:
        raise DataError(f"{config.data.source}: the data have changed since this run started; start another with -o")
    models = [_check_network(config, network, tasks[0], folder, facts, world, console) for network in config.networks]
    if world.leads and not (run.one_trial and facts.get("data")):  # which another process has checked
        folder.update(device=describe_device(world.device), ranks=world.size, status="running")
        check_images(data, config.data.skip_bad_images, console)
        check_crops(config, tasks, console)
        run.record_precision(config.runtime, *models)
        folder.update(data=fingerprints)
    return data, fingerprints


def _forget_failures(folder: RunFolder) -> None:
    """Let the trials that failed before be tried again."""
    for path in folder.path.glob("trials/*/*/*/failed.json"):
        path.unlink(missing_ok=True)


def _check_network(
    config: VtabConfig, network: str, task: Task, folder: RunFolder, facts: Json, world: World, console: Console
) -> Backbone:
    """Load a network before any training, report how it loaded, and check that its weights fit on the disk."""
    model = load_network(config, network, task.classes)
    report, vit_config = model.report, model.config
    console.info(f"{format_network(network)}: {report.summary()}")
    recorded_digest = facts.get(f"backbone_{network}", {}).get("digest", report.digest)
    if recorded_digest != report.digest:
        raise DataError(f"{report.source}: the weights have changed since this run started; start another with -o")
    trials, free = len(config.lrs) * len(config.seeds), shutil.disk_usage(folder.path).free
    bytes_needed = 4 * trials * report.parameters
    if free < bytes_needed:
        raise SaveError(
            f"-o {folder.path}: {free / 1e9:.1f} GB free, and the {trials} trials of a task keep "
            f"{bytes_needed / 1e9:.1f} GB "
            "of weights until its learning rate is chosen; free some space or pass another -o"
        )
    if world.leads and f"backbone_{network}" not in facts:
        folder.update(
            arch=vit_config.arch, image_size=list(vit_config.image_size), **{f"backbone_{network}": report.to_dict()}
        )
    return model


def timing(folder: RunFolder) -> Json:
    """Return the seconds that the finished trials trained, by their markers."""
    markers = [read_json(path) or {} for path in sorted(folder.path.glob("trials/*/*/*/done.json"))]
    total = {key: round(sum(marker[key] for marker in markers), 2) for key in ("train_seconds", "wait_seconds")}
    return {**total, "trainings": len(markers)}
