"""`dpn reproduce` runs trainings: what is done, missing, failed or here already, and the figures of real ones."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpn_cli.errors import NonFiniteError
from dpn_cli.reproduce import run as runner
from dpn_cli.reproduce.experiment import PaperTrial
from dpn_cli.reproduce.paper import EXPERIMENTS
from dpn_cli.reproduce.trainings import LOGGED, SmallTrainings, Trainings
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.cli import run_dpn
from support.programs import program_environment


class Trainer:
    """Stands for every task's module: notes what it is given and writes the result that a test wants."""

    def __init__(self, score: Callable[[str], float]) -> None:
        self.score, self.configs, self.failed = score, dict[str, Any](), list[str]()

    def __call__(self, training: Any, config: Any, console: Any) -> tuple[Any, Any]:
        return config, self

    def run(self, config: Any, place: Any, console: Any) -> dict[str, Any]:
        assert place.resume
        name = "/".join(place.folder.parts[-3:])
        self.configs[name] = config
        place.folder.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {"task": "pretrain", "top1": self.score(name)}
        result |= {"failed": self.failed} if name.startswith("vtab/") else {}
        (place.folder / "result.json").write_text(json.dumps(result))
        return result


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trainer:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPN_DATA_DIR", raising=False)
    stand_in = Trainer(lambda name: 60.0 + len(name) / 10)
    monkeypatch.setattr(runner, "load_trainer", stand_in)
    return stand_in


def test_finished_trainings_are_reused_and_shared(trainer: Trainer, tmp_path: Path) -> None:
    first = run_dpn("reproduce", "table6", "--small", "--seeds", "2", "-o", "out", "--json")
    assert first.exit_code == 0, first.stderr
    assert len(trainer.configs) == 14
    assert trainer.configs["imagenet/rms/seed1"].seed == 1
    assert trainer.configs["imagenet/rms/seed1"].schedule.steps == SmallTrainings.steps
    trainer.configs.clear()
    (tmp_path / "out/imagenet/rms/seed1/result.json").unlink()
    second_result = run_dpn("reproduce", "table6", "fig1", "--small", "--seeds", "2", "-o", "out", "--json")
    assert second_result.exit_code == 0, second_result.stderr
    done = set(trainer.configs)
    assert "imagenet/rms/seed1" in done  # the one that was lost
    assert "imagenet/dpn/seed0" not in done  # Table 6 has it
    assert len(done) == 1 + 2 * 11  # and Figure 1's other placements and plain networks
    output = json.loads(second_result.stdout)["experiments"]
    rms = next(number for number in output[0]["numbers"] if number["row"] == "rms")
    assert rms["ours"]["mean"] == pytest.approx(0.0)  # both names are equally long
    assert rms["paper"] == 0.0
    page = (tmp_path / "out/table6/report.html").read_text()
    assert "not the paper&#39;s numbers" in page or "not the paper's numbers" in page
    assert (tmp_path / "out/table6/table.md").read_text().count("| B/16 |") == 6


def test_a_training_that_fails_is_listed_and_the_others_continue(trainer: Trainer, tmp_path: Path) -> None:
    def score(name: str) -> float:
        if "/post/" in name:
            raise NonFiniteError("the loss is NaN")
        return 50.0

    trainer.score = score
    result = run_dpn("reproduce", "table6", "--small", "--seeds", "1", "-o", "out")
    assert result.exit_code == 6
    assert "1 training failed (imagenet/post/seed0: the loss is NaN)" in result.stderr.replace("\n", " ")
    assert len(trainer.configs) == 7
    assert "these are not the paper's numbers" in " ".join(result.stdout.split())


def test_trainings_that_start_from_a_failed_one_wait(trainer: Trainer) -> None:
    def score(name: str) -> float:
        raise NonFiniteError("the loss is NaN")

    trainer.score = score
    result = run_dpn("reproduce", "table3", "--small", "-o", "out")
    assert result.exit_code == 6
    assert set(trainer.configs) == {"imagenet/none/seed0", "imagenet/dpn/seed0"}


def test_a_sweep_with_cells_that_failed_is_not_done(trainer: Trainer) -> None:
    trainer.failed = ["svhn, lr 0.01, seed 0: NaN"]
    result = run_dpn("reproduce", "table3", "--small", "-o", "out")
    assert result.exit_code == 6
    assert "2 trainings failed (vtab/imagenet-none/3-seeds: svhn, lr 0.01, seed 0: NaN" in " ".join(
        result.stderr.split()
    )


def test_mistakes_of_any_training_are_reported_before_the_first_starts(trainer: Trainer) -> None:
    result = run_dpn("reproduce", "table3", "--small", "-o", "out", "--set", "label_smoothing=0.1")  # VTAB has none
    assert result.exit_code == 2
    assert "label_smoothing" in result.stderr
    assert not trainer.configs


