"""Messages and progress on stderr, from rank 0; results as text on stdout.

Names of files, classes and tensors come from elsewhere: control characters in them are shown as escapes.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from statistics import fmean

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.table import Table

# Seconds between two lines of progress where stderr is not a terminal; more only if a step takes longer.
LINE_EVERY = 10.0
# Longest error in characters: it may quote input of any length.
LONGEST = 2000
# Bars of one character from low to high, and the number of them in a curve by the columns of a terminal.
BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = {80: 8, 110: 24}
# Characters between two columns of a table.
GAP = 2
# Takes the number of images finished since the last call.
OnProgress = Callable[[int], None]
# Control characters, line and direction marks, and lone surrogates (from names in an unknown encoding).
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Return text on one line with control characters escaped: ``\\x1b[31m`` for the code of red text."""
    return UNPRINTABLE.sub(_escape, str(text))


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    undecoded = 0xDC80 <= code <= 0xDCFF  # how Python keeps a byte that is not UTF-8
    return f"\\x{code - 0xDC00:02x}" if undecoded else match.group().encode("unicode_escape").decode()


def cell(text: object) -> str:
    """Return text for a table cell, with rich's markup escaped."""
    return escape(printable(text))


def wrap_name(text: str, separator: str, width: int) -> str:
    """Break a text behind separators into lines of at most `width` characters; a longer part stays whole."""
    lines = [""]
    for part in text.replace(separator, f"{separator}\n").splitlines():
        if lines[-1] and cell_len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def width_of(columns: Mapping[str, Sequence[str]]) -> int:
    """Return the width in characters of `print_columns` for columns by their heads."""
    lines = ([head, *(line for text in texts for line in text.splitlines())] for head, texts in columns.items())
    return sum(max(map(cell_len, column)) + GAP for column in lines) - GAP


def print_columns(columns: Mapping[str, Sequence[str]], right: Collection[str] = ()) -> None:
    """Print a table on stdout whose texts may have several lines and are never cut or broken, as names must not be."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for head in columns:
        table.add_column(head, justify="right" if head in right else "left", no_wrap=True)
    for texts in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, texts))
    console = RichConsole(highlight=False)
    console.width = max(console.width, width_of(columns))
    console.print(table)


def show(text: str) -> None:
    """Print lines of a result on stdout."""
    print("\n".join(printable(line) for line in text.split("\n")))


def show_error(error: object) -> None:
    """Print an error on one line on stderr; a very long one is cut in the middle."""
    text = printable(error)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
    RichConsole(stderr=True, soft_wrap=True, highlight=False).print("[bold red]error:[/]", end=" ")
    print(text, file=sys.stderr)


def count_noun(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is one: "1 step", "2 steps", "3 classes"."""
    plural = f"{noun}es" if noun.endswith(("s", "tch")) else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def gigabytes(count: float) -> str:
    """Return a number of bytes in GB, or in MB below one of them."""
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def sparkline(values: Iterable[float]) -> str:
    """Draw numbers as a row of blocks from the lowest to the highest."""
    numbers = list(values)
    low, height = min(numbers, default=0.0), max(numbers, default=0.0) - min(numbers, default=0.0)
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * (value - low) / height) if height else 0] for value in numbers)


