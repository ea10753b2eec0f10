"""The images that go through the networks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

from torch import Tensor

from dpn_cli.analysis.hooks import inspection_batch_size
from dpn_cli.data.image_source import ImageSource, open_unlabelled
from dpn_cli.data.pixels import load, stream
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.base import ImageSubset
from dpn_cli.data.sources.synthetic import SceneSplit
from dpn_cli.data.splits import hash_order
from dpn_cli.errors import DataError
from dpn_cli.run.console import OnProgress, ignore_progress
from dpn_cli.weights.backbone import Backbone

# Scenes among whose patches an ordinary one is looked for.
SCENES = 8


class SampledImages:
    """Up to `most` images of a source, the same ones whatever the order of a folder; resized whole.

    Raises `DataError` where there are none.
    """

    def __init__(self, source: ImageSource, most: int, workers: int | Literal["auto"], skip_bad: bool) -> None:
        split = open_unlabelled(source)
        self.location, self.reading = source.location, source.reading
        self.split = ImageSubset(split, sorted(hash_order(split)[:most]))
        self.workers, self.skip_bad = workers, skip_bad

    def batches(self, model: Backbone, on_progress: OnProgress = ignore_progress) -> Iterator[Tensor]:
        """Yield them as uint8 (b, 3, h, w) at the size of a network, and tell `done` how many are done.

        Raises `DataError` for unreadable images.
        """
        transform = partial(resize, size=model.config.image_size)
        count = 0
        with stream(
            self.split, transform, inspection_batch_size(model), workers=self.workers, skip_bad=self.skip_bad
        ) as parts:
            for part in parts:
                if len(part.images):
                    count += len(part.images)
                    yield part.images
                on_progress(len(part.images) + part.skipped)
        if not count:
            raise DataError(f"--data {self.location}: none of {len(self.split.labels)} images can be read")


def scenes(model: Backbone) -> Tensor:
    """Return a few of the built-in scenes (b, 3, h, w) as uint8."""
    return load(SceneSplit("demo_count", 0, SCENES), model.config.image_size, workers=0).images
