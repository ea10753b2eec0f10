"""What LiT keeps for a page: similarities of some pairs, and the images nearest to some texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from dpn_cli.report import page
from dpn_cli.run import distributed
from support.pages import SCRIPT_TAG, make_page, parse_page, read_chart_rows, write_run
from tasks.lit.config import LitConfig
from tasks.lit.data import SceneClasses
from tasks.lit.page_samples import NEAREST, PAIRS, TEXTS, NearestImages, save_pairs, save_prompts


class Many:
    """Thirty images with two captions each."""

    def __init__(self) -> None:
        self.captions = [(f"{SCRIPT_TAG} {row}", f"again {row}") for row in range(30)]

    def locate(self, row: int) -> str:
        return f"image {row}"

    def pixels(self, row: int) -> np.ndarray[Any, Any]:
        return np.full((20, 30, 3), row, dtype=np.uint8)


def features(count: int, seed: int) -> torch.Tensor:
    return normalize(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)), dim=-1)


def kept(folder: Path) -> tuple[dict[str, Any], list[int], torch.Tensor, torch.Tensor]:
    data: Any = Many()
    good = [row for row in range(30) if row != 4]
    images, texts = features(29, 0), features(58, 1)
    save_pairs(folder, data, good, images, texts, torch.arange(29).repeat_interleave(2))
    return json.loads((folder / "captions.json").read_text()), good, images, texts


def test_pairs_and_their_nearest_images_match_numpy(tmp_path: Path) -> None:
    (tmp_path / "captions").mkdir()
    (tmp_path / "captions" / "99.jpg").touch()
    (tmp_path / "captions.json").touch()  # of an earlier evaluation
    actual, good, images, texts = kept(tmp_path)
    cosines = texts.numpy().astype(np.float64) @ images.numpy().astype(np.float64).T
    rows = [image["row"] for image in actual["pairs"]["images"]]
    assert len(rows) == PAIRS
    assert (rows[0], rows[-1]) == (0, 29)
    places = [good.index(row) for row in rows]
    assert actual["pairs"]["captions"] == [f"{SCRIPT_TAG} {row}" for row in rows]
    assert np.allclose(
        actual["pairs"]["similarity"], cosines[np.ix_([2 * place for place in places], places)], atol=1e-6
    )
    assert len(actual["queries"]) == TEXTS
    for query in actual["queries"]:
        own = int(query["text"].split()[-1])
        line = cosines[2 * good.index(own)]
        assert [neighbour["row"] for neighbour in query["nearest"]] == [
            good[place] for place in np.argsort(-line)[:NEAREST]
        ]
        assert [one["right"] for one in query["nearest"]] == [one["row"] == own for one in query["nearest"]]
    shown = {*rows, *(one["row"] for query in actual["queries"] for one in query["nearest"])}
    assert {int(path.stem) for path in (tmp_path / "captions").iterdir()} == shown


def test_images_nearest_to_classes_are_found_part_by_part_and_over_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = SceneClasses(0, 40)
    cosines = features(40, 2) @ features(len(split.classes), 3).T
    ranks = [NearestImages(split.classes) for _ in range(2)]
    for rank, nearest in enumerate(ranks):
        for rows in np.split(np.arange(rank, 40, 2), [7, 13]):
            nearest.see(rows.tolist(), cosines[rows])
    monkeypatch.setattr(distributed, "from_all", lambda value: [one.best for one in ranks])
    save_prompts(tmp_path, split, ranks[0], ranks[0].gather())
    actual = json.loads((tmp_path / "prompts.json").read_text())["queries"]
    assert len(actual) == TEXTS
    for query in actual:
        column = split.classes.index(query["text"])
        order = np.argsort(-cosines[:, column].numpy())[:NEAREST]
        assert [neighbour["row"] for neighbour in query["nearest"]] == order.tolist()
        for one in query["nearest"]:
            assert one["cosine"] == pytest.approx(cosines[one["row"], column].item())
            assert one["is"] == split.classes[split.labels[one["row"]]]
            assert one["right"] == (one["is"] == query["text"])


def test_a_page_has_the_heat_map_and_the_nearest_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "draw", lambda chart, prefix: ("<svg></svg>", b""))
    recall = {f"{way}@{k}": 10.0 * k for way in ("image_to_text", "text_to_image") for k in (1, 5)}
    result = {"task": "lit", "retrieval": {**recall, "chance@5": 0.5, "images": 1000, "captions": 1000}}
    run = write_run(tmp_path / "run", LitConfig, "lit_demo", result, "towers")
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 9, "loss": 1.0, "lr": 0.1, "temperature": 12.5}\n')
    actual, *_ = kept(run)
    html = make_page(tmp_path, run)
    parse_page(html)
    assert "<script" not in html
    cells = [float(row[3]) for row in read_chart_rows(tmp_path, "similarity")[1:]]
    assert cells == [value for line in actual["pairs"]["similarity"] for value in line]
    assert html.count("<img src=") == PAIRS + TEXTS * NEAREST
    assert read_chart_rows(tmp_path, "temperature")[1:] == [["run", "9", "12.5"]]
