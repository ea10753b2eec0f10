"""Accuracy of classifiers under shifts of the data, for evaluations and for finished trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpn_cli.config.shift_options import ShiftSection
from dpn_cli.data.shifted_images import ShiftedImages, shift_side
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.report.shift_scores import save_shifts, score_shifts
from dpn_cli.run.console import Console, OnProgress
from dpn_cli.run.distributed import World
from tasks.classify.classifier import Classifier

# Scores a classifier on a split; returns its top-1 in percent.
ScoreTop1 = Callable[[Classifier, LabelledImages, OnProgress], float]


class ClassifierShifts:
    """The shifted images of a split, reduced to what the first of some classifiers takes."""

    def __init__(self, split: LabelledImages, shift: ShiftSection, classifier: Classifier) -> None:
        self.split, self.shift = split, shift
        self.side = shift_side(classifier.model.config.image_size, classifier.resize_side)

    def score(
        self, classifiers: Mapping[str, Classifier], top1: ScoreTop1, world: World, console: Console
    ) -> dict[str, Any]:
        """Return the scores of classifiers, by their names, as `score_shifts` does."""
        passes = self.shift.count_passes(len(classifiers)) * world.share(len(self.split.labels))
        with console.counting("shifts", passes) as on_progress:

            def score(network: str, name: str, severity: int) -> float:
                return top1(classifiers[network], self._shifted(name, severity), on_progress)

            return score_shifts(list(classifiers), self.shift, score, "top1", self.side)

    def save(self, folder: Path, shifts: dict[str, Any], row: int) -> None:
        """Write scores, and the image of a row of the split under every shift. Raises `SaveError`."""
        save_shifts(folder, shifts, lambda name, severity: self._shifted(name, severity).pixels(row))

    def _shifted(self, name: str, severity: int) -> ShiftedImages:
        return ShiftedImages(self.split, name, severity, self.side, self.shift.seed)
