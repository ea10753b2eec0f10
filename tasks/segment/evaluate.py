"""`dpn segment eval`: a finished segmenter scored on validation images, in the run's way or another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpn_cli.config.schema import Runtime
from dpn_cli.config.shift_options import ShiftSection
from dpn_cli.errors import DataError
from dpn_cli.report.shift_scores import describe_shifts, save_shifts, score_shifts
from dpn_cli.run import distributed, signals
from dpn_cli.run.console import Console, OnProgress, ignore_progress
from dpn_cli.run.distributed import World, join
from dpn_cli.run.files import open_report, replace_json
from dpn_cli.run.precision import announce_precision, autocast
from tasks.segment.artifact import Segmenter, load_segmenter
from tasks.segment.config import Evaluation, MaskData
from tasks.segment.iou import SegmentScores, score
from tasks.segment.options import MULTI_SCALE, SegmentEvalOptions
from tasks.segment.page_samples import save_samples
from tasks.segment.pairs import Pairs, fingerprint, open_pairs
from tasks.segment.palette import class_list_path, classes_of
from tasks.segment.preflight import check_masks
from tasks.segment.shifted_pairs import ShiftedPairs


def evaluation_of(options: SegmentEvalOptions, run_evaluation: Evaluation) -> Evaluation:
    """Return the run's way of evaluating with the options in place of it."""
    explicit_options = options.model_dump(include={"mode", "size", "stride", "batch_size"}, exclude_none=True)
    if options.multi_scale:
        explicit_options |= {"scales": MULTI_SCALE, "flip": True}
    return Evaluation.model_validate({**run_evaluation.model_dump(), **explicit_options})


def evaluate(options: SegmentEvalOptions, console: Console) -> dict[str, Any] | None:
    """Score a segmenter and return the result, written to `output_dir` too; None on ranks that do not lead.

    Raises `DataError` when data and segmenter do not fit each other, `DpnError` when `output_dir` holds a run.
    """
    runtime = options.runtime
    with signals.listen(signals.NO_RESULT), join(runtime.device) as world:
        if options.output_dir and world.leads:
            open_report(options.output_dir)
        segmenter = load_segmenter(options.run, "dpn segment eval")
        explicit_options = options.reading.model_dump(exclude_unset=True)
        data = segmenter.data.model_copy(
            update={**explicit_options, **({"source": options.source} if options.source else {})}
        )
        if segmenter.data.source == "demo" and data.source != "demo":
            data = data.model_copy(update={"dataset": "folder"})  # the demo's config is ADE20K's, its classes are not
        _check_classes(data, segmenter)
        pairs = open_pairs(data, "val")
        if world.leads:
            check_masks(pairs, segmenter.rule)
        evaluation = evaluation_of(options, segmenter.evaluation)
        console.info(f"{len(pairs)} images of {len(segmenter.classes)} classes")
        segmenter.network.to(world.device)
        precision = announce_precision(runtime, world, console, segmenter.network)
        scale_count = 2 if evaluation.second_size else 1
        with console.counting("segment eval", scale_count * world.share(len(pairs))) as on_progress:
            scores, score_facts = score_sizes(
                segmenter, pairs, evaluation, runtime, world, on_progress, boundaries=options.boundaries
            )
        result = {
            "task": "segment eval",
            "network": options.run,
            "data": data.source,
            "fingerprint": fingerprint(pairs),
            "decoder": pairs.reading.versions(),
            "precision": precision,
            "arch": segmenter.arch,
            "classes": len(segmenter.classes),
            **score_facts,
        }
        if options.shift.names:
            result["shifts"] = _score_shifts(options, segmenter, pairs, world, console)
        if options.output_dir and world.leads:
            if options.shift.names:
                save_under_shifts(options.output_dir, result["shifts"], pairs)
            replace_json(options.output_dir / "result.json", result)
            save_samples(options.output_dir, segmenter, pairs, scores, evaluation, runtime, world)
        distributed.barrier()
        return result if world.leads else None


def _score_shifts(
    options: SegmentEvalOptions, segmenter: Segmenter, pairs: Pairs, world: World, console: Console
) -> dict[str, Any]:
    """Return the mIoU of the segmenter, and of the baseline, under shifts. Raises as `evaluate` does."""
    segmenters = {options.run: segmenter}
    if options.shift.baseline:
        baseline = load_segmenter(options.shift.baseline, "dpn segment eval")
        if baseline.classes != segmenter.classes:
            raise DataError(f"--baseline {options.shift.baseline}: its classes are not those of {options.run}")
        baseline.network.to(world.device)
        segmenters[options.shift.baseline] = baseline
    evaluations = {name: evaluation_of(options, own.evaluation) for name, own in segmenters.items()}
    return score_under_shifts(segmenters, evaluations, pairs, options.shift, options.runtime, world, console)


