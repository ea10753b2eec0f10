"""What a segmentation's run keeps for its page: every image's mIoU, confusions, and images of some images."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import confusion_matrix, jaccard_score

from support.cli import run_dpn
from support.pages import make_page, parse_page, read_chart_rows
from support.segment import segment_config, train_segment, write_scenes
from tasks.segment.iou import ImageScore
from tasks.segment.page_samples import SIDE, select_extremes


def test_best_median_and_worst_are_different_images() -> None:
    for count in (1, 2, 3, 5, 9, 20):
        item = [ImageScore(row, float((row * 7) % count)) for row in range(count)]
        actual = select_extremes(item)
        rows = [member.row for several in actual.values() for member in several]
        assert len(set(rows)) == len(rows) == min(count, 3 * max(1, min(3, count // 3))), count
        assert actual["best"][0].miou == count - 1
    assert [[one.miou for one in several] for several in actual.values()] == [[19, 18, 17], [11, 10, 9], [2, 1, 0]]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and its data; one validation image has no labelled pixel, another one some that are ignored."""
    root = tmp_path_factory.mktemp("scored")
    scenes = write_scenes(root / "scenes", {"training": 8, "validation": 4})
    Image.new("L", (64, 64)).save(scenes / "annotations" / "validation" / "0003.png")
    Image.new("RGB", (64, 64)).save(scenes / "images" / "validation" / "0003.jpg")
    mask = pixels_of(scenes / "annotations" / "validation" / "0001.png")
    mask[:20, :30] = 0
    Image.fromarray(mask).save(scenes / "annotations" / "validation" / "0001.png")
    train_segment(segment_config(scenes, schedule={"steps": 2}, batch_size=4), root / "run")
    return root / "run", scenes


def test_every_image_has_its_miou_its_confusions_and_its_images(scored: tuple[Path, Path], tmp_path: Path) -> None:
    run, scenes = scored
    with (run / "per_image.csv").open() as file:
        item = {int(row["row"]): float(row["miou"]) for row in csv.DictReader(file)}
    assert list(item) == [0, 1, 2]
    report = json.loads((run / "samples.json").read_text())
    assert [image["kind"] for image in report["images"]] == ["best", "median", "worst"]
    assert [one["miou"] for one in report["images"]] == sorted(item.values(), reverse=True)
    total, names = np.zeros((5, 5), dtype=int), (scenes / "classes.txt").read_text().split()
    for row, miou in item.items():
        sample = {name: pixels_of(run / "samples" / f"{row}.{name}.png") for name in ("truth", "predicted", "errors")}
        raw = pixels_of(scenes / "annotations" / "validation" / f"{row:04d}.png").astype(int)
        judged = raw > 0
        assert max(raw.shape) <= SIDE  # so that the images have every pixel
        assert np.array_equal(sample["truth"], np.where(judged, raw - 1, 255))
        assert np.array_equal(sample["errors"], np.where(judged, sample["predicted"] != sample["truth"], 2))
        pairs = sample["truth"][judged], sample["predicted"][judged]
        assert miou == pytest.approx(100 * jaccard_score(*pairs, average="macro"))
        total += confusion_matrix(*pairs, labels=range(5))
    html = make_page(tmp_path, run)
    parse_page(html)
    counts = {(true, predicted): int(pixels) for true, predicted, pixels in read_chart_rows(tmp_path, "confusion")[1:]}
    assert counts == {(names[t], names[p]): total[t, p] for t in range(5) for p in range(5) if total[t, p]}
    assert html.count("<img src=") == 3 * 4
    assert ">The median images<" in html
    for name, colour in report["colours"]:
        assert f'<span style="background: {colour}"></span>{name}</li>' in html


def test_images_of_an_earlier_score_are_deleted(scored: tuple[Path, Path], tmp_path: Path) -> None:
    run, scenes = scored
    words = ["segment", "eval", str(run), "--data", str(scenes), "-o", str(tmp_path / "out"), "--device", "cpu", "-q"]
    for _ in range(2):
        assert run_dpn(*words).exit_code == 0
        kept = {path.name for path in (tmp_path / "out" / "samples").iterdir()}
        (tmp_path / "out" / "samples" / "99.truth.png").touch()
    assert kept == {path.name for path in (run / "samples").iterdir()}


def pixels_of(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with Image.open(path) as image:
        return np.array(image)
