"""Writes the chosen tasks one source after the other, and says at the end which are left and why."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpn_cli import __version__
from dpn_cli.errors import DataError
from dpn_cli.run import signals
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.files import claim, make_folder
from tasks.vtab.prepare.builders import DEFAULT_DIR, library, missing_by_hand, open_builder
from tasks.vtab.prepare.sources import SOURCES, Source
from tasks.vtab.prepare.write import check_free, is_prepared, partial, prepare, verify
from tasks.vtab.tasks import TASKS, Task, choose_tasks

LIBRARIES = ("tensorflow-datasets", "tensorflow", "tensorflow-cpu")


def run(
    words: Sequence[str],
    out: Path,
    root: Path | None,
    manual: Path | None,
    *,
    download: bool,
    verified: bool,
    console: Console,
) -> tuple[dict[str, Any], DataError | None]:
    """Write the folders of the tasks that `words` name into `out`; those that are there already are kept.

    `root` is the folder of TensorFlow Datasets, None the usual one, and `manual` that of files fetched by hand.
    With `verified`, the files
    of folders that are there are compared with their digests, and damaged folders written again. Returns what was
    done, and an error when some tasks could not be written. Raises `DpnError` before any work for an unknown task, for
    a folder that holds something else and without TensorFlow Datasets, and as `prepare` does.
    """
    root = root or DEFAULT_DIR
    tasks = choose_tasks(words, demo=False)
    root = root.expanduser()
    manual = manual.expanduser() if manual else root / "downloads" / "manual"
    out = out.expanduser()
    check_free(out, tasks)
    damaged = _find_damaged(out, tasks, console) if verified else []
    if damaged or not all(is_prepared(out / task.folder) for task in tasks):
        library()
    make_folder(out)
    statuses, failed = dict[str, str](), dict[str, str]()
    with claim(out):
        for task in TASKS:
            shutil.rmtree(partial(out, task), ignore_errors=True)
        for folder in damaged:
            shutil.rmtree(folder)
        for source in _order_by_download(tasks, root, manual):
            source_tasks = [task for task in source.tasks if task in tasks]
            missing = [task for task in source_tasks if not is_prepared(out / task.folder)]
            statuses |= {task.name: "kept" for task in source_tasks if task not in missing}
            if not missing:
                continue
            try:
                builder = open_builder(source, root, manual, download)  # outside of `listen`: a download can be stopped
                with signals.listen(signals.PARTS_KEPT):
                    prepare(source, missing, builder, out, console, _versions())
                statuses |= {task.name: "written" for task in missing}
                console.info(f"{' and '.join(task.name for task in missing)}: written, from {builder.name}")
            except DataError as error:
                console.warn(str(error))
                failed |= {task.name: str(error) for task in missing}
    names = ", ".join(task.name for task in tasks if task.name in failed)
    problem = DataError(
        f"{count_noun(len(failed), 'task')} left: {names}; the reasons are above, the others are written"
    )
    states = {task.name: statuses.get(task.name, "left") for task in tasks}
    return {"task": "data prepare vtab", "out": str(out), "tasks": states, "left": failed}, problem if failed else None


def _order_by_download(tasks: Sequence[Task], root: Path, manual: Path) -> list[Source]:
    """Return the sources of tasks, those last of which something has to be fetched by hand."""
    sources = [source for source in SOURCES if not set(source.tasks).isdisjoint(tasks)]
    return sorted(sources, key=lambda source: bool(missing_by_hand(source, root, manual)))


def _find_damaged(out: Path, tasks: Sequence[Task], console: Console) -> list[Path]:
    """Return the prepared folders in which a file is missing or differs."""
    damaged = []
    with signals.listen(signals.PARTS_KEPT):
        for folder in (out / task.folder for task in tasks):
            if is_prepared(folder) and (problem := verify(folder)):
                console.warn(
                    f"{folder}: {count_noun(len(problem), 'file')} missing or changed, {problem[0]} first; the task is "
                    "written again"
                )
                damaged.append(folder)
    return damaged


def _versions() -> dict[str, str]:
    versions = {"dpn": __version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
