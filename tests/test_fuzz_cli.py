"""Wrong command lines and recipes, many of them at random: each ends in a result or in one line, none in a traceback.

``DPN_FUZZ=1000`` runs a thousand of each instead of a few.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from conftest import GOLDENS, pictures
from hypothesis import HealthCheck, settings
from PIL import Image
from test_cli import run
from typer.testing import Result

from dpn_cli import engine
from dpn_cli.backbone import load_backbone
from dpn_cli.classifier import Classifier, save_classifier
from dpn_cli.cli import app
from dpn_cli.commands import tower
from dpn_cli.errors import DpnError
from tasks.pretrain import plan

EXAMPLES = int(os.environ.get("DPN_FUZZ", "60"))
FUZZ = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
# A result, what was wrong with command or data, a training that was stopped (here by the test, where it would begin).
CODES = {0, 2, 3, 75, 130}
STOPPED = "a training would begin here"


def commands() -> Iterator[tuple[str, list[Any]]]:
    """Yield every command with its parameters."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, list[Any]]]:
        for name, part in getattr(command, "commands", {}).items():
            yield from walk(part, (*words, name))
        if not getattr(command, "commands", {}):
            yield " ".join(words), command.params

    yield from walk(typer.main.get_command(app), ())


COMMANDS = dict(commands())
# What takes each command far into its work; words in capitals are places that `world` makes.
TRAINED = ["--arch", "mu/8", "--image-size", "16", "-b", "4", "--steps", "2", "-j", "0", "--device", "cpu", "-o", "out"]
GOOD: dict[str, list[str]] = {
    "pretrain": ["--data", "PHOTOS", "--val-fraction", "0.4", "--augment", "none", *TRAINED],
    "finetune highres": ["--data", "PHOTOS", "--val-fraction", "0.4", "--checkpoint", "none", *TRAINED],
    "finetune vtab": ["--data", "VTAB", "--tasks", "svhn", "--checkpoint", "none", *TRAINED, "--set", "schedule.warmup=0"],
    "lit train": ["--data", "PAIRS", "--checkpoint", "none", "--text-size", "mu", "--cache-dir", "cache", *TRAINED],
    "lit cache": ["--data", "PAIRS", "--checkpoint", "none", "--arch", "mu/8", "--image-size", "16", "--cache-dir", "cache"],
    "lit eval": ["CLASSIFIER", "--data", "PHOTOS"],
    "lit predict": ["CLASSIFIER", "PICTURE", "--labels", "a,b"],
    "lit search": ["CLASSIFIER", "--images", "PHOTOS", "--query", "a dog"],
    "lit export": ["CLASSIFIER", "-o", "out"],
    "plan pretrain": ["--arch", "mu/8", "--augment", "none", "--device", "cpu"],
    "eval score": ["CLASSIFIER", "--data", "PHOTOS", "--split", "all", "-j", "0"],
    "eval fewshot": ["CLASSIFIER", "--data", "PHOTOS", "--val-fraction", "0.5", "--shots", "1", "-j", "0"],
    "segment ade20k": ["--data", "SCENES", "--checkpoint", "none", *TRAINED],
    "segment folder": ["--data", "SCENES", "--checkpoint", "none", *TRAINED],
    "segment eval": ["CLASSIFIER", "--data", "SCENES", "-j", "0"],
    "segment predict": ["CLASSIFIER", "PICTURE", "-o", "out"],
    "predict": ["CLASSIFIER", "PICTURE"],
    "export": ["CLASSIFIER", "-o", "out"],
    "checkpoint inspect": ["WEIGHTS"],
    "checkpoint convert": ["WEIGHTS", "new.safetensors"],
    "checkpoint retrofit": ["PLAIN", "new.safetensors", "--data", "PHOTOS", "--images", "4"],
    "data pack": ["--data", "PHOTOS", "-o", "out", "-j", "1"],
    "recipes show": ["vtab"],
}  # fmt: skip
HOSTILE = [
    "", " ", "-", "--", "0", "-1", "3.7", "1e400", "nan", "-inf", "1" * 5000, str(2**70), "1000000000", "true", "null",
    "none", "auto", "all", "demo", "/", "//", ".", "nowhere", "nowhere/x.yaml", "FOLDER", "EMPTY", "BINARY", "PICTURE",
    "PHOTOS", "CLASSIFIER", "WEIGHTS", "LOOP", "x" * 300, "x" * 5000, "a,b", ",", ",,1", "1,1", "1x1x1", "16x", "x16", "224x0",
    "B/", "/16", "mu/0", "mu/9999999", "B/³", "٣", "½", "é", "日本", "\u202e", "\x1b[31m", "a\nb", "a\tb", "\ud800", "{}", "[]",
    "[" * 3000, "{stem}", "{", "%s", "$HOME", "~nobody/x", "hf:", "hf:nobody/nothing", "hf:nowhere:", "hf-hub:", "hf-hub:a/b/c",
    "timm:", "timm:resnet18", "timm:vit_none", "wds:", "wds:{0..", "wds:nowhere-{0..3}.tar", "demo:", "demo:x", "runs/x",
    "blocks:9-1", "blocks:-1", "blocks:" + "9" * 30, "0.5", "1/0", "1/16", "a:b", "= ", "# x", "!!python/name:os.system",
]  # fmt: skip
SETTINGS = ["", "=", "a", "a=", "a.b.c=1", ".=1", "a..b=1", "." * 5000 + "=1", "lr=[[", "lr=&a [*a]", "lr=2020-13-45", "about=1",
            "schedule=1", "schedule.steps=true", "optim.clp=1", "data.source=1", "backbone={}", "runtime.workers=nan",
            "epochs=0", "schedule={steps: 1, steps: 2}", "lr={a: {b: 1}}", "seed=-1", "mixup=.inf", "stages=[{}]",
            "schedule.stairs=[[1, 2], [1]]", "backbone.image_size=[16, 16, 16]", "runtime.device=mps", "lrs=-"]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small data and weights of every kind, to be read only."""
    root = tmp_path_factory.mktemp("world")
    photos = pictures(root / "photos", classes=3, each=5, size=(20, 16))
    (root / "pairs.csv").write_text(
        "file,caption\n" + "".join(f"{path},a {path.parent.name}\n" for path in sorted(photos.rglob("*.jpg")))
    )
    for kind in ("images", "annotations"):
        for split in ("training", "validation"):
            (root / "scenes" / kind / split).mkdir(parents=True)
            for number in range(4):
                pixels = np.full((20, 24), number % 2, dtype=np.uint8)
                Image.fromarray(pixels).save(root / "scenes" / kind / split / f"{number}.png")
    (root / "scenes" / "classes.txt").write_text("a\nb\n")
    (root / "folder.yaml").mkdir()
    (root / "empty").mkdir()
    (root / "loop").symlink_to(root / "loop")
    (root / "binary.npz").write_bytes(bytes(range(256)) * 4)
    classes = ("class0", "class1", "class2")
    for name, stem in (("classifier", "dpn"), ("plain", "none")):
        network = load_backbone("mu/8", stem=stem, image_size=16, num_classes=3)
        save_classifier(Classifier(network, classes, "softmax", 18, {}), root / f"{name}.safetensors")
    return {
        "PHOTOS": str(photos),
        "PICTURE": str(photos / "class0" / "000.jpg"),
        "PAIRS": str(root / "pairs.csv"),
        "SCENES": str(root / "scenes"),
        "VTAB": str(root / "nowhere"),
        "FOLDER": str(root / "folder.yaml"),
        "EMPTY": str(root / "empty"),
        "LOOP": str(root / "loop"),
        "BINARY": str(root / "binary.npz"),
        "CLASSIFIER": str(root / "classifier.safetensors"),
        "PLAIN": str(root / "plain.safetensors"),
        "WEIGHTS": str(GOLDENS / "vit_dpn.params.npz"),
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, where no training begins."""

    def stop(*_: Any, **__: Any) -> Any:
        raise DpnError(STOPPED)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "fit", stop)
    monkeypatch.setattr(tower, "demo_tower", stop)
    monkeypatch.setattr(plan, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(plan, "SIDE", {"cpu": 8})
    return tmp_path


def told(arguments: list[str], world: dict[str, str], here: Path) -> Result:
    """Run a command line in an empty folder; the result is one, or a mistake is told on one line."""
    for entry in here.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    done = run(*(world.get(word, word) for word in arguments))
    shown = " ".join(repr(word[:60]) for word in arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), f"{shown}: {done.exception!r}"
    assert done.exit_code in CODES, f"{shown}: {done.exit_code} {done.stderr}"
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if done.exit_code:
        assert len(errors) == 1, f"{shown}: {done.stderr}"
        assert lines[-1] == errors[0], f"{shown}: {done.stderr}"
        assert errors[0] != "error: ", shown
    else:
        assert errors == [], f"{shown}: {done.stderr}"
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]|Traceback", done.output), f"{shown}: {done.output!r}"
    return done


def test_every_command_has_a_good_line(world: dict[str, str], here: Path) -> None:
    """The lines that hostile values are put into get as far as they say."""
    assert set(GOOD) == set(COMMANDS)
    for command, arguments in GOOD.items():
        done = told([*command.split(), *arguments], world, here)
        far = done.exit_code == 0 or STOPPED in done.stderr
        assert far or command in ("finetune vtab", "segment ade20k") or arguments[0] == "CLASSIFIER", done.stderr


def every_option() -> Iterator[tuple[str, str, str]]:
    """Yield each option and argument of each command with a hostile value, another one each time."""
    values = iter(HOSTILE * 20)
    for command, parameters in COMMANDS.items():
        for parameter in parameters:
            if not getattr(parameter, "is_flag", False):
                yield command, max(parameter.opts, key=len), next(values)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_option_with_a_hostile_value(command: str, world: dict[str, str], here: Path) -> None:
    for owner, option, value in every_option():
        if owner == command:
            rest = [option, value] if option.startswith("--") else [value]
            told([*command.split(), *GOOD[command], *rest], world, here)
