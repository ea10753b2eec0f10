"""A trained segmentation network in one file: the ViT with its head, the classes, and how images are seen."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpn_cli.config.schema import RunImageReading
from dpn_cli.data.decode import options_of_run
from dpn_cli.data.image_inputs import ImageInput, iter_pixels
from dpn_cli.errors import DataError
from dpn_cli.run import artifact_kinds
from dpn_cli.run.artifact_kinds import WEIGHTS as WEIGHTS
from dpn_cli.run.artifact_kinds import Kind, resolve
from dpn_cli.weights.backbone import export_backbone, load_with_head
from dpn_cli.weights.locate import open_checkpoint
from tasks.segment.config import Evaluation, MaskData
from tasks.segment.labels import LabelRule
from tasks.segment.model import LinearSegmenter
from tasks.segment.palette import Class
from tasks.segment.sliding_window import WindowPlan, label_map
from tasks.segment.transforms import resize_image

KEY: Kind = "segmenter"


@dataclass
class Segmenter:
    """A network with its classes; `data` and `evaluation` are what it was trained with."""

    network: LinearSegmenter
    classes: tuple[Class, ...]
    data: MaskData
    evaluation: Evaluation
    facts: dict[str, Any]

    @property
    def rule(self) -> LabelRule:
        """The class of each raw value in the masks of its training."""
        return LabelRule(len(self.classes), self.data.label_offset, self.data.ignore_label)

    @property
    def arch(self) -> str:
        """The network's size and patch."""
        config = self.network.vit.config
        return config.arch

    def plan(self, evaluation: Evaluation | None = None) -> WindowPlan:
        """Return how images are seen; the stride is two thirds of the window unless it is given (341 for 512)."""
        settings = evaluation or self.evaluation
        window = self.network.vit.config.image_size[0]
        stride = settings.stride or max(1, window * 2 // 3)
        return WindowPlan(
            window,
            min(stride, window) if settings.mode == "slide" else None,
            self.data.caps(window),
            settings.size != "resize",
            settings.scales,
            settings.flip,
            settings.batch_size,
        )

    @torch.inference_mode()
    def predict(self, images: ImageInput | Iterable[ImageInput]) -> list[Tensor]:
        """Return the label map (h, w), uint8 on the CPU, of one image or several, as ``dpn segment predict`` does.

        A label is an index of `classes`, and a map has its image's own size. Raises as `iter_pixels` does.
        """
        self.network.eval()
        device, plan = self.network.vit.input_mean.device, self.plan(self.evaluation.second_size)
        reading = options_of_run(RunImageReading(), self.data.decode, self.data.exif, shrink=False)
        maps = []
        for pixels in iter_pixels(images, reading):
            size = pixels.shape[0], pixels.shape[1]
            sized = [resize_image(pixels, plan.size(size, ratio)).to(device) for ratio in plan.ratios]
            maps.append(label_map(self.network, sized, size, plan).cpu())
        return maps


def save_segmenter(segmenter: Segmenter, path: Path) -> str:
    """Write a segmenter as one safetensors file; returns its SHA-256. Raises `SaveError`."""
    description = {
        "classes": [asdict(class_) for class_ in segmenter.classes],
        "final_norm": segmenter.network.final_norm,
        "data": segmenter.data.model_dump(mode="json"),
        "evaluation": segmenter.evaluation.model_dump(mode="json"),
        "facts": segmenter.facts,
    }
    return export_backbone(segmenter.network.vit, path, {artifact_kinds.KEY: KEY, KEY: json.dumps(description)})


def load_segmenter(location: str, command: str = "dpn segment predict") -> Segmenter:
    """Load a segmenter for `command` from a run's folder or its weights.safetensors.

    Raises `DataError` when the run has not finished, or the file is of another kind.
    """
    path = Path(resolve(location, command))
    if not path.is_file():
        raise DataError(f"{location}: no such run; pass the folder of a 'dpn segment' run, or its {WEIGHTS}")
    source = open_checkpoint(str(path))
    description = json.loads(source.about[KEY])
    vit = load_with_head(source, None)
    return Segmenter(
        LinearSegmenter(vit, final_norm=description["final_norm"]).eval(),
        tuple(Class(entry["name"], tuple(entry["color"])) for entry in description["classes"]),
        MaskData.model_validate({"decode": "pillow", **description["data"]}),  # the decoder of files without this entry
        Evaluation.model_validate(description["evaluation"]),
        description["facts"],
    )
