"""``dpn data check vtab``: all images of VTAB-1k, before anything is trained."""

from __future__ import annotations

from typing import Any

from dpn_cli.data.findings import DataFindings
from dpn_cli.data.image_errors import collect_errors
from dpn_cli.data.sources.base import fingerprint
from dpn_cli.errors import DataError
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import open_splits, written_here
from tasks.vtab.tasks import Task, choose_tasks

# How Pillow stores a JPEG when it is told nothing, as when arrays were written as .jpg files.
COPIED = "JPEG 75"


def examine(config: VtabConfig, findings: DataFindings, ranks: int) -> dict[str, Any]:
    """Look at all images of the config's tasks; returns the fingerprints that a result carries."""
    copied, fingerprints = [], {}
    for task in choose_tasks(config.data.tasks, config.demo):
        with collect_errors() as errors:
            try:
                splits = open_splits(config.data, task)
            except DataError as error:
                errors.append(error)
                splits = {}
        findings.faults(errors)
        parts = []
        for name, split in splits.items():
            parts.append(findings.split(f"{task.name} {name}", split, [str(label) for label in range(task.classes)]))
            _check_classes(task, getattr(split, "classes", ()), findings)
        if not parts:
            continue
        findings.same(*parts)
        fingerprints[task.name] = {name: fingerprint(split) for name, split in splits.items()}
        if set(parts[0].stored) == {COPIED} and not written_here(splits["train800"]):
            copied.append(task.name)
        if (count := len(splits["test"].labels)) != task.test:
            findings.warnings.append(
                f"{task.name}: {count} test images, VTAB has {task.test}: the score is not comparable with published "
                "ones"
            )
    if copied:
        findings.warnings.append(
            f"{', '.join(copied)}: all training images are JPEGs of quality 75, as in the usual download, which "
            "encoded them a second time; do not compare with scores on the original images"
        )
    return fingerprints


def _check_classes(task: Task, classes: tuple[str, ...], findings: DataFindings) -> None:
    if classes and len(classes) != task.classes:
        text = f"{task.name}: the data set names {len(classes)} classes, and VTAB has {task.classes}"
        findings.problem("classes", text)
