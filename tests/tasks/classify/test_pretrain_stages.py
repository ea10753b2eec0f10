"""`dpn pretrain sun397`: Appendix F's stages, each with a grid, chosen on the validation split."""

from __future__ import annotations

import itertools
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from dpn_cli.config.load import build
from dpn_cli.errors import DataError, DpnError, NonFiniteError, StoppedError
from dpn_cli.report.reading import read_run
from support.images import write_class_folders
from support.pretrain import stages_config, train_pretrain
from tasks.classify import page
from tasks.classify import pretrain as command
from tasks.classify import train as training
from tasks.classify.classifier import load_classifier
from tasks.classify.config import head_bias_of, resolve_steps
from tasks.classify.pretrain_config import PretrainConfig, finalize, resolve, trials


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    for split, item in (("train", 12), ("val", 4), ("test", 5)):
        write_class_folders(root / split, classes=3, each=item)
    return root


def test_appendix_f_searches_the_papers_grid() -> None:
    flags = {"backbone": {"arch": "B/32"}, "data": {"source": "sun397"}}
    config = finalize(build(PretrainConfig, resolve("sun397", None, None, None, flags, {}), "test"))
    first, second, third = (list(trials(config, stage)) for stage in config.stages)
    assert {(c.lr, c.optim.weight_decay, c.backbone.dropout) for _, c in first} == set(
        itertools.product((1e-3, 3e-4, 1e-4), (0.03, 0.1), (0.0, 0.1))
    )
    assert {c.randaugment.layers for _, c in first} == {0}
    assert {(c.mixup, c.randaugment.magnitude) for _, c in second} == set(
        itertools.product((0.0, 0.2, 0.5), (0, 5, 10, 15))
    )
    assert [(name, c.epochs) for name, c in third] == [("only", 600)]
    assert resolve_steps(third[0][1], 76_128).schedule.steps == 44_606


