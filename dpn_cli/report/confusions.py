"""Confusion matrices: their chart, and an order that puts confused classes together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpn_cli.report.content import ConfusionChart

# Most classes with a label each; more are clustered.
MOST_NAMED = 50
# Most classes of a drawn matrix: clustering compares all pairs.
MOST_DRAWN = 2000


def confusion_chart(name: str, classes: Sequence[str], counts: Sequence[Sequence[int]], unit: str) -> ConfusionChart:
    """Return the chart of counts (classes, classes) of a `unit`, rows the truth, clustered where classes are many."""
    caption = "Rows are the true classes, columns the predicted ones."
    if len(classes) > MOST_NAMED:
        order = cluster_classes(counts)
        counts = [[counts[true][predicted] for predicted in order] for true in order]
        classes = [classes[row] for row in order]
        caption += (
            " Classes that are taken for each other stand together (average-linkage clustering), in the order of the "
            "CSV file. The area of a point is the share of the true class."
        )
    return ConfusionChart(name, "Confusion matrix", classes, counts, unit, caption=caption)


def cluster_classes(counts: Sequence[Sequence[int]]) -> list[int]:
    """Return an order of classes that puts classes that are confused with each other together.

    `counts` are (classes, classes), rows the truth. The distance of two classes is 1 minus the mean of the shares in
    which each is taken for the other; clusters are joined by their average distance (scipy's UPGMA).
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    table = np.asarray(counts, dtype=float)
    totals = table.sum(1, keepdims=True)
    shares = np.divide(table, totals, out=np.zeros_like(table), where=totals > 0)
    distance = 1 - (shares + shares.T) / 2
    np.fill_diagonal(distance, 0)
    return [int(row) for row in leaves_list(linkage(squareform(distance, checks=False), "average"))]
