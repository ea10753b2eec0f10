"""Image data of a classifier's training: the source and the splits that a config names."""

from __future__ import annotations

from dpn_cli.data.decode import ReadOptions, decoder_of
from dpn_cli.data.image_source import ImageSource
from dpn_cli.data.splits import ClassData, open_class_data, open_tuning_data
from tasks.classify.config import SupervisedConfig


def open_data(config: SupervisedConfig) -> ClassData:
    """Open the config's training images, minival and validation images. Raises `DataError`."""
    return open_class_data(source_of(config), config.data.minival, chooses=config.select == "best")


def source_of(config: SupervisedConfig) -> ImageSource:
    """Return the source of the config's images."""
    data = config.data
    return ImageSource(
        data.source or "demo",
        data.val_source,
        data.val_fraction,
        data.image_column,
        data.label_column,
        ReadOptions(decoder_of(data.decode), data.max_pixels, exif=data.exif),
    )


def open_tuning_splits(config: SupervisedConfig) -> ClassData:
    """Open the three splits of a sweep: choose on `minival`, test on `val`."""
    return open_tuning_data(source_of(config))
