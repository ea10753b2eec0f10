"""Predictions for image files: each file is read once, and unreadable ones are reported.

A table has a row for every image. A page has thumbnails of a bounded number of images, evenly spread over all of
them, so that it can be sent to somebody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpn_cli.config.schema import PredictionFiles
from dpn_cli.data.decode import Pixels, ReadOptions, read_pixels
from dpn_cli.data.pixels import count_readers
from dpn_cli.data.thread_loader import ThreadedDataset
from dpn_cli.data.workers import open_loader
from dpn_cli.errors import DataError, DpnError
from dpn_cli.report.content import Cell, Gallery, PageImage, PageSection, Part, Table, TextBlock
from dpn_cli.report.html import render
from dpn_cli.report.tables import as_csv, flatten
from dpn_cli.report.thumbnails import thumbnail
from dpn_cli.run import signals
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.files import real_path, replace_text

# Thumbnails of a page: with at most 11 kB each as text, they are below 4.5 MB. Unreadable images that it names.
MOST_SHOWN, MOST_NAMED = 400, 50

Json = dict[str, Any]


@dataclass(frozen=True)
class Read:
    """An image: its index, its file, the result of `prepare`, and its thumbnail if the page shows it."""

    index: int
    path: Path
    prepared: Any
    small: bytes | None = None


Item = Read | tuple[Path, DataError]


class _Files(ThreadedDataset[Item]):
    def __init__(
        self, paths: Sequence[Path], reading: ReadOptions, prepare: Callable[[Pixels], Any], small: frozenset[int]
    ) -> None:
        self.paths, self.reading, self.prepare, self.small = paths, reading, prepare, small

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Item:
        path = self.paths[index]
        try:
            pixels = read_pixels(path, str(path), self.reading)
        except DataError as error:
            return path, error  # raised in a worker, it would come back wrapped in the worker's traceback
        return Read(index, path, self.prepare(pixels), thumbnail(pixels) if index in self.small else None)


def read_files(
    paths: Sequence[Path],
    reading: ReadOptions,
    prepare: Callable[[Pixels], Any],
    *,
    batch_size: int,
    workers: int | Literal["auto"],
    small: frozenset[int] = frozenset(),
) -> Generator[list[Item], None, None]:
    """Yield image files in order, `batch_size` at a time; unreadable ones as (path, error).

    `prepare` maps decoded pixels (h, w, 3) to the yielded value; indices in `small` get a thumbnail. Raises
    `StoppedError` when a signal asks to stop, and `WorkerError` when a process that reads dies.
    """
    files = _Files(paths, reading, prepare, small)
    count = count_readers(workers, len(paths))
    with open_loader(files, count, batch_size=batch_size, collate_fn=list) as batches:
        for batch in batches:
            signals.check_here()
            yield batch


def spread(count: int, most: int) -> frozenset[int]:
    """Return up to `most` of the numbers below `count`, evenly spread."""
    return frozenset(range(count)) if count <= most else frozenset(number * count // most for number in range(most))


class Predictions:
    """Predictions for images, in their order; see the module.

    Args:
        paths: the image files.
        written: the files to write.
        console: for progress and the names of unreadable images.
        most: most images on the page.

    Raises:
        DpnError: a file cannot be written, or is one of the images, or is to be written twice.
    """

    def __init__(
        self, paths: Sequence[Path], options: PredictionFiles, console: Console, most: int = MOST_SHOWN
    ) -> None:
        check_written({"--csv": options.csv, "--html": options.html}, paths)
        self.paths, self.written, self.console = paths, options, console
        self.shown = spread(len(paths), most) if options.html else frozenset()
        self.results: list[Json] = []
        self.images: list[tuple[bytes, Json]] = []
        self.unreadable: list[Path] = []

    def read(
        self,
        reading: ReadOptions,
        prepare: Callable[[Pixels], Any],
        *,
        batch_size: int,
        workers: int | Literal["auto"],
        label: str,
        small: bool = True,
    ) -> Generator[list[Read], None, None]:
        """Yield the readable images, up to `batch_size` at a time, and name the others; see `read_files`.

        With `small`, images on the page have a thumbnail. `label` names the progress. Raises `DataError` when
        none is readable.
        """
        thumbnail_rows = self.shown if small else frozenset[int]()
        batches = read_files(self.paths, reading, prepare, batch_size=batch_size, workers=workers, small=thumbnail_rows)
        with self.console.counting(label, len(self.paths)) as on_progress:
            for batch in batches:
                for item in batch:
                    if not isinstance(item, Read):
                        self.leave_out(*item)
                if readable := [item for item in batch if isinstance(item, Read)]:
                    yield readable
                on_progress(len(batch))
        self.check_any()

    def check_any(self) -> None:
        """Raise `DataError` when no image is readable."""
        if len(self.unreadable) == len(self.paths):
            raise DataError(f"none of the {len(self.paths)} images can be read; they are named above")

    def leave_out(self, path: Path, error: DataError) -> None:
        """Name an unreadable image, and note it. Raises `DataError` when there is no other one."""
        if len(self.paths) == 1:
            raise DataError(str(error))
        self.console.warn(str(error))
        self.unreadable.append(path)

    def add(self, result: Json, small: bytes | None) -> None:
        """Add the result of an image, and its thumbnail if the page shows it."""
        self.results.append(result)
        if small is not None:
            self.images.append((small, result))

    def write(
        self,
        command: str,
        run: str,
        summary: Sequence[Part],
        lines: Callable[[Json], Sequence[str]],
        across: int = 0,
        sections: Sequence[PageSection] = (),
    ) -> None:
        """Write the files that were asked for.

        Args:
            command: the command's name, for the title of the page.
            run: the network's location.
            summary: parts of the page about all images.
            lines: returns the lines below the thumbnail of a result.
            across: thumbnails per row; 0 for as many as fit.
            sections: more sections at the end of the page.

        Raises:
            SaveError: a file cannot be written.
        """
        if self.written.csv:
            replace_text(self.written.csv, as_csv(flatten(self.results)))
        if self.written.html:
            images = [PageImage(small, lines(result)) for small, result in self.images]
            gallery = Gallery(self._caption(), images, across)
            facts: list[tuple[str, Cell]] = [("network", run), ("images", len(self.results))]
            section = PageSection("Predictions", [*self.left_out(), Table("", ("", ""), facts), *summary])
            title = f"{command}: {count_noun(len(self.results), 'image')}"
            write_gallery(self.written.html, title, section, gallery, sections)

    def _caption(self) -> str:
        if len(self.images) == len(self.results):
            return "All of them" if len(self.results) > 1 else "The image"
        return (
            f"{len(self.images)} of {len(self.results)}, evenly spread over their order. The others are left out of "
            "this page; --csv writes all predictions to a table"
        )

    def left_out(self) -> list[Part]:
        """Return the warning about unreadable images."""
        if not self.unreadable:
            return []
        names = ", ".join(map(str, self.unreadable[:MOST_NAMED]))
        more = f" and {len(self.unreadable) - MOST_NAMED} more" if len(self.unreadable) > MOST_NAMED else ""
        return [TextBlock(f"Not readable and left out: {names}{more}.", warning=True)]

    def problem(self, skip_bad: bool) -> DataError | None:
        """Return the error with which the command ends after all: for unreadable images, unless they are skipped."""
        if skip_bad or not self.unreadable:
            return None
        images = count_noun(len(self.paths), "image")
        return DataError(
            f"unreadable: {len(self.unreadable)} of {images}, named above; the others are done. "
            "Fetch the missing ones again, or accept this with --skip-bad-images"
        )


def write_gallery(
    file: Path, title: str, section: PageSection, gallery: Gallery, sections: Sequence[PageSection] = ()
) -> None:
    """Write a page of images below a section about all of them, and more sections. Raises `SaveError`."""
    replace_text(file, render(title, [section, PageSection("Images", [gallery]), *sections], {}))


def thumbnails(
    paths: Sequence[Path], reading: ReadOptions, workers: int | Literal["auto"]
) -> Iterator[tuple[int, bytes]]:
    """Yield the thumbnails of up to `MOST_SHOWN` image files with their indices; not those of unreadable ones."""
    first_paths = paths[:MOST_SHOWN]
    small = frozenset(range(len(first_paths)))
    with closing(
        read_files(first_paths, reading, _discard_pixels, batch_size=1, workers=workers, small=small)
    ) as batches:
        for item in (item for batch in batches for item in batch if isinstance(item, Read)):
            assert item.small is not None
            yield item.index, item.small


def _discard_pixels(pixels: Pixels) -> None:
    pass


def check_written(files: Mapping[str, Path | None], images: Iterable[Path]) -> None:
    """Raise `DpnError` where a file that an option names cannot be written, before the work for it.

    Neither can one of the images that are read, nor the file of another option. `files` are by their options.
    """
    used_paths = {real_path(image): f"one of the images, {image}" for image in images}
    for option, file in files.items():
        if file is None:
            continue
        if file.is_dir() or any(parent.is_file() for parent in file.parents):
            raise DpnError(f"{option} {file}: a folder, or inside a file; name a file to write")
        if owner := used_paths.get(real_path(file)):
            raise DpnError(f"{option} {file}: would be written over {owner}; name another file")
        used_paths[real_path(file)] = f"the file of {option}"


def tally(title: str, noun: str, names: Iterable[str]) -> Table:
    """Return a table of how often each name was predicted, the most frequent first."""
    counts = Counter(names)
    rows: list[Sequence[Cell]] = [
        (name, count, 100 * count / counts.total()) for name, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    return Table(title, (noun, "images", "% of the images"), rows, digits=1, folded=len(rows) > 12)
