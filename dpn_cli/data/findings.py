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
from dpn_cli.data.validate import InspectImage, SplitInspection, find_duplicates, inspect_image, inspect_split
from dpn_cli.errors import DataError
from dpn_cli.run.console import Console, count_noun

Json = dict[str, Any]
Opened = TypeVar("Opened")
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
# How many names a warning has; JSON has all of them.
SHOWN = 5


@dataclass
class DataFindings:
    """Findings of a data check so far; `workers` processes decode, and `console` shows the progress."""

    console: Console
    workers: int | Literal["auto"] = "auto"
    splits: dict[str, Json] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[Json] = field(default_factory=list)
    repeated: list[list[str]] = field(default_factory=list)

    def problem(self, kind: Kind, *texts: str) -> None:
        """Note problems of a kind; each begins with the file that has it."""
        self.problems += [{"kind": kind, "text": text} for text in texts]

    def faults(self, errors: Sequence[DataError]) -> None:
        """Note what was wrong when the data were opened."""
        self.problem("pair", *map(str, errors))

    def open(self, load: Callable[[], Opened]) -> Opened | None:
        """Open a data set and note all its errors; return None if it cannot be opened."""
        data: Opened | None = None
        with collect_errors() as errors:
            try:
                data = load()
            except DataError as error:
                errors.append(error)
        self.faults(errors)
        return data

    def split(self, name: str, split: LabelledImages, classes: Sequence[str]) -> SplitInspection:
        """Decode all images of a split, and describe them and their labels."""
        examined = self.images(name, split.where, partial(inspect_image, split), len(split.labels))
        labels, known = np.asarray(split.labels), len(classes)
        outside = np.flatnonzero((labels < 0) | (labels >= known)).tolist()
        for row in outside:
            text = (
                f"{split.where(row)}: label {labels[row]}, and there are {count_noun(known, 'class')}, 0 to {known - 1}"
            )
            self.problem("label", text)
        counts = Counter(labels.tolist())
        per_class = [counts[label] for label in range(known)]
        self.splits[name]["labels"] = {
            "classes": known,
            "lowest": int(labels.min(initial=0)),
            "highest": int(labels.max(initial=0)),
            "counts": per_class,
            "without": [str(classes[label]) for label, count in enumerate(per_class) if not count],
        }
        return examined

    def images(self, name: str, where: Callable[[int], str], see: InspectImage, count: int) -> SplitInspection:
        """Look at `count` images of a split with `see`, and describe them."""
        with self.console.counting(name, count) as done:
            examined = inspect_split(name, where, see, count, workers=self.workers, done=done)
        self.problem("unreadable", *examined.unreadable.values())
        self.problem("mask", *examined.wrong)
        described: Json = {
            "images": count,
            "unreadable": len(examined.unreadable),
            "stored": dict(examined.stored.most_common()),
        }
        if len(rows := examined.readable):
            sides = examined.sides[rows]
            area = np.argsort(sides.prod(1), kind="stable")
            places = {"smallest": area[0], "median": area[len(area) // 2], "largest": area[-1]}
            described["sides"] = {which: sides[place].tolist() for which, place in places.items()}
        self.splits[name] = described
        return examined

    def same(self, *parts: SplitInspection) -> None:
        """Look for images that are in two of some splits, which is a problem, or twice in one, which is a warning."""
        inside, first = Counter[str](), dict[str, list[str]]()
        for group in find_duplicates(parts):
            names = [f"{part.where(row)} ({part.name})" for part, row in group]
            if len({part.side for part, _ in group}) > 1:
                self.problem("same image", " = ".join(names))
            else:
                inside[group[0][0].side] += len(group) - 1
                first.setdefault(group[0][0].side, names)
                self.repeated.append(names)
        for side, extra in inside.items():
            self.warnings.append(
                f"{side}: {count_noun(extra, 'image')} with the same decoded pixels as another, for example "
                f"{' = '.join(first[side][:SHOWN])}"
            )

    def result(self, task: str, source: str | None, fingerprint: Json) -> Json:
        """Return all that was found, ending with the fingerprint that the results of trainings on these data carry."""
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
        smallest, median, largest = ("x".join(map(str, sides[which])) for which in ("smallest", "median", "largest"))
        one = smallest == largest
        parts.append(f"{smallest} pixels" if one else f"{smallest} to {largest} pixels, median {median}")
    parts.append(", ".join(f"{kind}: {count}" for kind, count in split["stored"].items()))
    return "; ".join(filter(None, parts))


def _digests(fingerprint: Json) -> Iterator[tuple[str, str]]:
    """Yield lines of fingerprints: the name of each group of them, and those in it."""
    if not fingerprint:
        yield "", "none, as the data cannot be opened"
    alone = {name: value for name, value in fingerprint.items() if not isinstance(value, dict)}
    for name, group in (("", alone), *fingerprint.items()):
        if group and isinstance(group, dict):
            yield f" of {name}" if name else "", ", ".join(f"{split} {digest}" for split, digest in group.items())
