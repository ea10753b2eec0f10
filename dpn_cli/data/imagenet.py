"""ImageNet-1k: its class folders, and how many images it has."""

from __future__ import annotations

from functools import cache

from dpn_cli.data.splits import ClassData

IMAGES = 1_281_167, 50_000  # to train on, to validate


@cache
def imagenet_folders() -> tuple[str, ...]:
    """Return the class folders of ImageNet-1k (n01440764, ...) in the official order."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


def describe_imagenet(data: ClassData) -> str | None:
    """Describe class folders of ImageNet-1k: complete or not, official order; None for other classes."""
    official = imagenet_folders()
    if not set(data.classes) <= set(official):
        return None
    if tuple(data.classes) != official:
        return f"ImageNet class folders: {len(data.classes)} of 1000; numbers are not comparable with published ones"
    train, val = len(data.train.labels) + len(data.minival.labels), len(data.val.labels)
    if (train, val) == IMAGES:
        return f"ImageNet-1k: official class order, {train} + {val} images"
    return (
        f"ImageNet-1k class folders with {train} + {val} images, {IMAGES[0]} + {IMAGES[1]} are "
        "official; numbers are not comparable with published ones"
    )
