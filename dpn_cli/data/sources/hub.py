"""Images of Hugging Face data sets, from the hub or a local folder of parquet files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from dpn_cli.data.decode import file_size, open_image
from dpn_cli.data.sources.base import Images, find_split_name
from dpn_cli.errors import DataError, ImageError
from dpn_cli.weights.hub import hub_is_offline


class HubImages(Images):
    """The image column of a split of a Hugging Face data set (hub name or local folder).

    Raises `DataError` when the data set cannot be loaded, has no such split, or does not have exactly one image column.
    """

    def __init__(self, name: str, config: str, split: str, image: str | None, alone: bool) -> None:
        self.location = f"hf:{name} ({config}), split {split}"
        splits = load_hub(name, config, alone)
        if split not in splits:
            raise DataError(f"{self.location}: missing; the data set has {', '.join(sorted(splits))}")
        rows = splits[split]
        self.image = self.column(rows, image, "image", ("Image",))
        import datasets
        import pyarrow.compute

        self.rows = rows
        for name, feature in rows.features.items():  # all image columns: a row is read with all of them
            if name == self.image or isinstance(feature, datasets.Image):
                self.rows = self.rows.cast_column(name, datasets.Image(decode=False))
        column = self.rows.data.column(self.image)
        sizes = pyarrow.compute.binary_length(pyarrow.compute.struct_field(column, "bytes")).to_pylist()
        files = pyarrow.compute.struct_field(column, "path").to_pylist()
        self.sizes: Sequence[int] = [
            file_size(Path(file or "")) if size is None else size for size, file in zip(sizes, files, strict=True)
        ]
        self.files: Sequence[str | None] = [  # for images that are not stored in the data set itself
            file if size is None else None for size, file in zip(sizes, files, strict=True)
        ]

    def column(self, rows: Any, column_name: str | None, kind: str, types: tuple[str, ...]) -> str:
        """Return the named column, or the only one of a kind. Raises `DataError` naming the columns."""
        if column_name is not None and column_name in rows.column_names:
            return column_name
        candidates = [name for name, feature in rows.features.items() if type(feature).__name__ in types]
        if not candidates and kind in rows.column_names:
            candidates = [kind]
        if column_name is not None or len(candidates) != 1:
            raise DataError(
                f"{self.location}: which column holds the {kind}? The columns are "
                f"{', '.join(rows.column_names)}; name one with --set data.{kind}_column=NAME"
            )
        return str(candidates[0])

    def locate(self, index: int) -> str:
        """Name the data set and the row."""
        return f"{self.location}, row {index}"

    def open(self, index: int) -> Image.Image:
        """Open an image, not decoded yet."""
        location = self.locate(index)
        return open_image(
            get_image_file(self.rows[index][self.image], location), location, self.reading, self.sizes[index]
        )


class HubSplit(HubImages):
    """A split of a Hugging Face data set with an image and a label column.

    Raises `DataError` as `HubImages` does, and for labels that are not class numbers.
    """

    def __init__(self, name: str, config: str, split: str, image: str | None, label: str | None, alone: bool) -> None:
        super().__init__(name, config, split, image, alone)
        self.label = self.column(self.rows, label, "label", ("ClassLabel",))
        self.classes: tuple[str, ...] = tuple(getattr(self.rows.features[self.label], "names", None) or ())
        self.labels: Sequence[int] = [self._class(index, value) for index, value in enumerate(self.rows[self.label])]

    def _class(self, index: int, value: object) -> int:
        if not isinstance(value, int):
            raise DataError(
                f"{self.locate(index)}: label {value!r} is not a class number; name another column with "
                "--set data.label_column=NAME"
            )
        return value


class UnlabelledHubImages(HubImages):
    """A split of a hub data set whose labels, if there are any, are left alone; every label is zero."""

    def __init__(self, name: str, config: str, split: str, image: str | None) -> None:
        super().__init__(name, config, split, image, alone=True)
        self.labels: Sequence[int] = [0] * len(self.sizes)


def get_image_file(value: Any, location: str) -> Path | io.BytesIO:
    """Return the image in a row of a hub data set, stored as bytes or a file name. Raises `ImageError`."""
    if value is None or (value["bytes"] is None and value["path"] is None):
        raise ImageError(f"{location}: empty; every row needs its image")
    return Path(value["path"]) if value["bytes"] is None else io.BytesIO(value["bytes"])


@cache
def load_hub(name: str, config: str, alone: bool) -> Any:
    """Return the splits of a hub data set's configuration; with `alone`, a single one may have another name.

    Raises `DataError` when it cannot be loaded or has no such configuration.
    """
    hub_is_offline()  # before the import, which reads it
    import datasets

    try:
        configs = datasets.get_dataset_config_names(name)
        chosen = config if config in configs else configs[0] if alone and len(configs) == 1 else None
        if chosen is not None:
            return datasets.load_dataset(name, chosen)
    except (OSError, ValueError, RuntimeError, IndexError) as error:  # the latter for an empty name
        raise DataError(
            f"--data hf:{name}: not loaded ({str(error).splitlines()[0][:160]}). On a machine with a "
            f"network: 'hf download --repo-type dataset {name}', then copy the hub cache here, or pass "
            "a local folder of parquet files as hf:FOLDER"
        ) from error
    raise DataError(
        f"--data hf:{name}: no configuration {config!r}; it has {', '.join(configs)}. "
        "VTAB needs one per task (--tasks chooses); elsewhere write hf:NAME:CONFIGURATION"
    )


def parse_hub_source(location: str) -> tuple[str, str]:
    """Split ``hf:NAME[:CONFIGURATION]`` into its two parts."""
    name, _, config = location.removeprefix("hf:").partition(":")
    return name, config or "default"


def find_hub_split(location: str, split: str) -> str | None:
    """Return the name of a hub data set's ``train``, ``val`` or ``test`` split, or None when it has none."""
    return find_split_name(split, load_hub(*parse_hub_source(location), True))
