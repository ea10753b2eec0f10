"""The dry run of a segmentation network's training."""

from __future__ import annotations

from dpn_cli.data.loader import worker_count
from dpn_cli.engine import fit as engine
from dpn_cli.engine.rehearsal import Sampled, Scene, rehearse
from dpn_cli.recipe.cost import Cost
from dpn_cli.run.distributed import World
from dpn_cli.run.session import Session
from tasks.segment.evaluation import score_sizes
from tasks.segment.pairs import PairsPart
from tasks.segment.recipe import SegmentRecipe
from tasks.segment.segmenter import Segmenter
from tasks.segment.train import SegmentData, build_network, job_of, untrained

# Images of each rank that are scored: one of them gives many windows.
IMAGES = 4


def rehearse_training(begun: Session[SegmentRecipe], data: SegmentData) -> Cost:
    """Rehearse a training whose duration is in steps, and return what it takes. Raises as `rehearse` does."""
    recipe, world, console = begun.recipe, begun.world, begun.console
    vit = untrained(recipe, data, world, console).network.vit
    name, weights = f"{vit.config.arch} {vit.config.stem}", 4 * vit.report.parameters
    del vit

    def begin() -> Scene:
        network = build_network(recipe, len(data.classes))
        segmenter = Segmenter(network, data.classes, recipe.data, recipe.evaluation, {})
        job = job_of(recipe, data, segmenter, world, engine.Outputs(warn=console.warn), workers=0)
        model = engine.prepare(network, recipe.runtime, world)
        workers = worker_count(recipe.runtime.workers, world.device, world.here)
        return Scene(model, job, _sampled(recipe, segmenter, data, world), workers)

    return rehearse(begin, name, begun.folder.path, weights=weights)


def _sampled(recipe: SegmentRecipe, segmenter: Segmenter, data: SegmentData, world: World) -> Sampled:
    """Return the evaluation of a few validation images of every rank."""
    few = PairsPart(data.val, range(min(IMAGES * world.size, len(data.val))))
    here = recipe.runtime.model_copy(update={"workers": 0})

    def load() -> None:
        for row in range(world.rank, len(few), world.size):
            few.load(row)

    return Sampled(
        len(few),
        lambda: score_sizes(segmenter, few, recipe.evaluation, here, world),
        load,
        during=len(data.val),
        end=len(data.val),
    )
