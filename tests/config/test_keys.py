"""No config key is accepted and ignored: a training reads every key of its schema, or the schema refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ExifTags, Image
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import Tensor

from dpn_cli.config.load import from_flags, merge
from dpn_cli.config.network import BackboneConfig
from dpn_cli.config.schema import (
    Schedule,
    Section,
)
from dpn_cli.engine.optim import lr_factor
from dpn_cli.errors import DpnError
from dpn_cli.weights import backbone
from support.images import write_class_folders
from support.training import CLASSIFIERS, TASKS
from tasks.classify.distill.config import DistillConfig
from tasks.classify.highres_config import HighresConfig
from tasks.classify.pretrain_config import PretrainConfig
from tasks.lit.config import LitConfig
from tasks.segment.config import SegmentConfig
from tasks.vtab.config import VtabConfig

# What describes a config and changes nothing; the keys of what one value of another key needs are read below.
DESCRIPTION = ("about.",)


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """The dotted keys of a schema, each with the class that holds it and its name there."""
    for name, field in schema.model_fields.items():
        inside = field.annotation
        if isinstance(inside, type) and issubclass(inside, BaseModel):
            yield from _keys(inside, f"{prefix}{name}.")
        else:
            yield prefix + name, schema, name


@contextmanager
def _reads() -> Iterator[set[tuple[type, str]]]:
    """Collect which keys of which sections the program reads."""
    observed: set[tuple[type, str]] = set()
    original = Section.__getattribute__

    def noting(section: Section, name: str) -> Any:
        if name in type(section).__dict__.get("__pydantic_fields__", {}):
            observed.add((type(section), name))
        return original(section, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", noting, raising=False)
        yield observed


SHIFTED = {"shift.names": ("gain",), "shift.severities": (1,)}
# What the second training of a task has, to read the keys of what the first one does not do.
SECOND: dict[str, dict[str, Any]] = {
    "lit": {"cache.use": False, "loss": "siglip"},
    "highres": {"mixing": "timm", "cutmix": 1.0, **SHIFTED},
    "pretrain": {"mixing": "timm", "cutmix": 1.0, **SHIFTED},
    "segment": SHIFTED,
}
SCHEMAS: dict[str, type[Section]] = {
    "vtab": VtabConfig,
    "highres": HighresConfig,
    "pretrain": PretrainConfig,
    "lit": LitConfig,
    "segment": SegmentConfig,
    "distill": DistillConfig,
}
# Keys that a schema has and refuses, with a value that is not their default.
REFUSED: dict[str, dict[str, Any]] = {
    "lit": {"backbone.drop_path": 0.1, "backbone.grad_checkpointing": True, "optim.layer_decay": 0.9},
    "segment": {"backbone.pre_logits": True, "optim.layer_decay": 0.9},
    "distill": {
        "backbone.pool": "gap",
        "backbone.pre_logits": True,
        "backbone.registers": 1,
        "backbone.distillation_token": True,
        "backbone.layer_scale": 0.1,
        "backbone.swiglu": True,
    },
}


@pytest.mark.parametrize("task", TASKS)
def test_a_training_reads_every_key(task: str, digits: Path, photos: Path, tmp_path: Path) -> None:
    runs = [
        TASKS[task](digits, photos, tmp_path / name, **{"optim.name": name, **extra})
        for name, extra in (("adam", {}), ("momentum", SECOND.get(task, {})))
    ]
    with _reads() as seen:
        for run in runs:
            run()
    assert any(issubclass(section, BackboneConfig) for section, _ in seen)
    # A network's keys are arguments of load_backbone, all of them (see backbone_of), but for a student's.
    elsewhere = (*DESCRIPTION, "schedule.", *(("backbone.",) if task != "distill" else ()))
    missing = []
    for key, section, name in _keys(SCHEMAS[task]):
        known = key.startswith(elsewhere) or key in REFUSED.get(task, {})
        if not known and not any(issubclass(section, item) and name == field for item, field in seen):
            missing.append(key)
    assert sorted(missing) == sorted(UNREAD.get(task, ())), missing


# Keys that these trainings do not read: columns of data sets from the hub, what is done when a cell fails, and what
# makes several trainings of one. Other tests set them.
SEVERAL = ("compare", "seeds")
# That of data in shards, which these trainings do not have.
SHARDED = "data.open_shards"
UNREAD = {
    "vtab": ("data.image_column", "data.label_column", "allow_failed"),
    "highres": (*SEVERAL, SHARDED),
    "pretrain": (*SEVERAL, SHARDED),
    "distill": (*SEVERAL, SHARDED, "shift.seed", "shift.severities"),
    "lit": (*SEVERAL, "shift.seed", "shift.severities"),
    "segment": ("compare", "data.image_column", "data.mask_column", "seeds"),
}


@pytest.mark.parametrize("task", REFUSED)
def test_a_key_without_effect_is_refused(task: str, digits: Path, photos: Path, tmp_path: Path) -> None:
    for number, (key, value) in enumerate(REFUSED[task].items()):
        with pytest.raises(DpnError, match=rf"{key}: .*; leave it at"):
            TASKS[task](digits, photos, tmp_path / str(number), **{key: value})


def test_every_key_of_a_network_is_an_argument_of_its_loader() -> None:
    import inspect

    arguments = set(inspect.signature(backbone.load_backbone).parameters)
    for schema in (schema for task, schema in SCHEMAS.items() if task != "distill"):
        section: Any = schema.model_fields["backbone"].annotation
        assert set(section.model_fields) <= arguments


def test_every_key_of_a_schedule_moves_the_learning_rate() -> None:
    default: dict[str, Any] = {"steps": 20, "warmup": 2}
    changes: list[tuple[str, Any, str]] = [
        ("steps", 30, "cosine"),
        ("warmup", 4, "cosine"),
        ("decay", "linear", "cosine"),
        ("decay_from", 8, "cosine"),
        ("start", 0.5, "cosine"),
        ("end", 0.5, "linear"),
        ("power", 2.0, "polynomial"),
        ("timescale", 5, "rsqrt"),
        ("cooldown", 5, "cosine"),
        ("stairs", ((5, 0.5),), "stair"),
    ]
    assert {key for key, _, _ in changes} == set(Schedule.model_fields)
    for key, value, decay in changes:
        curves = [
            [lr_factor(Schedule(**{**default, "decay": decay, **more}), step) for step in range(20)]
            for more in ({}, {key: value})
        ]
        assert curves[0] != curves[1], key


# Of the keys that pretrain and finetune highres share: another value, and what both trainings have beside it.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "data.source": ("OTHER", {}),
    "data.val_fraction": (0.5, {}),
    "data.minival": (0.5, {}),
    "data.decode": ("pillow", {}),
    "data.exif": (True, {}),  # each class has an image that is stored turned
    "data.max_pixels": (1999, {}),  # JPEGs of 2000 are read at half their size
    "data.crop": ("whole", {}),
    "data.crop_area": (0.9, {}),
    "data.flip": (False, {}),
    "data.jitter": (0.5, {}),
    "data.noise": (20.0, {}),
    "lr": (0.1, {}),
    "seed": (1, {}),
    "epochs": (0.1, {}),
    "batch_size": (8, {}),
    "lr_batch": (1, {}),
    "loss": ("sigmoid", {}),
    "head_bias": (-3.0, {}),
    "label_smoothing": (0.1, {}),
    "randaugment.layers": (2, {"randaugment.magnitude": 10}),
    "randaugment.magnitude": (20, {"randaugment.layers": 2}),
    "auto_augment": ("cifar10", {}),
    "erase": (1.0, {}),
    "repeats": (2, {}),
    "mixup": (0.5, {}),
    "mixing": ("timm", {"mixup": 0.5}),
    "cutmix": (1.0, {"mixing": "timm", "mixup": 0.5}),
    "ema": (0.5, {}),
    "freeze": (("stem",), {}),
    "backbone.arch": ("mu/16", {}),
    "backbone.stem": ("none", {}),
    "backbone.norm": ("bn", {}),
    "backbone.placement": ("post,post", {}),
    "backbone.norm_options": ({"eps": 0.1}, {}),
    "backbone.image_size": (24, {}),
    "backbone.pool": ("tok", {}),
    "backbone.pre_logits": (True, {}),
    "backbone.drop_path": (0.9, {"backbone.arch": "nano/8"}),
    "backbone.registers": (2, {}),
    "backbone.distillation_token": (True, {"backbone.pool": "tok"}),
    "backbone.layer_scale": (0.5, {}),
    "backbone.swiglu": (True, {}),
    "backbone.dropout": (0.5, {}),
    "backbone.drop_path_rescale": (
        False,
        {"backbone.arch": "nano/8", "backbone.drop_path": 0.5, "backbone.drop_path_rescale": True},
    ),
    "backbone.posemb": ("sincos2d", {}),
    "optim.name": ("momentum", {}),
    "optim.momentum": (0.5, {"optim.name": "momentum"}),
    "optim.betas": ((0.5, 0.9), {}),
    "optim.eps": (0.1, {}),
    "optim.state_dtype": ("bfloat16", {}),
    "optim.weight_decay": (10.0, {}),
    "optim.decay_unit": ("gradient", {"optim.weight_decay": 1.0}),
    "optim.decay_mask": ("all", {"optim.weight_decay": 10.0}),
    "optim.clip_norm": (1e-6, {}),
    "optim.layer_decay": (0.1, {}),
}
# Those that change nothing in the weights of two steps, and what they do.
WITHOUT_EFFECT = {
    **dict.fromkeys(("compare", "seeds", "stages"), "make several trainings of one"),
    **dict.fromkeys(("data.image_column", "data.label_column"), "columns of data sets from the hub"),
    **dict.fromkeys(("data.val_source", "data.eval_resize", "eval_batch_size"), "what is scored, and how"),
    **dict.fromkeys(("shift.names", "shift.severities", "shift.seed"), "what is scored under shifts"),
    **dict.fromkeys(("evaluate_every", "fewshot", "fewshot_data"), "when it is scored, and a probe"),
    **dict.fromkeys(("data.shuffle", SHARDED), "data in shards"),
    "select": "which evaluated step is kept; the last of two steps is the best one here",
    "data.skip_bad_images": "these images can be read",
    "backbone.checkpoint": "other weights are no change of a training from scratch",
    "backbone.grad_checkpointing": "saves memory",
    "log.layer_norms": "what the log holds",
}


KEYS_OF = {task: {key for key, _, _ in _keys(SCHEMAS[task])} for task in CLASSIFIERS}
TINY: dict[str, Any] = {
    "backbone": {"image_size": 16, "arch": "mu/8", "pool": "gap", "pre_logits": False, "dropout": 0, "drop_path": 0},
    "data": {"val_fraction": 0.25, "minival": 0, "crop": "inception", "flip": True},
    "randaugment": {"layers": 0, "magnitude": 0},
    "schedule": {"steps": 2, "warmup": 0},
    "mixup": 0,
    "batch_size": 4,
    "lr": 0.01,
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], dict[str, Tensor]]:
    """Return the weights after two steps with some settings; the same training is done once."""
    root = tmp_path_factory.mktemp("steps")
    sources = {
        name: str(write_class_folders(root / name, classes=count, each=4))
        for name, count in (("photos", 3), ("OTHER", 2))
    }
    for folder in (root / "photos").iterdir():
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        with Image.open(folder / "000.jpg") as image:
            image.save(folder / "000.jpg", quality=95, exif=exif)
    done: dict[str, dict[str, Tensor]] = {}

    def weights(task: str, settings: dict[str, Any]) -> dict[str, Tensor]:
        name = f"{task} {sorted(settings.items())}"
        if name not in done:
            changed = from_flags({key: settings[key] for key in settings if key not in ("data.source", "epochs")})
            build, train = CLASSIFIERS[task]
            config = build(sources[settings.get("data.source", "photos")], **merge(TINY, changed))
            config = config.model_copy(update={"epochs": settings.get("epochs")})  # the test's own are in steps
            path = root / f"run{len(done)}"
            train(config, path)
            done[name] = load_file(path / "weights.safetensors")
        return done[name]

    return weights


@pytest.mark.parametrize(
    ("task", "key"), [(task, key) for task in CLASSIFIERS for key in CHANGES if key in KEYS_OF[task]]
)
def test_a_changed_key_changes_the_weights_after_two_steps(
    task: str, key: str, two_steps: Callable[[str, dict[str, Any]], dict[str, Tensor]]
) -> None:
    value, beside = CHANGES[key]
    initial, final = two_steps(task, beside), two_steps(task, {**beside, key: value})
    equal = initial.keys() == final.keys() and all(torch.equal(initial[name], final[name]) for name in initial)
    assert not equal


@pytest.mark.parametrize("task", CLASSIFIERS)
def test_every_key_is_changed_or_has_a_reason_not_to_be(task: str) -> None:
    keys = {key for key in KEYS_OF[task] if not key.startswith((*DESCRIPTION, "runtime.", "schedule."))}
    assert keys <= CHANGES.keys() | WITHOUT_EFFECT.keys()
    assert not CHANGES.keys() & WITHOUT_EFFECT.keys()
