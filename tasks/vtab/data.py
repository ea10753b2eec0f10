"""VTAB-1k on disk, on the hub or built in: opened, checked before anything is trained, and turned into pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpn_cli.config.paths import TASK_FOLDERS
from dpn_cli.config.urls import is_hub
from dpn_cli.data.decode import ReadOptions
from dpn_cli.data.image_errors import report_error
from dpn_cli.data.sources.base import LabelledImages, fingerprint, sample_rows_to_check
from dpn_cli.data.sources.folder import FileList
from dpn_cli.data.sources.hub import HubSplit
from dpn_cli.data.sources.synthetic import SceneSplit
from dpn_cli.errors import DataError
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from tasks.vtab.config import VtabData
from tasks.vtab.prepare.write import is_prepared
from tasks.vtab.tasks import TRAIN, VAL, Task

# Test images per task that are decoded before training, to check that the files are images.
TEST_SAMPLE = 100


@dataclass(frozen=True)
class TaskData:
    """The three splits of a task; `fingerprints` distinguish copies of the data."""

    train800: LabelledImages
    val200: LabelledImages
    test: LabelledImages
    fingerprints: dict[str, str]


def open_task(data: VtabData, task: Task) -> TaskData:
    """Open a task's splits and check counts and labels.

    Raises `DataError` as `open_splits` does, and, naming the file and, in a list, the line, for a label outside the
    task's classes.
    """
    splits = open_splits(data, task)
    for split in splits.values():
        for index, label in enumerate(split.labels):
            if not 0 <= label < task.classes:
                raise DataError(
                    f"{split.locate(index)}: label {label}, but {task.name} has {task.classes} classes, "
                    f"0 to {task.classes - 1}"
                )
    return TaskData(**splits, fingerprints={name: fingerprint(split) for name, split in splits.items()})


def open_splits(data: VtabData, task: Task) -> dict[str, LabelledImages]:
    """Open train800, val200 and test of a task and check how many images they have.

    Raises `DataError`, naming the file and, in a list, the line, for a missing split or image, or a wrong number of
    training or validation images.
    """
    splits = {name: _open_split(data, task, name) for name in ("train800", "val200", "test")}
    for split in splits.values():
        split.reading = ReadOptions(data.decode, data.max_pixels)
    for name, expected in (("train800", TRAIN), ("val200", VAL)):
        count = len(splits[name].labels)
        if count != expected:
            text = f"{task.name}: {name} has {count} images, VTAB-1k has {expected}; get this task's folder again"
            report_error(DataError(text))
    for name, split in splits.items():
        if not split.labels:
            report_error(DataError(f"{task.name}: {name} has no images"))
    return splits


def _open_split(data: VtabData, task: Task, split: str) -> LabelledImages:
    source = data.source or "demo"
    if source == "demo":
        start, stop = {"train800": (0, TRAIN), "val200": (TRAIN, TRAIN + VAL), "test": (1000, 1000 + task.test)}[split]
        return SceneSplit(task.name, start, stop)
    if is_hub(source):
        return HubSplit(
            source.removeprefix("hf:"),
            task.folder,
            split,
            data.image_column,
            data.label_column,
            alone=len(data.tasks) == 1 and data.tasks[0] in {task.name, task.folder},
        )
    root = Path(source).expanduser()
    if not root.is_dir():
        raise DataError(f"--data {source}: {TASK_FOLDERS}")
    if not (root / task.folder).is_dir():
        raise DataError(f"{root / task.folder}: missing, needed for {task.name}; get it, or choose other --tasks")
    return FileList(root / task.folder, split)


def is_prepared_by_dpn(split: LabelledImages) -> bool:
    """Return whether ``dpn data prepare vtab`` wrote a split's folder: its JPEG files are the original ones."""
    return isinstance(split, FileList) and is_prepared(split.list.parent)


def check_images(tasks: dict[Task, TaskData], skip_bad: bool, console: Console) -> None:
    """Decode every training and validation image and a sample of each test split, before any training.

    Warns about JPEG copies and about test splits that do not have their official size.
    Raises `DataError` for the first unreadable image unless `skip_bad`.
    """
    jpeg = []
    for task, data in tasks.items():
        for split in (data.train800, data.val200, data.test):
            for index in sample_rows_to_check(split, TEST_SAMPLE if split is data.test else len(split.labels)):
                signals.check_here()
                try:
                    split.pixels(index)
                except DataError:
                    if not skip_bad:
                        raise
        paths = data.train800.paths if isinstance(data.train800, FileList) else []
        if any(path.suffix.lower() in {".jpg", ".jpeg"} for path in paths) and not is_prepared_by_dpn(data.train800):
            jpeg.append(task.name)
        if len(data.test.labels) != task.test:
            console.warn(
                f"{task.name}: {len(data.test.labels)} test images, VTAB has {task.test}: "
                "the score is not comparable with published ones"
            )
    if jpeg:
        console.warn(
            f"JPEG files in {', '.join(jpeg)}: the usual VTAB-1k download re-encoded all images at quality 75. "
            "A stem that normalises every patch amplifies those artefacts in flat regions; do not "
            "compare with scores on the original images"
        )
