"""`dpn lit eval`: zero-shot accuracy on labelled images, or retrieval on captioned ones, of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpn_cli import engine, stopping
from dpn_cli.console import Console
from dpn_cli.data import classified
from dpn_cli.data.labelled import Labelled, fingerprint
from dpn_cli.data.reading import Decoder, Reading
from dpn_cli.data.trained_on import Known, look_up
from dpn_cli.distributed import World, join
from dpn_cli.errors import DataError
from dpn_cli.files import replace_json
from dpn_cli.recipe import MAX_PIXELS, Runtime
from dpn_cli.runstate import open_report
from dpn_cli.scoring import Scores
from tasks.lit.data import DEMO_SPLITS, SceneClasses, Source
from tasks.lit.encode import cache_root, describe_retrieval, retrieval_scores, wanted_of
from tasks.lit.parts import open_part
from tasks.lit.tokens import open_tokenizer
from tasks.lit.towers import Towers, load_towers
from tasks.lit.zeroshot import check_order, class_names, classifier_of, classify, prompt_set

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What ``dpn lit eval`` was asked to do."""

    place: str
    source: Source
    retrieval: bool = False
    split: str | None = None
    label_column: str | None = None
    prompts: str | None = None
    class_names: str | None = None
    tokenizer: str | None = None
    batch_size: int = 64
    force: bool = False
    cache_dir: str | None = None
    output_dir: Path | None = None
    decode: Decoder | None = None
    max_pixels: int = MAX_PIXELS


def evaluate(asked: Asked, runtime: Runtime, console: Console) -> Json | None:
    """Score a run and return the result, written to `output_dir` too; None on ranks that do not lead.

    Raises `DataError` when the data, the class names or the tokenizer do not belong to the run, `DpnError` when
    `output_dir` holds one.
    """
    with stopping.listen(stopping.NO_RESULT), join(runtime.device) as world:
        if asked.output_dir and world.leads:
            open_report(asked.output_dir)
        towers = load_towers(asked.place).to(world.device)
        check_tokenizer(towers, asked.tokenizer)
        reading = Reading(asked.decode or towers.decoder, asked.max_pixels)
        asked = replace(asked, source=replace(asked.source, reading=reading))
        scored = _retrieval if asked.retrieval else _zeroshot
        result = {
            "task": "lit eval",
            "run": asked.place,
            "data": asked.source.place,
            "tokenizer": towers.tokenizer.to_dict(),
            "decoder": reading.describe(),
            **scored(towers, asked, runtime, world, console),
        }
        if asked.output_dir and world.leads:
            replace_json(asked.output_dir / "result.json", result)
        return result if world.leads else None


def check_tokenizer(towers: Towers, file: str | None) -> None:
    """Refuse another tokenizer than the run's: its tokens would mean other words. Raises `DataError`."""
    if file is None:
        return
    trained = towers.tokenizer
    given = open_tokenizer(file, trained.context, trained.clean)
    if given.digest != trained.digest:
        raise DataError(
            f"--tokenizer {file}: the run was trained with {trained.name} (sha256 {trained.digest[:12]}, here "
            f"{given.digest[:12]}), and reads nothing else; leave the option out"
        )


def _zeroshot(towers: Towers, asked: Asked, runtime: Runtime, world: World, console: Console) -> Json:
    split, folders = _labelled(asked)
    names, origin = class_names(folders, asked.class_names)
    chosen = asked.prompts or ("demo" if asked.source.place == "demo" else "clip_paper")
    templates = prompt_set(chosen)
    console.info(f"{len(split.labels)} images of {len(names)} classes; {len(templates)} prompts a class")
    known = _known(towers, split, world, console)
    run = Path(asked.place).expanduser()
    with engine.precision_of(runtime, world.device):
        weights = classifier_of(towers, names, templates, run if (run / "run.json").is_file() else None, world)
        scores = classify(
            towers, weights, split, world,
            workers=runtime.workers, batch_size=asked.batch_size, skip_bad=asked.source.skip_bad,
        )  # fmt: skip
    if not asked.force:
        check_order(scores, len(names))
    found = _zeroshot_result(scores, split, names, origin, chosen, templates)
    return {"split": asked.split or "val", "trained_on": known.to_dict() if known else None, **found}


def _labelled(asked: Asked) -> tuple[Labelled, Sequence[str]]:
    source = asked.source
    if source.place == "demo":
        split = SceneClasses(*DEMO_SPLITS["test"])
        return split, split.classes
    where = classified.Source(
        source.place, image_column=source.image_column, label_column=asked.label_column, reading=source.reading
    )
    chosen = asked.split or "val"
    if chosen == "all":
        raise DataError("--split all: of captioned images only; choose train, val or test")
    if chosen == "test" and not classified.has_split(where, "test"):
        raise DataError(f"--split test: --data {source.place} has no labelled test images; choose val or train")
    return classified.open_split(where, chosen)


def _known(towers: Towers, split: Labelled, world: World, console: Console) -> Known | None:
    """Count the images that the text tower was trained on, and warn of them."""
    known = look_up(split, towers.facts.get("trained_on"), world)
    if warning := known and known.warning():
        console.warn(warning)
    return known


def _zeroshot_result(
    scores: Scores, split: Labelled, names: Sequence[str], origin: str, prompts: str, templates: Sequence[str]
) -> Json:
    return {
        "top1": scores.top1,
        "top5": scores.top5,
        "chance": 100 / len(names),
        "classes": len(names),
        "images": scores.images,
        "skipped": scores.skipped,
        "prompts": {"set": prompts, "templates": len(templates)},
        "class_names": origin,
        "fingerprint": fingerprint(split),
        "image_preparation": "resized to a square, bilinear",
    }


def _retrieval(towers: Towers, asked: Asked, runtime: Runtime, world: World, console: Console) -> Json:
    data, part = open_part(asked.source, asked.split, towers.facts)
    captions = sum(map(len, data.captions))
    console.info(f"{len(data.captions)} images with {captions} captions" + (f", {part}" if part else ""))
    known = _known(towers, data, world, console)
    wanted = wanted_of(towers.image, runtime, world, skip_bad=asked.source.skip_bad)
    root = cache_root(asked.cache_dir)
    return {
        "split": asked.split or "val",
        "part": part,
        "trained_on": known.to_dict() if known else None,
        "retrieval": retrieval_scores(towers, data, wanted, root, runtime, world, console),
        "left_out": data.dropped,
    }


def describe(result: Json) -> str:
    """Return the result as lines for a person."""
    known = result["trained_on"] and Known(**result["trained_on"]).warning()
    warned = f"\nWARNING: {known}" if known else ""
    if "retrieval" in result:
        part = f"{result['part']}: " if result["part"] else ""
        return part + describe_retrieval(result["retrieval"]) + warned
    skipped = f", {result['skipped']} unreadable ones left out" if result["skipped"] else ""
    prompts = result["prompts"]
    return (
        f"zero-shot: top-1 {result['top1']:.2f} %, top-5 {result['top5']:.2f} % on {result['images']} images of "
        f"{result['classes']} classes (chance {result['chance']:.2f} %{skipped})\n"
        f"prompts {prompts['set']} ({prompts['templates']}), {result['class_names']}, {result['tokenizer']['name']}"
        + warned
    )
