"""Gradient norms layer by layer, of runs with ``log.layer_norms``: Figures 2 and 4 of arXiv 2302.01327."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from dpn_cli.report.content import Chart, Lines, Series
from dpn_cli.report.reading import OpenRun, is_number

# Steps at the end of a training over which the paper's figures take means.
LAST_STEPS = 1000
NORM = "L2 norm of the gradient"


def layer_charts(runs: Sequence[OpenRun], prefix: str) -> list[Chart]:
    """Return the charts of the runs that logged norms of layers: over depth, and the embedding's over steps."""
    over_depth = [one for run in runs if (one := _over_depth(run)).x]
    over_steps = [one for run in runs if (one := _over_steps(run)).x]
    charts: list[Chart] = []
    if over_depth:
        caption = (
            "0 is the patch projection, then come the blocks. Mean over the logged ones of the last "
            f"{LAST_STEPS} steps (arXiv 2302.01327, Figures 2 and 4)."
        )
        title = "Gradient norm over depth, before clipping"
        charts.append(Lines(f"{prefix}layer_norms", title, "depth", NORM, over_depth, caption=caption))
    if over_steps:
        title = "Gradient norm of the patch projection, before clipping"
        charts.append(Lines(f"{prefix}embedding_norm", title, "step", NORM, over_steps))
    return charts


def _norms(run: OpenRun) -> list[tuple[int, dict[str, float]]]:
    """Return the norms of layers with their steps, without those that are not finite numbers."""
    found = [(record["step"], record.get("layer_norms")) for record in run.records]
    return [
        (step, {name: norm for name, norm in norms.items() if is_number(norm)})
        for step, norms in found
        if isinstance(norms, dict)
    ]


def _over_depth(run: OpenRun) -> Series:
    norms = _norms(run)
    after = norms[-1][0] - LAST_STEPS if norms else 0
    last = [found for step, found in norms if step > after]
    depths = {"embedding": 0} | {name: int(name[6:]) for found in last for name in found if _is_block(name)}
    points = sorted(
        (depth, fmean(found[name] for found in last if name in found))
        for name, depth in depths.items()
        if any(name in found for found in last)
    )
    return Series(run.name, [depth for depth, _ in points], [norm for _, norm in points])


def _is_block(name: str) -> bool:
    return name.startswith("block ") and name[6:].isdecimal()


def _over_steps(run: OpenRun) -> Series:
    points = [(step, found["embedding"]) for step, found in _norms(run) if "embedding" in found]
    return Series(run.name, [step for step, _ in points], [norm for _, norm in points])
