"""The sweep: every (task, lr, seed) is a trial with a folder of its own; only the chosen trials see the test split."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Generator
from contextlib import closing

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DataError, NonFiniteError, OutOfMemoryError, SaveError
from dpn_cli.run import distributed
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.run.files import replace_json
from dpn_cli.run.gpu_share import is_shared
from dpn_cli.run.leases import LeaseLostError, Unshared
from dpn_cli.run.run import Run, pause
from dpn_cli.run.run_dir import RunFolder, describe_device
from dpn_cli.sweep.engines.joining import at_once
from dpn_cli.sweep.grid import format_network
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import TaskData, check_images, open_task
from tasks.vtab.result_tables import build_result, write_csv
from tasks.vtab.task_sweep import TaskSweep, folder_of_pixels
from tasks.vtab.tasks import Task, choose_tasks
from tasks.vtab.train import check_crops, load_network
from tasks.vtab.trials import Json, TaskOutcome, VtabTrial, read_json

Part = tuple[str, Task]


def network_tasks(config: VtabConfig) -> list[Part]:
    """Return the parts of a sweep, each with all trainings of a network on a task, in the order of their numbers."""
    return list(itertools.product(config.networks, choose_tasks(config.data.tasks, config.demo)))


def sweep(run: Run[VtabConfig], place: LaunchOptions) -> Json | None:
    """Run or finish the sweep in the run's folder; write its result there and return it.

    Data are checked for all tasks before anything is trained. A trial that runs out of memory or diverges
    is noted in the result and tried again when the run is resumed; everything else raises `DpnError`. Of processes that
    share the folder, each does what no other one does, until nothing is left; the `place` says whether they are started
    here first. With the number of a part, this is all that is done, and the result None.

    Raises `OutOfMemoryError` when all else is done, for trainings that had a part of a GPU only: with a whole one they
    are tried again.
    """
    config, folder = run.config, run.folder
    with run.alone_unless("data"):
        data, fingerprints = _check(run)
    if place.starts_processes:
        _forget_failures(folder)
        at_once(run, ("finetune", "vtab"), place)
    all_parts = network_tasks(config)
    asked = all_parts if place.trial is None else [all_parts[place.trial]]
    track = run.tracker(config.runtime.report_to)
    outcomes, set_aside = dict[Part, TaskOutcome](), list[str]()
    with closing(_to_train(run, asked, data, outcomes)) as to_train:
        for trials, one, lease in to_train:
            try:
                with run.outputs(one.label, track, one.path, lease) as outputs:
                    job = trials.trainer.job(one, outputs)
                    done = engine.fit(trials.trainer.trainable, job)
                lease.confirm()
                trials.keep(one, done)
            except (NonFiniteError, OutOfMemoryError) as error:
                trials.note_failure(one, error)
                if is_shared() and isinstance(error, OutOfMemoryError):
                    set_aside.append(one.label)
            except LeaseLostError as error:
                run.console.warn(f"{one.label}: {error}")
    if set_aside:
        raise OutOfMemoryError(f"{', '.join(set_aside)}: out of memory in a part of a GPU; all else is done")
    return None if place.trial is not None else _finish(run, [outcomes[part] for part in asked], fingerprints)


def _finish(run: Run[VtabConfig], outcomes: list[TaskOutcome], fingerprints: Json) -> Json:
    """Write the result of a sweep and return it."""
    config, folder = run.config, run.folder
    facts = folder.facts
    arch = config.backbone.arch or facts.get("arch", "")
    if pixels := folder_of_pixels(run):
        shutil.rmtree(pixels, ignore_errors=True)
    result = build_result(config, outcomes, arch, fingerprints, timing(folder), run.differs)
    result["image_size"] = config.backbone.image_size or facts.get("image_size")
    if run.world.leads:
        with run.alone("result"):
            write_csv(folder.path / "result.csv", outcomes)
            if any(outcome.failed for outcome in outcomes):
                replace_json(folder.path / "partial.json", result)
                folder.update(status="some trials failed")
            else:
                folder.finish(result)
    return result


def _check(run: Run[VtabConfig]) -> tuple[dict[Task, TaskData], Json]:
    """Check data and networks, and return the data of every task and what tells copies of them apart."""
    config, folder, world, console = run.config, run.folder, run.world, run.console
    tasks = choose_tasks(config.data.tasks, config.demo)
    data = {task: open_task(config.data, task) for task in tasks}
    fingerprints = {task.name: entry.fingerprints for task, entry in data.items()}
    facts = distributed.from_leader(folder.facts)
    if facts.get("data", fingerprints) != fingerprints:
        raise DataError(f"{config.data.source}: the data have changed since this run began; start another with -o")
    for network in config.networks:
        _check_network(config, network, tasks[0], folder, facts, world, console)
    if world.leads and not (run.leases and facts.get("data")):  # which another process has checked
        folder.update(device=describe_device(world.device), ranks=world.size, status="running")
        check_images(data, config.data.skip_bad_images, console)
        check_crops(config, tasks, console)
        folder.update(data=fingerprints)
    return data, fingerprints


def _to_train(
    run: Run[VtabConfig], asked: list[Part], data: dict[Task, TaskData], outcomes: dict[Part, TaskOutcome]
) -> Generator[tuple[TaskSweep, VtabTrial, Unshared], None, None]:
    """Yield the trials of some parts that this process has leased, which the caller trains, and fill in the outcomes.

    Parts in which nobody is at work come first: a process decodes few tasks. Then it helps the others.
    """
    helping = False
    while left := [part for part in asked if part not in outcomes]:
        trained = False
        for network, task in left:
            part = run.take(f"{run.config.folders[network]}/{task.name}")
            if part is None and not helping:
                continue
            trials = TaskSweep(run, network, task, data[task])
            with closing(trials.to_train()) as to_train:
                for trial, lease in to_train:
                    trained = True
                    yield trials, trial, lease
            if trials.complete:
                outcomes[network, task] = trials.outcome
            if part is not None:
                part.release()
        if helping and not trained and len(outcomes) < len(asked):
            pause()
        helping = True


def _forget_failures(folder: RunFolder) -> None:
    """Let the trials that failed before be tried again."""
    for path in folder.path.glob("trials/*/*/*/failed.json"):
        path.unlink(missing_ok=True)


def _check_network(
    config: VtabConfig, network: str, task: Task, folder: RunFolder, facts: Json, world: World, console: Console
) -> None:
    """Load a network before any training, report how it loaded, and check that its weights fit on the disk."""
    model = load_network(config, network, task.classes)
    report, vit_config = model.report, model.config
    console.info(f"{format_network(network)}: {report.summary()}")
    before = facts.get(f"backbone_{network}", {}).get("digest", report.digest)
    if before != report.digest:
        raise DataError(f"{report.source}: the weights have changed since this run began; start another with -o")
    trials, free = len(config.lrs) * len(config.seeds), shutil.disk_usage(folder.path).free
    needed = 4 * trials * report.parameters
    if free < needed:
        raise SaveError(
            f"-o {folder.path}: {free / 1e9:.1f} GB free, and the {trials} trials of a task keep {needed / 1e9:.1f} GB "
            "of weights until its learning rate is chosen; free some space or pass another -o"
        )
    if world.leads and f"backbone_{network}" not in facts:
        folder.update(
            arch=vit_config.arch, image_size=list(vit_config.image_size), **{f"backbone_{network}": report.to_dict()}
        )


def timing(folder: RunFolder) -> Json:
    """Return the seconds that the finished trials trained, by their markers."""
    markers = [read_json(path) or {} for path in sorted(folder.path.glob("trials/*/*/*/done.json"))]
    total = {key: round(sum(marker[key] for marker in markers), 2) for key in ("train_seconds", "wait_seconds")}
    return {**total, "trainings": len(markers)}
