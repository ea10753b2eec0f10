"""A network in parts over ranks (FSDP2): it trains as one process does, and any number of ranks resumes it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpn_cli.config.schema import Optim, Runtime
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch, Outputs
from dpn_cli.engine.fsdp import ShardedModel
from dpn_cli.engine.gradients import Gradients
from dpn_cli.engine.memory import MicroBatch
from dpn_cli.errors import SaveError
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import ProgressTick
from dpn_cli.run.distributed import World
from dpn_cli.run.run_dir import MetricsLog
from support.cli import run_dpn
from support.engine import make_job, random_batches, rank_batches, small_vit
from support.images import write_class_folders
from support.ranks import CPU, run_distributed

pytestmark = pytest.mark.slow

ALONE = World(0, 1, CPU)
# States that two ranks go on from, and how these were trained: one in parts, one of a single process.
GO_ON = {"parts": "adam", "whole": "momentum"}
STEPS, EVERY = 6, 2
OPTIMS = {
    "momentum": Optim(),
    "sgdw": Optim(weight_decay=0.1),
    "adam": Optim(name="adam", weight_decay=0.1, eps=1e-3),  # of rounding errors Adam makes steps otherwise
    "bfloat16": Optim(state_dtype="bfloat16"),
}


def broken(batches: engine.Batches) -> engine.Batches:
    """Batches that end the training after four of its steps, and after its second save."""

    def until_broken(start: int) -> Generator[Batch, None, None]:
        for step, batch in enumerate(batches(start), start):
            if step == 5:
                raise KeyboardInterrupt
            yield batch

    return until_broken


def train(
    world: World,
    optim: str,
    folder: Path,
    *,
    shard: bool = True,
    stops: bool = False,
    seed: int = 0,
    precision: Literal["fp32", "bf16"] = "fp32",
    warn: Callable[[str], None] = pytest.fail,
) -> dict[str, float]:
    """Train a network with all that a state can hold; returns sums of its weights, and what its log holds."""
    runtime = Runtime(shard=shard, checkpoint_every=EVERY, precision=precision)
    network = small_vit(drop_path=0.5, grad_checkpointing=optim == "adam", seed=seed + 1)
    model = engine.prepare(network, runtime, world)
    network.load_state_dict(small_vit(seed=seed).state_dict())  # as a sweep does for each of its trainings
    assert isinstance(model, ShardedModel) == shard

    def tick(final: ProgressTick) -> None:
        assert (network.pos_embed.numel() == 0) == shard  # parts are all there is

    log = MetricsLog(folder / "metrics.jsonl") if world.leads else None
    batches = random_batches() if world.size == 1 else rank_batches(world)
    one = make_job(
        STEPS,
        world=world,
        runtime=runtime,
        optim=OPTIMS[optim],
        batches=broken(batches) if stops else batches,
        micro_batch=MicroBatch(2),
        ema_decay=0.9 if optim == "adam" else None,
        layer_norms=True,
        evaluate=lambda: {"accuracy": float(network.pos_embed.double().square().sum())},
        evaluate_every=3,
        outputs=Outputs(Checkpoints(folder / "checkpoints"), log, tick, warn),
    )
    engine.fit(model, one)
    assert engine.unwrap(model) is network
    actual = {name: value.double().sum().item() for name, value in network.state_dict().items()}
    for record in log.records() if log else ():
        step, norms = record["step"], record.get("layer_norms", {})
        actual |= {f"{name} {step}": record[name] for name in ("loss", "grad_norm", "accuracy") if name in record}
        actual |= {f"{name} {step}": norm for name, norm in norms.items()}
    return actual


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts exchanges of gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes once more, with what this rank holds
        self.count += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def exchanges(world: World, micro: int) -> int:
    """Return how often the gradients of a batch are exchanged."""
    model = engine.prepare(small_vit(), Runtime(shard=True), world)
    assert isinstance(model, ShardedModel)
    with Counted() as counted:
        work = Gradients(model, model.network, make_job(world=world), MicroBatch(micro))
        work.compute(next(rank_batches(world)(0)), 0)
    return int(counted.count)


def three_job(world: World, folder: Path) -> None:
    world = World(world.rank, 3, CPU, grain=2)
    assert exchanges(world, 8) == exchanges(world, 1) == 2  # those of the block, and all others
    for optim in OPTIMS:
        actual = train(world, optim, folder / f"{optim}-of-three")
        (folder / f"{optim}-{world.rank}.json").write_text(json.dumps(actual))
    for shard in (False, True):
        name = f"bf16-{shard}"
        actual = train(world, "momentum", folder / name, precision="bf16", shard=shard)
        (folder / f"{name}-{world.rank}.json").write_text(json.dumps(actual))
    with pytest.raises(KeyboardInterrupt):
        train(world, "adam", folder / "stopped", stops=True)
    failing_save(world, folder)


def failing_save(world: World, folder: Path) -> None:
    """One rank has no space for its part of a state."""
    checkpoints, original = Checkpoints(folder / "full"), HuggingFaceStorageWriter.write_data
    checkpoints.save_parts("last", {"one": torch.ones(3)}, {"step": 1}, world)

    def write_data(*arguments: Any) -> Any:
        if world.rank == 1:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceStorageWriter, "write_data", write_data)
        with pytest.raises(SaveError, match=r"full/last: not written \(No space left on device\)"):
            checkpoints.save_parts("last", {"one": torch.zeros(3)}, {"step": 2}, world)
    saved = checkpoints.load("last", pytest.fail)
    assert saved is not None
    assert saved[0]["one"].tolist() == [1, 1, 1]
    assert saved[1] == {"step": 1}


IMAGES = ("--data", "photos", "--device", "cpu", "-j", "0", "--json", "-q")
HIGHRES = (
    *("finetune", "highres", "--arch", "mu/8", "--checkpoint", "none", "--image-size", "16", "-b", "8", "--steps", "6"),
    *(
        "--set",
        "optim.name=momentum",
        "--set",
        "data.minival=0.1",
        "--set",
        "evaluate_every=3",
        "--val-fraction",
        "0.2",
    ),
    *("-o", "run", *IMAGES),
)
SCORE = ("eval", "score", "run", "--split", "all", *IMAGES)


def commands(*arguments: str) -> list[dict[str, Any]]:
    """Train in the current folder, then score the network; returns the results, on ranks that do not lead none."""
    done = [run_dpn(*HIGHRES, *arguments), run_dpn(*SCORE)]
    assert [item.exit_code for item in done] == [0, 0], [item.output for item in done]
    return [json.loads(item.stdout) for item in done if item.stdout]


def two_job(world: World, folder: Path) -> None:
    os.environ.update(WORLD_SIZE=str(world.size), RANK=str(world.rank))  # as torchrun sets them
    os.chdir(folder)
    results = commands("--shard")
    (folder / f"commands-{world.rank}.json").write_text(json.dumps(results))
    for name, optim in GO_ON.items():
        actual = train(world, optim, folder / name, seed=7)  # its own weights do not matter
        (folder / f"{name}-{world.rank}.json").write_text(json.dumps(actual))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings of three ranks, one of which stops, and of two ranks that go on from the states of three and of one."""
    root = tmp_path_factory.mktemp("shards")
    run_distributed(three_job, root, ranks=3)
    with pytest.raises(KeyboardInterrupt):
        train(ALONE, "momentum", root / "whole", shard=False, stops=True)
    for copy in ("parts", "read", "damaged"):
        shutil.copytree(root / "stopped", root / copy)
    write_class_folders(root / "photos", classes=3, each=10)
    run_distributed(two_job, root)
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("alone")
    return {optim: train(ALONE, optim, root / optim, shard=False) for optim in OPTIMS}


