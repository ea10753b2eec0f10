"""Networks side by side in `dpn eval fewshot`: the same draws for all, kept one by one."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

# a fixture
from dpn_cli.errors import StoppedError
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.cli import run_dpn
from support.images import write_class_folders
from support.pages import make_page, parse_page
from tasks.classify import fewshot
from tasks.classify.probe import encode

SHOTS = ("2-shot", "1-shot")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three classes that are hard to tell apart, and networks with both stems."""
    root = tmp_path_factory.mktemp("probes")
    write_class_folders(root / "photos", classes=3, each=10)
    for number in range(0, 10, 2):
        first, *others = (root / "photos" / f"class{label}" / f"{number:03d}.jpg" for label in range(3))
        for other in others:
            contents = first.read_bytes()
            first.write_bytes(other.read_bytes())
            other.write_bytes(contents)
    for seed, stem in enumerate(("none", "dpn")):
        export_backbone(load_backbone("mu/8", stem=stem, image_size=16, seed=seed), root / f"mu-{stem}.safetensors")
    return root


def command(root: Path, *words: str, checkpoint: str = "mu-{stem}.safetensors") -> list[str]:
    data = ["--data", str(root / "photos"), "--val-fraction", "0.5", "--shots", "2,1"]
    return ["eval", "fewshot", str(root / checkpoint), *data, "-j", "0", "--device", "cpu", "-q", *words]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stems of the networks that the test encodes images by, once for each part of the data."""
    stems: list[str] = []

    def noting(model: Any, *others: Any, **arguments: Any) -> Any:
        stems.append(model.config.stem)
        return encode(model, *others, **arguments)

    monkeypatch.setattr("tasks.classify.fewshot.encode", noting)
    return stems


def test_each_draw_is_the_one_that_it_would_be_alone(root: Path, tmp_path: Path, encoded: list[str]) -> None:
    asked = ["--compare", "none,dpn", "--seeds", "0,3,4", "-o", str(tmp_path / "all")]
    completed = run_dpn(*command(root, *asked, "--json"))
    assert completed.exit_code == 0, completed.output
    assert encoded == ["none", "none", "dpn", "dpn"]
    result = json.loads(completed.stdout)
    ascending = [SHOTS[1], SHOTS[0]]
    assert (result["score"], result["scores"], result["seeds"]) == (SHOTS[0], ascending, [0, 3, 4])
    values: dict[str, dict[str, list[float]]] = {}
    for stem in ("none", "dpn"):
        words = command(root, "--seeds", "0,3,4", "--json", checkpoint=f"mu-{stem}.safetensors")
        single = json.loads(run_dpn(*words).stdout)["accuracy"]
        values[stem] = {f"{shots}-shot": entry["values"] for shots, entry in single.items()}
        assert list(values[stem]) == ascending
        for key in SHOTS:
            actual = result["compare"]["networks"][stem][key]
            assert actual["values"] == values[stem][key]
    for one in (values["none"], values["dpn"]):
        assert len({*one[SHOTS[0]], *one[SHOTS[1]]}) > 2  # or else every draw could be the first
    assert values["none"] != values["dpn"]
    (difference,) = result["compare"]["differences"]
    for key in SHOTS:
        pairs = [dual - plain for dual, plain in zip(values["dpn"][key], values["none"][key], strict=True)]
        assert difference[key]["values"] == pytest.approx(pairs, abs=1e-3)
        assert difference[key]["stderr"] == pytest.approx(stats.sem(pairs), abs=1e-3)
    count = len(encoded)
    second_result = run_dpn(*command(root, *asked, "--resume", "--json"))
    assert (json.loads(second_result.stdout), len(encoded)) == (result, count)
    output = " ".join(run_dpn(*command(root, *asked, "--resume")).stdout.split())
    assert "fewshot: 2-shot in %, and the difference to none, paired by seed" in output
    assert "over n draws of the images with different seeds" in output
    assert run_dpn("report", str(tmp_path / "all"), "-o", str(tmp_path / "page")).exit_code == 0
    table = (tmp_path / "page" / "table.md").read_text()
    assert "2-shot in % of each network" in table
    assert "1-shot in % of each network" in table


def test_a_stopped_probe_continues_with_the_missing_draws(
    root: Path, tmp_path: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--compare", "none,dpn", "--seeds", "2", "-o", str(tmp_path / "all")]
    done: list[int] = []
    accuracy = fewshot.ProbeFeatures.accuracy

    def stopped(features: fewshot.ProbeFeatures, shots: int, seed: int) -> float:
        done.append(seed)
        if len(done) == 7:  # two shots of two draws of the first network, and of one of the other
            raise StoppedError(signal.SIGTERM)
        return accuracy(features, shots, seed)

    with monkeypatch.context() as patch:
        patch.setattr(fewshot.ProbeFeatures, "accuracy", stopped)
        assert run_dpn(*command(root, *asked)).exit_code == 75
    assert encoded == ["none", "none", "dpn", "dpn"]
    assert (tmp_path / "all" / "dpn" / "seed0" / "result.json").is_file()
    resumed = run_dpn(*command(root, *asked, "--resume", "--json"))
    assert encoded == ["none", "none", *["dpn"] * 4]
    full = run_dpn(*command(root, *asked[:-1], str(tmp_path / "whole"), "--json"))
    assert json.loads(resumed.stdout) == json.loads(full.stdout)
    assert "different config (seeds: " in run_dpn(*command(root, *asked[:3], "3", *asked[4:], "--resume")).stderr
    weights = tmp_path / "mu-dpn.safetensors"
    (tmp_path / "mu-none.safetensors").write_bytes((root / "mu-none.safetensors").read_bytes())
    for seed, code in ((1, 0), (2, 3)):
        export_backbone(load_backbone("mu/8", stem="dpn", image_size=16, seed=seed), weights)
        words = command(root, *asked[:-1], str(tmp_path / "own"), "--resume")
        words[2] = str(tmp_path / "mu-{stem}.safetensors")
        changed = run_dpn(*words)
        assert changed.exit_code == code, changed.output
        (tmp_path / "own" / "result.json").unlink(missing_ok=True)
    assert "stem dpn: the weights have changed since this comparison started" in changed.stderr


def test_draws_that_were_deleted_are_rebuilt(root: Path, tmp_path: Path, encoded: list[str]) -> None:
    asked = command(root, "--compare", "none,dpn", "--seeds", "2", "-o", str(tmp_path / "all"), "--json")
    original = json.loads(run_dpn(*asked).stdout)
    lost = tmp_path / "all" / "dpn" / "seed1" / "result.json"
    lost.unlink()
    encoded.clear()
    second_result = run_dpn(*asked, "--resume")
    assert json.loads(second_result.stdout) == original
    assert encoded == ["dpn", "dpn"]
    assert lost.is_file()


def test_features_that_are_no_numbers_are_failed_draws(root: Path, tmp_path: Path) -> None:
    model = load_backbone("mu/8", image_size=16)
    torch.nn.init.constant_(model.get_parameter("norm.weight"), 3e38)
    export_backbone(model, tmp_path / "overflows.safetensors")
    networks = f"checkpoint={root}/mu-none.safetensors;checkpoint={tmp_path}/overflows.safetensors"
    words = [word for word in command(root, "--compare", networks, "-o", str(tmp_path / "all")) if "{stem}" not in word]
    result = run_dpn(*words)
    assert result.exit_code == 6
    assert "3 draws of the images failed" in result.stderr
    assert result.stdout.count("features are NaN or infinite") == 3
    partial = json.loads((tmp_path / "all" / "partial.json").read_text())
    first, second = partial["compare"]["networks"].values()
    assert (first["2-shot"]["n"], second["2-shot"]) == (3, None)
    single = run_dpn(*command(root, checkpoint=str(tmp_path / "overflows.safetensors")))
    assert single.exit_code == 5


def test_draws_of_other_images_are_not_added(root: Path, tmp_path: Path) -> None:
    photos = shutil.copytree(root / "photos", tmp_path / "photos")
    words = command(root, "--compare", "none,dpn", "-o", str(tmp_path / "all"))
    words[words.index("--data") + 1] = str(photos)
    assert run_dpn(*words).exit_code == 0
    (tmp_path / "all" / "result.json").unlink()
    next(photos.rglob("*.jpg")).unlink()
    changed = run_dpn(*words, "--resume")
    assert changed.exit_code == 3
    assert "the data have changed since this comparison started" in changed.stderr


@pytest.mark.usefixtures("without_charts")
def test_a_page_calls_draws_by_their_name_and_knows_no_hours(tmp_path: Path) -> None:
    score = {"mean": 12.0, "std": 2.0, "n": 2, "stderr": 1.4, "ci95": [1.0, 23.0]}
    draws = {f"seed{seed}": {"task": "fewshot", "5-shot": 12.0} for seed in (0, 1)}
    result: dict[str, Any] = {"task": "fewshot", "score": "5-shot", "failed": []}
    result["compare"] = {"networks": {"dpn": {"runs": draws, "5-shot": score}}, "differences": []}
    (tmp_path / "run.json").write_text(json.dumps({"kind": "comparison", "status": "finished"}))
    (tmp_path / "result.json").write_text(json.dumps(result))
    text = " ".join(part.strip() for part in parse_page(make_page(tmp_path, tmp_path)).itertext() if part.strip())
    assert "standard deviation over draws of the images with different seeds" in text
    assert "Every draw" in text
    assert "hours of training -" in text


@pytest.mark.usefixtures("without_charts")
def test_the_folder_has_a_page_unless_it_is_left_out(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPN_NO_REPORT")
    words = command(root, "--seeds", "2", checkpoint="mu-dpn.safetensors")
    for name, more in (("with", []), ("without", ["--no-report"])):
        assert run_dpn(*words, *more, "-o", str(tmp_path / name)).exit_code == 0
    assert [path.parts[-3] for path in tmp_path.rglob("report.html")] == ["with"]


def test_one_network_keeps_its_draws_too(root: Path, tmp_path: Path) -> None:
    words = command(root, "-o", str(tmp_path / "one"), "--seeds", "2", "--json", checkpoint="mu-dpn.safetensors")
    result = json.loads(run_dpn(*words).stdout)
    assert list(result["compare"]["networks"]["dpn"]["runs"]) == ["seed0", "seed1"]
    (listed,) = json.loads(run_dpn("runs", str(tmp_path / "one"), "--json").stdout)
    assert (listed["metric"], listed["status"]) == ("2-shot, dpn", "finished")


@pytest.mark.parametrize(
    ("checkpoint", "words", "message"),
    [
        ("mu-{stem}.safetensors", [], r"\{stem\} is the stem of each network of --compare, and there is none"),
        ("mu-dpn.safetensors", ["--compare", "none,dpn"], "'none' and another network are both .*mu-dpn"),
        ("mu-{stem}.safetensors", ["--compare", "dpn"], "--compare: needs two stems"),
        ("mu-{stem}.safetensors", ["--compare", "none;stem=dpn,norm=ln"], "norm is no key; use checkpoint, or write"),
        ("mu-{stem}.safetensors", ["--compare", "none,rms"], "stem rms: .*no such file"),
        ("mu-dpn.safetensors", ["--resume"], "--resume and --overwrite: nothing is kept without -o or --compare"),
        ("mu-dpn.safetensors", ["--seeds", "0"], "--seeds: how many seeds, at most 1000, or a list"),
        (
            "mu-{stem}.safetensors",
            ["--compare", "none;stem=rms,checkpoint=PLACE"],
            "stem=rms,checkpoint=.*has stem dpn; name the weights of each network",
        ),
    ],
)
def test_mistakes_are_one_line(
    checkpoint: str, words: list[str], message: str, root: Path, tmp_path: Path, encoded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = [word.replace("PLACE", str(root / "mu-dpn.safetensors")) for word in words]
    result = run_dpn(*command(root, *words, checkpoint=checkpoint))
    assert result.exit_code in (2, 3)
    (line,) = result.stderr.strip().splitlines()
    assert re.search(message, line), line
    assert not encoded
