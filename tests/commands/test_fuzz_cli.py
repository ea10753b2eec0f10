"""Wrong command lines and configs, many of them at random: each ends in a result or in one line, none in a traceback.

``DPN_FUZZ=1000`` runs a thousand of each instead of a few.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import string
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
import typer.testing
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import Result

from dpn_cli.cli import app
from dpn_cli.commands import doctor
from dpn_cli.config.load import read_config, shipped_configs
from dpn_cli.engine import fit as engine
from dpn_cli.engine import planning
from dpn_cli.errors import DpnError
from dpn_cli.weights.backbone import load_backbone
from support.cli import run_dpn
from support.goldens import GOLDENS
from support.images import write_class_folders
from support.programs import LIMIT
from tasks.classify import demo_weights
from tasks.classify.classifier import Classifier, save_classifier

MANY = 1000
EXAMPLES = int(os.environ.get("DPN_FUZZ", "40"))
FUZZ = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
# A result; what is wrong with a command or its data; a training that was stopped.
CODES = {0, 2, 3, 75, 130}
STOPPED = "a training would begin here"
COMMAND = typer.main.get_command(app)


def commands(command: Any = COMMAND, words: tuple[str, ...] = ()) -> Iterator[tuple[str, list[Any]]]:
    """Yield every command with its parameters."""
    parts = getattr(command, "commands", {})
    for name, part in parts.items():
        yield from commands(part, (*words, name))
    if not parts:
        yield " ".join(words), command.params


COMMANDS = dict(commands())
# What takes each command far into its work; words in capitals are places that `world` makes.
TRAINED = ["--arch", "mu/8", "--image-size", "16", "-b", "4", "--steps", "2", "-j", "0", "--device", "cpu", "-o", "out"]
GOOD: dict[str, list[str]] = {
    "pretrain": ["--data", "PHOTOS", "--val-fraction", "0.4", "--augment", "none", *TRAINED],
    "distill": [
        "--teacher", "PLAIN", "--data", "PHOTOS", "-b", "4", "--steps", "2", "-j", "0", "--device", "cpu", "-o", "out"
    ],
    "finetune highres": ["--data", "PHOTOS", "--val-fraction", "0.4", "--checkpoint", "none", *TRAINED],
    "finetune vtab": [
        "--data", "demo", "--tasks", "demo_color", "--checkpoint", "none", "--set", "schedule.warmup=0", *TRAINED
    ],
    "lit train": ["--data", "PAIRS", "--checkpoint", "none", "--text-size", "mu", "--cache-dir", "cache", *TRAINED],
    "lit cache": ["--data", "PAIRS", "--checkpoint", "none", "--cache-dir", "cache", *TRAINED[:4], "-j", "0"],
    "lit eval": ["LIT", "--data", "PAIRS", "--cache-dir", "cache", "-j", "0"],
    "lit predict": ["LIT", "IMAGE", "--labels", "a,b", "-j", "0"],
    "lit search": ["LIT", "--images", "PHOTOS", "--query", "a dog", "--cache-dir", "cache", "-j", "0"],
    "lit export": ["LIT", "-o", "out"],
    "plan pretrain": ["--arch", "mu/8", "--augment", "none", "--device", "cpu"],
    "plan vtab": ["--arch", "mu/8", "--device", "cpu"],
    "plan distill": ["--teacher-arch", "mu/8", "--device", "cpu"],
    "eval score": ["CLASSIFIER", "--data", "PHOTOS", "--split", "all", "-j", "0"],
    "eval fewshot": ["CLASSIFIER", "--data", "PHOTOS", "--val-fraction", "0.5", "--shots", "1", "-j", "0"],
    "segment ade20k": ["--data", "SCENES", "--checkpoint", "none", *TRAINED],
    "segment folder": ["--data", "SCENES", "--checkpoint", "none", *TRAINED],
    "segment eval": ["SEGMENTER", "--data", "SCENES", "-j", "0"],
    "segment predict": ["SEGMENTER", "IMAGE", "-o", "out", "-j", "0"],
    "predict": ["CLASSIFIER", "IMAGE", "-j", "0"],
    "export": ["CLASSIFIER", "-o", "out"],
    "checkpoint inspect": ["WEIGHTS"],
    "checkpoint convert": ["WEIGHTS", "new.safetensors"],
    "checkpoint fold": ["FOLDABLE", "new.safetensors"],
    "checkpoint retrofit": ["PLAIN", "new.safetensors", "--data", "PHOTOS", "--images", "4", "-j", "0"],
    "data pack": ["--data", "PHOTOS", "-o", "out", "-j", "1"],
    "data prepare vtab": ["--tasks", "svhn", "--tfds-dir", "EMPTY", "--no-download", "-o", "out"],
    "data prepare ade20k": ["ARCHIVE", "--partial", "-o", "out"],
    "data prepare coco": ["COCO", "--partial", "-o", "out"],
    "data check vtab": ["--data", "demo", "--tasks", "demo_color", "-j", "0"],
    "data check highres": ["--data", "PHOTOS", "--val-fraction", "0.4", "-j", "0"],
    "data check pretrain": ["--data", "PHOTOS", "--val-fraction", "0.4", "-j", "0"],
    "data check distill": ["--data", "PHOTOS", "-j", "0"],
    "data check lit": ["--data", "PAIRS", "-j", "0"],
    "data check ade20k": ["--data", "demo", "-j", "0"],
    "data check folder": ["--data", "demo", "-j", "0"],
    "doctor": [],
    "configs show": ["vtab"],
    "inspect": ["WEIGHTS", "-o", "out"],
    "report": ["SEGMENTER", "-o", "out"],
    "reproduce": ["table7", "fig3", "--plan"],
    "runs list": ["SEGMENTER"],
    "runs show": ["SEGMENTER"],
}  # fmt: skip
HOSTILE = [
    *("", " ", "-", "--", "0", "-1", "3.7", "1e400", "nan", "-inf", "1" * 5000, str(2**70), "1000000000", "0.5", "1/0"),
    *(
        "true",
        "null",
        "none",
        "auto",
        "all",
        "demo",
        "nowhere",
        "nowhere/x.yaml",
        "x" * 300,
        "x" * 5000,
        "a,b",
        ",",
        ",,1",
    ),
    *("1,1", "1x1x1", "16x", "x16", "224x0", "B/", "/16", "mu/0", "mu/9999999", "B/³", "٣", "½", "é", "日本", "\u202e"),
    *("\x1b[31m", "a\nb", "a\tb", "\ud800", "{}", "[]", "[" * 3000, "{stem}", "{", "%s", "$HOME", "~nobody/x", "hf:"),
    *("hf:nobody/nothing", "hf:nowhere:", "hf-hub:", "hf-hub:a/b/c", "timm:", "timm:resnet18", "timm:vit_none", "wds:"),
    *(
        "wds:{0..",
        "wds:x-{0..3}.tar",
        "demo:",
        "demo:x",
        "runs/x",
        "blocks:9-1",
        "blocks:-1",
        "blocks:" + "9" * 30,
        "1/16",
    ),
    *("a:b", "= ", "# x", "!!python/name:os.system"),
]
PLACES = [
    "/",
    ".",
    "FOLDER",
    "EMPTY",
    "BINARY",
    "IMAGE",
    "PHOTOS",
    "CLASSIFIER",
    "LIT",
    "SEGMENTER",
    "WEIGHTS",
    "LOOP",
    "PAIRS",
    "SCENES",
]
SETTINGS = [
    *(
        "",
        "=",
        "a",
        "a=",
        "a.b.c=1",
        ".=1",
        "a..b=1",
        "." * 5000 + "=1",
        "lr=[[",
        "lr=&a [*a]",
        "lr=2020-13-45",
        "lrs=-",
    ),
    *(
        "about=1",
        "schedule=1",
        "schedule.steps=true",
        "optim.clp=1",
        "data.source=1",
        "backbone={}",
        "runtime.workers=nan",
    ),
    *("epochs=0", "schedule={steps: 1, steps: 2}", "lr={a: {b: 1}}", "seed=-1", "mixup=.inf", "stages=[{}]"),
    *("runtime.device=mps", "schedule.stairs=[[1, 2], [1]]", "backbone.image_size=[16, 16, 16]", "lr=" + "[" * 3000),
    *("schedule.steps=" + "9" * 99, "batch_size=1000000000000", "data.minival=1", "optim.betas=[2, 2]", "freeze=[[]]"),
]
WRITTEN = ("--output-dir", "--out", "--cache-dir", "--csv", "--html", "target")
# Values that options take, and that mean a lot of work: all images of the disk, for one.
WORK = {"--workers": {"auto"}, "--to": {"onnx", "pt2"}, "run": {"/"}, "images": {"/"}, "--images": {"/"}}
# Numbers at edges: none that is large and allowed, which would be a lot of work and not a mistake.
NUMBERS = st.sampled_from([*range(-3, 6), 2**31, 2**32, 2**63, 2**64, -(2**70), 10**18]).map(str)
TEXT = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), max_size=12)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small data and weights of every kind, to be read only."""
    root = tmp_path_factory.mktemp("world")
    photos = write_class_folders(root / "photos", classes=3, each=5, size=(20, 16))
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
    with zipfile.ZipFile(root / "ade.zip", "w") as archive:
        for split in ("training", "validation"):
            archive.write(photos / "class0" / "000.jpg", f"images/{split}/a.jpg")
            archive.write(root / "scenes" / "annotations" / split / "0.png", f"annotations/{split}/a.png")
    with zipfile.ZipFile(root / "val2017.zip", "w") as archive:
        archive.write(photos / "class0" / "000.jpg", "val2017/a.jpg")
    (root / "folder.yaml").mkdir()
    (root / "empty").mkdir()
    (root / "loop").symlink_to(root / "loop")
    (root / "binary.npz").write_bytes(bytes(range(256)) * 4)
    classes = ("class0", "class1", "class2")
    for name, stem, norm in (("classifier", "dpn", "ln"), ("plain", "none", "ln"), ("foldable", "dpn", "bn")):
        network = load_backbone("mu/8", stem=stem, norm=norm, image_size=16, num_classes=3)
        save_classifier(Classifier(network, classes, "softmax", 18, {}), root / f"{name}.safetensors")
    trained = {"PAIRS": str(root / "pairs.csv"), "SCENES": str(root / "scenes"), "cache": str(root / "cache")}
    for name in ("lit train", "segment folder"):
        out = str(root / name.split()[0])
        result = run_dpn(*name.split(), *(trained.get(word, word) for word in GOOD[name]), "-o", out, "-q")
        assert result.exit_code == 0, result.stderr
    return {
        "PHOTOS": str(photos),
        "IMAGE": str(photos / "class0" / "000.jpg"),
        "PAIRS": str(root / "pairs.csv"),
        "SCENES": str(root / "scenes"),
        "ARCHIVE": str(root / "ade.zip"),
        "COCO": str(root / "val2017.zip"),
        "FOLDER": str(root / "folder.yaml"),
        "EMPTY": str(root / "empty"),
        "LOOP": str(root / "loop"),
        "BINARY": str(root / "binary.npz"),
        "CLASSIFIER": str(root / "classifier.safetensors"),
        "PLAIN": str(root / "plain.safetensors"),
        "FOLDABLE": str(root / "foldable.safetensors"),
        "LIT": str(root / "lit"),
        "SEGMENTER": str(root / "segment"),
        "WEIGHTS": str(GOLDENS / "vit_dpn.params.npz"),
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, where no training begins."""

    def stop(*_: Any, **__: Any) -> Any:
        raise DpnError(STOPPED)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "fit", stop)
    monkeypatch.setattr(demo_weights, "demo_backbone", stop)
    monkeypatch.setattr(doctor, "examine", list)
    monkeypatch.setattr(planning, "MEASURED_SECONDS", 0.001)
    monkeypatch.setattr(planning, "SIDE", {"cpu": 8})
    return tmp_path


def told(arguments: list[str], world: dict[str, str], here: Path) -> Result:
    """Run a command line in an empty folder; the result is one, or a mistake is told on one line."""
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)  # the limit is each line's, however many there are
    for entry in here.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    result = run_dpn(*(world.get(word, word) for word in arguments))
    output = " ".join(repr(word[:60]) for word in arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), f"{output}: {result.exception!r}"
    unsaved = result.exit_code == 1 and "not written" in result.stderr
    assert result.exit_code in CODES or unsaved, f"{output}: {result.exit_code} {result.stderr}"
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if result.exit_code:
        assert len(errors) == 1, f"{output}: {result.stderr}"
        assert lines[-1] == errors[0], f"{output}: {result.stderr}"
        assert errors[0] != "error: ", output
    else:
        assert errors == [], f"{output}: {result.stderr}"
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]|Traceback", result.output), f"{output}: {result.output!r}"
    return result


@pytest.mark.slow
def test_every_command_has_a_good_line(world: dict[str, str], here: Path) -> None:
    """The lines that hostile values are put into are not mistakes themselves."""
    assert set(GOOD) == set(COMMANDS)
    for command, arguments in GOOD.items():
        process = told([*command.split(), *arguments], world, here)
        lacks = command == "segment ade20k" or "needs TensorFlow Datasets" in process.stderr
        assert process.exit_code == 0 or STOPPED in process.stderr or lacks, process.stderr


def values_of(option: str) -> list[str]:
    """Return the hostile values of an option; nothing is written to places that other examples read."""
    if option == "--set":
        return SETTINGS
    places = [] if option in WRITTEN else PLACES
    return [value for value in HOSTILE + places if value not in WORK.get(option, ())]


def options_of(command: str) -> list[tuple[str, str]]:
    """Return a command's options and arguments that take values, with a hostile value each, another one each time."""
    taking = [max(one.opts, key=len) for one in COMMANDS[command] if not getattr(one, "is_flag", False)]
    start = list(COMMANDS).index(command) * 7
    return [(name, values_of(name)[(start + place) % len(values_of(name))]) for place, name in enumerate(taking)]


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_option_with_a_hostile_value(command: str, world: dict[str, str], here: Path) -> None:
    # Where a config can be printed, that is the quick way through all options.
    printed = ["--print-config"] if any(one.name == "print_config" for one in COMMANDS[command]) else []
    for option, value in options_of(command):
        remaining = [option, value] if option.startswith("--") else [value]
        told([*command.split(), *GOOD[command], *remaining, *printed], world, here)


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """Draw a command line: a good one, and hostile values for some of the command's options."""
    command = draw(st.sampled_from(list(COMMANDS)))
    line = [*command.split(), *GOOD[command]]
    for parameter in draw(st.lists(st.sampled_from(COMMANDS[command]), min_size=1, max_size=4)):
        name = max(parameter.opts, key=len)
        if getattr(parameter, "is_flag", False):
            line += [draw(st.sampled_from([*parameter.opts, *parameter.secondary_opts]))]
        else:
            some = TEXT if name in WRITTEN or name in WORK else TEXT | NUMBERS
            value = draw(st.sampled_from(values_of(name)) | some)
            line += [name, value] if name.startswith("--") else [value]
    return [word for word in line if word not in ("-v", "--verbose")]


@pytest.mark.slow
@FUZZ
@given(line=lines())
def test_random_command_lines(line: list[str], world: dict[str, str], here: Path) -> None:
    told(line, world, here)


def keys(plain: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in plain.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys(value, (*path, key))


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | TEXT | st.sampled_from(HOSTILE)
    | st.lists(st.integers() | st.floats() | TEXT, max_size=3) | st.dictionaries(TEXT, st.integers() | TEXT, max_size=2)
)  # fmt: skip


@st.composite
def mutants(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw the name of a shipped config, and its text after some mutations of values, keys and bytes."""
    name = draw(st.sampled_from(list(shipped_configs())))
    plain = read_config(name)
    for path in draw(st.lists(st.sampled_from(list(keys(plain))), min_size=1, max_size=3)):
        section: Any = plain
        for part in path[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            continue
        change, value = draw(st.sampled_from(["replace", "delete", "rename", "add"])), section.get(path[-1])
        if change in ("delete", "rename"):
            section.pop(path[-1], None)
        if change != "delete":
            cut = draw(st.integers(0, len(path[-1])))
            letter = draw(st.sampled_from(string.ascii_lowercase))
            key = path[-1] if change == "replace" else path[-1][:cut] + letter + path[-1][cut + 1 :]
            section[key] = value if change == "rename" else draw(VALUES)
    text = yaml.safe_dump(plain, allow_unicode=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=4)) + text[at + draw(st.integers(0, 9)) :]
    return name, text


@FUZZ
@given(mutant=mutants())
def test_mutated_configs(mutant: tuple[str, bytes], world: dict[str, str], here: Path) -> None:
    name, text = mutant
    path = Path(world["EMPTY"]).parent / "mutant.yaml"
    path.write_bytes(text)
    told(["configs", "show", str(path)], world, here)
    command = next(words for words in COMMANDS if f" {words} " in f"{read_config(name)['about']['command']} ")
    told([*command.split(), "-c", str(path), "--print-config"], world, here)
    if EXAMPLES >= MANY:  # far into the work, for all that is right with a mutant
        told([*command.split(), *GOOD[command], "-c", str(path)], world, here)
