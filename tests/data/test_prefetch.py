"""Shards behind URLs that are larger than the cache: fetched once an epoch, ahead of need, and kept while they are."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dpn_cli.config.schema import SampledData
from dpn_cli.data import pixels, prefetch, remote
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.image_source import ImageSource
from dpn_cli.data.leakage import record
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.prefetch import PrefetchWindow, check_cache
from dpn_cli.data.remote import RemotePath
from dpn_cli.data.resize import resize
from dpn_cli.data.shard_sampler import ShardOrder, ShardUse, make_shard_order
from dpn_cli.data.sources.base import LabelledImages, ShardIndex, sample_rows_to_check
from dpn_cli.data.splits import open_class_data
from dpn_cli.engine.fit import Batch
from dpn_cli.errors import DpnError, StoppedError, StoreError, WorkerError
from dpn_cli.run import signals
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from support.highres import highres_config, train_highres
from support.packs import TINY_RUN, write_pack
from support.stores import Fault, Store, serve_files, serve_s3

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
SHARDS, EACH, BATCH = 8, 12, 4
EPOCH = SHARDS * EACH // BATCH
TARS = [f"{number:06d}.tar" for number in range(SHARDS)]

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("ahead"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Store]:
    with serve_files(folder) as store:
        yield store


@pytest.fixture(scope="module")
def bucket(folder: Path) -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch, serve_s3(folder, patch) as store:
        yield store


@pytest.fixture
def store(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A server, or the store that is asked for, and a cache for five of its eight training shards and all lists."""
    shared: Store = request.getfixturevalue(getattr(request, "param", "server"))
    shared.clear()
    shared.faults.clear()
    monkeypatch.setattr(remote, "pause", lambda seconds: None)
    monkeypatch.setenv("DPN_CACHE_GB", str(room(folder, 5) / 1e9))
    yield shared
    shared.let_go()


def sizes(folder: Path, ending: str = "tar") -> list[int]:
    return [path.stat().st_size for path in sorted((folder / "pack" / "train").glob(f"*.{ending}"))]


def room(folder: Path, shards: int) -> int:
    return shards * max(sizes(folder)) + sum(sizes(folder, "npz"))


def opened(place: str, steps: int = EPOCH, kind: str = "pack") -> tuple[LabelledImages, ShardOrder]:
    where = f"{place}/pack" if kind == "pack" else f"wds:{place}/pack/train/{{000000..00000{SHARDS - 1}}}.tar"
    split = open_class_data(ImageSource(where, val_fraction=None if kind == "pack" else 0.1), 0.0).train
    order = make_shard_order(split, SampledData(shuffle="shards", open_shards=2), BATCH, 3, steps)
    assert order
    return split, order


def stream(split: LabelledImages, order: ShardOrder, world: World, start: int = 0, workers: int = 1) -> Iterator[Batch]:
    return crop_batches(split, Augmentation((8, 8)), BATCH, 3, world, workers=workers, order=order)(start)


def images(batches: Iterable[Batch]) -> torch.Tensor:
    return torch.cat([batch["image"] for batch in batches])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "kind", "workers"),
    [("server", "pack", 2), ("server", "pack", 0), ("server", "shards", 1), ("bucket", "pack", 2)],
    indirect=["store"],
)
def test_an_epoch_fetches_the_data_once(kind: str, workers: int, store: Store, folder: Path) -> None:
    split, order = opened(store.url, 3 * EPOCH, kind)
    near, _ = opened(str(folder), 3 * EPOCH, kind)
    expected = images(stream(near, order, ALONE, workers=0))
    store.clear()
    far = stream(split, order, ALONE, workers=workers)
    assert torch.equal(images(far), expected)
    fetched = {name: count for name, count in store.gets.items() if name.endswith(".tar")}
    assert sum(store.sent[name] for name in TARS) <= 3 * sum(sizes(folder)), fetched
    # Once an epoch. On a busy machine a copy can still be deleted while it is in use, and is fetched again.
    assert sum(max(0, count - 3) for count in fetched.values()) <= 2, fetched
    # Less than the data are kept from one epoch to the next.
    assert sum(path.stat().st_size for path in remote.cache_dir().glob("*.*")) <= room(folder, 5)


