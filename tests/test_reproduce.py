"""`dpn reproduce`: its commands are valid and the paper's, its numbers are what its trainings say, and it goes on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from test_cli import run

from dpn_cli.commands.reproduce import run as runner
from dpn_cli.commands.reproduce import tables
from dpn_cli.commands.reproduce.cells import Experiment, Job, Number, Places
from dpn_cli.commands.reproduce.command import EXPERIMENTS
from dpn_cli.commands.reproduce.compare import compare
from dpn_cli.commands.reproduce.price import flops
from dpn_cli.commands.reproduce.trainings import DATA_SETS, LOGGED, SmallTrainings, Trainings
from dpn_cli.commands.tasks import TRAININGS
from dpn_cli.errors import NonFiniteError
from dpn_cli.recipe.sources import differences
from tasks.vtab.table import TASKS

# What every recipe says: not what a training of these tables could change.
USUAL = (
    "optim.state_dtype: float32",
    "minival is the last 1 %",
    "this is one run",
    "during training minival alone",
    "the q, k and v biases",
)
NOWHERE = Places(Path("out"), {}, {})


def experiment(name: str, *, small: bool = False, seeds: int = 1) -> Experiment:
    return EXPERIMENTS[name][0](SmallTrainings() if small else Trainings(), range(seeds))


def one_of_each_group(*names: str, small: bool = False) -> list[Job]:
    jobs = [job for name in names for job in experiment(name, small=small, seeds=3).jobs({})]
    return list({job.group: job for job in jobs}.values())


@pytest.mark.parametrize("small", [False, True])
def test_every_training_is_a_valid_command_line(small: bool) -> None:
    jobs = one_of_each_group(*EXPERIMENTS, small=small)
    assert len(jobs) == (65 if small else 193)
    for job in jobs:
        recipe = runner.layers(job.line(NOWHERE))
        backbone = recipe.backbone
        if job.start is None:
            slug = job.name.split("/")[1]
            assert backbone.stem in slug.split("-")
            assert (backbone.norm or "ln") in ("ln", *slug.split("-"))
            assert (backbone.placement or "pre,pre").replace(",", "_") in ("pre_pre", *slug.split("-"))
        else:
            assert backbone.checkpoint == f"out/{job.start.name}"
        if "highres" in job.name:
            assert f"highres-{backbone.image_size}/" in job.name


@pytest.mark.parametrize("name", ["table1", "table3", "table5", "table6"])
def test_trainings_differ_from_the_paper_in_nothing_of_their_own(name: str) -> None:
    for job in one_of_each_group(name):
        if job.group.startswith("deit/"):
            continue  # DeiT's own recipe, which says what differs
        found = differences(runner.layers(job.line(NOWHERE)), "fp32")
        assert found is not None
        assert [line for line in found if not line.startswith(USUAL)] == [], job.name


def test_steps_fractions_and_seeds_reach_the_trainings() -> None:
    recipes = {job.group: runner.layers(job.line(NOWHERE)) for job in one_of_each_group("table1", "table5")}
    assert recipes["imagenet21k-930k/B-32-dpn"].schedule.steps == 930_000
    assert len(runner.layers(experiment("table3", seeds=2).jobs({})[1].line(NOWHERE)).seeds) == 2
    assert recipes["imagenet21k-93k/B-32-dpn"].fewshot_data == "imagenet"
    assert recipes["ade20k/imagenet-B-16-dpn-1-8"].data.fraction == 0.125
    jobs = experiment("table5", seeds=10).jobs({})
    seeds = [runner.layers(job.line(NOWHERE)).seed for job in jobs if job.group == "ade20k/imagenet-B-16-none-1-4"]
    assert seeds == list(range(10))


def test_the_price_is_the_operations_of_the_paper() -> None:
    """93,000 steps of 4096 images take 1.0e19 operations with B/32 and 4.0e19 with B/16."""
    jobs = {job.group: job for job in one_of_each_group("table1", "table3")}
    assert flops([jobs["imagenet/B-32-none"]], NOWHERE) == pytest.approx(1.0e19, rel=0.03)
    assert flops([jobs["imagenet/B-16-none"]], NOWHERE) == pytest.approx(4.0e19, rel=0.03)
    one, sweep = flops([jobs["imagenet/B-32-none"]], NOWHERE), flops([jobs["vtab/imagenet-B-32-none"]], NOWHERE)
    images = 19 * 3 * 3 * 2500 * 512
    assert sweep / one == pytest.approx(images / (92_897 * 4096), rel=0.01)  # a head of another size


def test_table_3_has_the_numbers_of_the_vtab_table() -> None:
    numbers = experiment("table3").numbers
    assert len(numbers) == 4 * len(TASKS)
    assert {number.paper for number in numbers if number.row == "svhn"} == {76.8, 80.3, 76.7, 78.3}


def test_tables_agree_with_each_other_and_with_the_prose() -> None:
    """Section 5.3 has gains; those of Table 6 lie within what Table 1 has between both stems."""
    gain = {arch: round(dpn[0] - plain[0], 1) for arch, (plain, dpn) in tables.IMAGENET.items()}
    assert gain == {"S/32": 1.9, "Ti/16": 1.4, "B/32": 1.4, "S/16": 1.1, "B/16": 0.7}
    assert [round(dpn[0] - plain[0], 1) for plain, dpn in tables.DEIT.values()] == [0.3, 0.2]


def test_trainings_are_shared_between_tables() -> None:
    names = [job.name for name in ("table1", "table3", "table6", "fig2") for job in experiment(name).jobs({})]
    assert names.count("imagenet/B-16-dpn/seed0") == 4


def planted(out: Path, results: Mapping[str, Any]) -> Places:
    for name, result in results.items():
        (out / name).mkdir(parents=True)
        (out / name / "result.json").write_text(json.dumps(result))
    return Places(out, {}, {})


def job(name: str) -> Job:
    return Job(name, "pretrain", ())


def test_numbers_are_means_over_seeds_beside_the_papers_interval(tmp_path: Path) -> None:
    scores = {"a/seed0": 74.1, "a/seed1": 75.0, "a/seed2": 74.5, "b/seed0": 73.0, "b/seed1": 74.4}
    places = planted(tmp_path, {name: {"top1": score} for name, score in scores.items()})
    a, b = (tuple(job(f"{group}/seed{seed}") for seed in range(3)) for group in "ab")
    numbers = [
        Number("r", "mean", a, ("top1",), 74.8, 0.06),
        Number("r", "far", a, ("top1",), 76.2, 0.07),
        Number("r", "paired", a, ("top1",), 1.0, minus=b),
        Number("r", "nothing", (job("c/seed0"),), ("top1",), 70.0, 0.1),
    ]
    mean, far, paired, nothing = compare(Experiment("x", "", "", numbers), places)
    assert mean.ours is not None
    assert mean.ours.mean == pytest.approx(74.5333, abs=1e-4)
    assert mean.difference == pytest.approx(-0.2667, abs=1e-4)
    # The paper's interval, with the halves of the last digits that it prints.
    low, high = stats.t.interval(0.95, 2, loc=74.8, scale=0.065)
    assert mean.within is bool(low - 0.05 <= mean.ours.mean <= high + 0.05)
    assert far.within is False
    assert paired.ours is not None
    assert paired.ours.values == pytest.approx((1.1, 0.6))  # the third seed has no partner
    assert paired.within is None
    assert nothing.ours is None
    assert nothing.difference is None


@pytest.mark.parametrize(
    ("score", "result"),
    [
        (("fewshot", "accuracy", "25", "values"), {"fewshot": {"accuracy": {"25": {"values": [50.0, 52.0]}}}}),
        (("stages", 1, "test_top1"), {"stages": [{"test_top1": 1.0}, {"test_top1": 51.0}]}),
        (("tasks", "svhn", "test", "values"), {"tasks": {"svhn": {"test": {"values": [50.0, 51.0, 52.0]}}}}),
    ],
)
def test_scores_are_found_where_results_have_them(
    tmp_path: Path, score: tuple[str | int, ...], result: dict[str, Any]
) -> None:
    places = planted(tmp_path, {"a/seed0": result, "b/seed0": {"tasks": {"svhn": {"test": None}}, "stages": []}})
    found, missing = compare(
        Experiment("x", "", "", [Number("", "", (job(f"{name}/seed0"),), score) for name in "ab"]), places
    )
    assert found.ours is not None
    assert found.ours.mean == 51.0
    assert missing.ours is None


class Trainer:
    """Stands for every task's module: notes what it is given and writes the result that a test wants."""

    def __init__(self, score: Callable[[str], float]) -> None:
        self.score, self.recipes = score, dict[str, Any]()

    def __call__(self, training: Any, recipe: Any, console: Any) -> tuple[Any, Any]:
        return recipe, self

    def run(self, recipe: Any, place: Any, console: Any) -> dict[str, Any]:
        assert place.resume
        name = "/".join(place.folder.parts[-3:])
        self.recipes[name] = recipe
        place.folder.mkdir(parents=True, exist_ok=True)
        result = {"task": "pretrain", "top1": self.score(name)}
        (place.folder / "result.json").write_text(json.dumps(result))
        return result


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trainer:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPN_DATA_DIR", raising=False)
    stand_in = Trainer(lambda name: 60.0 + len(name) / 10)
    monkeypatch.setattr(runner, "ready", stand_in)
    return stand_in


