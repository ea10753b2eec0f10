"""The VTAB command at toy size: protocol, ledger, resume, failures, data checks, and handwriting learnt."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console as RichConsole

from dpn_cli.config.load import build, merge, read_config
from dpn_cli.data.pixels import shuffled_batches
from dpn_cli.errors import DpnError
from dpn_cli.run.console import Console
from support.cli import run_dpn
from support.vtab import Json, read_ledger, run_vtab, write_vtab_task
from tasks.vtab.config import VtabConfig
from tasks.vtab.result_tables import print_result
from tasks.vtab.tasks import DEMO_TASKS, PAPER_COLUMNS, TASKS, choose_tasks
from tasks.vtab.train import Trainer
from tasks.vtab.trials import choose_lr


def shown(result: Json) -> str:
    """Return the tables as a person sees them."""
    text = io.StringIO()
    print_result(result, RichConsole(width=120, file=text))
    return text.getvalue()


@pytest.mark.slow
def test_handwriting_is_learned(digits: Path, tmp_path: Path) -> None:
    # A shorter form of the run in the README, which goes on to 90 %.
    completed = run_dpn(
        "finetune",
        "vtab",
        "--data",
        str(digits),
        "--tasks",
        "svhn",
        "--checkpoint",
        "none",
        "--arch",
        "mu/4",
        "--image-size",
        "16",
        "--config",
        "vtab_demo",
        "--lrs",
        "0.01",
        "--seeds",
        "1",
        "--steps",
        "400",
        "-o",
        str(tmp_path / "run"),
        "--json",
        "-q",
    )
    assert completed.exit_code == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["tasks"]["svhn"]["test"]["mean"] > 65
    assert (result["task"], result["arch"], result["stem"], result["demo"]) == ("vtab", "mu/4", "dpn", False)


def test_the_result_has_the_documented_keys(toy: Callable[..., Json], tmp_path: Path) -> None:
    result = toy(tmp_path / "run")
    task = result["tasks"]["svhn"]
    assert set(task["val"]) == {"0.001", "0.01", "0.03"}
    assert all(len(values) == 2 for values in task["val"].values())
    means = {float(lr): np.mean(values) for lr, values in task["val"].items()}
    assert task["lr"] == max(means, key=lambda lr: means[lr])
    test = task["test"]
    assert (test["n"], len(test["values"])) == (2, 2)
    assert test["mean"] == pytest.approx(np.mean(test["values"]), abs=1e-3)
    assert test["stderr"] == pytest.approx(np.std(test["values"], ddof=1) / 2**0.5, abs=1e-3)
    # 12.706 is the 97.5 % quantile of Student's t with one degree of freedom.
    assert test["ci95"][1] - test["mean"] == pytest.approx(12.706 * test["stderr"], rel=1e-3, abs=2e-3)
    assert (task["test_images"], task["test_images_in_vtab"], task["chance"]) == (797, 26_032, 10.0)
    assert (result["mean19"], result["mean_groups"], result["protocol"]) == (None, None, "paper")
    assert result["groups"]["natural"]["mean"] == pytest.approx(test["mean"], abs=1e-3)
    assert result["groups"]["structured"] is None
    with (tmp_path / "run" / "result.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert {row["lr"] for row in rows if row["test"]} == {f"{task['lr']:g}"}


def test_only_the_chosen_cells_meet_the_test_split_and_once(
    toy: Callable[..., Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[int] = []
    original = Trainer.count_test

    def counted(self: Trainer, weights: Any) -> Any:
        observed.append(len(weights))
        return original(self, weights)

    monkeypatch.setattr(Trainer, "count_test", counted)
    result = toy(tmp_path / "run")
    chosen = result["tasks"]["svhn"]["lr"]
    assert [(row["lr"], row["seed"], row["images"]) for row in read_ledger(tmp_path / "run")] == [
        (chosen, 0, 797),
        (chosen, 1, 797),
    ]
    assert observed == [2]
    (tmp_path / "run" / "result.json").unlink()  # as if killed just before the end
    second_result = toy(tmp_path / "run", resume=True)
    assert observed == [2]
    assert second_result["tasks"] == result["tasks"]
    assert not list((tmp_path / "run").glob("trials/**/weights.safetensors"))
    assert not list((tmp_path / "run").glob("trials/**/checkpoints"))


def test_the_vtab_protocol_retrains_on_all_thousand(toy: Callable[..., Json], tmp_path: Path) -> None:
    paper, vtab = toy(tmp_path / "paper"), toy(tmp_path / "vtab", "protocol=vtab")
    assert paper["tasks"]["svhn"]["val"] == vtab["tasks"]["svhn"]["val"]
    assert paper["tasks"]["svhn"]["test"]["values"] != vtab["tasks"]["svhn"]["test"]["values"]
    assert {row["trained_on"] for row in read_ledger(tmp_path / "vtab")} == {"train800val200"}
    markers = sorted((tmp_path / "vtab").glob("trials/dpn/svhn/train800val200*/done.json"))
    assert len(markers) == 2


def test_stems_are_compared_pair_by_pair(toy: Callable[..., Json], tmp_path: Path) -> None:
    result = toy(tmp_path / "run", "compare=none,dpn,rms")
    stems = result["compare"]["stems"]
    assert list(stems) == ["none", "dpn", "rms"]
    for difference, stem in zip(result["compare"]["differences"], ("dpn", "rms"), strict=True):
        actual, plain = (stems[name]["tasks"]["svhn"]["test"]["values"] for name in (stem, "none"))
        expected = [a - b for a, b in zip(actual, plain, strict=True)]
        assert (difference["stem"], difference["minus"]) == (stem, "none")
        assert difference["tasks"]["svhn"]["values"] == pytest.approx(expected, abs=1e-3)
    printed = shown(result)
    assert "dpn minus none, paired by seed" in printed
    assert "From scratch, the plain stem often wins" in printed
    assert "± " in printed


def test_checkpoints_of_every_stem_are_found_by_name(
    toy: Callable[..., Json], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dpn_cli.weights.backbone import export_backbone, load_backbone

    for stem in ("none", "dpn"):
        model = load_backbone("mu/8", stem=stem, image_size=32)
        export_backbone(model, tmp_path / f"{stem}.safetensors")
    result = toy(
        tmp_path / "run",
        f"backbone.checkpoint={tmp_path}/{{stem}}.safetensors",
        "compare=none,dpn",
        "seeds=1",
        "lrs=[0.01]",
        console=Console(),
    )
    assert "resized pos_embed 4x4 -> 2x2" in capsys.readouterr().err
    run_file = json.loads((tmp_path / "run" / "run.json").read_text())
    assert result["tasks"]["svhn"]["test"]["n"] == 1
    for stem in ("none", "dpn"):
        report = run_file[f"backbone_{stem}"]
        assert report["source"] == f"{tmp_path}/{stem}.safetensors"
        assert report["resized"] == ["pos_embed 4x4 -> 2x2 (bilinear, align_corners=True)"]
        assert report["new"] == ["head.weight (zero)", "head.bias (zero)"]


def test_the_run_folder_records_the_run(toy: Callable[..., Json], tmp_path: Path) -> None:
    toy(tmp_path / "run", "seeds=1", "lrs=[0.01]")
    run_file = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run_file["status"] == "finished"
    assert {"argv", "versions", "git", "device", "data", "backbone_dpn", "arch"} <= set(run_file)
    assert set(run_file["data"]["svhn"]) == {"train800", "val200", "test"}
    cell = tmp_path / "run" / "trials" / "dpn" / "svhn" / "train800_lr0.01_seed0"
    records = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    assert records[-2]["step"] == 6
    assert "accuracy" in records[-1]
    assert json.loads((cell / "done.json").read_text())["steps"] == 6


def test_augmentation_follows_the_tasks_row(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[tuple[tuple[int, ...], bool, bool, tuple[int, ...]]] = []
    original = shuffled_batches

    def recorded(pixels: Any, size: Any, *arguments: Any, **options: Any) -> Any:
        observed.append((tuple(pixels.images.shape[1:]), options["crop"], options["flip"], size))
        return original(pixels, size, *arguments, **options)

    monkeypatch.setattr("tasks.vtab.train.shuffled_batches", recorded)
    run_vtab(digits, tmp_path / "run", "data.tasks=svhn", "seeds=1", "lrs=[0.01]")
    assert observed == [((3, 18, 18), True, True, (16, 16))]  # 256 / 224 of 16 before the crop
    for augment, shape, crop, flip in (
        ("[flip]", 16, False, True),
        ("[crop]", 18, True, False),
        ("[]", 16, False, False),
    ):
        observed.clear()
        settings = ("data.tasks=svhn", "seeds=1", "lrs=[0.01]", "schedule.steps=2", f"data.augment.svhn={augment}")
        run_vtab(digits, tmp_path / augment, *settings)
        assert observed == [((3, shape, shape), crop, flip, (16, 16))]
    assert {(t.crop, t.flip) for t in TASKS if t.name in {"smallnorb_azi", "dsprites_ori"}} == {(True, False)}
    assert {(t.crop, t.flip) for t in TASKS if t.name in {"clevr_dist", "clevr_count", "dmlab", "kitti"}} == {
        (False, True)
    }
    assert [t.name for t in TASKS if not t.crop and not t.flip] == ["dsprites_loc"]


def test_the_table_has_19_tasks_and_the_papers_means() -> None:
    assert [sum(task.group == group for task in TASKS) for group in ("natural", "specialized", "structured")] == [
        7,
        4,
        8,
    ]
    assert sum(task.test for task in TASKS) == 387_904  # test images of one sweep over all tasks
    means = [round(sum(task.paper[i] for task in TASKS) / 19, 2) for i in range(len(PAPER_COLUMNS))]
    assert means == [64.29, 64.83, 66.13, 66.59]
    assert len({task.folder for task in TASKS}) == 19


def test_tasks_are_chosen_by_group_name_or_folder() -> None:
    assert [t.name for t in choose_tasks(["cifar", "svhn"], demo=False)] == ["cifar100", "svhn"]
    assert len(choose_tasks(["specialized", "camelyon"], demo=False)) == 4
    assert choose_tasks(["all"], demo=True) == DEMO_TASKS
    assert {t.group for t in DEMO_TASKS} == {"natural", "specialized", "structured"}
    with pytest.raises(DpnError, match="did you mean 'eurosat'"):
        choose_tasks(["eurosta"], demo=False)


def test_the_lr_is_chosen_by_the_mean_over_seeds() -> None:
    assert choose_lr({0.1: {0: 50, 1: 90}, 0.2: {0: 71, 1: 71}}, 2) == 0.2
    assert choose_lr({0.2: {0: 70}, 0.1: {0: 70}}, 1) == 0.1
    assert choose_lr({0.1: {0: 99}, 0.2: {0: 1, 1: 1}}, 2) == 0.2
    assert choose_lr({0.1: {0: 99}}, 2) is None


def test_the_score_of_all_19_tasks_is_both_means() -> None:
    from tasks.vtab.result_tables import build_result
    from tasks.vtab.trials import TaskOutcome

    plain = merge(read_config("vtab"), {"seeds": [0, 1], "data": {"source": "x"}})
    built = build(VtabConfig, plain, "config")
    outcomes = [
        TaskOutcome(task, "dpn", {3e-4: {0: 50.0, 1: 50.0}}, {0: task.paper[1], 1: task.paper[1] + 1}, 10, 3e-4)
        for task in TASKS
    ]
    result = build_result(built, outcomes, "B/32", {}, {})
    assert result["mean19"] == pytest.approx(64.83 + 0.5, abs=0.01)
    assert result["mean_groups"] == pytest.approx((70.94 + 81.35 + 51.23) / 3 + 0.5, abs=0.01)
    assert result["tasks"]["svhn"]["edge"] == "lowest"
    printed = shown(result)
    assert "65.33 ± 0.50" in printed
    assert "80.3" in printed  # the paper's svhn beside ours
    assert "better one may lie beyond" in printed
    assert build_result(built, outcomes[:-1], "B/32", {}, {})["mean19"] is None


def test_the_demo_runs_from_nothing_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    completed = run_dpn("finetune", "vtab", "--steps", "26", "--seeds", "1", "--lrs", "1e-2")
    assert completed.exit_code == 0, completed.stderr
    first = " ".join(completed.stderr.split())
    assert "DEMO: generated scenes" in first
    assert "--data DIR" in first
    assert "VTAB demo · mu/16" in completed.stdout
    result = json.loads((tmp_path / "runs" / "vtab_demo" / "mu-16-dpn" / "result.json").read_text())
    assert result["demo"] is True
    assert "no VTAB scores" in result["note"]
    assert set(result["tasks"]) == {task.name for task in DEMO_TASKS}
    assert result["tasks"]["demo_light"]["test"]["mean"] > 60
    assert all(task["test_images"] == 1000 for task in result["tasks"].values())


def test_a_dry_run_goes_through_everything_and_leaves_nothing(digits: Path, tmp_path: Path) -> None:
    result = run_dpn(
        "finetune",
        "vtab",
        "--data",
        str(digits),
        "--tasks",
        "svhn",
        "--arch",
        "mu/8",
        "--image-size",
        "16",
        "--checkpoint",
        "none",
        "-b",
        "16",
        "--dry-run",
        "-o",
        str(tmp_path / "run"),
    )
    assert result.exit_code == 0, result.stderr
    output = " ".join(result.stderr.split())
    assert "dry run passed: 9 trainings in about" in output
    row = result.stdout.splitlines()[1].split()
    assert (row[:2], row[-6:-4]) == (["mu/8", "dpn"], [f"{9 * 2500:,}", "9"])
    assert list(tmp_path.iterdir()) == []


def test_writing_a_task_twice_is_refused(digits: Path) -> None:
    with pytest.raises(FileExistsError):
        write_vtab_task(digits / "svhn", {"test": np.zeros((1, 2, 2), np.uint8)}, {"test": np.zeros(1, np.int64)})
