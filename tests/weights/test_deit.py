"""DeiT's training: each value of its config reaches timm's function, and batches depend on the step alone."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor

from dpn_cli.config.load import build, from_flags, merge
from dpn_cli.config.provenance import differences
from dpn_cli.data.augment import MIX_TIMM, Augmentation, make_transform, seed_globally
from dpn_cli.data.loader import POLICY, crop_batches
from dpn_cli.data.sampler import rank_positions, rows_of_step
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.engine.fit import Batch
from dpn_cli.engine.losses import LOSSES
from dpn_cli.engine.optim import lr_factor
from dpn_cli.engine.seeds import fold
from dpn_cli.errors import DpnError
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from tasks.classify import train as training
from tasks.classify.config import resolve_steps
from tasks.classify.data import open_data
from tasks.classify.preflight import check_batch
from tasks.classify.pretrain_config import PretrainConfig, finalize, resolve
from tasks.classify.training_batches import augmentation_of, training_batches

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
DEIT = "rand-m9-mstd0.5-inc1"
TINY: dict[str, Any] = {
    "backbone": {"arch": "mu/8", "image_size": 32},
    "data": {"val_fraction": 0.2},
    "batch_size": 8,
    "schedule": {"steps": 4},
    "runtime": {"workers": 0},
}


def deit(source: object = "imagenet", **settings: Any) -> PretrainConfig:
    plain = resolve("deit", None, None, None, merge({"data": {"source": str(source)}}, settings), {})
    return finalize(build(PretrainConfig, plain, "test"))


def tiny(source: Path, **settings: Any) -> PretrainConfig:
    return deit(source, **merge(TINY, from_flags(settings)))


def batches_of(
    config: PretrainConfig, count: int, *, start: int = 0, world: World = ALONE, workers: int = 0
) -> list[Batch]:
    data = open_data(config)
    model = training.load_network(config, len(data.classes))
    return list(itertools.islice(training_batches(config, model, data, world, workers=workers)(start), count))


def same(actual: list[Batch], expected: list[Batch]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_config_is_deits() -> None:
    config = deit(backbone={"arch": "S/16"})
    assert (config.auto_augment, config.erase, config.repeats, config.label_smoothing) == (DEIT, 0.25, 3, 0.1)
    assert (config.mixing, config.mixup, config.cutmix, config.ema) == ("timm", 0.8, 1.0, 0.99996)
    assert (config.loss, config.head_bias, config.backbone.dropout, config.backbone.drop_path) == ("softmax", 0, 0, 0.1)
    assert config.backbone.drop_path_rescale
    assert (config.optim.name, config.optim.weight_decay, config.optim.decay_unit) == ("adam", 0.05, "lr")
    assert (config.optim.clip_norm, config.peak_lr, config.batch_size, config.epochs) == (None, 1e-3, 1024, 300)
    assert resolve_steps(config, 1_281_167).schedule.steps == 375_342
    actual = [line for line in differences(config, "fp32") or () if "(paper: " in line]
    assert actual == ["data.minival: null (paper: 0.0)"]
    assert "mixup: 0.5 (paper: 0.8)" in (differences(deit(backbone={"arch": "S/16"}, mixup=0.5), "fp32") or ())


@pytest.mark.parametrize(("batch", "lr"), [(1024, 1e-3), (256, 2.5e-4)])
def test_the_learning_rate_is_timms(batch: int, lr: float) -> None:
    """timm's schedule by the epoch, at whole epochs; in the warm-up the cosine is that of the epoch as well."""
    config = resolve_steps(deit(backbone={"arch": "S/16"}, batch_size=batch), 1000 * batch)
    assert config.schedule.steps == 300_000
    assert config.peak_lr == pytest.approx(lr)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    schedule = CosineLRScheduler(optimizer, 300, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    for epoch in range(0, 300, 7):
        actual = 1e-3 * lr_factor(config.schedule, 1000 * epoch)
        (expected,) = schedule._get_lr(epoch)
        assert actual == pytest.approx(expected, rel=2e-3), epoch


def test_an_image_equals_the_output_of_timms_transform(photos: Path) -> None:
    """Crop, flip, RandAugment and erasing of one image, with timm's global random numbers seeded by hand."""
    split = ClassFolders(photos)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    options = Augmentation((24, 32), crop="timm_bicubic", policy=DEIT, erase=0.5, mean=mean, std=std)
    (batch,) = itertools.islice(crop_batches(split, options, 8, 3, ALONE, workers=0)(5), 1)
    theirs: Callable[[Image.Image], Tensor] = timm.data.create_transform(
        (24, 32), is_training=True, auto_augment=DEIT, interpolation="bicubic", re_prob=0.5, re_mode="pixel",
        mean=mean, std=std,
    )  # fmt: skip
    for place, row in enumerate(rows_of_step(len(split.labels), 8, 3, 5).tolist()):
        seed = fold(3, POLICY, 5, place)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        assert torch.equal(batch["image"][place], theirs(Image.fromarray(split.pixels(row)))), place


def test_erased_images_are_in_the_range_of_the_network(photos: Path) -> None:
    model = training.load_network(tiny(photos), 3)
    model.mean, model.std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    options = augmentation_of(tiny(photos), model)
    assert (options.mean, options.std) == (model.mean, model.std)


def test_the_strongest_posterization_blackens() -> None:
    """A noisy magnitude of 9 reaches 10 in one image of fifty: none of the bits are kept then."""
    options = Augmentation((8, 8), crop="whole", flip=False, policy="rand-m10-p1-inc1")
    made: Any = make_transform(options)
    (strongest,) = [op for op in made.transforms[1].transforms[0].ops if op.name == "PosterizeIncreasing"]
    image = Image.fromarray(np.full((8, 8, 3), 255, np.uint8))
    assert strongest(image).getextrema() == ((0, 0),) * 3
    strongest.magnitude = 7
    assert strongest(image).getextrema() == ((192, 192),) * 3
    make_transform.cache_clear()


def test_the_state_of_global_random_numbers_is_restored() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    initial = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    first = draw()
    with seed_globally(7):
        inside = draw()
    with seed_globally(7):
        assert draw() == inside
    assert [first, draw()] == initial


def test_batches_depend_on_the_step_alone(photos: Path) -> None:
    config = tiny(photos)
    full = batches_of(config, 4)
    assert full[0]["image"].shape == (8, 3, 32, 32)
    same(batches_of(config, 4, workers=2), full)
    same(batches_of(config, 1, start=3), full[3:])
    assert rank_positions(8, ALONE, mirrored=True) == [0, 7, 1, 6, 2, 5, 3, 4]
    for world in (World(0, 2, CPU), World(1, 2, CPU), World(0, 3, CPU, grain=2), World(2, 3, CPU, grain=2)):
        mine = world.rows(8)
        part = batches_of(config, 4, world=world)
        same(part, [{name: value[mine.start : mine.stop] for name, value in batch.items()} for batch in full])


def test_images_and_labels_are_mixed_as_timm_mixes_them(photos: Path) -> None:
    plain = batches_of(tiny(photos, mixing="big_vision", mixup=0.0, cutmix=0.0), 6)
    theirs = timm.data.Mixup(
        mixup_alpha=0.8, cutmix_alpha=1.0, prob=1.0, switch_prob=0.5, mode="batch", label_smoothing=0.1,
        num_classes=3,
    )  # fmt: skip
    for step, (initial, batch) in enumerate(zip(plain, batches_of(tiny(photos), 6), strict=True)):
        np.random.seed(fold(0, MIX_TIMM, step) % 2**32)
        image, target = theirs(initial["image"], initial["label"])
        order = rank_positions(8, ALONE, mirrored=True)
        assert torch.equal(batch["image"], image[order])
        assert torch.equal(batch["target"], target[order])
        torch.testing.assert_close(target.sum(1), torch.ones(8))


def test_the_loss_is_of_the_mixed_images_and_targets(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = training.load_network(tiny(photos), 3)
    observed: dict[str, Tensor] = {}
    monkeypatch.setitem(LOSSES, "softmax", lambda logits, target: observed.update(target=target) or logits.sum())

    def network(image: Tensor) -> Tensor:
        observed["image"] = image
        return torch.zeros(2, 3, requires_grad=True)

    image, target = torch.randn(2, 3, 32, 32), torch.rand(2, 3)
    training.loss_of(tiny(photos), model, 3)(network, {"image": image, "target": target})  # type: ignore[arg-type]
    assert observed["image"] is image
    assert observed["target"] is target
    # Without timm's mixing the labels are smoothed here, and bytes are normalised.
    config = tiny(photos, mixing="big_vision", mixup=0.0, cutmix=0.0)
    pixels = torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)
    training.loss_of(config, model, 3)(network, {"image": pixels, "label": torch.tensor([0, 2])})  # type: ignore[arg-type]
    assert observed["image"].min() == observed["image"].max() == 1
    torch.testing.assert_close(observed["target"], torch.tensor([[2.8, 0.1, 0.1], [0.1, 0.1, 2.8]]) / 3)


def test_an_epoch_draws_a_third_of_the_images_three_times_in_a_row() -> None:
    epochs = [
        torch.cat([rows_of_step(12, 4, 1, step, 3) for step in range(first, first + 3)]).reshape(4, 3)
        for first in (0, 3, 6)
    ]
    for rows in epochs:
        assert (rows == rows[:, :1]).all()
        assert len(set(rows[:, 0].tolist())) == 4
    assert len({tuple(rows[:, 0].tolist()) for rows in epochs}) == 3
    assert not torch.equal(rows_of_step(12, 12, 1, 0, 3), rows_of_step(12, 12, 2, 0, 3))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_augment", "cifar10"), ("erase", 0.0), ("repeats", 1), ("mixup", 0.1), ("cutmix", 0.1),
        ("label_smoothing", 0.0), ("data.crop", "inception"), ("data.flip", False),
    ],
)  # fmt: skip
def test_every_value_changes_the_batches(key: str, value: Any, photos: Path) -> None:
    default, changed = (batches_of(tiny(photos, **asked), 8) for asked in ({}, {key: value}))
    name = "target" if key == "label_smoothing" else "image"
    assert any(not torch.equal(one[name], other[name]) for one, other in zip(default, changed, strict=True))


