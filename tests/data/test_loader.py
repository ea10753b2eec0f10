"""The training loader: what an image becomes depends on seed, step and place, and on nothing else."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image

from dpn_cli.data.augment import Augmentation
from dpn_cli.data.loader import blend, crop_batches, mixup_with_previous
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.engine.fit import Batch
from dpn_cli.errors import DataError
from dpn_cli.run.distributed import World
from support.goldens import Arrays
from support.images import write_class_folders

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ClassFolders:
    return ClassFolders(write_class_folders(tmp_path_factory.mktemp("images")))


def take(
    split: ClassFolders, start: int, count: int, world: World = ALONE, **arguments: int | float | bool
) -> list[Batch]:
    batches = crop_batches(
        split,
        Augmentation((24, 32), mixup=float(arguments.pop("mixup", 0))),
        6,
        7,
        world,
        workers=int(arguments.pop("workers", 0)),
        skip_bad=bool(arguments.pop("skip_bad", False)),
    )
    return list(itertools.islice(batches(start), count))


def same(actual: list[Batch], expected: list[Batch]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_workers_and_resuming_change_nothing(folder: ClassFolders) -> None:
    full = take(folder, 0, 6)
    assert full[0]["image"].shape == (6, 3, 24, 32)
    same(take(folder, 0, 6, workers=2), full)
    same(take(folder, 4, 2, workers=1), full[4:])
    assert not torch.equal(full[0]["image"], full[3]["image"])


def test_a_signal_to_every_process_leaves_the_decoding_ones_alive(folder: ClassFolders) -> None:
    full = take(folder, 0, 6)
    batches = crop_batches(folder, Augmentation((24, 32)), 6, 7, ALONE, workers=2)(0)
    first = [next(batches), next(batches)]  # one of each: both are at work
    for worker in multiprocessing.active_children():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid or 0, number)
    same([*first, *itertools.islice(batches, 4)], full)


def test_an_epoch_sees_every_image_once_even_inside_a_batch(folder: ClassFolders) -> None:
    labels = torch.cat([batch["label"] for batch in take(folder, 0, 5)])  # 30 draws: two epochs of 15
    for epoch in torch.split(labels, 15):
        assert epoch.bincount().tolist() == [5, 5, 5]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_ranks_share_the_batch_that_one_rank_would_have(ranks: int, mixup: float, folder: ClassFolders) -> None:
    single = take(folder, 0, 3, mixup=mixup)
    parts = [take(folder, 0, 3, World(rank, ranks, CPU), mixup=mixup) for rank in range(ranks)]
    for step, full in enumerate(single):
        for name in full:
            assert torch.equal(torch.cat([part[step][name] for part in parts]), full[name])


def test_every_place_of_every_batch_has_its_own_crop(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        noise.save(tmp_path / name / "x.png")
    crops = [image.numpy().tobytes() for batch in take(ClassFolders(tmp_path), 0, 4) for image in batch["image"]]
    assert len(set(crops)) == len(crops) == 24


def test_half_of_the_images_are_mirrored(tmp_path: Path) -> None:
    left = np.zeros((40, 40, 3), np.uint8)
    left[:, :20] = 255
    (tmp_path / "a").mkdir()
    Image.fromarray(left).save(tmp_path / "a" / "x.png")
    (tmp_path / "b").mkdir()
    Image.fromarray(left).save(tmp_path / "b" / "x.png")
    batches = take(ClassFolders(tmp_path), 0, 40)
    brighter = [
        bool(image[..., :8].float().mean() > image[..., -8:].float().mean()) for b in batches for image in b["image"]
    ]
    assert 0.3 < np.mean(brighter) < 0.7
    whole = crop_batches(ClassFolders(tmp_path), Augmentation((16, 16), crop="whole"), 6, 0, ALONE, workers=0)
    patterns = {tuple((batch["image"][:, 0, 0, 0] > 128).tolist()) for batch in itertools.islice(whole(0), 40)}
    assert len(patterns) > 20  # every batch has its own


def test_an_unreadable_image_is_named_or_replaced(tmp_path: Path) -> None:
    root = write_class_folders(tmp_path, classes=2, each=3)
    bad = root / "class1" / "001.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    split = ClassFolders(root)
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"class1/001\.jpg: not a readable image"):
            take(split, 0, 2, workers=workers)
    skipped: list[int] = []
    batches = crop_batches(split, Augmentation((24, 32)), 6, 7, ALONE, workers=0, skip_bad=True, on_skip=skipped.append)
    observed = [batch["label"] for batch in itertools.islice(batches(0), 4)]
    assert all(len(labels) == 6 for labels in observed)
    assert sum(skipped) == 4  # once in each of the four epochs


@pytest.mark.parametrize("p", ["0.2", "0.5", "0.8"])
def test_mixup_is_big_visions(p: str, golden: Callable[[str], Arrays]) -> None:
    arrays = golden("mixup")
    images, labels = (torch.from_numpy(arrays[name]) for name in ("images", "labels"))
    share = torch.full((len(images),), float(arrays[f"p{p}/a"]))
    plain = {"image": images, "label": labels}
    batch = mixup_with_previous(plain, float(p), seed=0, step=0)
    for name, first in (("image", images), ("label", labels)):
        mixed = blend(first, batch[f"other_{name}"], share)
        torch.testing.assert_close(mixed, torch.from_numpy(arrays[f"p{p}/{name}s"]), atol=1e-6, rtol=0)
    assert len(set(batch["mix"].tolist())) == 1
    sample = [mixup_with_previous(plain, float(p), 0, step)["mix"][0].item() for step in range(1500)]
    counts, _ = np.histogram(sample, bins=20, range=(0.5, 1))
    expected = arrays[f"a_hist/p{p}"] / arrays[f"a_hist/p{p}"].sum() * len(sample)
    kept = expected > 5
    chi = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert scipy.stats.chi2.sf(chi, kept.sum()) > 1e-4
    assert np.mean(sample) == pytest.approx(float(arrays[f"a_mean/p{p}"]), abs=0.015)


def test_mixed_batches_carry_the_image_before_each(folder: ClassFolders) -> None:
    (batch,) = take(folder, 0, 1, mixup=0.5)
    assert torch.equal(batch["other_image"][1], batch["image"][0])
    assert torch.equal(batch["other_label"][0], batch["label"][-1])
    assert (batch["mix"] >= 0.5).all()


def test_noise_has_a_deviation_of_its_own_in_every_image(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (32, 32), (128, 128, 128)).save(tmp_path / "a/grey.png")
    grey = ClassFolders(tmp_path)
    augmentation = Augmentation((32, 32), crop="whole", noise=20.0)
    batches = crop_batches(grey, augmentation, 200, 3, World(0, 1, torch.device("cpu")), workers=0)
    noise = next(batches(0))["image"].double() - 128
    deviations = noise.flatten(1).std(1)
    assert noise.mean().abs() < 0.1
    assert deviations.min() < 1
    assert 19 < deviations.max() < 21
    uniform = (deviations / 20).sort().values
    assert (uniform - (torch.arange(200) + 0.5) / 200).abs().max() < 0.12  # Kolmogorov-Smirnov, p about 0.005
    repeated = next(crop_batches(grey, augmentation, 200, 3, World(0, 1, torch.device("cpu")), workers=2)(0))["image"]
    assert torch.equal(repeated.double() - 128, noise)


def test_jitter_changes_brightness_by_up_to_its_share(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8), (100, 100, 100)).save(tmp_path / "a/grey.png")
    augmentation = Augmentation((8, 8), crop="whole", jitter=0.875)
    batch = next(crop_batches(ClassFolders(tmp_path), augmentation, 400, 3, ALONE, workers=0)(0))
    factors = batch["image"].double().mean((1, 2, 3)) / 100  # a grey image has no contrast and no saturation
    assert 0.12 < factors.min() < 0.15
    assert 1.85 < factors.max() < 1.88


@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_pairs_of_noise_hold_the_image_without_and_with_it(mixup: float, folder: ClassFolders) -> None:
    cpu = World(0, 1, torch.device("cpu"))
    augmentations = [Augmentation((16, 16), mixup=mixup, **more) for more in ({}, {"noise": 30.0, "noise_pairs": True})]  # type: ignore[arg-type]
    clean, pairs = (next(crop_batches(folder, one, 6, 3, cpu, workers=0)(0)) for one in augmentations)
    assert all(torch.equal(clean[key], pairs[key]) for key in clean)
    difference = pairs["noisy_image"].double() - pairs["image"].double()
    assert 2 < difference.std() < 31
    assert ("other_noisy_image" in pairs) == (mixup > 0)
