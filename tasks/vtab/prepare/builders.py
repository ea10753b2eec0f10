"""The examples of TensorFlow Datasets: the only module that imports it, with images as the bytes that it stores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dpn_cli.errors import DataError, DpnError
from tasks.vtab.prepare.sources import Example, Source, TfdsPart

# Default folder of TensorFlow Datasets.
DEFAULT_DIR = Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets"))
# Written last by TensorFlow Datasets when it prepares a data set.
WRITTEN = "dataset_info.json"


@dataclass(frozen=True)
class Split:
    """A split of a builder: the number of examples, and of their bytes as they are stored."""

    examples: int
    bytes: int


class Builder(Protocol):
    """A data set of one version, on this machine; `name` has the version: ``svhn_cropped:3.1.0``."""

    name: str
    splits: dict[str, Split]

    def examples(self, part: TfdsPart) -> Iterator[Example]:
        """Yield examples in the order in which they are stored; each one's image is the stored bytes."""


def library() -> Any:
    """Import TensorFlow Datasets, which leaves GPUs alone. Raises `DpnError` when it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before the import, which reads it
    try:
        import tensorflow
        import tensorflow_datasets
    except ImportError as error:
        missing = f"needs TensorFlow Datasets, and {error.name} is not installed"
        raise DpnError(f"dpn data prepare vtab: {missing}; pip install 'dpn-cli[prepare]'") from error
    tensorflow.config.set_visible_devices([], "GPU")
    return tensorflow_datasets


def find_prepared(source: Source, root: Path) -> Path | None:
    """Return the folder of a builder's newest fitting version that TensorFlow Datasets has prepared in `root`."""
    folders = {}
    for folder in (root / source.builder).glob("*"):
        numbers = tuple(map(int, folder.name.split("."))) if re.fullmatch(r"\d+\.\d+\.\d+", folder.name) else (0,)
        if numbers[0] in source.majors and (folder / WRITTEN).is_file():
            folders[numbers] = folder
    return folders[max(folders)] if folders else None


def missing_by_hand(source: Source, root: Path, manual: Path) -> str:
    """Say what has to be fetched by hand before a builder can be prepared; ``""`` when nothing has."""
    if find_prepared(source, root) or all((manual / name).exists() for name in source.needs):
        return ""
    return f"{source.builder} is not downloaded by itself: put {source.by_hand} {manual}"


def open_builder(source: Source, root: Path, manual: Path, download: bool) -> Builder:
    """Open a data set that is prepared in `root`; one that is not is downloaded and prepared there.

    `manual` holds what was fetched by hand. Raises `DataError` when the data set is not there and is not to be
    downloaded, or cannot be prepared.
    """
    tfds = library()
    if folder := find_prepared(source, root):
        return Prepared(tfds.builder_from_directory(folder), source.features)
    if missing := missing_by_hand(source, root, manual):
        raise DataError(missing)
    if not download:
        raise DataError(f"{source.builder}: not in {root}, which has to hold it with --no-download")
    try:
        builder = tfds.builder(f"{source.builder}:{max(source.majors)}.*.*", data_dir=root)
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(manual_dir=manual))
    except Exception as error:  # builders raise whatever their libraries do
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"{source.builder}: not prepared by TensorFlow Datasets ({reason})") from error
    return Prepared(builder, source.features)


class Prepared:
    """A `Builder` of TensorFlow Datasets; of its examples, image and `features` are read."""

    def __init__(self, builder: Any, features: Sequence[str]) -> None:
        self.builder, self.features = builder, ("image", *features)
        self.name = f"{builder.info.full_name.rpartition('/')[0]}:{builder.version}"
        self.splits = {name: Split(split.num_examples, split.num_bytes) for name, split in builder.info.splits.items()}

    def examples(self, part: TfdsPart) -> Iterator[Example]:
        """Yield examples in the order in which they are stored; each one's image is the stored bytes."""
        tfds = library()
        examples = self.builder.as_dataset(
            split=str(part),
            decoders=tfds.decode.PartialDecoding(
                dict.fromkeys(self.features, True), decoders={"image": tfds.decode.SkipDecoding()}
            ),
            shuffle_files=False,
            # One file after the other: the default reads several by turns.
            read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
        )
        yield from tfds.as_numpy(examples)
