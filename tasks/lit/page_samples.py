"""Samples of both towers for a page: similarities of some pairs, and the images nearest to some texts.

``captions.json`` and ``prompts.json`` hold the numbers, the folders of these names small images by their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.report.thumbnails import thumbnail
from dpn_cli.run import distributed
from dpn_cli.run.files import replace_file, replace_json
from tasks.lit.captions import CaptionedImages

Json = dict[str, Any]
# Pairs of the heat map, texts whose nearest images are shown, and how many images of each.
PAIRS, TEXTS, NEAREST = 12, 6, 6


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` positions below `count`, evenly spread from the first to the last."""
    return sorted({int(index) for index in np.linspace(0, count - 1, min(most, count))})


def save_pairs(
    folder: Path, data: CaptionedImages, good: Sequence[int], images: Tensor, texts: Tensor, owner: Tensor
) -> None:
    """Write similarities of some pairs, and the images nearest to some of their captions. Raises `SaveError`.

    Args:
        folder: where to.
        data: the images.
        good: rows of the images that were read (n,).
        images: their unit features (n, d).
        texts: unit features (m, d) of all their captions.
        owner: which of the n images (m,) each text belongs to.
    """
    positions = spread(len(good), PAIRS)
    firsts = [int((owner == position).nonzero()[0]) for position in positions]
    captions = [data.captions[good[position]][0] for position in positions]
    similarity = texts[firsts] @ images[positions].T
    text_rows = spread(len(positions), TEXTS)
    queries_by_row = texts[[firsts[row_index] for row_index in text_rows]]
    best = (queries_by_row @ images.T).topk(min(NEAREST, len(good)), dim=-1)
    queries = []
    for row_index, values, neighbours in zip(text_rows, best.values.tolist(), best.indices.tolist(), strict=True):
        nearest = [
            {
                "row": good[position],
                "image": data.locate(good[position]),
                "cosine": cosine,
                "right": position == positions[row_index],
            }
            for position, cosine in zip(neighbours, values, strict=True)
        ]
        queries.append({"text": captions[row_index], "nearest": nearest})
    images_shown = [{"row": good[position], "image": data.locate(good[position])} for position in positions]
    pairs = {"images": images_shown, "captions": captions, "similarity": similarity.tolist()}
    _write(folder, "captions", data, {"pairs": pairs, "queries": queries})


class NearestImages:
    """The images nearest to some of the classes, of those that `see` is given; each rank has images of its own."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.columns = names, spread(len(names), TEXTS)
        self.best: list[list[tuple[float, int]]] = [[] for _ in self.columns]

    def see(self, rows: Sequence[int], cosines: Tensor) -> None:
        """Take images with their rows in the split and their cosines (b, classes)."""
        for column, values in enumerate(cosines[:, self.columns].T.tolist()):
            candidates = [(-value, row) for value, row in zip(values, rows, strict=True)]
            self.best[column] = sorted(self.best[column] + candidates)[:NEAREST]

    def gather(self) -> list[list[tuple[float, int]]]:
        """Return of each class the rows nearest to it with minus their cosines, over all ranks, which all call it."""
        ranks = distributed.from_all(self.best)
        candidates = (chain.from_iterable(parts) for parts in zip(*ranks, strict=True))
        return [sorted(of_class)[:NEAREST] for of_class in candidates]


def save_prompts(
    folder: Path, split: LabelledImages, nearest: NearestImages, best: list[list[tuple[float, int]]]
) -> None:
    """Write the images nearest to the prompts of some classes; `best` is what `NearestImages.gather` returns.

    Raises `SaveError`.
    """
    queries, labels, names = [], split.labels, nearest.names
    for column, matches in zip(nearest.columns, best, strict=True):
        images = [
            {
                "row": row,
                "image": split.locate(row),
                "cosine": -value,
                "right": labels[row] == column,
                "is": names[labels[row]],
            }
            for value, row in matches
        ]
        queries.append({"text": names[column], "nearest": images})
    _write(folder, "prompts", split, {"queries": queries})


def _write(folder: Path, name: str, data: LabelledImages, description: Json) -> None:
    if (folder / f"{name}.json").is_file():
        for path in (folder / name).glob("*.jpg"):
            path.unlink()
    entries = [
        *description.get("pairs", {}).get("images", ()),
        *(o for q in description["queries"] for o in q["nearest"]),
    ]
    for row in sorted({entry["row"] for entry in entries}):
        image = thumbnail(data.pixels(row))
        replace_file(folder / name / f"{row}.jpg", partial(Path.write_bytes, data=image))
    replace_json(folder / f"{name}.json", description)