def test_missing_data_are_listed_and_the_other_trainings_run(trainer: Trainer, tmp_path: Path) -> None:
    listed = run_dpn("reproduce", "--json")
    assert listed.exit_code == 0
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert list(rows) == list(EXPERIMENTS)
    assert rows["table3"]["data"] == {"imagenet": None, "vtab-1k": None}
    assert rows["table6"]["trainings"] == rows["table6"]["left"] == 105
    result = run_dpn("reproduce", "table3", "-o", "out")
    assert result.exit_code == 3
    assert "needs imagenet; needs vtab-1k, imagenet)" in " ".join(result.stderr.split())
    assert not trainer.configs
    (tmp_path / "data/imagenet").mkdir(parents=True)
    (tmp_path / "imagenet").mkdir()  # the option goes before what is found
    result = run_dpn("reproduce", "table3", "-o", "out", "--data", "imagenet=data/imagenet")
    assert result.exit_code == 3
    assert "needs vtab-1k" in result.stderr
    assert {config.data.source for config in trainer.configs.values()} == {"data/imagenet"}
    assert len(trainer.configs) == 4
    planned = run_dpn("reproduce", "table3", "--plan", "-o", "out").stdout.splitlines()
    assert [line.split()[:3] for line in planned] == [["dpn", "finetune", "vtab"]] * 4
    (tmp_path / "imagenet").rmdir()
    trainer.configs.clear()
    result = run_dpn("reproduce", "table3", "-o", "out", "--data", "vtab-1k=data")
    assert result.exit_code == 0, result.stderr
    assert {name.split("/")[0] for name in trainer.configs} == {"vtab"}  # which needs the other data no more


