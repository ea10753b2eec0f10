"""`dpn inspect`: the page about one network or two, its figures' numbers, and what is said of what a network lacks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpn_cli.analysis.plots import sections_of
from dpn_cli.analysis.summary import examine
from dpn_cli.report import page
from dpn_cli.report.charts import draw
from dpn_cli.report.content import Chart, LineChart, Map, Maps, Series
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.backbones import set_stem_norm
from support.cli import run_dpn
from support.images import noise_images
from support.pages import parse_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weight files of a network with planted scales, ``dpn``, and of a plain one."""
    root = tmp_path_factory.mktemp("networks")
    for stem in ("dpn", "none"):
        model = load_backbone("mu/8", stem=stem, image_size=16, seed=1)
        if stem == "dpn":
            set_stem_norm(model)
        export_backbone(model, root / f"{stem}.safetensors")
    return root


def numbers(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def refused(code: int, *words: str) -> str:
    result = run_dpn("inspect", *words)
    assert result.exit_code == code, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    return str(line)


def test_planted_scales_are_found_at_their_positions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "draw", lambda chart, prefix: ("<svg></svg>", b""))  # it is the numbers that matter
    result = run_dpn("inspect", str(folder / "dpn.safetensors"), "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "need images (--data)" in result.stderr
    scale = numbers(tmp_path / "figures" / "first_norm_scale.csv")
    assert len(scale) == 3 * 64
    twos = [(row["map"], int(row["row"]), int(row["column"])) for row in scale if float(row["scale"]) != 1]
    assert twos == [("green", row, column) for row in (3, 4) for column in (3, 4)]
    bias = numbers(tmp_path / "figures" / "first_norm_bias.csv")
    assert all(float(row["bias"]) == int(row["row"]) for row in bias)
    (network,) = json.loads((tmp_path / "result.json").read_text())["networks"]
    assert network["name"] == "dpn"
    assert network["first_norm"]["scale"]["green"]["means"]["centre"] == 2
    assert "attention_distance" not in network
    assert "Attention distance" not in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_two_networks_stand_side_by_side(folder: Path, tmp_path: Path) -> None:
    places = [str(folder / f"{name}.safetensors") for name in ("dpn", "none")]
    completed = run_dpn("inspect", *places, "--data", "demo", "--images", "3", "-o", str(tmp_path), "--json")
    assert completed.exit_code == 0, completed.output
    result = json.loads(completed.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    dpn, plain = result["networks"]
    assert dpn["images"] == plain["images"] == 3
    assert dpn["left_out"] == []
    assert "no norm before its projection" in plain["left_out"][0]
    # Four patches of 8 pixels: the neighbours are 8 pixels away, the opposite 8 * sqrt(2).
    assert dpn["attention_distance"]["of_uniform_attention"] == pytest.approx((8 + 8 + 8 * 2**0.5) / 4)
    assert dpn["explained_by"]["both"] < plain["explained_by"]["both"]
    assert [patch["change"] < 0.01 for patch in dpn["stem_on_patches"][:3]] == [True] * 3
    tree = parse_page((tmp_path / "report.html").read_text())
    text = "".join(tree.itertext())
    assert "none: maps of the first norm are left out" in text
    assert "dpn: principal filters" in text
    assert "none: principal filters" in text
    names = {path.stem for path in (tmp_path / "figures").glob("*.csv")}
    assert {"attention_1", "attention_2", "filters_2", "first_norm_scale_1", "explained"} <= names
    assert "first_norm_scale_2" not in names
    assert {row["series"] for row in numbers(tmp_path / "figures" / "explained.csv")} == {"dpn", "none"}
    heads = [float(row["pixels"]) for row in numbers(tmp_path / "figures" / "attention_1.csv")]
    np.testing.assert_allclose(heads, np.ravel(dpn["attention_distance"]["pixels"]))


@pytest.mark.parametrize(
    ("stem", "others", "message"),
    [
        ("rms", {"pool": "gap"}, "bias is left out: with the stem 'rms' it has none"),
        ("post_posemb", {"pool": "map"}, "with which the head pools the tokens is left out"),
        ("dpn_no_affine", {"norm_options": {"class_token_at": 2}, "placement": "subln"}, "it learns no scale and no b"),
        ("affine_only", {"posemb": "sincos2d"}, None),
    ],
)
def test_plots_that_a_network_lacks_are_skipped_and_reported(
    stem: str, others: dict[str, Any], message: str | None
) -> None:
    model = load_backbone("nano/8", stem=stem, image_size=(32, 24), **others)
    model.eval()
    actual = examine("it", model, [noise_images()])
    assert bool(actual.left_out) == (message is not None)
    assert message is None or any(message in line for line in actual.left_out)
    json.dumps(actual.to_dict(), allow_nan=False)
    charts = {part.name: part for section in sections_of([actual]) for part in section.parts if isinstance(part, Chart)}
    assert ("first_norm_scale" in charts) == (stem in ("rms", "affine_only"))
    assert all(len(chart.rows()) > 1 for chart in charts.values())


def test_mistakes_end_in_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dpn = str(folder / "dpn.safetensors")
    assert "missing.npz" in refused(3, "missing.npz")
    assert "pass --data, too" in refused(2, dpn, "--images", "5")
    assert "the same network twice" in refused(2, dpn, dpn)
    assert "no such folder" in refused(3, dpn, "--data", str(tmp_path / "nowhere"), "-o", str(tmp_path / "page"))
    (tmp_path / "run.json").write_text("{}")
    assert "the folder holds a run" in refused(2, dpn, "-o", str(tmp_path))
    assert not (tmp_path / "inspect").exists()


def test_images_that_cannot_be_read_are_named_or_left_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no image")
    words = (str(folder / "dpn.safetensors"), "--data", str(tmp_path / "photos"), "-o", str(tmp_path / "page"))
    assert "broken.jpg" in refused(3, *words)
    assert "none of 1 images can be read" in refused(3, *words, "--skip-bad-images")


def test_maps_and_points_are_drawn_from_the_numbers_of_their_csv() -> None:
    ramp = np.arange(6.0).reshape(2, 3)
    maps = Maps("maps", "ramp", "height", [Map("up", ramp), Map("down", -ramp)], 2)
    assert maps.rows()[0] == ["map", "row", "column", "height"]
    assert maps.rows()[6:8] == [["up", 1, 2, 5.0], ["down", 0, 0, -0.0]]
    colours = Maps("colours", "colours", "pixel", [Map("", np.full((1, 1, 3), 0.25))], 1)
    assert colours.rows() == [["map", "row", "column", "red", "green", "blue"], ["", 0, 0, 0.25, 0.25, 0.25]]
    thirteen = [Map(f"number {place}", ramp) for place in range(13)]
    several = draw(Maps("several", "several", "height", thirteen, 7, (0.0, 5.0)), "a")[0]
    assert draw(maps, "a")[0].count("<image") == 2 + 2  # each with a colour bar
    assert draw(colours, "a")[0].count("<image") == 1
    assert several.count("<image") == 13 + 1
    assert "number 1" not in several
    points = LineChart("points", "", "x", "y", [Series("a", [1] * 500, range(1, 501))], joined=False, from_zero=True)
    assert draw(points, "a")[0].count("<use") > 500  # not thinned out
