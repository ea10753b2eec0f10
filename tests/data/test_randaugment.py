"""RandAugment's operations against big_vision's on TensorFlow, and how they are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dpn_cli.data import randaugment
from dpn_cli.data.augment import Augmentation
from dpn_cli.data.crops import train_crop
from dpn_cli.data.loader import RANDAUGMENT, crop_batches
from dpn_cli.data.randaugment import OPERATIONS, SIGNED, apply, rand_augment
from dpn_cli.data.sampler import rows_of_step
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.engine.seeds import fold
from dpn_cli.run.distributed import World
from support.goldens import Arrays
from support.images import write_class_folders

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_equals_tensorflows_to_the_bit(name: str, golden: Callable[[str], Arrays]) -> None:
    arrays = golden("randaug_ops")
    image = arrays["in"].transpose(2, 0, 1)
    recorded = [key for key in arrays if key.split("/")[0] == name]
    assert recorded
    for key in recorded:
        _, magnitude, *sign = key.split("/")
        actual = apply(image, name, float(magnitude[1:]), negative=sign == ["neg"], centre=(13, 26))
        np.testing.assert_array_equal(actual.transpose(1, 2, 0), arrays[key], err_msg=key)


def test_the_quirks_of_the_reference() -> None:
    image = np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    once = {"negative": False, "centre": (0, 0)}
    inverted = 255 - image
    # Magnitude 0 is no identity, and the threshold wraps at 256.
    for magnitude in (0, 10, 20):
        np.testing.assert_array_equal(apply(image, "Solarize", magnitude, **once), inverted)  # type: ignore[arg-type]
    np.testing.assert_array_equal(apply(image, "Posterize", 0, **once), image & 128)  # type: ignore[arg-type]
    np.testing.assert_array_equal(apply(image, "Brightness", 5, **once), image)  # type: ignore[arg-type]
    # A grey that depends on the area alone: 196 at 224 px.
    flat = np.zeros((3, 224, 224), dtype=np.uint8)
    assert set(apply(flat, "Contrast", 0, **once).ravel()) == {int(196 * 0.9)}  # type: ignore[arg-type]


def test_equalize_is_pils(golden: Callable[[str], Arrays]) -> None:
    for seed in range(5):
        g = np.random.default_rng(seed)
        image = (g.normal(100, 10 + 20 * seed, (40, 30, 3))).clip(0, 255).astype(np.uint8)
        expected = np.asarray(ImageOps.equalize(Image.fromarray(image)))
        actual = apply(image.transpose(2, 0, 1), "Equalize", 1, negative=False, centre=(0, 0))
        np.testing.assert_array_equal(actual.transpose(1, 2, 0), expected)


def test_operations_signs_and_places_are_drawn_uniformly(monkeypatch: pytest.MonkeyPatch) -> None:
    sample: list[tuple[str, float, bool, tuple[int, int]]] = []

    def note(
        image: randaugment.Image, name: str, magnitude: float, *, negative: bool, centre: tuple[int, int]
    ) -> object:
        sample.append((name, magnitude, negative, centre))
        return image

    monkeypatch.setattr(randaugment, "apply", note)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4000):
        rand_augment(torch.zeros(3, 10, 20, dtype=torch.uint8), 2, 15, generator)
    counts = Counter(name for name, *_ in sample)
    assert len(sample) == 8000
    assert set(counts) == set(OPERATIONS)
    assert all(abs(count - 500) < 5 * 500**0.5 for count in counts.values())
    assert abs(sum(negative for *_, negative, _ in sample) - 4000) < 5 * 2000**0.5
    assert {row for *_, (row, _) in sample} == set(range(10))
    assert {column for *_, (_, column) in sample} == set(range(20))


def test_only_the_signed_operations_have_a_direction() -> None:
    image = np.random.default_rng(1).integers(0, 256, (3, 24, 24), dtype=np.uint8)
    for name in OPERATIONS:
        one, other = (apply(image, name, 1, negative=negative, centre=(4, 4)) for negative in (False, True))
        assert np.array_equal(one, other) == (name not in SIGNED), name


def test_the_loader_mirrors_before_it_augments_for_any_number_of_workers(tmp_path: Path) -> None:

    split = ClassFolders(write_class_folders(tmp_path))
    augmentation = Augmentation((24, 32), layers=2, magnitude=15)
    stream = crop_batches(split, augmentation, 6, 7, ALONE, workers=0)
    first, second = next(stream(0)), next(stream(1))
    assert torch.equal(next(crop_batches(split, augmentation, 6, 7, ALONE, workers=2)(1))["image"], second["image"])
    mirrored = 0
    for place, row in enumerate(rows_of_step(len(split.labels), 6, 7, 0).tolist()):
        generator = torch.Generator().manual_seed(fold(7, 1, 0, place))
        crop = train_crop(split.open(row), "", (24, 32), generator, "exact")
        own = torch.Generator().manual_seed(fold(7, RANDAUGMENT, 0, place))
        if torch.rand((), generator=own) < 0.5:
            crop, mirrored = crop.flip(-1), mirrored + 1
        assert torch.equal(rand_augment(crop, 2, 15, own), first["image"][place])
    assert 0 < mirrored < 6
