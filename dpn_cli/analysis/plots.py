"""The page of `dpn inspect`: what was measured in one network or two, as charts and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from dpn_cli.analysis.first_norm import CHANNELS, REGIONS
from dpn_cli.analysis.projection import effective_rank
from dpn_cli.analysis.summary import InspectionSummary
from dpn_cli.report.content import (
    BarChart,
    Cell,
    Chart,
    LineChart,
    Map,
    Maps,
    PageSection,
    Part,
    Series,
    Table,
    TextBlock,
)

Floats = NDArray[np.float64]
PAPER = "arXiv 2302.01327"


def sections_of(networks: Sequence[InspectionSummary]) -> list[PageSection]:
    """Return the sections of the page; the networks stand side by side in each."""
    sections = [PageSection("Networks", [*_summary_text(networks), _facts(networks)])]
    makers: dict[str, Callable[[Sequence[InspectionSummary]], list[Part]]] = {
        "Scale and bias of the first norm": _first_norm,
        "Patch projection": _projection,
        "Position embeddings": _positions,
        "What the stem does to a patch": _probes,
        "Attention distance": _attention,
        "Length of the tokens": _lengths,
        "What explains the tokens": _explained_variance,
    }
    for title, make in makers.items():
        if parts := make(networks):
            sections.append(PageSection(title, parts))
    return sections


def _summary_text(networks: Sequence[InspectionSummary]) -> list[Part]:
    return [TextBlock(_prefix_network(one, line, networks)) for one in networks for line in one.left_out]


def _prefix_network(one: InspectionSummary, text: str, networks: Sequence[InspectionSummary]) -> str:
    """Return a text with the network's name before it where there are two."""
    return f"{one.name}: {text}" if len(networks) > 1 else text


def _title(one: InspectionSummary, text: str, networks: Sequence[InspectionSummary]) -> str:
    """Return a title, with the network's name before it where there are two."""
    return _prefix_network(one, text, networks) if len(networks) > 1 else text[0].upper() + text[1:]


def _chart_per_network(
    networks: Sequence[InspectionSummary], make: Callable[[InspectionSummary, str], Chart | None]
) -> list[Part]:
    """Return a chart per network; `make` is given what its name ends with."""
    endings = [f"_{number}" if len(networks) > 1 else "" for number in range(1, len(networks) + 1)]
    return [chart for one, ending in zip(networks, endings, strict=True) if (chart := make(one, ending))]


def _facts(networks: Sequence[InspectionSummary]) -> Table:
    rows: list[list[Cell]] = [[key, *(one.facts[key] for one in networks)] for key in networks[0].facts]
    return Table("Networks", ["", *(one.name for one in networks)], rows, name="networks")


def _first_norm(networks: Sequence[InspectionSummary]) -> list[Part]:
    parts: list[Part] = []
    for kind in ("scale", "bias"):

        def maps(one: InspectionSummary, ending: str, kind: str = kind) -> Maps | None:
            if kind not in one.maps:
                return None
            images = [Map(*pair) for pair in zip(CHANNELS, one.maps[kind].numpy(), strict=True)]
            title = _title(one, f"{kind} of the first norm", networks)
            caption = (
                f"One map per channel, a square for each pixel of a patch, with a colour scale of its own "
                f"({PAPER}, Figure 3)."
            )
            return Maps(f"first_norm_{kind}{ending}", title, kind, images, 3, caption=caption)

        parts += _chart_per_network(networks, maps)
    series = [
        Series(_prefix_network(one, channel, networks), described.radius, described.profile)
        for one in networks
        for channel, described in zip(CHANNELS, one.described.get("scale", ()), strict=False)
    ]
    if series:
        title = "Scale from the centre outwards"
        caption = "Mean over rings of one pixel around the middle of a patch."
        x, y = "distance from the patch's centre in pixels", "scale"
        parts.append(LineChart("first_norm_profile", title, x, y, series, caption=caption))
        parts.append(_regions(networks))
    return parts


def _regions(networks: Sequence[InspectionSummary]) -> Table:
    rows: list[list[Cell]] = [
        [
            _prefix_network(one, f"{kind}, {channel}", networks),
            *(described.means[region] for region in REGIONS),
            described.left_right,
            described.up_down,
        ]
        for one in networks
        for kind, described_maps in one.described.items()
        for channel, described in zip(CHANNELS, described_maps, strict=True)
    ]
    note = (
        "Means over the parts of a patch: corners are squares of an eighth of the side, edges the strips of that width "
        "between them, the centre is the middle square of a quarter of the side. Symmetry is the correlation of a map "
        "with its mirror image: 1 is symmetric, 0 unrelated; a constant map has none."
    )
    columns = ["", *REGIONS, "symmetry left-right", "symmetry up-down"]
    return Table("The first norm in numbers", columns, rows, note, digits=3, name="first norm")


