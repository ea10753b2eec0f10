"""Trainings that draw shards, in folders and behind URLs: the same order from both, few shards at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpn_cli.config.schema import SampledData
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.image_source import ImageSource, open_split
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.shard_sampler import ShardOrder, make_shard_order
from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.data.splits import open_class_data
from dpn_cli.engine.fit import Batches
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from support.distill import distill_config, train_distill, write_teacher
from support.highres import highres_config, train_highres
from support.packs import SHARD_IMAGES, SHARDS, TINY_RUN, write_pack
from tasks.classify import training_batches
from tasks.classify.distill import train as distillation

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("shuffle"))


@pytest.mark.parametrize("place", ["pack", "wds:pack/train/*.tar"])
def test_batches_are_drawn_from_few_shards_and_shared_by_ranks(place: str, folder: Path) -> None:
    where = place.replace("pack", str(folder / "pack"), 1)
    train = open_class_data(ImageSource(where, val_fraction=0.1), 0.0).train
    assert train.shards is not None
    order = make_shard_order(train, SampledData(shuffle="shards", open_shards=2), 8, 3, 10)
    assert order is not None

    def take(world: World, start: int = 0, case: str = "image") -> list[torch.Tensor]:
        batches = crop_batches(train, Augmentation((8, 8)), 8, 3, world, workers=0, order=order)(start)
        return [next(batches)[case] for _ in range(4)]

    single = take(World(0, 1, CPU))
    ranks = [take(World(rank, 2, CPU)) for rank in range(2)]
    assert all(torch.equal(full, torch.cat(parts)) for full, *parts in zip(single, *ranks, strict=True))
    assert all(map(torch.equal, take(World(0, 1, CPU), 2)[:2], single[2:]))
    sample = [[train.labels[row] for row in order.rows(step)] for step in range(4)]
    assert [labels.tolist() for labels in take(World(0, 1, CPU), case="label")] == sample
    assert len(set(train.shards.of[order.rows(0)].tolist())) == 2


@pytest.mark.parametrize("kind", ["highres", "distill"])
def test_trainings_shuffle_shards_on_request(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[ShardOrder | None] = []
    module = distillation if kind == "distill" else training_batches
    made = module.crop_batches

    def seen(split: LabelledImages, *arguments: Any, **options: Any) -> Batches:
        order = options["order"]
        orders.append(order)
        assert order is None or (split.shards and np.array_equal(order.shards, split.shards.of))
        batches: Batches = made(split, *arguments, **options)
        return batches

    monkeypatch.setattr(module, "crop_batches", seen)
    for number, data in enumerate(({}, {"shuffle": "shards", "open_shards": 3})):
        place, path = folder / "pack", tmp_path / str(number)
        if kind == "distill":
            teacher = write_teacher(tmp_path / "teacher.safetensors")
            told: Any = {"seed": 5, "data": data, "cache_teacher": 1, "schedule": {"steps": 20}}
            train_distill(distill_config(place, teacher, **told), path)
        else:
            train_highres(highres_config(place, seed=5, data=data, schedule={"steps": 2}), path)
    order = orders[-1]
    assert orders[0] is None
    assert order
    assert (order.open_shards, order.seed, order.batch_size) == (3, 5, 8 if kind == "distill" else 16)
    assert order.steps == (20 if kind == "distill" else 2)


def test_data_without_shards_and_orders_of_their_own_are_refused(folder: Path, tmp_path: Path) -> None:
    place = str(folder / "photos")
    result = run_dpn(
        "finetune", "highres", "--data", place, *TINY_RUN, "-o", str(tmp_path / "run"), "--shuffle", "shards"
    )
    assert result.exit_code == 2
    assert "--shuffle shards: the images of --data are in no packed or webdataset shards; pack them" in result.stderr
    result = run_dpn("pretrain", "--config", "pretrain_deit", "--data", "x", "--shuffle", "shards", "--print-config")
    assert result.exit_code == 2
    assert "repeats (3): such epochs draw a share of all images; leave data.shuffle at images" in result.stderr


def test_shards_of_a_subset_are_shards_of_the_full_set(folder: Path) -> None:
    full, _ = open_split(ImageSource(str(folder / "pack")), "train")
    data = open_class_data(ImageSource(str(folder / "pack")), 0.25)
    assert full.shards
    assert data.minival.shards
    for part in (data.train, data.minival):
        assert part.shards
        for row in range(len(part.labels)):
            assert str(part.shards.paths[part.shards.of[row]]) in part.locate(row)
    # A pack is in the order by which minival is chosen: it is in the last shards, and not in all of them.
    assert sorted(set(data.minival.shards.of.tolist())) == [6, 7]
    assert np.array_equal(full.shards.of, np.repeat(np.arange(SHARDS), SHARD_IMAGES))
