"""Images of a distillation: for training, for comparison with the teacher, and labelled ones for scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpn_cli.config.urls import is_shards
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.decode import ReadOptions, decoder_of
from dpn_cli.data.image_source import ImageSource, has_split, open_split, open_unlabelled
from dpn_cli.data.pixels import Transform, stream
from dpn_cli.data.sources.base import ImageSubset, LabelledImages, fingerprint
from dpn_cli.data.splits import hash_order, minival_size
from dpn_cli.errors import DataError
from dpn_cli.run.console import Console, count_noun
from tasks.classify.distill.config import DistillConfig
from tasks.classify.evaluate import match_classes
from tasks.classify.preflight import decode_some, describe_turned_samples

# Images on which a stem is fitted and the spread of the teacher's tokens is measured.
FITTED_ON = 512


@dataclass(frozen=True)
class DistillSplits:
    """Images without labels, and labelled ones in `val`; `columns` are the teacher's outputs for `classes`.

    `columns` is None where the outputs are the classes in their order, `val` where there are no labels.
    """

    train: LabelledImages
    held_out: LabelledImages
    val: LabelledImages | None
    classes: Sequence[str]
    columns: Tensor | None

    def parts(self) -> dict[str, LabelledImages]:
        """Return the splits that exist, by name."""
        parts = {"train": self.train, "held_out": self.held_out}
        return parts if self.val is None else {**parts, "val": self.val}

    def fingerprints(self) -> dict[str, str]:
        """Return a hash of each part; see `fingerprint`."""
        return {name: fingerprint(part) for name, part in self.parts().items()}

    def check(self, skip_bad: bool) -> str | None:
        """Decode a sample of every part, and describe images that are stored turned.

        Raises `DataError` for an unreadable image unless `skip_bad`.
        """
        samples = [decode_some(part, skip_bad) for part in self.parts().values()]
        return describe_turned_samples(samples, self.train.reading.exif)

    def sample(self, transform: Transform, skip_bad: bool) -> Tensor:
        """Return some training images (n, 3, h, w) as uint8, the same ones for any order of the folder."""
        rows = sorted(hash_order(self.train)[:FITTED_ON])
        with stream(self.train, transform, 64, rows=rows, workers=0, skip_bad=skip_bad) as parts:
            return torch.cat([part.images for part in parts if len(part.images)])


def check_count(option: str, images: int, batch_size: int) -> None:
    """Raise `DataError` for fewer training images than a batch; `option` names their source in the message."""
    if images < batch_size:
        raise DataError(
            f"{option}: {count_noun(images, 'image')} to train on, fewer than one batch of {batch_size}; use "
            f"--batch-size {max(1, images)} at most, or more images"
        )


def source_of(config: DistillConfig) -> ImageSource:
    """Return the source of the config's images."""
    data = config.data
    return ImageSource(
        data.source or "demo",
        data.val_source,
        image_column=data.image_column,
        label_column=data.label_column,
        reading=ReadOptions(decoder_of(data.decode), data.max_pixels, exif=data.exif),
    )


def open_images(config: DistillConfig, classes: Sequence[str] | None, console: Console) -> DistillSplits:
    """Open the config's images; `classes` are the teacher's, None where it has no head.

    Raises `DataError` for labelled images (``--val-data``) of classes that the teacher does not know; such images
    inside ``--data`` are ignored with a message.
    """
    data, source = config.data, source_of(config)
    images = open_unlabelled(source)
    order = hash_order(images)
    cut = len(order) - minival_size(len(order), data.held_out)
    train, held_out = ImageSubset(images, np.sort(order[:cut])), ImageSubset(images, np.sort(order[cut:]))
    if not held_out.labels:
        raise DataError(
            f"--data {data.source}: none of {len(order)} images is held out to compare teacher and student on; see "
            "data.held_out"
        )
    val, columns, names = None, None, tuple[str, ...]()
    if classes is not None and (data.val_source or has_labelled_val(source)):
        val, names = open_split(source, "val")
        try:
            columns = match_classes(classes, names)
        except DataError as error:
            if data.val_source:
                raise DataError(str(error).replace("--data", f"--val-data {data.val_source}")) from error
            console.info(f"the val images of {data.source} are not scored: {error}")
            val = None
    return DistillSplits(train, held_out, val, names, columns)


def augmentation_of(config: DistillConfig, size: tuple[int, int]) -> Augmentation:
    """Return the augmentation of training images to `size`, for teacher and student."""
    data = config.data
    return Augmentation(
        size,
        data.decode,
        config.mixup,
        crop=data.crop or "inception",
        crop_area=data.crop_area,
        resize_side=data.eval_resize,
        flip=bool(data.flip),
        jitter=data.jitter,
        noise=data.noise,
        noise_pairs=data.noise > 0,
        views=config.cache_teacher or 0,
    )


def has_labelled_val(source: ImageSource) -> bool:
    """Return whether data have validation images of their own, in folders of classes."""
    return not is_shards(source.location) and has_split(source, "val")
