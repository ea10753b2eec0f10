"""The precision of matrix products: what a machine and a network decide, and that every command heeds it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpn_cli.arch import NORMS, SIZES, STEMS
from dpn_cli.config.schema import Runtime
from dpn_cli.run import precision
from dpn_cli.run.precision import LEAST_WIDTH, autocast, choose_precision, precision_of, width_of
from dpn_cli.weights.backbone import load_backbone
from support.captions import write_caption_table
from support.cli import run_dpn
from support.images import write_class_folders, write_png_images
from support.segment import write_scenes
from tasks.lit.text_tower import TextTower

CPU = torch.device("cpu")
has_bf16_products = precision.has_bf16_products  # which a fixture replaces


@pytest.mark.parametrize(
    ("asked", "device", "width", "products", "expected"),
    [
        ("auto", "cuda", 32, False, "bf16"),
        ("auto", "cpu", LEAST_WIDTH, True, "bf16"),
        ("auto", "cpu", LEAST_WIDTH - 1, True, "fp32"),
        ("auto", "cpu", 4096, False, "fp32"),
        ("fp32", "cpu", 4096, True, "fp32"),
        ("fp32", "cuda", 4096, True, "fp32"),
        ("bf16", "cpu", 32, False, "bf16"),
    ],
)
def test_machine_and_width_decide(
    asked: str, device: str, width: int, products: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_bf16_products", lambda: products)
    runtime = Runtime.model_validate({"precision": asked})
    assert choose_precision(runtime, device, width) == expected
    if device == "cpu":
        assert autocast(runtime, CPU, nn.Linear(width, width))._enabled == (expected == "bf16")
        wide, narrow = nn.Linear(width, width), nn.Linear(1, width)
        assert precision_of(runtime, CPU, narrow, wide) == expected


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the kernel's list of what a processor can")
def test_a_processor_with_products_of_bf16_says_so() -> None:
    words = set(Path("/proc/cpuinfo").read_text().split())
    assert has_bf16_products() == bool(words & {"avx512_bf16", "amx_bf16"})


@pytest.mark.parametrize("arch", ["mu/8", "Ti/32", "S/16"])
def test_the_width_is_that_of_the_tokens(arch: str) -> None:
    network = load_backbone(arch, image_size=32, num_classes=1000, seed=0)
    assert width_of(network) == width_of(nn.Sequential(network)) == SIZES[arch.split("/")[0]].width
    assert width_of(nn.ReLU()) == 0


def test_the_width_of_a_text_tower_is_not_its_vocabulary() -> None:
    assert width_of(TextTower(SIZES["nano"], 3000, 16, 512, 1.0, None, 0)) == SIZES["nano"].width


@pytest.mark.parametrize("setting", [{"stem": stem} for stem in STEMS] + [{"norm": norm} for norm in NORMS], ids=str)
def test_a_network_in_bf16_is_itself_within_the_noise_of_bf16(setting: dict[str, Any]) -> None:
    """Of 8 bits: four blocks in training are off by one or two hundredths of what their outputs vary."""
    network = load_backbone("nano/8", image_size=32, num_classes=10, seed=0, **setting).train()
    with torch.no_grad():
        network.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        images = network.normalize(torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8))
        exact = copy.deepcopy(network)(images)
        with autocast(Runtime(precision="bf16"), CPU, network):
            rounded = network(images).float()
    error, spread = (rounded - exact).square().mean().sqrt(), exact.std()
    assert 0 < error < 0.03 * spread


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled photos, pairs with captions, and scenes with masks."""
    root = tmp_path_factory.mktemp("data")
    write_class_folders(root / "photos", classes=2, each=8)
    rows = [(name, f"image {number}") for number, name in enumerate(write_png_images(root / "pairs", 12))]
    write_caption_table(root / "pairs" / "pairs.csv", rows)
    write_scenes(root / "scenes", {"training": 4, "validation": 2})
    return root


