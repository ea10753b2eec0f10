"""A trained classifier in one file: the network, its classes, and how its images are prepared."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpn_cli.config.schema import RunImageReading
from dpn_cli.data.crops import eval_crop
from dpn_cli.data.decode import Decoder, ReadOptions, options_of_run
from dpn_cli.data.image_inputs import ImageInput, iter_pixels
from dpn_cli.data.imagenet import imagenet_folders
from dpn_cli.data.pixels import Transform
from dpn_cli.data.resize import Size, resize
from dpn_cli.engine.losses import Loss
from dpn_cli.engine.memory import in_chunks
from dpn_cli.errors import DpnError
from dpn_cli.run import artifact_kinds
from dpn_cli.run.artifact_kinds import WEIGHTS as WEIGHTS
from dpn_cli.run.artifact_kinds import Kind, resolve
from dpn_cli.weights.backbone import Backbone, export_backbone, load_with_head
from dpn_cli.weights.formats import Checkpoint
from dpn_cli.weights.locate import open_checkpoint

KEY: Kind = "classifier"


@dataclass
class Classifier:
    """A network with a head.

    `resize_side` is the shorter side in pixels before the central crop; None takes the whole image, squeezed.
    `decoder` made the pixels of JPEGs, and with `exif` images were turned as their EXIF orientation says.
    """

    model: Backbone
    classes: tuple[str, ...]
    loss: Loss
    resize_side: int | None
    facts: dict[str, Any]
    decoder: Decoder = "exact"
    exif: bool = False

    @property
    def transform(self) -> Transform:
        """Transform of decoded pixels (h, w, 3) to the network's input, (3, *size) uint8."""
        size = self.model.config.image_size
        if self.resize_side is None:
            return partial(resize, size=size)
        return partial(eval_crop, resize_side=self.resize_side, size=size)

    @property
    def preparation(self) -> str:
        """Return the preparation of a decoded image for the network, in words."""
        height, width = self.model.config.image_size
        turned = "turned as its EXIF orientation says, " if self.exif else ""
        if self.resize_side is None:
            return f"{turned}resized whole to {height} x {width}, bilinear without antialiasing"
        return f"{turned}shorter side resized to {self.resize_side} by area, centre of {height} x {width} cut out"

    def reading(self, options: RunImageReading) -> ReadOptions:
        """Return how images are read: as in the training, but for what the options say."""
        return options_of_run(options, self.decoder, self.exif)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Map logits (b, classes) to probabilities: independent for the sigmoid loss, else adding up to one."""
        return logits.sigmoid() if self.loss == "sigmoid" else logits.softmax(-1)

    def predict(self, images: ImageInput | Iterable[ImageInput], *, batch_size: int = 32) -> Tensor:
        """Return the probabilities (n, classes), float32 on the CPU, of one image or several, as ``dpn predict`` does.

        Images are prepared as in the training, and columns are in the order of `classes`. Raises as `iter_pixels` does.
        """
        self.model.eval()
        device, parts = self.model.input_mean.device, []
        pixels = iter_pixels(images, self.reading(RunImageReading()))
        while batch := [self.transform(one) for one in itertools.islice(pixels, batch_size)]:
            parts.append(self.probabilities(compute_logits(self, torch.stack(batch).to(device))).cpu())
        return torch.cat(parts) if parts else torch.zeros(0, len(self.classes))


def resize_for(size: Size) -> int:
    """Return the shorter side before the central crop: 418 for 384 (App. D), 256 for 224 and in that proportion."""
    return 418 if size == (384, 384) else round(max(size) * 256 / 224)


def save_classifier(classifier: Classifier, path: Path) -> str:
    """Write a classifier as one safetensors file; returns its SHA-256. Raises `SaveError`."""
    description = {
        "classes": classifier.classes,
        "loss": classifier.loss,
        "resize_side": classifier.resize_side,
        "image_size": list(classifier.model.config.image_size),
        "decoder": classifier.decoder,
        "exif": classifier.exif,
        "facts": classifier.facts,
    }
    return export_backbone(classifier.model, path, {artifact_kinds.KEY: KEY, KEY: json.dumps(description)})


def load_classifier(location: str, image_size: Size | None = None, command: str = "dpn predict") -> Classifier:
    """Load a classifier for `command` from a run's folder, or from a checkpoint with a head.

    A checkpoint of another origin does not name its classes: for 1000 outputs they are ImageNet's, else numbers.
    Raises `DataError` when there is nothing to load or it is of another kind, `DpnError` when it has no head.
    """
    location = resolve(location, command)
    source = open_checkpoint(location)
    if "head.weight" not in source.state:
        raise DpnError(
            f"{location}: the network has no head, so it has no classes; train one with 'dpn finetune highres'"
        )
    return classifier_of(source, image_size)


def classifier_of(source: Checkpoint, image_size: Size | None = None) -> Classifier:
    """Load a classifier from an open checkpoint with a head; see `load_classifier`."""
    head = source.state["head.weight"]
    model = load_with_head(source, image_size)
    size = model.config.image_size
    if KEY in source.about:
        described = json.loads(source.about[KEY])
        side = described["resize_side"]
        converted = described.get("image_size", list(size)) != list(size)
        if side is not None and (converted or image_size is not None):
            side = resize_for(size)
        return Classifier(
            model,
            tuple(described["classes"]),
            described["loss"],
            side,
            described["facts"],
            described.get("decoder", "pillow"),  # the decoder of files without this entry
            described.get("exif", False),
        )
    return Classifier(model, imagenet_classes(len(head)), "softmax", resize_for(size), {"classes": "assumed"})


def facts_of(source: Checkpoint) -> dict[str, Any]:
    """Return the facts of the training in a classifier's file; none in a file of another origin."""
    return dict(json.loads(source.about[KEY])["facts"]) if KEY in source.about else {}


def takes_whole_images(source: Checkpoint) -> bool:
    """Return whether a file holds a classifier whose images were resized whole, without a crop."""
    return KEY in source.about and json.loads(source.about[KEY])["resize_side"] is None


def turns_images(source: Checkpoint) -> bool:
    """Return whether a file holds a classifier whose images were turned as their EXIF orientation says."""
    return KEY in source.about and bool(json.loads(source.about[KEY]).get("exif", False))


def imagenet_classes(count: int) -> tuple[str, ...]:
    """Return ImageNet-1k's class folders in their official order, or numbers when it is another count."""
    if count != 1000:
        return tuple(str(number) for number in range(count))
    return imagenet_folders()


def readable(classes: Sequence[str]) -> list[str]:
    """Return names for people: ImageNet's descriptions where the classes are its folders."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    labels = set(info.label_names())
    return [info.label_name_to_description(name) if name in labels else name for name in classes]


@torch.inference_mode()
def compute_logits(classifier: Classifier, images: Tensor) -> Tensor:
    """Return logits (b, classes) in float32 for uint8 images (b, 3, h, w) on the network's device."""
    return in_chunks(lambda part: classifier.model(classifier.model.normalize(part)).float(), images)
