"""The dry run of a classifier's training."""

from __future__ import annotations

from collections import deque

from dpn_cli.data.classified import ClassData, Part
from dpn_cli.data.loader import worker_count
from dpn_cli.engine import fit as engine
from dpn_cli.engine.rehearsal import Sampled, Scene, rehearse
from dpn_cli.model.freeze import freeze
from dpn_cli.recipe.cost import Cost
from dpn_cli.run.distributed import World
from dpn_cli.run.session import Session
from dpn_cli.scoring import rank_share
from dpn_cli.weights.backbone import Backbone
from tasks.classify.check import resize_side_of
from tasks.classify.classifier import Classifier
from tasks.classify.recipe import RecipeT, SupervisedRecipe
from tasks.classify.train import evaluate, evaluation_interval, load_network, loss_of, training_batches


def rehearse_training(begun: Session[RecipeT], data: ClassData) -> Cost:
    """Rehearse a training whose duration is in steps, and return what it takes; the probes of finished networks do not
    count. Raises as `rehearse` does.
    """
    recipe, world, console = begun.recipe, begun.world, begun.console
    model = load_network(recipe, len(data.classes))
    console.info(model.report.summary())
    name, weights = f"{model.config.arch} {model.config.stem}", 4 * model.report.parameters
    del model

    def begin() -> Scene:
        model = load_network(recipe, len(data.classes))
        if recipe.freeze:
            freeze(model, recipe.freeze)
        watched = bool(data.minival.labels)
        job = engine.Job.of(
            recipe,
            loss_fn=loss_of(recipe, model, len(data.classes)),
            batches=training_batches(recipe, model, data, world, workers=0, skip_bad=recipe.data.skip_bad_images),
            ema_decay=recipe.ema,
            evaluate_every=evaluation_interval(recipe) if watched else 0,
            keep_best=recipe.select == "best",
            world=world,
            outputs=engine.Outputs(warn=console.warn),
        )
        workers = worker_count(recipe.runtime.workers, world.device, world.here)
        return Scene(engine.prepare(model, recipe.runtime, world), job, _sampled(recipe, model, data, world), workers)

    return rehearse(begin, name, begun.folder.path, weights=weights)


def _sampled(recipe: SupervisedRecipe, model: Backbone, data: ClassData, world: World) -> Sampled:
    """Return the evaluation of a batch of every rank, of minival where there is one: nothing is told of its score."""
    split = data.minival if data.minival.labels else data.val
    images = min(recipe.eval_batch_size * world.size, len(split.labels))
    few = Part(split, range(images))
    here = recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"workers": 0})})
    side = resize_side_of(recipe, model.config.image_size)
    classifier = Classifier(model, data.classes, recipe.loss, side, {}, split.reading.decoder)
    size, skip_bad = recipe.eval_batch_size, recipe.data.skip_bad_images
    probed = recipe.fewshot * len(data.classes) + len(data.minival.labels) if recipe.fewshot else 0
    return Sampled(
        images,
        lambda: evaluate(classifier, few, here, world),
        lambda: deque(rank_share(few, classifier.transform, world, size, 0, skip_bad=skip_bad), maxlen=0),
        during=len(data.minival.labels) + probed,
        end=len(data.val.labels),
    )
