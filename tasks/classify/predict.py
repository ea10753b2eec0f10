"""`dpn predict`: the classes of images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from dpn_cli.data.sources.folder import find_image_files
from dpn_cli.engine import fit as engine
from dpn_cli.report.predictions import Predictions, tally
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import join, refuse_ranks
from tasks.classify.classifier import compute_logits, load_classifier, readable
from tasks.classify.options import PredictOptions

# Classes below a thumbnail.
MOST_LINES = 3


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
                with engine.precision_of(runtime, world.device):
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
        predictions.write("dpn predict", options.run, [predicted], _lines)
    return predictions


def _lines(result: dict[str, Any]) -> Sequence[str]:
    candidates = [f"{candidate['name']} {candidate['probability']:.1%}" for candidate in result["classes"][:MOST_LINES]]
    return [*candidates, result["image"]]
