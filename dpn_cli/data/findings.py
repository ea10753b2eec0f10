"""Findings of a data check: splits described, problems listed by file name, and text of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from dpn_cli.data.image_errors import collect_errors
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.data.validate import (
    InspectImage,
    RowLocator,
    SplitInspection,
    find_duplicates,
    inspect_image,
    inspect_split,
)
from dpn_cli.errors import DataError
from dpn_cli.run.console import Console, count_noun

Json = dict[str, Any]
DataT = TypeVar("DataT")
# Why each kind of problem is one.
KINDS = {
    "pair": "missing or does not fit",
    "unreadable": "cannot be decoded",
    "label": "has a label outside the classes",
    "mask": "a mask with wrong values",
    "same image": "the same image in two splits (equal decoded pixels): scores on it say nothing",
    "classes": "classes in another order than the known one",
    "batch": "the batch does not fit",
}
Kind = Literal["pair", "unreadable", "label", "mask", "same image", "classes", "batch"]
# Most names in a warning; JSON has all of them.
MOST_NAMES = 5


@dataclass
class DataFindings:
    """Findings of a data check; `workers` processes decode, and `console` shows the progress."""

    console: Console
    workers: int | Literal["auto"] = "auto"
    splits: dict[str, Json] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[Json] = field(default_factory=list)
    repeated: list[list[str]] = field(default_factory=list)

    def add_problems(self, kind: Kind, *texts: str) -> None:
        """Add problems of a kind; each text begins with the file that has it."""
        self.problems += [{"kind": kind, "text": text} for text in texts]

    def open(self, load: Callable[[], DataT]) -> DataT | None:
        """Open a data set and add all its errors; return None if it cannot be opened."""
        data: DataT | None = None
        with collect_errors() as errors:
            try:
                data = load()
            except DataError as error:
                errors.append(error)
        self.add_problems("pair", *map(str, errors))
        return data

    def inspect_labelled(self, name: str, split: LabelledImages, classes: Sequence[str]) -> SplitInspection:
        """Decode all images of a split, and describe them and their labels."""
        inspection = self.inspect_images(name, split.locate, partial(inspect_image, split), len(split.labels))
        labels, num_classes = np.asarray(split.labels), len(classes)
        for row in np.flatnonzero((labels < 0) | (labels >= num_classes)).tolist():
            allowed = f"{count_noun(num_classes, 'class')}, 0 to {num_classes - 1}"
            self.add_problems("label", f"{split.locate(row)}: label {labels[row]}, and there are {allowed}")
        counts = Counter(labels.tolist())
        per_class = [counts[label] for label in range(num_classes)]
        self.splits[name]["labels"] = {
            "classes": num_classes,
            "lowest": int(labels.min(initial=0)),
            "highest": int(labels.max(initial=0)),
            "counts": per_class,
            "without": [str(classes[label]) for label, count in enumerate(per_class) if not count],
        }
        return inspection

    def inspect_images(self, name: str, locate: RowLocator, inspect: InspectImage, count: int) -> SplitInspection:
        """Inspect `count` images of a split, and describe them; `locate` names the file of a row."""
        with self.console.counting(name, count) as on_progress:
            inspection = inspect_split(name, locate, inspect, count, workers=self.workers, on_progress=on_progress)
        self.add_problems("unreadable", *inspection.unreadable.values())
        self.add_problems("mask", *inspection.problems)
        description: Json = {
            "images": count,
            "unreadable": len(inspection.unreadable),
            "stored": dict(inspection.formats.most_common()),
        }
        if len(rows := inspection.readable):
            sides = inspection.sides[rows]
            order = np.argsort(sides.prod(1), kind="stable")
            chosen_rows = {"smallest": order[0], "median": order[len(order) // 2], "largest": order[-1]}
            description["sides"] = {size: sides[row].tolist() for size, row in chosen_rows.items()}
        self.splits[name] = description
        return inspection

    def add_duplicates(self, *splits: SplitInspection) -> None:
        """Add images that are in two splits as problems, and images that are twice in one as a warning."""
        extra_images, examples = Counter[str](), dict[str, list[str]]()
        for group in find_duplicates(splits):
            names = [f"{split.locate(row)} ({split.name})" for split, row in group]
            if len({split.side for split, _ in group}) > 1:
                self.add_problems("same image", " = ".join(names))
            else:
                extra_images[group[0][0].side] += len(group) - 1
                examples.setdefault(group[0][0].side, names)
                self.repeated.append(names)
        for side, extra in extra_images.items():
            self.warnings.append(
                f"{side}: {count_noun(extra, 'image')} with the same decoded pixels as another, for example "
                f"{' = '.join(examples[side][:MOST_NAMES])}"
            )

    def compare_count(self, name: str, noun: str, count: int, dataset: str, published: int) -> None:
        """Warn when a split has another number of images than the published data set."""
        if count != published:
            self.warnings.append(
                f"{name}: {count} {noun}, {dataset} has {published}: the score is not comparable with published ones"
            )

    def result(self, task: str, source: str | None, fingerprint: Json) -> Json:
        """Return all findings, and the fingerprint that results of trainings on these data carry."""
        return {
            "task": f"data check {task}",
            "data": source,
            "splits": self.splits,
            "notes": self.notes,
            "warnings": self.warnings,
            "repeated": self.repeated,
            "problems": self.problems,
            "fingerprint": fingerprint,
        }


def describe(result: Json) -> str:
    """Return the result of a check as text."""
    lines = [f"{name}: {_describe_split(split)}" for name, split in result["splits"].items()]
    lines += result["notes"]
    lines += [f"warning: {text}" for text in result["warnings"]]
    for kind, meaning in KINDS.items():
        texts = [problem["text"] for problem in result["problems"] if problem["kind"] == kind]
        lines += [f"{count_noun(len(texts), 'problem')}: {meaning}", *(f"  {text}" for text in texts)] if texts else []
    lines += [f"fingerprint{name}: {digests}" for name, digests in _digests(result["fingerprint"])]
    return "\n".join(lines)


def _describe_split(split: Json) -> str:
    parts = [count_noun(split["images"], "image")]
    if labels := split.get("labels"):
        parts[0] += f" of {count_noun(labels['classes'], 'class')}"
        if counts := labels.get("counts"):
            parts[0] += f" ({min(counts)} to {max(counts)} of each)"
        else:
            parts[0] += f" ({labels['ignored']:.1%} of the pixels ignored)"
    if sides := split.get("sides"):
        smallest, median, largest = ("x".join(map(str, sides[size])) for size in ("smallest", "median", "largest"))
        parts.append(
            f"{smallest} pixels" if smallest == largest else f"{smallest} to {largest} pixels, median {median}"
        )
    parts.append(", ".join(f"{kind}: {count}" for kind, count in split["stored"].items()))
    return "; ".join(filter(None, parts))


def _digests(fingerprint: Json) -> Iterator[tuple[str, str]]:
    """Yield the name and the digests of each group of fingerprints."""
    if not fingerprint:
        yield "", "none, as the data cannot be opened"
    single_values = {name: value for name, value in fingerprint.items() if not isinstance(value, dict)}
    for name, group in (("", single_values), *fingerprint.items()):
        if group and isinstance(group, dict):
            yield f" of {name}" if name else "", ", ".join(f"{split} {digest}" for split, digest in group.items())