def _projection(networks: Sequence[InspectionSummary]) -> list[Part]:
    def filters(one: InspectionSummary, ending: str) -> Chart:
        images = [
            Map(f"{number}: {share:.1%}", _as_image(pattern))
            for number, (pattern, share) in enumerate(
                zip(one.filters.patterns, one.filters.shares.tolist(), strict=True), 1
            )
        ]
        title = _title(one, "principal filters", networks)
        caption = (
            f"The first {len(images)} principal components of the patch projection's filters, the strongest first; "
            f"together {float(one.filters.shares.sum()):.0%} of their variance. Each has its own scale, grey is zero."
        )
        return Maps(f"filters{ending}", title, "filter", images, 7, caption=caption)

    series = []
    for one in networks:
        sets = {"": one.values} if one.values_alone is None else {"": one.values, "without scale": one.values_alone}
        for name, values in sets.items():
            visible_values = values[values > 1e-6 * values[0]].tolist()
            label = ", ".join(filter(None, (one.name if len(networks) > 1 else "", name))) or "projection"
            series.append(Series(label, range(1, len(visible_values) + 1), visible_values))
    caption = "With the scale of the first norm where there is one: both act as their product. Zeros are left out."
    spectrum = LineChart(
        "singular_values",
        "Singular values of the patch projection",
        "number",
        "singular value",
        series,
        log_y=True,
        caption=caption,
    )
    rows: list[list[Cell]] = [
        [one.name, effective_rank(one.values), float(one.values[0]), float(one.filters.shares[0]) * 100]
        for one in networks
    ]
    note = "The effective rank is exp(entropy) of the shares of the squared singular values: k for k equal ones."
    columns = ["", "effective rank", "largest singular value", "variance in the first filter in %"]
    return [*_chart_per_network(networks, filters), spectrum, Table("The projection in numbers", columns, rows, note)]


def _as_image(pattern: Tensor) -> Floats:
    """Return a filter (3, p, q) as colours (p, q, 3): zero is grey, the largest value is at an end."""
    largest = pattern.abs().max().clamp(min=torch.finfo(pattern.dtype).tiny)
    return rearrange(0.5 + pattern / (2 * largest), "c p q -> p q c").numpy()


def _positions(networks: Sequence[InspectionSummary]) -> list[Part]:
    networks = [one for one in networks if one.similarity is not None]
    if not networks:
        return []

    def maps(one: InspectionSummary, ending: str) -> Chart:
        similarity = one.similarity
        assert similarity is not None
        images = [
            Map(f"row {row + 1}, column {column + 1}", similarity.maps[i, j].numpy())
            for i, row in enumerate(similarity.rows)
            for j, column in enumerate(similarity.columns)
        ]
        caption = (
            "Each image is the grid of patches: how alike the positions are to the one where the image stands "
            f"({len(similarity.rows)} x {len(similarity.columns)} of them are shown)."
        )
        title, columns = _title(one, "similarity of position embeddings", networks), len(similarity.columns)
        name = f"positions{ending}"
        return Maps(name, title, "cosine similarity", images, columns, (-1.0, 1.0), caption=caption)

    series = [Series(one.name, one.similarity.distance, one.similarity.profile) for one in networks if one.similarity]
    profile = LineChart(
        "positions_profile",
        "Similarity over distance",
        "distance in patches",
        "mean cosine similarity",
        series,
        caption="Mean over all pairs of positions, in rings of one patch.",
    )
    return [*_chart_per_network(networks, maps), profile]


def _probes(networks: Sequence[InspectionSummary]) -> list[Part]:
    def images(one: InspectionSummary, ending: str) -> Chart:
        maps = [
            Map(probe.name, rearrange(probe.pixels, "c p q -> p q c").double().numpy() / 255) for probe in one.probes
        ]
        caption = "Patches as they are"
        if one.normalises_first:
            largest = one.probes[0].normalised.abs().max()
            maps += [Map("after first norm", _read_thumbnail(probe.normalised, largest)) for probe in one.probes]
            caption += "; below, what the first norm makes of them, all on the ordinary patch's scale"
        title = _title(one, "patches before and after the first norm", networks)
        return Maps(f"stem_patches{ending}", title, "pixel", maps, len(one.probes), caption=f"{caption}.")

    rows: list[list[Cell]] = [
        [
            _prefix_network(one, probe.name, networks),
            probe.contrast,
            probe.contrast_after,
            probe.length,
            probe.cosine,
            probe.change * 100,
        ]
        for one in networks
        for probe in one.probes
    ]
    note = (
        "Contrast is the standard deviation over pixels and channels in the network's input range, before and after "
        "the first norm. Length, cosine and change are those of the token after the stem, before positions; cosine and "
        "change (distance, relative to its length) compare it with the ordinary patch's. The ordinary patch is the one "
        "of median contrast in a few images; noise of one level is 0 or 1 grey level per pixel and channel."
    )
    columns = ["patch", "contrast", "after the first norm", "length", "cosine", "change in %"]
    return [
        *_chart_per_network(networks, images),
        Table("The stem on patches", columns, rows, note, digits=3, name="stem"),
    ]


