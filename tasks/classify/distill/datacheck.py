"""``dpn data check distill``: all images of a distillation, before anything is trained."""

from __future__ import annotations

from functools import partial
from typing import Any

from dpn_cli.data.findings import DataFindings
from dpn_cli.data.image_source import open_split
from dpn_cli.data.loader_sizing import check_batch
from dpn_cli.data.sources.base import fingerprint
from dpn_cli.data.validate import inspect_image
from tasks.classify.distill.config import DistillConfig, limit_batch
from tasks.classify.distill.data import has_labelled_val, open_images, source_of


def check_data(config: DistillConfig, findings: DataFindings, ranks: int) -> dict[str, Any]:
    """Inspect all images of a config, and the labelled ones; return the fingerprints that a result carries."""
    images = findings.open(lambda: open_images(config, None, findings.console))
    if images is None:
        return {}
    parts = images.parts()
    inspections = [
        findings.inspect_images(name, part.locate, partial(inspect_image, part), len(part.labels))
        for name, part in parts.items()
    ]
    inspections[1].side = inspections[0].side  # cut from the training images: copies in both are no leak
    source = source_of(config)
    if source.val_location or has_labelled_val(source):
        labelled = findings.open(lambda: open_split(source, "val"))
        if labelled is not None:
            val, classes = labelled
            inspections.append(findings.inspect_labelled("val", val, classes))
            parts["val"] = val
    findings.add_duplicates(*inspections)
    count, size = len(images.train.labels), config.backbone.image_size or 224
    pixels = size * size if isinstance(size, int) else size[0] * size[1]
    batch_size = limit_batch(config, count).batch_size
    check_batch(findings, count, batch_size, ranks, config.runtime.workers, 3 * pixels)
    return {name: fingerprint(part) for name, part in parts.items()}
