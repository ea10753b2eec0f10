"""What a person sees while a run goes on: stderr only, rank 0 only. Results go to stdout and not through here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

# Seconds between two lines of progress where stderr is no terminal.
LINE_EVERY = 10.0


@dataclass(frozen=True)
class Tick:
    """The state of a training after a step, for display."""

    step: int
    steps: int
    loss: float
    lr: float
    images_per_second: float
    wait_share: float

    def __str__(self) -> str:
        return (
            f"{self.step}/{self.steps} loss {self.loss:.3g} lr {self.lr:.2g} "
            f"{self.images_per_second:.0f} images/s wait {self.wait_share:.1%}"
        )


class Console:
    """Messages and progress on stderr."""

    def __init__(self, *, quiet: bool = False) -> None:
        leads = int(os.environ.get("RANK", "0")) == 0
        self.rich = RichConsole(stderr=True, highlight=False, quiet=not leads, soft_wrap=True)
        self.quiet = quiet

    def info(self, text: str) -> None:
        """Print a line unless -q was given."""
        if not self.quiet:
            self.rich.print(escape(text))

    def warn(self, text: str) -> None:
        """Print a warning, -q or not."""
        self.rich.print(f"[yellow]warning:[/] {escape(text)}")

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[Tick], None]]:
        """Show a training's progress: a bar on a terminal, elsewhere a line every ten seconds."""
        if self.quiet or self.rich.quiet:
            yield lambda tick: None
        elif self.rich.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=8),
                TextColumn("{task.fields[tick]}"),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self.rich, transient=True) as bar:
                task = bar.add_task(label, total=None, tick="")
                yield lambda tick: bar.update(task, completed=tick.step, total=tick.steps, tick=str(tick))
        else:
            shown = time.monotonic()

            def line(tick: Tick) -> None:
                nonlocal shown
                if time.monotonic() - shown >= LINE_EVERY:
                    shown = time.monotonic()
                    self.rich.print(escape(f"{label}: {tick}"))

            yield line
