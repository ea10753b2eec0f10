"""`dpn eval`: accuracy of a classifier on a labelled split, with per-class results and the worst confusions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpn_cli.data.image_source import ImageSource
from dpn_cli.data.leakage import Overlap, count_overlap
from dpn_cli.data.sources.base import LabelledImages, fingerprint
from dpn_cli.errors import DataError
from dpn_cli.metrics import Scores, score
from dpn_cli.report.shift_scores import describe_shifts
from dpn_cli.run import distributed, signals
from dpn_cli.run.console import Console, OnProgress, printable
from dpn_cli.run.distributed import World, join
from dpn_cli.run.files import open_report, replace_json
from dpn_cli.run.precision import announce_precision, autocast
from dpn_cli.statistics import format_accuracy
from tasks.classify.classifier import Classifier, compute_logits, load_classifier
from tasks.classify.classifier_shifts import ClassifierShifts
from tasks.classify.eval_splits import open_part, run_source
from tasks.classify.options import EvalOptions
from tasks.classify.predictions_file import describe_pairs, save_scores


def evaluate(options: EvalOptions, console: Console) -> dict[str, Any] | None:
    """Score a classifier and return the result, written to `output_dir` too; None on ranks that do not lead.

    Raises `DataError` when data and classifier do not fit each other, `DpnError` when `output_dir` holds a run.
    """
    size, runtime = options.image_size, options.runtime
    with signals.listen(signals.NO_RESULT), join(runtime.device) as world:
        if options.output_dir and world.leads:
            open_report(options.output_dir)
        classifier = load_classifier(options.network, (size, size) if isinstance(size, int) else size, "dpn eval")
        reading = classifier.reading(options.reading)
        source = ImageSource(
            options.source or "", image_column=options.image_column, label_column=options.label_column, reading=reading
        )
        source = run_source(source, classifier.facts, options.network)
        split, names, part = open_part(source, options.split, classifier.facts)
        columns = match_classes(classifier.classes, names)
        console.info(
            ("" if source.location == options.source else f"{source.location}: ")
            + f"{len(split.labels)} images of {len(names)} classes"
            + (f", {part}" if part else "")
            + _columns_note(classifier, columns)
        )
        precision = announce_precision(options.runtime, world, console, classifier.model)
        overlap = count_overlap(split, classifier.facts.get("trained_on"), world)
        if warning := overlap and overlap.warning():
            console.warn(warning)
        real = read_real(options.real, split) if options.real else None
        predictions = bool(real) or options.output_dir is not None
        with console.counting("eval", world.share(len(split.labels))) as on_progress:
            scores = _score(
                classifier, split, columns, options, world, keep_predictions=predictions, on_progress=on_progress
            )
        result = _result(options, source.location, classifier, names, scores, split, part, overlap)
        result["precision"] = precision
        if real:
            labels = [real[prediction.row] for prediction in scores.predictions]
            result["real"] = real_accuracy([prediction.predicted for prediction in scores.predictions], labels)
        shifts = ClassifierShifts(split, options.shift, classifier)
        if options.shift.names:
            result["shifts"] = _score_shifts(options, shifts, classifier, names, world, console)
        if options.output_dir and world.leads:
            result |= save_scores(options.output_dir, scores, names, split)
            if options.shift.names:
                shifts.save(options.output_dir, result["shifts"], scores.predictions[0].row)
            replace_json(options.output_dir / "result.json", result)
        distributed.barrier()
        return result if world.leads else None


def match_classes(classes: Sequence[str], names: Sequence[str]) -> Tensor | None:
    """Return the outputs of a classifier for a data set's classes; None for all outputs in order.

    Class numbers as names (ImageNet-V2's folders, hub data sets without names) stand for the outputs of that number.
    Raises `DataError` naming classes that the classifier does not know.
    """
    if tuple(classes) == tuple(names):
        return None
    if all(name.isdecimal() and int(name) < len(classes) for name in names):
        return torch.tensor([int(name) for name in names])
    index_of = {name: index for index, name in enumerate(classes)}
    unknown = [name for name in names if name not in index_of]
    if unknown:
        ellipsis = " ..." if len(unknown) > 5 else ""
        raise DataError(
            f"--data: classes that the classifier does not know: {', '.join(unknown[:5])}{ellipsis}; it knows "
            f"{len(classes)}, {', '.join(classes[:5])} among them"
        )
    return torch.tensor([index_of[name] for name in names])


def _columns_note(classifier: Classifier, columns: Tensor | None) -> str:
    if columns is None or sorted(columns.tolist()) == list(range(len(classifier.classes))):
        return ""
    return f"; the other {len(classifier.classes) - len(columns)} classes of the classifier are left out of the choice"


def _score(
    classifier: Classifier,
    split: LabelledImages,
    columns: Tensor | None,
    options: EvalOptions,
    world: World,
    keep_predictions: bool,
    on_progress: OnProgress,
) -> Scores:
    classifier.model.to(world.device).eval()
    with autocast(options.runtime, world.device, classifier.model):
        return score(
            lambda images: compute_logits(classifier, images),
            split,
            classifier.transform,
            len(classifier.classes) if columns is None else len(columns),
            world,
            loss=classifier.loss,
            batch_size=options.batch_size,
            workers=options.runtime.workers,
            skip_bad=options.skip_bad_images,
            columns=None if columns is None else columns.to(world.device),
            keep_predictions=keep_predictions,
            on_progress=on_progress,
        )


def _score_shifts(
    options: EvalOptions,
    shifts: ClassifierShifts,
    classifier: Classifier,
    names: Sequence[str],
    world: World,
    console: Console,
) -> dict[str, Any]:
    """Return the scores of the classifier, and of the baseline, under shifts. Raises as `evaluate` does."""
    classifiers = {options.network: classifier}
    if options.shift.baseline:
        size = classifier.model.config.image_size if options.image_size else None
        classifiers[options.shift.baseline] = load_classifier(options.shift.baseline, size, "dpn eval")

    def top1(scored: Classifier, images: LabelledImages, on_progress: OnProgress) -> float:
        columns = match_classes(scored.classes, names)
        return _score(scored, images, columns, options, world, keep_predictions=False, on_progress=on_progress).top1

    for scored in classifiers.values():
        match_classes(scored.classes, names)  # before the first pass
    return shifts.score(classifiers, top1, world, console)


def _result(
    options: EvalOptions,
    location: str,
    classifier: Classifier,
    names: Sequence[str],
    scores: Scores,
    split: LabelledImages,
    part: str | None,
    overlap: Overlap | None,
) -> dict[str, Any]:
    return {
        "task": "eval",
        "network": options.network,
        "data": location,
        "split": options.split or "val",
        "part": part,
        "trained_on": overlap.to_dict() if overlap else None,
        "fingerprint": fingerprint(split),
        "image_size": list(classifier.model.config.image_size),
        "resize_side": classifier.resize_side,
        "image_preparation": classifier.preparation,
        "images": scores.images,
        "skipped": scores.skipped,
        "decoder": split.reading.versions(),
        "classes": len(names),
        "top1": scores.top1,
        "top5": scores.top5,
        "loss": scores.loss,
        "worst_pairs": describe_pairs(names, scores.confusion),
    }


def read_real(path: Path, split: LabelledImages) -> list[list[int]]:
    """Return the ReaL labels (arXiv 2006.07159) of a split's images, from real.json and the images' own numbers.

    Raises `DataError` when the file is not of that form, or an image has no number of ImageNet's validation set.
    """
    try:
        labels = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"--real {path}: cannot be read as JSON ({' '.join(str(error).split())[:120]})") from error
    if not isinstance(labels, list) or not all(isinstance(entry, list) for entry in labels):
        raise DataError(f"--real {path}: not the ReaL file, a JSON list with a list of labels per image")
    chosen = []
    for index in range(len(split.labels)):
        number = re.search(r"ILSVRC2012_val_(\d{8})", split.locate(index))
        if not number or not 1 <= int(number[1]) <= len(labels):
            raise DataError(f"--real: {split.locate(index)} is not named ILSVRC2012_val_NUMBER")
        chosen.append(labels[int(number[1]) - 1])
    return chosen


def real_accuracy(predictions: Sequence[int], real: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the share of predictions that are among an image's ReaL labels; images without labels do not count."""
    is_right = [guess in labels for guess, labels in zip(predictions, real, strict=True) if labels]
    return {"top1": 100 * sum(is_right) / len(is_right), "images": len(is_right)}


def describe_scores(result: dict[str, Any]) -> str:
    """Return the result as text."""
    skipped = f", {result['skipped']} unreadable ones left out" if result["skipped"] else ""
    lines = [
        f"top-1 {format_accuracy(result['top1'], result['images'])}, top-5 {result['top5']:.2f} %, "
        f"loss {result['loss']:.4g}, {result['classes']} classes{skipped}"
        + (f" ({result['part']})" if result["part"] else "")
    ]
    if result["trained_on"] and (warning := Overlap(**result["trained_on"]).warning()):
        lines.append(f"WARNING: {warning}")
    if "real" in result:
        lines.append(f"ReaL {result['real']['top1']:.2f} % of {result['real']['images']} images with labels")
    lines += describe_shifts(result)
    if result["worst_pairs"]:
        lines.append("most frequent confusions:")
    for pair in result["worst_pairs"]:
        true, predicted = printable(pair["true"]), printable(pair["predicted"])
        lines.append(f"  {true} taken for {predicted}: {pair['images']} ({pair['share']:.1f} %)")
    return "\n".join(lines)
