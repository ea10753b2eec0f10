"""What a training shows while it runs: a line at the first step, then one every ten seconds whatever its length."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from rich.console import Console as RichConsole
from torch import Tensor, nn

from dpn_cli.engine.fit import Batch, Outputs
from dpn_cli.run import distributed
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import BLOCKS, Console, ProgressTick, average_stretches, count_noun, sparkline
from dpn_cli.run.run_dir import MetricsLog
from support.engine import loss_fn, small_vit, train_steps


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tick_of(step: int, steps: int) -> ProgressTick:
    return ProgressTick(step, steps, 0.5, 1e-3, 12.34, 0.125, 3600.0 * (steps - step) / steps)


def moments(
    console: Console, clock: Clock, step_seconds: float, steps: int, err: pytest.CaptureFixture[str]
) -> list[float]:
    """Return the seconds after its start at which a training shows a line."""
    start, actual = clock.now, []
    with console.progress("highres") as tick:
        for step in range(1, steps + 1):
            clock.now += step_seconds
            tick(tick_of(step, steps))
            actual += [clock.now - start] * len(err.readouterr().err.splitlines())
    return actual


@pytest.mark.parametrize("step_seconds", [0.01, 0.7, 3.0, 9.9])
def test_a_line_comes_at_the_first_step_and_every_ten_seconds(
    step_seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    actual = moments(Console(clock=clock), clock, step_seconds, int(100 / step_seconds), capsys)
    assert actual[0] == pytest.approx(step_seconds)
    gaps = [final - initial for initial, final in itertools.pairwise(actual)]
    assert max(gaps) <= 10.0001
    assert len(actual) <= 1 + 100 / min(10, max(5, step_seconds))  # and no flood of them


def test_steps_longer_than_ten_seconds_are_shown_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    assert moments(Console(clock=clock), clock, 12.0, 5, capsys) == [12.0, 24.0, 36.0, 48.0, 60.0]


def test_many_short_trainings_share_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    console = Console(clock=clock)
    assert [len(moments(console, clock, 0.5, 4, capsys)) for _ in range(12)] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]


def test_a_progress_line_shows_step_loss_speed_and_remaining_time(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().progress("highres") as tick:
        tick(tick_of(25, 100))
    assert capsys.readouterr().err == ("highres: 25/100 loss 0.5 lr 0.001 ETA 0:45:00 12.3 images/s wait 12.5%\n")


def test_a_bar_shows_the_same() -> None:
    console, written = Console(), io.StringIO()
    console.rich = RichConsole(file=written, force_terminal=True, width=120)
    with console.progress("highres") as tick:
        tick(tick_of(25, 100))
    assert "25/100 loss 0.5 lr 0.001 ETA 0:45:00 12.3 images/s wait 12.5%" in written.getvalue()


def on_terminal(width: int, losses: list[float], encoding: str = "utf-8") -> str:
    """Return the last line that a terminal shows of a training; every second step is logged."""
    console, file = Console(), io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console.rich = RichConsole(file=file, force_terminal=True, width=width)
    with console.progress("highres") as tick:
        for step, loss in enumerate(losses, 1):
            tick(dataclasses.replace(tick_of(step, len(losses)), loss=loss, logged=step % 2 == 0))
    file.seek(0)
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.read()).strip())[-1]


def test_a_terminal_shows_a_curve_of_all_logged_losses() -> None:
    losses = [step * (step % 2.0) for step in range(100)]
    for width, points in ((120, 24), (80, 8)):
        line = on_terminal(width, losses)
        (curve,) = re.findall("[▁▂▃▄▅▆▇█]+", line)
        parts = np.array_split(losses[1::2], points)
        heights = np.interp([part.mean() for part in parts], (parts[0].mean(), parts[-1].mean()), (0, 7))
        assert [BLOCKS.index(block) for block in curve] == pytest.approx(heights, abs=1)  # parts differ by a number
        assert (curve[0], curve[-1]) == ("▁", "█")
        assert "100/100 loss 99 lr 0.001" in line
        assert "images/s" in line
        assert len(line) < width
    for width, encoding in ((120, "ascii"), (70, "utf-8")):
        assert not re.search("[▁▂▃▄▅▆▇█]", on_terminal(width, losses, encoding))


def test_a_curve_is_of_the_whole_training() -> None:
    losses = [3.18 - 0.0075 * step + 0.2 * (step % 4 == 0) for step in range(120)]
    for width in (80, 120):
        (curve,) = re.findall("[▁▂▃▄▅▆▇█]+", on_terminal(width, losses))
        third = len(curve) // 3
        assert min(curve[:third]) > max(curve[-third:])
    values = [float(number) for number in range(11)]
    assert average_stretches(values, 4) == [0.5, 3.0, 6.0, 9.0]
    assert average_stretches(values, 11) == average_stretches(values, 20) == values
    assert average_stretches([], 4) == average_stretches(values, 0) == []


def test_a_curve_goes_from_the_lowest_to_the_highest_block() -> None:
    assert sparkline([3, 2, 1, 0]) == "█▆▃▁"
    assert sparkline([0.5, 0.5]) == "▁▁"
    assert sparkline([]) == ""


def test_images_are_counted_in_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Console(clock=clock).counting("eval", 100) as done:
        for _ in range(25):
            clock.now += 1
            done(4)
    assert capsys.readouterr().err.splitlines() == ["eval: 40 of 100 images", "eval: 80 of 100 images"]
    with Console(quiet=True, clock=clock).counting("eval", 100) as done:
        clock.now += 99
        done(4)
    assert capsys.readouterr().err == ""
    console, written = Console(), io.StringIO()
    console.rich = RichConsole(file=written, force_terminal=True, width=120)
    written.truncate(0)
    with console.progress("highres"), console.counting("eval", 100) as done:
        done(1)  # a terminal shows one bar at a time
    assert "eval" not in written.getvalue()
    with console.counting("[red]", 100) as done:
        done(42)
    assert "[red]" in written.getvalue()
    assert "42/100" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())


def test_one_thing_has_no_plural() -> None:
    assert [count_noun(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [count_noun(2, noun) for noun in ("class", "patch", "epoch")] == ["2 classes", "2 patches", "2 epochs"]


def test_every_step_is_shown_and_the_log_keeps_its_fifty_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the log needs the other ranks: the number of reductions does not depend on what is shown."""
    observed: list[ProgressTick] = []
    reductions: list[Tensor] = []

    def reduced(value: Tensor) -> Tensor:
        reductions.append(value)
        return value

    monkeypatch.setattr(distributed, "reduce_over_ranks", reduced)
    log = MetricsLog(tmp_path / "metrics.jsonl")
    train_steps(small_vit(), 150, outputs=Outputs(log=log, tick=observed.append))
    assert [tick.step for tick in observed] == list(range(1, 151))
    assert [tick.step for tick in observed if tick.logged] == list(range(3, 151, 3))
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(3, 151, 3))
    assert len(reductions) == 50
    assert [record["loss"] for record in records] == pytest.approx([tick.loss for tick in observed[2::3]])
    for tick in observed:
        assert tick.seconds_left == pytest.approx((150 - tick.step) * 8 / tick.images_per_second)


