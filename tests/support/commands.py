"""Every command that decodes images, and its input files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dpn_cli.data.decode import Decoder
from dpn_cli.weights.backbone import export_backbone, load_backbone
from support.cli import run_dpn
from support.images import write_class_folders
from support.lit import make_towers
from support.segment import CLASS_NAMES, write_scenes
from tasks.classify.classifier import Classifier, save_classifier
from tasks.segment.artifact import Segmenter, save_segmenter
from tasks.segment.config import Evaluation, MaskData
from tasks.segment.model import LinearSegmenter
from tasks.segment.palette import Class, color_of


def write_command_inputs(root: Path) -> Path:
    """Write data for every command, and untrained networks that decode like any run."""
    write_class_folders(root / "photos", classes=2, each=10)
    rows = "".join(f"{path.relative_to(root)},an image\n" for path in sorted((root / "photos").rglob("*.jpg")))
    (root / "pairs.csv").write_text("file,caption\n" + rows)
    (root / "vtab" / "svhn").mkdir(parents=True)
    shutil.copy(root / "photos" / "class0" / "000.jpg", root / "vtab" / "svhn" / "a.jpg")
    for split, count in {"train800": 800, "val200": 200, "test": 1}.items():
        (root / "vtab" / "svhn" / f"{split}.txt").write_text("a.jpg 1\n" * count)
    write_scenes(root / "scenes", {"training": 4, "validation": 2})
    model = load_backbone("mu/8", stem="none", image_size=32, num_classes=2)
    export_backbone(model, root / "plain.safetensors")
    save_untrained_run(root, "classifier", "exact")
    save_untrained_run(root, "towers", "exact")
    save_untrained_run(root, "segmenter", "exact")
    return root


def save_untrained_run(root: Path, kind: str, decoder: Decoder) -> Path:
    """Save an untrained network with the name of its decoder."""
    path = root / kind / "weights.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "towers":
        from tasks.lit.towers import save_towers

        towers = make_towers()
        towers.decoder = decoder
        towers.facts = {"arch": "mu/8", "pairs": {"images": 1, "captions": 1}, "steps": 1, "config": {}}
        save_towers(towers, path)
        return path
    model = load_backbone("mu/8", image_size=32, num_classes=2 if kind == "classifier" else len(CLASS_NAMES))
    if kind == "classifier":
        save_classifier(Classifier(model, ("class0", "class1"), "softmax", 36, {}, decoder), path)
    else:
        classes = tuple(Class(name, color_of(index)) for index, name in enumerate(CLASS_NAMES))
        data = MaskData(source=str(root / "scenes"), label_offset=1, ignore_label=0, scale=(256, 64), decode=decoder)
        save_segmenter(Segmenter(LinearSegmenter(model, final_norm=False), classes, data, Evaluation(), {}), path)
    return path


SCRATCH = ("--arch", "mu/8", "--checkpoint", "none", "--image-size", "32")


RUN = ("--device", "cpu", "-j", "0", "-q", "-o", "OUT")


COMMANDS = {
    "highres": ("finetune", "highres", *SCRATCH, "--data", "photos", "--val-fraction", "0.2", *RUN),
    "pretrain": ("pretrain", "--arch", "mu/8", "--image-size", "32", "--augment", "none", "--data", "photos",
                 "--val-fraction", "0.2", "--steps", "2", "-b", "4", *RUN),
    "vtab": ("finetune", "vtab", *SCRATCH, "--data", "vtab", "--tasks", "svhn", *RUN),
    "eval": ("eval", "classifier/weights.safetensors", "--data", "photos", "--device", "cpu", "-j", "0", "-q"),
    "eval fewshot": ("eval", "fewshot", "plain.safetensors", "--data", "photos", "--val-fraction", "0.2", "--shots",
                     "1", "--device", "cpu", "-j", "0", "-q"),
    "predict": ("predict", "classifier/weights.safetensors", "photos/class0", "--device", "cpu"),
    "retrofit": ("checkpoint", "retrofit", "plain.safetensors", "OUT/dual.safetensors", "--data", "photos"),
    "lit train": ("lit", "train", *SCRATCH, "--data", "pairs.csv", "--steps", "2", "-b", "4", *RUN),
    "lit train without cache": ("lit", "train", *SCRATCH, "--data", "pairs.csv", "--steps", "2", "-b", "4",
                                "--no-cache", *RUN),
    "lit cache": ("lit", "cache", *SCRATCH, "--data", "pairs.csv", "--device", "cpu", "-j", "0", "-q"),
    "lit eval": ("lit", "eval", "towers/weights.safetensors", "--data", "photos", "--device", "cpu", "-j", "0", "-q"),
    "lit eval, retrieval": ("lit", "eval", "towers/weights.safetensors", "--data", "pairs.csv", "--device", "cpu",
                            "-j", "0", "-q"),
    "lit predict": ("lit", "predict", "towers/weights.safetensors", "photos/class0", "--labels", "a,b", "--device",
                    "cpu"),
    "lit search": ("lit", "search", "towers/weights.safetensors", "--images", "photos/class0", "--query", "a",
                   "--device", "cpu", "-j", "0", "-q"),
    "segment folder": ("segment", "folder", *SCRATCH, "--data", "scenes", "--label-offset", "1", "--ignore-label", "0",
                       "--steps", "2", "-b", "2", *RUN),
    "segment eval": ("segment", "eval", "segmenter/weights.safetensors", "--device", "cpu", "-j", "0", "-q"),
    "segment predict": ("segment", "predict", "segmenter/weights.safetensors", "scenes/images/training", "-o", "OUT",
                        "--device", "cpu"),
}  # fmt: skip


def run_command(name: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Run one of `COMMANDS` in the folder of its inputs; it writes below `tmp_path`."""
    monkeypatch.chdir(inputs)
    (tmp_path / "out").mkdir(exist_ok=True)
    return run_dpn(*(word.replace("OUT", str(tmp_path / "out")) for word in COMMANDS[name]), *arguments)
