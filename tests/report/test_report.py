"""`dpn report` and `dpn runs`: what pages hold, and what is said of runs that are unfinished or damaged."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from rich.cells import cell_len
from scipy import stats

from dpn_cli.commands.report import origins_of
from dpn_cli.config.load import build, merge, read_config
from dpn_cli.report.charts import COLOURS, INK, draw
from dpn_cli.report.content import BarChart, ConfusionChart, HeatMap, LineChart, Panel, Series, Table, downsample
from dpn_cli.report.page import write_page
from dpn_cli.report.reading import read_run
from dpn_cli.report.tables import as_latex, as_markdown
from support.cli import run_dpn
from support.pages import SCRIPT_TAG, Json, make_page, parse_page, read_chart_rows, write_classifier_run, write_run
from tasks.classify.distill.config import DistillConfig
from tasks.classify.highres_config import HighresConfig
from tasks.lit.config import LitConfig
from tasks.segment.config import SegmentConfig
from tasks.vtab.config import VtabConfig
from tasks.vtab.result_tables import build_result
from tasks.vtab.tasks import TASKS
from tasks.vtab.trials import TaskOutcome

SVG = "{http://www.w3.org/2000/svg}"


def test_a_page_is_valid_stands_alone_and_escapes_names(tmp_path: Path) -> None:
    folder = write_classifier_run(tmp_path / SCRIPT_TAG.replace("/", "") / "run & co", data={"val_source": SCRIPT_TAG})
    html = make_page(tmp_path, folder)
    tree = parse_page(html)
    assert "<script" not in html
    assert SCRIPT_TAG in "".join(tree.itertext())
    drawings = list(tree.iter(f"{SVG}svg"))
    assert len(drawings) == 4
    assert INK not in html  # lines and text have the page's own colour, light or dark
    assert all(
        "currentColor" in "".join(map(str, drawing.itertext())) or drawing.get("role") == "img" for drawing in drawings
    )
    assert {path.name for path in (tmp_path / "page").iterdir()} == {"report.html", "figures", "table.md", "table.tex"}
    assert all(path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG" for path in (tmp_path / "page").rglob("*.csv"))


def test_the_same_runs_give_the_same_bytes_and_old_figures_are_deleted(tmp_path: Path) -> None:
    folder = write_classifier_run(tmp_path / "run")
    first = make_page(tmp_path, folder)
    (tmp_path / "page" / "figures" / "of_another_run.png").touch()
    images = {path.name: path.read_bytes() for path in (tmp_path / "page" / "figures").iterdir() if path.stat().st_size}
    assert make_page(tmp_path, folder) == first
    assert {path.name: path.read_bytes() for path in (tmp_path / "page" / "figures").iterdir()} == images


@pytest.mark.usefixtures("without_charts")
def test_curves_match_the_log_and_values_name_their_sources(tmp_path: Path) -> None:
    html = make_page(tmp_path, write_classifier_run(tmp_path / "run", lr=0.25))
    header, *rows = read_chart_rows(tmp_path, "loss")
    assert header == ["series", "step", "training loss"]
    assert [(int(step), float(loss)) for _, step, loss in rows] == [(step, 2 / step) for step in range(1, 9)]
    assert read_chart_rows(tmp_path, "accuracy")[1:] == [["run", "8", "31.0"]]
    text = "".join(parse_page(html).itertext())
    assert "given or derived; the config highres_demo has 0.005" in text  # its run.json does not tell
    assert "25.0 %" in text  # 1.8 of 7.2 seconds
    assert "0.002" in text  # hours


def origins(folder: Path) -> dict[str, str]:
    return {key: origin for key, _, origin in origins_of(read_run(folder))}


def test_values_given_on_the_command_line_are_distinguished_from_derived_ones(tmp_path: Path, photos: Path) -> None:
    words = ["--data", str(photos), "--val-fraction", "0.3", "--arch", "mu/8", "--checkpoint", "none", "--steps", "2"]
    words += ["--set", "optim.momentum=0.5", "-b", "8", "-j", "0", "--device", "cpu", "-q", "--image-size", "16"]
    assert run_dpn("finetune", "highres", *words, "-o", str(tmp_path / "one")).exit_code == 0
    actual = origins(tmp_path / "one")
    begins = {key: actual[key].split(";")[0] for key in ("data.source", "optim.momentum", "backbone.stem", "lr")}
    assert begins == {
        "data.source": "given",
        "optim.momentum": "given",
        "backbone.stem": "derived",
        "lr": "config pretrain_own",
    }
    result = run_dpn("finetune", "highres", *words, "--compare", "none,dpn", "-o", str(tmp_path / "two"))
    assert result.exit_code == 0, result.output
    for folder in (tmp_path / "two", tmp_path / "two" / "dpn" / "seed0"):
        actual = origins(folder)
        assert actual["optim.momentum"].startswith("given;")
        assert actual["schedule.warmup"].startswith("derived;")
    assert actual["backbone.stem"].startswith("given;")
    file = tmp_path / "two" / "dpn" / "seed0" / "run.json"
    # A process of --jobs is given all of its config, in a file.
    file.write_text(json.dumps({**json.loads(file.read_text()), "given": list(actual)}))
    assert origins(file.parent) == actual


@pytest.mark.usefixtures("without_charts")
def test_differences_in_pairs_are_scipys(tmp_path: Path) -> None:
    plain, dpn = [70.0, 74.0, 71.0], [73.0, 75.5, 75.0]
    runs = [write_classifier_run(tmp_path / f"none{seed}", score, seed, "none") for seed, score in enumerate(plain)]
    runs += [
        write_classifier_run(tmp_path / f"dpn{seed}", score, seed, "dpn", runtime={"workers": 3})
        for seed, score in enumerate(dpn)
    ]
    text = "".join(parse_page(make_page(tmp_path, *runs)).itertext())
    low, high = stats.ttest_rel(dpn, plain).confidence_interval(0.95)
    error = stats.sem([a - b for a, b in zip(dpn, plain, strict=True)])
    assert f"{fmean(dpn) - fmean(plain):.2f} ± {error:.2f}" in text
    assert f"{low:.2f} … {high:.2f}" in text
    assert "stem dpn minus stem none" in text
    tables = (tmp_path / "page" / "table.md").read_text()
    assert f"| 2.83 ± {error:.2f} |" in tables


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 1}, "they share no seed (1 and 0)"),
        ({"lr": 0.25}, "their protocols differ (lr is 0.25 and 0.005)"),
        ({"facts": {"data": {"train": "zz", "val": "b2"}}}, "their protocols differ (data train is zz and a1)"),
        ({"facts": {"data": None}}, "on what data"),
        ({"result": {}}, "has no score yet"),
    ],
)
@pytest.mark.usefixtures("without_charts")
def test_runs_without_a_partner_are_not_paired_and_the_page_gives_the_reason(
    tmp_path: Path, changes: Json, reason: str
) -> None:
    facts, result = changes.pop("facts", {}), changes.pop("result", None)
    first, other = (
        write_classifier_run(tmp_path / "one", stem="none"),
        write_classifier_run(tmp_path / "two", **changes),
    )
    place = other / "run.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **facts}))
    if result is not None:
        (other / "result.json").unlink()
    text = "".join(parse_page(make_page(tmp_path, first, other)).itertext())
    assert reason in text
    assert "is not paired with stem none" in text
    assert "minus" not in text


@pytest.mark.usefixtures("without_charts")
def test_networks_that_differ_in_much_are_called_like_their_runs(tmp_path: Path) -> None:
    other = write_classifier_run(tmp_path / "two")
    plain = yaml.safe_load((other / "config.yaml").read_text())
    plain["backbone"] |= {"arch": "mu/8", "norm": "bn", "pool": "token", "dropout": 0.5}
    (other / "config.yaml").write_text(yaml.safe_dump(plain))
    text = "".join(parse_page(make_page(tmp_path, write_classifier_run(tmp_path / "one"), other)).itertext())
    assert "two minus one" in text


@pytest.mark.usefixtures("without_charts")
def test_an_unfinished_or_damaged_run_is_shown_as_far_as_it_is_there(tmp_path: Path) -> None:
    folder = write_classifier_run(tmp_path / "run", top1=16.0)
    (folder / "result.json").write_text('{"task": ')
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 9, "loss": NaN}\nnot a record\n{"loss": 3}\n{"step": 10, "lo')
    result = run_dpn("report", str(folder), "-o", str(tmp_path / "page"))
    assert "UNFINISHED" in result.stderr
    text = "".join(parse_page((tmp_path / "page" / "report.html").read_text()).itertext())
    assert "result.json is damaged" in text
    assert "metrics.jsonl: 3 lines are damaged" in text
    assert len(read_chart_rows(tmp_path, "loss")) == 9
    assert "NOTHING LEARNT" not in text
    (folder / "metrics.jsonl").unlink()
    for name in ("config.yaml", "run.json"):
        kept = (folder / name).read_text()
        (folder / name).write_text("")
        assert f"{name} is missing or damaged" in make_page(tmp_path, folder)
        (folder / name).write_text(kept)


@pytest.mark.usefixtures("without_charts")
def test_a_score_at_chance_is_called_so(tmp_path: Path) -> None:
    assert "NOTHING LEARNT: validation top-1 16.00 % of 1000" in make_page(
        tmp_path, write_classifier_run(tmp_path / "run", top1=16.0)
    )


@pytest.mark.usefixtures("without_charts")
def test_folders_that_cannot_be_reported_end_with_one_line(tmp_path: Path) -> None:
    folder = write_classifier_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").write_text('{"kind": "oracle"}')
    result = json.loads((folder / "result.json").read_text())
    for words, code, message in (
        (["report", str(tmp_path / "none")], 3, "no such folder"),
        (["report", str(folder / "run.json")], 3, "a file, not a folder of runs"),
        (["report", str(tmp_path / "empty")], 3, "not a run's folder"),
        (["report", str(tmp_path / "odd")], 3, "of the kind 'oracle'"),
        (["report", str(folder), "-o", str(folder)], 2, "the folder holds a run"),
        (["runs", str(tmp_path / "empty")], 3, "no runs in it"),
        (["runs", "show", str(tmp_path / "empty")], 3, "not a run's folder"),
    ):
        completed = run_dpn(
            *words, *(["-o", str(tmp_path / "page")] if len(words) == 2 and words[0] == "report" else [])
        )
        assert completed.exit_code == code, completed.output
        assert message in completed.stderr
        assert len(completed.stderr.strip().splitlines()) == 1
    del result["top5"]
    (folder / "result.json").write_text(json.dumps(result))
    assert "KeyError: 'top5'" in run_dpn("report", str(folder), "-o", str(tmp_path / "page")).stderr


def test_runs_are_listed_and_shown(tmp_path: Path) -> None:
    write_classifier_run(tmp_path / "runs" / "highres" / "a")
    unfinished = write_classifier_run(tmp_path / "runs" / "b")
    (unfinished / "result.json").unlink()
    listed = json.loads(run_dpn("runs", str(tmp_path / "runs"), "--json").stdout)
    assert [(row["run"][-1], row["status"], row["metric"], row["value"]) for row in listed] == [
        ("b", "finished", None, None),
        ("a", "finished", "top-1", 80.0),
    ]
    assert [row["step"] for row in listed] == [8, 8]
    assert listed[0]["command"] == "dpn finetune highres"
    result = run_dpn("runs", str(tmp_path / "runs"))
    assert re.search(r"80.00 % top-1 +8/\d+ +\d+ d", result.stdout), result.output
    completed = run_dpn("runs", "show", str(unfinished))
    assert "no result.json" in " ".join(completed.stdout.split())


def test_the_command_of_a_run_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    folder = write_classifier_run(tmp_path / "run")
    argv = ["dpn", "pretrain", "--data", "my photos", "--compare", "stem=none;stem=dpn", "-o", "it's"]
    (folder / "run.json").write_text(json.dumps({**json.loads((folder / "run.json").read_text()), "argv": argv}))
    (row,) = json.loads(run_dpn("runs", str(tmp_path), "--json").stdout)
    assert shlex.split(row["command"]) == argv


@pytest.mark.parametrize(
    ("columns", "lines", "command"),
    [
        ("130", ["runs/pretrain_own/B-32-stem-none-norm-ln-vs-dpn"], True),
        ("90", ["runs/pretrain_own/B-32-stem-none-norm-ln-vs-dpn"], False),
        ("60", ["runs/pretrain_own/", "B-32-stem-none-norm-ln-vs-dpn"], False),
        ("20", ["runs/", "pretrain_own/", "B-32-stem-none-norm-ln-vs-dpn"], False),
    ],
)
def test_names_in_the_list_of_runs_are_whole(
    columns: str, lines: list[str], command: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_classifier_run(Path("runs/pretrain_own/B-32-stem-none-norm-ln-vs-dpn"))
    monkeypatch.setenv("COLUMNS", columns)
    printed = run_dpn("runs").stdout.splitlines()
    assert [line.split(" ")[0] for line in printed[1 : 1 + len(lines)]] == lines
    assert ("dpn finetune highres" in printed[1]) == command
    assert len(printed) == 1 + len(lines)


def sweep(path: Path, config: VtabConfig, score: dict[str, float]) -> Path:
    """Write a sweep over two tasks in which the second learning rate is best, and the second seed a point better."""
    outcomes = []
    for network in config.networks:
        for task in TASKS[:1] + TASKS[7:8]:
            val = {lr: {seed: 10.0 * place + seed for seed in config.seeds} for place, lr in enumerate(config.lrs)}
            test = {seed: score[network] + seed for seed in config.seeds}
            outcomes.append(TaskOutcome(task, network, val, test, 1000, config.lrs[-1]))
    timing = {"train_seconds": 1.0, "wait_seconds": 0.5, "trainings": 4}
    result = build_result(config, outcomes, "B/32", {}, timing)
    write_run(path, VtabConfig, "vtab", result, "sweep", compare=list(config.compare))
    (path / "metrics.jsonl").unlink()
    rows = [
        {"time": "t", "stem": "dpn", "task": "camelyon", "lr": 0.01, "seed": 0, "accuracy": got} for got in (None, 9)
    ]
    (path / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_sweep_has_every_cell_the_papers_values_and_the_ledger(tmp_path: Path) -> None:
    plain = merge(read_config("vtab"), {"backbone": {"arch": "B/32"}, "compare": ["none", "dpn"], "seeds": [0, 1]})
    config = build(VtabConfig, plain, "test")
    html = make_page(tmp_path, sweep(tmp_path / "run", config, {"none": 60.0, "dpn": 64.0}))
    text = " ".join("".join(parse_page(html).itertext()).split())
    cells = read_chart_rows(tmp_path, "network2_cells")
    assert cells[0] == ["panel", "learning rate", "seed", "val200 in %", "marked"]
    assert len(cells) == 1 + 2 * len(config.lrs) * 2
    assert {row[1] for row in cells if row[4] == "1"} == {f"{config.lrs[-1]:g}"}
    assert ["caltech101", f"{config.lrs[1]:g}", "1", "11.0", "0"] in cells
    bars = {(row[0], row[1]): row[2] for row in read_chart_rows(tmp_path, "tasks")}
    assert bars["dpn", "caltech101"] == "64.5"
    assert bars["dpn, paper", "caltech101"] == "87.7"
    assert bars["none, paper", "camelyon"] == "77.9"
    assert "edge of the grid for caltech101 (highest), camelyon (highest)" in text
    assert "1 scorings of the test split" in text
    assert "4.00all equal" in text  # dpn minus none


@pytest.mark.usefixtures("without_charts")
def test_recall_and_classes_are_drawn_from_their_results(tmp_path: Path) -> None:
    recall = {f"{way}@{k}": 10.0 * k for way in ("image_to_text", "text_to_image") for k in (1, 5)}
    retrieval = {**recall, "chance@5": 0.5, "images": 1000, "captions": 1000}
    result = {"task": "lit", "retrieval": retrieval, "temperature": 10.0}
    text = make_page(tmp_path, write_run(tmp_path / "lit", LitConfig, "lit_demo", result, "towers"))
    parse_page(text)
    assert read_chart_rows(tmp_path, "recall")[1:] == [
        *(["image to text", k, v] for k, v in (("1", "10.0"), ("5", "50.0"))),
        *(["text to image", k, v] for k, v in (("1", "10.0"), ("5", "50.0"))),
        *(["chance", k, v] for k, v in (("1", "0.1"), ("5", "0.5"))),
    ]
    result = {"task": "segment", "miou": 20.0, "majority_miou": 30.0, "images": 5}
    folder = write_run(tmp_path / "segment", SegmentConfig, "ade20k_demo", result, "segmenter")
    (folder / "per_class.csv").write_text(
        f"class,name,pixels,predicted,iou,recall,precision\n0,a,1,1,10.00,1.00,1.00\n1,{SCRIPT_TAG},1,1,90.00,1.00,1.00\n2,c,0,0,,,\n"
    )
    html = make_page(tmp_path, folder)
    parse_page(html)
    assert "<script" not in html
    assert [row[1:3] for row in read_chart_rows(tmp_path, "iou")[1:]] == [[SCRIPT_TAG, "90.0"], ["a", "10.0"]]
    assert "NOTHING LEARNT: validation mIoU" in html
    (folder / "per_class.csv").unlink()
    assert "per_class.csv is missing" in make_page(tmp_path, folder)


@pytest.mark.usefixtures("without_charts")
def test_runs_on_parts_of_the_images_are_a_curve(tmp_path: Path) -> None:
    runs = []
    for stem, share, seed, miou in (
        ("none", 0.25, 0, 20.0),
        ("none", 1.0, 0, 30.0),
        ("dpn", 0.25, 0, 24.0),
        ("dpn", 0.25, 1, 28.0),
    ):
        result = {"task": "segment", "miou": miou, "stem": stem}
        changes = {"backbone": {"stem": stem}, "data": {"source": "demo", "fraction": share}, "seed": seed}
        folder = tmp_path / f"{stem}-{share}-{seed}"
        runs.append(write_run(folder, SegmentConfig, "ade20k_demo", result, "segmenter", **changes))
    parse_page(make_page(tmp_path, *runs))
    assert [row[:3] for row in read_chart_rows(tmp_path, "fractions")[1:]] == [
        ["stem none", "25.0", "20.0"],
        ["stem none", "100.0", "30.0"],
        ["stem dpn", "25.0", "26.0"],
    ]
    make_page(tmp_path, *runs[::2])  # of one part
    assert not (tmp_path / "page" / "figures" / "fractions.csv").exists()


@pytest.mark.usefixtures("without_charts")
def test_a_comparison_has_its_means_and_differences(tmp_path: Path) -> None:
    score = {"mean": 12.0, "std": 2.0, "n": 2, "stderr": 1.4, "ci95": [1.0, 23.0]}
    networks = {name: {"runs": {f"{name}/seed0": {"top1": 11.0}}, "top1": score} for name in ("none", "dpn")}
    differences = [{"network": "dpn", "minus": "none", "seeds": [0, 1], "top1": {**score, "mean": -3.0}}]
    compare = {"networks": networks, "differences": differences}
    result = {"task": "pretrain", "score": "top1", "compare": compare, "failed": ["dpn, seed 1: loss nan"]}
    folder = write_run(tmp_path / "run", HighresConfig, "highres_demo", result, "comparison")
    for name in ("none", "dpn"):
        write_classifier_run(folder / name / "seed0", stem=name)
    (folder / "result.json").rename(folder / "partial.json")  # as it is when trainings have failed
    html = make_page(tmp_path, folder)
    parse_page(html)
    assert "-3.00 ± 1.40" in html
    assert "failed: dpn, seed 1: loss nan" in html
    assert read_chart_rows(tmp_path, "networks")[1:] == [
        ["top-1", "none", "12.0", "11.0"],
        ["top-1", "dpn", "12.0", "11.0"],
    ]
    assert {row[0] for row in read_chart_rows(tmp_path, "networks_loss")[1:]} == {"none", "dpn"}


@pytest.mark.usefixtures("without_charts")
def test_a_comparison_reports_damage_and_shows_the_finished_part_of_an_unfinished_one(tmp_path: Path) -> None:
    several = {"compare": ["none", "dpn"], "seeds": [0, 1]}
    folder = write_run(tmp_path / "run", HighresConfig, "highres_demo", None, "comparison", **several)
    first, second, third = (folder / name for name in ("none/seed0", "none/seed1", "dpn/seed0"))
    write_classifier_run(first, 71.25)
    (write_classifier_run(second, 72.5) / "metrics.jsonl").write_text("")
    (write_classifier_run(third) / "result.json").unlink()
    html = make_page(tmp_path, folder)
    text = " ".join(part.strip() for part in parse_page(html).itertext() if part.strip())
    assert "2 of 4 trainings finished" in text
    assert "none none/seed0 71.25 8 none none/seed1 72.50 8" in text
    assert "none/seed1: metrics.jsonl is missing or damaged: it ends at step 0 of 8" in text
    assert "dpn/seed0: UNFINISHED" in text
    assert "none/seed0: " not in text
    assert "hours of training - " in text
    assert "minival top-1 in %" in text
    assert read_chart_rows(tmp_path, "networks_accuracy")[0][2] == "minival top-1 in %"


@pytest.mark.usefixtures("without_charts")
def test_curves_of_a_comparison_are_means_over_seeds_in_a_band_that_holds_them_all(tmp_path: Path) -> None:
    """A seed that has come less far is in the means as far as it has come."""
    names = {"arch=mu/8": "arch=mu-8", "dpn": "dpn"}
    networks: dict[str, object] = {
        name: {"runs": {f"{folder}/seed0": {}}, "top1": None} for name, folder in names.items()
    }
    compare = {"networks": networks, "differences": []}
    result = {"task": "pretrain", "score": "top1", "compare": compare, "failed": []}
    folder = write_run(tmp_path / "run", HighresConfig, "highres_demo", result, "comparison")
    losses = {"arch=mu-8/seed0": (5, 4), "dpn/seed0": (1, 2), "dpn/seed2": (3,), "dpn/seed10": (8, 3)}
    for name, values in losses.items():
        records = [{"step": step, "loss": float(value)} for step, value in enumerate(values, 1)]
        (write_classifier_run(folder / name) / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(record)}\n" for record in records)
        )
    assert "mean over seeds in a band" in make_page(tmp_path, folder)
    rows = [[name, *map(float, row)] for name, *row in read_chart_rows(tmp_path, "networks_loss")[1:]]
    assert rows == [
        *([name, step, mean, mean, mean] for name, step, mean in (("arch=mu/8", 1, 5), ("arch=mu/8", 2, 4))),
        *(["dpn", 1, 4, 1, 8], ["dpn", 2, 2.5, 2, 3]),
    ]


@pytest.mark.usefixtures("without_charts")
def test_a_distillation_has_its_stages_and_its_teacher(tmp_path: Path) -> None:
    near = {"agreement": 78.25, "kl": 0.0696, "token_variance": None, "top1": 62.5}
    result = {
        **{"task": "distill", "agreement": 78.25, "top1": 62.5, "teacher_top1": 66.4, "teacher": {"arch": "B/32"}},
        **{"stages": {"start": {**near, "agreement": 4.0}, "all": near}, "images": {"held_out": 500, "val": 1000}},
    }
    changes = {"teacher": "x", "data": {"source": "demo"}}
    folder = write_run(tmp_path / "run", DistillConfig, "distill_demo", result, "network", **changes)
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "images": 500, "agreement": 58.0}\n')
    html = make_page(tmp_path, folder)
    parse_page(html)
    lines = (tmp_path / "page" / "table.md").read_text().splitlines()
    assert "| before the first step | 4.00 | 0.0696 | 62.50 |" in lines
    assert "| after the last step | 78.25 | 0.0696 | 62.50 |" in lines
    assert "| the teacher, B/32 |  |  | 66.40 |" in lines
    assert read_chart_rows(tmp_path, "agreement")[1:] == [["run", "4", "58.0"]]
    assert not (tmp_path / "page" / "figures" / "images.csv").exists()


@pytest.mark.parametrize("ends", [(0.55, 0.95), (600.0, 1400.0), (8.7, 10.4), (0.9, 1.1), (5.5, 5.6), (1e-3, 40.0)])
def test_a_logarithmic_axis_has_two_labels_at_least(ends: tuple[float, float]) -> None:
    svg, _ = draw(LineChart("x", "x", "step", "norm", [Series("run", [1, 2], list(ends))], log_y=True), "x")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    values = [float(text) for text in texts[texts.index("step") + 1 : texts.index("norm")]]
    assert len(set(values)) > 1, texts
    assert all(ends[0] / 2 < value < ends[1] * 2 for value in values)


def test_a_long_line_is_drawn_as_means_of_its_stretches() -> None:
    line = downsample(Series("loss", range(1, 1001), [1 / step for step in range(1, 1001)]), most=100)
    assert line.y[:2] == pytest.approx([fmean(1 / step for step in range(1, 11)), fmean(1 / s for s in range(11, 21))])
    assert line.x[-1] == fmean(range(991, 1001))


def test_a_run_has_one_colour_in_all_charts() -> None:
    """Whether or not the runs before it have that curve."""
    line = Series("b", [1.0, 2.0], [3.0, 4.0])
    for initial in (Series("a", [], []), Series("a", [1.0, 2.0], [1.0, 2.0])):
        svg, _ = draw(LineChart("x", "x", "x", "y", [initial, line]), "x")
        assert COLOURS[1].lower() in svg.lower()
        assert (">a</text>" in svg) == bool(initial.x)


@pytest.mark.filterwarnings("error")
def test_long_names_of_classes_leave_room_for_the_confusions() -> None:
    """Wide characters count twice; matplotlib warns of a chart without room."""
    name = 6 * "日本語の長い名前"
    svg, _ = draw(ConfusionChart("x", "x", ["dog", name, "cat"], [[3, 1, 0], [0, 2, 2], [1, 1, 1]], "images"), "x")
    shown = [text for text in re.findall(r">([^<]+)</text>", svg) if "…" in text]
    assert len(shown) == 2
    assert all(cell_len(text) <= 26 and text[0] == name[0] and text[-1] == name[-1] for text in shown)


def test_charts_keep_names_as_they_are(tmp_path: Path) -> None:
    name = f"$x^2$ & {SCRIPT_TAG} 猫 \x1b[31m"
    for chart in (
        LineChart("lines", name, name, name, [Series(name, [1, 2], [1.0, 3.0])], log_y=True, floor=(name, 2.0)),
        BarChart("bars", name, name, [name], {name: [None], "b": [3.0]}, {"b": [1.0]}),
        HeatMap("heat", name, name, name, name, [Panel(name, [name], [name, "b"], [[None, 2.0]], frozenset({0}))]),
    ):
        svg, png = draw(chart, chart.name)
        tree = parse_page(f"<!DOCTYPE html><html><head><title>x</title></head><body>{svg}</body></html>")
        assert "$x^2$" in "".join(tree.itertext())
        assert "\x1b" not in svg
        assert png.startswith(b"\x89PNG")
    write_page(tmp_path, name, [])
    parse_page((tmp_path / "report.html").read_text())


def test_tables_are_markdown_and_latex() -> None:
    table = Table("50 % & more", ["a_b", "n"], [["x|y", 1.234], ["mean", None]], note="μ", strong=frozenset({1}))
    assert as_markdown(table) == ("**50 % & more**\n\n| a\\_b | n |\n|---|--:|\n| x\\|y | 1.23 |\n| mean |  |\n\nμ\n")
    assert as_latex(table).splitlines() == [
        r"\begin{table}",
        r"\caption{50 \% \& more μ}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a\_b & n \\",
        r"\midrule",
        r"x|y & 1.23 \\",
        r"\midrule",
        r"mean &  \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
