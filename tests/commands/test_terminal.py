"""Names from elsewhere on a terminal: no control code of a file, class or tensor is obeyed, no bracket is markup."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console as RichConsole
from safetensors.torch import load_file, save_file
from typer.testing import Result

from dpn_cli.config.schema import PredictionFiles
from dpn_cli.report.predictions import Predictions
from dpn_cli.run.console import Console, printable, show_error
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.cli import run_dpn
from support.goldens import GOLDENS
from support.images import write_class_folders
from support.programs import program_environment, run_program
from tasks.classify.classifier import Classifier, save_classifier

RED, TITLE, BOLD, LINES = "\x1b[31mred", "\x1b]0;owned\x07", "[bold]b", "c\nd\r\x85"
NAMES = (RED, TITLE, BOLD, LINES, "\u202eback", "plain")
SHOWN = (r"\x1b[31mred", r"\x1b]0;owned\x07", "[bold]b", r"c\nd\r\x85", r"\u202eback", "plain")


def harmless(process: Result) -> str:
    """Return what a command printed, which holds no control character but the ends of lines."""
    assert process.exception is None or isinstance(process.exception, SystemExit), process.exception
    text = process.stdout + process.stderr
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", text), repr(text)
    return text


@pytest.mark.parametrize(("name", "shown"), list(zip(NAMES, SHOWN, strict=True)))
def test_control_characters_are_escaped(name: str, shown: str) -> None:
    assert printable(name) == shown


def test_bytes_in_no_encoding_are_shown_as_bytes() -> None:
    assert printable(os.fsdecode(b"caf\xe9\xff.jpg")) == r"caf\xe9\xff.jpg"
    assert printable("café 日本 👍🏽 \ud800") == "café 日本 👍🏽 \\ud800"


def test_messages_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.info(RED + LINES)
    console.warn(TITLE + BOLD)
    show_error(RED + LINES)
    show_error("x" * 100_000)
    lines = capsys.readouterr().err.splitlines()
    shown = dict(zip(NAMES, SHOWN, strict=True))
    assert lines[:3] == [
        shown[RED] + shown[LINES],
        f"warning: {shown[TITLE]}{BOLD}",
        f"error: {shown[RED]}{shown[LINES]}",
    ]
    assert len(lines) == 4
    assert len(lines[3]) < 2100


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose classes have hostile names, and a folder of images of each class."""
    root = tmp_path_factory.mktemp("hostile")
    save_classifier(
        Classifier(load_backbone("mu/8", image_size=16, num_classes=6), NAMES, "softmax", 18, {}),
        root / "weights.safetensors",
    )
    source = write_class_folders(root / "plain", classes=6, each=2, size=(20, 20))
    (root / "photos").mkdir()
    for number, name in enumerate(NAMES):
        (source / f"class{number}").rename(root / "photos" / name)
    return root


def test_classes_and_files_of_predict(classifier: Path) -> None:
    result = run_dpn("predict", str(classifier / "weights.safetensors"), str(classifier / "photos"), "-k", "6")
    text = harmless(result)
    for shown in SHOWN:
        assert text.count(shown) >= 12  # of each of twelve images, and in the names of two
    output = json.loads(
        run_dpn("predict", str(classifier / "weights.safetensors"), str(classifier / "photos"), "--json").stdout
    )
    assert {prediction["name"] for one in output for prediction in one["classes"]} <= set(NAMES)


def test_classes_of_eval_and_names_in_its_errors(classifier: Path) -> None:
    weights = str(classifier / "weights.safetensors")
    text = harmless(run_dpn("eval", weights, "--data", str(classifier / "photos"), "--split", "all"))
    assert any(shown in text for shown in SHOWN[:5])
    text = harmless(run_dpn("eval", weights, "--data", f"nowhere{RED}"))
    assert SHOWN[0] in text
    assert len(text.splitlines()) == 1


def test_an_unreadable_image_is_named_harmlessly(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / f"{RED}\n.jpg").write_bytes(b"no image")
    text = harmless(run_dpn("predict", str(classifier / "weights.safetensors"), str(tmp_path)))
    assert rf"{SHOWN[0]}\n.jpg" in text
    assert len(text.splitlines()) == 1


