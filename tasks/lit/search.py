"""`dpn lit search`: find the images nearest to a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from open_clip.tokenizer import canonicalize_text

from dpn_cli.config.schema import PredictionFiles
from dpn_cli.data.decode import options_of_run
from dpn_cli.data.sources.folder import find_image_files
from dpn_cli.errors import DataError, DpnError, ImageError
from dpn_cli.report.content import Cell, Gallery, PageImage, PageSection, Table
from dpn_cli.report.predictions import Predictions, thumbnails, write_gallery
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import join
from dpn_cli.run.precision import autocast
from tasks.lit.cache import problem_of
from tasks.lit.captions import CaptionedFiles
from tasks.lit.encode import cache_root, encode_all, image_encoder
from tasks.lit.options import SearchOptions
from tasks.lit.towers import load_lit
from tasks.lit.zeroshot import build_classifier, prompt_set


def search(options: SearchOptions, console: Console) -> Predictions | None:
    """Return the images of a folder that are nearest to a sentence; their features are cached.

    Without ``--decode`` JPEGs are decoded as they were for the training. Unreadable images are named and left out;
    raises `DataError` where that leaves none. None on ranks that do not lead.
    """
    if not canonicalize_text(options.query):
        raise DpnError("--query: an empty sentence")
    reading, runtime = options.reading, options.runtime
    with signals.listen(signals.NO_RESULT), join(runtime.device) as world:
        towers = load_lit(options.run, "dpn lit search").to(world.device)
        predictions = Predictions(find_image_files([options.images]), PredictionFiles(html=options.html), console)
        files = find_images(options.images, predictions.paths, options.query, predictions.leave_out)
        predictions.check_any()
        files.reading = options_of_run(reading, towers.decoder, towers.exif)
        encoder = image_encoder(towers.image, runtime, world, skip_bad=True, batch_size=options.batch_size)
        features, readable = encode_all(files, encoder, cache_root(options.cache_dir), world, console)
        with autocast(runtime, world.device, towers.image, towers.text):
            sentence = build_classifier(towers, [options.query], prompt_set("plain"))
        if not world.leads:
            return None
        for row in sorted(set(range(len(files.keys))) - set(readable)):
            predictions.leave_out(files.path(row), problem_of(files, row))
        cosine = (features.to(world.device) @ sentence.T)[:, 0]
        best = cosine.topk(min(options.top, len(readable)))
        predictions.results += [
            {"image": files.locate(readable[row]), "cosine": value}
            for row, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        if options.html:
            paths = [files.path(readable[row]) for row in best.indices.tolist()]
            thumbnails_by_position = list(thumbnails(paths, files.reading, runtime.workers))
            _write_found(options.html, options, predictions, thumbnails_by_position, len(readable))
    return predictions


def _write_found(
    file: Path,
    options: SearchOptions,
    predictions: Predictions,
    thumbnails_by_position: Sequence[tuple[int, bytes]],
    count: int,
) -> None:
    """Write the page of a search among `count` images; thumbnails come with their positions in the results."""
    nearest = predictions.results
    facts: list[tuple[str, Cell]] = [("query", options.query), ("network", options.run)]
    facts += [("folder", str(options.images)), ("images in it", count)]
    images = [
        PageImage(small, [f"{position + 1}. cosine {nearest[position]['cosine']:.3f}", nearest[position]["image"]])
        for position, small in thumbnails_by_position
    ]
    title = f"The {len(images)} nearest images, the nearest first" if len(images) > 1 else "The nearest image"
    section = PageSection("Search", [*predictions.left_out(), Table("", ("", ""), facts)])
    write_gallery(file, f"dpn lit search: {options.query}", section, Gallery(title, images))


def find_images(
    folder: Path, paths: Sequence[Path], query: str, leave_out: Callable[[Path, DataError], object]
) -> CaptionedFiles:
    """Return images in or below a folder, each with the query as its sentence.

    `leave_out` takes those that are no files (broken links), with what is wrong.
    """
    files = CaptionedFiles(folder)
    for path in paths:
        try:
            files.add(path.relative_to(folder).as_posix(), (query,), str(folder))
        except ImageError as error:
            leave_out(path, error)
    return files