@pytest.fixture
def computed() -> Iterator[set[torch.dtype]]:
    """Collect the types of all outputs of the attention's first matrices."""
    found: set[torch.dtype] = set()

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and isinstance(module, nn.Linear) and module.out_features == 96:
            found.add(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(note)
    yield found
    handle.remove()


STEPS = ("-b", "4", "-j", "0", "--no-report", "--steps")
SMALL = (*STEPS, "1")
CLASSIFIER = ("pretrain", "--data", "photos", "--val-fraction", "0.5", "--arch", "mu/8", "--image-size", "16", *SMALL)
LIT = (
    "lit",
    "train",
    "--data",
    "pairs/pairs.csv",
    "--arch",
    "mu/8",
    "--checkpoint",
    "none",
    "--text-size",
    "mu",
    *SMALL,
)
SCENES = ("--data", "scenes", "--class-names", "scenes/classes.txt", "--label-offset", "1", "--ignore-label", "0")
SEGMENTER = ("segment", "folder", *SCENES, "--checkpoint", "none", "--arch", "mu/16", "--image-size", "64")
VTAB = ("finetune", "vtab", "--data", "demo", "--tasks", "demo_color")
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "classifier": [
        (*CLASSIFIER, "-o", "run", "--set", "fewshot=2"),
        ("eval", "run", "--data", "photos", "-j", "0", "--shifts", "gain", "--severity", "1"),
        ("predict", "run", "photos"),
        ("eval", "fewshot", "run", "--data", "photos", "--val-fraction", "0.5", "--shots", "2", "-j", "0"),
    ],
    "vtab": [("finetune", "vtab", "--data", "demo", "--tasks", "demo_color", "--lrs", "0.01", "--seeds", "1", *SMALL)],
    "distill": [
        (*CLASSIFIER, "--stem", "none", "-o", "run"),
        ("distill", "--teacher", "run", "--data", "photos", "--cache-teacher", "1", *STEPS, "4", "-o", "student"),
    ],
    "lit": [
        (*LIT, *SMALL, "-o", "run"),
        ("lit", "eval", "run", "--data", "pairs/pairs.csv"),
        ("lit", "predict", "run", "pairs/0.png", "--labels", "a,b"),
    ],
    "segment": [
        (
            *SEGMENTER,
            "--class-names",
            "scenes/classes.txt",
            "--label-offset",
            "1",
            "--ignore-label",
            "0",
            *SMALL,
            "-o",
            "run",
        ),
        ("segment", "eval", "run", "-j", "0"),
        ("segment", "predict", "run", "scenes/images/validation/0000.jpg", "-o", "labels"),
    ],
}


@pytest.mark.parametrize("asked", ["auto", "fp32"])
@pytest.mark.parametrize("task", COMMANDS)
def test_every_command_computes_in_the_chosen_precision(
    task: str, asked: str, data: Path, computed: set[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_bf16_products", lambda: True)
    monkeypatch.setattr(precision, "LEAST_WIDTH", 1)
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "pairs", "scenes"):
        (tmp_path / name).symlink_to(data / name)
    expected, dtype = ("bf16", torch.bfloat16) if asked == "auto" else ("fp32", torch.float32)
    dry = run_dpn(*COMMANDS[task][0], "--precision", asked, "--device", "cpu", "--dry-run")
    assert re.search(rf"^dry run of .*: in {expected}$", dry.stderr, re.MULTILINE), dry.output
    computed.clear()
    for command in COMMANDS[task]:
        ended = run_dpn(*command, "--precision", asked, "--device", "cpu", "--json")
        assert ended.exit_code == 0, ended.output
        assert computed == {dtype}, command
        computed.clear()
        told = "matrices are multiplied in bf16, in which this CPU is faster; --precision fp32 is exact"
        says = "predict" not in command and "fewshot" not in command
        assert (told in " ".join(ended.stderr.split())) == (asked == "auto" and says), command
        if says:
            assert json.loads(ended.stdout)["precision"] == expected
