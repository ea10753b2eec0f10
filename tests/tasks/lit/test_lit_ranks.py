"""LiT on two processes, gloo, on the CPU: the loss is the whole batch's, and every image is encoded once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dpn_cli.config.schema import Runtime
from dpn_cli.run import distributed
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from support.captions import write_caption_shard
from support.contrastive import KINDS, ROWS, train_contrastive
from support.engine import SINGLE_PROCESS
from support.images import png_bytes
from support.ranks import run_distributed
from tasks.lit import cache
from tasks.lit.cache import cached_features
from tasks.lit.captions import ShardCaptions
from tasks.lit.encode import image_encoder

pytestmark = pytest.mark.slow

MICROS = (6, 2)


def features(folder: Path, name: str, world: World) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    """Encode the images of the only shard into a cache of that name."""
    split = ShardCaptions(str(folder / "one.tar"), skip_bad=False)
    encoder = image_encoder(load_backbone("mu/8", image_size=16, seed=0).eval(), Runtime(workers=0), world)
    return np.concatenate(cached_features(split, encoder, folder / name, world, Console(quiet=True)).shards)


def ranks_job(world: World, folder: Path) -> None:
    cache.SHARD, cache.BATCH = 4, 2
    np.save(folder / f"rank{world.rank}.npy", features(folder, "together", world))
    distributed.barrier()
    if world.leads:
        (folder / "other.tar").replace(folder / "one.tar")
    distributed.barrier()
    np.save(folder / f"rank{world.rank}-again.npy", features(folder, "together", world))
    for kind in KINDS:
        for micro in MICROS:
            for shard in (False, True):
                actual = train_contrastive(world, kind, micro, shard=shard)
                (folder / f"{kind}-{micro}-{shard}-{world.rank}.json").write_text(json.dumps(actual))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pass  # not needed by the ranks

    root = tmp_path_factory.mktemp("ranks")
    write_caption_shard(root / "one.tar", range(11), text=lambda number: f"sentence {number}")
    shutil.copy(root / "one.tar", root / "first.tar")
    content = (root / "one.tar").read_bytes()
    for number in (2, 9):  # in the shards of two ranks
        content = content.replace(png_bytes(number), png_bytes(20 + number))
    (root / "other.tar").write_bytes(content)
    run_distributed(ranks_job, root)
    return root


@pytest.mark.parametrize("shard", [False, True])
def test_two_ranks_of_half_the_batch_train_as_one(shard: bool, folder: Path) -> None:
    for kind in KINDS:
        single = train_contrastive(SINGLE_PROCESS, kind, ROWS)
        for micro in MICROS:
            for rank in (0, 1):
                together = json.loads((folder / f"{kind}-{micro}-{shard}-{rank}.json").read_text())
                assert together == pytest.approx(single, rel=2e-5)


def test_one_shard_is_enough_for_two_ranks_and_both_notice_changed_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SHARD", 4)
    monkeypatch.setattr(cache, "BATCH", 2)
    other = features(folder, "other", SINGLE_PROCESS)
    (folder / "first.tar").replace(folder / "one.tar")
    single = features(folder, "alone", SINGLE_PROCESS)
    assert np.flatnonzero(np.abs(other - single).max((1, 2)) > 0.01).tolist() == [2, 9]
    for rank in (0, 1):
        assert np.abs(np.load(folder / f"rank{rank}.npy") - single).max() < 1e-3
        assert np.abs(np.load(folder / f"rank{rank}-again.npy") - other).max() < 1e-3
    assert len(list((folder / "together").glob("*/*.npy"))) == 3