def average_stretches(values: Sequence[float], most: int) -> list[float]:
    """Return the means of up to `most` stretches of numbers, equally long but for one number."""
    count = min(most, len(values))
    ends = [index * len(values) // count for index in range(count + 1)] if count else []
    return [fmean(values[start:end]) for start, end in pairwise(ends)]


def _points(width: int) -> int:
    return max((points for columns, points in CURVES.items() if columns <= width), default=0)


@dataclass(frozen=True)
class ProgressTick:
    """A training's progress after a step: the loss over this rank's rows, and the estimated seconds left.

    `logged` steps are those of the log, and of the curve on a terminal; their loss is the mean since the last of them.
    """

    step: int
    steps: int
    loss: float
    lr: float
    images_per_second: float
    wait_share: float
    seconds_left: float
    logged: bool = True

    def __str__(self) -> str:
        return f"{self.short} wait {self.wait_share:.1%}"

    @property
    def short(self) -> str:
        """The text without the fraction of waiting."""
        return (
            f"{self.step}/{self.steps} loss {self.loss:.3g} lr {self.lr:.2g} "
            f"ETA {timedelta(seconds=round(self.seconds_left))} {self.images_per_second:.1f} images/s"
        )


def ignore_progress(count: int) -> None:
    """Show nothing: the `OnProgress` of work that is part of something larger."""


_log_handlers: list[Callable[[str], None]] = []  # global, as stderr is; the innermost handler last


def print_message(text: str) -> None:
    """Print a line about work that takes long and has no console of its own; nothing outside `Console.capture_logs`."""
    if _log_handlers:
        _log_handlers[-1](text)


class Console:
    """Messages and progress on stderr; `clock` returns seconds."""

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        leads = int(os.environ.get("RANK", "0")) == 0
        self.rich = RichConsole(stderr=True, highlight=False, quiet=not leads, soft_wrap=True)
        self.quiet, self.clock = quiet, clock
        self.last_line_time = -math.inf  # time of the last line of progress, of any training
        self.has_bar = False  # whether a terminal shows a bar; it never shows two

    def info(self, text: str) -> None:
        """Print a line unless -q was given."""
        if not self.quiet:
            self.rich.print(cell(text))

    def warn(self, text: str) -> None:
        """Print a warning, even with -q."""
        self.rich.print(f"[yellow]warning:[/] {cell(text)}")

    @contextmanager
    def capture_logs(self) -> Iterator[None]:
        """Print the messages of `print_message` inside the block, unless -q was given."""
        _log_handlers.append(self.info)
        try:
            yield
        finally:
            _log_handlers.pop()

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[ProgressTick], None]]:
        """Show a training's progress: a bar on a terminal, elsewhere a line at the first step and every ten seconds.

        A terminal that shows Unicode has a curve of the loss since the command began, where there is room: means over
        equal numbers of logged steps, from the lowest to the highest of them. With room for little else, it is in place
        of the bar and the share of waiting. Yields a function that takes the `ProgressTick` of every step.
        """
        if self.quiet or self.rich.quiet:
            yield lambda tick: None
        elif self.rich.is_terminal:
            points = 0 if self.rich.options.ascii_only else _points(self.rich.width)
            losses, full = list[float](), points in (0, max(CURVES.values()))
            columns = (
                self._spinner(),  # keeps moving during an evaluation
                TextColumn("{task.description}"),
                *([BarColumn(bar_width=8)] if full else []),
                *([TextColumn("{task.fields[curve]}")] if points else []),
                TextColumn("{task.fields[tick]}"),
            )
            with self._bar(*columns) as bar:
                task = bar.add_task(label, total=None, tick="", curve="")

                def update(tick: ProgressTick) -> None:
                    description = str(tick) if full else tick.short
                    bar.update(task, completed=tick.step, total=tick.steps, tick=description)
                    if tick.logged:
                        losses.append(tick.loss)
                        bar.update(task, curve=sparkline(average_stretches(losses, points)))

                yield update
        else:
            last_time = self.clock()

            def line(tick: ProgressTick) -> None:
                nonlocal last_time
                now = self.clock()
                # The next step may take as long as this one, and would then be printed too late.
                if now + (now - last_time) - self.last_line_time > LINE_EVERY:
                    self.rich.print(escape(f"{label}: {tick}"))
                    self.last_line_time = now
                last_time = now

            yield line

    @contextmanager
    def counting(self, label: str, total: int) -> Iterator[OnProgress]:
        """Show the number of finished images of `total`: a bar on a terminal, elsewhere a line every ten seconds.

        Shows nothing next to the bar of a training. Yields a function that takes the number of newly finished images.
        """
        if self.quiet or self.rich.quiet or self.has_bar:
            yield ignore_progress
        elif self.rich.is_terminal:
            columns = (self._spinner(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            with self._bar(*columns) as bar:
                task = bar.add_task(escape(label), total=total)
                yield lambda count: bar.advance(task, count)
        else:
            finished_count, last_time = 0, self.clock()

            def line(count: int) -> None:
                nonlocal finished_count, last_time
                finished_count += count
                if self.clock() - last_time >= LINE_EVERY:
                    self.info(f"{label}: {finished_count} of {total} images")
                    last_time = self.clock()

            yield line

    @contextmanager
    def _bar(self, *columns: ProgressColumn) -> Iterator[Progress]:
        self.has_bar = True
        try:
            with Progress(*columns, console=self.rich, transient=True) as bar:
                yield bar
        finally:
            self.has_bar = False

    def _spinner(self) -> SpinnerColumn:
        return SpinnerColumn("line" if self.rich.options.ascii_only else "dots")
