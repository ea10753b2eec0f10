"""Charts by matplotlib: their styles, an SVG inside the page, and a PNG file next to it.

The SVG takes its text colour from the page, for light and dark paper. Equal numbers give equal bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from functools import singledispatch
from itertools import zip_longest
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator
from rich.cells import cell_len, set_cell_size

from dpn_cli.report.confusions import MOST_NAMED
from dpn_cli.report.content import (
    BarChart,
    Chart,
    ConfusionChart,
    HeatMap,
    LineChart,
    Maps,
    Panel,
    Reliability,
    downsample,
)
from dpn_cli.run.console import printable

Values = np.ndarray[Any, np.dtype[np.float64]]
# The colours of Okabe and Ito, which colour-blind readers distinguish, without yellow and black; dashes distinguish
# further lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", ":", "-.")
# Lines and text: the page's own colour in the SVG. Nothing else has this colour.
INK = "#15181d"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.5,
    "image.cmap": "cividis",
    "svg.fonttype": "none",
    "svg.hashsalt": "dpn",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
}
# Inches; a chart of this width can be read on a phone.
WIDTH, HEIGHT = 4.7, 3.0
DPI = 160
# Classes of a confusion matrix up to which its numbers stand in it.
MOST_NUMBERS = 16
# Images of `Maps` above which they have no titles.
MOST_TITLES = 12
# Columns of a label; a wide character takes two. Longer names are cut in the middle, so that names that differ at one
# end stay different.
LONGEST_LABEL = 26
# Inches of the labels of a confusion matrix for which there is room anyway.
ROOM = 0.9


def draw(chart: Chart, prefix: str) -> tuple[str, bytes]:
    """Return a chart as an SVG element for an HTML page, whose ids begin with `prefix`, and as a PNG."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a name in a script that the font does not have
        figure = _figure(chart)
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", dpi=DPI, transparent=True, metadata={"Date": None, "Creator": None})
        figure.set_layout_engine("none")  # keeps the computed layout
        figure.savefig(png, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return _inline(svg.getvalue().decode("utf-8"), prefix), png.getvalue()


def _inline(svg: str, prefix: str) -> str:
    """Return a file of matplotlib's as an element: no namespaces, metadata or styles of its own, and ids of its own."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)
    assert box is not None
    width = float(box[1])
    css_class = ' class="wide"' if width > 72 * WIDTH + 20 else ""
    head = f'<svg{css_class} viewBox="0 0 {box[1]} {box[2]}" width="{width:.0f}pt" role="img"'
    used = set(re.findall(r'(?:"#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", body)
    body = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{prefix}-", body)
    return f"{head}>{body}".replace(INK, "currentColor")


def label(text: str) -> str:
    """Return a name of bounded length without control characters."""
    text = printable(text)
    half = LONGEST_LABEL // 2
    if cell_len(text) <= LONGEST_LABEL:
        return text
    start, end = set_cell_size(text, half - 1), set_cell_size(text[::-1], half)[::-1]
    return f"{start.rstrip()}…{end.lstrip()}"


@singledispatch
def _figure(chart: Chart) -> Figure:
    """Draw a chart of any kind."""
    raise TypeError(f"no drawing of {type(chart).__name__}")


def _canvas(width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots()


@_figure.register
def _lines(chart: LineChart) -> Figure:
    figure, axes = _canvas(height=HEIGHT + 0.17 * max(0, len(chart.series) - 1))
    for number, series in enumerate(chart.series):
        if not series.x:
            continue
        points, style = downsample(series) if chart.joined else series, _line(number)
        if len(points.x) > 100:
            style["linewidth"] = 1.1
        if not chart.joined:
            style |= {"linestyle": "none", "alpha": 0.75, "markeredgewidth": 0}
        marker = "o" if len(points.x) < 12 or not chart.joined else ""
        axes.plot(points.x, points.y, label=label(series.name), marker=marker, markersize=3.5, **style)
        if points.low:
            axes.fill_between(points.x, points.low, points.high, color=style["color"], alpha=0.2, linewidth=0)
    if chart.floor:
        axes.axhline(chart.floor[1], color=INK, linewidth=1, linestyle=(0, (2, 2)), label=label(chart.floor[0]))
    if chart.from_zero:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(_log_locator(*axes.get_ylim()))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, number: f"{value:g}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, number: f"{value:g}" if value < 1e6 else f"{value:.3g}"))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set(xlabel=printable(chart.x), ylabel=printable(chart.y))
    if len(chart.series) > 1 or chart.floor:
        figure.legend(loc="outside upper left", ncols=2)
    return figure


def _log_locator(low: float, high: float) -> Locator:
    """Return where a logarithmic axis has ticks: at 1, 2 and 5 of each decade, in a short range as a linear one has."""
    locator = LogLocator(subs=(1, 2, 5))
    ticks = [tick for tick in locator.tick_values(low, high) if low <= tick <= high]
    return locator if len(ticks) > 1 else MaxNLocator(4)


def _line(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


@_figure.register
def _bars(chart: BarChart) -> Figure:
    count = len(chart.series)
    base_names = [name for name in chart.series if name not in chart.paired_with]
    figure, axes = _canvas(height=0.9 + (0.1 + 0.11 * count) * len(chart.categories) + 0.1 * count)
    bar_height = 0.8 / count
    for number, (name, values) in enumerate(chart.series.items()):
        middle = np.arange(len(values)) + (number - (count - 1) / 2) * bar_height
        errors = chart.errors.get(name, [None] * len(values))
        rows_with_value = [row for row, value in enumerate(values) if value is not None]
        axes.barh(
            middle[rows_with_value],
            [values[row] or 0.0 for row in rows_with_value],
            bar_height * 0.92,
            color=COLOURS[base_names.index(chart.paired_with.get(name, name)) % len(COLOURS)],
            alpha=0.45 if name in chart.paired_with else 1.0,
            label=label(name),
            xerr=[errors[row] or 0.0 for row in rows_with_value] if any(errors) else None,
            error_kw={"ecolor": INK, "elinewidth": 0.9, "capsize": 1.5},
        )
    axes.set_yticks(range(len(chart.categories)), [label(name) for name in chart.categories])
    axes.set_ylim(len(chart.categories) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    if chart.differences:
        axes.axvline(0, color=INK, linewidth=0.8)
    else:
        axes.set_xlim(0, 100)
    axes.set_xlabel(printable(chart.value))
    if count > 1:
        figure.legend(loc="outside upper left", ncols=2)
    return figure


@_figure.register
def _heat(chart: HeatMap) -> Figure:
    per_row = min(len(chart.panels), 4)
    rows = -(-len(chart.panels) // per_row)
    most_columns = max(len(panel.columns) for panel in chart.panels)
    most_rows = max(len(panel.rows) for panel in chart.panels)
    names = max(cell_len(label(name)) for panel in chart.panels for name in panel.rows)
    size = (per_row * (0.4 + 0.07 * names + 0.42 * most_columns), rows * (0.62 + 0.25 * most_rows))
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(rows, per_row, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= len(chart.panels):
            axes.axis("off")
            continue
        _panel(axes, chart.panels[number], chart.digits)
        if number % per_row == 0:
            axes.set_ylabel(label(chart.row))
        if number + per_row >= len(chart.panels):
            axes.set_xlabel(label(chart.column))
    return figure


def _panel(axes: Axes, panel: Panel, digits: int) -> None:
    values = np.array([[np.nan if value is None else value for value in row] for row in panel.values])
    measured = values[~np.isnan(values)]
    low, high = (measured.min(), measured.max()) if len(measured) else (0.0, 1.0)
    axes.imshow(values, aspect="auto", vmin=low, vmax=max(high, low + 1e-9))
    axes.grid(visible=False)
    _numbers(axes, values, (low + high) / 2, f"{{:.{digits}f}}")
    for row in panel.marked:
        frame = Rectangle((-0.5, row - 0.5), len(panel.columns), 1, fill=False, edgecolor=COLOURS[1], linewidth=2.5)
        frame.set_clip_on(False)
        axes.add_patch(frame)
    axes.set_xticks(range(len(panel.columns)), [label(name) for name in panel.columns])
    axes.set_yticks(range(len(panel.rows)), [label(name) for name in panel.rows])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(label(panel.title), loc="left")


def _numbers(axes: Axes, values: Values, bright: float, form: str) -> None:
    """Write the numbers of a heat map into it, in black where they are above `bright`."""
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "#000000" if value > bright else "#ffffff"
            axes.text(column, row, form.format(value), ha="center", va="center", color=colour, fontsize=8)


@_figure.register
def _maps(chart: Maps) -> Figure:
    per_row = min(chart.across, len(chart.maps))
    row_count = -(-len(chart.maps) // per_row)
    titled = len(chart.maps) <= MOST_TITLES
    coloured = chart.maps[0].values.ndim == 3
    scaled = chart.limits is None and not coloured
    rows, columns = chart.maps[0].values.shape[:2]
    bar = 0.75 * bool(chart.limits)
    side = max(0.5, min(1.1, (WIDTH - bar) / per_row))
    title = 0.32 if titled else 0.0
    size = per_row * (side + 0.5 * scaled) + bar, row_count * (side * rows / columns + title)
    figure = Figure(size, layout="constrained")
    low, high = chart.limits or (None, None)
    for axes, chart_map in zip_longest(figure.subplots(row_count, per_row, squeeze=False).flat, chart.maps):
        axes.axis("off")
        if chart_map is None:
            continue
        image = axes.imshow(chart_map.values, vmin=low, vmax=high, interpolation="none")
        if titled:
            axes.set_title(textwrap.fill(label(chart_map.title), 13), fontsize=8)
        if scaled:
            figure.colorbar(image, ax=axes, shrink=0.8)
    if chart.limits:
        figure.colorbar(image, ax=figure.axes, label=printable(chart.value), shrink=0.6, aspect=30)
    return figure


@_figure.register
def _confusion(chart: ConfusionChart) -> Figure:
    counts = np.asarray(chart.counts, dtype=np.float64)
    totals = counts.sum(1, keepdims=True)
    shares = 100 * np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    if len(counts) > MOST_NAMED:
        return _draw_scatter(shares)
    names = [label(name) for name in chart.classes]
    label_width = max((TextPath((0, 0), name, size=8).get_extents().width / 72 for name in names if name), default=0.0)
    side = max(3.4, min(1.6 + 0.2 * len(counts), 8.0)) + max(0.0, label_width - ROOM)
    figure, axes = _canvas(side + 0.9, side)
    # Most pairs of many classes are rare: the root of the share makes them visible.
    numbered = len(names) <= MOST_NUMBERS
    image = axes.imshow(shares, norm=PowerNorm(1.0 if numbered else 0.5, 0, 100), interpolation="none")
    axes.grid(visible=False)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    if numbered:
        _numbers(axes, shares, 50.0, "{:.0f}")
    axes.set(xlabel="predicted class", ylabel="true class")
    figure.colorbar(image, ax=axes, label="% of the true class", shrink=0.8)
    return figure


def _draw_scatter(shares: Values) -> Figure:
    """Draw the confusions of many classes as points, whose area is the share of the true class."""
    figure, axes = _canvas(5.6, 5.9)
    for right, colour, text in ((True, COLOURS[0], "right"), (False, COLOURS[1], "taken for another class")):
        true, predicted = np.nonzero((shares > 0) & (np.eye(len(shares), dtype=bool) == right))
        area = 0.2 + 0.08 * shares[true, predicted]
        axes.scatter(predicted, true, area, color=colour, linewidths=0, rasterized=True, label=text)
    axes.set(xlim=(-1, len(shares)), ylim=(len(shares), -1), xlabel="predicted class", ylabel="true class")
    axes.set_aspect("equal")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    figure.legend(loc="outside upper left", ncols=2, markerscale=3)
    return figure


@_figure.register
def _reliability(chart: Reliability) -> Figure:
    figure = Figure((WIDTH, 4.2), layout="constrained")
    axes, count_axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    edges = 100 * np.asarray(chart.edges)
    bins = [row for row, images in enumerate(chart.images) if images]
    confidence = [100 * (chart.confidence[row] or 0.0) for row in bins]
    accuracy = [100 * (chart.accuracy[row] or 0.0) for row in bins]
    widths = 0.94 * np.diff(edges)
    axes.bar(edges[:-1][bins], accuracy, widths[bins], align="edge", color=COLOURS[5], label="accuracy")
    axes.plot([0, 100], [0, 100], color=INK, linewidth=1, linestyle="--", label="as sure as right")
    axes.plot(confidence, accuracy, "o", color=COLOURS[1], markersize=4, label="mean of a bin")
    axes.set(xlim=(0, 100), ylim=(0, 102), ylabel="accuracy in %")
    count_axes.bar(edges[:-1], chart.images, widths, align="edge", color=COLOURS[0])
    count_axes.set(xlabel="confidence in %", ylabel="images")
    count_axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return figure
