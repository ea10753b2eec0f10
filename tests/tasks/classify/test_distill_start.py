"""What a student begins with, and which images it is shown."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from dpn_cli.arch import STEMS
from dpn_cli.config.load import build
from dpn_cli.data.augment import Augmentation, seed_globally
from dpn_cli.data.crops import eval_crop
from dpn_cli.data.image_source import ImageSource, open_unlabelled
from dpn_cli.data.loader import POLICY, crop_batches
from dpn_cli.data.sources.base import ImageSubset
from dpn_cli.engine.seeds import fold
from dpn_cli.errors import DataError, DpnError
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import Backbone, load_backbone
from dpn_cli.weights.retrofit import fit_stem
from support.cli import run_dpn
from support.distill import distill_config, train_distill, write_teacher
from support.images import write_class_folders
from tasks.classify.classifier import Classifier, save_classifier
from tasks.classify.distill.cache import target_shapes
from tasks.classify.distill.config import DistillConfig, finalize, resolve
from tasks.classify.distill.data import FITTED_ON, augmentation_of, open_images
from tasks.classify.distill.losses import ObservedNetwork
from tasks.classify.distill.student import load_teacher, new_student, start_of, with_teacher_defaults

CPU = World(0, 1, torch.device("cpu"))


def smooth(count: int) -> Tensor:
    g = torch.Generator().manual_seed(3)
    return (torch.nn.functional.interpolate(torch.rand(count, 3, 4, 4, generator=g), size=16) * 255).to(torch.uint8)


def plain_network() -> Backbone:
    model = load_backbone("mu/8", stem="none", image_size=16, num_classes=3, seed=1)
    model.eval()
    return model


def patches_of(model: Backbone, images: Tensor) -> np.ndarray[Any, Any]:
    rows = rearrange(model.normalize(images), "b c (h p) (w q) -> (b h w) (p q c)", p=8, q=8)
    return rows.double().numpy()


def standardised(x: np.ndarray[Any, Any], *, centred: bool) -> np.ndarray[Any, Any]:
    mean = x.mean(-1, keepdims=True) if centred else 0.0
    return np.asarray((x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6))


@pytest.mark.parametrize("stem", ["pre", "post", "post_posemb", "dpn", "rms"])
def test_a_stem_is_fitted_by_least_squares(stem: Any) -> None:
    """Norms from NumPy: moments of the patches in front; `lstsq` per channel behind, of tokens or their sums."""
    plain, images = plain_network(), smooth(32)
    other, _ = new_student(
        distill_config("x", "y", backbone={"stem": stem}), plain, lambda: iter(torch.split(images, 5))
    )
    fit = patches_of(plain, images[torch.arange(32) % 4 != 3])
    weight = rearrange(plain.patch_embed.proj.weight, "d c p q -> d (p q c)").detach().double().numpy()
    bias = plain.patch_embed.proj.bias.detach().double().numpy()
    first, second = other.patch_embed.norm_in, other.patch_embed.norm
    x = fit
    if stem in ("pre", "dpn"):
        scale, shift = np.sqrt(fit.var(-1) + 1e-6).mean(), fit.mean()
        assert np.allclose(first.weight.detach(), scale, rtol=1e-5)
        assert np.allclose(first.bias.detach(), shift, atol=1e-6)
        x = standardised(fit, centred=True) * scale + shift
    elif stem == "rms":
        scale = np.sqrt((fit**2).mean(-1) + 1e-6).mean()
        assert np.allclose(first.weight.detach(), scale, rtol=1e-5)
        x = standardised(fit, centred=False) * scale
    positions = np.tile(plain.pos_embed[0].detach().double().numpy(), (24, 1)) if stem == "post_posemb" else 0.0
    v, t = standardised(x @ weight.T + bias + positions, centred=stem != "rms"), fit @ weight.T + bias + positions
    norm = other.norm_posemb if stem == "post_posemb" else second
    for channel in range(32 if stem != "pre" else 0):
        columns = [v[:, channel]] if stem == "rms" else [v[:, channel], np.ones(len(v))]
        actual = np.linalg.lstsq(np.stack(columns, 1), t[:, channel], rcond=None)[0]
        parameters = [norm.get_parameter(name) for name in ("weight", "bias")[: len(columns)]]
        kept = [parameter[channel].item() for parameter in parameters]
        assert kept == pytest.approx(actual.tolist(), rel=1e-3, abs=1e-4)


def test_a_stem_without_statistics_is_the_plain_one() -> None:
    plain, images = plain_network(), smooth(8)
    other, facts = new_student(
        distill_config("x", "y", backbone={"stem": "affine_only"}), plain, lambda: iter([images])
    )
    assert facts["survives"] == facts["copied"] == 1
    assert torch.equal(other(other.normalize(images)), plain(plain.normalize(images)))


def test_a_fit_is_nearer_than_a_copy() -> None:
    plain, images = plain_network(), smooth(32)
    for stem in ("dpn", "rms", "post", "post_posemb"):
        student, facts = new_student(distill_config("x", "y", backbone={"stem": stem}), plain, lambda: iter([images]))
        assert facts["survives"] > facts["copied"], stem
        second = fit_stem(plain, student, lambda: iter([images]))
        assert second.copied == pytest.approx(facts["survives"])  # what is fitted already is what is there


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("of_teacher", ["none", "dpn"])
def test_every_stem_has_a_start(stem: Any, of_teacher: Any) -> None:
    teacher = load_backbone("mu/8", stem=of_teacher, image_size=16, num_classes=3)
    student = distill_config("x", "y", backbone={"stem": stem}).backbone
    fits = of_teacher == "none" and stem not in ("none", "dpn_no_affine")
    assert start_of(student, teacher) == ("retrofit" if fits else "copy")
    for start in ("retrofit", "anneal"):
        asked = student.model_copy(update={"start": start})
        if fits:
            assert start_of(asked, teacher) == start
        else:
            with pytest.raises(DpnError, match="use --start copy"):
                start_of(asked, teacher)


def test_norms_of_the_blocks_change_and_their_scales_stay() -> None:
    teacher = plain_network()
    torch.nn.init.normal_(teacher.get_parameter("blocks.0.norm1.weight"))
    student, _ = new_student(
        distill_config("x", "y", backbone={"stem": "none", "norm": "bn"}), teacher, lambda: iter([])
    )
    assert (student.config.norm, student.config.stem) == ("bn", "none")
    actual, expected = student.state_dict(), teacher.state_dict()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert set(student.report.new) == set(actual) - set(expected)
    assert all("running" in name for name in student.report.new)


def test_a_network_from_scratch_is_drawn_by_the_seed() -> None:
    teacher = plain_network()
    scratch = {"backbone": {"start": "scratch", "drop_path": 0.1}, "stem_share": 0.0}
    configs = [distill_config("x", "y", **scratch, seed=seed) for seed in (0, 0, 1)]
    sample = [new_student(config, teacher, lambda: iter([]))[0] for config in configs]
    first, same, other = (network.blocks[0].attn.qkv.weight for network in sample)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert (sample[0].config.arch, sample[0].num_classes, sample[0].config.drop_path) == ("mu/8", 3, 0.1)


def test_images_are_taken_as_the_teacher_takes_them(tmp_path: Path) -> None:
    """A teacher of whole, unmirrored images has its student trained so; one whose file tells nothing has not."""
    folder = tmp_path / "teacher.safetensors"
    for side, facts, expected in (
        (None, {"config": {"data": {"flip": False}}}, ("whole", False)),
        (20, {}, ("centre", True)),
    ):
        save_classifier(Classifier(plain_network(), ("a", "b", "c"), "softmax", side, facts), folder)
        for changes, crop, flip in (({}, *expected), ({"crop": "timm_bicubic", "flip": True}, "timm_bicubic", True)):
            config = distill_config("x", folder, data=changes)
            data = with_teacher_defaults(config, load_teacher(config)).data
            assert (data.crop, data.flip, data.eval_resize) == (crop, flip, side if crop == "centre" else None)


@pytest.mark.parametrize(("asked", "of_teacher", "side"), [(None, 22, 22), (18, 22, 18), (None, None, 18)])
def test_centre_crops_are_what_the_teacher_is_evaluated_on(
    asked: int | None, of_teacher: int | None, side: int, photos: Path, tmp_path: Path
) -> None:
    """A teacher of whole images says no size; then it is that of big_vision, 256 for 224."""
    path = tmp_path / "teacher.safetensors"
    save_classifier(Classifier(plain_network(), ("a", "b", "c"), "softmax", of_teacher, {}), path)
    config = distill_config(photos, path, data={"crop": "centre", "eval_resize": asked, "flip": False, "jitter": 0.0})
    config = with_teacher_defaults(config, load_teacher(config))
    assert config.data.eval_resize == side
    split = open_images(config, None, Console(quiet=True)).train
    batch = next(crop_batches(split, augmentation_of(config, (16, 16)), 8, 0, CPU, workers=0)(0))
    rows = range(len(split.labels))
    shown = {tuple(eval_crop(split.pixels(row), side, (16, 16)).flatten().tolist()) for row in rows}
    assert all(tuple(image.flatten().tolist()) in shown for image in batch["image"])


def test_a_centre_larger_than_the_resized_image_is_refused(photos: Path, tmp_path: Path) -> None:
    config = distill_config(photos, write_teacher(tmp_path / "teacher.safetensors"), data={"eval_resize": 15})
    with pytest.raises(DpnError, match="data.eval_resize: the teacher's image size .16. or more, .* .got 15.$"):
        train_distill(config, tmp_path / "run")


def test_colours_change_as_timm_changes_them(tmp_path: Path) -> None:
    from dpn_cli.data.sources.folder import ClassFolders

    split = ClassFolders(write_class_folders(tmp_path / "photos", classes=2, each=4))
    options = Augmentation((16, 16), crop="whole", flip=False, jitter=0.4)
    plain, changed = (
        next(crop_batches(split, one, 8, 3, CPU, workers=0)(0))["image"]
        for one in (Augmentation((16, 16), crop="whole", flip=False), options)
    )
    _, jitter, _ = create_transform(16, is_training=True, separate=True, hflip=0.0, color_jitter=0.4)
    assert "ColorJitter" in repr(jitter)
    for place in range(8):
        image = Image.fromarray(plain[place].permute(1, 2, 0).numpy())
        with seed_globally(fold(3, POLICY, 0, place)):
            torch.rand(1)  # for the mirror image
            expected = np.asarray(jitter(image))
        assert np.array_equal(changed[place].permute(1, 2, 0).numpy(), expected)
    assert not torch.equal(plain, changed)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Twelve images in every form that training takes, none of them with a label that could be used."""
    import datasets

    root = tmp_path_factory.mktemp("forms")
    photos = write_class_folders(root / "classes", classes=2, each=6)
    files = sorted(photos.glob("*/*.jpg"))
    for name in ("flat", "split/train"):
        (root / name).mkdir(parents=True)
        for number, file in enumerate(files):
            (root / name / f"{number:03d}.jpg").write_bytes(file.read_bytes())
    with tarfile.open(root / "shard.tar", "w") as archive:
        for number, file in enumerate(files):
            member = tarfile.TarInfo(f"{number:03d}.jpg")
            member.size = file.stat().st_size
            archive.addfile(member, io.BytesIO(file.read_bytes()))
    hub = root / "hub"
    hub.mkdir()
    rows = {"image": [{"bytes": file.read_bytes(), "path": None} for file in files]}
    datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image()})).to_parquet(
        str(hub / "train.parquet")
    )
    return {
        "classes": str(photos),
        "flat": str(root / "flat"),
        "split": str(root / "split"),
        "shards": f"wds:{root}/shard.tar",
        "hub": f"hf:{hub}",
    }


