"""Training of one student: its start, the stage of its stem, the stage of all weights, and the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpn_cli.config.load import scale_schedule
from dpn_cli.data.leakage import record
from dpn_cli.data.loader import count_workers, crop_batches
from dpn_cli.data.shard_sampler import make_shard_order
from dpn_cli.engine import fit as engine
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.model.freeze import POSITIONS, STEM, train_only
from dpn_cli.run import distributed
from dpn_cli.run.artifact_kinds import DIGEST, KEY, WEIGHTS
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.files import read_object, replace_json, replace_text
from dpn_cli.run.precision import autocast
from dpn_cli.run.run import Run
from dpn_cli.run.run_dir import LOST_RECORDS, MetricsLog
from dpn_cli.weights.backbone import Backbone, export_backbone
from dpn_cli.weights.resolve_stem import describe_start
from tasks.classify.classifier import Classifier, save_classifier
from tasks.classify.distill.cache import TargetCache, cached_targets
from tasks.classify.distill.config import DistillConfig
from tasks.classify.distill.data import DistillSplits, augmentation_of
from tasks.classify.distill.losses import Distance, NetworkOutputs, ObservedNetwork, inputs_of
from tasks.classify.distill.scores import DistillScorer
from tasks.classify.distill.student import (
    as_classifier,
    check_pair,
    gate_stem_norms,
    new_student,
    reload_student,
    remove_gates,
)
from tasks.classify.export import model_card
from tasks.classify.predictions_file import save_scores
from tasks.classify.preflight import interval

Json = dict[str, Any]
# Least deviation of a channel of the teacher's tokens, as a fraction of the root of the channels' mean variance.
LEAST_DEVIATION = 0.01


class Distillation:
    """Training of one student by its teacher; a finished stage is not trained again.

    The stages are ``start`` (no step), ``stem`` and ``all``. Each saves its weights, and a note of the
    student's agreement with its teacher.
    """

    def __init__(self, run: Run[DistillConfig], teacher: Classifier, images: DistillSplits) -> None:
        self.run, self.config, self.world, self.console = run, run.config, run.world, run.console
        self.path, self.images = run.folder.path, images
        self.scoring = DistillScorer(self.config, teacher, images, self.world, self.console)
        self.teacher_classifier = self.scoring.teacher_classifier
        self.teacher = teacher.model.to(self.world.device)
        self.skipped: list[int] = []

    def train(self) -> Json:
        """Train the unfinished stages, score the student, write the result to the folder, and return it."""
        first, previous_stage = 0, "start"
        stem = self.config.stem_steps
        stages = {"stem": stem, "all": self.config.schedule.steps - stem}
        if distributed.from_leader((self.path / WEIGHTS).is_file()):
            stages = {}
        else:
            self._initialize_student()
        track = self.run.tracker(self.config.runtime.report_to if stages else "none")
        for stage, steps in stages.items():
            if steps and self._stage_note(stage) is None:
                config, student, path = self._prepare_stage(stage, previous_stage, steps)
                self.run.record_precision(config.runtime, student, self.teacher)
                with self.run.outputs("distill" if stage == "all" else stage, track, path) as outputs:
                    observed, job = self.job(config, student, outputs, first)
                    fit_result = engine.fit(engine.prepare(observed, config.runtime, self.world), job)
                self._finish(stage, student, fit_result, outputs)
            first, previous_stage = first + steps, stage if steps else previous_stage
        result = self._result()
        if self.cache:
            self.cache.delete()
        if self.world.leads:
            for stage in ("start", "stem"):
                self._file(stage, ".safetensors").unlink(missing_ok=True)
            Checkpoints(self.path / "checkpoints").clear()
            self.run.folder.finish(result)
        return result

    def _initialize_student(self) -> None:
        """Make and save the student before its first step, unless it is saved already."""
        if self._stage_note("start") is None:
            student, fit = self.new_student()
            if self.config.backbone.start == "anneal":
                gate_stem_norms(student)
            check_pair(self.config, self.teacher, student)
            self._save_stage("start", student, {"fitted": fit} if fit else {})

    def new_student(self) -> tuple[Backbone, Json]:
        """Make the student on the CPU, where its stem is fitted in float64."""
        student, fit = new_student(self.config, self.teacher.cpu(), self._sample)
        self.teacher.to(self.world.device)
        self.console.info(student.report.summary())
        return student, fit

    def _prepare_stage(self, stage: str, previous_stage: str, steps: int) -> tuple[DistillConfig, Backbone, Path]:
        """Return the config of a stage, the student after `previous_stage`, and the folder of its log."""
        student = reload_student(self.config, str(self._file(previous_stage, ".safetensors")), self.teacher.num_classes)
        path = self.path if stage == "all" else self.path / stage
        if (saved := Checkpoints(path / "checkpoints")).started:
            self.console.info(describe_start(student.report, saved))
        return self.of_stage(stage, student, steps), student, path

    def of_stage(self, stage: str, student: Backbone, steps: int) -> DistillConfig:
        """Return the config of a stage of `steps` steps; freeze the student's weights that it does not train."""
        config = self.config.model_copy(update={"schedule": scale_schedule(self.config.schedule, steps)})
        if stage == "stem":
            config = config.model_copy(update={"lr": config.stem_lr or config.lr, "ema": None})
            train_only(student, (*STEM, *POSITIONS))
            if config.backbone.start == "anneal":
                gate_stem_norms(student)
        return config

    def _finish(self, stage: str, student: Backbone, result: engine.FitResult, outputs: engine.Outputs) -> None:
        """Save the weights of a finished stage, and delete its checkpoints."""
        remove_gates(student)
        timing = {"train_seconds": round(result.seconds, 2), "wait_seconds": round(result.wait_seconds, 2)}
        self._save_stage(stage, student, {"steps": result.steps, "loss": result.loss, "timing": timing})
        if self.world.leads and outputs.checkpoints:
            outputs.checkpoints.clear()

    def job(
        self, config: DistillConfig, student: Backbone, outputs: engine.Outputs, first: int, *, dry_run: bool = False
    ) -> tuple[ObservedNetwork, engine.TrainJob]:
        """Return the observed student and the engine's job; `dry_run` caches no targets."""
        world, runtime = self.world, config.runtime
        pairs = check_pair(config, self.teacher, student)
        observed = ObservedNetwork(
            student.to(world.device), config.losses, [student_layer for student_layer, _ in pairs]
        )
        observed.freeze_unused()
        steps = first + config.schedule.steps
        order = make_shard_order(self.images.train, config.data, config.batch_size, config.seed, steps)
        batches = crop_batches(
            self.images.train,
            augmentation_of(config, student.config.image_size),
            config.batch_size,
            config.seed,
            world,
            workers=0 if dry_run else count_workers(runtime.workers, world.device, world.local_ranks),
            skip_bad=config.data.skip_bad_images,
            on_skip=self.skipped.append,
            order=order,
        )
        targets: Callable[[engine.Batch], NetworkOutputs] = self._targets
        if self.cache and not dry_run:
            self.cache.fill()
            batches, targets = self.cache.with_targets(batches, order), cached_targets
        deviations = self._deviations() if config.losses.tokens else {}
        return observed, engine.TrainJob.from_config(
            config,
            loss_fn=Distance(targets, student, config.losses, deviations, self.teacher_classifier.loss),
            batches=lambda start: batches(first + start),
            micro_batch=MicroBatch.choose(runtime, world.most(config.batch_size), student, world.device),
            ema_decay=config.ema,
            evaluate=lambda: self.scoring.agreement(student).metrics(),
            evaluate_every=interval(config.evaluate_every, config.schedule.steps),
            keep_best=False,
            world=world,
            outputs=outputs,
        )

    @cached_property
    def _observed_teacher(self) -> ObservedNetwork:
        return ObservedNetwork(
            self.teacher, self.config.losses, [teacher_layer for _, teacher_layer in self.config.losses.layers]
        )

    @cached_property
    def _compiled(self) -> Callable[[Tensor], NetworkOutputs]:
        return torch.compile(self._observed_teacher) if self.config.runtime.compile else self._observed_teacher

    @torch.no_grad()
    def _targets(self, batch: engine.Batch) -> NetworkOutputs:
        """Return the teacher's outputs for a batch."""
        with autocast(self.config.runtime, self.world.device, self.teacher):
            return self._compiled(inputs_of(self.teacher, batch))

    @cached_property
    def cache(self) -> TargetCache | None:
        """Return the cache of the teacher's targets; None when the teacher runs in every step."""
        if not self.config.cache_teacher:
            return None
        arguments = self._targets, self.images.train, self.world, self.console
        return TargetCache(self.path, self.config, self.teacher, *arguments)

    @cached_property
    def _pixels(self) -> Tensor:
        return self.images.sample(self.teacher_classifier.transform, self.config.data.skip_bad_images)

    def _sample(self) -> Iterator[Tensor]:
        """Yield chunks of images to fit stems on, prepared as for evaluation."""
        return iter(torch.split(self._pixels, 32))

    def _deviations(self) -> dict[str, Tensor]:
        """Return the standard deviation per channel (d,) of the teacher's tokens, for each compared output."""
        sums: dict[str, Tensor] = {}
        count = 0
        with torch.no_grad(), autocast(self.config.runtime, self.world.device, self.teacher):
            for pixels in self._sample():
                outputs = self._observed_teacher(self.teacher.normalize(pixels.to(self.world.device)))
                tokens = {name: value.flatten(0, 1).double() for name, value in outputs.items() if "tokens" in name}
                count += len(tokens["tokens"])
                for name, value in tokens.items():
                    sums[name] = sums.get(name, 0) + torch.stack([value.sum(0), value.square().sum(0)])
        variances = {name: total[1] / count - (total[0] / count).square() for name, total in sums.items()}
        return {
            name: variance.clamp(min=LEAST_DEVIATION**2 * float(variance.mean())).sqrt().float()
            for name, variance in variances.items()
        }

    def _file(self, stage: str, suffix: str) -> Path:
        return self.path / "stages" / f"{stage}{suffix}"

    def _stage_note(self, stage: str) -> Json | None:
        """Return the note of a finished stage; None before."""
        return distributed.from_leader(read_object(self._file(stage, ".json")))

    def _save_stage(self, stage: str, student: Backbone, facts: Json) -> None:
        """Write the weights of a stage, and the note that it is finished."""
        student.to(self.world.device).eval()
        agreement = self.scoring.agreement(student).to_dict()
        stage_result = {**facts, **agreement, "top1": self.scoring.top1(student)}
        if self.world.leads:
            if stage == "all":
                self._export(student, agreement)
            else:
                remove_gates(student)
                export_backbone(student, self._file(stage, ".safetensors"))
            replace_json(self._file(stage, ".json"), stage_result)
        distributed.barrier()
        units = {"agreement": " %", "token_variance": "", "kl": " nats"}
        texts = [
            f"{name} {stage_result[name]:.4g}{unit}" for name, unit in units.items() if stage_result[name] is not None
        ]
        self.console.info(f"stage {stage}: {', '.join(texts)} on {stage_result['images']} held-out images")

    def _export(self, student: Backbone, agreement: Json) -> None:
        """Write the student's file: a classifier where the teacher has a head."""
        description = {"teacher": self.scoring.describe_teacher(), "start": self.config.backbone.start}
        distilled = {**description, "data": self.images.fingerprints(), **agreement}
        if not student.num_classes:
            export_backbone(student, self.path / WEIGHTS, {KEY: "network", "distilled": json.dumps(distilled)})
            return
        classifier = as_classifier(self.config, self.teacher_classifier, student)
        classifier.facts = {
            "arch": student.config.arch,
            "parameters": student.report.parameters,
            "config": self.config.model_dump(mode="json"),
            "data": self.images.fingerprints(),
            "trained_on": record(self.images.train),
            "distilled": distilled,
        }
        digest = save_classifier(classifier, self.path / WEIGHTS)
        replace_text(self.path / "README.md", model_card(classifier, "safetensors", digest))

    def _result(self) -> Json:
        student = reload_student(self.config, str(self.path / WEIGHTS), self.teacher.num_classes)
        student.to(self.world.device).eval()
        stages = {
            stage: stage_result
            for stage in ("start", "stem", "all")
            if (stage_result := self._stage_note(stage)) is not None
        }
        timings = [stage_result.pop("timing") for stage_result in stages.values() if "timing" in stage_result]
        if self.skipped:
            self.console.warn(f"{sum(self.skipped)} times an unreadable image was replaced by the next one")
        log, vit_config = MetricsLog(self.path / "metrics.jsonl"), student.config
        scores = self.scoring.scores(student, keep_predictions=True)
        result = {
            "task": "distill",
            "arch": vit_config.arch,
            "stem": vit_config.stem,
            "norm": vit_config.norm,
            "start": self.config.backbone.start,
            "image_size": list(vit_config.image_size),
            "parameters": student.report.parameters,
            "teacher": self.scoring.describe_teacher(),
            "classes": self.teacher.num_classes,
            **stages["all"],
            "images": {name: len(part.labels) for name, part in self.images.parts().items()},
            "top1": None if scores is None else scores.top1,
            "teacher_top1": self.scoring.top1(self.teacher),
            "fewshot": self.scoring.fewshot(student),
            "stages": stages,
            "timing": {
                name: round(sum(timing[name] for timing in timings), 2) for name in ("train_seconds", "wait_seconds")
            },
            "precision": self.run.folder.precision,
            "curve": [record for record in log.records() if "lr" not in record and LOST_RECORDS not in record],
            "lost_records": log.count_lost(),
            "steps": self.config.schedule.steps,
            "data": self.images.fingerprints(),
            DIGEST: student.report.digest,
            "decoder": self.images.train.reading.versions(),
            "differs_from_paper": self.run.differs,
        }
        shifts = self.scoring.shifts(student)
        if shifts:
            result["shifts"], shifted_images = shifts
        if scores is not None and self.images.val is not None and self.world.leads:
            result |= save_scores(self.path, scores, self.images.classes, self.images.val)
            if shifts:
                shifted_images.save(self.path, result["shifts"], scores.predictions[0].row)
        return result
