"""Zero-shot accuracy under shifts of the data (``dpn lit eval --shifts``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpn_cli.data.shifted_images import ShiftedImages, shift_side
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.report.shift_scores import save_shifts, score_shifts
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast
from tasks.lit.options import LitEvalOptions
from tasks.lit.page_samples import NearestImages
from tasks.lit.towers import Towers, load_lit
from tasks.lit.zeroshot import classifier_of, classify


def score_zeroshot_shifts(
    towers: Towers,
    options: LitEvalOptions,
    split: LabelledImages,
    names: Sequence[str],
    templates: Sequence[str],
    world: World,
    console: Console,
    example_row: int,
) -> dict[str, Any]:
    """Return the zero-shot accuracies of a run, and of the baseline, under shifts; they are written to files, too.

    Both classify by the same names and templates. The files hold the image of `example_row` under each shift. Raises as
    `load_lit` does.
    """
    shift, networks = options.shift, {options.run: towers}
    if shift.baseline:
        networks[shift.baseline] = load_lit(shift.baseline).to(world.device)
    side = shift_side(towers.image.config.image_size)

    def shifted(name: str, severity: int) -> ShiftedImages:
        return ShiftedImages(split, name, severity, side, shift.seed)

    with (
        autocast(options.runtime, world.device, towers.image, towers.text),
        console.counting("shifts", shift.count_passes(len(networks)) * world.share(len(split.labels))) as on_progress,
    ):
        classes = {network: classifier_of(own, names, templates, None, world) for network, own in networks.items()}

        def top1(network: str, name: str, severity: int) -> float:
            scores = classify(
                networks[network],
                classes[network],
                shifted(name, severity),
                world,
                workers=options.runtime.workers,
                batch_size=options.batch_size,
                skip_bad=options.skip_bad_images,
                nearest=NearestImages(names),
                on_progress=on_progress,
            )
            return scores.top1

        shifts = score_shifts(list(networks), shift, top1, "top1", side)
    if options.output_dir and world.leads:
        save_shifts(options.output_dir, shifts, lambda name, severity: shifted(name, severity).pixels(example_row))
    return shifts
