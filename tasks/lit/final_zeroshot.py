"""Zero-shot accuracy at the end of a LiT training: on the images that the config names, or on the demo's scenes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpn_cli.config.shift_options import ShiftOptions
from dpn_cli.data.decode import ReadOptions
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast
from dpn_cli.run.run import Run
from tasks.lit.cache import BATCH
from tasks.lit.config import LitConfig
from tasks.lit.data import DEMO_SPLITS, CaptionSource, SceneClasses
from tasks.lit.evaluate import open_labelled, zeroshot
from tasks.lit.options import LitEvalOptions
from tasks.lit.page_samples import NearestImages, save_prompts
from tasks.lit.towers import Towers
from tasks.lit.zeroshot import build_classifier, classify, prompt_set


def source_of(config: LitConfig) -> CaptionSource:
    """Return where the config's captioned images are."""
    data = config.data
    return CaptionSource(
        data.source or "demo",
        data.val_source,
        data.val_fraction,
        data.images,
        data.image_column,
        data.caption_column,
        data.skip_bad_images,
        ReadOptions(data.decode, data.max_pixels, exif=data.exif),
    )


def zeroshot_options(config: LitConfig, folder: Path) -> LitEvalOptions | None:
    """Return the options of ``dpn lit eval`` by which a run is scored at its end; None where it is not."""
    data = config.data
    if data.zeroshot is None:
        return None
    return LitEvalOptions(
        run=str(folder),
        source=data.zeroshot,
        skip_bad_images=data.skip_bad_images,
        force=True,  # what is not above chance is a warning at the end of a training
        shift=ShiftOptions.model_validate(config.shift.model_dump()),
        runtime=config.runtime,
        output_dir=folder,
    )


def open_zeroshot(config: LitConfig) -> LabelledImages | None:
    """Open the labelled images that a run is scored on at its end. Raises `DataError`."""
    options = zeroshot_options(config, Path())
    return open_labelled(options, source_of(config).reading)[0] if options else None


def zeroshot_of_run(towers: Towers, run: Run[LitConfig]) -> dict[str, Any]:
    """Return the zero-shot accuracy on the images that the config names, of the demo on its own, else nothing.

    With it are the scores under the config's shifts.
    """
    config, world = run.config, run.world
    if options := zeroshot_options(config, run.folder.path):
        result = zeroshot(towers, options, source_of(config).reading, world, run.console)
        shifts = {"shifts": result.pop("shifts")} if options.shift.names else {}
        return {"zeroshot": result, **shifts}
    return {"zeroshot": demo_zeroshot(towers, config, world, run.folder.path)} if config.demo else {}


def demo_zeroshot(towers: Towers, config: LitConfig, world: World, folder: Path) -> dict[str, Any]:
    """Return the zero-shot accuracy on held-out scenes: which of 24 coloured shapes is the largest object.

    The leading rank writes what a page shows of it to a folder.
    """
    split = SceneClasses(*DEMO_SPLITS["val"])
    nearest = NearestImages(split.classes)
    with autocast(config.runtime, world.device, towers.image, towers.text):
        weights = build_classifier(towers, split.classes, prompt_set("demo"))
        scores = classify(towers, weights, split, world, workers=0, batch_size=BATCH, skip_bad=False, nearest=nearest)
    best = nearest.gather()
    if world.leads:
        save_prompts(folder, split, nearest, best)
    return {
        "top1": scores.top1,
        "images": scores.images,
        "classes": len(split.classes),
        "chance": 100 / len(split.classes),
        "floors": scores.floors,
        "prompts": "demo",
    }
