"""Which weights, seeds and options reach a training, and which of its weights are evaluated and kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dpn_cli.config.schema import Optim, Schedule
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.sources.base import fingerprint
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Outputs
from dpn_cli.engine.gradients import Gradients
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.engine.state import evaluated_weights
from dpn_cli.metrics import score
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.run.trackers import build_tracker
from support.cli import run_dpn
from support.engine import make_job, random_batches, small_vit
from support.highres import highres_config, train_highres

DECAY = 0.6
STEPS = 6


def trajectory(ema: float | None, folder: Path | None = None) -> tuple[list[Tensor], Tensor]:
    """Train for six steps; returns a kernel as each evaluation sees it (after every step), and as it is in the end."""
    model, observed, scores = small_vit(), [], iter([1.0, 2.0, 9.0, 3.0, 4.0, 5.0])
    head = model.get_parameter("head.weight")

    def evaluate() -> dict[str, float]:
        observed.append(head.detach().clone())
        return {"accuracy": next(scores)}

    outputs = Outputs(Checkpoints(folder) if folder else None)
    engine.fit(model, make_job(STEPS, ema_decay=ema, evaluate=evaluate, evaluate_every=1, outputs=outputs))
    return observed, head.detach().clone()


def averages(start: Tensor, raw: list[Tensor]) -> list[Tensor]:
    """Return the moving average of the weights after every step: its decay rises to `DECAY`."""
    actual = [start]
    for step, weight in enumerate(raw):
        decay = min(DECAY, (1 + step) / (10 + step))
        actual.append(decay * actual[-1] + (1 - decay) * weight)
    return actual[1:]


def test_averaged_weights_are_evaluated_saved_as_best_and_left_in_the_model(tmp_path: Path) -> None:
    raw, _ = trajectory(None)
    averaged, final = trajectory(DECAY, tmp_path)
    expected = averages(small_vit().get_parameter("head.weight").detach(), raw)
    torch.testing.assert_close(averaged, expected)
    torch.testing.assert_close(final, expected[-1])
    best = Checkpoints(tmp_path).load("best", pytest.fail)
    assert best is not None
    assert best[1]["step"] == 3
    torch.testing.assert_close(evaluated_weights(best[0])["head.weight"], expected[2])
    assert not torch.allclose(expected[2], raw[2])  # or nothing above would tell averages from weights


@pytest.mark.parametrize("select", ["last", "best"])
def test_the_saved_file_of_a_run_holds_the_averaged_weights(
    select: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores make the second of four evaluations the best one; its weights as they were scored are kept."""
    from tasks.classify import train as training

    observed: list[Tensor] = []
    scores = iter([1.0, 9.0, 2.0, 3.0])
    original = training._ClassifierTraining.minival

    def scored(self: Any) -> dict[str, float]:
        observed.append(self.model.head.weight.detach().clone())
        return {**original(self), "accuracy": next(scores)}

    monkeypatch.setattr(training._ClassifierTraining, "minival", scored)
    result = run_dpn(
        "finetune", "highres", "--data", str(photos), "--val-fraction", "0.2", "--arch", "mu/8", "--checkpoint", "none",
        "--image-size", "32", "-b", "8", "--steps", "8", "--lr", "0.01", "--ema", "0.9", "-j", "0", "--device", "cpu",
        "--set", f"select={select}", "--set", "evaluate_every=2", "-o", str(tmp_path / "run"), "-q",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    kept = load_file(tmp_path / "run" / "weights.safetensors")["head.weight"]
    torch.testing.assert_close(kept, observed[1 if select == "best" else 3])
    assert not torch.equal(observed[1], observed[3])


def test_a_config_with_an_average_evaluates_and_keeps_it(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without an average is scored after every step, and its weights are averaged by hand."""
    from tasks.classify import train as training

    observed: list[Tensor] = []
    original = training._ClassifierTraining.minival

    def scored(self: Any) -> dict[str, float]:
        observed.append(self.model.head.weight.detach().clone())
        return original(self)

    monkeypatch.setattr(training._ClassifierTraining, "minival", scored)
    short = {"schedule": {"steps": 4}, "evaluate_every": 1, "runtime": {"workers": 0}}
    train_highres(highres_config(photos, **short), tmp_path / "raw")
    raw = observed.copy()
    train_highres(highres_config(photos, ema=DECAY, **short), tmp_path / "averaged")
    expected = averages(torch.zeros_like(raw[0]), raw)
    torch.testing.assert_close(observed[len(raw) :], expected)
    kept = load_file(tmp_path / "averaged" / "weights.safetensors")["head.weight"]
    torch.testing.assert_close(kept, expected[-1])
    assert not torch.allclose(kept, raw[-1])


def test_a_run_trains_chooses_and_is_scored_on_the_splits_of_these_names(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.classify import train as training

    trained: list[str] = []
    scored: list[str] = []

    def recorded_batches(split: Any, *arguments: Any, **options: Any) -> Any:
        trained.append(fingerprint(split))
        return crop_batches(split, *arguments, **options)

    def recorded_score(logits_of: Any, split: Any, *arguments: Any, **options: Any) -> Any:
        scored.append(fingerprint(split))
        return score(logits_of, split, *arguments, **options)

    monkeypatch.setattr("tasks.classify.training_batches.crop_batches", recorded_batches)
    monkeypatch.setattr(training, "score", recorded_score)
    config = highres_config(photos, schedule={"steps": 2}, evaluate_every=1, runtime={"workers": 0})
    splits = train_highres(config, tmp_path / "run")["data"]
    assert len({splits["train"], splits["minival"], splits["val"]}) == 3
    assert trained == [splits["train"]]
    assert scored == [splits["minival"], splits["minival"], splits["val"]]


def test_dropout_depends_on_the_rank_and_not_on_earlier_steps() -> None:
    batch = next(random_batches()(0))

    def gradient(world: World, step: int = 0) -> Tensor:
        model = small_vit(dropout=0.5)
        model.train()
        gradients = Gradients(model, model, make_job(world=world, optim=Optim(clip_norm=None)), MicroBatch(8))
        torch.rand(7)
        gradients.compute(batch, step)
        grad = model.get_parameter("head.weight").grad
        assert isinstance(grad, Tensor)
        return grad

    first, second = World(0, 2, torch.device("cpu")), World(1, 2, torch.device("cpu"))
    assert torch.equal(gradient(first), gradient(first))
    assert not torch.equal(gradient(first), gradient(second))
    assert not torch.equal(gradient(first), gradient(first, step=1))


def test_the_seed_of_a_training_decides_its_dropout() -> None:
    def trained(seed: int) -> Tensor:
        model = small_vit(dropout=0.5)
        engine.fit(model, make_job(schedule=Schedule(steps=3), seed=seed))
        weight: Tensor = model.get_parameter("head.weight").detach()
        return weight

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


class _FirstStepError(Exception):
    pass


COMMANDS = {
    "highres": ["finetune", "highres", "--data", "demo", "--checkpoint", "none"],
    "pretrain": ["pretrain", "--data", "PHOTOS", "--val-fraction", "0.4", "--augment", "none"],
    "segment": ["segment", "ade20k", "--data", "demo", "--checkpoint", "none"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_seed_reaches_initial_weights_and_batches(
    command: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[tuple[Tensor, Tensor]] = []

    def stopped(model: Any, job: engine.TrainJob) -> None:
        stream: Iterator[engine.Batch] = job.batches(0)
        weights = torch.cat([value.detach().flatten() for value in engine.unwrap(model).parameters()])
        starts.append((weights, next(stream)["image"].clone()))
        raise _FirstStepError

    monkeypatch.setattr(engine, "fit", stopped)
    for seed in ("0", "1", "1"):
        words = [str(photos) if word == "PHOTOS" else word for word in COMMANDS[command]]
        result = run_dpn(
            *words, "--arch", "mu/8", "-b", "8", "--steps", "4", "-j", "0",
            "--device", "cpu", "--seed", seed, "--image-size", "32", "--overwrite", "-o", str(tmp_path / "run"), "-q",
        )  # fmt: skip
        assert isinstance(result.exception, _FirstStepError), result.output
    (weights0, images0), (weights1, images1), (weights2, images2) = starts
    assert not torch.equal(weights0, weights1)
    assert not torch.equal(images0, images1)
    assert torch.equal(weights1, weights2)
    assert torch.equal(images1, images2)


def test_tensorboard_has_the_values_of_the_log(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = build_tracker("tensorboard", tmp_path, Console(quiet=True))
    track("cell", {"step": 3, "loss": 0.5, "note": "text stays out"})
    track("cell", {"step": 5, "loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["cell/loss"]
    assert [(event.step, event.value) for event in events.Scalars("cell/loss")] == [(3, 0.5), (5, 0.25)]


def test_report_to_reaches_the_tracker_in_a_run(photos: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run_dpn(
        "finetune", "highres", "--data", str(photos), "--val-fraction", "0.2", "--arch", "mu/8", "--checkpoint", "none",
        "--image-size", "32", "-b", "8", "--steps", "4", "-j", "0", "--device", "cpu", "--report-to", "tensorboard",
        "-o", str(tmp_path / "run"), "-q",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("highres/loss")] == [1, 2, 3, 4]


def test_wandb_gets_numbers_and_its_failure_never_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[dict[str, float]] = []
    metrics: list[tuple[str, str]] = []

    def log(values: dict[str, float]) -> None:
        if len(logged) == 2:
            raise OSError("unreachable")
        logged.append(values)

    def define_metric(name: str, step_metric: str) -> None:
        metrics.append((name, step_metric))

    started = SimpleNamespace(log=log, define_metric=define_metric)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **arguments: started))
    track = build_tracker("wandb", tmp_path, Console())
    for label, step in (("first", 5), ("second", 1), ("second", 2), ("second", 3)):
        track(label, {"step": step, "loss": 0.5, "note": "text stays out"})
    assert logged == [{"first/step": 5, "first/loss": 0.5}, {"second/step": 1, "second/loss": 0.5}]
    assert metrics == [("first/*", "first/step"), ("second/*", "second/step")]
    assert capsys.readouterr().err.count("stopped working (unreachable)") == 1
