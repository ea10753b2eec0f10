"""What a plan says of memory, against what torch's profiler has seen the allocator give out in a training."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from dpn_cli.config.load import build
from dpn_cli.config.schema import Optim, Runtime
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch, Outputs
from dpn_cli.engine.footprint import step_bytes
from dpn_cli.engine.losses import sigmoid_xent
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone, load_backbone
from support.cli import run_dpn
from support.engine import SINGLE_PROCESS, make_job
from support.ranks import run_distributed
from tasks.classify.pretrain_config import PretrainConfig
from tasks.classify.train import load_network

ADAM, SIDE, CLASSES, BATCH = Optim(name="adam"), 64, 100, 8


def network(arch: str = "nano/8", **options: Any) -> Backbone:
    return load_backbone(arch, image_size=SIDE, num_classes=CLASSES, **options)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["image"].permute(0, 3, 1, 2).float() / 127.5 - 1
    return sigmoid_xent(model(images).float(), batch["label"])


def measured(optim: Optim, rows: int, runtime: Runtime, world: World, ema: float = 0.0, **options: Any) -> int:
    """Return the most bytes of tensors from the second step of a training on, its batch left out."""
    began: list[int] = []
    here = len(world.rows(BATCH))

    def batches(start: int) -> Generator[Batch, None, None]:
        batch = {"image": torch.zeros(here, SIDE, SIDE, 3, dtype=torch.uint8), "label": torch.zeros(here, CLASSES)}
        return (batch for _ in itertools.count())

    outputs = Outputs(tick=lambda tick: began.append(time.time_ns()))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        ready = engine.prepare(network(**options), runtime, world)
        micro_batch = MicroBatch(rows)
        more = {"optim": optim, "micro_batch": micro_batch, "runtime": runtime, "ema_decay": ema, "world": world}
        engine.fit(ready, make_job(3, loss_fn=loss_fn, batches=batches, outputs=outputs, **more))
    current, most = 0, 0
    results = profiler.profiler.kineto_results
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            current += event.nbytes()
            most = max(most, current) if event.start_ns() > began[0] else 0
    return most


@pytest.mark.parametrize(
    ("optim", "rows", "options"),
    [
        (ADAM, 8, {}),
        (ADAM, 1, {}),
        (ADAM, 8, {"grad_checkpointing": True}),
        (ADAM, 8, {"bf16": True}),
        (ADAM, 8, {"ema": 0.9}),
        (Optim(), 8, {"norm": "dtn"}),
        (Optim(state_dtype="bfloat16"), 2, {"stem": "none", "norm": "bn"}),
    ],
)
def test_a_step_takes_the_estimated_memory(optim: Optim, rows: int, options: dict[str, Any]) -> None:
    ema, bf16 = options.pop("ema", 0.0), options.pop("bf16", False)
    actual = measured(optim, rows, Runtime(precision="bf16" if bf16 else "fp32"), SINGLE_PROCESS, ema, **options)
    message = step_bytes(network(**options), optim, BATCH, rows, bf16=bf16, ema=bool(ema))
    assert message == pytest.approx(actual, rel=0.05)


def in_parts(world: World, folder: Path, rows: int) -> None:
    (folder / str(world.rank)).write_text(str(measured(ADAM, rows, Runtime(shard=True), world, arch="Ti/16")))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 1])
def test_a_step_of_a_sharded_network_takes_the_estimated_memory(rows: int, tmp_path: Path) -> None:
    run_distributed(partial(in_parts, rows=rows), tmp_path)
    message = step_bytes(network("Ti/16"), ADAM, 4, rows, shards=2)
    assert [message, message] == pytest.approx(
        [int((tmp_path / rank).read_text()) for rank in "01"], rel=0.3
    )  # what is on its way differs


@pytest.mark.parametrize(("ranks", "words"), [(1, ()), (4, ("--shard",))])
def test_a_plan_states_the_memory_of_a_device(ranks: int, words: tuple[str, ...]) -> None:
    shape = ("--arch", "nano/8", "--image-size", str(SIDE), "--augment", "none", "--stem", "dpn")
    line = ("plan", "pretrain", *shape, "-b", "32", "--micro-batch-size", "4", "--set", "ema=0.9", "--device", "cpu")
    completed = run_dpn(*line, "--ranks", str(ranks), *words, "--json")
    assert completed.exit_code == 0, completed.output
    result = json.loads(completed.stdout)
    output = run_dpn("pretrain", *line[2:], "--data", "imagenet", "--print-config").stdout
    config = build(PretrainConfig, yaml.safe_load(output), "test")
    message = step_bytes(load_network(config, 1000), ADAM, 32 // ranks, 4, shards=ranks, ema=True)
    assert (result["micro_batch_size"], result["memory_bytes"]) == (4, message)