def test_what_is_done_is_not_trained_again_and_is_shared(trainer: Trainer, tmp_path: Path) -> None:
    first = run("reproduce", "table6", "--small", "--seeds", "2", "-o", "out", "--json")
    assert first.exit_code == 0, first.stderr
    assert len(trainer.recipes) == 14
    assert trainer.recipes["imagenet/rms/seed1"].seed == 1
    assert trainer.recipes["imagenet/rms/seed1"].schedule.steps == SmallTrainings.steps
    trainer.recipes.clear()
    (tmp_path / "out/imagenet/rms/seed1/result.json").unlink()
    again = run("reproduce", "table6", "fig1", "--small", "--seeds", "2", "-o", "out", "--json")
    assert again.exit_code == 0, again.stderr
    done = set(trainer.recipes)
    assert "imagenet/rms/seed1" in done  # the one that was lost
    assert "imagenet/dpn/seed0" not in done  # Table 6 has it
    assert len(done) == 1 + 2 * 11  # and Figure 1's other placements and plain networks
    shown = json.loads(again.stdout)["experiments"]
    rms = next(number for number in shown[0]["numbers"] if number["row"] == "rms")
    assert rms["ours"]["mean"] == pytest.approx(0.0)  # both names are equally long
    assert rms["paper"] == 0.0
    page = (tmp_path / "out/table6/report.html").read_text()
    assert "not the paper&#39;s numbers" in page or "not the paper's numbers" in page
    assert (tmp_path / "out/table6/table.md").read_text().count("| B/16 |") == 6


