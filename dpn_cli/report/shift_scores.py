"""Scores of networks under shifts of the data, and errors relative to a baseline (mCE of ImageNet-C)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from dpn_cli.config.shift_options import IMAGENET_C, SHIFTS, ShiftSection
from dpn_cli.data.decode import Pixels
from dpn_cli.report.content import Rows
from dpn_cli.report.tables import as_csv
from dpn_cli.report.thumbnails import thumbnail
from dpn_cli.run.files import replace_file, replace_text
from dpn_cli.sweep.score_names import score_name

# File of the scores.
SHIFTS_FILE = "shifts.csv"
# The row of unshifted images, and the folder of an image under every shift.
CLEAN, EXAMPLES = "clean", "shifts"
Metric = Literal["top1", "miou"]
Json = dict[str, Any]
# Scores a network in percent under a shift and a severity; the severity 0 leaves images as they are.
Score = Callable[[str, str, int], float]


def score_shifts(
    networks: Sequence[str], options: ShiftSection, score: Score, metric: Metric, side: int | None
) -> Json:
    """Score networks on the same shifted images, which are reduced to a shorter side of `side` pixels at most.

    Returns the scores in percent: ``clean``, ``scores`` by shift in the order of ``severities``, ``means``, and for a
    second network ``mce``, the errors of the first one relative to it.
    """
    results: dict[str, Json] = {}
    for network in networks:
        scores = {
            shift: [score(network, shift, severity) for severity in options.severities] for shift in options.names
        }
        results[network] = {
            "clean": score(network, options.names[0], 0),
            "scores": scores,
            "means": {shift: fmean(row) for shift, row in scores.items()},
        }
    first, *others = results.values()
    return {
        "metric": metric,
        "side": side,
        "seed": options.seed,
        "severities": list(options.severities),
        "networks": results,
        "mce": relative_errors(first["scores"], others[0]["scores"]) if others else None,
    }


def relative_errors(scores: Mapping[str, list[float]], baseline: Mapping[str, list[float]]) -> Json:
    """Return the corruption errors of ImageNet-C in percent, by shift, and their mean (``mce``).

    A corruption error is the sum of the errors over severities, divided by that of the baseline (arXiv 1903.12261,
    section 4.2). The mean is over ImageNet-C's corruptions alone, None without any; an error is None where the
    baseline has none.
    """
    errors = {
        name: 100 * sum(100 - score for score in row) / total
        if (total := sum(100 - score for score in baseline[name]))
        else None
        for name, row in scores.items()
    }
    corruptions = [error for name, error in errors.items() if name in IMAGENET_C and error is not None]
    return {"errors": errors, "mce": fmean(corruptions) if corruptions else None}


def save_shifts(folder: Path, shifts: Json, example: Callable[[str, int], Pixels]) -> None:
    """Write the scores as CSV, one row per network, shift and severity, and an image under every shift for a page.

    `example` returns the image under a shift and a severity; the highest severity is saved. Images of an earlier
    evaluation are deleted. Raises `SaveError`.
    """
    rows: Rows = [["network", "shift", "kind", "severity", shifts["metric"]]]
    for network, result in shifts["networks"].items():
        rows.append([network, CLEAN, "", 0, result["clean"]])
        rows += [
            [network, shift, SHIFTS[shift], severity, score]
            for shift, scores in result["scores"].items()
            for severity, score in zip(shifts["severities"], scores, strict=True)
        ]
    replace_text(folder / SHIFTS_FILE, as_csv(rows))
    for path in (folder / EXAMPLES).glob("*.jpg"):
        path.unlink()
    names = list(next(iter(shifts["networks"].values()))["scores"])
    for name, severity in {CLEAN: 0, **dict.fromkeys(names, shifts["severities"][-1])}.items():
        image = thumbnail(example(name if severity else names[0], severity))
        replace_file(folder / EXAMPLES / f"{name}.jpg", partial(Path.write_bytes, data=image))


def describe_shifts(result: Json) -> list[str]:
    """Return the scores of a result as lines of text: a table for each network, and the relative errors, if any."""
    shifts = result.get("shifts")
    if not shifts:
        return []
    metric, severities, lines = score_name(shifts["metric"]), shifts["severities"], []
    for network, result in shifts["networks"].items():
        lines.append(f"{network}: {metric} in % under shifts, by severity (clean {result['clean']:.2f})")
        header = "".join(f"{severity:>8}" for severity in severities)
        lines.append(f"  {'shift':<18}{header}{'mean':>8}")
        for shift, row in result["scores"].items():
            values = "".join(f"{top1:8.2f}" for top1 in row)
            lines.append(f"  {shift:<18}{values}{result['means'][shift]:8.2f}")
    if shifts["mce"]:
        mce = shifts["mce"]["mce"]
        errors = ", ".join(
            f"{name} {error:.1f}" for name, error in shifts["mce"]["errors"].items() if error is not None
        )
        lines.append(
            f"errors relative to the baseline in %: {errors}" + (f"; mCE {mce:.1f}" if mce is not None else "")
        )
    return lines
