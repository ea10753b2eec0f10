"""What a run or a file is decides which commands take it, and a damaged file is noticed by all of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dpn_cli.errors import DataError, DpnError
from dpn_cli.run.artifact_kinds import COMMANDS, kind_of, resolve
from dpn_cli.run.files import file_digest
from dpn_cli.weights.backbone import export_backbone, load_backbone
from dpn_cli.weights.locate import open_checkpoint
from dpn_cli.weights.safetensors_io import KEY, read_weights, write_weights
from support.cli import run_dpn
from support.lit import make_towers
from tasks.classify.classifier import Classifier, load_classifier, save_classifier
from tasks.lit.towers import load_lit, save_towers
from tasks.lit.zeroshot import build_classifier, classifier_of
from tasks.segment.artifact import Segmenter, load_segmenter, save_segmenter
from tasks.segment.config import Evaluation, MaskData
from tasks.segment.model import LinearSegmenter
from tasks.segment.palette import Class
from tasks.vtab.tasks import TASKS
from tasks.vtab.trials import VtabTrial

WORDS = {"classifier": "a classifi", "segmenter": "a segmentation", "towers": "LiT", "network": "is not"}
# For every command: its arguments behind the file, and what it says of each kind that it does not take.
REFUSED: dict[str, tuple[list[str], dict[str, str]]] = {
    "predict": (["x.png"], {"segmenter": "use 'dpn segment predict'", "towers": "use 'dpn lit predict'"}),
    "eval": (["--data", "demo"], {"segmenter": "use 'dpn segment eval'", "towers": "use 'dpn lit eval'"}),
    "export": ([], {"segmenter": "commands for it: dpn segment predict", "towers": "use 'dpn lit export'"}),
    "eval fewshot": (["--data", "demo"], {"segmenter": "dpn segment eval", "towers": "dpn lit search"}),
    "segment predict": (
        ["x.png"],
        {
            "classifier": "use 'dpn predict'",
            "towers": "use 'dpn lit predict'",
            "network": "'dpn segment ade20k' or 'dpn segment folder' with --checkpoint",
        },
    ),
    "segment eval": ([], {"classifier": "use 'dpn eval'", "towers": "use 'dpn lit eval'", "network": "dpn segment"}),
    "lit eval": (
        ["--data", "demo"],
        {"classifier": "use 'dpn eval'", "segmenter": "use 'dpn segment eval'", "network": "'dpn lit train --checkpoi"},
    ),
    "lit predict": (
        ["x.png", "--labels", "a"],
        {"classifier": "use 'dpn predict'", "segmenter": "use 'dpn segment predict'", "network": "'dpn lit train"},
    ),
    "lit search": (
        ["--images", ".", "--query", "a"],
        {"classifier": "commands for it: dpn predict", "segmenter": "dpn segment eval", "network": "'dpn lit train"},
    ),
    "lit export": (
        [],
        {"classifier": "use 'dpn export'", "segmenter": "dpn segment eval", "network": "'dpn lit train"},
    ),
    "inspect": ([], {"towers": "which 'dpn inspect' does not take; commands for it: dpn lit predict"}),
    "checkpoint inspect": ([], {"towers": "which '--checkpoint' does not take; commands for it: dpn lit predict"}),
    "checkpoint retrofit": (
        ["out.safetensors", "--data", "demo"],
        {"segmenter": "which 'dpn checkpoint retrofit' does not take", "towers": "dpn lit search"},
    ),
    "lit train --data demo --checkpoint": (
        [],
        {"segmenter": "'dpn lit train' does not take", "towers": "dpn lit eval"},
    ),
    "finetune highres --data demo --checkpoint": ([], {"towers": "'--checkpoint' does not take"}),
    "segment ade20k --data demo --checkpoint": ([], {"towers": "'--checkpoint' does not take"}),
}
CASES = [(command, kind) for command, (_, kinds) in REFUSED.items() for kind in kinds]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small file of each kind, in a folder of its own that is no run."""
    root = tmp_path_factory.mktemp("kinds")
    actual = {kind: root / kind / "weights.safetensors" for kind in WORDS}
    vit = load_backbone("mu/8", image_size=16, num_classes=3, seed=1)
    export_backbone(vit, actual["network"])
    save_classifier(Classifier(vit, ("ant", "bee", "cow"), "softmax", 16, {"arch": "mu/8"}), actual["classifier"])
    classes = tuple(Class(name, (9, 9, 9)) for name in ("ant", "bee", "cow"))
    save_segmenter(
        Segmenter(LinearSegmenter(vit, final_norm=False), classes, MaskData(source="x"), Evaluation(), {}),
        actual["segmenter"],
    )
    save_towers(make_towers(), actual["towers"])
    return actual


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_commands_refuse_other_kinds_and_name_the_right_command(
    command: str, kind: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    behind, says = REFUSED[command]
    as_run = shutil.copytree(files[kind].parent, tmp_path / "runs" / kind)
    (as_run / "run.json").write_text("{}")
    for place in (files[kind], as_run):
        result = run_dpn(*command.split(), str(place), *behind)
        assert result.exit_code == 3, result.output
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert f"{place} is " in line
        assert WORDS[kind] in line
        assert says[kind] in line


def test_every_kind_is_read_by_its_own_loader(files: dict[str, Path]) -> None:
    assert load_classifier(str(files["classifier"])).classes == ("ant", "bee", "cow")
    assert load_classifier(str(files["network"])).classes == ("0", "1", "2")
    assert load_segmenter(str(files["segmenter"])).classes[2].name == "cow"
    assert load_lit(str(files["towers"])).tokenizer.context == 16
    for kind in ("network", "classifier", "segmenter"):
        assert kind_of(open_checkpoint(str(files[kind].parent)).about) == kind


@pytest.mark.parametrize(
    ("run_json", "message"),
    [
        ({"kind": "sweep"}, "is a VTAB run: it keeps scores and no network for 'dpn predict'"),
        ({"kind": "segmenter"}, "is a segmentation run; use 'dpn segment predict'"),
        ({"kind": "towers"}, "is a LiT run; use 'dpn lit predict'"),
        ({"kind": "classifier"}, "the run has not finished training; finish it with --resume"),
        ({}, "the run has not finished training"),
    ],
)
def test_a_run_without_weights_is_known_by_its_run_json(run_json: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run_json))
    result = run_dpn("predict", str(tmp_path), "x.png")
    assert result.exit_code == 3
    assert message in result.stderr


