"""CIFAR: its published files against torchvision's reader, hostile and damaged ones, and the config for it."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms

from dpn_cli.config.load import build, merge
from dpn_cli.config.schema import Optim
from dpn_cli.data.image_source import ImageSource
from dpn_cli.data.loader import POLICY
from dpn_cli.data.sampler import rows_of_step
from dpn_cli.data.sources.cifar import LAYOUTS, CifarImages, find_cifar
from dpn_cli.data.splits import open_class_data
from dpn_cli.engine.optim import build_optimizer, lr_factor, set_lr
from dpn_cli.engine.seeds import fold
from dpn_cli.errors import DataError
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from tasks.classify import train as training
from tasks.classify.config import resolve_steps
from tasks.classify.data import open_data
from tasks.classify.pretrain_config import PretrainConfig, finalize, resolve
from tasks.classify.training_batches import training_batches

TEN, HUNDRED, TEN_BYTES, HUNDRED_BYTES = LAYOUTS


def python2(value: object) -> bytes:
    """What Python 2 wrote with protocol 2: byte strings, class numbers, and NumPy's arrays of that time."""
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(part) for item in value.items() for part in item) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(python2(part) for part in value) + b"e"
    if isinstance(value, str):
        return b"U" + bytes([len(value)]) + value.encode()
    if isinstance(value, int):
        return b"K" + bytes([value])
    assert isinstance(value, np.ndarray)
    rows, columns = value.shape
    shape = b"J" + struct.pack("<i", rows) + b"M" + struct.pack("<H", columns) + b"\x86"
    number = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    content = b"T" + struct.pack("<i", value.size) + value.tobytes()
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return empty + b"(K\x01" + shape + number + b"\x89" + content + b"tb"


def pickled(value: object) -> bytes:
    return b"\x80\x02" + python2(value) + b"."


def write(root: Path, layout: Any, each: int = 4) -> Path:
    """Write a small CIFAR in one of its published forms; both forms of one have the same images and labels."""
    folder, classes = root / layout.folder, 100 if "100" in layout.folder else 10
    folder.mkdir(parents=True)
    names = [f"thing{number}" for number in range(classes)]
    for file in [name for files in layout.files.values() for name in files]:
        rng = np.random.default_rng(list(file.removesuffix(".bin").encode()))
        images = rng.integers(0, 256, (each, 3072), dtype=np.uint8)
        labels, coarse = rng.integers(0, classes, each).tolist(), rng.integers(0, 20, each).tolist()
        if layout.labels is None:
            initial = np.array([labels] if classes == 10 else [coarse, labels], dtype=np.uint8).T
            (folder / file).write_bytes(np.concatenate([initial, images], axis=1).tobytes())
        else:
            table = {"data": images, layout.labels: labels, "coarse_labels": coarse, "batch_label": "one of 5"}
            (folder / file).write_bytes(pickled(table))
    meta = "\n".join(names) + "\n" if layout.labels is None else None
    (folder / layout.meta).write_bytes(meta.encode() if meta else pickled({layout.names: names, "num_vis": 200}))
    return root


def theirs(root: Path, layout: Any, train: bool) -> Any:
    """torchvision's reader, which compares files with the sums of the real ones unless it has none."""
    base: Any = torchvision.datasets.CIFAR10 if layout is TEN else torchvision.datasets.CIFAR100

    unsummed = {
        "train_list": [[name, None] for name, _ in base.train_list],
        "test_list": [[name, None] for name, _ in base.test_list],
        "meta": {**base.meta, "md5": None},
    }
    return type("Small", (base,), unsummed)(str(root), train=train)


@pytest.mark.parametrize("layout", [TEN, HUNDRED], ids=lambda layout: layout.folder)
@pytest.mark.parametrize("split", ["train", "val"])
def test_images_labels_and_names_are_torchvisions(layout: Any, split: str, tmp_path: Path) -> None:
    write(tmp_path, layout)
    result = find_cifar(tmp_path)
    assert result == (tmp_path / layout.folder, layout) == find_cifar(tmp_path / layout.folder)
    actual, reference = CifarImages(*result, split), theirs(tmp_path, layout, split == "train")
    assert list(actual.labels) == reference.targets
    assert list(actual.classes) == reference.classes
    assert np.array_equal(np.stack([actual.pixels(index) for index in range(len(actual.labels))]), reference.data)
    last = len(actual.labels) - 1
    assert actual.locate(last) == f"{tmp_path / layout.folder / layout.files[split][-1]}, image 3"
    assert len({actual.key(index) for index in range(last + 1)}) == last + 1


