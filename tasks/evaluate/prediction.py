"""`dpn predict`: the classes of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dpn_cli import engine
from dpn_cli.classifier import load_classifier, predict, readable
from dpn_cli.data.images import find_pictures
from dpn_cli.data.reading import Decoder, Reading, read_pixels
from dpn_cli.distributed import join
from dpn_cli.recipe import MAX_PIXELS, Runtime


def classify(
    place: str,
    pictures: Sequence[Path],
    top: int,
    runtime: Runtime,
    *,
    decode: Decoder | None = None,
    max_pixels: int = MAX_PIXELS,
    batch_size: int = 32,
) -> list[dict[str, Any]]:
    """Return for every picture its `top` best classes with probabilities, prepared as the run's own images were.

    Without `decode` JPEGs are decoded as they were for the training. Raises `DataError` for an unreadable picture.
    """
    with join(runtime.device) as world:
        classifier = load_classifier(place)
        classifier.model.to(world.device).eval()
        reading = Reading(decode or classifier.decoder, max_pixels)
        paths, words, results = find_pictures(pictures), readable(classifier.classes), []
        for begin in range(0, len(paths), batch_size):
            part = paths[begin : begin + batch_size]
            images = torch.stack([classifier.transform(read_pixels(path, str(path), reading)) for path in part])
            with engine.precision_of(runtime, world.device):
                chances = classifier.probabilities(predict(classifier, images.to(world.device)))
            best = chances.topk(min(top, len(words)), dim=-1)
            for path, values, indices in zip(part, best.values.tolist(), best.indices.tolist(), strict=True):
                guesses = [
                    {"class": classifier.classes[index], "name": words[index], "probability": value}
                    for index, value in zip(indices, values, strict=True)
                ]
                results.append({"image": str(path), "classes": guesses})
    return results
