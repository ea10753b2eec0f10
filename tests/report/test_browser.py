"""A page in a browser, on machines that have one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from dpn_cli.report.charts import COLOURS
from support.pages import make_page, write_classifier_run
from support.programs import run_program

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_page_is_shown_without_complaints(tmp_path: Path) -> None:
    make_page(tmp_path, write_classifier_run(tmp_path / "run"))
    place, shot = tmp_path / "page" / "report.html", tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1000,1600"]
    options += [f"--user-data-dir={tmp_path}/own", f"--screenshot={shot}", "--dump-dom"]
    result = run_program([str(BROWSER), *options, place.as_uri()])
    assert result.returncode == 0, result.stderr
    assert ":CONSOLE" not in result.stderr, result.stderr
    for title in ("Overview", "Learning curves", "Scores", "Run"):
        assert f"<h2>{title}</h2>" in result.stdout
    with Image.open(shot) as image:
        pixels = np.array(image.convert("RGB"))
    lines = (pixels == ImageColor.getrgb(COLOURS[0])).all(-1)
    assert lines.sum() > 500  # the curves
    assert lines.any(0).sum() > 300  # two of them side by side