@pytest.mark.parametrize("form", ["classes", "flat", "split", "shards", "hub"])
def test_images_need_no_labels(form: str, forms: dict[str, str]) -> None:
    split, flat = open_unlabelled(ImageSource(forms[form])), open_unlabelled(ImageSource(forms["flat"]))
    assert set(split.labels) == {0}
    assert len(split.labels) == len(split.sizes) == 12
    assert np.array_equal(split.pixels(3), flat.pixels(3))
    assert len({split.key(index) for index in range(12)}) == 12


def test_packed_and_built_in_images_are_taken(forms: dict[str, str], tmp_path: Path) -> None:
    assert len(open_unlabelled(ImageSource("demo")).labels) == 1000
    packed = run_dpn("data", "pack", "--data", forms["classes"], "-o", str(tmp_path / "packed"))
    assert packed.exit_code == 0, packed.stderr
    assert len(open_unlabelled(ImageSource(str(tmp_path / "packed"))).labels) == 12
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no image in it or below it"):
        open_unlabelled(ImageSource(str(tmp_path / "empty")))


def test_the_held_out_split_depends_on_names_only(forms: dict[str, str], tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher.safetensors")
    config = distill_config(forms["flat"], teacher, data={"held_out": 0.25}, batch_size=4)
    first = open_images(config, None, Console(quiet=True))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in sorted(Path(forms["flat"]).iterdir()):
        (elsewhere / file.name).write_bytes(file.read_bytes())
    moved = config.model_copy(update={"data": config.data.model_copy(update={"source": str(elsewhere)})})
    second = open_images(moved, None, Console(quiet=True))
    assert isinstance(first.held_out, ImageSubset)
    assert isinstance(second.held_out, ImageSubset)
    assert isinstance(first.train, ImageSubset)
    assert len(first.held_out.labels) == 3
    assert first.held_out.rows == second.held_out.rows
    assert first.fingerprints() == second.fingerprints()
    assert set(first.held_out.rows).isdisjoint(first.train.rows)
    assert FITTED_ON >= 9
    assert len(first.sample(lambda pixels: torch.zeros(3, 1, 1), False)) == 9


def test_labels_of_other_classes_are_left_alone_unless_they_are_asked_for(tmp_path: Path) -> None:
    said: list[str] = []

    class Noting(Console):
        def info(self, text: str) -> None:
            said.append(text)

    teacher = write_teacher(tmp_path / "teacher.safetensors")
    root = write_class_folders(tmp_path / "photos" / "val", classes=2, each=2).parent
    write_class_folders(root / "train", classes=2, each=10)
    config = distill_config(root, teacher)
    assert open_images(config, ("x", "y", "z"), Noting(quiet=True)).val is None
    assert any("are not scored" in line for line in said)
    asked = distill_config(root, teacher, data={"val_source": str(root)})
    with pytest.raises(DataError, match="--val-data .*: classes that the classifier does not know"):
        open_images(asked, ("x", "y", "z"), Console(quiet=True))
    actual = open_images(asked, ("class1", "other", "class0"), Console(quiet=True))
    assert actual.columns is not None
    assert actual.columns.tolist() == [2, 0]


def _resolved(*layers: dict[str, Any]) -> DistillConfig:
    flags, settings = (*layers, {})[:2]
    return finalize(build(DistillConfig, resolve(None, flags, settings), "test"), "demo-tower")


def test_without_a_teacher_the_demo_runs_and_with_one_data_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (_resolved({}).teacher, _resolved({}).data.source) == ("demo-tower", "demo:objects")
    with pytest.raises(DpnError, match="--data: no images; neither"):
        _resolved({"teacher": "x"})
    (tmp_path / "imagenet").mkdir()
    assert _resolved({"teacher": "x"}).data.source == "imagenet"
    with pytest.raises(DpnError, match="--teacher: which network is to be distilled"):
        finalize(build(DistillConfig, resolve(None, {}, {}), "test"))


def test_a_stage_of_no_length_needs_no_learning_rate() -> None:
    assert _resolved({"stem_share": 0.0, "data": {"source": "photos"}}).stem_lr is None
    with pytest.raises(DpnError, match="stem_lr"):
        _resolved({"stem_share": 0.0, "data": {"source": "photos"}}, {"stem_lr": 1e-3})


def test_the_least_area_of_crops_that_are_not_drawn_is_refused(photos: Path, tmp_path: Path) -> None:
    """This teacher takes images whole."""
    teacher = write_teacher(tmp_path / "teacher.safetensors")
    for crop, taken in ((None, "whole"), ("centre", "centre")):
        config = distill_config(photos, teacher, data={"crop": crop, "crop_area": 0.5})
        with pytest.raises(DpnError, match=f"data.crop_area .0.5.: of random crops, and data.crop is {taken}"):
            train_distill(config, tmp_path / "run")


PARTS: dict[str, Any] = {"registers": 2, "distillation_token": True, "layer_scale": 0.5, "swiglu": True}


@pytest.mark.parametrize("more", [{}, {"posemb": "rope"}])
@torch.no_grad()
def test_a_student_has_the_parts_of_its_teacher(more: dict[str, Any]) -> None:
    teacher = load_backbone("nano/8", stem="none", image_size=16, num_classes=3, seed=5, **PARTS, **more).eval()
    images = smooth(8)
    losses = {"layers": ((1, 1),), "tokens": 1.0, "attention": 1.0, "representation": 1.0, "logits": 1.0}
    for stem in ("none", "dpn"):
        config = distill_config("x", "y", backbone={"stem": stem}, losses=losses)
        student, _ = new_student(config, teacher, lambda: iter([images]))
        assert replace(student.config, stem="none", drop_path=0.0) == teacher.config
        outputs = [
            ObservedNetwork(network.eval(), config.losses, [1])(network.normalize(images))
            for network in (student, teacher)
        ]
        shapes = target_shapes(teacher.config, config.losses)
        assert {name: tuple(value.shape[1:]) for name, value in outputs[1].items()} == shapes
        equal = all(torch.equal(value, outputs[1][name]) for name, value in outputs[0].items())
        assert equal == (stem == "none")
    scratch = distill_config("x", "y", backbone={"start": "scratch"}, stem_share=0.0)
    assert new_student(scratch, teacher, lambda: iter([]))[0].config.registers == 2


@torch.no_grad()
def test_attention_that_is_compared_is_that_of_the_network_with_its_rotation() -> None:
    network = load_backbone("nano/8", stem="none", image_size=16, posemb="rope", registers=1, seed=5).eval()
    losses = distill_config("x", "y", losses={"attention": 1.0, "logits": 0.0}).losses
    attention = network.blocks[-1].attn
    attention.fused_attn = False
    weights: list[torch.Tensor] = []
    attention.attn_drop.register_forward_hook(lambda module, inputs, output: weights.append(output))
    compared = ObservedNetwork(network, losses, [])(torch.randn(2, 3, 16, 16))["attention.0"]
    assert torch.allclose(compared.softmax(-1), weights[0], atol=1e-6)