def test_a_training_that_fails_is_listed_and_the_others_go_on(trainer: Trainer, tmp_path: Path) -> None:
    def score(name: str) -> float:
        if "/post/" in name:
            raise NonFiniteError("the loss is NaN")
        return 50.0

    trainer.score = score
    done = run("reproduce", "table6", "--small", "--seeds", "1", "-o", "out")
    assert done.exit_code == 6
    assert "1 training failed (imagenet/post/seed0: the loss is NaN)" in done.stderr.replace("\n", " ")
    assert len(trainer.recipes) == 7
    assert "these are not the paper's numbers" in " ".join(done.stdout.split())


def test_what_starts_from_a_lost_training_waits(trainer: Trainer) -> None:
    def score(name: str) -> float:
        raise NonFiniteError("the loss is NaN")

    trainer.score = score
    done = run("reproduce", "table3", "--small", "-o", "out")
    assert done.exit_code == 6
    assert set(trainer.recipes) == {"imagenet/none/seed0", "imagenet/dpn/seed0"}


def test_missing_data_are_listed_and_what_can_run_runs(trainer: Trainer, tmp_path: Path) -> None:
    listed = run("reproduce", "--json")
    assert listed.exit_code == 0
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert list(rows) == list(EXPERIMENTS)
    assert rows["table3"]["data"] == {"imagenet": None, "vtab-1k": None}
    assert rows["table6"]["trainings"] == rows["table6"]["left"] == 105
    done = run("reproduce", "table3", "-o", "out")
    assert done.exit_code == 3
    assert "needs imagenet" in done.stderr
    assert not trainer.recipes
    (tmp_path / "data/imagenet").mkdir(parents=True)
    done = run("reproduce", "table3", "-o", "out", "--data", "imagenet=data/imagenet")
    assert done.exit_code == 3
    assert "needs vtab-1k" in done.stderr
    assert {recipe.data.source for recipe in trainer.recipes.values()} == {"data/imagenet"}
    assert len(trainer.recipes) == 4


