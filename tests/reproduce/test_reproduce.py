"""`dpn reproduce`: its commands are valid and the paper's, its prices add up, and its numbers are its trainings'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dpn_cli.arch import SIZES
from dpn_cli.commands.trainers import TRAIN_COMMANDS
from dpn_cli.config.provenance import differences
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.flops import count_macs, training_flops
from dpn_cli.reproduce import page, paper
from dpn_cli.reproduce import run as runner
from dpn_cli.reproduce.experiment import Experiment, Locations, Number, PaperTrial
from dpn_cli.reproduce.page import compare, paper_reach, table_of
from dpn_cli.reproduce.paper import EXPERIMENTS
from dpn_cli.reproduce.plan import describe_experiments, flops, print_list
from dpn_cli.reproduce.trainings import DATA_SETS, SmallTrainings, Trainings
from support.pages import write_run
from tasks.classify.pretrain_config import PretrainConfig
from tasks.lit.text_tower import TextTower
from tasks.vtab.tasks import TASKS

# What every config says: not what a training of these tables could change.
USUAL = (
    "optim.state_dtype: float32",
    "minival is the last 1 %",
    "this is one run",
    "during training minival alone",
    "the q, k and v biases",
)
NOWHERE = Locations(Path("out"), {}, {})


def experiment(name: str, *, small: bool = False, seeds: int = 1) -> Experiment:
    return EXPERIMENTS[name][0](SmallTrainings() if small else Trainings(), range(seeds))


def one_of_each_group(*names: str, small: bool = False) -> list[PaperTrial]:
    trials = [trial for name in names for trial in experiment(name, small=small, seeds=3).trials({})]
    return list({trial.group: trial for trial in trials}.values())


@pytest.mark.parametrize("small", [False, True])
def test_every_training_is_a_valid_command_line(small: bool) -> None:
    trials = one_of_each_group(*EXPERIMENTS, small=small)
    assert len(trials) == (70 if small else 198)
    for trial in trials:
        config = runner.layers(trial.line(NOWHERE))
        backbone = config.backbone
        if trial.start is None:
            slug = trial.name.split("/")[1]
            assert backbone.stem in slug.split("-")
            assert (backbone.norm or "ln") in ("ln", *slug.split("-"))
            assert (backbone.placement or "pre,pre").replace(",", "_") in ("pre_pre", *slug.split("-"))
        else:
            start = config.teacher if trial.command == "distill" else backbone.checkpoint
            assert start == f"out/{trial.start.name}"
        last = trial.name.rpartition("/")[2]
        assert (len(config.seeds) if last == "3-seeds" else f"seed{config.seed}") in (3, last)
        if "highres" in trial.name:
            assert f"highres-{backbone.image_size}/" in trial.name


@pytest.mark.parametrize("name", ["table1", "table3", "table5", "table6"])
def test_trainings_differ_from_the_paper_in_nothing_of_their_own(name: str) -> None:
    for trial in one_of_each_group(name):
        if trial.group.startswith("deit/"):
            continue  # DeiT's own config, which says what differs
        actual = differences(runner.layers(trial.line(NOWHERE)), "fp32")
        assert actual is not None
        assert [line for line in actual if not line.startswith(USUAL)] == [], trial.name


def test_steps_fractions_and_seeds_reach_the_trainings() -> None:
    configs = {trial.group: runner.layers(trial.line(NOWHERE)) for trial in one_of_each_group("table1", "table5")}
    assert configs["imagenet21k-930k/B-32-dpn"].schedule.steps == 930_000
    assert len(runner.layers(experiment("table3", seeds=2).trials({})[1].line(NOWHERE)).seeds) == 2
    assert configs["imagenet21k-93k/B-32-dpn"].fewshot_data == "imagenet"
    assert configs["ade20k/imagenet-B-16-dpn-1-8"].data.fraction == 0.125
    trials = experiment("table5", seeds=10).trials({})
    seeds = [
        runner.layers(trial.line(NOWHERE)).seed for trial in trials if trial.group == "ade20k/imagenet-B-16-none-1-4"
    ]
    assert seeds == list(range(10))
    first = {trial.start.name for trial in trials if trial.start}
    assert first == {f"imagenet/B-16-{stem}/seed0" for stem in ("none", "dpn")}  # one network for all seeds
    assert all(trial.line(NOWHERE)[-1] == "--resume" for trial in trials)


def test_the_price_is_the_operations_of_the_paper() -> None:
    """93,000 steps of 4096 images take 1.0e19 operations with B/32 and 4.0e19 with B/16."""
    trials = {trial.group: trial for trial in one_of_each_group("table1", "table3")}
    assert flops([trials["imagenet/B-32-none"]], NOWHERE) == pytest.approx(1.0e19, rel=0.03)
    assert flops([trials["imagenet/B-16-none"]], NOWHERE) == pytest.approx(4.0e19, rel=0.03)
    one, sweep = flops([trials["imagenet/B-32-none"]], NOWHERE), flops([trials["vtab/imagenet-B-32-none"]], NOWHERE)
    images = 19 * 3 * 3 * 2500 * 512
    assert sweep / one == pytest.approx(images / (92_897 * 4096), rel=0.01)  # a head of another size
    assert flops([trials["imagenet/B-32-none"]] * 3, NOWHERE) == 3 * one
    fine = trials["highres-384/imagenet-B-32-none"]
    larger = ViTConfig(SIZES["B"], (32, 32), (384, 384), num_classes=1000)
    config = runner.layers(fine.line(NOWHERE))
    expected = config.schedule.steps * config.batch_size * training_flops(larger)
    assert flops([fine], NOWHERE) == pytest.approx(expected, rel=0.01)


def test_the_price_of_lit_is_the_text_tower_in_training_and_the_image_tower_forward() -> None:
    """As torch counts one text, with attention as plain matrix products."""
    trial = next(trial for trial in experiment("table4").trials({}) if trial.group == "lit/jft-220k-B-32-none")
    config = runner.layers(trial.line(NOWHERE))
    assert config.text.size is None  # that of the image tower
    with torch.device("meta"):
        tower = TextTower(SIZES["B"], 32_000, config.text.context, 768, 10.0, None, 0)
        tokens = torch.zeros(1, config.text.context, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as text:
        tower(tokens)
    image = 2 * count_macs(ViTConfig(SIZES["B"], (32, 32), (224, 224))).forward
    pairs = config.schedule.steps * config.batch_size
    projection = 2 * 768 * 768  # behind the pooling, which the price leaves out
    assert flops([trial], NOWHERE) == pairs * (3 * (text.get_total_flops() - projection) + image)


def test_remaining_trainings_are_estimated_from_finished_ones(tmp_path: Path) -> None:
    locations = Locations(tmp_path, {}, {})
    full = experiment("fig4")
    (initial,) = describe_experiments([full], locations)
    assert (initial["trainings"], initial["left"], initial["flops_per_second_here"]) == (6, 6, None)
    result = {"task": "pretrain", "top1": 70.0, "timing": {"train_seconds": 7200.0}}
    write_run(tmp_path / "imagenet/B-32-dpn/seed0", PretrainConfig, "pretrain", result)
    (final,) = describe_experiments([full], locations)
    price = flops([trial for trial in full.trials({}) if "B-32-dpn" in trial.name], locations)
    assert (final["trainings"], final["left"]) == (6, 5)
    assert final["flops_left"] == initial["flops_left"] - price
    assert final["h100_hours_left"] == pytest.approx(final["flops_left"] / (0.3 * 989.4e12) / 3600)
    assert final["flops_per_second_here"] == pytest.approx(price / 7200)
    assert final["hours_left_here"] == pytest.approx(2 * final["flops_left"] / price)


def test_table_3_has_the_numbers_of_the_vtab_table() -> None:
    numbers = experiment("table3").numbers
    assert len(numbers) == 4 * len(TASKS)
    assert {number.paper for number in numbers if number.row == "svhn"} == {76.8, 80.3, 76.7, 78.3}


def test_tables_agree_with_each_other_and_with_the_prose() -> None:
    """Section 5.3 has gains; a table that has a row for each network gives each its own number."""
    gain = {arch: round(dpn[0] - plain[0], 1) for arch, (plain, dpn) in paper.IMAGENET.items()}
    assert gain == {"S/32": 1.9, "Ti/16": 1.4, "B/32": 1.4, "S/16": 1.1, "B/16": 0.7}
    assert [round(dpn[0] - plain[0], 1) for plain, dpn in paper.DEIT.values()] == [0.3, 0.2]
    points = {(number.row, number.column): number.paper for number in experiment("table6").numbers}
    assert (len(points), points["pre", "B/32"], points["rms", "Ti/16"]) == (30, -2.6, -1.7)
    norms = {(number.row, number.column): number.paper or 0.0 for number in experiment("dtn-table").numbers}
    gains = [norms["dtn", arch] - norms["ln", arch] for arch in ("S/16", "S*/16", "Ti*/16", "B*/16")]
    assert gains == pytest.approx([0.7, 1.1, 0.9, 0.8])


def test_trainings_are_shared_between_tables() -> None:
    names = [trial.name for name in ("table1", "table3", "table6", "fig2") for trial in experiment(name).trials({})]
    assert names.count("imagenet/B-16-dpn/seed0") == 4


def planted(out: Path, results: Mapping[str, Any]) -> Locations:
    for name, result in results.items():
        (out / name).mkdir(parents=True)
        (out / name / "result.json").write_text(json.dumps(result))
    return Locations(out, {}, {})


def trial(name: str) -> PaperTrial:
    return PaperTrial(name, "pretrain", ())


def test_numbers_are_means_over_seeds_next_to_the_papers_interval(tmp_path: Path) -> None:
    scores = {"a/seed0": 74.1, "a/seed1": 75.0, "a/seed2": 74.5, "b/seed0": 73.0, "b/seed1": 74.4}
    locations = planted(tmp_path, {name: {"top1": score} for name, score in scores.items()})
    a, b = (tuple(trial(f"{group}/seed{seed}") for seed in range(3)) for group in "ab")
    numbers = [
        Number("r", "mean", a, ("top1",), 74.8, 0.06),
        Number("r", "far", a, ("top1",), 76.2, 0.07),
        Number("r", "paired", a, ("top1",), 1.0, minus=b),
        Number("r", "nothing", (trial("c/seed0"),), ("top1",), 70.0, 0.1),
    ]
    full = Experiment("x", "", "", numbers)
    mean, far, paired, nothing = compare(full, locations)
    assert mean.our_summary is not None
    assert mean.our_summary.mean == pytest.approx(74.5333, abs=1e-4)
    assert mean.difference == pytest.approx(-0.2667, abs=1e-4)
    # The paper's interval, with the halves of the last digits that it prints.
    low, high = stats.t.interval(0.95, 2, loc=74.8, scale=0.065)
    assert paper_reach(numbers[0]) == pytest.approx((high - low) / 2 + 0.05)
    assert paper_reach(experiment("table5").numbers[0]) == pytest.approx(stats.t.ppf(0.975, 9) * 0.095 + 0.05)
    assert mean.is_consistent is bool(low - 0.05 <= mean.our_summary.mean <= high + 0.05)
    assert far.is_consistent is False
    assert paired.our_summary is not None
    assert paired.our_summary.values == pytest.approx((1.1, 0.6))  # the third seed has no partner
    assert paired.is_consistent is None
    assert nothing.our_summary is None
    assert nothing.difference is None
    rows = table_of(full, [mean, far, paired, nothing], small=False).rows
    assert rows[0] == ["r", "mean", "74.53 ± 0.26", 3, "74.80 ± 0.06", mean.difference, "yes"]
    assert rows[1][4:] == ["76.20 ± 0.07", far.difference, "no"]
    assert rows[3][2:] == [None, None, "70.00 ± 0.10", None, None]


@pytest.mark.parametrize(
    ("score", "result"),
    [
        (("fewshot", "accuracy", "25", "values"), {"fewshot": {"accuracy": {"25": {"values": [50.0, 52.0]}}}}),
        (("stages", 1, "test_top1"), {"stages": [{"test_top1": 1.0}, {"test_top1": 51.0}]}),
        (("tasks", "svhn", "test", "values"), {"tasks": {"svhn": {"test": {"values": [50.0, 51.0, 52.0]}}}}),
    ],
)
def test_scores_are_found_in_results(tmp_path: Path, score: tuple[str | int, ...], result: dict[str, Any]) -> None:
    locations = planted(tmp_path, {"a/seed0": result, "b/seed0": {"tasks": {"svhn": {"test": None}}, "stages": []}})
    actual, missing = compare(
        Experiment("x", "", "", [Number("", "", (trial(f"{name}/seed0"),), score) for name in "ab"]), locations
    )
    assert actual.our_summary is not None
    assert actual.our_summary.mean == 51.0
    assert missing.our_summary is None


def test_data_sets_are_the_ones_that_trainings_name() -> None:
    named = {name for item in EXPERIMENTS for trial in experiment(item).trials({}) for _, name in trial.data}
    assert named == set(DATA_SETS)
    assert {trial.command for item in EXPERIMENTS for trial in experiment(item).trials({})} <= set(TRAIN_COMMANDS)


def test_a_page_of_half_a_table_has_the_papers_bars_of_the_other_half(tmp_path: Path) -> None:
    locations = planted(tmp_path, {"a/seed0": {"top1": 74.0}})
    numbers = [
        Number("B/32", stem, (trial(f"{name}/seed0"),), ("top1",), paper, 0.06)
        for stem, name, paper in (("none", "nothing", 74.8), ("dpn", "a", 76.2))
    ]
    experiment = Experiment("x", "Half", "top-1 in %", numbers)
    page.write(tmp_path / "page", experiment, compare(experiment, locations), small=False)
    bars = (tmp_path / "page/figures/numbers.csv").read_text().splitlines()[1:]
    assert [line.split(",")[-2] for line in bars] == ["", "74.8", "74.0", "76.2"]


def test_names_in_the_list_are_whole_and_it_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = describe_experiments([experiment(name) for name in EXPERIMENTS], NOWHERE)
    print_list(
        [{**row, "flops_per_second_here": 1e11, "hours_left_here": 123_456.0} for row in rows], NOWHERE, Trainings()
    )
    table = capsys.readouterr().out.partition("\nimagenet: ")[0].splitlines()
    assert max(map(len, table)) <= 80
    words = {word for line in table for word in line.split()}
    assert words >= {*EXPERIMENTS, *DATA_SETS, "Normalization)", "123,456"}
