"""`dpn predict`: the classes of pictures."""

from __future__ import annotations

from typing import Any

import torch

from dpn_cli.data.images import find_pictures
from dpn_cli.data.reading import Reading, read_pixels
from dpn_cli.engine import fit as engine
from dpn_cli.run.distributed import join
from tasks.classify.classifier import load_classifier, predict, readable
from tasks.classify.options import Prediction

# Pictures that go through the network at once.
AT_ONCE = 32


def classify(options: Prediction) -> list[dict[str, Any]]:
    """Return for every picture its best classes with probabilities, prepared as the run's own images were.

    Without ``--decode`` JPEGs are decoded as they were for the training. Raises `DataError` for an unreadable picture.
    """
    how, runtime = options.pictures, options.runtime
    with join(runtime.device) as world:
        classifier = load_classifier(options.run)
        classifier.model.to(world.device).eval()
        reading = Reading(how.decode or classifier.decoder, how.max_pixels)
        paths, words, results = find_pictures(options.images), readable(classifier.classes), []
        for begin in range(0, len(paths), AT_ONCE):
            part = paths[begin : begin + AT_ONCE]
            images = torch.stack([classifier.transform(read_pixels(path, str(path), reading)) for path in part])
            with engine.precision_of(runtime, world.device):
                chances = classifier.probabilities(predict(classifier, images.to(world.device)))
            best = chances.topk(min(options.top, len(words)), dim=-1)
            for path, values, indices in zip(part, best.values.tolist(), best.indices.tolist(), strict=True):
                guesses = [
                    {"class": classifier.classes[index], "name": words[index], "probability": value}
                    for index, value in zip(indices, values, strict=True)
                ]
                results.append({"image": str(path), "classes": guesses})
    return results
