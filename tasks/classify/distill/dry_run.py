"""Dry run of a distillation: its two stages, or its only stage."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

from dpn_cli.config.cost import Cost
from dpn_cli.data.loader import count_workers
from dpn_cli.engine import fit as engine
from dpn_cli.engine.dry_run import DryRunSetup, Sampled, dry_run_fit, summarize_network
from dpn_cli.weights.backbone import Backbone
from tasks.classify.distill.scores import DistillScorer
from tasks.classify.distill.train import Distillation
from tasks.classify.dry_run import first_batch, load_batch, without_workers


def dry_run_stages(distillation: Distillation) -> list[Cost]:
    """Measure the stage of the stem, if any, and that of all weights in a dry run; return their costs.

    The teacher is computed in every step, also where its targets will be cached: it then takes less. Raises as
    `dry_run_fit` does.
    """
    config, cache = distillation.config, distillation.cache
    steps = {"stem": config.stem_steps, "all": config.schedule.steps - config.stem_steps}
    stages = {stage: f"{stage} weights" if config.stem_steps else "" for stage in steps if steps[stage]}
    start, _ = distillation.new_student()
    name, weights = summarize_network(start)
    # Retained until the end: the weights of earlier stages, and the targets.
    remaining = 2 * weights + (2 * cache.values * cache.entries if cache else 0)
    costs = []
    for stage, part in stages.items():
        build_setup = partial(_scene, distillation, start, stage, steps[stage])
        cost = dry_run_fit(build_setup, name, distillation.path, weights=weights if stage == "all" else 0)
        costs.append(replace(cost, part=part, passing=cost.passing + remaining))
    return costs


def _scene(distillation: Distillation, start: Backbone, stage: str, steps: int) -> DryRunSetup:
    student = copy.deepcopy(start)
    world, console = distillation.world, distillation.console
    config = distillation.of_stage(stage, student, steps)
    outputs = engine.Outputs(warn=console.warn)
    observed, job = distillation.job(config, student, outputs, 0, dry_run=True)
    workers = count_workers(config.runtime.workers, world.device, world.local_ranks)
    return DryRunSetup(
        engine.prepare(observed, config.runtime, world), job, _sample_work(distillation, student), workers
    )


def _sample_work(distillation: Distillation, student: Backbone) -> Sampled:
    """Return the comparison with the teacher on one batch per rank, which also stands for the scores of both."""
    config, images, world, teacher_classifier = (
        distillation.config, distillation.images, distillation.world, distillation.teacher_classifier
    )  # fmt: skip
    held_out = images.held_out
    samples = first_batch(held_out, config.eval_batch_size, world)
    scoring = DistillScorer(
        without_workers(config), teacher_classifier, replace(images, held_out=samples), world, distillation.console
    )
    labelled = len(images.val.labels) if images.val else 0
    return Sampled(
        len(samples.labels),
        lambda: scoring.agreement(student),
        lambda: load_batch(samples, teacher_classifier.transform, config, world),
        during=len(held_out.labels),
        end=len(held_out.labels) + labelled * (1 + config.shift.count_passes(networks=2)),
    )
