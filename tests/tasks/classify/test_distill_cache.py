"""The teacher's targets on the disk: they are what the teacher computes, survive a kill, and belong to their run."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, merge, read_config
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.sampler import StepSampler
from dpn_cli.data.shard_sampler import ShardOrder
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.engine.fit import Batch
from dpn_cli.errors import DataError, DpnError, StoppedError
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone, export_backbone, load_backbone
from support.images import write_class_folders
from support.ranks import CPU
from tasks.classify.distill import cache as caches
from tasks.classify.distill import command
from tasks.classify.distill import train as training
from tasks.classify.distill.cache import TargetCache, cached_targets, check_views, target_shapes
from tasks.classify.distill.config import DistillConfig, finalize
from tasks.classify.distill.data import augmentation_of
from tasks.classify.distill.losses import Distance, NetworkOutputs, ObservedNetwork, inputs_of

ALONE, QUIET, SIZE = World(0, 1, CPU), Console(quiet=True), (16, 24)
ALL = {"attention": 1.0, "layers": [[0, 0], [1, 1]]}
TEACHER = load_backbone("nano/8", stem="none", image_size=SIZE, num_classes=3, seed=1).eval()


def config_of(**keys: Any) -> DistillConfig:
    small = {"batch_size": 6, "eval_batch_size": 4, "cache_teacher": 2, "losses": ALL, "data": {"crop": "inception"}}
    small |= {"schedule": {"steps": 20, "warmup": 0}, "runtime": {"workers": 0, "device": "cpu"}}
    config: DistillConfig = build(DistillConfig, merge(read_config("distill_demo"), small, keys), "config")
    return config


class Looks:
    """The teacher; `most` is how many batches it looks at before it is told to stop."""

    def __init__(self, config: DistillConfig, most: int = 1000) -> None:
        self.observed = ObservedNetwork(TEACHER, config.losses, [expected for _, expected in config.losses.layers])
        self.most, self.seen = most, 0

    @torch.no_grad()
    def __call__(self, batch: Batch) -> NetworkOutputs:
        if self.seen == self.most:
            raise StoppedError(15)
        self.seen += 1
        observed: NetworkOutputs = self.observed(inputs_of(TEACHER, batch))
        return observed


@pytest.fixture
def split(tmp_path: Path) -> ClassFolders:
    return ClassFolders(write_class_folders(tmp_path / "photos"))


@pytest.fixture
def fill(split: ClassFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TargetCache]:
    """Fill a cache of shards of 5 entries."""

    def filled(name: str = "run", most: int = 1000, world: World = ALONE, **keys: Any) -> TargetCache:
        config = config_of(**keys)
        values = caches.count_values(target_shapes(TEACHER.config, config.losses))
        monkeypatch.setattr(caches, "SHARD", 2 * values * 5 + 1)
        looks = Looks(config, most)
        cache = TargetCache(tmp_path / name, config, TEACHER, looks, split, world, QUIET)
        try:
            cache.fill()
        finally:
            filled.looked = looks.seen  # type: ignore[attr-defined]
        return cache

    return filled


def shards(cache: TargetCache | Path) -> dict[str, bytes]:
    folder = cache.folder if isinstance(cache, TargetCache) else cache / "teacher"
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


@pytest.mark.parametrize("order", [None, ShardOrder(np.arange(15) // 5, 6, 0, 2)], ids=["images", "shards"])
def test_cached_targets_give_the_teachers_loss(
    order: ShardOrder | None, split: ClassFolders, fill: Callable[..., TargetCache]
) -> None:
    cache, config = fill(), config_of()
    student = load_backbone("nano/8", stem="dpn", image_size=SIZE, num_classes=3, seed=2).eval()
    observed, looks = ObservedNetwork(student, config.losses, [0, 1]), Looks(config)
    deviations = {name: torch.full((shape[1],), 0.7) for name, shape in cache.shapes.items() if "tokens" in name}
    live, kept = (Distance(of, student, config.losses, deviations, "softmax") for of in (looks, cached_targets))
    batches = crop_batches(split, augmentation_of(config, SIZE), 6, config.seed, ALONE, workers=0, order=order)
    for batch in itertools.islice(cache.with_targets(batches, order)(3), 4):
        current, stored = looks(batch), cached_targets(batch)
        assert stored.keys() == current.keys()
        for name, value in current.items():
            torch.testing.assert_close(stored[name], value.half(), rtol=2e-3, atol=2e-3)
        with torch.no_grad():
            assert float(kept(observed, batch)) == pytest.approx(float(live(observed, batch)), rel=1e-3)


@pytest.mark.parametrize("pool", ["tok", "gap", "map"])
def test_the_shapes_match_the_teachers_outputs(pool: Any) -> None:
    losses = config_of().losses
    for norm in ("ln", "dtn"):
        teacher = load_backbone("nano/8", norm=norm, image_size=SIZE, num_classes=3, pool=pool).eval()
        with torch.no_grad():
            observed = ObservedNetwork(teacher, losses, [0, 1])(torch.zeros(1, 3, *SIZE))
        assert {name: tuple(value.shape[1:]) for name, value in observed.items()} == target_shapes(
            teacher.config, losses
        )


@pytest.mark.parametrize("jitter", [0.0, 0.4])
def test_views_come_again_after_all_of_them(split: ClassFolders, jitter: float) -> None:
    options = Augmentation(SIZE, jitter=jitter, views=2)
    sample: dict[tuple[int, int], list[Tensor]] = {}
    batches = zip(
        StepSampler(15, 5, 0, 0, range(5), views=2),
        crop_batches(split, options, 5, 0, ALONE, workers=0)(0),
        strict=False,
    )
    for items, batch in itertools.islice(batches, 12):  # four epochs
        for (view, _, row), image in zip(items, batch["image"], strict=True):
            sample.setdefault((row, view), []).append(image)
    assert len(sample) == 30
    for row in range(15):
        first, second = sample[row, 0], sample[row, 1]
        assert torch.equal(first[0], first[1])
        assert torch.equal(second[0], second[1])
        assert not torch.equal(first[0], second[0])


def test_a_killed_filling_continues_and_ranks_share_it(fill: Any, tmp_path: Path) -> None:
    full = shards(fill())
    assert (len(full), fill.looked) == (6, 12)  # five entries in batches of four and one
    with pytest.raises(StoppedError):
        fill("killed", most=5)
    run = shards(tmp_path / "killed")
    assert 0 < len(run) < 6
    assert shards(fill("killed")) == full
    assert fill.looked == 12 - 4 + 1  # two shards were there, of which a few entries are looked at again
    for rank in (0, 1):
        cache = fill("ranks", world=World(rank, 2, CPU))
        assert fill.looked == 6
    assert shards(cache) == full


def test_damaged_shards_and_other_targets_are_recomputed(fill: Any, tmp_path: Path) -> None:
    full = shards(fill())
    path = tmp_path / "run" / "teacher" / "targets-00003.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert shards(fill()) == full
    assert fill.looked == 3
    assert shards(fill(seed=5)) != full
    assert fill.looked == 12


def test_a_image_that_has_changed_is_named(split: ClassFolders, fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    opened = ClassFolders.open
    monkeypatch.setattr(ClassFolders, "open", lambda self, row: opened(self, (row + 5) % 15))
    with pytest.raises(DataError, match=r"\.jpg: the teacher computes something else .* start another with -o"):
        fill()


def test_mismatches_are_refused(fill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = caches.count_values(target_shapes(TEACHER.config, config_of().losses))
    needed = 2 * values * 30
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    fill("enough")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(DpnError, match=rf"--cache-teacher 2: .* 2 views of 15 images takes {needed / 1e9:.3g} GB"):
        fill("less")
    check_views(config_of(schedule={"steps": 5}), 15)
    with pytest.raises(DpnError, match="2: the teacher would see 30 views of 15 .* sees 24; use --cache-teacher 1 at"):
        check_views(config_of(schedule={"steps": 4}), 15)
    with pytest.raises(DpnError, match=r"cache_teacher \(2\): .* mixup \(0.2\)"):
        config_of(mixup=0.2)


def test_a_run_trains_on_cached_targets_and_deletes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = tmp_path / "teacher.safetensors"
    export_backbone(load_backbone("nano/8", stem="none", image_size=16, seed=1), teacher)
    read, looked = list[int](), list[int]()
    reading = TargetCache.read

    def noting(cache: TargetCache, entries: Sequence[int]) -> Tensor:
        read.extend(entries)
        return reading(cache, entries)

    def looking(teacher: Backbone, batch: Batch) -> Tensor:
        looked.append(len(batch["image"]))
        return inputs_of(teacher, batch)

    monkeypatch.setattr(TargetCache, "read", noting)
    monkeypatch.setattr(training, "inputs_of", looking)
    data = {"source": str(write_class_folders(tmp_path / "photos")), "held_out": 0.2, "crop": None}
    keys = {"data": data, "teacher": str(teacher), "losses": {"logits": 0, "attention": 0, "layers": []}}
    config = finalize(config_of(**keys, stem_share=0.25, schedule={"steps": 8}))
    result = command.run(config, LaunchOptions(tmp_path / "run"), QUIET)
    assert result is not None
    assert sorted(read) == sorted([*range(24)] * 2)  # 8 steps of 6: two views of 12 images, each twice
    assert looked == [4] * 6
    assert not (tmp_path / "run" / "teacher").exists()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 8
