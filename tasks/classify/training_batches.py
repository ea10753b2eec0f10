"""Batches of a classifier's training: augmented crops, mixed where the config asks for it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from dpn_cli.data.augment import Augmentation, make_mixup, mix_batches
from dpn_cli.data.loader import crop_batches
from dpn_cli.data.splits import ClassData
from dpn_cli.engine import fit as engine
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone
from tasks.classify.config import SupervisedConfig
from tasks.classify.preflight import shard_order


def normalize(model: Backbone, image: Tensor) -> Tensor:
    """Return images (b, 3, h, w) in the network's input range, where floating-point ones are already."""
    return image if image.is_floating_point() else model.normalize(image)


def augmentation_of(config: SupervisedConfig, model: Backbone) -> Augmentation:
    """Return the config's augmentation of training images for a network."""
    data, by_timm = config.data, config.mixing == "timm"
    return Augmentation(
        model.config.image_size,
        data.decode,
        0.0 if by_timm else config.mixup,
        config.randaugment.layers,
        config.randaugment.magnitude,
        crop=data.crop or "inception",
        crop_area=data.crop_area,
        flip=bool(data.flip),
        jitter=data.jitter,
        noise=data.noise,
        policy=config.auto_augment,
        erase=config.erase,
        repeats=config.repeats,
        mirrored=by_timm,
        mean=model.mean,
        std=model.std,
    )


def training_batches(
    config: SupervisedConfig, model: Backbone, data: ClassData, world: World, **options: Any
) -> engine.Batches:
    """Return the engine's batches of a training; `options` are the loader's arguments."""
    options["order"] = shard_order(config, data)
    batches = crop_batches(data.train, augmentation_of(config, model), config.batch_size, config.seed, world, **options)
    if config.mixing == "big_vision":
        return batches
    mixup = make_mixup(config.mixup, config.cutmix, config.label_smoothing, len(data.classes))
    return mix_batches(batches, mixup, partial(normalize, model), config.seed)