@pytest.mark.parametrize(("layout", "in_bytes"), [(TEN, TEN_BYTES), (HUNDRED, HUNDRED_BYTES)])
def test_the_form_in_bytes_holds_the_same(layout: Any, in_bytes: Any, tmp_path: Path) -> None:
    for item in (layout, in_bytes):
        write(tmp_path / item.folder, item)
    for split in ("train", "val"):
        one, other = (CifarImages(tmp_path / item.folder / item.folder, item, split) for item in (layout, in_bytes))
        assert (list(one.labels), one.classes) == (list(other.labels), other.classes)
        assert all(np.array_equal(one.pixels(index), other.pixels(index)) for index in range(len(one.labels)))
        reloaded = pickle.loads(pickle.dumps(other))  # as a process that decodes gets it
        assert np.array_equal(reloaded.pixels(1), one.pixels(1))


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    write(tmp_path, TEN)
    file = tmp_path / TEN.folder / "data_batch_2"
    file.write_bytes(pickle.dumps({"data": Harmful(tmp_path / "run"), "labels": []}))
    with pytest.raises(DataError, match=r"data_batch_2: not a file of CIFAR \(it names .*, which no array needs\)"):
        CifarImages(tmp_path / TEN.folder, TEN, "train")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data_batch_1", b"", "it ends early|Ran out of input"),
        ("data_batch_1", b"\x80\x02}(U", "not a file of CIFAR"),
        ("data_batch_1", b"PK\x03\x04 an archive", "not a file of CIFAR"),
        ("data_batch_1", pickled([1]), "no table"),
        ("data_batch_1", pickled({"labels": [1]}), "no table of 3072 bytes an image under 'data'"),
        ("data_batch_1", pickled({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 1]}), "no table of 3072 bytes"),
        ("data_batch_1", pickled({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}), "no class number for each"),
        ("data_batch_1", pickled({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}), "is not one of 10"),
        ("batches.meta", pickled({"label_names": [1]}), "no names of classes under 'label_names'"),
    ],
)
def test_a_damaged_file_is_named(file: str, content: bytes, message: str, tmp_path: Path) -> None:
    write(tmp_path, TEN)
    (tmp_path / TEN.folder / file).write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        CifarImages(tmp_path / TEN.folder, TEN, "train")
    assert str(raised.value).startswith(str(tmp_path / TEN.folder / file))


def test_missing_and_shortened_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a", TEN)
    (tmp_path / "a" / TEN.folder / "data_batch_3").unlink()
    with pytest.raises(DataError, match=r"data_batch_3: not a file of CIFAR \(No such file"):
        CifarImages(tmp_path / "a" / TEN.folder, TEN, "train")
    write(tmp_path / "b", TEN_BYTES)
    file = tmp_path / "b" / TEN_BYTES.folder / "data_batch_1.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_1.bin: .*its 12291 bytes are not a whole number of images"):
        CifarImages(file.parent, TEN_BYTES, "train")


def test_a_folder_with_both_asks_which(tmp_path: Path) -> None:
    write(tmp_path, TEN)
    write(tmp_path, HUNDRED)
    with pytest.raises(DataError, match="holds CIFAR-10 and CIFAR-100; name one: --data .*cifar-10-batches-py"):
        open_class_data(ImageSource(str(tmp_path)), None)
    for name, layout in (("cifar10", TEN), ("cifar100", HUNDRED)):
        assert config_of(name, tmp_path).data.source == str(tmp_path / layout.folder)


def config_of(name: str, source: object = "x", preset: Any = None, **settings: Any) -> PretrainConfig:
    plain = resolve(name, preset, None, None, merge({"data": {"source": str(source)}}, settings), {})
    return finalize(build(PretrainConfig, plain, "test"))


def test_the_config_is_the_studys_and_the_preset_a_short_one() -> None:
    for name in ("cifar10", "cifar100", "folder"):
        config = config_of(name)
        assert (config.backbone.arch, config.backbone.image_size, config.auto_augment) == ("S/16", 224, "cifar10")
        assert (config.epochs, config.batch_size, config.lr, config.loss) == (1200, 128, 1e-3, "softmax")
        assert resolve_steps(config, 50_000).schedule.steps == 468_750
        short = config_of(name, preset="short")
        assert (short.backbone.arch, short.backbone.image_size, short.epochs) == ("S/4", 32, 100)
        assert (resolve_steps(short, 49_500).schedule.steps, short.schedule.warmup) == (38_672, 1934)
        assert config_of(name, preset="short", backbone={"arch": "Ti/4"}).backbone.arch == "Ti/4"
    hub = config_of("cifar100", "hf:uoft-cs/cifar100")
    assert hub.data.label_column == "fine_label"
    assert config_of("cifar100", "hf:a/b", data={"label_column": "coarse_label"}).data.label_column == "coarse_label"
    assert config_of("cifar10", "hf:uoft-cs/cifar10").data.label_column is None


