"""The sections of a LiT page: recall, zero-shot accuracy, temperature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpn_cli.report.content import (
    Cell,
    Findings,
    Gallery,
    HeatMap,
    LineChart,
    PageImage,
    PageSection,
    Panel,
    Part,
    Series,
    Table,
    TextBlock,
)
from dpn_cli.report.reading import Json, RunRecord
from dpn_cli.report.shift_section import shift_sections
from dpn_cli.run.baseline_warnings import result_warning
from dpn_cli.run.files import read_object

ACCURACIES = {"top1": "top-1 in %", "top5": "top-5 in %", "mean_recall": "mean recall of the classes in %"}
WATCHED = {"temperature": "temperature, the factor of the cosines"}
NEAREST = {"captions": "Images nearest to captions", "prompts": "Images nearest to the prompts of classes"}
WAYS = {"image_to_text": "image to text", "text_to_image": "text to image"}


def findings(run: RunRecord, prefix: str) -> Findings:
    """Return what a page shows of a run of ``dpn lit train``, or of ``dpn lit eval``."""
    result = run.result
    retrieval = result.get("retrieval")
    scored: Json | None = result.get("zeroshot") or (result if "top1" in result else None)
    sections, warnings = [], []
    if retrieval:
        sections.append(_retrieval(result, retrieval, prefix))
        floors = {"chance": retrieval["chance@5"]}
        for direction, count in (("image_to_text", "images"), ("text_to_image", "captions")):
            name = f"held-out {WAYS[direction]} R@5"
            warnings.append(result_warning(name, retrieval[f"{direction}@5"], floors, retrieval[count]))
    if scored:
        rows: list[list[Cell]] = [
            [name, float(scored[key])]
            for key, name in {**ACCURACIES, "chance": "chance in %"}.items()
            if scored.get(key) is not None
        ]
        rows += [["images", scored["images"]], ["classes", scored["classes"]]]
        sections.append(PageSection("Zero-shot classification", [Table("Zero-shot", ("", ""), rows, name="zeroshot")]))
        if more := result.get("more_data"):
            sections.append(PageSection("Zero-shot classification of more data", [_more_data(result, more)]))
        floors = scored.get("floors") or {"chance": scored["chance"]}
        warnings.append(result_warning("zero-shot top-1", scored["top1"], floors, scored["images"]))
    metric, score = ("zero-shot top-1", scored["top1"]) if scored else ("", None)
    if retrieval and not scored:
        metric, score = "image to text R@1", retrieval["image_to_text@1"]
    scores = {} if score is None else {"": {run.seed: score}}
    sections += [
        *shift_sections(run, prefix),
        *_similarities(run.path, prefix),
        *_nearest_images(run.path, "captions"),
        *_nearest_images(run.path, "prompts"),
    ]
    return Findings(metric, scores, sections, WATCHED, [line for line in warnings if line])


def _more_data(result: Json, more: Sequence[Json]) -> Table:
    """Return the accuracies on all data sets, one a row."""
    rows: list[list[Cell]] = [
        [one["data"], *(float(one[key]) for key in ACCURACIES), one["images"], one["classes"]]
        for one in (result, *more)
    ]
    return Table("Zero-shot accuracy", ("data", *ACCURACIES.values(), "images", "classes"), rows, name="more_data")


def _retrieval(result: Json, retrieval: Json, prefix: str) -> PageSection:
    ks = sorted(int(key.partition("@")[2]) for key in retrieval if key.startswith("image_to_text@"))
    series = [Series(name, ks, [retrieval[f"{direction}@{k}"] for k in ks]) for direction, name in WAYS.items()]
    images = retrieval["images"]
    series.append(Series("chance", ks, [100 * min(1.0, k / images) for k in ks]))
    rows: list[list[Cell]] = [[line.name, *(float(value) for value in line.y)] for line in series]
    table = Table(
        f"Recall in % of {images} images and {retrieval['captions']} captions",
        ("direction", *(f"R@{k}" for k in ks)),
        rows,
        note=_temperature(result),
        name="retrieval",
    )
    chart = LineChart(f"{prefix}recall", "Recall at k", "k retrieved captions or images", "recall in %", series)
    return PageSection("Retrieval", [table, chart])


def _temperature(result: dict[str, Any]) -> str:
    value = result.get("temperature")
    return "" if value is None else f"Learnt temperature: logits are similarities times {value:.4g}."


def _similarities(folder: Path, prefix: str) -> list[PageSection]:
    """Return the cosines of some captions and images, each caption with its own image on the diagonal."""
    saved = read_object(folder / "captions.json")
    if saved is None:
        return []
    pairs = saved["pairs"]
    numbers = [str(number) for number in range(1, len(pairs["images"]) + 1)]
    rows = [f"{number} {caption}" for number, caption in zip(numbers, pairs["captions"], strict=True)]
    chart = HeatMap(
        f"{prefix}similarity",
        "Cosine of captions and images",
        "caption",
        "image",
        "cosine",
        [Panel("held-out pairs", rows, numbers, pairs["similarity"])],
        digits=2,
        caption="Pairs that belong together are on the diagonal, which should be the brightest of its row and column.",
    )
    images = [
        PageImage(data, [caption, image["image"]])
        for caption, image in zip(rows, pairs["images"], strict=True)
        if (data := _image(folder, "captions", image["row"]))
    ]
    return [PageSection("Similarity", [chart, Gallery("The pairs", images)])]


def _nearest_images(folder: Path, name: str) -> list[PageSection]:
    """Return for some texts the images that are nearest to them."""
    saved = read_object(folder / f"{name}.json")
    if saved is None:
        return []
    parts: list[Part] = []
    for query in saved["queries"]:
        images = []
        for match in query["nearest"]:
            verdict = "right" if match["right"] else "is " + match["is"] if "is" in match else "of another caption"
            if data := _image(folder, name, match["row"]):
                images.append(PageImage(data, [f"{match['cosine']:.3f}, {verdict}", match["image"]]))
        parts.append(Gallery(query["text"], images))
    caption = TextBlock("Cosines; the nearest image comes first.")
    return [PageSection(NEAREST[name], [caption, *parts])]


def _image(folder: Path, name: str, row: int) -> bytes | None:
    path = folder / name / f"{row}.jpg"
    return path.read_bytes() if path.is_file() else None
