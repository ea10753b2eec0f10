"""Folders of runs, and the report pages made of them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import html5lib
import yaml

from dpn_cli.config.load import build, merge, read_config
from support.cli import run_dpn
from tasks.classify.highres_config import HighresConfig

Json = dict[str, Any]


SCRIPT_TAG = "<script>alert(1)</script>"


def write_run(
    path: Path, schema: Any, config: str, result: Json | None, kind: str = "classifier", **changes: Any
) -> Path:
    """Write the folder of a run as the commands do."""
    path.mkdir(parents=True)
    plain = build(schema, merge(read_config(config), changes), "test").model_dump(mode="json")
    (path / "config.yaml").write_text(yaml.safe_dump(plain))
    facts = {"kind": kind, "argv": ["dpn", "finetune", "highres"], "versions": {"dpn-cli": "0.1.0"}}
    facts |= {"status": "finished" if result else "running", "data": {"train": "a1", "val": "b2"}}
    facts |= {"updated": "2026-01-01T00:00:00+0000"}
    (path / "run.json").write_text(json.dumps(facts))
    if result:
        (path / "result.json").write_text(json.dumps({"differs_from_paper": None, **result}))
    records = [{"step": step, "loss": 2 / step, "lr": 0.1 * step, "grad_norm": 1.5 / step} for step in range(1, 9)]
    records.append({"step": 8, "accuracy": 31.0})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_classifier_run(path: Path, top1: float = 80.0, seed: int = 0, stem: str = "dpn", **changes: Any) -> Path:
    """Write the folder of a finished high-resolution run."""
    result = {
        **{"task": "highres", "arch": "mu/16", "stem": stem, "top1": top1, "top5": 99.0, "loss": 0.5, "classes": 6},
        **{"images": {"train": 950, "minival": 50, "val": 1000}, "floors": {"chance": 16.7}, "steps": 8},
        **{"minival_top1": 31.0, "best_step": 8, "timing": {"train_seconds": 7.2, "wait_seconds": 1.8}},
    }
    backbone = {"stem": stem}
    return write_run(path, HighresConfig, "highres_demo", result, seed=seed, backbone=backbone, **changes)


def make_page(tmp_path: Path, *runs: Path) -> str:
    """Run ``dpn report``; returns the HTML."""
    result = run_dpn("report", *map(str, runs), "-o", str(tmp_path / "page"))
    assert result.exit_code == 0, result.output
    return (tmp_path / "page" / "report.html").read_text()


def read_chart_rows(tmp_path: Path, name: str) -> list[list[str]]:
    """Read the CSV file of a page's chart."""
    with (tmp_path / "page" / "figures" / f"{name}.csv").open(newline="") as file:
        return list(csv.reader(file))


def parse_page(html: str) -> Any:
    """Assert that a page is valid HTML that loads nothing from elsewhere, and return its tree."""
    tree = html5lib.HTMLParser(strict=True).parse(html)
    ids = [element.get("id") for element in tree.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for element in tree.iter():
        assert not str(element.tag).endswith(("}script", "}link", "}iframe", "}object")), element.tag
        for name, value in element.attrib.items():
            if str(name).rpartition("}")[2] in {"src", "href", "data", "action", "poster", "srcset"}:
                assert value.startswith(("#", "data:image/")), (name, value[:80])
                assert not value.startswith("#") or value[1:] in ids, value
            assert not str(name).startswith("on"), name
    assert not re.search(r"url\((?!#)|@import", html)
    return tree
