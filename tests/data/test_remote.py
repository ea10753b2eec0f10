"""Packs and shards behind URLs: the same images as from a folder, each file fetched once, faults told or overcome."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfFileSystem

from dpn_cli.config.paths import home
from dpn_cli.data import remote
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.image_source import ImageSource, find_splits, open_split, open_unlabelled
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.pixels import stream
from dpn_cli.data.resize import resize
from dpn_cli.data.sources import pack_writer
from dpn_cli.data.sources.base import LabelledImages, fingerprint
from dpn_cli.data.sources.pack_writer import PackOptions, pack
from dpn_cli.data.splits import hash_order, open_class_data
from dpn_cli.errors import DataError, DpnError, StoreError
from dpn_cli.run.distributed import World
from support.captions import write_shard_dataset
from support.cli import run_dpn
from support.images import write_class_folders
from support.processes import run_processes
from support.stores import Store, serve_files, serve_s3
from tasks.lit.captions import CaptionedImages
from tasks.lit.data import CaptionSource
from tasks.lit.data import open_split as open_captions

ALONE = World(0, 1, torch.device("cpu"))
SHARDS = 5  # of the pack's train split, 12 images each
FILES = [f"{number:06d}.{ending}" for number in range(SHARDS) for ending in ("tar", "npz")]

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack, and shards with captions."""
    root = tmp_path_factory.mktemp("store")
    for split, item in (("train", 20), ("val", 4)):
        write_class_folders(root / "photos" / split, each=item)
    source = ImageSource(str(root / "photos"))
    splits = {name: open_split(source, name) for name in ("train", "val")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_writer, "SHARD_IMAGES", 12)
        ordered = {name: (split, hash_order(split)) for name, (split, _) in splits.items()}
        options: Any = {"workers": 1, "skip_bad": False, "progress": lambda text: None}
        pack(ordered, splits["train"][1], root / "served" / "pack", PackOptions(size=None), **options)
    write_shard_dataset(root / "served" / "pairs")
    return root / "served"


@pytest.fixture(scope="module", params=["http", "s3"])
def shared(request: pytest.FixtureRequest, folder: Path) -> Iterator[Store]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serve_files(folder) if request.param == "http" else serve_s3(folder, patch) as store,
    ):
        yield store


