"""The feature cache of `dpn lit` notices replaced images, however they were replaced, and encodes only those again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, Value
from torch import Tensor

from dpn_cli.config.schema import Runtime
from dpn_cli.data.decode import decode
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.folder import find_image_files
from dpn_cli.data.sources.hub import load_hub
from dpn_cli.errors import DataError, SaveError
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from support.captions import (
    write_coco_dataset,
    write_flat_coco_dataset,
    write_folder_dataset,
    write_karpathy_dataset,
    write_table_dataset,
)
from support.images import png_bytes, write_png_images, write_tar
from support.ranks import CPU
from tasks.lit import cache, cache_write
from tasks.lit.cache import cached_features
from tasks.lit.captions import CaptionedImages
from tasks.lit.data import CaptionSource, open_split
from tasks.lit.encode import image_encoder
from tasks.lit.features import ImageEncoder
from tasks.lit.search import find_images

ALONE, QUIET = World(0, 1, CPU), Console(quiet=True)
OTHER = 50  # the number of an image that is in no data set, of as many bytes as those that are
OLD, OLDER = 1_500_000_000, 1_400_000_000


@pytest.fixture(autouse=True)
def _small_shards_and_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARD", 4)
    monkeypatch.setattr(cache, "BATCH", 2)
    monkeypatch.setattr(cache, "_spot_check", lambda *of: (None, None))  # nothing is noticed by a lucky sample


@pytest.fixture(scope="module")
def plain() -> ImageEncoder:
    return image_encoder(load_backbone("mu/8", image_size=16, seed=0).eval(), Runtime(workers=0), ALONE)


class Counted:
    """An encoder of a cache, counting the images that go through the tower."""

    def __init__(self, encoder: ImageEncoder) -> None:
        self.images = 0
        self.encoder = replace(encoder, encode=self.encode)
        self.plain = encoder.encode

    def encode(self, images: Tensor) -> Tensor:
        self.images += len(images)
        return self.plain(images)


def write_pairs(path: Path, numbers: Sequence[int]) -> None:
    pairs = enumerate(numbers)
    write_tar(
        path, {name: data for i, n in pairs for name, data in ((f"{i}.png", png_bytes(n)), (f"{i}.txt", b"a dog"))}
    )


def shards(root: Path) -> str:
    root.mkdir(parents=True)
    for number in (0, 1):
        write_pairs(root / f"{number}.tar", range(3 * number, 3 * number + 3))
    return f"wds:{root}/{{0,1}}.tar"


def class_folders(root: Path) -> str:
    for number, name in enumerate(write_png_images(root)):
        (root / f"class{number % 2}").mkdir(exist_ok=True)
        (root / name).rename(root / f"class{number % 2}" / name)
    return f"search:{root}"


def hub_folder(root: Path) -> str:
    rows = [{"file_name": name, "text": "a dog"} for name in write_png_images(root / "train")]
    (root / "train" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"hf:{root}"


def opened(place: str) -> CaptionedImages:
    """Open a data set as a new process does."""
    load_hub.cache_clear()
    if not place.startswith("search:"):
        return open_split(CaptionSource(place), "train")
    folder = Path(place.removeprefix("search:"))
    return find_images(folder, find_image_files([folder]), "a dog", lambda path, error: pytest.fail(str(error)))


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in (".png", ".tar"))


def expected(data: CaptionedImages, encoder: ImageEncoder) -> Tensor:
    return encoder.encode(torch.stack([resize(data.pixels(row), encoder.size) for row in data.labels]))


def copied_with_its_date(old: Path, new: Path, files: list[Path]) -> int:
    shutil.copy2(new, old)  # cp -p
    return 1


def copied_with_the_old_ones_date(old: Path, new: Path, files: list[Path]) -> int:
    shutil.copy(new, old)
    os.utime(old, (OLD, OLD))
    return 1


def renamed_over(old: Path, new: Path, files: list[Path]) -> int:
    new.replace(old)  # rsync -a
    return 1


def swapped(old: Path, new: Path, files: list[Path]) -> int:
    old.rename(new)
    other = files[2 % len(files)]
    other.rename(old)
    new.rename(other)
    return 6 if old.suffix == ".tar" else 2


def one_of_all_that_were_dated_anew(old: Path, new: Path, files: list[Path]) -> int:
    shutil.copy(new, old)
    for path in files:
        os.utime(path)
    return 1


WAYS = (
    copied_with_its_date,
    copied_with_the_old_ones_date,
    renamed_over,
    swapped,
    one_of_all_that_were_dated_anew,
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "source",
    [
        write_table_dataset,
        write_coco_dataset,
        write_karpathy_dataset,
        write_flat_coco_dataset,
        write_folder_dataset,
        class_folders,
        hub_folder,
        shards,
    ],
)
def test_only_replaced_images_are_re_encoded(
    source: Callable[[Path], str],
    way: Callable[[Path, Path, list[Path]], int],
    plain: ImageEncoder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, spare = source(tmp_path / "data"), tmp_path / "spare"
    files = files_below(tmp_path / "data")
    for path in files:
        os.utime(path, (OLD, OLD))  # as unpacked
    write_pairs(spare, [OTHER, 4, 5]) if files[0].suffix == ".tar" else spare.write_bytes(png_bytes(OTHER))
    os.utime(spare, (OLDER, OLDER))
    assert spare.stat().st_size == files[0].stat().st_size
    initial = opened(place)
    old = cached_features(initial, plain, tmp_path / "cache", ALONE, QUIET).rows(torch.arange(len(initial.labels)))
    changed = way(files[1], spare, files)
    counted, final = Counted(plain), opened(place)
    capsys.readouterr()
    for _ in range(2):
        new = cached_features(final, counted.encoder, tmp_path / "cache", ALONE, QUIET).rows(
            torch.arange(len(final.labels))
        )
        torch.testing.assert_close(new.float(), expected(final, plain), atol=5e-4, rtol=0)
    assert ((new - old).abs().amax(1) > 0.01).sum() == counted.images == changed
    assert f"{changed} of {len(new)} images changed since they were encoded" in capsys.readouterr().err


def all_rows(data: CaptionedImages, encoder: ImageEncoder, root: Path) -> Tensor:
    return cached_features(data, encoder, root, ALONE, Console()).rows(torch.arange(len(data.labels)))


def test_a_hub_data_set_that_is_written_anew_is_compared(plain: ImageEncoder, tmp_path: Path) -> None:
    def write(*numbers: int) -> CaptionedImages:
        rows = {
            "image": [{"bytes": png_bytes(number), "path": None} for number in numbers],
            "text": ["a"] * len(numbers),
        }
        features = Features({"image": Image(), "text": Value("string")})
        (tmp_path / "hub").mkdir(exist_ok=True)
        Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet")
        return opened(f"hf:{tmp_path}/hub")

    all_rows(write(0, 1, 2, 3, 4), plain, tmp_path / "cache")
    final, counted = write(0, 1, OTHER, 3, 4), Counted(plain)
    torch.testing.assert_close(
        all_rows(final, counted.encoder, tmp_path / "cache").float(), expected(final, plain), atol=5e-4, rtol=0
    )
    assert counted.images == 1


def test_images_of_which_nothing_is_known_are_compared_every_time(
    plain: ImageEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.lit.captions.stamp_of", lambda status: "")  # as of rows that lie in no file
    folder = write_table_dataset(tmp_path)
    all_rows(opened(folder), plain, tmp_path / "cache")
    (tmp_path / "3.png").write_bytes(png_bytes(OTHER))
    final, counted = opened(folder), Counted(plain)
    torch.testing.assert_close(
        all_rows(final, counted.encoder, tmp_path / "cache").float(), expected(final, plain), atol=5e-4, rtol=0
    )
    assert counted.images == 1


@pytest.mark.parametrize("source", [write_table_dataset, class_folders, hub_folder, shards])
def test_a_copied_folder_is_compared_once_and_not_encoded(
    source: Callable[[Path], str],
    plain: ImageEncoder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = source(tmp_path / "data")
    original = all_rows(opened(folder), plain, tmp_path / "cache")
    shutil.copytree(tmp_path / "data", tmp_path / "copy", copy_function=shutil.copy)  # all files and dates are new
    shutil.rmtree(tmp_path / "data")
    counted, data = Counted(plain), opened(folder.replace(f"{tmp_path}/data", f"{tmp_path}/copy"))
    capsys.readouterr()
    assert torch.equal(all_rows(data, counted.encoder, tmp_path / "cache"), original)
    assert counted.images == 0
    output = " ".join(capsys.readouterr().err.split())
    assert "comparing 6 images with the encoded ones: their files have other dates or inodes than before" in output
    assert "changed since" not in output
    assert torch.equal(all_rows(data, counted.encoder, tmp_path / "cache"), original)
    assert capsys.readouterr().err == ""


def test_a_copied_folder_is_compared_with_a_read_only_cache_too(
    plain: ImageEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_table_dataset(tmp_path / "data")
    original = all_rows(opened(folder), plain, tmp_path / "cache")
    for path in files_below(tmp_path / "data"):
        os.utime(path)

    def refuse(path: Path, value: object) -> None:
        raise SaveError(f"{path}: not written")

    monkeypatch.setattr("tasks.lit.cache_write.replace_json", refuse)
    counted = Counted(plain)
    assert torch.equal(all_rows(opened(folder), counted.encoder, tmp_path / "cache"), original)
    assert counted.images == 0


def test_a_sample_notices_changes_that_time_stamps_do_not_show(
    plain: ImageEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()  # samples are taken
    monkeypatch.setattr(cache, "SHARD", 4)
    monkeypatch.setattr("tasks.lit.captions.stamp_of", lambda status: "the same")  # as of a system without inodes
    folder = write_table_dataset(tmp_path)
    all_rows(opened(folder), plain, tmp_path / "cache")
    for number in (1, 5):
        (tmp_path / f"{number}.png").write_bytes(png_bytes(OTHER + number))
    monkeypatch.setattr(cache, "SPOT_CHECKS", 3)  # of the images 0, 2, 4
    all_rows(opened(folder), plain, tmp_path / "cache")
    assert "changed" not in capsys.readouterr().err
    monkeypatch.setattr(cache, "SPOT_CHECKS", 6)
    counted, data = Counted(plain), opened(folder)
    new = all_rows(data, counted.encoder, tmp_path / "cache")
    torch.testing.assert_close(new.float(), expected(data, plain), atol=5e-4, rtol=0)
    output = " ".join(capsys.readouterr().err.split())
    assert "5.png was replaced and its date and inode do not show it; all images are compared" in output
    assert "2 of 6 images changed since they were encoded" in output
    assert counted.images == 4 + 2  # samples, and what had changed


def test_an_image_replaced_while_it_is_read_counts_as_changed_the_next_time(
    plain: ImageEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_table_dataset(tmp_path)

    def replaced(encoded: Any, where: str, *options: Any) -> Any:
        pixels = decode(encoded, where, *options)
        if where.endswith("2.png"):
            Path(where).write_bytes(png_bytes(OTHER))
        return pixels

    with monkeypatch.context() as patch:
        patch.setattr(cache_write, "decode", replaced)
        all_rows(opened(folder), plain, tmp_path / "cache")
    second = opened(folder)
    torch.testing.assert_close(
        all_rows(second, plain, tmp_path / "cache").float(), expected(second, plain), atol=5e-4, rtol=0
    )


def test_images_become_unreadable_and_readable_again(plain: ImageEncoder, tmp_path: Path) -> None:
    place, skipping = write_table_dataset(tmp_path), replace(plain, skip_bad=True)
    original = all_rows(opened(place), plain, tmp_path / "cache")
    (tmp_path / "3.png").write_bytes(bytes(len(png_bytes(3))))
    with pytest.raises(DataError, match=r"3.png: not a readable image"):
        all_rows(opened(place), plain, tmp_path / "cache")
    actual = cached_features(opened(place), skipping, tmp_path / "cache", ALONE, QUIET)
    assert (actual.bad, actual.rows(torch.tensor([3])).abs().sum().item()) == ([3], 0)
    (tmp_path / "3.png").write_bytes(png_bytes(3))
    counted = Counted(plain)
    assert torch.equal(all_rows(opened(place), counted.encoder, tmp_path / "cache"), original)
    assert counted.images == 1


def test_only_differences_of_a_finished_shard_stay_in_memory(
    plain: ImageEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed, plan = list[Sequence[cache.ShardState | None]](), cache._plan

    def watched(shards: Any, finished: Sequence[cache.ShardState | None], *remaining: Any) -> cache.Plan:
        observed.append(finished)
        return plan(shards, finished, *remaining)

    monkeypatch.setattr(cache, "_plan", watched)
    folder = class_folders(tmp_path / "photos")
    for _ in range(2):
        cached_features(opened(folder), plain, tmp_path / "cache", ALONE, QUIET)
    data = opened(folder)
    full = [cache.ShardState({}, [])] * -(-len(data.captions) // 4)
    assert (observed[0], observed[1]) == ([None] * len(full), full)
    os.utime(data.root / data.key(1))  # type: ignore[attr-defined]
    data = opened(folder)
    cached_features(data, plain, tmp_path / "cache", ALONE, QUIET)
    assert observed[2] == [cache.ShardState({1: data.stamps[1]}, []), *full[1:]]