def test_the_update_equals_torchs_adam_and_cosine() -> None:
    """As train.py builds them: all parameters decay in the gradient; lr from 1e-3 to 1e-5 along a cosine."""
    config = config_of("cifar10")
    schedule = config.schedule.model_copy(update={"steps": 8})
    start = [torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(0.5, 1, 3)]
    actual, others = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    optimizer = build_optimizer([("fc.weight", actual[0]), ("norm.weight", actual[1])], config.optim, config.peak_lr)
    adam = torch.optim.Adam(others, lr=1e-3, betas=(0.9, 0.999), weight_decay=5e-5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=8, eta_min=1e-5)
    for step in range(8):
        set_lr(optimizer, config.peak_lr * lr_factor(schedule, step))
        for parameters in (actual, others):
            for number, parameter in enumerate(parameters):
                parameter.grad = (
                    torch.sin(step + number + torch.arange(float(parameter.numel()))).view_as(parameter) * 1e-4
                )
        for update in (optimizer, adam):
            update.step()
        cosine.step()
    for one, other in zip(actual, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-6)
    with pytest.raises(ValueError, match="decay_unit .gradient.: belongs to torch's optimizers"):
        Optim(decay_unit="gradient", state_dtype="bfloat16")


def test_decay_in_the_gradient_moves_momentum_as_torchs_sgd() -> None:
    weight, other = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optim = Optim(name="momentum", weight_decay=0.1, decay_unit="gradient")
    actual = build_optimizer([("fc.weight", weight)], optim, 0.1)
    sgd = torch.optim.SGD([other], lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        weight.grad, other.grad = torch.ones(2, 2), torch.ones(2, 2)
        actual.step()
        sgd.step()
    torch.testing.assert_close(weight, other)


def test_images_match_torchvisions_augmentation(tmp_path: Path) -> None:
    config = config_of("cifar10", write(tmp_path, TEN), batch_size=8, backbone={"arch": "mu/8", "image_size": 48})
    data = open_data(config)
    model = training.load_network(config, 10)
    single = World(0, 1, torch.device("cpu"))
    (batch,) = itertools.islice(training_batches(config, model, data, single, workers=0)(2), 1)
    make = transforms.Compose(
        [
            RandomResizedCropAndInterpolation(48, interpolation="bilinear"),
            transforms.RandomHorizontalFlip(),
            transforms.AutoAugment(
                transforms.AutoAugmentPolicy.CIFAR10, transforms.InterpolationMode.BILINEAR, [128, 128, 128]
            ),
            transforms.PILToTensor(),
        ]
    )
    for place, row in enumerate(rows_of_step(len(data.train.labels), 8, 0, 2).tolist()):
        seed = fold(0, POLICY, 2, place)
        random.seed(seed)
        torch.manual_seed(seed)
        assert torch.equal(batch["image"][place], make(Image.fromarray(data.train.pixels(row)))), place
        assert batch["label"][place] == data.train.labels[row]


TINY = ["--arch", "mu/8", "--image-size", "32", "-b", "8", "--steps", "2", "-j", "0", "--device", "cpu", "-q", "--json"]


def test_the_commands_find_the_data_and_count_its_classes(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["cifar10"], ["cifar100"], ["folder"]):
        result = run_dpn("pretrain", *words, *TINY)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert "download https://www.cs.toronto.edu" in line or words == ["folder"], line
        assert "--data" in line
    write(tmp_path, TEN)
    write(tmp_path / "data", HUNDRED, each=60)
    ten, hundred = (json.loads(run_dpn("pretrain", name, *TINY).stdout) for name in ("cifar10", "cifar100"))
    assert (ten["classes"], ten["images"]["val"], hundred["classes"]) == (10, 4, 100)
    assert (tmp_path / "runs" / "pretrain_cifar-10-batches-py" / "mu-8-dpn" / "result.json").is_file()
    own = run_dpn("pretrain", "folder", "--preset", "short", "--data", str(photos), "--val-fraction", "0.2", *TINY)
    assert json.loads(own.stdout)["classes"] == 3, own.output
