"""Proves `dpn data prepare vtab` against TensorFlow Datasets: all 16 builders, without any download.

    pip install '.[prepare]'
    python benchmarks/prepare_vtab.py [BUILDER ...]

For every builder, its own features are filled with random values, twice: by TensorFlow Datasets' mock of the builder,
with the official rows; and as a data set on disk that TensorFlow Datasets itself writes in several files, of which the
rows, the labels and the pixels that the files here have are compared with what its usual reader gives. A line for each
task; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dpn_cli.data.decode import ReadOptions
from dpn_cli.data.sources.folder import FileList
from dpn_cli.run.console import Console
from tasks.vtab.config import VtabData
from tasks.vtab.data import open_splits
from tasks.vtab.prepare.builders import Prepared, Split, library, open_builder
from tasks.vtab.prepare.sources import SOURCES, Example, Source, TfdsPart
from tasks.vtab.prepare.write import prepare

# Images in every test split: the official ones have up to 73,728.
TEST = 20
# Files that a split on disk is written in, and its size where val200 and the test images lie behind the first 800.
FILES, TRAIN_SIZE, HELD_SIZE = 4, 1030, 230


def generators() -> Any:
    """Return the class whose objects make random examples for a mock."""
    return importlib.import_module("tensorflow_datasets.testing.mocking").RandomFakeGenerator


@contextlib.contextmanager
def mended(tfds: Any) -> Iterator[None]:
    """Let the random values of TensorFlow Datasets be valid: objects with all their parts, boxes with their corners.

    As it is, the mock gives the parts of a scene's objects different numbers of objects.
    """
    fake = generators()
    begin, value = fake.__init__, fake._generate_random_obj

    def ten_of_everything(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **{**options, "constant_dynamic_shape": True})

    def in_order(self: Any, feature: Any, *rest: Any) -> Any:
        found = value(self, feature, *rest)
        return np.sort(found) if isinstance(feature, tfds.features.BBoxFeature) else found

    with (
        mock.patch.object(fake, "__init__", ten_of_everything),
        mock.patch.object(fake, "_generate_random_obj", in_order),
    ):
        yield


class Mocked(Prepared):
    """A builder whose splits have the sizes of a source, and whose examples are the mock's."""

    def __init__(self, source: Source, tfds: Any) -> None:
        with tfds.testing.mock_data():
            super().__init__(tfds.builder(f"{source.builder}:{max(source.majors)}.*.*"), source.features)
        self.splits = {name: Split(size, size) for name, size in source.sizes.items()}

    def examples(self, part: TfdsPart) -> Iterator[Example]:
        """Yield as many examples as the part has; the mock knows no rows."""
        with library().testing.mock_data(num_examples=part.stop - part.start):
            yield from super().examples(part)


def mocked(source: Source, tfds: Any, out: Path, console: Console) -> None:
    """Write the tasks of the mock's examples, with the official rows but for the end of the test split."""
    name, start = source.test
    source = replace(source, sizes={**source.sizes, name: start + TEST})
    with mended(tfds):
        prepare(source, source.tasks, Mocked(source, tfds), out, console, {})
    for task in source.tasks:
        splits = open_splits(VtabData(source=str(out)), task)
        for split in splits.values():
            for row in range(len(split.labels)):
                split.pixels(row)
        assert len(splits["test"].labels) == TEST, task


def small(source: Source) -> Source:
    """Return a source of small splits."""
    (val, _), (test, _) = source.val, source.test
    return replace(
        source,
        sizes={name: TRAIN_SIZE if name == "train" else HELD_SIZE for name in source.sizes},
        val=(val, 805 if val == "train" else 3),
        test=(test, TRAIN_SIZE - TEST if test == "train" else HELD_SIZE - TEST),
    )


def write_data_set(source: Source, tfds: Any, root: Path) -> None:
    """Let TensorFlow Datasets write a data set with the features of a builder, and random values, in several files."""
    real = type(tfds.builder(source.builder, data_dir=root))

    def split_generators(self: Any, manager: Any) -> dict[str, Any]:
        return {name: examples(self, seed, size) for seed, (name, size) in enumerate(source.sizes.items())}

    def examples(self: Any, seed: int, size: int) -> Iterator[tuple[int, Any]]:
        generator = generators()(self.info.features, size, seed=seed)
        for row, example in enumerate(generator):
            if source.white == 1:
                example["image"] = example["image"] % 2
            yield row, example

    with tfds.core.registered.skip_registration():
        fake = type(real.__name__, (real,), {"name": real.name, "_split_generators": split_generators})
    fake.pkg_dir_path = getattr(real, "pkg_dir_path", None)
    _, _, config = source.builder.partition("/")
    builder = fake(data_dir=root, **({"config": config} if config else {}))
    manual = root / "manual"
    manual.mkdir(parents=True)
    with mended(tfds):
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(
                manual_dir=manual, num_shards=FILES, compute_stats=tfds.download.ComputeStatsMode.SKIP
            )
        )


def on_disk(source: Source, tfds: Any, root: Path, out: Path, console: Console) -> None:
    """Compare tasks made of a data set on disk with what the usual reader gives for it."""
    source = small(source)
    write_data_set(source, tfds, root)
    builder = open_builder(source, root, root / "manual", download=False)
    prepare(source, source.tasks, builder, out, console, {})
    assert isinstance(builder, Prepared)
    read = tfds.ReadConfig(interleave_cycle_length=1)
    whole = {
        name: list(tfds.as_numpy(builder.builder.as_dataset(split=name, shuffle_files=False, read_config=read)))
        for name in source.sizes
    }
    for task in source.tasks:
        for split, part in source.parts(source.sizes).items():
            listed = FileList(out / task.folder, split)
            listed.reading = ReadOptions("exact")
            expected = whole[part.split][part.start : part.stop]
            assert listed.labels == [source.labels[task.name](example) for example in expected], (task, split)
            for row, example in enumerate(expected):
                pixels = np.broadcast_to(example["image"] * (255 // source.white), (*example["image"].shape[:2], 3))
                assert np.array_equal(listed.pixels(row), pixels), (task, split, row)


def main() -> None:
    """Try all builders, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builders", nargs="*", help="names of builders (default: all)")
    asked = parser.parse_args()
    tfds, console, failed = library(), Console(quiet=True), 0
    for source in SOURCES:
        if asked.builders and source.builder not in asked.builders:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            for what in ("mock", "on disk"):
                out = Path(scratch) / what
                try:
                    if what == "mock":
                        mocked(source, tfds, out, console)
                    else:
                        on_disk(source, tfds, Path(scratch) / "tfds", out, console)
                    said = "equal"
                except Exception as error:
                    failed += 1
                    said = f"{type(error).__name__}: {error}"
                print(
                    f"{what:8} {source.builder:45} {', '.join(task.name for task in source.tasks)}: {said}", flush=True
                )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