def test_the_command_names_the_config_in_three_ways_and_trains(photos: Path, tmp_path: Path) -> None:
    shared = ["--arch", "mu/8", "--data", str(photos), "--val-fraction", "0.2", "--image-size", "32", "-b", "8"]
    shared += ["--steps", "2", "--device", "cpu", "-j", "0", "-q"]
    names = (
        ["imagenet", "--base-config", "deit"],
        ["imagenet", "--config", "pretrain_deit"],
        ["--base-config", "deit"],
    )
    printed = {run_dpn("pretrain", *name, *shared, "--print-config").stdout for name in names}
    assert len(printed) == 1
    assert "rand-m9-mstd0.5-inc1" in printed.pop()
    completed = run_dpn("pretrain", *names[0], *shared, "--json", "-o", str(tmp_path / "run"))
    assert completed.exit_code == 0, completed.output
    result = json.loads(completed.stdout)
    assert (result["steps"], result["classes"], result["head_bias"]) == (2, 3, 0)
    assert "mixup: 0.8" not in result["differs_from_paper"]
    assert "batch_size: 8 (paper: 1024)" in result["differs_from_paper"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"randaugment.layers": 2}, r"auto_augment \(rand-m9-mstd0.5-inc1\) and randaugment.layers \(2\): one policy"),
        ({"mixing": "big_vision"}, r"cutmix \(1\): timm's; set mixing to timm"),
        ({"mixup": 0.0, "cutmix": 0.0}, r"mixing \(timm\): needs mixup or cutmix above 0"),
        ({"auto_augment": "rand-x9"}, "auto_augment: timm's RandAugment, e.g. rand-m9-mstd0.5-inc1, or AutoAugment's"),
        ({"erase": 2}, "erase: a number from 0 to 1 .got 2"),
    ],
)
def test_values_without_effect_or_sense_are_refused(arguments: dict[str, Any], message: str, photos: Path) -> None:
    with pytest.raises(DpnError, match=message):
        tiny(photos, **arguments)


def test_pairs_need_an_even_batch(photos: Path) -> None:
    message = r"--batch-size 6: timm mixes images in pairs, and the 3 images of a rank \(2 ranks\) are odd; use 8"
    with pytest.raises(DpnError, match=message):
        check_batch(tiny(photos, batch_size=6), World(0, 2, CPU))
    check_batch(tiny(photos, batch_size=8), World(0, 3, CPU, grain=2))
