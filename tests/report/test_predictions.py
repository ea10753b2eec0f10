"""What is predicted of many images: unreadable ones lose nothing, tables and pages hold what is printed."""

from __future__ import annotations

import csv
import json
import re
from base64 import b64decode
from collections import Counter
from html import unescape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

# a fixture
from dpn_cli.config.schema import PredictionFiles
from dpn_cli.data.decode import ReadOptions, read_pixels
from dpn_cli.report.content import Gallery, Legend, PageImage, PageSection
from dpn_cli.report.html import render
from dpn_cli.report.predictions import MOST_SHOWN, Predictions, spread, tally
from dpn_cli.report.thumbnails import DENSITY, SIDE, thumbnail
from dpn_cli.run import console
from dpn_cli.run.console import Console
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.cli import run_dpn
from support.images import write_class_folders
from support.lit import make_towers
from support.pages import parse_page
from tasks.classify.classifier import Classifier, save_classifier
from tasks.lit.towers import save_towers
from tasks.segment import predict as segment_predict
from tasks.segment.artifact import Segmenter, save_segmenter
from tasks.segment.config import Evaluation, MaskData
from tasks.segment.model import LinearSegmenter
from tasks.segment.palette import Class

SCRIPT = "<script>alert(1)<script>"
# The arguments of each command behind the network and the images, and the list in its results.
COMMANDS: dict[str, tuple[list[str], str]] = {
    "predict": (["-k", "2"], "classes"),
    "lit predict": (["--labels", f"a dog,{SCRIPT},a cat", "-k", "2"], "labels"),
    "segment predict": (["-o", "out"], "classes"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of each kind with a hostile class, and a folder of eight images of which two are damaged."""
    root = tmp_path_factory.mktemp("predictions")
    names = ("ant", SCRIPT, "cow")
    vit = load_backbone("mu/8", image_size=16, num_classes=3, seed=1)
    assert isinstance(vit.head, torch.nn.Linear)
    torch.nn.init.normal_(vit.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    save_classifier(Classifier(vit, names, "softmax", 18, {}), root / "predict.safetensors")
    save_towers(make_towers(), root / "lit predict.safetensors")
    classes = tuple(Class(name, (9, 9 * number, 200)) for number, name in enumerate(names))
    own = Segmenter(LinearSegmenter(vit, final_norm=False), classes, MaskData(source="x"), Evaluation(), {})
    save_segmenter(own, root / "segment predict.safetensors")
    write_class_folders(root / "photos", classes=2, each=3, size=(40, 30))
    for number, path in enumerate(sorted((root / "photos").rglob("*.jpg"))):
        path.rename(root / "photos" / f"{number}{SCRIPT if number == 2 else ''}.jpg")
    for name in ("1-damaged.png", "9-damaged.png"):
        (root / "photos" / name).write_bytes(b"no image")
    return root


@pytest.fixture(autouse=True)
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def predict(command: str, place: Path, *arguments: str) -> Any:
    network = str(place / f"{command}.safetensors")
    return run_dpn(*command.split(), network, str(place / "photos"), *COMMANDS[command][0], "--json", "-q", *arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_damaged_images_are_named_one_by_one_and_the_others_are_done(command: str, place: Path) -> None:
    process = predict(command, place, "--csv", "all.csv")
    assert process.exit_code == 3
    *warnings, error = process.stderr.splitlines()
    assert [warning.partition(": not a readable image")[0] for warning in warnings] == [
        f"warning: {place}/photos/{name}-damaged.png" for name in "19"
    ]
    assert error.startswith("error: unreadable: 2 of 8 images, named above; the others are done.")
    results = json.loads(process.stdout)
    assert [Path(result["image"]).name[0] for result in results] == list("012345")
    accepted = predict(command, place, "--skip-bad-images")
    assert (accepted.exit_code, json.loads(accepted.stdout)) == (0, results)


@pytest.mark.parametrize("command", COMMANDS)
def test_results_do_not_depend_on_batches_and_workers(command: str, place: Path) -> None:
    first, second = (
        json.loads(predict(command, place, *mode).stdout) for mode in (("-b", "1", "-j", "0"), ("-b", "4", "-j", "2"))
    )
    assert len(first) == len(second) == 6
    for one, other in zip(first, second, strict=True):
        for entry, same in zip(one.pop(COMMANDS[command][1]), other.pop(COMMANDS[command][1]), strict=True):
            assert entry == pytest.approx(same, abs=1e-5)
        assert one == other


@pytest.mark.parametrize("command", COMMANDS)
def test_the_table_equals_the_printed_one(command: str, place: Path) -> None:
    results = json.loads(predict(command, place, "--csv", "some/where/all.csv").stdout)
    with Path("some/where/all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(results) == 6
    for row, result in zip(rows, results, strict=True):
        told = {key: value for key, value in result.items() if not isinstance(value, list)}
        for place_, entry in enumerate(result[COMMANDS[command][1]], 1):
            told |= {f"{key}_{place_}": value for key, value in entry.items()}
        assert {key: value for key, value in row.items() if value} == {key: str(told[key]) for key in told}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_shows_every_image_and_escapes_names(command: str, place: Path) -> None:
    results = json.loads(predict(command, place, "--html", "page.html").stdout)
    html = Path("page.html").read_text()
    text = "".join(parse_page(html).itertext())
    assert "<script" not in html
    assert html.count("<img ") == 6
    assert text.count("-damaged.png") == 2
    best = [result[COMMANDS[command][1]][0] for result in results]
    names = [one.get("name", one.get("label")) for one in best]
    assert all(result["image"] in text for result in results)
    assert all(name in text for name in names)
    if command != "segment predict":
        cells = cells_of(html)
        assert {unescape(name): int(count) for name, count in zip(cells[::3], cells[1::3], strict=True)} == Counter(
            names
        )
    assert any(SCRIPT in result["image"] for result in results)


def test_a_page_of_segments_has_overlays_and_a_legend(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads(predict("segment predict", place, "--html", "page.html").stdout)
    html = Path("page.html").read_text()
    shares: Counter[int] = Counter()
    for entry in (entry for result in results for entry in result["classes"]):
        shares[entry["value"]] += entry["share"]
    order = sorted(shares, key=lambda value: -shares[value])
    assert len(order) > 1
    assert re.findall("background: #([0-9a-f]{6})", html) == [f"09{9 * value:02x}c8" for value in order]
    assert cells_of(html)[2::3] == [f"{100 * shares[value] / 6:.1f}" for value in order]
    with Image.open(results[0]["overlay"]) as overlay:
        expected = thumbnail(np.asarray(overlay), segment_predict.SHOWN_SIDE)
    assert shown_in(html)[0] == expected
    monkeypatch.setattr(segment_predict, "MOST_SHOWN", 2)
    predict("segment predict", place, "--html", "page.html")
    assert Path("page.html").read_text().count("<img ") == 2


def cells_of(html: str) -> list[str]:
    """Return the cells of the table of what was predicted, three in a row."""
    return re.findall("<td[^>]*>([^<]*)</td>", html[html.index("What was predicted") :])


def shown_in(html: str) -> list[bytes]:
    return [b64decode(part.partition('"')[0]) for part in html.split("data:image/jpeg;base64,")[1:]]


def test_a_search_has_a_page_of_its_matches(place: Path) -> None:
    network, photos = str(place / "lit predict.safetensors"), str(place / "photos")
    search = ["lit", "search", network, "--images", photos, "--query", "a <b> dog", "--skip-bad-images", "-q"]
    result = run_dpn(*search, "-k", "4", "--json", "--html", "found.html", "-b", "2")
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    html = Path("found.html").read_text()
    text = "".join(parse_page(html).itertext())
    assert "a <b> dog" in text
    assert html.count("<img ") == 4
    places = [text.index(f"{number}. cosine {one['cosine']:.3f}{one['image']}") for number, one in enumerate(output, 1)]
    assert places == sorted(places)
    assert shown_in(html)[0] == thumbnail(read_pixels(Path(output[0]["image"]), "", ReadOptions()))


def test_a_page_of_five_thousand_images_can_be_sent(tmp_path: Path) -> None:
    assert sorted(spread(5000, 4)) == [0, 1250, 2500, 3750]
    assert spread(3, 4) == {0, 1, 2}
    noise = np.random.default_rng(0).integers(0, 2, (300, 300, 3), dtype=np.uint8) * 255
    small = thumbnail(noise[:SIDE, :SIDE])
    assert len(small) <= DENSITY * SIDE**2
    with Image.open(BytesIO(thumbnail(noise[:200]))) as image:
        assert image.size == (SIDE, SIDE * 200 // 300)
    assert segment_predict.MOST_SHOWN * segment_predict.SHOWN_SIDE**2 <= MOST_SHOWN * SIDE**2
    paths = [Path(f"a/folder/of/photographs/{number:05}.jpg") for number in range(5000)]
    actual = Predictions(
        paths, PredictionFiles(csv=tmp_path / "all.csv", html=tmp_path / "page.html"), Console(quiet=True)
    )
    for number, path in enumerate(paths):
        actual.add({"image": str(path)}, small if number in actual.shown else None)
    actual.write("dpn predict", "run", (), lambda result: ["a label that is somewhat long 100.0%", result["image"]])
    assert (tmp_path / "page.html").stat().st_size < 5e6
    html = (tmp_path / "page.html").read_text()
    assert html.count("<img ") == MOST_SHOWN
    assert f"{MOST_SHOWN} of 5000, evenly spread" in html
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 5001


def test_only_images_that_the_page_shows_have_thumbnails(place: Path, tmp_path: Path) -> None:
    paths = sorted((place / "photos").glob("*.jpg"))
    for written, shown in ((PredictionFiles(html=tmp_path / "page.html"), [0, 3]), (PredictionFiles(), [])):
        actual = Predictions(paths, written, Console(quiet=True), most=2)
        batches = actual.read(ReadOptions(), np.shape, batch_size=4, workers=0, label="")
        read = [one for batch in batches for one in batch]
        assert [one.path for one in read] == paths
        assert [one.index for one in read if one.small] == shown


def test_files_that_cannot_be_written_are_refused_before_the_work(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for option, name in (("--csv", "."), ("--html", "file/page.html")):
        process = predict("predict", place, option, name)
        assert process.exit_code == 2
        assert f"{option} {name}: a folder, or inside a file" in process.stderr


@pytest.mark.parametrize("command", [*COMMANDS, "lit search"])
def test_no_file_is_written_over_a_image_or_another_file(command: str, place: Path) -> None:
    write_class_folders(Path("photos"), classes=1, each=1, size=(20, 20))
    image = Path("photos/class0/000.jpg")
    initial = image.read_bytes()
    Path("link.jpg").symlink_to(image)
    network = str(place / f"{command.replace('search', 'predict')}.safetensors")
    asked = [*command.split(), network, "photos", *COMMANDS.get(command, ([], ""))[0]]
    options = ["--csv", "--html"]
    if command == "lit search":
        asked, options = ["lit", "search", network, "--images", "photos", "--query", "a dog"], ["--html"]
    for option in options:
        for name in ("photos/../photos/class0/000.jpg", "link.jpg"):
            result = run_dpn(*asked, option, name)
            assert (result.exit_code, result.stdout) == (2, "")
            assert f"{option} {name}: would be written over one of the images, {image}; name another" in result.stderr
            assert image.read_bytes() == initial
    if len(options) == 2:
        result = run_dpn(*asked, "--csv", "page", "--html", "./page")
        assert (result.exit_code, Path("page").exists()) == (2, False)
        assert "--html page: would be written over the file of --csv" in result.stderr


def test_a_single_damaged_image_is_one_line_and_of_several_each_has_one(place: Path, tmp_path: Path) -> None:
    network = str(place / "predict.safetensors")
    for name in "ab":
        Path(f"{name}.png").write_bytes(b"no image")
    result = run_dpn("predict", network, "a.png", "--skip-bad-images")
    assert (result.exit_code, len(result.stderr.splitlines())) == (3, 1)
    result = run_dpn("predict", network, "a.png", "b.png", "--html", "page.html")
    assert result.exit_code == 3
    assert result.stderr.splitlines()[-1] == "error: none of the 2 images can be read; they are named above"
    assert not Path("page.html").exists()


def test_images_of_one_name_are_drawn_into_folders(place: Path) -> None:
    network = str(place / "segment predict.safetensors")
    photos = write_class_folders(Path("classes"), classes=2, each=1, size=(20, 20))
    result = run_dpn("segment", "predict", network, str(photos), "-o", "out", "--json")
    actual = [entry["labels"] for entry in json.loads(result.stdout)]
    assert actual == [f"out/{name}/000.labels.png" for name in ("class0", "class1")]
    assert all(Path(name).is_file() for name in actual)
    (photos / "class1" / "000.png").write_bytes((photos / "class1" / "000.jpg").read_bytes())
    for asked, names in ((photos, ("class0/000", "class1/000.jpg", "class1/000.png")),
                         (photos / "class1", ("000.jpg", "000.png"))):  # fmt: skip
        result = run_dpn("segment", "predict", network, str(asked), "-o", "both", "--json")
        assert [one["labels"] for one in json.loads(result.stdout)] == [f"both/{name}.labels.png" for name in names]
    result = run_dpn("segment", "predict", network, str(photos), str(photos / "class1" / "000.png"), "-o", "out")
    assert result.exit_code == 2
    assert "both would be written as class1/000.png.labels.png" in result.stderr


def test_outputs_in_the_folder_of_the_images_are_not_read(place: Path) -> None:
    network = str(place / "segment predict.safetensors")
    photos = write_class_folders(Path("classes"), classes=1, each=2, size=(20, 20)) / "class0"
    asked = ["segment", "predict", network, str(photos), "--json", "-o"]
    for output, left in ((photos, 0), (photos, 6), (photos / "drawn", 6)):
        result = run_dpn(*asked, str(output))
        report = json.loads(result.stdout)
        assert [one["image"] for one in report] == [f"{photos}/{number:03d}.jpg" for number in range(2)]
        assert ("left out 6 images called *.labels.png, *.overlay.png" in result.stderr) == bool(left)
    sample = photos / "000.labels.png"
    initial = sample.read_bytes()
    result = run_dpn("segment", "predict", network, str(photos / "000.jpg"), str(sample), "-o", str(photos))
    assert (result.exit_code, sample.read_bytes()) == (2, initial)
    assert f"{sample}: would be written over by the files of another image" in result.stderr


def test_classes_are_counted_and_the_most_frequent_comes_first() -> None:
    table = tally("x", "class", ["a", "b", "b", "b"])
    assert [tuple(row) for row in table.rows] == [("b", 3, 75.0), ("a", 1, 25.0)]


def test_a_legend_keeps_classes_of_one_name_apart() -> None:
    html = render("x", [PageSection("y", [Legend("z", [("a", "#000000"), ("a", "#ffffff")])])], {})
    parse_page(html)
    assert html.count("<li>") == 2


COUNTED = {
    "predict": ["predict", "predict.safetensors", "good"],
    "lit predict": ["lit", "predict", "lit predict.safetensors", "good", "--labels", "a,b"],
    "segment predict": ["segment", "predict", "segment predict.safetensors", "good"],
    "eval": ["eval", "predict.safetensors", "--data", "classes", "--split", "all"],
    "lit eval": ["lit", "eval", "lit predict.safetensors", "--data", "classes", "--split", "train", "--force"],
    "eval fewshot": ["eval", "fewshot", "predict.safetensors", "--data", "classes", "--val-fraction", "0.5",
                     "--shots", "1"],
    "retrofit": ["checkpoint", "retrofit", "plain.safetensors", "new.safetensors", "--data", "good"],
    "predict.safetensors": ["inspect", "predict.safetensors", "--data", "good"],
}  # fmt: skip


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("label", COUNTED)
def test_commands_that_read_images_report_progress(label: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_class_folders(Path("classes"), classes=3, each=4, size=(20, 20))
    write_class_folders(Path("good"), classes=2, each=4, size=(20, 20))
    for number, name in enumerate(("ant", SCRIPT, "cow")):
        Path(f"classes/class{number}").rename(f"classes/{name}")
    for path in place.glob("*.safetensors"):
        Path(path.name).symlink_to(path)
    export_backbone(load_backbone("mu/8", stem="none", image_size=16), Path("plain.safetensors"))
    monkeypatch.setattr(console, "LINE_EVERY", -1.0)  # a line every time
    result = run_dpn(*COUNTED[label])
    assert result.exit_code == 0, result.output
    told = re.findall(rf"^{label.removesuffix('.safetensors')}: (\d+) of (\d+) images$", result.stderr, re.MULTILINE)
    assert told, result.stderr
    assert told[-1][0] == told[-1][1]


def test_a_name_below_a_thumbnail_breaks_at_its_separators() -> None:
    gallery = Gallery("Images", [PageImage(b"", ["clothes/dress-1/IMG_2023<b>.jpeg", "dress 39.9%"])])
    page = render("Page", [PageSection("Images", [gallery])], {})
    assert "clothes/<wbr>dress-<wbr>1/<wbr>IMG_<wbr>2023&lt;b&gt;<wbr>.jpeg<br>dress 39.9%" in page
