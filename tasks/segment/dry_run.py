"""The dry run of a segmentation network's training."""

from __future__ import annotations

from dpn_cli.config.cost import Cost
from dpn_cli.data.loader import count_workers
from dpn_cli.engine import fit as engine
from dpn_cli.engine.dry_run import DryRunSetup, Sampled, dry_run_fit, summarize_network
from dpn_cli.run.distributed import World
from dpn_cli.run.run import Run
from tasks.segment.artifact import Segmenter
from tasks.segment.config import SegmentConfig
from tasks.segment.evaluate import score_sizes
from tasks.segment.pairs import PairsSubset
from tasks.segment.train import SegmentData, job_of, load_network, new_segmenter

# Images of each rank that are scored: one of them gives many windows.
IMAGES = 4


def dry_run_training(run: Run[SegmentConfig], data: SegmentData) -> Cost:
    """Measure a training in a dry run, its duration in steps, and return its cost. Raises as `dry_run_fit` does."""
    config, world, console = run.config, run.world, run.console
    vit = new_segmenter(config, data, world, console).network.vit
    name, weights = summarize_network(vit)
    del vit

    def build_setup() -> DryRunSetup:
        network = load_network(config, len(data.classes))
        segmenter = Segmenter(network, data.classes, config.data, config.evaluation, {})
        job = job_of(config, data, segmenter, world, engine.Outputs(warn=console.warn), workers=0)
        model = engine.prepare(network, config.runtime, world)
        workers = count_workers(config.runtime.workers, world.device, world.local_ranks)
        return DryRunSetup(model, job, _sample_work(config, segmenter, data, world), workers)

    return dry_run_fit(build_setup, name, run.folder.path, weights=weights)


def _sample_work(config: SegmentConfig, segmenter: Segmenter, data: SegmentData, world: World) -> Sampled:
    """Return the evaluation of a few validation images of every rank."""
    samples = PairsSubset(data.val, range(min(IMAGES * world.size, len(data.val))))
    in_process = config.runtime.model_copy(update={"workers": 0})

    def load() -> None:
        for row in range(world.rank, len(samples), world.size):
            samples.load(row)

    return Sampled(
        len(samples),
        lambda: score_sizes(segmenter, samples, config.evaluation, in_process, world),
        load,
        during=len(data.val),
        end=len(data.val) * (1 + config.shift.count_passes()),
    )
