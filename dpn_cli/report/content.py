"""Content of a page: sections of text, tables, charts and images. Imports neither matplotlib nor Jinja2.

A chart holds its numbers: `dpn_cli.report.charts` draws them, and `rows` returns them for its CSV file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAGE = "report.html"
# Points of a line above which it is drawn as means over stretches of it.
MOST_POINTS = 400
Cell = str | float | int | None
Rows = list[list[Cell]]


@dataclass(frozen=True)
class TextBlock:
    """A paragraph; a warning stands out."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Table:
    """A table; floats are shown with `digits` decimals. Rows in `strong` are set apart, such as means.

    With a `name` it is also written as Markdown and LaTeX; `folded` hides it behind its title.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    digits: int = 2
    strong: frozenset[int] = frozenset()
    name: str = ""
    folded: bool = False


@dataclass(frozen=True)
class PageImage:
    """A small image as JPEG or PNG bytes, with lines of text below it."""

    data: bytes
    lines: Sequence[str]


@dataclass(frozen=True)
class Gallery:
    """Images in rows of `across` on every screen, by default as many as fit."""

    title: str
    images: Sequence[PageImage]
    across: int = 0


@dataclass(frozen=True)
class Legend:
    """Legend of a page: names, each with its colour as "#rrggbb"."""

    title: str
    colours: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Series:
    """One line of a chart: `y` over `x`. A band around it reaches from `low` to `high` where these are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def mean_with_band(name: str, lines: Sequence[Series]) -> Series:
    """Return the mean of lines at every x of any of them, in a band from the lowest to the highest."""
    if len(lines) == 1:
        return replace(lines[0], name=name)
    values_at: dict[float, list[float]] = {}
    for line in lines:
        for x, y in zip(line.x, line.y, strict=True):
            values_at.setdefault(x, []).append(y)
    values = [values_at[x] for x in sorted(values_at)]
    return Series(name, sorted(values_at), list(map(fmean, values)), list(map(min, values)), list(map(max, values)))