def read(path: Path) -> dict[str, float]:
    output: dict[str, float] = json.loads(path.read_text())
    return output


@pytest.mark.parametrize("optim", OPTIMS)
def test_three_ranks_with_a_part_each_train_the_network_of_one(
    optim: str, folder: Path, alone: dict[str, dict[str, float]]
) -> None:
    """Weights, losses, norms of gradients, of layers, and what an evaluation sees; no part has equal thirds."""
    expected = alone[optim]
    assert read(folder / f"{optim}-0.json") == pytest.approx(expected, rel=2e-4, abs=2e-4)
    for rank in (1, 2):
        actual = read(folder / f"{optim}-{rank}.json")
        assert actual == pytest.approx({name: expected[name] for name in actual}, rel=2e-4, abs=2e-4)


def test_matrices_in_bfloat16_match_autocast(folder: Path) -> None:
    assert read(folder / "bf16-True-0.json") == pytest.approx(read(folder / "bf16-False-0.json"), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("state", GO_ON)
def test_two_ranks_resume_a_run_of_three_or_one(state: str, folder: Path, alone: dict[str, dict[str, float]]) -> None:
    assert read(folder / f"{state}-0.json") == pytest.approx(alone[GO_ON[state]], rel=2e-4, abs=2e-4)


@pytest.mark.parametrize("state", ["read", "damaged"])
def test_one_process_resumes_a_run_of_three_ranks(state: str, folder: Path, alone: dict[str, dict[str, float]]) -> None:
    """From the state before the last one where a file of the last one is damaged."""
    said: list[str] = []
    if state == "damaged":
        part = folder / "damaged" / "checkpoints" / "last" / "shard-00002-model-00001-of-00001.safetensors"
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    actual = train(ALONE, "adam", folder / state, shard=False, seed=7, warn=said.append)
    assert actual == pytest.approx(alone["adam"], rel=2e-4, abs=2e-4)
    assert len(said) == (state == "damaged")


def test_commands_on_two_ranks_give_the_files_and_numbers_of_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "alone").mkdir()
    (folder / "alone" / "photos").symlink_to(folder / "photos")
    monkeypatch.chdir(folder / "alone")
    expected, both = commands(), json.loads((folder / "commands-0.json").read_text())
    assert json.loads((folder / "commands-1.json").read_text()) == []
    for one, two in zip(expected, both, strict=True):
        assert (two["top1"], two["loss"]) == pytest.approx((one["top1"], one["loss"]), rel=1e-4)
    actual, their_values = (
        load_file(run_folder / "run" / "weights.safetensors") for run_folder in (folder, folder / "alone")
    )
    assert actual.keys() == their_values.keys()
    for name, value in their_values.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-6)
    assert not (folder / "run" / "checkpoints").exists()


def test_without_ranks_one_line_explains_how_to_start_them(tmp_path: Path) -> None:
    result = run_dpn(*HIGHRES, "--shard", "-o", str(tmp_path / "run"), "--data", "demo")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --shard: spreads a network over several processes, and this is one; start N of them")
    assert not (tmp_path / "run").exists()


def test_each_rank_writes_its_part_of_the_state_and_the_best_weights_are_whole(folder: Path) -> None:
    last, best = (folder / "stopped" / "checkpoints" / name for name in ("last", "best"))
    sizes = {path.name: path.stat().st_size for path in last.glob("*.safetensors")}
    assert len(sizes) == 3
    assert max(sizes.values()) < 0.45 * sum(sizes.values())
    assert json.loads((last / "state.json").read_text())["step"] == 4
    with safe_open(next(iter(sorted(last.glob("*.safetensors")))), "pt") as file:
        assert any(name.startswith("ema.") for name in file.keys())  # noqa: SIM118
    weights = load_file(best / "state.safetensors")
    assert weights["model.blocks.0.mlp.fc1.weight"].shape == (128, 32)
    assert not any(name.startswith("optim.") for name in weights)
