"""Gradient norms layer by layer, of runs with ``log.layer_norms``: Figures 2 and 4 of arXiv 2302.01327."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from dpn_cli.config.training import NORM_AVERAGE_STEPS
from dpn_cli.report.content import Chart, LineChart, Series, mean_with_band
from dpn_cli.report.reading import RunRecord, is_number

NORM = "L2 norm of the gradient"


def layer_charts(networks: Mapping[str, Sequence[RunRecord]], prefix: str) -> list[Chart]:
    """Return the charts of networks whose runs logged norms of layers: over depth, and the embedding's over steps."""
    over_depth, over_steps = (
        [line for name, runs in networks.items() if (line := mean_with_band(name, list(map(series, runs)))).x]
        for series in (_over_depth, _over_steps)
    )
    charts: list[Chart] = []
    if over_depth:
        caption = (
            f"0 is the patch projection, then come the blocks. Mean over the last {NORM_AVERAGE_STEPS} steps, or "
            f"over all of "
            "a shorter training (arXiv 2302.01327, Figures 2 and 4)."
        )
        title = "Gradient norm over depth, before clipping"
        charts.append(LineChart(f"{prefix}layer_norms", title, "depth", NORM, over_depth, caption=caption))
    if over_steps:
        title = "Gradient norm of the patch projection, before clipping"
        charts.append(LineChart(f"{prefix}embedding_norm", title, "step", NORM, over_steps))
    return charts


def _norms(run: RunRecord) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield the last step, the number of averaged steps, and the finite mean norms by layer."""
    for record in run.records:
        if isinstance(norms := record.get("layer_norms"), dict):
            steps = record.get("layer_norms_steps", 1)
            count = float(steps) if is_number(steps) and steps > 0 else 1.0
            yield record["step"], count, {name: norm for name, norm in norms.items() if is_number(norm)}


def _over_depth(run: RunRecord) -> Series:
    """Return the mean over the last steps at each depth, each record weighted by its number of steps."""
    norms = list(_norms(run))
    first_step = norms[-1][0] - NORM_AVERAGE_STEPS if norms else 0
    norms_by_depth: dict[int, list[tuple[float, float]]] = {}
    for step, count, layer_norms in norms:
        for name, norm in layer_norms.items() if step > first_step else ():
            if (depth := _depth(name)) is not None:
                norms_by_depth.setdefault(depth, []).append((norm, count))
    depths = sorted(norms_by_depth)
    return Series(run.name, depths, [fmean(*zip(*norms_by_depth[depth], strict=True)) for depth in depths])


def _depth(layer: str) -> int | None:
    if layer == "embedding":
        return 0
    return int(layer[6:]) if layer.startswith("block ") and layer[6:].isdecimal() else None


def _over_steps(run: RunRecord) -> Series:
    points = [(step, norms["embedding"]) for step, _, norms in _norms(run) if "embedding" in norms]
    return Series(run.name, [step for step, _ in points], [norm for _, norm in points])
