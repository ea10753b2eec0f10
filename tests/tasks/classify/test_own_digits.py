"""Own images with the defaults of `dpn pretrain` and `dpn finetune highres`: as good as a bare timm loop."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from support.cli import run_dpn
from tasks.classify.default_config import is_imagenet

SIZE, PATCH, WIDTH, EPOCHS, BATCH, TRAIN = 8, 4, 32, 6, 64, 1437
NETWORK = ["--arch", f"mu/{PATCH}", "--image-size", str(SIZE)]
COMMANDS = {"highres": ["finetune", "highres", "--checkpoint", "none"], "pretrain": ["pretrain"]}


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 8, 8) from 0 to 16 and their labels, shuffled."""
    data, order = load_digits(), np.random.default_rng(0).permutation(1797)
    return torch.tensor(data.images[order], dtype=torch.float32), torch.tensor(data.target[order])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, (images, labels) = tmp_path_factory.mktemp("digits"), digits()
    pixels = (images * 255 / 16).to(torch.uint8).numpy()
    for row, label in enumerate(labels.tolist()):
        run_folder = root / ("train" if row < TRAIN else "val") / f"digit{label}"
        run_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[row]).save(run_folder / f"{row:04d}.png")
    return root


class Patches(nn.Module):
    """Dual PatchNorm as the paper writes it: a norm before and one after the projection of flat patches."""

    def __init__(self) -> None:
        super().__init__()
        self.num_patches = (SIZE // PATCH) ** 2
        self.layers = nn.Sequential(nn.LayerNorm(3 * PATCH**2), nn.Linear(3 * PATCH**2, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(F.unfold(image, PATCH, stride=PATCH).transpose(1, 2))  # type: ignore[no-any-return]


@cache
def bare(stem: str) -> float:
    """The validation top-1 in percent of a loop that anyone writes, for as many steps as the program takes."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, depth=1, num_heads=2, num_classes=10)
    if stem == "dpn":
        vit.patch_embed = Patches()
    images, labels = digits()
    images = images[:, None].expand(-1, 3, -1, -1) / 8 - 1
    optimizer, steps = torch.optim.AdamW(vit.parameters(), 1e-3), round(EPOCHS * TRAIN / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randperm(TRAIN)[:BATCH]
        F.cross_entropy(vit(images[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.inference_mode():
        right = vit(images[TRAIN:]).argmax(1) == labels[TRAIN:]
    return 100 * int(right.sum()) / len(right)


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["none", "dpn"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_defaults_are_as_good_as_a_bare_loop(command: str, stem: str, folder: Path, tmp_path: Path) -> None:
    asked = [*COMMANDS[command], *NETWORK, "--stem", stem, "--data", str(folder), "--epochs", str(EPOCHS)]
    completed = run_dpn(*asked, "-j", "0", "--device", "cpu", "-o", str(tmp_path / "run"), "--json")
    assert completed.exit_code == 0, completed.output
    result, expected = json.loads(completed.stdout), bare(stem)
    assert expected > 70
    assert result["top1"] > expected - 3
    output = completed.stderr.replace("\n", " ")
    assert f"--data {folder} is not ImageNet: using config pretrain_own" in output
    assert f"the paper's is --config {command}" in output
    assert "warning" not in output


def shown(*command: str) -> tuple[dict[str, Any], str]:
    """The config that a command would run, and what it says beside it."""
    result = run_dpn(*command, "--arch", "S/16", "--print-config")
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.stdout), result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("command", "config"),
    [
        (["finetune", "highres"], "highres_own"),
        (["finetune", "highres", "--checkpoint", "none"], "pretrain_own"),
        (["pretrain"], "pretrain_own"),
        (["pretrain", "--augment", "light2"], "pretrain_own"),
    ],
)
def test_own_images_decide_crops_and_flips(command: list[str], config: str, folder: Path) -> None:
    plain, message = shown(*command, "--data", str(folder))
    assert f"using config {config};" in message
    assert (plain["data"]["crop"], plain["data"]["flip"]) == (None, None)
    assert (plain["batch_size"], plain["loss"], plain["head_bias"]) == (64, "softmax", None)
    assert plain["backbone"]["pre_logits"] is None
    assert (plain["randaugment"]["layers"], plain["mixup"]) == ((2, 0.2) if "--augment" in command else (0, 0.0))


@pytest.mark.parametrize(
    "command",
    [
        ["finetune", "highres", "--config", "highres"],
        ["finetune", "highres", "--config", "highres", "--checkpoint", "none"],
        ["pretrain", "--config", "pretrain"],
        ["pretrain", "imagenet"],
        ["pretrain", "--base-config", "imagenet"],
        ["pretrain", "--preset", "short"],
    ],
)
def test_the_papers_config_comes_back_when_it_is_named(command: list[str], folder: Path, tmp_path: Path) -> None:
    plain, message = shown(*command, "--data", str(folder))
    assert (plain["data"]["crop"], plain["data"]["flip"]) == ("inception", True)
    assert "not ImageNet" not in message
    # The same config as on ImageNet, and so is a whole config from a file.
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(plain))
    second, message = shown(*command[: 1 + (command[0] == "finetune")], "-c", str(tmp_path / "whole.yaml"))
    assert second == plain
    assert "not ImageNet" not in message
    imagenet, _ = shown(*command, "--data", "imagenet")
    plain["data"]["source"] = "imagenet"
    assert imagenet == plain


def test_a_file_of_some_keys_changes_the_config_of_own_images(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text("epochs: 3\n")
    plain, message = shown("pretrain", "-c", str(tmp_path / "some.yaml"), "--data", str(folder))
    assert (plain["epochs"], plain["data"]["crop"]) == (3, None)
    assert "using config pretrain_own" in message


def test_which_data_are_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folders(root: str, *names: str) -> str:
        for name in names:
            (tmp_path / root / name).mkdir(parents=True, exist_ok=True)
        return str(tmp_path / root)

    ids = "n01440764", "n01443537"
    assert is_imagenet(folders("some", *(f"train/{name}" for name in ids), *(f"val/{name}" for name in ids)))
    assert is_imagenet(folders("flat", *ids))
    assert not is_imagenet(folders("mixed", *ids, "cat"))
    assert not is_imagenet(folders("animals", "train/cat", "train/dog"))
    assert is_imagenet(folders("imagenet", "train/tench"))
    (tmp_path / "pack").mkdir()
    for names, expected in ((ids, True), (("a", "b"), False)):
        (tmp_path / "pack" / "manifest.json").write_text(json.dumps({"classes": names}))
        (tmp_path / "pack" / "classnames.txt").write_text("\n".join(names))
        assert is_imagenet(str(tmp_path / "pack")) is expected
        assert is_imagenet(f"wds:{tmp_path}/pack/{{000..009}}.tar") is expected
    assert is_imagenet("hf:timm/imagenet-1k-wds")
    assert not is_imagenet("hf:ylecun/mnist")
    assert is_imagenet(f"wds:{tmp_path}/imagenet1k-train-{{000..999}}.tar")
    for place in ("nowhere", "~nobody/x", "a\0b", "x" * 300, "wds:", "."):
        monkeypatch.chdir(tmp_path / "animals")
        assert not is_imagenet(place)
