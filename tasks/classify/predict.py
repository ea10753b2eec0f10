"""`dpn predict`: the classes of images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from dpn_cli.data.decode import read_pixels
from dpn_cli.data.shifted_images import image_rng, reduce_to, shift_side
from dpn_cli.data.shifts import shift_pixels
from dpn_cli.data.sources.folder import find_image_files
from dpn_cli.report.content import Gallery, PageImage, PageSection
from dpn_cli.report.predictions import Predictions, tally
from dpn_cli.report.thumbnails import thumbnail
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World, join, refuse_ranks
from dpn_cli.run.precision import autocast
from tasks.classify.classifier import Classifier, compute_logits, load_classifier, readable
from tasks.classify.options import PredictOptions

# Classes below a thumbnail, and images that are shown under shifts.
MOST_LINES, MOST_SHIFTED = 3, 5


def predict(options: PredictOptions, console: Console) -> Predictions:
    """Return the best classes of every image with probabilities; images are prepared as in the run.

    Without ``--decode`` JPEGs are decoded as they were for the training. Unreadable images are named and left out;
    raises `DataError` where that leaves none.
    """
    runtime = options.runtime
    with signals.listen(signals.NO_RESULT), join(runtime.device) as world:
        refuse_ranks(world, "predict")
        classifier = load_classifier(options.run)
        predictions = Predictions(find_image_files(options.images), options.written, console)
        classifier.model.to(world.device).eval()
        reading = classifier.reading(options.reading)
        words = readable(classifier.classes)
        batches = predictions.read(
            reading, classifier.transform, batch_size=options.batch_size, workers=runtime.workers, label="predict"
        )
        with closing(batches):
            for part in batches:
                images = torch.stack([image.prepared for image in part])
                with autocast(runtime, world.device, classifier.model):
                    chances = classifier.probabilities(compute_logits(classifier, images.to(world.device)))
                best = chances.topk(min(options.top, len(words)), dim=-1)
                for image, values, indices in zip(part, best.values.tolist(), best.indices.tolist(), strict=True):
                    candidates = [
                        {"class": classifier.classes[index], "name": words[index], "probability": value}
                        for index, value in zip(indices, values, strict=True)
                    ]
                    predictions.add({"image": str(image.path), "classes": candidates}, image.small)
        predicted = tally(
            "What was predicted", "class", (result["classes"][0]["name"] for result in predictions.results)
        )
        paths = [Path(result["image"]) for result in predictions.results[:MOST_SHIFTED]]
        with autocast(runtime, world.device, classifier.model):
            galleries = [_draw_shifts(path, options, classifier, world) for path in paths if options.shift.names]
        if 0 < len(galleries) < len(predictions.results):
            console.info(f"--shifts: the first {len(galleries)} of {len(predictions.results)} images are shown")
        sections = [PageSection("Shifts", galleries)] if galleries else []
        predictions.write("dpn predict", options.run, [predicted], _lines, sections=sections)
    return predictions


def _draw_shifts(path: Path, options: PredictOptions, classifier: Classifier, world: World) -> Gallery:
    """Return an image under every shift and severity, with its best class there."""
    shift, words = options.shift, readable(classifier.classes)
    side = shift_side(classifier.model.config.image_size, classifier.resize_side)
    pixels = reduce_to(read_pixels(path, str(path), classifier.reading(options.reading)), side)
    shown = {"unshifted": pixels} | {
        f"{name} {severity}": shift_pixels(pixels, name, severity, image_rng(shift.seed, name, severity, path.name))
        for name in shift.names
        for severity in shift.severities
    }
    prepared = torch.stack([classifier.transform(image) for image in shown.values()])
    logits = [compute_logits(classifier, part.to(world.device)) for part in torch.split(prepared, options.batch_size)]
    best = classifier.probabilities(torch.cat(logits)).max(dim=-1)
    shown_images = []
    for (name, image), value, index in zip(shown.items(), best.values.tolist(), best.indices.tolist(), strict=True):
        shown_images.append(PageImage(thumbnail(image), [f"{words[index]} {value:.1%}", name]))
    return Gallery(f"{path} under shifts, by severity", shown_images)


def _lines(result: dict[str, Any]) -> Sequence[str]:
    candidates = [f"{candidate['name']} {candidate['probability']:.1%}" for candidate in result["classes"][:MOST_LINES]]
    return [*candidates, result["image"]]
