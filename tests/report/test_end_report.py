"""The page that a training writes into its folder at its end."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

# a fixture
from dpn_cli.report import page
from support.cli import run_dpn
from support.images import write_class_folders
from support.pages import parse_page
from tasks.classify.predictions_file import MOST_MISTAKES

HTML = "{http://www.w3.org/1999/xhtml}"
SMALL = ["--image-size", "16", "--steps", "2", "-b", "8", "-j", "0", "--device", "cpu", "--json"]
NEW = ["--arch", "mu/8", "--checkpoint", "none", *SMALL]


@pytest.fixture(scope="module")
def highres(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    photos = write_class_folders(
        tmp_path_factory.mktemp("data") / "photos", classes=4, each=10
    )  # the last looks like the first
    return ["finetune", "highres", "--data", str(photos), "--val-fraction", "0.2", *NEW]


@pytest.fixture(scope="module")
def finished(highres: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run without its page."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run_dpn(*highres, "--no-report", "-o", str(folder)).exit_code == 0
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run, in a session that writes pages."""
    monkeypatch.delenv("DPN_NO_REPORT")
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.usefixtures("without_charts")
def test_a_finished_run_has_the_page_that_report_writes_and_keeps_it(
    highres: list[str], copy: Path, tmp_path: Path
) -> None:
    assert not (copy / "report").exists()
    result = run_dpn(*highres, "-o", str(copy), "--resume")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((copy / "result.json").read_text())
    assert f"report: {copy / 'report' / 'report.html'}" in result.stderr
    html = (copy / "report" / "report.html").read_bytes()
    titles = [title.text for title in parse_page(html.decode()).iter(f"{HTML}h2")]
    assert titles[2:7] == ["Scores", "Calibration", "Classes", "Confusions", "Most confident mistakes"]
    with (copy / "report" / "figures" / "confusion.csv").open() as file:
        counts = [(row["true"] == row["predicted"], int(row["images"])) for row in csv.DictReader(file)]
    right = sum(images for same, images in counts if same)
    assert 100 * right / sum(images for _, images in counts) == json.loads(result.stdout)["top1"]
    assert 0 < html.count(b'<img src="data:image/jpeg') <= MOST_MISTAKES
    assert run_dpn("report", str(copy), "-o", str(tmp_path / "page")).exit_code == 0
    assert (tmp_path / "page" / "report.html").read_bytes() == html
    os.utime(copy / "report" / "report.html")
    (copy / "report" / "figures" / "loss.png").unlink()
    assert run_dpn(*highres, "-o", str(copy), "--resume").exit_code == 0
    assert not (copy / "report" / "figures" / "loss.png").exists()  # the page is not drawn again
    os.utime(copy / "report" / "report.html", (0, 0))
    assert run_dpn(*highres, "-o", str(copy), "--resume").exit_code == 0
    assert (copy / "report" / "figures" / "loss.png").exists()  # it was older than the result


def test_an_option_and_a_variable_leave_the_page_out(
    highres: list[str], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_dpn(*highres, "-o", str(copy), "--resume", "--no-report").exit_code == 0
    assert not (copy / "report").exists()
    monkeypatch.setenv("DPN_NO_REPORT", "1")
    assert run_dpn(*highres, "-o", str(copy), "--resume").exit_code == 0
    assert not (copy / "report").exists()


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_a_page_that_is_not_drawn_is_a_warning(
    number: signal.Signals | None, highres: list[str], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != "run.json"}

    def draw(*arguments: Any) -> tuple[str, bytes]:
        if number is None:
            raise ZeroDivisionError("no such chart")
        os.kill(os.getpid(), number)
        return "<svg></svg>", b""

    monkeypatch.setattr(page, "draw", draw)
    result = run_dpn(*highres, "-o", str(copy), "--resume", "-q")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((copy / "result.json").read_text())
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "warning: stopped at the run's page" if number else "warning: the run's page was not written"
    )
    assert f"'dpn report {copy}'" in line
    assert not (copy / "report" / "report.html").exists()
    assert original.items() <= {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}.items()


def test_a_comparison_has_one_page(highres: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPN_NO_REPORT")
    assert run_dpn(*highres, "--compare", "none,dpn", "-o", str(tmp_path / "run")).exit_code == 0
    assert [path.parent.parent for path in tmp_path.rglob("report.html")] == [tmp_path / "run"]