@pytest.fixture
def store(shared: Store) -> Store:
    shared.clear()
    shared.faults.clear()
    return shared


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that would have been waited between attempts."""
    waited: list[float] = []
    monkeypatch.setattr(remote, "pause", waited.append)
    return waited


def same(one: LabelledImages, other: LabelledImages) -> None:
    """Two splits have the same images in the same order."""
    assert fingerprint(one) == fingerprint(other)
    for row in range(len(other.labels)):
        assert one.key(row) == other.key(row)
        assert one.content(row) == other.content(row)


def cache() -> list[Path]:
    return sorted(path for path in (home() / "cache" / "remote").iterdir() if not path.name.startswith("."))


def test_a_pack_behind_a_url_is_the_pack_and_its_files_are_fetched_once(store: Store, folder: Path) -> None:
    source, local = ImageSource(f"{store.url}/pack/"), ImageSource(str(folder / "pack"))
    assert find_splits(source) == find_splits(local) == ["train", "val"]
    far, near = open_class_data(source, None), open_class_data(local, None)
    assert store.gets.keys() == {"manifest.json", *(f"{number:06d}.npz" for number in range(SHARDS))}
    for name in ("train", "minival", "val"):
        same(getattr(far, name), getattr(near, name))
    assert far.classes == near.classes
    assert far.train.locate(0) == near.train.locate(0).replace(str(folder), store.url)
    assert {name: count for name, count in store.gets.items() if name.endswith("1.tar")} == {"000001.tar": 1}
    store.clear()
    same(open_class_data(source, None).train, near.train)
    assert store.gets.keys() == {"manifest.json"}


@pytest.mark.parametrize(
    ("prefix", "names"), [("wds:", "{000000..000004}"), ("", "00000{0,1,2,3,4}")], ids=["wds", "url"]
)
def test_shards_behind_a_url_are_the_shards(store: Store, folder: Path, prefix: str, names: str) -> None:
    place = f"{prefix}{store.url}/pack/train/{names}.tar"
    local = f"wds:{folder}/pack/train/{{000000..000004}}.tar"
    far, classes = open_split(ImageSource(place), "train")
    near, expected = open_split(ImageSource(local), "train")
    same(far, near)
    assert classes == expected == ("class0", "class1", "class2")
    assert far.locate(13) == near.locate(13).replace(str(folder), store.url)
    for path in cache():
        if path.suffix == ".tar":
            path.unlink()
    store.clear()
    second, _ = open_split(ImageSource(place), "train")
    assert fingerprint(second) == fingerprint(near)
    assert store.gets.keys() == {"classnames.txt"}  # what is in the shards is known
    assert second.content(0) == near.content(0)
    same(open_unlabelled(ImageSource(place)), open_unlabelled(ImageSource(local)))


def test_a_star_finds_the_shards_of_a_bucket(store: Store, folder: Path) -> None:
    if not store.url.startswith("s3"):
        pytest.skip("an HTTP server has no list of files")
    far, _ = open_split(ImageSource(f"{store.url}/pack/train/*.tar"), "train")
    same(far, open_split(ImageSource(f"wds:{folder}/pack/train/*.tar"), "train")[0])
    with pytest.raises(DataError, match=r"s3://images/pack/train/\*\.tgz: no such file"):
        open_split(ImageSource(f"wds:{store.url}/pack/train/*.tgz"), "train")


def test_captions_behind_a_url_are_the_captions(store: Store, folder: Path) -> None:
    def opened(root: str) -> CaptionedImages:
        return open_captions(CaptionSource(f"wds:{root}/pairs/{{00000..00001}}.tar"), "train")

    far, near = opened(store.url), opened(str(folder))
    assert far.captions == near.captions
    assert [far.content(row) for row in far.labels] == [near.content(row) for row in near.labels]
    assert len(set(far.stamps)) == 2
    assert far.stamps == opened(store.url).stamps


def test_the_cache_keeps_to_its_limit(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [path.stat().st_size for path in (folder / "pack" / "train").glob("*.tar")]
    limit = 3 * max(sizes)
    monkeypatch.setenv("DPN_CACHE_GB", str(limit / 1e9))
    far, _ = open_split(ImageSource(f"{store.url}/pack"), "train")
    near, _ = open_split(ImageSource(str(folder / "pack")), "train")
    for _ in range(2):
        for row in range(len(near.labels)):
            assert far.content(row) == near.content(row)
            assert sum(path.stat().st_size for path in cache()) <= limit
    assert store.gets["000000.tar"] == 2  # the first to be used is the first to go
    kept = {path.name for path in cache() if path.suffix == ".tar"}
    assert kept == {path.cached.name for path in far.paths[-len(kept) :]}  # type: ignore[attr-defined]
    assert len([path for path in cache() if path.suffix == ".npz"]) == SHARDS
    with far.paths[-1].open() as file:  # type: ignore[attr-defined]
        far.content(0)
        far.content(13)
        far.content(30)
        assert not far.paths[-1].cached.exists()  # type: ignore[attr-defined]
        assert tarfile.open(fileobj=file).getnames()  # noqa: SIM115
    monkeypatch.setenv("DPN_CACHE_GB", "1e-6")
    with pytest.raises(DpnError, match=r"DPN_CACHE_GB=1e-06: a file of .* GB is needed; allow more for the cache"):
        far.content(59)
    monkeypatch.setenv("DPN_CACHE_GB", "much")
    with pytest.raises(DpnError, match="DPN_CACHE_GB=much: not a number of gigabytes above 0"):
        far.content(59)


FAULTS: list[tuple[list[Any], list[float]]] = [
    (["cut"], [1]),
    (["wrong"], [1]),
    (["short"], [1]),
    ([503, 503], [1, 2]),
    ([503, "cut", "wrong", "short"], [1, 2, 4, 8]),
]


@pytest.mark.parametrize(("faults", "waited"), FAULTS, ids=str)
@pytest.mark.parametrize("kind", ["pack", "shards"])
def test_a_fault_that_passes_is_overcome(
    kind: str, faults: list[Any], waited: list[float], store: Store, folder: Path, pauses: list[float]
) -> None:
    if kind == "shards" and "wrong" in faults and not store.url.startswith("s3"):
        pytest.skip("this server states no digest")
    store.faults["000000.tar"] = list(faults)
    inner = "pack" if kind == "pack" else "pack/train/{000000..000001}.tar"
    far, _ = open_split(ImageSource(f"{store.url}/{inner}"), "train")
    near, _ = open_split(ImageSource(str(folder / "pack")), "train")
    assert [far.content(row) for row in range(20)] == [near.content(row) for row in range(20)]
    assert pauses == waited
    assert store.gets["000000.tar"] == 1 + len(faults)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (503, "given up after 5 attempts. Run the same command again"),
        ("cut", "given up after 5 attempts. Run the same command again"),
        ("wrong", "other bytes arrived: sha256 .*… instead of .*…; given up after 5 attempts"),
    ],
)
def test_a_fault_that_stays_is_one_error_and_no_bad_image(
    fault: Any, message: str, store: Store, pauses: list[float]
) -> None:
    far, _ = open_split(ImageSource(f"{store.url}/pack"), "train")
    store.faults["000002.tar"] = [fault] * 5
    batches = crop_batches(far, Augmentation((8, 8)), 60, 0, ALONE, workers=0, skip_bad=True)
    with pytest.raises(StoreError, match=rf"^{store.url}/pack/train/000002.tar: [^\n]*{message}") as raised:
        next(batches(0))
    assert raised.value.exit_code == 3
    assert pauses == [1, 2, 4, 8]
    assert store.gets["000002.tar"] == 5
    store.faults["000002.tar"] = [fault] * 5
    with (
        pytest.raises(StoreError, match=message),
        stream(far, lambda pixels: resize(pixels, (8, 8)), 60, workers=0, skip_bad=True) as parts,
    ):
        list(parts)


def test_permanent_errors_are_not_retried(store: Store, folder: Path, pauses: list[float]) -> None:
    with pytest.raises(StoreError, match=f"{store.url}/pack/nothing/manifest.json: no such file; check the name"):
        open_split(ImageSource(f"{store.url}/pack/nothing"), "train")
    with pytest.raises(StoreError, match=f"{store.url}/pack/train/000005.tar: no such file; check the name"):
        open_split(ImageSource(f"wds:{store.url}/pack/train/{{000000..000005}}.tar"), "train")
    store.faults["manifest.json"] = [403, 400]
    with pytest.raises(StoreError, match=f"{store.url}/pack/manifest.json: no access .*the store's client takes cred"):
        open_split(ImageSource(f"{store.url}/pack"), "train")
    if not store.url.startswith("s3"):
        with pytest.raises(StoreError, match=f"{store.url}/pack/manifest.json: HTTP 400 .*; check the URL"):
            open_split(ImageSource(f"{store.url}/pack"), "train")
    assert pauses == []


def test_an_unreachable_server_is_retried_with_growing_pauses(folder: Path, pauses: list[float]) -> None:
    with pytest.raises(StoreError, match=r"http://127.0.0.1:9/a.tar: .*Cannot connect.* given up after 5 attempts"):
        open_split(ImageSource("http://127.0.0.1:9/a.tar"), "train")
    assert pauses == [1, 2, 4, 8]


def test_a_damaged_copy_is_downloaded_again(store: Store, folder: Path) -> None:
    far, _ = open_split(ImageSource(f"{store.url}/pack"), "train")
    expected = far.content(0)
    copy: Path = far.paths[0].cached  # type: ignore[attr-defined]
    content = bytearray(copy.read_bytes())
    content[600] ^= 1
    copy.write_bytes(content)
    assert far.content(0) == expected
    assert store.gets["000000.tar"] == 2


def test_shards_replaced_during_a_run_are_reported(tmp_path: Path, pauses: list[float]) -> None:
    write_shard_dataset(tmp_path)
    with serve_files(tmp_path) as store:
        far = open_captions(CaptionSource(f"wds:{store.url}/{{00000..00001}}.tar"), "train")
        content = bytearray((tmp_path / "00000.tar").read_bytes())
        content[600] ^= 1
        (tmp_path / "00000.tar").write_bytes(content)
        far.paths[0].forget()  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match="00000.tar: other bytes arrived: sha256"):
            far.content(0)


def test_an_etag_that_is_no_digest_is_believed_to_be_none(folder: Path, pauses: list[float]) -> None:
    with serve_files(folder) as store:
        store.etag = f'"{"0" * 32}"'
        far, _ = open_split(ImageSource(f"{store.url}/pack/train/000000.tar"), "train")
        assert len(far.labels) == 12
        assert (pauses, store.gets["000000.tar"]) == ([1], 2)
        open_split(ImageSource(f"{store.url}/pack/train/000001.tar"), "train")
        assert (pauses, store.gets["000001.tar"]) == ([1], 1)


def read_all(rank: int, place: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    split, _ = open_split(ImageSource(place), "train")
    for row in range(len(split.labels)):
        split.content(row)


@pytest.mark.slow
def test_two_processes_fetch_a_file_once(store: Store) -> None:
    run_processes(
        read_all, f"{store.url}/pack", {name: os.environ[name] for name in os.environ if name[:3] in ("AWS", "DPN")}
    )
    assert {name: store.gets[name] for name in FILES} == dict.fromkeys(FILES, 1)


def test_worker_processes_read_the_same_images(store: Store, folder: Path) -> None:
    batches = []
    for place in (f"{store.url}/pack", str(folder / "pack")):
        split, _ = open_split(ImageSource(place), "train")
        with_workers = crop_batches(split, Augmentation((8, 8)), 12, 0, ALONE, workers=2)(0)
        batches.append(torch.stack([next(with_workers)["image"] for _ in range(6)]))
        with_workers.close()
    assert torch.equal(*batches)


def test_the_hub_states_a_digest(folder: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    content = (folder / "pack" / "train" / "000000.tar").read_bytes()
    sent = [bytes(len(content)), content]
    facts = {"size": len(content), "blob_id": "1", "lfs": {"sha256": hashlib.sha256(content).hexdigest()}}
    monkeypatch.setattr(remote, "hub_is_offline", lambda: False)
    monkeypatch.setattr(HfFileSystem, "info", lambda client, path: {"name": path, **facts})
    monkeypatch.setattr(HfFileSystem, "cat_file", lambda client, path: (folder / "nothing").read_bytes())
    monkeypatch.setattr(HfFileSystem, "get_file", lambda client, path, copy: Path(copy).write_bytes(sent.pop(0)))
    far, _ = open_split(ImageSource("hf://datasets/owner/name/000000.tar"), "train")
    assert len(far.labels) == 12
    assert pauses == [1]


@pytest.mark.parametrize(("url", "module", "extra"), [("s3://a/b", "s3fs", "s3"), ("gs://a/b", "gcsfs", "gcs")])
def test_a_client_that_is_missing_is_named(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)
    result = run_dpn("finetune", "highres", "--data", url, "-o", str(tmp_path / "run"), *TINY)
    assert result.exit_code == 2
    assert f"{url}/manifest.json: its client is not installed; pip install 'dpn-cli[{extra}]'" in result.stderr


TINY = ("--arch", "mu/8", "--checkpoint", "none", "--image-size", "16", "--steps", "2", "-b", "4", "-j", "0")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:hidden@host/pack", "s3://…: a URL with a password"),
        ("https://host/a.tar?X-Amz-Signature=hidden", "https://…: a URL with a password, a signature"),
        ("s3://a::https://hidden", "s3://…: a URL with a password, a signature (?) or another URL (::)"),
        ("ftp://host/hidden", "ftp://: no store that is read; s3://, gs://, https://, http://, hf:// are"),
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str, message: str, tmp_path: Path) -> None:
    result = run_dpn("finetune", "highres", "--config", "highres", "--data", url, "-o", str(tmp_path / "run"), *TINY)
    assert result.exit_code == 2
    assert f"--data: {message}" in result.stderr
    assert "hidden" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_commands_take_urls(store: Store, tmp_path: Path) -> None:
    place = f"{store.url}/pack"
    result = run_dpn("finetune", "highres", "--data", place, "-o", str(tmp_path / "run"), *TINY, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    result = run_dpn("eval", str(tmp_path / "run"), "--data", place, "--json")
    assert json.loads(result.stdout)["images"] == 12
    result = run_dpn(
        "data", "pack", "--data", f"wds:{place}/train/{{000000..000001}}.tar", "--out", str(tmp_path / "again")
    )
    assert result.exit_code == 0, result.stderr
    assert "24 images" in result.stdout
    result = run_dpn("data", "pack", "--data", place, "--out", "s3://bucket/again")
    assert result.exit_code == 2
    assert "--out s3:/bucket/again: a URL; pack into a folder" in result.stderr
