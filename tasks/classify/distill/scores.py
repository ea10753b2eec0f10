"""What a distillation is scored by: how near the student is to its teacher, and what both can do."""

from __future__ import annotations

from typing import Any

from dpn_cli.engine import fit as engine
from dpn_cli.run import distributed
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.scoring import Scores, score
from dpn_cli.weights.backbone import Backbone
from tasks.classify.classifier import Classifier, predict
from tasks.classify.distill.data import Pictures
from tasks.classify.distill.nearness import Nearness, nearness
from tasks.classify.distill.recipe import DistillRecipe
from tasks.classify.distill.student import prepared
from tasks.classify.fewshot import probing_of, transfer

Json = dict[str, Any]


class Scoring:
    """Scores networks on the pictures of a distillation, with the recipe's precision, loader and crops."""

    def __init__(
        self, recipe: DistillRecipe, teacher: Classifier, pictures: Pictures, world: World, console: Console
    ) -> None:
        self.recipe, self.pictures, self.world, self.console = recipe, pictures, world, console
        self.taught = prepared(recipe, teacher, teacher.model)

    def nearness(self, student: Backbone) -> Nearness:
        """Compare a student with its teacher on the pictures that are held out."""
        runtime = self.recipe.runtime
        with engine.precision_of(runtime, self.world.device):
            return nearness(
                self.taught.model,
                student,
                self.pictures.held_out,
                self.taught.transform,
                self.world,
                loss=self.taught.loss,
                batch_size=self.recipe.eval_batch_size,
                workers=runtime.workers,
                skip_bad=self.recipe.data.skip_bad_images,
            )

    def top1(self, model: Backbone) -> float | None:
        """Return the accuracy on the labelled images in percent; None without them."""
        scores = self.scores(model)
        return None if scores is None else scores.top1

    def scores(self, model: Backbone, *, keep_answers: bool = False) -> Scores | None:
        """Score a network on the labelled images; None without them. See `score`."""
        pictures, recipe = self.pictures, self.recipe
        if pictures.val is None:
            return None
        classifier = prepared(recipe, self.taught, model)
        with engine.precision_of(recipe.runtime, self.world.device):
            return score(
                lambda images: predict(classifier, images),
                pictures.val,
                classifier.transform,
                len(pictures.classes),
                self.world,
                loss=classifier.loss,
                batch_size=recipe.eval_batch_size,
                workers=recipe.runtime.workers,
                skip_bad=recipe.data.skip_bad_images,
                columns=None if pictures.columns is None else pictures.columns.to(self.world.device),
                keep_answers=keep_answers,
            )

    def described_teacher(self) -> Json:
        """Return what is known of the teacher: its place, digest and shape."""
        report, config = self.taught.model.report, self.taught.model.config
        return {
            "source": report.source,
            "digest": report.digest,
            "arch": config.arch,
            "stem": config.stem,
            "norm": config.norm,
            "image_size": list(config.image_size),
            "parameters": report.parameters,
        }

    def fewshot(self, student: Backbone) -> Json | None:
        """Probe teacher and student on a few labelled images per class; None without such images."""
        options = probing_of(self.recipe)
        if options is None:
            return None
        whole = self.taught.transform if self.taught.resize_side is None else None

        def probe() -> Json:
            return {
                name: transfer(model, options, self.world.device, self.console, whole)
                for name, model in (("student", student), ("teacher", self.taught.model))
            }

        return distributed.on_leader(self.world, probe)