def downsample(series: Series, most: int = MOST_POINTS) -> Series:
    """Return a line of at most `most` points, each the mean over a stretch of it."""
    if len(series.x) <= most:
        return series
    bounds = [len(series.x) * part // most for part in range(most + 1)]
    stretches = [slice(*pair) for pair in pairwise(bounds)]
    lines = (series.x, series.y, series.low, series.high)
    return Series(series.name, *([fmean(line[stretch]) for stretch in stretches] if line else [] for line in lines))


@dataclass(frozen=True)
class Chart:
    """Base of the charts: `name` is the stem of its files, `caption` describes it."""

    name: str
    title: str
    caption: str = field(default="", kw_only=True)

    def rows(self) -> Rows:
        """Return the numbers that are drawn, with a header."""
        raise NotImplementedError


@dataclass(frozen=True)
class LineChart(Chart):
    """Lines over one axis; `x` and `y` name the axes with their units. `floor` is a level to compare with, by name.

    Points that are not `joined` stand alone: several may have the same x. `from_zero` begins the vertical axis at 0.
    """

    x: str
    y: str
    series: Sequence[Series]
    log_y: bool = False
    floor: tuple[str, float] | None = None
    joined: bool = True
    from_zero: bool = False

    def rows(self) -> Rows:
        """Return one row per point, with the ends of the band where a line has one."""
        if not any(series.low for series in self.series):
            points: Rows = [[line.name, x, y] for line in self.series for x, y in zip(line.x, line.y, strict=True)]
            return [["series", self.x, self.y], *points]
        rows: Rows = [["series", self.x, self.y, "lowest", "highest"]]
        for line in self.series:
            columns = zip(line.x, line.y, line.low or line.y, line.high or line.y, strict=True)
            rows += [[line.name, *row] for row in columns]
        return rows


@dataclass(frozen=True)
class BarChart(Chart):
    """Horizontal bars in percent, one per category and series; a missing value is None. `errors` are half-lengths.

    The axis goes from 0 to 100, that of `differences` as far as they go, to both sides.
    """

    value: str
    categories: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    errors: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    paired_with: Mapping[str, str] = field(default_factory=dict)
    """Series that are drawn in the lighter colour of another one, by their names."""
    differences: bool = False

    def rows(self) -> Rows:
        """Return one row per bar."""
        rows: Rows = [["series", "category", self.value, "error"]]
        for name, values in self.series.items():
            errors = self.errors.get(name, ())
            rows += [
                [name, *row] for row in zip_longest(self.categories, values, errors[: len(values)], fillvalue=None)
            ]
        return rows


@dataclass(frozen=True)
class Panel:
    """One heat map of `HeatMap`: numbers by row and column, None where not measured."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    marked: frozenset[int] = frozenset()
    """Rows with a frame around them."""


@dataclass(frozen=True)
class HeatMap(Chart):
    """Small heat maps with their numbers in them, of `digits` decimals, each with colours of its own.

    `row` and `column` name the axes.
    """

    row: str
    column: str
    value: str
    panels: Sequence[Panel]
    digits: int = 1

    def rows(self) -> Rows:
        """Return one row per cell."""
        rows: Rows = [["panel", self.row, self.column, self.value, "marked"]]
        for panel in self.panels:
            for number, (label, values) in enumerate(zip(panel.rows, panel.values, strict=True)):
                for column, value in zip(panel.columns, values, strict=True):
                    rows.append([panel.title, label, column, value, int(number in panel.marked)])
        return rows


@dataclass(frozen=True)
class Map:
    """One image of `Maps`: numbers (rows, columns), or colours (rows, columns, 3) as red, green, blue in 0 … 1."""

    title: str
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Maps(Chart):
    """Images with a colour for every number, `across` in a row; `value` names the numbers.

    Each has a scale of its own, unless `limits` are the ends of one scale for all. Titles of more than twelve are in
    the CSV file only.
    """

    value: str
    maps: Sequence[Map]
    across: int
    limits: tuple[float, float] | None = None

    def rows(self) -> Rows:
        """Return one row per number or colour."""
        coloured = self.maps[0].values.ndim == 3
        rows: Rows = [["map", "row", "column", *(("red", "green", "blue") if coloured else (self.value,))]]
        for each_map in self.maps:
            for row, line in enumerate(each_map.values.tolist()):
                for column, value in enumerate(line):
                    rows.append([each_map.title, row, column, *(value if coloured else [value])])
        return rows


@dataclass(frozen=True)
class ConfusionChart(Chart):
    """Counts of a `unit` by true and predicted class, (classes, classes), drawn as shares of the true class."""

    classes: Sequence[str]
    counts: Sequence[Sequence[int]]
    unit: str = "images"

    def rows(self) -> Rows:
        """Return one row per pair of classes that occurs, in the drawn order."""
        rows: Rows = [["true", "predicted", self.unit]]
        for true, counts in zip(self.classes, self.counts, strict=True):
            rows += [[true, name, count] for name, count in zip(self.classes, counts, strict=True) if count]
        return rows


@dataclass(frozen=True)
class Reliability(Chart):
    """Accuracy by confidence: edges (bins + 1) in 0 … 1, and of each bin images, mean confidence and accuracy."""

    edges: Sequence[float]
    images: Sequence[int]
    confidence: Sequence[float | None]
    accuracy: Sequence[float | None]

    def rows(self) -> Rows:
        """Return one row per bin."""
        rows: Rows = [["from", "to", "images", "confidence", "accuracy"]]
        bins = zip(self.edges[:-1], self.edges[1:], self.images, self.confidence, self.accuracy, strict=True)
        return rows + [list(row) for row in bins]


Part = TextBlock | Table | Gallery | Legend | Chart


@dataclass(frozen=True)
class PageSection:
    """A headed part of a page."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Findings:
    """Findings of a task in a run.

    Args:
        metric: the name of the score, in percent: "top-1".
        scores: by the part of the task ("" where it has one) and the seed.
        sections: sections of the page.
        watched: the metric of an evaluation during training, by its key in metrics.jsonl.
        warnings: warnings at the top of the page.
    """

    metric: str
    scores: Mapping[str, Mapping[int, float]]
    sections: Sequence[PageSection]
    watched: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
