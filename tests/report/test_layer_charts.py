"""`dpn report` of runs with ``log.layer_norms``: gradients over depth and steps, stems in one figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpn_cli.report import page
from dpn_cli.report.gradients import layer_charts
from dpn_cli.report.reading import read_run
from support.cli import run_dpn
from support.pages import read_chart_rows, write_classifier_run

BOTH = {"dpn": 1.0, "none": 4.0}


def with_norms(path: Path, embedding: float) -> Path:
    """Write a run whose log has norms at steps 1000, 1800 and 2000; block 10 is logged before block 2."""
    folder = write_classifier_run(path)
    records = []
    for step, count in ((1000, 1000), (1800, 800), (2000, 200)):
        last = float("nan") if step == 2000 else 0.5
        norms = {"embedding": embedding * step, "block 10": last, "block 2": 2.0 * step, "head": 9.0}
        record = {"step": step, "loss": 1.0, "lr": 0.1, "grad_norm": 3.0, "layer_norms": norms}
        records.append({**record, "layer_norms_steps": count})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_depth_is_the_mean_of_the_last_steps_and_the_embedding_is_over_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "draw", lambda chart, prefix: ("<svg></svg>", b""))
    runs = [with_norms(tmp_path / name, factor) for name, factor in BOTH.items()]
    assert run_dpn("report", *map(str, runs), "-o", str(tmp_path / "page")).exit_code == 0
    rows = [(name, int(x), float(y)) for name, x, y in read_chart_rows(tmp_path, "layer_norms")[1:]]
    for name, factor in BOTH.items():  # 1800 over 800 steps and 2000 over 200: 1000 is too early
        assert [row[1:] for row in rows if row[0] == name] == [(0, 1840 * factor), (2, 3680), (10, 0.5)]
    rows = [(name, int(x), float(y)) for name, x, y in read_chart_rows(tmp_path, "embedding_norm")[1:]]
    assert rows == [(name, step, factor * step) for name, factor in BOTH.items() for step in (1000, 1800, 2000)]


def test_runs_without_these_norms_have_no_such_charts(tmp_path: Path) -> None:
    assert layer_charts({"run": [read_run(write_classifier_run(tmp_path / "run"))]}, "") == []
    folder = write_classifier_run(tmp_path / "text")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "layer_norms": 3}\n{"step": 9, "layer_norms": {"embedding": "x", "block b": 1}}\n')
    assert layer_charts({"run": [read_run(folder)]}, "") == []
