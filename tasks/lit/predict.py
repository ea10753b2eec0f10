"""`dpn lit predict`: label images by their nearest text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from open_clip.tokenizer import canonicalize_text

from dpn_cli.data.decode import options_of_run
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.folder import find_image_files
from dpn_cli.errors import DpnError
from dpn_cli.report.predictions import Predictions, tally
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import join, refuse_ranks
from dpn_cli.run.precision import autocast
from tasks.lit.options import ZeroShotOptions
from tasks.lit.towers import load_lit
from tasks.lit.zeroshot import build_classifier, prompt_set

Json = dict[str, Any]
# Labels below a thumbnail.
MOST_LINES = 3


def predict(options: ZeroShotOptions, console: Console) -> Predictions:
    """Return for every image its best labels with cosine and probability.

    Without ``--decode`` JPEGs are decoded as they were for the training. Unreadable images are named and left out.
    Raises `DpnError` without labels, and `DataError` where no image is readable.
    """
    names = [name.strip() for name in options.labels.split(",") if canonicalize_text(name)]
    if not names:
        raise DpnError('--labels: no label in it; write them with commas, e.g. --labels "a red circle,a blue square"')
    runtime = options.runtime
    with signals.listen(signals.NO_RESULT), join(runtime.device) as world:
        refuse_ranks(world, "lit predict")
        towers = load_lit(options.run, "dpn lit predict").to(world.device)
        predictions = Predictions(find_image_files(options.images), options.written, console)
        reading = options_of_run(options.reading, towers.decoder, towers.exif)
        precision = autocast(runtime, world.device, towers.image, towers.text)
        with precision:
            classes = build_classifier(towers, names, prompt_set(options.prompts))
        resized = partial(resize, size=towers.image.config.image_size)
        batches = predictions.read(
            reading, resized, batch_size=options.batch_size, workers=runtime.workers, label="lit predict"
        )
        with closing(batches):
            for part in batches:
                with precision:
                    features = towers.encode_images(torch.stack([image.prepared for image in part]))
                cosine = features @ classes.T
                chances = towers.probabilities(cosine)
                best = cosine.topk(min(options.top, len(names)), dim=-1).indices
                for image, row, values, probability in zip(
                    part, best.tolist(), cosine.tolist(), chances.tolist(), strict=True
                ):
                    labels = [{"label": names[i], "cosine": values[i], "probability": probability[i]} for i in row]
                    predictions.add({"image": str(image.path), "labels": labels}, image.small)
        predicted = tally(
            "What was predicted", "label", (result["labels"][0]["label"] for result in predictions.results)
        )
        predictions.write("dpn lit predict", options.run, [predicted], _lines)
    return predictions


def _lines(result: Json) -> Sequence[str]:
    labels = [
        f"{label['label']} {label['probability']:.1%}, cosine {label['cosine']:+.3f}" for label in result["labels"]
    ]
    return [*labels[:MOST_LINES], result["image"]]
