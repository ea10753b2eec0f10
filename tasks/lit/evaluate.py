"""`dpn lit eval`: zero-shot accuracy on labelled images, or retrieval on captioned ones, of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpn_cli.config.paths import CAPTIONS, CLASS_FOLDERS, check_location
from dpn_cli.config.shift_options import ShiftOptions
from dpn_cli.data import image_source
from dpn_cli.data.decode import ReadOptions, options_of_run
from dpn_cli.data.leakage import Overlap, count_overlap
from dpn_cli.data.sources.base import LabelledImages, fingerprint
from dpn_cli.errors import DataError
from dpn_cli.metrics import Scores
from dpn_cli.report.shift_scores import describe_shifts
from dpn_cli.run import signals
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import World, join
from dpn_cli.run.files import open_report, replace_json
from dpn_cli.run.precision import announce_precision, autocast
from tasks.lit.data import DEMO_SPLITS, CaptionSource, SceneClasses
from tasks.lit.encode import cache_root, describe_retrieval, image_encoder, retrieval_scores
from tasks.lit.eval_splits import open_part
from tasks.lit.options import LitEvalOptions
from tasks.lit.page_samples import NearestImages, save_prompts
from tasks.lit.towers import Towers, load_lit
from tasks.lit.zeroshot import check_order, class_names, classifier_of, classify, prompt_set
from tasks.lit.zeroshot_shifts import score_zeroshot_shifts

Json = dict[str, Any]


def evaluate(options: LitEvalOptions, console: Console) -> Json | None:
    """Score a run and return the result, written to `output_dir` too; None on ranks that do not lead.

    Raises `DataError` when the data, the class names or the tokenizer do not belong to the run, `DpnError` when
    `output_dir` holds one.
    """
    with signals.listen(signals.NO_RESULT), join(options.runtime.device) as world:
        if options.output_dir and world.leads:
            open_report(options.output_dir)
        check_location("--val-data", options.val_source, CAPTIONS if options.captioned else CLASS_FOLDERS)
        towers = load_lit(options.run).to(world.device)
        reading = options_of_run(options.reading, towers.decoder, towers.exif)
        scored = _retrieval if options.captioned else zeroshot
        result = {
            "task": "lit eval",
            "run": options.run,
            "data": options.source if options.split == "train" else options.val_source or options.source,
            "tokenizer": towers.tokenizer.to_dict(),
            "decoder": reading.versions(),
            "precision": announce_precision(options.runtime, world, console, towers.image, towers.text),
            **scored(towers, options, reading, world, console),
        }
        if options.zeroshot_data:
            result["more_data"] = _score_more(towers, options, world, console)
        if options.output_dir and world.leads:
            replace_json(options.output_dir / "result.json", result)
        return result if world.leads else None


def zeroshot(towers: Towers, options: LitEvalOptions, reading: ReadOptions, world: World, console: Console) -> Json:
    """Return the accuracy on labelled images, with what it depends on. Raises `DataError`."""
    split, folders = open_labelled(options, reading)
    names, origin = class_names(folders, options.class_names)
    prompts = options.prompts or ("demo" if options.source == "demo" else "clip_paper")
    templates = prompt_set(prompts)
    console.info(f"{len(split.labels)} images of {len(names)} classes; {count_noun(len(templates), 'prompt')} a class")
    overlap = _count_overlap(towers, split, world, console)
    run = Path(options.run).expanduser()
    nearest = NearestImages(names)
    with autocast(options.runtime, world.device, towers.image, towers.text):
        weights = classifier_of(towers, names, templates, run if (run / "run.json").is_file() else None, world)
        with console.counting("lit eval", world.share(len(split.labels))) as on_progress:
            scores = classify(
                towers, weights, split, world, on_progress=on_progress, nearest=nearest,
                workers=options.runtime.workers, batch_size=options.batch_size, skip_bad=options.skip_bad_images,
            )  # fmt: skip
    if not options.force:
        check_order(scores, len(names))
    best = nearest.gather()
    if options.output_dir and world.leads:
        save_prompts(options.output_dir, split, nearest, best)
    result = _zeroshot_result(scores, split, names, origin, prompts, templates)
    if options.shift.names:
        result["shifts"] = score_zeroshot_shifts(
            towers, options, split, names, templates, world, console, example_row=best[0][0][1]
        )
    return {"split": options.split or "val", "trained_on": overlap.to_dict() if overlap else None, **result}


def _score_more(towers: Towers, options: LitEvalOptions, world: World, console: Console) -> list[Json]:
    """Return the scores on more labelled images, one set after the other, at chance too. Raises as `zeroshot` does."""
    scored = []
    reading = options_of_run(options.reading, towers.decoder, towers.exif)
    for location in options.zeroshot_data:
        changes: Json = {"source": location, "val_source": None, "class_names": None, "output_dir": None}
        one = options.model_copy(update={**changes, "shift": ShiftOptions(), "force": True})
        scored.append({"data": location, **zeroshot(towers, one, reading, world, console)})
    return scored


def open_labelled(options: LitEvalOptions, reading: ReadOptions) -> tuple[LabelledImages, Sequence[str]]:
    """Open the labelled images to score on; returns them and their classes. Raises `DataError`."""
    if options.source == "demo":
        split = SceneClasses(*DEMO_SPLITS["test"])
        return split, split.classes
    source = image_source.ImageSource(
        options.source,
        options.val_source,
        image_column=options.image_column,
        label_column=options.label_column,
        reading=reading,
    )
    split_name = options.split or "val"
    if split_name == "all":
        raise DataError("--split all: of captioned images only; choose train, val or test")
    if split_name == "test" and not image_source.has_split(source, "test"):
        raise DataError(f"--split test: --data {options.source} has no labelled test images; choose val or train")
    return image_source.open_split(source, split_name)


def _count_overlap(towers: Towers, split: LabelledImages, world: World, console: Console) -> Overlap | None:
    """Count the images that the text tower was trained on, and warn of them."""
    overlap = count_overlap(split, towers.facts.get("trained_on"), world)
    if warning := overlap and overlap.warning():
        console.warn(warning)
    return overlap


def _zeroshot_result(
    scores: Scores, split: LabelledImages, names: Sequence[str], origin: str, prompts: str, templates: Sequence[str]
) -> Json:
    return {
        "top1": scores.top1,
        "top5": scores.top5,
        "mean_recall": scores.mean_recall,
        "chance": 100 / len(names),
        "classes": len(names),
        "images": scores.images,
        "skipped": scores.skipped,
        "prompts": {"set": prompts, "templates": len(templates)},
        "class_names": origin,
        "fingerprint": fingerprint(split),
        "image_preparation": "resized to a square, bilinear",
    }


def _retrieval(towers: Towers, options: LitEvalOptions, reading: ReadOptions, world: World, console: Console) -> Json:
    data, part = open_part(_caption_source(options, reading), options.split, towers.facts)
    captions = sum(map(len, data.captions))
    console.info(f"{len(data.captions)} images with {captions} captions" + (f", {part}" if part else ""))
    overlap = _count_overlap(towers, data, world, console)
    skip, rows = options.skip_bad_images, options.batch_size
    encoder = image_encoder(towers.image, options.runtime, world, skip_bad=skip, batch_size=rows)
    root = cache_root(options.cache_dir)
    return {
        "split": options.split or "val",
        "part": part,
        "trained_on": overlap.to_dict() if overlap else None,
        "retrieval": retrieval_scores(
            towers, data, encoder, root, options.runtime, world, console, features_folder=options.output_dir
        ),
        "left_out": data.dropped,
    }


def _caption_source(options: LitEvalOptions, reading: ReadOptions) -> CaptionSource:
    return CaptionSource(
        options.source,
        options.val_source,
        images=options.images,
        image_column=options.image_column,
        caption_column=options.caption_column,
        skip_bad=options.skip_bad_images,
        reading=reading,
    )


def _describe_more(result: Json) -> list[str]:
    """Return a line for each further data set."""
    return [
        f"{one['data']}: top-1 {one['top1']:.2f} %, top-5 {one['top5']:.2f} %, mean recall {one['mean_recall']:.2f} % "
        f"({one['images']} images, {one['classes']} classes, chance {one['chance']:.2f} %)"
        for one in result.get("more_data", ())
    ]


def describe_scores(result: Json) -> str:
    """Return the result as text."""
    overlap_warning = result["trained_on"] and Overlap(**result["trained_on"]).warning()
    warned = f"\nWARNING: {overlap_warning}" if overlap_warning else ""
    if "retrieval" in result:
        part = f"{result['part']}: " if result["part"] else ""
        return part + describe_retrieval(result["retrieval"]) + warned
    skipped = f", {result['skipped']} unreadable ones left out" if result["skipped"] else ""
    prompts = result["prompts"]
    return (
        f"zero-shot: top-1 {result['top1']:.2f} %, top-5 {result['top5']:.2f} %, mean recall of the classes "
        f"{result['mean_recall']:.2f} % on {result['images']} images of "
        f"{result['classes']} classes (chance {result['chance']:.2f} %{skipped})\n"
        f"prompts {prompts['set']} ({prompts['templates']}), {result['class_names']}, {result['tokenizer']['name']}"
        + warned
        + "".join(f"\n{line}" for line in [*_describe_more(result), *describe_shifts(result)])
    )