def test_the_weights_of_a_sweep_are_at_the_path_in_its_result(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"kind": "classifier"}')
    (tmp_path / "result.json").write_text('{"weights": "stage3/x/weights.safetensors"}')
    shutil.copytree(files["classifier"].parent, tmp_path / "stage3" / "x")
    assert load_classifier(str(tmp_path)).classes == ("ant", "bee", "cow")
    assert open_checkpoint(str(tmp_path)).source.endswith("stage3/x/weights.safetensors")


@pytest.mark.parametrize("kind", ["classifier", "segmenter"])
def test_a_converted_file_keeps_its_kind(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    for size in ("16", "32"):
        target = tmp_path / f"{size}.safetensors"
        assert run_dpn("checkpoint", "convert", str(files[kind]), str(target), "--image-size", size).exit_code == 0
        report = json.loads(run_dpn("checkpoint", "inspect", str(target), "--json").stdout)
        assert report["kind"] == kind
        if kind == "segmenter":
            assert "use 'dpn segment predict'" in run_dpn("predict", str(target), "x.png").stderr
        else:
            reloaded = load_classifier(str(target))
            assert reloaded.classes == ("ant", "bee", "cow")
            assert reloaded.resize_side == {"16": 16, "32": 37}[size]


def flipped(path: Path, to: Path, place: Callable[[bytes], int]) -> Path:
    content = bytearray(path.read_bytes())
    content[place(bytes(content))] ^= 1
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(content)
    return to


FLIPS: dict[str, Callable[[bytes], int]] = {
    "the last tensor's last byte": lambda content: len(content) - 4,
    "the middle": lambda content: len(content) // 2,
    "a class, a stem or a setting": lambda content: content.index(b"learn"),
    "a shape": lambda content: content.index(b'"shape":[') + 9,
}
READERS = {
    "classifier": (
        "checkpoint inspect", "checkpoint convert OUT", "checkpoint retrofit OUT --data demo", "predict x.png",
        "eval --data demo", "eval fewshot --data demo", "export",
    ),
    "network": ("checkpoint inspect", "predict x.png", "eval fewshot --data demo"),
    "segmenter": ("segment predict x.png", "segment eval", "checkpoint inspect"),
    "towers": (
        "lit predict x.png --labels a", "lit eval --data demo", "lit search --images . --query a", "lit export",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "command"), [(kind, command) for kind, all_ in READERS.items() for command in all_])
def test_one_flipped_bit_is_noticed_by_every_command(
    kind: str, command: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *behind = command.replace("eval fewshot", "eval_fewshot").split()
    words = first.replace("_", " ").split()
    if first in ("checkpoint", "segment", "lit"):
        words.append(behind.pop(0))
    for name, place in FLIPS.items():
        damaged = flipped(files[kind], tmp_path / f"{kind}.safetensors", place)
        remaining = [word.replace("OUT", "out.safetensors") for word in behind]
        result = run_dpn(*words, str(damaged), *remaining)
        assert result.exit_code == 3, (name, result.output)
        assert len([line for line in result.stderr.splitlines() if line.startswith("error:")]) == 1, result.stderr
        assert str(damaged) in result.stderr
        assert "damaged" in result.stderr
        assert list(tmp_path.iterdir()) == [damaged]


def test_every_bit_of_a_small_file_counts(tmp_path: Path) -> None:
    path, copy = tmp_path / "whole", tmp_path / "flipped"
    tensors = {"w": torch.arange(5.0), "b": torch.tensor(True), "h": torch.ones(3, dtype=torch.bfloat16)}
    metadata = {"kind": "network", "note": "abc"}
    write_weights(path, tensors, metadata)
    content = path.read_bytes()
    missed = []
    for place in range(len(content)):
        copy.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            actual, described = read_weights(copy)
        except Exception:  # the container's reader raises what the damage leads it to
            continue
        described.pop(KEY, None)
        if not (described.items() >= metadata.items() and all(actual[n].equal(t) for n, t in tensors.items())):
            missed.append(place)
    assert missed == []


def test_equal_contents_are_equal_files(tmp_path: Path) -> None:
    metadata = {"kind": "network", "note": 'a "b" \\ c\t\x01é日\U0001f600', "eps": "1e-06", "act": "gelu"}
    tensors = {"w": torch.arange(5.0), "b": torch.tensor(True)}
    digests = {write_weights(tmp_path / str(number), tensors, metadata) for number in range(8)}
    assert len(digests) == 1
    actual, described = read_weights(tmp_path / "0")
    described.pop(KEY)
    assert described == metadata
    assert all(actual[name].equal(value) for name, value in tensors.items())


def test_files_without_checksums_still_load(files: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("classifier", "segmenter", "towers"):
        with safe_open(files[kind], framework="pt") as file:
            metadata = {key: text for key, text in file.metadata().items() if key not in ("kind", KEY)}
        save_file(load_file(files[kind]), tmp_path / f"{kind}.safetensors", metadata)
    assert load_classifier(str(tmp_path / "classifier.safetensors")).classes[0] == "ant"
    assert load_segmenter(str(tmp_path / "segmenter.safetensors")).classes[0].name == "ant"
    assert load_lit(str(tmp_path / "towers.safetensors")).tokenizer.context == 16
    result = run_dpn("predict", str(tmp_path / "segmenter.safetensors"), "x.png")
    assert "is a segmentation network; use 'dpn segment predict'" in result.stderr


def test_another_file_in_the_place_of_a_runs_weights_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    shutil.copy(files["classifier"], weights)
    (tmp_path / "run.json").write_text(json.dumps({"weights_sha256": file_digest(weights)}))
    assert load_classifier(str(tmp_path)).classes[0] == "ant"
    vit = load_backbone("mu/8", image_size=16, num_classes=3, seed=2)
    save_classifier(Classifier(vit, ("ant", "bee", "cow"), "softmax", 16, {}), weights)
    with pytest.raises(DataError, match="not the file that its run wrote"):
        load_classifier(str(tmp_path))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_missing_network_is_named_as_it_was_given(command: str) -> None:
    with pytest.raises(DataError, match="^runs/nope: no such file or folder; name a run's folder"):
        resolve("runs/nope", command)
    for place in ("timm:vit_base_patch16_224", "hf-hub:owner/name", "none"):
        assert resolve(place, command) == place


@pytest.mark.parametrize("place", ["nowhere.npz", "words.txt", "timm:vit_nope", "hf-hub:nobody"])
def test_an_error_about_weights_starts_with_their_path(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Commands name weights by different options, or by none.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("no weights")
    with pytest.raises(DpnError, match=f"^{place}: "):
        open_checkpoint(place)


def test_a_damaged_cell_of_vtab_is_named(files: dict[str, Path], tmp_path: Path) -> None:
    cell = VtabTrial("dpn", TASKS[0], 0.1, 0, "train800", tmp_path)
    flipped(files["network"], cell.weights, FLIPS["the middle"])
    with pytest.raises(DataError, match="the file is damaged: .* delete .* and --resume trains it again"):
        cell.load()
    shutil.copy(files["network"], cell.weights)
    assert cell.load()
    (tmp_path / "done.json").write_text('{"steps": 1, "weights_sha256": "abc"}')
    with pytest.raises(DataError, match="not the file that this training wrote"):
        cell.load()


def test_a_damaged_zero_shot_classifier_is_rebuilt(tmp_path: Path) -> None:
    from dpn_cli.run.distributed import World

    own, single = make_towers(), World(0, 1, torch.device("cpu"))
    arguments = own, ["a cat", "a dog"], ["{}"], tmp_path, single
    expected = classifier_of(*arguments)
    (kept,) = tmp_path.iterdir()
    flipped(kept, kept, lambda content: len(content) - 1)
    assert torch.equal(classifier_of(*arguments), expected)
    assert torch.equal(expected, build_classifier(own, ["a cat", "a dog"], ["{}"]))
    assert torch.equal(read_weights(kept)[0]["classes"], expected)