def test_tensors_of_inspect(tmp_path: Path) -> None:
    path = tmp_path / "vit.safetensors"
    export_backbone(load_backbone("mu/8", stem="none", image_size=16), path)
    tensors = load_file(path)
    save_file({**tensors, f"{RED}[red]": torch.zeros(2)}, path)
    text = harmless(run_dpn("checkpoint", "inspect", str(path), "--heads", "2"))
    assert SHOWN[0] in text
    odd = tmp_path / f"{BOLD}{RED}.npz"
    odd.write_bytes((GOLDENS / "vit_dpn.params.npz").read_bytes())
    text = harmless(run_dpn("checkpoint", "inspect", str(odd)))
    assert f"{BOLD}{SHOWN[0]}.npz" in re.sub(r"\s", "", text)  # the column folds what is longer


def predictions(results: list[dict[str, Any]]) -> Predictions:
    actual = Predictions([Path(result["image"]) for result in results], PredictionFiles(), Console())
    actual.results += results
    return actual


@pytest.mark.parametrize("name", NAMES)
def test_labels_and_images_of_lit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.lit import predict, search

    shown = printable(name)
    actual = {"image": name, "labels": [{"label": name, "probability": 1.0, "cosine": 0.5}]}
    monkeypatch.setattr(predict, "predict", lambda *_, **__: predictions([actual]))
    monkeypatch.setattr(search, "search", lambda *_, **__: predictions([{"image": name, "cosine": 0.5}]))
    text = harmless(run_dpn("lit", "predict", "run", "x.jpg", "--labels", "a"))
    assert text.splitlines()[0] == shown
    assert text.splitlines()[1].endswith(shown)
    assert harmless(run_dpn("lit", "search", "run", "--images", "x", "--query", "y")).splitlines() == [
        f"0.500  {shown}"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_classes_of_segment_predict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.segment import predict

    files = dict.fromkeys(("labels", "overlay", "legend"), f"{name}.png")
    result = {"image": name, "classes": [{"name": name, "share": 1.0}], **files}
    monkeypatch.setattr(predict, "predict", lambda *_, **__: predictions([result]))
    lines = harmless(run_dpn("segment", "predict", "run", "x.jpg")).splitlines()
    assert lines[0] == f"{printable(name)}: {printable(name)} 100.0%"
    assert lines[1].strip() == "  ".join([f"{printable(name)}.png"] * 3)


def test_settings_and_options_in_errors() -> None:
    for arguments in (
        ["--set", f"{RED}=1"], ["--set", f"lr={RED}"], [f"--{RED}"], ["--stem", RED], ["--lr", RED],
        ["-c", f"{RED}.yaml"], ["-c", RED], ["--arch", RED], ["--image-size", RED],
        ["--data", RED, "--arch", "mu/8", "--checkpoint", "none"],
        ["--checkpoint", RED, "--data", "demo"], ["--freeze", RED, "--data", "demo"],
    ):  # fmt: skip
        result = run_dpn("finetune", "highres", *arguments, "-q")
        assert result.exit_code in (2, 3)
        text = harmless(result)
        assert r"\x1b" in text
        assert len(text.splitlines()) == 1


@pytest.mark.slow
def test_a_name_in_no_encoding_is_printed_by_a_terminal_of_another(classifier: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8)).save(tmp_path / "plain.png")
    (tmp_path / "plain.png").rename(odd)
    result = run_program(
        [sys.executable, "-m", "dpn_cli", "predict", str(classifier / "weights.safetensors"), str(odd)],
        env=program_environment(PYTHONIOENCODING="ascii", COLUMNS="300"),
    )
    assert result.returncode == 0, result.stderr
    assert r"caf\xe9.png" in result.stdout


def test_a_terminal_shows_the_number_of_images_of_each_class_where_there_are_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dpn_cli.commands import evaluate

    results = [
        {"image": f"{number}.jpg", "classes": [{"name": "cat" if number % 3 else RED, "probability": 0.5}]}
        for number in range(evaluate.MOST_LISTED + 1)
    ]
    evaluate._print_guesses(results)
    assert capsys.readouterr().out.count(".jpg") == len(results)  # a pipe
    monkeypatch.setattr(evaluate, "RichConsole", partial(RichConsole, force_terminal=True))
    evaluate._print_guesses(results[:-1])
    assert capsys.readouterr().out.count(".jpg") == len(results) - 1
    evaluate._print_guesses(results)
    text = capsys.readouterr().out
    assert [line.split()[-1] for line in text.splitlines() if "cat" in line or r"\x1b" in line] == ["14", "7"]
    assert "21 images; --csv or --html" in text