def test_the_first_batch_waits_for_its_own_shards_and_the_next_ones_are_fetched_meanwhile(store: Store) -> None:
    split, order = opened(store.url)
    needs = list(order.iter_shard_uses(0, range(BATCH)))
    first = {TARS[need.shard] for need in needs if need.first == 0}
    later = [TARS[need.shard] for need in needs if TARS[need.shard] not in first]
    assert len(first) == 2
    store.held = set(later)
    batches = stream(split, order, ALONE)
    next(batches)
    store.wait_for(lambda: all(store.gets[name] for name in later[:2]))
    assert not any(store.gets[name] for name in later[2:])  # as many ahead as are open
    store.let_go()
    assert len(list(batches)) == EPOCH - 1
    assert all(store.gets[name] == 1 for name in later)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "ahead"), [("auto", 3), (1, 3), (0, 0)])
def test_scoring_and_encoding_prefetch_too(
    workers: Any, ahead: int, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPN_CACHE_GB", str(room(folder, 16) / 1e9))
    (far, _), (near, _) = opened(store.url), opened(str(folder))
    assert far.shards
    shards = [TARS[number] for number in dict.fromkeys(far.shards.of.tolist())]
    store.clear()
    read = partial(pixels.stream, transform=partial(resize, size=(8, 8)), batch_size=BATCH, workers=workers)
    with read(far) as parts, read(near) as expected:
        store.held = set(shards[1:])
        assert torch.equal(next(parts).images, next(expected).images)
        store.wait_for(lambda: all(store.gets[name] for name in shards[: 1 + ahead]))
        assert not any(store.gets[name] for name in shards[1 + ahead :])
        store.let_go()
        assert all(torch.equal(one.images, other.images) for one, other in zip(parts, expected, strict=True))
    assert not multiprocessing.active_children()
    assert {store.gets[name] for name in shards} == {1}


def test_ranks_of_two_machines_fetch_shards_of_their_own(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, observed = [], []
    for rank in range(2):
        monkeypatch.setenv("DPN_HOME", str(tmp_path / str(rank)))
        split, order = opened(store.url)
        store.clear()
        full.append(list(stream(split, order, World(rank, 2, CPU))))
        observed.append({name for name in TARS if store.gets[name]})
        assert all(store.gets[name] <= 1 for name in TARS)
    assert not observed[0] & observed[1]
    assert len(observed[0]) == len(observed[1]) == SHARDS // 2
    monkeypatch.setenv("DPN_HOME", str(tmp_path / "alone"))
    single = images(stream(*opened(store.url), ALONE))
    assert torch.equal(single, torch.cat([part["image"] for parts in zip(*full, strict=True) for part in parts]))


def test_ranks_of_one_machine_fetch_a_shard_once(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPN_CACHE_GB", str(room(folder, 7) / 1e9))
    split, order = opened(store.url)
    worlds = [World(rank, 2, CPU, local_ranks=2) for rank in range(2)]
    parts = list(zip(*(stream(split, order, world) for world in worlds), strict=True))
    assert torch.equal(images(batch for both in parts for batch in both), images(stream(*opened(str(folder)), ALONE)))
    assert {name: store.gets[name] for name in TARS} == dict.fromkeys(TARS, 1)


def test_a_late_prefetch_process_fetches_nothing_that_has_been_read(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPN_CACHE_GB", str(room(folder, 16) / 1e9))
    late, start = os.pipe()
    monkeypatch.setattr(prefetch, "follow_parent", lambda signal: os.read(late, 1))
    split, order = opened(store.url)
    batches = stream(split, order, ALONE)
    assert len(list(itertools.islice(batches, EPOCH - 1))) == EPOCH - 1
    assert {name: store.gets[name] for name in TARS} == dict.fromkeys(TARS, 1)
    for path in remote.cache_dir().glob("*.tar"):
        path.unlink()
    os.write(start, b"x")
    open_now = {TARS[use.shard] for use in order.iter_shard_uses(0, range(BATCH)) if use.last == EPOCH - 1}
    store.wait_for(lambda: all(store.gets[name] == 2 for name in open_now))
    assert {store.gets[name] for name in set(TARS) - open_now} == {1}
    assert len(list(batches)) == 1


def test_faults_that_pass_change_nothing(store: Store, folder: Path) -> None:
    split, order = opened(store.url)
    faults: list[Fault] = ["cut", 503, "wrong"]
    store.faults["000004.tar"] = faults
    expected = images(stream(opened(str(folder))[0], order, ALONE, workers=0))
    assert torch.equal(images(stream(split, order, ALONE)), expected)
    assert (store.gets["000004.tar"], faults) == (4, [])


def test_a_shard_that_cannot_be_fetched_is_one_error_when_it_is_read(store: Store) -> None:
    split, order = opened(store.url)
    last = list(order.iter_shard_uses(0, range(BATCH)))[-1]
    store.faults[TARS[last.shard]] = [503] * 1000
    batches = stream(split, order, ALONE)
    assert len(list(itertools.islice(batches, last.first))) == last.first
    with pytest.raises(StoreError, match=rf"^{store.url}/pack/train/{TARS[last.shard]}: [^\n]*given up after 5 attem"):
        list(batches)
    assert 5 <= store.gets[TARS[last.shard]] <= 10  # the process that fetches ahead gives up, too, and says nothing
    assert not multiprocessing.active_children()


def test_the_death_of_a_prefetch_process_is_reported(store: Store) -> None:
    split, order = opened(store.url)
    batches = stream(split, order, ALONE)
    first = {TARS[need.shard] for need in order.iter_shard_uses(0, range(BATCH)) if need.first == 0}
    store.held = set(TARS) - first  # it is busy
    next(batches)
    fetching = min(multiprocessing.active_children(), key=lambda process: process.pid or 0)  # it began first
    os.kill(fetching.pid or 0, signal.SIGKILL)
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        list(batches)
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize(("store", "stopped"), [("server", False), ("bucket", True)], indirect=["store"])
def test_a_training_ends_as_on_local_files(
    stopped: bool, store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(place: str) -> Any:
        data = {"minival": 0.0, "shuffle": "shards", "open_shards": 2}
        options = {"workers": 1, "checkpoint_every": 100}
        return highres_config(
            f"{place}/pack", data=data, batch_size=BATCH, schedule={"steps": 2 * EPOCH}, runtime=options
        )

    train_highres(config(str(folder)), tmp_path / "near")
    if stopped:
        calls = itertools.count()
        monkeypatch.setattr(signals, "requested_signal", lambda: signal.SIGTERM if next(calls) == EPOCH + 4 else None)
        with pytest.raises(StoppedError):
            train_highres(config(store.url), tmp_path / "far")
        monkeypatch.setattr(signals, "requested_signal", lambda: None)
        for path in remote.cache_dir().glob("*.tar"):
            path.unlink()  # another machine
    train_highres(config(store.url), tmp_path / "far", resume=stopped)
    near, far = (load_file(tmp_path / name / "weights.safetensors") for name in ("near", "far"))
    assert all(torch.equal(value, far[name]) for name, value in near.items())


def test_needed_shards_stay_cached_and_the_others_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPN_CACHE_GB", "3e-9")
    remote.cache_dir().mkdir(parents=True)
    paths = [remote.cache_dir() / f"{name}.tar" for name in "abcd"]
    for number, path in enumerate(paths):
        path.write_bytes(b"x")
        os.utime(path, (number, number))
    remote.mark_used(paths[0], 1000)
    remote.mark_used(paths[0])  # used, and still needed
    remote.mark_used(paths[2])
    remote.make_room(paths[3])
    assert [path.exists() for path in paths] == [True, False, True, True]
    monkeypatch.setenv("DPN_CACHE_GB", "2e-9")
    os.utime(paths[3], (9, 9))
    remote.make_room(paths[2])
    assert [path.exists() for path in paths] == [True, False, True, False]
    monkeypatch.setenv("DPN_CACHE_GB", "1e-9")
    remote.make_room(paths[0])
    assert [path.exists() for path in paths] == [True, False, False, False]
    remote.mark_unused(paths[0])
    os.utime(paths[0], (1, 1))
    paths[2].write_bytes(b"x")
    remote.make_room(paths[2])
    assert [path.exists() for path in paths] == [False, False, True, False]
    remote.make_room(paths[1])  # which another thread has deleted
    assert [path.exists() for path in paths] == [False, False, True, False]


def test_prefetching_stays_within_the_cache() -> None:
    paths = [RemotePath(f"s3://a/{number}.tar", size=10, sha256=str(number)) for number in range(9)]
    needs = [
        ShardUse(0, 3, 0),
        ShardUse(0, 5, 1),
        ShardUse(4, 7, 2),
        ShardUse(6, 9, 3),
        ShardUse(8, 9, 2),
        ShardUse(10, 12, 4),
    ]

    def asked(budget: int, steps: Sequence[int]) -> list[list[int]]:
        window = PrefetchWindow(ShardIndex(paths, np.zeros(0, np.int64)), iter(needs), 1, budget)
        return [window.advance(step)[0] for step in steps]

    assert asked(1000, (-1, 0, 3, 5, 12)) == [[0, 1, 2, 3], [], [2], [4], []]  # as many ahead as are open
    assert asked(30, (-1, 0, 3, 5, 12)) == [[0, 1, 2], [], [3, 2], [4], []]
    assert asked(5, (-1, 2, 3, 4, 5, 7, 9)) == [[0, 1], [], [2], [], [3], [2], [4]]  # what is needed now


def test_a_cache_that_is_too_small_is_reported_before_the_training(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        result = run_dpn(
            "finetune", "highres", "--data", f"{store.url}/pack", *TINY_RUN, "-o", str(tmp_path / "run"), *arguments
        )
        assert result.exit_code == 2, result.stderr
        return str(result.stderr)

    total = sum(sizes(folder))
    split, _ = opened(store.url)
    assert split.shards
    held = float(os.environ["DPN_CACHE_GB"]) * 1e9
    an_epoch = 96 * (1 - held / total) * total / SHARDS
    message = refused("--epochs", "2", "--set", "data.minival=0")
    assert f"the training images take {total / 1e9:.3g} GB, and drawn in the order of --shuffle images they" in message
    assert f"about {an_epoch / 1e9:.3g} GB an epoch; pass --shuffle shards, or allow" in message
    message = refused("--epochs", "2", "--shuffle", "shards", "--set", "data.open_shards=7")
    assert "the shards that are read at a time take up to" in message
    assert "allow more for the cache, or read fewer than 7 with --set data.open_shards=N" in message
    check_cache(split, None, 6, 0, ALONE)  # so few images are in fewer shards than there are
    wide = ShardOrder(split.shards.of, 8, 0, 4)
    check_cache(split, wide, 960, 0, ALONE)
    with pytest.raises(DpnError, match="shards that are read at a time"):
        check_cache(split, wide, 960, 4, ALONE)  # batches in the making need the next ones
    check_cache(split, wide, 960, 4, World(0, 2, CPU))  # another machine has half of them
    monkeypatch.setenv("DPN_CACHE_GB", str(total / 1e9))
    check_cache(split, None, 960, 0, ALONE)


def test_the_steps_around_a_training_read_few_shards(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    split, _ = opened(store.url)
    assert split.shards
    assert set(split.shards.of[sample_rows_to_check(split, EACH)].tolist()) == {0}
    monkeypatch.setattr("dpn_cli.data.leakage.MAX_IMAGES", 2 * EACH)
    store.clear()
    described = record(split)
    assert (described["images"], described["described"]) == (96, 24)
    assert sum(bool(store.gets[name]) for name in TARS) == 2