def test_a_sweep_chooses_on_validation_and_scores_each_row_of_the_table_once_on_test(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[dict[str, Any]] = [
        {"epochs": 2, "grid": {"lr": [1e38, 3.5e-3, 1.5e-6]}},
        {"epochs": 1, "grid": {"mixup": [0, 0.5]}},
        {"epochs": 8},
    ]
    config, scored = stages_config(places, stages), list[tuple[str, float]]()
    evaluate = training.evaluate

    def watch(classifier: Any, split: Any, *arguments: Any, **options: Any) -> Any:
        scores = evaluate(classifier, split, *arguments, **options)
        if len(split.labels) == 15:  # only test has as many
            tried = classifier.facts["config"]
            scored.append((f"lr={tried['lr']:g} mixup={tried['mixup']:g} epochs={tried['epochs']:g}", scores.top1))
        return scores

    monkeypatch.setattr(training, "evaluate", watch)
    monkeypatch.setattr(command, "evaluate", watch)
    result = train_pretrain(config, tmp_path / "sweep")
    assert result["images"] == {"train": 36, "minival": 12, "val": 15}
    rows = [stage["test_top1"] for stage in result["stages"]] + [result["top1"]]
    mixup = result["stages"][1]["chosen"]
    runs = ["lr=0.0035 mixup=0 epochs=2", f"lr=0.0035 {mixup} epochs=1", f"lr=0.0035 {mixup} epochs=8"]
    assert scored == list(zip(runs, rows, strict=True))
    assert result["stages"][0]["top1"]["lr=1e+38"] is None  # its loss is no number
    top1 = {name: value for name, value in result["stages"][0]["top1"].items() if value is not None}
    assert result["stages"][0]["chosen"] == max(top1, key=lambda name: top1[name])
    final = json.loads((tmp_path / "sweep" / "stage3" / "only" / "result.json").read_text())
    assert final["top1"] == result["top1"]
    chosen = load_classifier(str(tmp_path / "sweep" / "stage3" / "only")).facts["config"]
    assert set(result["stages"][0]["top1"]) == {"lr=1.5e-06", "lr=0.0035", "lr=1e+38"}
    assert f"lr={chosen['lr']:g}" == result["stages"][0]["chosen"] == "lr=0.0035"
    assert f"mixup={chosen['mixup']:g}" == result["stages"][1]["chosen"]
    assert load_classifier(str(tmp_path / "sweep" / result["weights"])).facts["minival_top1"] == final["minival_top1"]
    titles = [section.title for section in page.findings(read_run(tmp_path / "sweep"), "").sections]
    assert titles[:4] == ["Scores", "Calibration", "Classes", "Confusions"]
    kept = [str(path.parent.name) for path in (tmp_path / "sweep").rglob("weights.safetensors")]
    assert kept == ["only"]
    assert re.search(
        r"stage 1, 3 runs of 2 epochs: lr=0.0035, .* on validation, .* % on test", command.describe_pretraining(result)
    )
    (tmp_path / "sweep" / "result.json").unlink()
    scored.clear()
    assert train_pretrain(config, tmp_path / "sweep", resume=True) == result
    assert scored == []


def test_a_search_keeps_one_network_until_its_stage_is_scored(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop while the chosen network is scored loses nothing: the next start scores it."""
    config = stages_config(places, [{"epochs": 1, "grid": {"lr": [1e-6, 3e-3, 1e-5]}}, {"epochs": 1}])
    evaluate, kept = training.evaluate, list[list[str]]()

    def note(classifier: Any, split: Any, *arguments: Any, **mode: Any) -> Any:
        kept.append(sorted(path.parent.name for path in (tmp_path / "sweep").rglob("weights.safetensors")))
        return evaluate(classifier, split, *arguments, **mode)

    def stop(*arguments: Any, **mode: Any) -> Any:
        raise StoppedError(signal.SIGTERM)

    monkeypatch.setattr(training, "evaluate", note)
    monkeypatch.setattr(command, "evaluate", stop)
    with pytest.raises(StoppedError):
        train_pretrain(config, tmp_path / "sweep")
    assert max(map(len, kept)) == 2  # the best so far, and the one that has just been trained
    (left,) = (tmp_path / "sweep").rglob("weights.safetensors")
    monkeypatch.setattr(command, "evaluate", evaluate)
    result = train_pretrain(config, tmp_path / "sweep", resume=True)
    assert result["stages"][0]["chosen"] == left.parent.name
    assert result["stages"][0]["test_top1"] is not None
    assert not left.is_file()


def test_a_sweep_whose_runs_all_fail_is_reported(places: Path, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="stage 1: every run ended with a NaN or infinite loss; lower lr"):
        train_pretrain(
            stages_config(places, [{"epochs": 2, "grid": {"lr": [1e38]}}, {"epochs": 1}]), tmp_path / "sweep"
        )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"epochs": 1, "grid": {"lr": [1e-3, 1e-4]}}], "it is one training, not 2: empty its grid"),
        ([{"epochs": 1, "grid": {"lrr": [1e-3]}}, {"epochs": 1}], "lrr: unknown key; did you mean 'lr'"),
        ([{"epochs": 1, "grid": {"lr": [-1]}}, {"epochs": 1}], "lr: a number above 0 .got -1.0"),
        (
            [{"epochs": 1, "grid": {"lr": []}}, {"epochs": 1}],
            "stages.0.grid.lr: a list of one or more, each a number .got",
        ),
        ([{"epochs": 1, "grid": {"lr": [0.5, 0.5]}}, {"epochs": 1}], "names a run twice"),
    ],
)
def test_wrong_stages_are_named_before_training(places: Path, stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DpnError, match=message):
        stages_config(places, stages)


def test_a_sweep_needs_three_splits(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no val and no test images; a sweep chooses on val and reports test"):
        train_pretrain(stages_config(photos, [{"epochs": 1}]), tmp_path / "sweep")


def test_appendix_f_matches_its_config() -> None:
    config = build(
        PretrainConfig,
        resolve("sun397", None, None, None, {"backbone": {"arch": "B/32"}, "data": {"source": "sun397"}}, {}),
        "test",
    )
    assert (config.optim.decay_unit, config.optim.clip_norm, config.optim.name) == ("lr", 1.0, "adam")
    assert (head_bias_of(config, 397), config.loss, config.batch_size) == (-6.0, "sigmoid", 1024)
    assert config.backbone.pre_logits
    assert (config.schedule.warmup, config.schedule.steps) == (4460, 44606)
