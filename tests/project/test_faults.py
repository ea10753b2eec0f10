"""Files that change under a command that works with them, and memory that runs out in an evaluation."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dpn_cli.commands import one_line_errors
from dpn_cli.data.image_source import find_images
from dpn_cli.data.pixels import PixelSet
from dpn_cli.data.sources.folder import ClassFolders, FileList
from dpn_cli.errors import DataError, ImageError
from dpn_cli.metrics import score
from dpn_cli.weights.backbone import load_backbone
from support.engine import SINGLE_PROCESS
from support.images import write_class_folders
from support.segment import write_scenes
from support.vtab import write_vtab_task
from tasks.classify.classifier import Classifier, compute_logits
from tasks.lit.captions import CaptionedFiles
from tasks.lit.features import encode_function
from tasks.segment.model import LinearSegmenter
from tasks.segment.pairs import FolderPairs
from tasks.segment.sliding_window import WindowPlan, label_map
from tasks.vtab.train import Trainer


def class_folders(folder: Path) -> tuple[Path, Callable[[], object]]:
    split = ClassFolders(write_class_folders(folder, classes=2, each=2))
    return split.path(1), lambda: split.pixels(1)


def unlabelled(folder: Path) -> tuple[Path, Callable[[], object]]:
    split = find_images(str(write_class_folders(folder, classes=1, each=1)), 1, 0)
    return folder / "class0" / "000.jpg", lambda: split.pixels(0)


def listed(folder: Path) -> tuple[Path, Callable[[], object]]:
    write_vtab_task(folder, {"test": np.zeros((2, 8, 8, 3), np.uint8)}, {"test": np.arange(2)})
    split = FileList(folder, "test")
    return split.paths[1], lambda: split.pixels(1)


def captioned(folder: Path) -> tuple[Path, Callable[[], object]]:
    write_class_folders(folder, classes=1, each=1)
    files = CaptionedFiles(folder)
    files.add("class0/000.jpg", ["an image"], "pairs.csv")
    return files.path(0), lambda: files.open(0).close()


def image_of_a_pair(folder: Path) -> tuple[Path, Callable[[], object]]:
    pairs = FolderPairs(write_scenes(folder, {"training": 2}), "training")
    return pairs.images[1], lambda: pairs.load(1)


def mask_of_a_pair(folder: Path) -> tuple[Path, Callable[[], object]]:
    pairs = FolderPairs(write_scenes(folder, {"training": 2}), "training")
    return pairs.masks[1], lambda: pairs.load(1)


@pytest.mark.parametrize("kind", [class_folders, unlabelled, listed, captioned, image_of_a_pair, mask_of_a_pair])
def test_a_image_that_is_replaced_while_it_is_in_use_is_named(
    kind: Callable[[Path], tuple[Path, Callable[[], object]]], tmp_path: Path
) -> None:
    path, read = kind(tmp_path / "data")
    read()
    initial = path.read_bytes()
    with Image.open(path) as image:
        size = image.size
    Image.effect_noise(size, 50).save(path)
    sizes = f"the file has {path.stat().st_size} bytes, and had {len(initial)} when"
    with pytest.raises(DataError, match=f"{path}.*: {sizes}") as found:
        read()
    assert not isinstance(found.value, ImageError)  # which --skip-bad-images would leave out
    path.write_bytes(initial)
    read()


MOST = 3  # images at once that there is memory for


def hungry(network: torch.nn.Module) -> list[int]:
    """Let a network run out of memory with more images; returns the list of what it was given."""
    observed: list[int] = []

    def check(module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        observed.append(len(given[0]))
        if observed[-1] > MOST:
            raise torch.OutOfMemoryError("CUDA out of memory")

    network.register_forward_pre_hook(check)
    return observed


def classify(folder: Path) -> tuple[torch.nn.Module, Callable[[], Any]]:
    model = load_backbone("mu/8", image_size=16, num_classes=3)
    classifier = Classifier(model, ("a", "b", "c"), "softmax", 18, {})
    split = ClassFolders(write_class_folders(folder / "photos", classes=3, each=4))
    return model, lambda: score(
        lambda images: compute_logits(classifier, images), split, classifier.transform, 3, SINGLE_PROCESS,
        loss="softmax", batch_size=8, workers=0,
    ).top1  # fmt: skip


def segment(folder: Path) -> tuple[torch.nn.Module, Callable[[], Any]]:
    network = LinearSegmenter(load_backbone("mu/8", image_size=16, num_classes=5), final_norm=True)
    image = torch.randint(256, (3, 40, 56), dtype=torch.uint8)
    plan = WindowPlan(16, 8, (56, 40), batch_size=8)
    return network, lambda: label_map(network, [image], (40, 56), plan).tolist()


def vtab(folder: Path) -> tuple[torch.nn.Module, Callable[[], Any]]:
    trainer = SimpleNamespace(
        task=SimpleNamespace(classes=3, name="svhn"), world=SINGLE_PROCESS, config=SimpleNamespace(eval_batch_size=8),
        model=load_backbone("mu/8", image_size=16, num_classes=3),
    )  # fmt: skip
    pixels = PixelSet(torch.randint(256, (11, 3, 16, 16), dtype=torch.uint8), torch.arange(11) % 3)
    return trainer.model, lambda: Trainer.evaluate(trainer, pixels)  # type: ignore[arg-type]


def lit(folder: Path) -> tuple[torch.nn.Module, Callable[[], Any]]:
    tower = load_backbone("mu/8", image_size=16)
    images = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
    encode = encode_function(tower, torch.device("cpu"), torch.autocast("cpu", enabled=False))
    return tower, lambda: encode(images)


@pytest.mark.parametrize("task", [classify, segment, vtab, lit])
def test_an_evaluation_out_of_memory_uses_smaller_batches(
    task: Callable[[Path], tuple[torch.nn.Module, Callable[[], Any]]], tmp_path: Path
) -> None:
    network, evaluate = task(tmp_path)
    network.eval()
    with torch.inference_mode():
        expected = evaluate()
        observed = hungry(network)
        second = evaluate()
    torch.testing.assert_close(second, expected, rtol=0, atol=1e-5)  # some CPUs add smaller batches in another order
    assert max(observed) > MOST
    assert any(count <= MOST for count in observed)


@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, 1), (errno.ENOSPC, 1), (errno.EACCES, 3)])
def test_read_only_locations_are_distinguished_from_wrong_names(
    number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors({}):
        raise OSError(number, os.strerror(number), "run/failed.json")
    assert ended.value.code == code
    message = capsys.readouterr().err
    assert message.startswith("error: run/failed.json: ")
    assert ("earlier files are intact" in message) == (code == 1)
