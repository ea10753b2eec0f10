"""Scores of a distillation: agreement of the student with its teacher, and the accuracy of both."""

from __future__ import annotations

from functools import partial
from typing import Any

from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.metrics import Scores, score
from dpn_cli.run import distributed
from dpn_cli.run.console import Console, OnProgress, ignore_progress
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast
from dpn_cli.weights.backbone import Backbone
from tasks.classify.classifier import Classifier, compute_logits
from tasks.classify.classifier_shifts import ClassifierShifts
from tasks.classify.distill.agreement import Agreement, compute_agreement
from tasks.classify.distill.config import DistillConfig
from tasks.classify.distill.data import DistillSplits
from tasks.classify.distill.student import as_classifier
from tasks.classify.fewshot import final_probe_options, probe_network

Json = dict[str, Any]


class DistillScorer:
    """Scores networks on the images of a distillation, with the config's precision, loader and crops."""

    def __init__(
        self, config: DistillConfig, teacher: Classifier, data: DistillSplits, world: World, console: Console
    ) -> None:
        self.config, self.data, self.world, self.console = config, data, world, console
        self.teacher_classifier = as_classifier(config, teacher, teacher.model)

    def agreement(self, student: Backbone) -> Agreement:
        """Compare a student with its teacher on the images that are held out."""
        runtime = self.config.runtime
        with autocast(runtime, self.world.device, self.teacher_classifier.model, student):
            return compute_agreement(
                self.teacher_classifier.model,
                student,
                self.data.held_out,
                self.teacher_classifier.transform,
                self.world,
                loss=self.teacher_classifier.loss,
                batch_size=self.config.eval_batch_size,
                workers=runtime.workers,
                skip_bad=self.config.data.skip_bad_images,
            )

    def top1(self, model: Backbone) -> float | None:
        """Return the accuracy on the labelled images in percent; None without them."""
        scores = self.scores(model)
        return None if scores is None else scores.top1

    def scores(self, model: Backbone, *, keep_predictions: bool = False) -> Scores | None:
        """Score a network on the labelled images; None without them. See `score`."""
        if self.data.val is None:
            return None
        return self._scores(self._classifier(model), self.data.val, keep_predictions=keep_predictions)

    def shifts(self, student: Backbone) -> tuple[Json, ClassifierShifts] | None:
        """Score student and teacher under the config's shifts; None without any. Also returns the shifted images."""
        if self.data.val is None or not self.config.shift.names:
            return None
        classifiers = {"student": self._classifier(student), "teacher": self.teacher_classifier}
        shifts = ClassifierShifts(self.data.val, self.config.shift, classifiers["student"])

        def top1(classifier: Classifier, images: LabelledImages, on_progress: OnProgress) -> float:
            return self._scores(classifier, images, on_progress=on_progress).top1

        return shifts.score(classifiers, top1, self.world, self.console), shifts

    def _classifier(self, model: Backbone) -> Classifier:
        return as_classifier(self.config, self.teacher_classifier, model)

    def _scores(
        self,
        classifier: Classifier,
        images: LabelledImages,
        *,
        keep_predictions: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> Scores:
        data, config = self.data, self.config
        with autocast(config.runtime, self.world.device, classifier.model):
            return score(
                partial(compute_logits, classifier),
                images,
                classifier.transform,
                len(data.classes),
                self.world,
                loss=classifier.loss,
                batch_size=config.eval_batch_size,
                workers=config.runtime.workers,
                skip_bad=config.data.skip_bad_images,
                columns=None if data.columns is None else data.columns.to(self.world.device),
                keep_predictions=keep_predictions,
                on_progress=on_progress,
            )

    def describe_teacher(self) -> Json:
        """Return the teacher's source, digest and shape."""
        report, vit_config = self.teacher_classifier.model.report, self.teacher_classifier.model.config
        return {
            "source": report.source,
            "digest": report.digest,
            "arch": vit_config.arch,
            "stem": vit_config.stem,
            "norm": vit_config.norm,
            "image_size": list(vit_config.image_size),
            "parameters": report.parameters,
        }

    def fewshot(self, student: Backbone) -> Json | None:
        """Probe teacher and student on a few labelled images per class; None without such images."""
        options = final_probe_options(self.config)
        if options is None:
            return None
        transform = self.teacher_classifier.transform if self.teacher_classifier.resize_side is None else None

        def probe() -> Json:
            return {
                name: probe_network(model, options, self.world.device, self.console, transform)
                for name, model in (("student", student), ("teacher", self.teacher_classifier.model))
            }

        return distributed.run_on_leader(self.world, probe)
