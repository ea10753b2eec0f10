"""The training loop: recorded steps, exact resume, accumulation, memory, signals, numbers that are none."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import statistics
import traceback
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dpn_cli.config.schema import Optim, Runtime, Schedule
from dpn_cli.engine import fit as engine
from dpn_cli.engine.cross_batch_loss import CrossBatchLoss
from dpn_cli.engine.fit import Batch, Outputs
from dpn_cli.engine.layer_grad_norms import LayerGradNorms, layer_name
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.engine.optim import clip_gradients
from dpn_cli.errors import NonFiniteError, StoppedError
from dpn_cli.run import signals
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import ProgressTick
from dpn_cli.run.run_dir import MetricsLog
from dpn_cli.weights.backbone import load_backbone
from support.engine import SINGLE_PROCESS, has_same_weights, loss_fn, make_job, random_batches, small_vit, train_steps
from support.goldens import GOLDENS, Arrays, to_nchw
from support.processes import run_in_child

RECORDED: dict[str, tuple[str, str, Optim, float, Schedule, float]] = {
    "train_steps_vit_momentum": (
        "vit_tok_repsize",
        "none",
        Optim(state_dtype="bfloat16"),
        0.03,
        Schedule(steps=8, warmup=1),
        2e-4,
    ),
    "train_steps_dpn_adam": (
        "vit_dpn",
        "dpn",
        Optim(name="adam", state_dtype="bfloat16", weight_decay=1e-4, decay_unit="schedule"),
        1e-3,
        Schedule(steps=8, warmup=2),
        5e-5,
    ),
}


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("micro", [2, 1])
def test_whole_training_steps_equal_big_vision(
    name: str, micro: int, golden: Callable[[str], Arrays], tmp_path: Path
) -> None:
    source, stem, optim, lr, schedule, atol = RECORDED[name]
    arrays, image = golden(name), golden(f"{source}.io")["image"]
    model = load_backbone(
        checkpoint=str(GOLDENS / f"{source}.params.npz"), stem=stem, image_size=32, num_classes=10, head="load"
    )

    def batches(start: int) -> Generator[Batch, None, None]:
        for step in range(start, 4):
            yield {"image": to_nchw(np.roll(image, step, axis=2)), "label": torch.from_numpy(arrays["labels"][step])}

    observed: list[ProgressTick] = []
    log = MetricsLog(tmp_path / "metrics.jsonl")
    four = schedule.model_copy(update={"steps": 8})
    with pytest.raises(AssertionError, match="before step 4"):  # of the schedule's 8 steps, 4 are recorded
        engine.fit(
            model,
            make_job(
                batches=batches,
                optim=optim,
                schedule=four,
                lr=lr,
                batch_size=2,
                seed=0,
                outputs=Outputs(log=log, tick=observed.append),
                micro_batch=MicroBatch(micro),
            ),
        )
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [record["loss"] for record in records] == pytest.approx(arrays["training_loss"].tolist(), rel=1e-4)
    assert [record["grad_norm"] for record in records] == pytest.approx(arrays["l2_grads"].tolist(), rel=1e-3)
    final_arrays: dict[str, Any] = {k.removeprefix("final/"): v for k, v in arrays.items() if k.startswith("final/")}
    np.savez(tmp_path / "final.npz", **final_arrays)
    final = load_backbone(checkpoint=str(tmp_path / "final.npz"), stem=stem, image_size=32, num_classes=10, head="load")
    width = model.embed_dim
    for key, value in model.state_dict().items():
        expected = final.state_dict()[key]
        if key.endswith("qkv.bias") and optim.name == "adam":  # Adam normalises the noise of the keys' zero gradient
            value, expected = (torch.cat([x[:width], x[2 * width :]]) for x in (value, expected))
        torch.testing.assert_close(value, expected, atol=atol, rtol=0, msg=key)


@pytest.mark.parametrize(
    ("optim", "precision"),
    [
        (Optim(), "fp32"),
        (Optim(name="adam", weight_decay=0.1), "fp32"),
        (Optim(state_dtype="bfloat16"), "fp32"),
        (Optim(name="adam", state_dtype="bfloat16"), "fp32"),
        (Optim(name="adam"), "bf16"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    optim: Optim, precision: Literal["fp32", "bf16"], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"optim": optim, "precision": precision, "checkpoint_every": 4}
    full = small_vit(drop_path=0.3)
    train_steps(full, 10, **options)
    checkpoints = Checkpoints(tmp_path)

    def broken(start: int) -> Generator[Batch, None, None]:
        stream = random_batches()(start)
        for _ in range(start, 7):
            yield next(stream)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_steps(small_vit(drop_path=0.3), 10, batches=broken, outputs=Outputs(checkpoints), **options)
    resumed = small_vit(seed=9, drop_path=0.3)
    result = train_steps(resumed, 10, outputs=Outputs(checkpoints), **options)
    assert result.steps == 10
    assert has_same_weights(full, resumed)


class _Coupled(CrossBatchLoss):
    def features(self, model: nn.Module, part: Batch) -> Tensor:
        features: Tensor = model(part["image"])
        return features

    def couple(self, features: Tensor, batch: Batch) -> Tensor:
        return (features @ features.T).logsumexp(-1).mean()


@pytest.mark.parametrize("loss", [loss_fn, _Coupled()])
@pytest.mark.parametrize("micro", [8, 3])
def test_the_way_from_fit_to_backward_is_short(
    loss: engine.LossFn, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[list[str]] = []
    original = Tensor.backward

    def recorded(value: Tensor) -> None:
        names = [frame.name for frame in traceback.extract_stack()[:-1]]
        observed.append(names[names.index("fit") :])
        original(value)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(Tensor, "backward", recorded)
    train_steps(small_vit(), 2, loss_fn=loss, micro_batch=MicroBatch(micro))
    assert len(observed) == 2 * -(-8 // micro)
    assert {len(names) for names in observed} == {3}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_before_the_update(value: float) -> None:
    def spoiled(model: nn.Module, batch: Batch) -> Tensor:
        return loss_fn(model, batch) * value

    model = small_vit()
    with pytest.raises(NonFiniteError, match="step 1: loss (nan|inf), .*; --resume alone comes to the same step again"):
        train_steps(model, loss_fn=spoiled)
    assert has_same_weights(model, small_vit())


def test_a_loss_that_is_no_number_stops_a_training_whose_gradients_are_numbers() -> None:
    model = small_vit()
    with pytest.raises(NonFiniteError, match="step 1: loss inf, gradient norm [0-9.]+;"):
        train_steps(model, loss_fn=lambda network, batch: loss_fn(network, batch) + math.inf)
    assert has_same_weights(model, small_vit())


def test_a_gradient_that_is_no_number_stops_before_the_update() -> None:
    def spoiled(model: nn.Module, batch: Batch) -> Tensor:
        zero = next(model.parameters()).sum() * 0
        return loss_fn(model, batch) + torch.sqrt(zero)  # finite loss, infinite slope at 0

    model = small_vit()
    with pytest.raises(NonFiniteError, match="gradient norm (nan|inf)"):
        train_steps(model, loss_fn=spoiled)
    assert has_same_weights(model, small_vit())


def test_frozen_weights_do_not_move() -> None:
    model = small_vit()
    model.patch_embed.requires_grad_(False)
    initial = model.patch_embed.proj.weight.clone()
    train_steps(model, 5)
    assert torch.equal(model.patch_embed.proj.weight, initial)
    assert not has_same_weights(model, small_vit())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_the_state_and_names_its_exit_code(number: int, code: int, tmp_path: Path) -> None:
    full, stopped, resumed = small_vit(), small_vit(), small_vit(seed=9)
    train_steps(full, 6)

    def interrupting(start: int) -> Generator[Batch, None, None]:
        for step, batch in enumerate(random_batches()(start), start):
            if step == 3 and start == 0:
                os.kill(os.getpid(), number)
            yield batch

    with signals.listen(), pytest.raises(StoppedError, match=signal.Signals(number).name) as caught:
        train_steps(stopped, 6, batches=interrupting, outputs=Outputs(Checkpoints(tmp_path)))
    assert caught.value.exit_code == code
    saved = Checkpoints(tmp_path).load("last", pytest.fail)
    assert saved is not None
    assert saved[1]["step"] == 3
    train_steps(resumed, 6, outputs=Outputs(Checkpoints(tmp_path)))
    assert has_same_weights(full, resumed)


def test_seconds_count_the_sessions_before_and_rates_only_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, outputs = [1000.0], Outputs(Checkpoints(tmp_path))
    monkeypatch.setattr("dpn_cli.engine.fit.time", SimpleNamespace(perf_counter=lambda: current[0]))
    ticks: list[ProgressTick] = []

    def slow(start: int, stop: int = 99) -> Generator[Batch, None, None]:
        stream = random_batches()(start)
        for _ in range(start, stop):
            current[0] += 10.0
            yield next(stream)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_steps(small_vit(), 6, batches=partial(slow, stop=5), outputs=outputs, checkpoint_every=3)
    current[0] = 9e9  # the time between two sessions does not count
    result = train_steps(small_vit(), 6, batches=slow, outputs=replace(outputs, tick=ticks.append), checkpoint_every=3)
    # Three steps and the batch read ahead were saved, and three batches were read then.
    assert (result.seconds, result.wait_seconds, result.earlier) == (70.0, 70.0, (40.0, 40.0))
    # Of three steps, the batch of the next one is read ahead.
    assert [tick.images_per_second for tick in ticks] == [8 / 20, 16 / 30, 24 / 30]
    assert [one.wait_share for one in ticks] == [1.0] * 3


def test_best_is_the_best_and_survives_a_resume(tmp_path: Path) -> None:
    # The third is evaluated again on resume; the fifth equals the best one, and the earlier one stays.
    scores = iter([1.0, 5.0, 3.0, 3.0, 5.0, 2.0])

    def evaluate() -> dict[str, float]:
        return {"accuracy": next(scores)}

    def broken(start: int) -> Generator[Batch, None, None]:
        stream = random_batches()(start)
        for _ in range(start, 7):
            yield next(stream)
        raise KeyboardInterrupt

    outputs = Outputs(Checkpoints(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        train_steps(
            small_vit(), 10, batches=broken, evaluate=evaluate, evaluate_every=2, outputs=outputs, checkpoint_every=6
        )
    train_steps(small_vit(), 10, evaluate=evaluate, evaluate_every=2, outputs=outputs, checkpoint_every=6)
    best = Checkpoints(tmp_path).load("best", pytest.fail)
    assert best is not None
    assert (best[1]["step"], best[1]["best"]) == (4, 5.0)


def test_evaluation_sees_the_model_in_eval_mode_and_training_continues() -> None:
    model = small_vit(drop_path=0.5)
    modes: list[bool] = []

    def evaluate() -> dict[str, float]:
        modes.append(model.training or torch.is_grad_enabled())
        return {"accuracy": 0.0}

    train_steps(model, 4, evaluate=evaluate, evaluate_every=2)
    assert modes == [False, False]
    assert model.training


def test_learning_rate_and_wait_share_are_logged(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    train_steps(small_vit(), 4, outputs=Outputs(log=log), evaluate=lambda: {"accuracy": 12.5})
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 4]
    assert [record["lr"] for record in records[:4]] == pytest.approx([0, 0.1, 0.075, 0.025])
    assert all(0 <= record["wait_share"] <= 1 for record in records[:4])
    assert records[4] == {"step": 4, "accuracy": 12.5}


def test_bf16_training_learns_like_fp32() -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        model = small_vit()
        result = engine.fit(
            model,
            make_job(
                batches=lambda start: (next(random_batches()(0)) for _ in range(30)),
                schedule=Schedule(steps=30),
                seed=0,
                runtime=Runtime.model_validate({"precision": precision}),
            ),
        )
        losses.append(result.loss)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[0] < 3 * math.log(2)


def test_a_compiled_step_trains_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend="aot_eager"))
    plain, fast = small_vit(), small_vit()
    train_steps(plain, 4)
    prepared = engine.prepare(fast, Runtime(compile=True), SINGLE_PROCESS)
    assert prepared is not fast
    train_steps(prepared, 4)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("evaluated", [False, True])
def test_lost_records_are_counted_once_however_often_a_run_is_resumed(evaluated: bool, tmp_path: Path) -> None:
    warnings: list[str] = []
    said: list[str] = []

    def outputs() -> Outputs:
        return Outputs(Checkpoints(tmp_path), MetricsLog(tmp_path / "m.jsonl"), warn=warnings.append, info=said.append)

    def until(stop: int) -> None:
        def broken(start: int) -> Generator[Batch, None, None]:
            stream = random_batches()(start)
            for _ in range(start, stop):
                yield next(stream)
            raise KeyboardInterrupt

        arguments: dict[str, Any] = {"evaluate": lambda: {"accuracy": 1.0}} if evaluated else {}
        with pytest.raises(KeyboardInterrupt):
            train_steps(
                small_vit(), 12, batches=broken, outputs=outputs(), checkpoint_every=2, evaluate_every=3, **arguments
            )

    until(5)
    log = MetricsLog(tmp_path / "m.jsonl")
    until(7)
    assert (warnings, log.count_lost()) == ([], 0)
    lines = log.path.read_text().splitlines()
    log.path.write_text("".join(f"{line}\n" for line in lines[2:]))  # its start is gone
    until(9)
    until(9)
    until(11)
    assert log.count_lost() == 2
    assert warnings == [f"{log.path}: 2 records up to step 6 are gone, and this run's curve lacks them"]
    assert [line.split(",")[0] for line in said] == [f"continues after step {step} of 12" for step in (4, 6, 8, 8)]
    log.path.unlink()
    until(11)
    assert "are gone" in warnings[1]


def save_and_die(folder: Path) -> None:
    saves = itertools.count(1)

    def dying(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata)
        if next(saves) == 3:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpn_cli.run.checkpoints.save_file", dying)
        train_steps(small_vit(), 10, outputs=Outputs(Checkpoints(folder)), checkpoint_every=2)


def test_kill_nine_in_the_middle_of_a_save_loses_nothing(tmp_path: Path) -> None:
    assert run_in_child(save_and_die, tmp_path) == -signal.SIGKILL
    full, resumed = small_vit(), small_vit(seed=9)
    warnings: list[str] = []
    steps: list[int] = []

    def watched(start: int) -> Generator[Batch, None, None]:
        steps.append(start)
        return random_batches()(start)

    train_steps(full, 10)
    train_steps(
        resumed, 10, batches=watched, outputs=Outputs(Checkpoints(tmp_path), warn=warnings.append), checkpoint_every=2
    )
    assert steps == [4]
    assert has_same_weights(full, resumed)


# The parameters of each layer of the small network, whose only block has the number 1.
OWN_LAYERS = {
    "positions": ["pos_embed"],
    "class token": ["cls_token"],
    "embedding": ["patch_embed.proj.weight", "patch_embed.proj.bias"],
    "first norm": ["patch_embed.norm_in.weight", "patch_embed.norm_in.bias"],
    "second norm": ["patch_embed.norm.weight", "patch_embed.norm.bias"],
    "head": ["head.weight", "head.bias"],
    "other": ["norm.weight", "norm.bias"],
}


@pytest.mark.parametrize("micro", [8, 3])
def test_norms_of_layers_are_measured_before_clipping(micro: int, tmp_path: Path) -> None:
    log, model = MetricsLog(tmp_path / "metrics.jsonl"), small_vit()
    nn.init.normal_(model.get_parameter("head.weight"), generator=torch.Generator().manual_seed(1))
    loss_fn(model, next(random_batches()(0))).backward()  # type: ignore[no-untyped-call]
    actual = {name: value.grad.double() for name, value in model.named_parameters() if value.grad is not None}
    layers = {**OWN_LAYERS, "block 1": [name for name in actual if name.startswith("blocks.0.")]}
    by_hand = {name: math.sqrt(sum(float((actual.pop(one) ** 2).sum()) for one in own)) for name, own in layers.items()}
    assert not actual
    job_of_one = make_job(
        1, layer_norms=True, optim=Optim(clip_norm=1e-3), outputs=Outputs(log=log), micro_batch=MicroBatch(micro)
    )
    engine.fit(model, job_of_one)
    (record,) = log.records()
    assert record["layer_norms"] == pytest.approx(by_hand, rel=1e-4)
    assert min(by_hand.values()) > 1e-3
    assert record["grad_norm"] == pytest.approx(math.sqrt(sum(norm**2 for norm in by_hand.values())), rel=1e-4)


def test_a_parameter_without_gradient_is_left_out_of_its_layers_norm() -> None:
    network = nn.ModuleDict({"head": nn.Linear(2, 2), "fc": nn.Linear(2, 2)})
    network.get_parameter("head.bias").grad = torch.full((2,), 3.0)
    network.get_parameter("fc.weight").grad = torch.full((2, 2), 4.0)
    norms = LayerGradNorms(network)
    norms.add()
    assert norms.by_layer(norms.pop_means().tolist()) == pytest.approx({"head": math.sqrt(18), "other": 8.0})


def test_norms_of_layers_are_means_over_all_steps_and_those_of_the_last_ones_stand_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120 steps are logged every second one; here the last 15 begin after an odd one."""
    by_hand: list[float] = []

    def noting(parameters: list[nn.Parameter], *others: Any) -> Tensor:
        block = [one.grad for name, one in model.named_parameters() if name.startswith("blocks.0.")]
        by_hand.append(math.sqrt(sum(float((one.double() ** 2).sum()) for one in block if one is not None)))
        return clip_gradients(parameters, *others)

    monkeypatch.setattr("dpn_cli.engine.gradients.clip_gradients", noting)
    monkeypatch.setattr(engine, "NORM_AVERAGE_STEPS", 15)
    model, plain, log = small_vit(), small_vit(), MetricsLog(tmp_path / "metrics.jsonl")
    for network in (model, plain):
        network.patch_embed.requires_grad_(False)
    fields: dict[str, Any] = {"batch_size": 2, "batches": random_batches(2)}
    train_steps(model, 120, layer_norms=True, outputs=Outputs(log=log), **fields)
    records, initial = log.records(), 0
    assert [record["step"] for record in records] == [*range(2, 105, 2), 105, *range(106, 121, 2)]
    for record in records:
        assert record["layer_norms_steps"] == record["step"] - initial
        mean = statistics.fmean(by_hand[initial : record["step"]])
        assert record["layer_norms"]["block 1"] == pytest.approx(mean, rel=1e-4)
        initial = record["step"]
    assert "embedding" not in records[-1]["layer_norms"]
    monkeypatch.undo()
    untouched = MetricsLog(tmp_path / "plain.jsonl")
    train_steps(plain, 120, outputs=Outputs(log=untouched), **fields)
    assert has_same_weights(model, plain)
    assert all("layer_norms" not in record for record in untouched.records())


