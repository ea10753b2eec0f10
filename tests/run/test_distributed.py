"""Two and three processes, gloo, on the CPU: gradients are the whole batch's, and every example is scored once."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dpn_cli.config.schema import Runtime, Schedule
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch, Outputs
from dpn_cli.engine.gradients import Gradients
from dpn_cli.engine.memory import MicroBatch, in_chunks
from dpn_cli.errors import NonFiniteError, WorkerError
from dpn_cli.metrics import confusion_matrix, count_right, score
from dpn_cli.run import distributed
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import ProgressTick
from dpn_cli.run.distributed import World
from dpn_cli.run.run_dir import MetricsLog
from support.engine import loss_fn, make_job, random_batches, rank_batches, small_vit
from support.images import write_class_folders
from support.processes import run_processes
from support.ranks import CPU, run_distributed
from support.vtab import run_vtab


def fit(
    world: World,
    batches: engine.Batches,
    loss: engine.LossFn = loss_fn,
    micro: int = 8,
    drop_path: float = 0.0,
    norm: str = "ln",
    **outputs: object,
) -> engine.FitResult:
    model = engine.prepare(small_vit(drop_path=drop_path, norm=norm), Runtime(), world)
    written = Outputs(**outputs)  # type: ignore[arg-type]
    result = engine.fit(
        model,
        make_job(
            5,
            batches=batches,
            loss_fn=loss,
            world=world,
            outputs=written,
            micro_batch=MicroBatch(micro),
            layer_norms=written.log is not None,
        ),
    )
    result.metrics = {name: value.double().sum().item() for name, value in engine.unwrap(model).state_dict().items()}
    return result


def train_job(world: World, folder: Path) -> None:
    for micro in (4, 1):
        result = fit(world, rank_batches(world), micro=micro, log=MetricsLog(folder / f"{micro}.jsonl"))
        (folder / f"rank{world.rank}-{micro}.json").write_text(json.dumps(result.metrics))


@pytest.mark.slow
def test_two_ranks_train_the_network_of_one(tmp_path: Path) -> None:
    run_distributed(train_job, tmp_path)
    alone_log = MetricsLog(tmp_path / "alone.jsonl")
    single = fit(World(0, 1, CPU), random_batches(), log=alone_log).metrics
    norms = [record["layer_norms"] for record in alone_log.records()]
    assert len(norms) == 5
    for micro in (4, 1):
        for there, here in zip(MetricsLog(tmp_path / f"{micro}.jsonl").records(), norms, strict=True):
            assert there["layer_norms"] == pytest.approx(here, rel=1e-4)
    for rank in (0, 1):
        for micro in (4, 1):
            together = json.loads((tmp_path / f"rank{rank}-{micro}.json").read_text())
            assert together == pytest.approx(single, rel=1e-5, abs=1e-5)


def thirds_job(world: World, folder: Path) -> None:
    halves = replace(world, grain=2)
    log = MetricsLog(folder / "thirds.jsonl")
    (folder / f"rank{world.rank}.json").write_text(
        json.dumps(fit(halves, rank_batches(halves), micro=2, log=log).metrics)
    )
    dropping = fit(halves, rank_batches(halves), micro=2, drop_path=0.5)
    (folder / f"rank{world.rank}-dropping.json").write_text(json.dumps(dropping.metrics))


def test_three_ranks_train_the_network_of_one_although_they_do_not_divide_the_batch(tmp_path: Path) -> None:
    """Shares are 2, 2 and 4 rows, so that micro-batches and what they drop are those of one rank."""
    run_distributed(thirds_job, tmp_path, ranks=3)
    alone_log = MetricsLog(tmp_path / "alone.jsonl")
    single = World(0, 1, CPU)
    expected = {
        "": fit(single, random_batches(), log=alone_log).metrics,
        "-dropping": fit(single, random_batches(), micro=2, drop_path=0.5).metrics,
    }
    for one, three in zip(alone_log.records(), MetricsLog(tmp_path / "thirds.jsonl").records(), strict=True):
        assert (three["loss"], three["grad_norm"]) == pytest.approx((one["loss"], one["grad_norm"]), rel=1e-4)
    for name, metrics in expected.items():
        for rank in range(3):
            together = json.loads((tmp_path / f"rank{rank}{name}.json").read_text())
            assert together == pytest.approx(metrics, rel=1e-5, abs=1e-5)


class _StopError(Exception):
    """Ends a training between two records of its log."""


def train_100_steps(world: World, outputs: Outputs) -> None:
    """Train with a state after step 51; every second step is logged."""
    model = engine.prepare(small_vit(), Runtime(), world)
    job = make_job(100, batches=rank_batches(world), world=world, outputs=outputs, micro_batch=MicroBatch(4))
    engine.fit(model, replace(job, runtime=Runtime(checkpoint_every=51)))


def resumed_job(world: World, folder: Path) -> None:
    def stop(tick: ProgressTick) -> None:
        if tick.step == 53:
            raise _StopError

    outputs = Outputs(Checkpoints(folder / "checkpoints"), MetricsLog(folder / "resumed.jsonl"))
    with pytest.raises(_StopError):
        train_100_steps(world, replace(outputs, tick=stop))
    train_100_steps(world, outputs)


def test_a_mean_loss_over_a_resumption_is_that_of_all_ranks(tmp_path: Path) -> None:
    run_distributed(resumed_job, tmp_path)
    alone = MetricsLog(tmp_path / "alone.jsonl")
    train_100_steps(World(0, 1, CPU), Outputs(log=alone))
    resumed = {record["step"]: record["loss"] for record in MetricsLog(tmp_path / "resumed.jsonl").records()}
    assert resumed == pytest.approx({record["step"]: record["loss"] for record in alone.records()}, rel=1e-3)


def deadlock(rank: int) -> None:
    multiprocessing.Barrier(2).wait()  # one of its own, at which no other rank arrives


def test_gradients_are_exchanged_once_per_batch_for_any_micro_batch(tmp_path: Path) -> None:
    network, exchanged = small_vit(), []

    def counted(values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        exchanged.append(values.numel())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(values)
        return done

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(network)
        model.register_comm_hook(None, lambda _, bucket: counted(bucket.buffer()))
        Gradients(model, network, make_job(world=World(0, 1, CPU)), MicroBatch(2)).compute(next(random_batches()(0)), 0)
    finally:
        dist.destroy_process_group()
    assert exchanged == [sum(parameter.numel() for parameter in network.parameters())]


def test_ranks_that_wait_for_ever_fail_their_test() -> None:
    with pytest.raises(TimeoutError, match="the ranks did not end within 0.4 s"):
        run_processes(deadlock, limit=0.4)


def lost_job(world: World, folder: Path) -> None:
    if world.rank == 0:
        try:
            with distributed.detect_lost_rank():
                distributed.barrier()
        except WorkerError as error:
            (folder / "error.txt").write_text(str(error))
    os._exit(0)  # rank 1 at once, and nobody in order


def test_a_rank_that_ends_is_one_clear_error_to_the_others(tmp_path: Path) -> None:
    run_distributed(lost_job, tmp_path)
    assert (tmp_path / "error.txt").read_text() == "another rank has ended; its own error names the reason"
    with pytest.raises(RuntimeError, match="of something else"), distributed.detect_lost_rank():
        raise RuntimeError("of something else")


def gone_job(world: World, folder: Path, *, within: bool, norm: str) -> None:
    """Rank 1 ends after the second exchange of gradients: before the third batch, or `within` the third exchange."""
    calls = iter(range(norm == "bn", 100))  # the first one is a trial, but of norms that count it

    def batches(start: int) -> Generator[Batch, None, None]:
        for step, batch in enumerate(rank_batches(world)(start), start):
            if world.rank == 1 and step == 2 and not within:
                os._exit(0)
            yield batch

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if world.rank == 1 and next(calls) == 3:
            os._exit(0)
        return loss_fn(model, batch)

    with pytest.raises(WorkerError, match="another rank has ended"):
        fit(world, batches, loss, norm=norm, checkpoints=Checkpoints(folder / "checkpoints"))
    os._exit(0)


@pytest.mark.parametrize("within", [False, True])
def test_a_lost_rank_costs_no_step_when_another_one_leads(within: bool, tmp_path: Path) -> None:
    run_distributed(partial(gone_job, within=within, norm="ln"), tmp_path)
    single = World(0, 1, CPU)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    saved = checkpoints.load("last", pytest.fail)
    assert saved is not None
    assert saved[1]["step"] == 2
    goes_on = fit(single, random_batches(), checkpoints=checkpoints).metrics
    assert goes_on == pytest.approx(fit(single, random_batches()).metrics, rel=1e-5, abs=1e-5)


def test_norms_that_have_counted_a_part_of_a_batch_are_not_saved(tmp_path: Path) -> None:
    run_distributed(partial(gone_job, within=True, norm="bn"), tmp_path)
    assert not Checkpoints(tmp_path / "checkpoints").started


def test_ranks_that_do_not_meet_end_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*_: object, **__: object) -> None:
        raise torch.distributed.DistNetworkError("Connection reset\nby peer")

    monkeypatch.setattr(torch.distributed, "init_process_group", reset)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(WorkerError, match=r"the ranks did not find each other \(Connection reset by peer\)"),
        distributed.join("cpu"),
    ):
        pytest.fail("alone")


def memory_job(world: World, folder: Path) -> None:
    def hungry(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if world.rank == 1 and len(batch["image"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_fn(model, batch)

    micro = MicroBatch(4)
    model = engine.prepare(small_vit(), Runtime(), world)
    engine.fit(
        model,
        make_job(
            batches=rank_batches(world), loss_fn=hungry, schedule=Schedule(steps=2), world=world, micro_batch=micro
        ),
    )
    (folder / f"rank{world.rank}.txt").write_text(str(micro.size))


def test_ranks_agree_on_a_micro_batch_that_all_have_memory_for(tmp_path: Path) -> None:
    run_distributed(memory_job, tmp_path)
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)] == ["2", "2"]


def stop_job(world: World, folder: Path) -> None:
    import signal

    from dpn_cli.errors import StoppedError
    from dpn_cli.run import signals

    def batches(start: int):  # type: ignore[no-untyped-def]
        for step, batch in enumerate(rank_batches(world)(start), start):
            if step == 2 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with signals.listen(), pytest.raises(StoppedError):
        fit(world, batches, checkpoints=Checkpoints(folder / "checkpoints"))


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    run_distributed(stop_job, tmp_path)
    saved = Checkpoints(tmp_path / "checkpoints").load("last", pytest.fail)
    assert saved is not None
    assert saved[1]["step"] == 2


def nan_job(world: World, folder: Path) -> None:
    def spoiled(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return loss_fn(model, batch) * (float("nan") if world.rank == 1 else 1.0)

    with pytest.raises(NonFiniteError):
        fit(world, rank_batches(world), spoiled)
    (folder / f"rank{world.rank}").touch()


def test_a_rank_without_finite_numbers_stops_all(tmp_path: Path) -> None:
    run_distributed(nan_job, tmp_path)
    assert all((tmp_path / f"rank{rank}").exists() for rank in (0, 1))


def score_job(world: World, folder: Path) -> None:
    logits = torch.randn(13, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(13) % 3
    confusion = confusion_matrix(3, CPU)
    for part in torch.split(torch.arange(world.rank, 13, 2), 2):  # 7 and 6 examples
        confusion.update(logits[part], labels[part])
    right, images = count_right(confusion)
    assert images == 13
    assert right == int((logits.argmax(1) == labels).sum())
    (folder / f"rank{world.rank}").write_text(str(distributed.from_leader(world.rank)))


def test_uneven_shares_are_counted_once_each(tmp_path: Path) -> None:
    run_distributed(score_job, tmp_path)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["0", "0"]


def image_job(world: World, folder: Path) -> None:
    """Score 7 images, of which rank 1 has three, with logits that are right for all; then without its memory."""
    split = ClassFolders(folder / "images")

    def logits_of(images: torch.Tensor) -> torch.Tensor:
        red = images[:, 0].float().mean((1, 2)) > images[:, 1].float().mean((1, 2))
        return torch.stack([red.float(), 1 - red.float()], 1)

    def hungry(images: torch.Tensor) -> torch.Tensor:
        if world.rank == 1 and len(images) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits_of(images)

    options: Any = {"loss": "softmax", "batch_size": 2, "workers": 0, "keep_predictions": True}
    for predict in (logits_of, lambda images: in_chunks(hungry, images)):
        scores = score(predict, split, lambda pixels: resize(pixels, (8, 8)), 2, world, **options)
        assert (scores.images, scores.right5) == (7, 7)
        assert scores.confusion.pairs == {0: 4, 3: 3}
        assert scores.loss == pytest.approx(math.log(1 + math.exp(-1)))
        assert [answer[:3] for answer in scores.predictions] == [(row, row // 4, row // 4) for row in range(7)]


def test_every_image_is_scored_once_over_ranks(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "images", classes=2, each=4)
    (tmp_path / "images" / "class1" / "003.jpg").unlink()
    run_distributed(image_job, tmp_path)


SHORT_SWEEP = (
    "data.tasks=svhn", "lrs=[0.01]", "seeds=1", "schedule.steps=6", "schedule.warmup=1", "batch_size=32",
    "optim.name=adam",
)  # fmt: skip


def sweep_job(world: World, folder: Path) -> None:
    os.environ.update(WORLD_SIZE=str(world.size), RANK=str(world.rank))  # as torchrun sets them
    for name, shard in (("two", "false"), ("parts", "true")):
        with nullcontext() if world.leads else pytest.raises(AssertionError):  # the result is the leader's
            run_vtab(folder / "digits", folder / name, *SHORT_SWEEP, f"runtime.shard={shard}")


@pytest.mark.slow
def test_a_sweep_over_ranks_equals_that_of_one_process(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "digits").symlink_to(digits)
    run_distributed(sweep_job, tmp_path)
    one = run_vtab(digits, tmp_path / "one", *SHORT_SWEEP)["tasks"]["svhn"]
    for name in ("two", "parts"):
        two = json.loads((tmp_path / name / "result.json").read_text())["tasks"]["svhn"]
        assert two["test_images"] == one["test_images"] == 797
        # Gradients are summed in another order, which may tip a few of the 797 images.
        assert two["test"]["mean"] == pytest.approx(one["test"]["mean"], abs=1.0)
        assert two["val"]["0.01"] == pytest.approx(one["val"]["0.01"], abs=1.5)
        ledger = (tmp_path / name / "ledger.jsonl").read_text().splitlines()
        assert len(ledger) == 2  # begun and scored
