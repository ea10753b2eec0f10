"""The engine when memory runs out, and what a micro-batch is made of."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpn_cli.arch import SIZES
from dpn_cli.config.schema import Runtime
from dpn_cli.engine import fit as engine
from dpn_cli.engine.fit import Batch, Outputs
from dpn_cli.engine.memory import MicroBatch, in_chunks
from dpn_cli.errors import DpnError, OutOfMemoryError
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from support.engine import has_same_weights, loss_fn, make_job, random_batches, small_vit, train_steps
from tasks.classify.distill.config import Losses
from tasks.classify.distill.losses import ObservedNetwork
from tasks.lit.text_tower import TextTower
from tasks.segment.model import LinearSegmenter


def test_accumulated_micro_batches_give_the_gradient_of_the_batch() -> None:
    models = [small_vit(), small_vit(), small_vit()]
    for model, size in zip(models, (8, 3, 1), strict=True):
        train_steps(model, 5, micro_batch=MicroBatch(size))
    for name, value in models[0].state_dict().items():
        for other in models[1:]:
            torch.testing.assert_close(other.state_dict()[name], value, atol=1e-6, rtol=1e-5)


def test_running_out_of_memory_halves_the_micro_batch_and_keeps_the_batch() -> None:
    most = 2
    warnings: list[str] = []

    def hungry(model: nn.Module, batch: Batch) -> Tensor:
        loss = loss_fn(model, batch)
        if len(batch["image"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    model, reference, micro = small_vit(), small_vit(), MicroBatch(8)
    result = train_steps(model, 4, loss_fn=hungry, micro_batch=micro, outputs=Outputs(warn=warnings.append))
    train_steps(reference, 4, micro_batch=MicroBatch(2))
    assert (micro.size, result.micro_batch) == (2, 2)
    assert has_same_weights(model, reference)
    assert [text for text in warnings if "micro-batches of 2 from here on, the batch stays 8" in text]


@pytest.mark.parametrize(
    "message",
    [
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_running_out_of_memory_with_one_image_is_an_error_of_its_own(message: str) -> None:
    def hopeless(model: nn.Module, batch: Batch) -> Tensor:
        raise RuntimeError(message)

    with pytest.raises(OutOfMemoryError, match="one image at a time") as caught:
        train_steps(small_vit(), loss_fn=hopeless, outputs=Outputs(warn=lambda text: None))
    assert caught.value.exit_code == 4
    with pytest.raises(OutOfMemoryError, match="--micro-batch-size 2"):
        train_steps(small_vit(), loss_fn=hopeless, micro_batch=MicroBatch(4, fixed=True))


def kept(compute: Callable[[], Any]) -> tuple[int, Any]:
    """Return the bytes that autograd keeps for the backward pass, and the value."""
    sizes: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        if not isinstance(value, nn.Parameter):
            sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        value = compute()
    return sum(sizes.values()), value


@pytest.mark.parametrize("task", ["classify", "segment", "distill", "lit"])
def test_checkpointed_blocks_keep_nothing_and_their_gradients_stay(task: str) -> None:
    vit: Any = load_backbone("nano/8", image_size=32, num_classes=3, seed=0)
    nn.init.normal_(vit.head.weight)
    built: dict[str, Callable[[], nn.Module]] = {
        "classify": lambda: vit,
        "segment": lambda: LinearSegmenter(vit, final_norm=False),
        "distill": lambda: ObservedNetwork(vit, Losses(tokens=1.0, attention=1.0, layers=((1, 2),)), [1]),
        "lit": lambda: TextTower(SIZES["nano"], 30, 5, 8, 10.0, None, seed=0),
    }
    network: Any = built[task]()
    inputs = torch.randint(30, (4, 5)) if task == "lit" else torch.randn(4, 3, 32, 32)
    sizes, gradients = [], []
    for checkpointing in (False, True):
        (network.transformer if task == "lit" else vit).set_grad_checkpointing(checkpointing)
        network.zero_grad()
        size, out = kept(lambda: network(inputs))
        parts = out.values() if isinstance(out, dict) else [out]
        torch.stack([part.square().mean() for part in parts]).sum().backward()  # type: ignore[no-untyped-call]
        sizes.append(size)
        gradients.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    assert sizes[1] < sizes[0] / 2
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_a_resumed_run_starts_with_the_micro_batch_that_fitted(tmp_path: Path) -> None:
    def training(folder: str, seed: int, most: int, stop: int | None, micro: MicroBatch) -> tuple[nn.Module, list[int]]:
        tried: list[int] = []

        def hungry(model: nn.Module, batch: Batch) -> Tensor:
            tried.append(len(batch["image"]))
            if tried[-1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss_fn(model, batch)

        def broken(start: int) -> Generator[Batch, None, None]:
            yield from islice(random_batches()(start), stop)
            raise KeyboardInterrupt

        model = small_vit(seed)
        outputs = Outputs(Checkpoints(tmp_path / folder), warn=lambda text: None)
        options: dict[str, Any] = {"loss_fn": hungry, "micro_batch": micro, "outputs": outputs, "batches": broken}
        if stop is None:
            train_steps(model, 6, checkpoint_every=2, **options)
        else:
            with pytest.raises(KeyboardInterrupt):
                train_steps(model, 6, checkpoint_every=2, **options)
        return model, tried

    full, _ = training("whole", 0, 2, None, MicroBatch(8))
    for folder in ("shrunk", "stated"):
        assert training(folder, 0, 2, 3, MicroBatch(8))[1][:3] == [8, 4, 2]
    resumed, tried = training("shrunk", 1, 8, None, MicroBatch(8))  # there would be room for more
    assert set(tried) == {2}
    assert has_same_weights(full, resumed)
    assert set(training("stated", 1, 8, None, MicroBatch(4, fixed=True))[1]) == {4}


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8])
def test_rows_that_do_not_fit_together_are_split_into_chunks(most: int) -> None:
    tried: list[int] = []

    def forward(part: Tensor) -> Tensor:
        tried.append(len(part))
        if len(part) > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return part * 2

    rows = torch.arange(8)
    assert torch.equal(in_chunks(forward, rows), rows * 2)
    assert tried[-1] <= most
    assert torch.equal(in_chunks(forward, rows[:0]), rows[:0])
    with pytest.raises(RuntimeError, match="of another kind"):
        in_chunks(lambda part: (_ for _ in ()).throw(RuntimeError("of another kind")), rows)


def test_one_row_that_does_not_fit_is_an_error_of_its_own() -> None:
    def hopeless(part: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemoryError, match="one image at a time, in an evaluation") as caught:
        in_chunks(hopeless, torch.arange(4))
    assert caught.value.exit_code == 4


def test_other_errors_are_not_taken_for_memory() -> None:
    def wrong(model: nn.Module, batch: Batch) -> Tensor:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        train_steps(small_vit(), loss_fn=wrong)


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(DpnError, match="--batch-size 8: less than one for each of the 9 ranks; use 9 at least"):
        engine.fit(small_vit(), make_job(world=World(0, 9, torch.device("cpu"))))
    # Statistics over unequal shares are not those of the batch.
    with pytest.raises(DpnError, match="--batch-size 8: not divisible by the 3 ranks; use 6"):
        engine.fit(small_vit(norm="bn"), make_job(world=World(0, 3, torch.device("cpu"))))


def test_shares_of_a_batch_are_equal_or_the_nearest_in_whole_grains() -> None:
    def shares(batch: int, ranks: int, grain: int = 1) -> list[tuple[int, int]]:
        worlds = [World(rank, ranks, torch.device("cpu"), grain=grain) for rank in range(ranks)]
        return [(world.rows(batch).start, len(world.rows(batch))) for world in worlds]

    assert shares(8, 2) == shares(8, 2, grain=3) == [(0, 4), (4, 4)]
    assert shares(8, 3) == shares(8, 3, grain=5) == [(0, 2), (2, 3), (5, 3)]
    assert shares(8, 3, grain=2) == [(0, 2), (2, 2), (4, 4)]
    assert shares(8, 3, grain=4) == shares(8, 3)  # two grains are not enough for three ranks
    assert World(0, 3, torch.device("cpu")).most(8) == 3


def test_automatic_micro_batches_fit_and_respect_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    large = load_backbone("Ti/16", image_size=224)
    assert MicroBatch.choose(Runtime(), 512, large, torch.device("cpu")).size == 16
    assert MicroBatch.choose(Runtime(), 512, small_vit(), torch.device("cpu")).size == 512
    assert MicroBatch.choose(Runtime(micro_batch_size=7), 512, large, torch.device("cpu")) == MicroBatch(7, True)
    gpu = torch.device("cuda")
    assert MicroBatch.choose(Runtime(), 512, large, gpu).size == 512  # and is halved where that is too much
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * 10**9, 80 * 10**9))
    assert MicroBatch.choose(Runtime(shard=True), 512, large, gpu).size == 64
