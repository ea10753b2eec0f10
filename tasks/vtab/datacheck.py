"""``dpn data check vtab``: all images of VTAB-1k, before anything is trained."""

from __future__ import annotations

from functools import partial
from typing import Any

from dpn_cli.data.findings import DataFindings
from dpn_cli.data.sources.base import fingerprint
from tasks.vtab.config import VtabConfig
from tasks.vtab.data import is_prepared_by_dpn, open_splits
from tasks.vtab.tasks import Task, choose_tasks

# Pillow's default for JPEGs, as when arrays were written as .jpg files.
REENCODED = "JPEG 75"


def check_data(config: VtabConfig, findings: DataFindings, ranks: int) -> dict[str, Any]:
    """Inspect all images of the config's tasks; return the fingerprints that a result carries."""
    reencoded, fingerprints = [], {}
    for task in choose_tasks(config.data.tasks, config.demo):
        splits = findings.open(partial(open_splits, config.data, task))
        if splits is None:
            continue
        labels, inspections = [str(label) for label in range(task.classes)], []
        for name, split in splits.items():
            inspections.append(findings.inspect_labelled(f"{task.name} {name}", split, labels))
            _check_classes(task, getattr(split, "classes", ()), findings)
        findings.add_duplicates(*inspections)
        fingerprints[task.name] = {name: fingerprint(split) for name, split in splits.items()}
        if set(inspections[0].formats) == {REENCODED} and not is_prepared_by_dpn(splits["train800"]):
            reencoded.append(task.name)
        findings.compare_count(task.name, "test images", len(splits["test"].labels), "VTAB", task.test)
    if reencoded:
        findings.warnings.append(
            f"{', '.join(reencoded)}: all training images are JPEGs of quality 75, as in the usual download, which "
            "encoded them a second time; do not compare with scores on the original images"
        )
    return fingerprints


def _check_classes(task: Task, classes: tuple[str, ...], findings: DataFindings) -> None:
    if classes and len(classes) != task.classes:
        text = f"{task.name}: the data set names {len(classes)} classes, and VTAB has {task.classes}"
        findings.add_problems("classes", text)
