"""Which checkpoint a classifier's training keeps: the last one, as Appendix D does, or minival's best where asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpn_cli.config.load import build
from dpn_cli.metrics import Confusion, ImagePrediction, Scores
from support.highres import highres_config, train_highres
from tasks.classify import data as classify_data
from tasks.classify import train as training
from tasks.classify.highres_config import HighresConfig, resolve
from tasks.classify.train import describe_training


@pytest.fixture
def falling(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Make every look at images score less than the one before; gives the weights of each look."""
    observed: list[dict[str, Any]] = []

    def score(classifier: Any, split: Any, *_: Any, **options: Any) -> Scores:
        observed.append({name: value.clone() for name, value in classifier.model.state_dict().items()})
        return Scores(
            100,
            90 - len(observed),
            100,
            1.0,
            0,
            Confusion(3, dict.fromkeys(range(9), 1)),
            [ImagePrediction(0, 0, 0, 0.5)],
        )

    monkeypatch.setattr(training, "evaluate", score)
    return observed


def test_the_last_step_is_saved_unless_the_best_is_requested(
    falling: list[dict[str, Any]], photos: Path, tmp_path: Path
) -> None:
    observed = falling
    for select, expected in (({}, 8), ({"select": "last"}, 8), ({"select": "best"}, 2)):
        observed.clear()
        result = train_highres(highres_config(photos, schedule={"steps": 8}, **select), tmp_path / str(select))
        assert result["best_step"] == expected
        kept, look = load_file(tmp_path / str(select) / "weights.safetensors"), observed[expected // 2 - 1]
        assert all(torch.equal(value, kept[name]) for name, value in look.items())
        message = "step 2 was best on minival" if expected == 2 else "the last step is scored"
        assert message in describe_training(result)


@pytest.mark.parametrize(("steps", "every", "looks"), [(8, 4, [4, 8]), (9, 4, [4, 8, 9]), (8, 2500, [2, 4, 6, 8])])
def test_minival_is_looked_at_when_the_config_says(
    steps: int, every: int, looks: list[int], photos: Path, tmp_path: Path
) -> None:
    """Appendix D evaluates every 2500 of 5000 steps; a training shorter than that is looked at four times."""
    result = train_highres(highres_config(photos, schedule={"steps": steps}, evaluate_every=every), tmp_path / "run")
    assert [record["step"] for record in result["curve"]] == looks


def test_a_minival_that_is_too_small_to_choose_is_reported(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for share, images, message in ((None, 7, True), (0.0, 0, True), (None, 7, False)):
        config = highres_config(
            photos, schedule={"steps": 1}, data={"minival": share}, select="best" if message else "last"
        )
        result = train_highres(config, tmp_path / f"{share} {message}")
        assert result["images"]["minival"] == images
        warning = f"select=best chooses on {images} minival images" if images else "there is no minival to choose on"
        assert (warning in capsys.readouterr().err) is message


def test_only_a_minival_that_chooses_is_large(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[float | None, bool]] = []
    monkeypatch.setattr(classify_data, "open_class_data", lambda source, share, chooses: calls.append((share, chooses)))
    for select in ("last", "best"):
        classify_data.open_data(highres_config(photos, select=select))
    assert calls == [(None, False), (None, True)]


def test_appendix_d_chooses_no_checkpoint() -> None:
    plain = resolve(None, {"data": {"source": "imagenet"}, "backbone": {"arch": "B/32"}}, {})
    built = build(HighresConfig, plain, "test")
    assert (built.select, built.evaluate_every, built.schedule.steps) == ("last", 2500, 5000)
    assert built.about.table == "Table 1 left (App. D)"