def test_weights_that_are_here_are_not_trained(trainer: Trainer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DPN_HOME", str(tmp_path / "home"))
    for name in ("plain.npz", "a.npz", "b.npz"):
        Path(name).touch()
    Path("data").mkdir(exist_ok=True)
    given = ("--weights", "imagenet/B-32-none=plain.npz")
    (tmp_path / "home/weights").mkdir(parents=True)
    (tmp_path / "home/weights/B-32-dpn.safetensors").touch()
    lines = run_dpn("reproduce", "table3", "--plan", *given, "--set", "runtime.compile=true").stdout.splitlines()
    plans = [runner.layers(shlex.split(line)[1:]) for line in lines]
    assert [plan.backbone.arch for plan in plans if plan.backbone.checkpoint == "none"] == ["B/16", "B/16"]
    started = [plan.backbone.checkpoint for plan in plans]
    assert "plain.npz" in started
    assert str(tmp_path / "home/weights/B-32-dpn.safetensors") in started
    assert all(plan.runtime.compile for plan in plans)
    plain = (*given, "--weights", "imagenet/B-16-none=a.npz", "--weights", "imagenet/B-16-dpn=b.npz")
    result = run_dpn("reproduce", "table3", "-o", "out", *plain, "--data", "vtab-1k=data")
    assert result.exit_code == 0, result.stderr
    assert {config.backbone.checkpoint for config in trainer.configs.values()} == {*started, "a.npz", "b.npz"} - {
        "none", *(f"runs/paper/imagenet/B-16-{stem}/seed0" for stem in ("none", "dpn"))
    }  # fmt: skip
    # A table whose number is the pre-training's own score trains it nevertheless.
    assert "--arch B/32 --stem none" in run_dpn("reproduce", "table6", "fig1", "--plan", "--seeds", "1").stdout
    small = run_dpn("reproduce", "table5", "--small", "--plan").stdout.splitlines()
    assert len(small) == 2 + 5 * 2 * 3  # the paper's ten seeds are three here


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tabel6",), "did you mean 'table6'?"),
        (("table6", "--data", "imagenet"), "--data 'imagenet': write NAME=PLACE"),
        (("table6", "--data", "imagnet=x"), "'imagnet' is none of imagenet,"),
        (("table6", "--plan", "--data", "imagenet=nowhere"), "--data 'imagenet=nowhere': no such file or folder"),
        (("table3", "--weights", "imagenet/B-32-dpn=x.npz"), "'imagenet/B-32-dpn=x.npz': no such file or folder"),
        (("table6", "--weights", "imagenet/B-32-dpn=x.npz"), "there is none to name for these"),
        (("table3", "--weights", "imagenet/L-16-dpn=x"), "'imagenet/L-16-dpn' is none of imagenet/B-32-none,"),
        (("table6", "--small", "--set", "lrr=1"), "lrr"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_dpn("reproduce", *words)
    assert result.exit_code == (3 if "no such file" in message else 2)
    assert message in result.stderr
    assert result.stderr.count("\n") <= 2


@pytest.mark.usefixtures("without_charts")
def test_figures_are_made_from_real_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    """Two steps of both stems, then the gradients over depth and the scales of the first norm."""

    def imagenet(make: Trainings, arch: str, stem: str, seed: int) -> PaperTrial:
        size = ("--arch", "mu/8", "--image-size", "16", "--augment", "none", "-b", "4", "--steps", "2", "-j", "0")
        words = ("imagenet", "--stem", stem, "--seed", str(seed), *size, "--val-fraction", "0.4", *LOGGED)
        return PaperTrial(f"imagenet/{stem}/seed{seed}", "pretrain", (*words, "--data", str(photos)))

    monkeypatch.setattr(SmallTrainings, "imagenet", imagenet)
    result = run_dpn("reproduce", "fig2", "fig3", "--small", "-q", "-o", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    layers = (tmp_path / "fig2/B-16/figures/layer_norms.csv").read_text().splitlines()[1:]
    depths = [line.split(",")[:2] for line in layers]
    assert depths == [[f"{stem}/seed0", str(depth)] for stem in ("none", "dpn") for depth in range(2)]
    for page in ("fig2/B-16", "fig3/imagenet-dpn"):
        assert "these are not the paper" in (tmp_path / page / "report.html").read_text()
    scales = json.loads((tmp_path / "fig3/imagenet-dpn/result.json").read_text())
    assert scales["networks"][0]["stem"] == "dpn"
    assert "open it in a browser" in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("without_charts")
def test_a_process_of_its_own_makes_the_same_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photos: Path
) -> None:
    def imagenet(make: Trainings, arch: str, stem: str, seed: int) -> PaperTrial:
        size = ("--arch", "mu/8", "--image-size", "16", "--augment", "none", "-b", "4", "--steps", "2", "-j", "0")
        words = ("imagenet", "--stem", stem, *size, "--val-fraction", "0.4", "--data", str(photos))
        return PaperTrial(f"imagenet/{stem}/seed{seed}", "pretrain", words)

    monkeypatch.setattr(SmallTrainings, "imagenet", imagenet)
    for name, value in program_environment().items():
        monkeypatch.setenv(name, value)
    single, processes = tmp_path / "alone", tmp_path / "processes"
    for out, jobs in ((single, "1"), (processes, "2")):
        result = run_dpn("reproduce", "fig3", "--small", "--jobs", jobs, "-o", str(out))
        assert result.exit_code == 0, result.stderr
    assert str(processes / "logs/imagenet-dpn-seed0.log") in result.stderr.replace("\n", "")
    one, other = (load_file(out / "imagenet/dpn/seed0/weights.safetensors") for out in (single, processes))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_failure_in_a_process_is_listed_and_dependent_trainings_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'error: the loss is NaN' >&2\nexit 5\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    result = run_dpn("reproduce", "table3", "--small", "--jobs", "2", "-o", str(tmp_path / "out"), "--json")
    assert result.exit_code == 6
    told = json.loads(result.stdout)
    assert told["failed"] == {f"imagenet/{stem}/seed0": "the loss is NaN" for stem in ("none", "dpn")}
    assert len(told["waiting"]) == 2
    assert all("starts from imagenet/" in reason for reason in told["waiting"].values())


@pytest.mark.parametrize("code", [2, 3])
def test_a_mistake_in_a_process_ends_all(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho 'error: not like this' >&2\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    result = run_dpn("reproduce", "table3", "--small", "--jobs", "2", "-o", str(tmp_path / "out"), "--json")
    assert (result.exit_code, result.stdout) == (code, "")
    assert re.search(r"error: imagenet/\w+/seed0: not like this \(", result.stderr)


def test_weights_that_are_here_are_inspected_and_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export_backbone(load_backbone("mu/8", stem="dpn", image_size=16, seed=0), tmp_path / "given.safetensors")
    given = ("fig3", "--small", "--weights", "imagenet/dpn=given.safetensors", "-o", "out")
    assert run_dpn("reproduce", *given, "--plan").stdout == "nothing is left to train\n"
    result = run_dpn("reproduce", *given, "--json")
    assert result.exit_code == 0, result.stderr
    (page,) = json.loads(result.stdout)["experiments"][0]["pages"]
    assert Path(page).is_file()
    networks = json.loads((Path(page).parent / "result.json").read_text())["networks"]
    assert [network["stem"] for network in networks] == ["dpn"]
    assert not Path("out/imagenet").exists()


def test_scenes_in_files_are_every_class_in_every_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SPLITS", {"train": 2, "val": 1, "test": 1})
    runner.write_scenes(tmp_path)
    for split, most in runner.SPLITS.items():
        folders = sorted((tmp_path / split).iterdir())
        assert len(folders) == 24
        assert all(len(list(folder.iterdir())) == most for folder in folders)