def score_under_shifts(
    segmenters: Mapping[str, Segmenter],
    evaluations: Mapping[str, Evaluation],
    pairs: Pairs,
    shift: ShiftSection,
    runtime: Runtime,
    world: World,
    console: Console,
) -> dict[str, Any]:
    """Return the mIoU of segmenters under shifts, by their names, as `score_shifts` does."""
    passes = shift.count_passes(len(segmenters)) * world.share(len(pairs))
    with console.counting("shifts", passes) as on_progress:

        def miou(network: str, name: str, severity: int) -> float:
            shifted = ShiftedPairs(pairs, name, severity, shift.seed)
            return score_once(segmenters[network], shifted, evaluations[network], runtime, world, on_progress).miou

        return score_shifts(list(segmenters), shift, miou, "miou", None)


def save_under_shifts(folder: Path, shifts: dict[str, Any], pairs: Pairs) -> None:
    """Write scores, and the first image under every shift. Raises `SaveError`."""
    save_shifts(folder, shifts, lambda name, severity: ShiftedPairs(pairs, name, severity, shifts["seed"]).load(0)[0])


def score_once(
    segmenter: Segmenter,
    pairs: Pairs,
    evaluation: Evaluation,
    runtime: Runtime,
    world: World,
    on_progress: OnProgress = ignore_progress,
    *,
    boundaries: bool = False,
) -> SegmentScores:
    """Score a split in one way: at the images' own size where its size is ``both``."""
    with autocast(runtime, world.device, segmenter.network):
        plan = segmenter.plan(evaluation)
        return score(
            segmenter.network,
            pairs,
            segmenter.rule,
            plan,
            world,
            workers=runtime.workers,
            boundaries=boundaries,
            on_progress=on_progress,
        )


def score_sizes(
    segmenter: Segmenter,
    pairs: Pairs,
    evaluation: Evaluation,
    runtime: Runtime,
    world: World,
    on_progress: OnProgress = ignore_progress,
    *,
    boundaries: bool = False,
) -> tuple[SegmentScores, dict[str, Any]]:
    """Score a split at the size, or both sizes, of `evaluation`; returns the scores and their part of a result."""
    scores = score_once(segmenter, pairs, evaluation, runtime, world, on_progress, boundaries=boundaries)
    result = scores.to_dict()
    if evaluation.second_size:
        resized = score_once(segmenter, pairs, evaluation.second_size, runtime, world, on_progress).to_dict()
        result["resized"] = {key: resized[key] for key in ("miou", "pixel_accuracy", "mean_accuracy")}
    return scores, {**result, "evaluation": evaluation.model_dump(mode="json")}


def _check_classes(data: MaskData, segmenter: Segmenter) -> None:
    """Raise `DataError` for data of other classes than the run's; where no names are listed, the run's hold."""
    if data.dataset == "folder" and data.source != "demo" and not class_list_path(data).is_file():
        return
    names = [label_class.name for label_class in classes_of(data)]
    if names != [label_class.name for label_class in segmenter.classes]:
        raise DataError(f"--data {data.source}: its {len(names)} classes are not those that the run was trained on")


def describe_scores(result: dict[str, Any]) -> str:
    """Return the scores of a result as text."""
    evaluation = result["evaluation"]
    settings = [evaluation["mode"], "resized" if evaluation["size"] == "resize" else "native size"]
    settings += (
        ["scales " + ",".join(f"{scale:g}" for scale in evaluation["scales"])] if evaluation["scales"] != [1.0] else []
    )
    settings += ["flip"] if evaluation["flip"] else []
    unseen_classes = result["classes"] - result["classes_seen"]
    line = (
        f"validation: mIoU {result['miou']:.2f} %, pixel accuracy {result['pixel_accuracy']:.2f} %, mean accuracy "
        f"{result['mean_accuracy']:.2f} % ({result['images']} images, {', '.join(settings)}; all pixels of the most "
        f"frequent class: mIoU {result['majority_miou']:.2f} %)"
        + (f"; resized: mIoU {result['resized']['miou']:.2f} %" if "resized" in result else "")
        + (f"; {unseen_classes} of {result['classes']} classes do not occur" if unseen_classes else "")
    )
    more = {
        "mDice": "mdice",
        "mFscore": "mfscore",
        "mean precision": "mean_precision",
        "boundary mIoU": "boundary_miou",
        "boundary F": "boundary_mf",
    }
    lines = [line, ", ".join(f"{name} {result[key]:.2f} %" for name, key in more.items() if key in result)]
    return "\n".join([text for text in lines if text] + describe_shifts(result))
