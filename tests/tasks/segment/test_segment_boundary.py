"""Boundary IoU and boundary F, against definitions by erosion and by distances between all pairs of pixels."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage
from scipy.spatial.distance import cdist
from torch import Tensor

from support.cli import run_dpn
from support.segment import segment_config, train_segment, write_scenes
from tasks.segment.boundary import boundary_f, boundary_iou, count_boundaries
from tasks.segment.iou import SegmentScores
from tasks.segment.labels import IGNORE

CLASSES = 4


def random_maps(seed: int) -> tuple[Tensor, Tensor]:
    """Return a prediction and a truth of blobs (60, 80), with a part that no label judges."""
    generator = np.random.default_rng(seed)
    noise = ndimage.gaussian_filter(generator.normal(size=(2, 60, 80)), (0, 4, 4))
    noise[1] += 0.5 * noise[0]
    maps = [np.digitize(part, np.quantile(part, (0.3, 0.6, 0.9))).astype(np.uint8) for part in noise]
    maps[1][:7, 20:33] = IGNORE
    return torch.from_numpy(maps[0]), torch.from_numpy(maps[1])


def boundary_of(mask: np.ndarray, width: int) -> np.ndarray:
    """Return a mask without what is left after as many erosions by 3 x 3 pixels (arXiv 2103.16562)."""
    eroded = ndimage.binary_erosion(mask, np.ones((3, 3)), iterations=width, border_value=0)
    return np.asarray(mask & ~eroded)


def outline_pixels(labels: np.ndarray, judged: np.ndarray, label: int) -> np.ndarray:
    """Return the positions (n, 2) of judged pixels of a class with a judged neighbour of another class."""
    positions = []
    for y, x in zip(*np.nonzero((labels == label) & judged), strict=True):
        around = slice(max(0, y - 1), y + 2), slice(max(0, x - 1), x + 2)
        if (labels[around][judged[around]] != label).any():
            positions.append((y, x))
    return np.array(positions).reshape(-1, 2)


def test_boundary_iou_is_that_of_erosions_over_all_images() -> None:
    width = round(0.02 * math.hypot(60, 80))
    assert width == 2
    sums, total = np.zeros((2, CLASSES)), torch.zeros(7, CLASSES, dtype=torch.int64)
    for seed in range(3):
        predicted, truth = random_maps(seed)
        total += count_boundaries(predicted, truth, CLASSES)
        judged = truth.numpy() != IGNORE
        for label in range(CLASSES):
            own, true = (boundary_of((one.numpy() == label) & judged, width) for one in (predicted, truth))
            sums[:, label] += (own & true).sum(), (own | true).sum()
    assert np.allclose(boundary_iou(total).numpy(), 100 * sums[0] / sums[1])


def test_boundary_f_is_that_of_distances_between_all_pixels() -> None:
    tolerance = max(1, round(0.0075 * math.hypot(60, 80)))
    counts, total = np.zeros((4, CLASSES)), torch.zeros(7, CLASSES, dtype=torch.int64)
    for seed in range(2):
        predicted, truth = random_maps(seed)
        total += count_boundaries(predicted, truth, CLASSES)
        judged = truth.numpy() != IGNORE
        for label in range(CLASSES):
            own, true = (outline_pixels(one.numpy(), judged, label) for one in (predicted, truth))
            distances = cdist(own, true)
            counts[:, label] += (
                (distances.min(1) <= tolerance).sum(),
                len(own),
                (distances.min(0) <= tolerance).sum(),
                len(true),
            )
    precision, recall = counts[0] / counts[1], counts[2] / counts[3]
    assert np.array_equal(total[3:].numpy(), counts)
    assert np.allclose(boundary_f(total).numpy(), 100 * 2 * precision * recall / (precision + recall))


def test_equal_maps_have_perfect_outlines_and_a_missing_class_none() -> None:
    _, truth = random_maps(0)
    predicted = torch.where(truth == IGNORE, 0, truth)
    counts = count_boundaries(predicted, truth, CLASSES + 1)
    assert boundary_iou(counts)[:CLASSES].tolist() == [100.0] * CLASSES
    assert boundary_f(counts)[:CLASSES].tolist() == [100.0] * CLASSES
    assert boundary_iou(counts)[CLASSES].isnan()
    assert boundary_f(counts)[CLASSES].isnan()
    never = count_boundaries(torch.zeros_like(truth), truth, CLASSES)
    assert boundary_f(never).tolist() == [0.0] * CLASSES


def test_a_large_object_that_is_displaced_loses_more_boundary_than_area() -> None:
    truth = torch.zeros(200, 200, dtype=torch.uint8)
    truth[50:150, 50:150] = 1
    counts = count_boundaries(truth.roll(6, 1), truth, 2)
    width = round(0.02 * math.hypot(200, 200))
    assert width == 6
    ring = 100**2 - (100 - 2 * width) ** 2
    assert counts[1, 1] == counts[2, 1] == ring
    # The rings share the upper and lower bars of 94 columns; the side bars, 6 wide, meet nowhere.
    shared = 2 * width * (100 - 6)
    assert counts[0, 1] == shared
    assert float(boundary_iou(counts)[1]) == pytest.approx(100 * shared / (2 * ring - shared))


def test_scores_without_anything_right_are_numbers() -> None:
    confusion = torch.tensor([[0, 5], [0, 0]])
    assert SegmentScores(confusion, 1).to_dict()["mfscore"] == 0
    single = torch.zeros(30, 30, dtype=torch.uint8)
    scores = SegmentScores(confusion, 1, boundaries=count_boundaries(single, single, 2)).to_dict()
    assert scores["boundary_miou"] == 100  # the image's edge
    assert "boundary_mf" not in scores
    json.dumps(scores, allow_nan=False)


def test_the_command_scores_boundaries_where_it_is_told_to(tmp_path: Path) -> None:
    scenes = write_scenes(tmp_path / "scenes", {"training": 8, "validation": 3})
    train_segment(segment_config(scenes, schedule={"steps": 2}), tmp_path / "run")
    command = ["segment", "eval", str(tmp_path / "run"), "-q", "-j", "0", "-o", str(tmp_path / "report")]
    result = run_dpn(*command, "--boundaries", "--json")
    assert result.exit_code == 0, result.stderr
    scores = json.loads(result.stdout)
    assert 0 <= scores["boundary_miou"] <= scores["miou"]
    assert 0 <= scores["boundary_mf"] <= 100
    header = (tmp_path / "report" / "per_class.csv").read_text().splitlines()[0]
    assert header.endswith("precision,dice,fscore,boundary_iou,boundary_f")
    assert "boundary_miou" not in json.loads(run_dpn(*command, "--json").stdout)
    assert "mDice" in run_dpn(*command).stdout