def _read_thumbnail(values: Tensor, largest: Tensor) -> Floats:
    return rearrange((0.5 + values.double() / (2 * largest)).clamp(0, 1), "c p q -> p q c").numpy()


def _attention(networks: Sequence[InspectionSummary]) -> list[Part]:
    def heads(one: InspectionSummary, ending: str) -> Chart | None:
        if one.observed is None:
            return None
        x = [layer for layer, row in enumerate(one.observed.distances.tolist(), 1) for _ in row]
        caption = (
            f"One point per head, mean over {one.observed.images} images. A query's distance is the mean distance to "
            "the patches that it attends to, weighted by the attention after the softmax. The class token is left out, "
            "and what is left of each row is divided by its sum."
        )
        return LineChart(
            f"attention{ending}",
            _title(one, "mean attention distance of every head", networks),
            "block",
            "pixels",
            [Series("heads", x, one.observed.distances.flatten().tolist())],
            floor=("uniform attention", one.observed.uniform),
            joined=False,
            from_zero=True,
            caption=caption,
        )

    rows: list[list[Cell]] = [
        [_prefix_network(one, f"block {layer}", networks), min(row), fmean(row), max(row), one.observed.uniform]
        for one in networks
        if one.observed
        for layer, row in enumerate(one.observed.distances.tolist(), 1)
    ]
    table = Table("Distances in pixels", ["", "nearest head", "mean", "farthest head", "uniform"], rows, folded=True)
    return [*_chart_per_network(networks, heads), table] if rows else []


def _lengths(networks: Sequence[InspectionSummary]) -> list[Part]:
    recorded = [(one, one.observed.lengths) for one in networks if one.observed]
    if not recorded:
        return []
    series = []
    for one, lengths in recorded:
        positions = range(len(lengths))
        series.append(
            Series(_prefix_network(one, "patches", networks), positions, [summary.mean for summary in lengths])
        )
        series.append(
            Series(_prefix_network(one, "largest", networks), positions, [summary.largest for summary in lengths])
        )
        with_class = [(number, summary.class_token) for number, summary in enumerate(lengths) if summary.class_token]
        if with_class:
            numbers, values = zip(*with_class, strict=True)
            series.append(Series(_prefix_network(one, "class token", networks), numbers, values))
    caption = (
        "Lengths (L2 norms): mean and largest of the patch tokens, mean of the class token. Place 0 is after the stem, "
        "1 with positions, then one point per block, and last the final norm."
    )
    chart = LineChart(
        "token_lengths", "Length of the tokens through the network", "stage", "length", series, True, caption=caption
    )
    rows: list[list[Cell]] = [
        [
            _prefix_network(one, summary.stage, networks),
            summary.mean,
            summary.low,
            summary.high,
            summary.largest,
            summary.class_token,
        ]
        for one, lengths in recorded
        for summary in lengths
    ]
    columns = ["after", "mean", "5 %", "95 %", "largest", "class token"]
    return [chart, Table("Lengths in numbers", columns, rows, folded=True)]


def _explained_variance(networks: Sequence[InspectionSummary]) -> list[Part]:
    shares_by_network = {one.name: one.observed.shares for one in networks if one.observed}
    if not shares_by_network:
        return []
    names = {"brightness": "brightness", "contrast": "contrast", "both": "brightness and contrast"}
    series = {
        name: [None if (share := shares[key]) is None else 100 * share for key in names]
        for name, shares in shares_by_network.items()
    }
    caption = (
        "Share of the variance of the stem's tokens, before positions, that a least-squares fit on the brightness "
        "(mean) and the contrast (standard deviation) of their patches explains. Only what is linear in them counts."
    )
    return [
        BarChart("explained", "Variance explained", "% of the variance", list(names.values()), series, caption=caption)
    ]