def test_weights_that_are_here_are_not_trained(trainer: Trainer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DPN_HOME", str(tmp_path / "home"))
    given = ("--weights", "imagenet/B-32-none=plain.npz")
    (tmp_path / "home/weights").mkdir(parents=True)
    (tmp_path / "home/weights/B-32-dpn.safetensors").touch()
    lines = run("reproduce", "table3", "--plan", *given, "--set", "runtime.compile=true").stdout.splitlines()
    plans = [runner.layers(shlex.split(line)[1:]) for line in lines]
    assert [plan.backbone.arch for plan in plans if plan.backbone.checkpoint == "none"] == ["B/16", "B/16"]
    started = [plan.backbone.checkpoint for plan in plans]
    assert "plain.npz" in started
    assert str(tmp_path / "home/weights/B-32-dpn.safetensors") in started
    assert all(plan.runtime.compile for plan in plans)
    # A table whose number is the pre-training's own score trains it nevertheless.
    assert "--arch B/32 --stem none" in run("reproduce", "table6", "fig1", "--plan", "--seeds", "1").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tabel6",), "did you mean 'table6'?"),
        (("table6", "--data", "imagenet"), "--data 'imagenet': write NAME=PLACE"),
        (("table6", "--data", "imagnet=x"), "'imagnet' is none of imagenet,"),
        (("table3", "--weights", "imagenet/L-16-dpn=x"), "'imagenet/L-16-dpn' is none of imagenet/B-32-none,"),
        (("table6", "--small", "--set", "lrr=1"), "lrr"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("reproduce", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") <= 2


def test_figures_are_drawn_from_real_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    """Two steps of both stems, then the gradients over depth and the scales of the first norm."""

    def imagenet(make: Trainings, arch: str, stem: str, seed: int) -> Job:
        size = ("--arch", "mu/8", "--image-size", "16", "--augment", "none", "-b", "4", "--steps", "2", "-j", "0")
        words = ("imagenet", "--stem", stem, "--seed", str(seed), *size, "--val-fraction", "0.4", *LOGGED)
        return Job(f"imagenet/{stem}/seed{seed}", "pretrain", (*words, "--data", str(photos)))

    monkeypatch.setattr(SmallTrainings, "imagenet", imagenet)
    done = run("reproduce", "fig2", "fig3", "--small", "-q", "-o", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    layers = (tmp_path / "fig2/B-16/figures/layer_norms.csv").read_text().splitlines()[1:]
    depths = [line.split(",")[:2] for line in layers]
    assert depths == [[f"{stem}/seed0", str(depth)] for stem in ("none", "dpn") for depth in range(2)]
    scales = json.loads((tmp_path / "fig3/imagenet-dpn/result.json").read_text())
    assert scales["networks"][0]["stem"] == "dpn"
    assert "open it in a browser" in done.stdout


def test_scenes_in_files_are_every_class_in_every_split(tmp_path: Path) -> None:
    runner.write_scenes(tmp_path)
    for split, count in runner.SPLITS.items():
        folders = sorted((tmp_path / split).iterdir())
        assert len(folders) == 24
        assert all(len(list(folder.iterdir())) == count for folder in folders)


def test_data_sets_are_the_ones_that_trainings_name() -> None:
    named = {name for each in EXPERIMENTS for job in experiment(each).jobs({}) for _, name in job.data}
    assert named == set(DATA_SETS)
    assert {job.command for each in EXPERIMENTS for job in experiment(each).jobs({})} <= set(TRAININGS)