def test_norms_of_layers_of_a_resumed_run_equal_the_uninterrupted_ones(tmp_path: Path) -> None:
    """The state is saved every seventh step, which lies between two records."""

    def broken(start: int) -> Generator[Batch, None, None]:
        yield from itertools.islice(random_batches(2)(start), 10)
        raise KeyboardInterrupt

    full, cut = (MetricsLog(tmp_path / name) for name in ("whole.jsonl", "cut.jsonl"))
    fields: dict[str, Any] = {"batch_size": 2, "layer_norms": True, "checkpoint_every": 7}
    train_steps(small_vit(), 120, batches=random_batches(2), outputs=Outputs(log=full), **fields)
    outputs = Outputs(Checkpoints(tmp_path / "checkpoints"), cut)
    with pytest.raises(KeyboardInterrupt):
        train_steps(small_vit(), 120, batches=broken, outputs=outputs, **fields)
    train_steps(small_vit(seed=9), 120, batches=random_batches(2), outputs=outputs, **fields)
    norms = [[(one["step"], one["layer_norms"]) for one in log.records()] for log in (full, cut)]
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("backbone.patch_embed.proj.bias", "embedding"),
        ("vit.blocks.11.norm1.weight", "block 12"),
        ("transformer.resblocks.0.ln_1.weight", "block 1"),
        ("norm_posemb.weight", "second norm"),
        ("positional_embedding", "positions"),
        ("token_embedding.weight", "other"),
        ("attn_pool.mlp.fc1.weight", "other"),
        ("overhead.weight", "other"),
    ],
)
def test_layers_are_found_by_the_names_of_parameters_in_any_network(parameter: str, layer: str) -> None:
    assert layer_name(parameter) == layer
