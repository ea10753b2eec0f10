"""`dpn distill`, from a settled recipe to a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpn_cli.data.ahead import check_cache
from dpn_cli.data.loader import worker_count
from dpn_cli.data.order import order_of
from dpn_cli.errors import DataError, DpnError
from dpn_cli.recipe.start import Place
from dpn_cli.recipe.training import counted_in_steps
from dpn_cli.run import console as terminal
from dpn_cli.run.console import Console, several
from dpn_cli.run.distributed import from_leader
from dpn_cli.run.folder import describe_device
from dpn_cli.run.kinds import WEIGHTS, Kind
from dpn_cli.run.session import Session, run_name, session
from dpn_cli.weights.backbone import LoadReport
from tasks.classify.check import check_divides
from tasks.classify.classifier import Classifier
from tasks.classify.distill.cache import check_views
from tasks.classify.distill.data import Pictures, open_pictures
from tasks.classify.distill.recipe import DistillRecipe
from tasks.classify.distill.rehearsal import rehearse_stages
from tasks.classify.distill.student import as_taught, load_teacher, resized
from tasks.classify.distill.train import Distillation
from tasks.classify.fewshot import check_transfer, describe_accuracies, probing_of

Json = dict[str, Any]
DEMO_NOTE = "This is the demo: generated scenes. For a network of your own: dpn distill --teacher WEIGHTS --data FOLDER"


def run(recipe: DistillRecipe, place: Place, console: Console) -> Json | None:
    """Distil and return the result; None on ranks that do not lead and after a dry run."""
    if recipe.demo:
        console.info(DEMO_NOTE)
    teacher = load_teacher(recipe)
    recipe = as_taught(recipe, teacher)
    kind: Kind = "classifier" if teacher.classes else "network"
    with session(recipe, recipe.runtime, kind, place, default_folder(recipe), console) as begun:
        result = None if place.dry_run else begun.folder.result
        if result is None:
            pictures = open_pictures(begun.recipe, teacher.classes or None, console)
            counted = counted_in_steps(begun.recipe, len(pictures.train.labels) / recipe.batch_size, console.info)
            _check(replace(begun, recipe=counted), teacher, pictures, dry_run=place.dry_run)
            distillation = Distillation(replace(begun, recipe=counted), teacher, pictures)
            if place.dry_run:
                _dry_run(distillation, place)
                return None
            result = distillation.train()
        console.info(f"weights: {begun.folder.path / WEIGHTS}, for --checkpoint of any command")
        return result if begun.world.leads else None


def load(recipe: DistillRecipe) -> LoadReport:
    """Load the network that the training depends on, the teacher, and report on it."""
    return load_teacher(recipe).model.report


def default_folder(recipe: DistillRecipe) -> Path:
    """Return runs/distill/TEACHER/ARCH-STEM of the student, without an arch STEM alone."""
    named = Path((recipe.teacher or "").rstrip("/"))
    name = named.parent.name if named.name == WEIGHTS else named.name.removesuffix(".safetensors").removesuffix(".npz")
    return Path("runs") / "distill" / name.replace(":", "-") / run_name(recipe.backbone)


def show(result: Json) -> None:
    """Print a result on stdout."""
    terminal.show(describe(result))


def describe(result: Json) -> str:
    """Return the result as text."""
    teacher, images = result["teacher"], result["images"]
    lines = [
        f"{result['arch']} stem {result['stem']} from {teacher['source']} ({teacher['arch']}, stem {teacher['stem']}), "
        f"start {result['start']}, {several(result['steps'], 'step')} on {images['train']} pictures",
    ]
    names = {"start": "before the first step", "stem": "after the stem's stage", "all": "after the last step"}
    for stage, note in result["stages"].items():
        parts = [f"agreement {note['agreement']:.2f} %", f"KL {note['kl']:.4g} nats"] if result["classes"] else []
        parts += [] if note["token_variance"] is None else [f"token variance {note['token_variance']:.4f}"]
        parts += [] if note["top1"] is None else [f"top-1 {note['top1']:.2f} %"]
        lines.append(f"{names[stage]}: {', '.join(parts)}")
    lines.append(f"compared with the teacher on {images['held_out']} held-out pictures")
    if result["top1"] is not None:
        lines.append(
            f"validation: top-1 {result['top1']:.2f} %, the teacher's {result['teacher_top1']:.2f} % ({images['val']} "
            "images)"
        )
    for name, probe in (result["fewshot"] or {}).items():
        lines += [f"{name}, {probe['data']}: {line.strip()}" for line in describe_accuracies(probe)]
    return "\n".join(lines)


def _check(begun: Session[DistillRecipe], teacher: Classifier, pictures: Pictures, *, dry_run: bool) -> None:
    """Check batch and pictures, and that a resumed run meets the pictures and the teacher that it began with."""
    recipe, folder, world = begun.recipe, begun.folder, begun.world
    check_divides(recipe.batch_size, recipe.runtime.micro_batch_size, world)
    check_stages(recipe)
    if note := resized(teacher):
        begun.console.warn(note)
    if options := probing_of(recipe):
        check_transfer(options)
    check_views(recipe, len(pictures.train.labels))
    order = order_of(pictures.train, recipe.data, recipe.batch_size, recipe.seed, recipe.schedule.steps)
    workers = worker_count(recipe.runtime.workers, world.device, world.here)
    check_cache(pictures.train, order, recipe.schedule.steps * recipe.batch_size, workers, world)
    parts = {name: len(part.labels) for name, part in pictures.parts().items()}
    begun.console.info(
        f"{parts['train']} pictures to train on, {parts['held_out']} held out"
        + (f", {parts['val']} labelled ones to score" if "val" in parts else "")
        + f"; {several(recipe.schedule.steps, 'step')} of {recipe.batch_size}, "
        f"{recipe.schedule.steps * recipe.batch_size / parts['train']:.2f} epochs"
    )
    if dry_run:
        pictures.check(recipe.data.skip_bad_images)
        return
    now = {"data": pictures.fingerprints(), "teacher": teacher.model.report.digest}
    before = from_leader(folder.facts)
    if before.get("data", now["data"]) != now["data"]:
        raise DataError(
            f"--data {recipe.data.source}: the pictures have changed since this run began; start another with -o"
        )
    if before.get("teacher", now["teacher"]) != now["teacher"]:
        raise DataError(
            f"--teacher {recipe.teacher}: the weights have changed since this run began; start another with -o"
        )
    if world.leads:
        folder.update(device=describe_device(world.device), ranks=world.size, status="running", **now)
        pictures.check(recipe.data.skip_bad_images)


def check_stages(recipe: DistillRecipe) -> None:
    """Raise `DpnError` where a share of the steps leaves one of the two stages without any."""
    steps, share = recipe.schedule.steps, recipe.stem_share
    if share and not 0 < recipe.stem_steps < steps:
        raise DpnError(
            f"--stem-share {share:g}: {recipe.stem_steps} of {steps} steps would train the stem alone; give each "
            "stage one step at least, or leave it at 0"
        )


def _dry_run(distillation: Distillation, place: Place) -> None:
    """Rehearse the stages, and tell what they take."""
    if cache := distillation.cache:
        cache.check_space()
    costs = rehearse_stages(distillation)
    if distillation.world.leads:
        for cost in costs:
            place.costed(cost)