def test_a_record_has_the_mean_loss_since_the_last_one(tmp_path: Path) -> None:
    """Also in a training that is resumed between two records."""
    losses: list[float] = []

    def observed_loss(model: nn.Module, batch: Batch) -> Tensor:
        value = loss_fn(model, batch)
        losses.append(value.item())
        return value

    whole, parts = MetricsLog(tmp_path / "whole.jsonl"), MetricsLog(tmp_path / "parts.jsonl")
    train_steps(small_vit(), 150, loss_fn=observed_loss, outputs=Outputs(log=whole))
    records = [json.loads(line) for line in whole.path.read_text().splitlines()]
    expected = [fmean(losses[first : first + 3]) for first in range(0, 150, 3)]
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=1e-6)

    class StopError(Exception):
        """Ends the training after step 100, which has no record."""

    def stop(tick: ProgressTick) -> None:
        if tick.step == 101:
            raise StopError

    outputs = Outputs(Checkpoints(tmp_path / "checkpoints"), parts)
    with pytest.raises(StopError):
        train_steps(small_vit(), 150, checkpoint_every=100, outputs=dataclasses.replace(outputs, tick=stop))
    train_steps(small_vit(), 150, checkpoint_every=100, outputs=outputs)
    resumed = [json.loads(line) for line in parts.path.read_text().splitlines()]
    assert [record["loss"] for record in resumed] == [record["loss"] for record in records]


def test_the_rate_is_that_of_the_last_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 s, and from the 11th on of 4 s; an evaluation of 100 s after the 30th step does not count."""
    clock, ticks = Clock(), list[ProgressTick]()

    def slow_loss(model: nn.Module, batch: Batch) -> Tensor:
        clock.now += 1 if len(ticks) < 10 else 4
        return loss_fn(model, batch)

    def evaluate() -> dict[str, float]:
        clock.now += 100
        return {"top1": 0.0}

    monkeypatch.setattr(time, "perf_counter", clock)
    job: dict[str, Any] = {"loss_fn": slow_loss, "evaluate": evaluate, "evaluate_every": 30, "monitor": "top1"}
    train_steps(small_vit(), 40, outputs=Outputs(tick=ticks.append), **job)
    rates = [tick.images_per_second / 8 for tick in ticks]  # batches of 8
    assert rates[:10] == pytest.approx([1] * 10)
    assert rates[12] == pytest.approx(13 / 22)
    assert rates[18:] == pytest.approx([1 / 4] * 22)
    assert ticks[30].seconds_left == pytest.approx(9 * 4)
