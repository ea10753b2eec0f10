"""The pre-training config: Appendix C by architecture, presets, and the stages of a sweep. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dpn_cli.arch import Norm, Placement, Posemb, Stem, did_you_mean, parse_arch
from dpn_cli.config.launch import check_start
from dpn_cli.config.load import (
    Logger,
    Plain,
    build,
    discard_message,
    find_last_value,
    from_flags,
    merge,
    merge_layers,
    read_config,
)
from dpn_cli.config.network import (
    ARCH,
    IMAGE_SIZE,
    NORM,
    PLACEMENT,
    STEM,
)
from dpn_cli.config.option import MODEL, TRAIN, flag
from dpn_cli.config.paths import DEMO_OBJECTS, DEMOS, UNPACKED, find_data
from dpn_cli.config.provenance import flatten_keys
from dpn_cli.config.schema import (
    DataLocation,
    Pixels,
    Positive,
    Section,
    split_list,
)
from dpn_cli.errors import DpnError
from tasks.classify.appendix_c import APPENDIX_C, LEVELS, SHORT, SHORT_CIFAR, augmentation_keys, regularization_keys
from tasks.classify.config import SupervisedConfig, SupervisedNetwork
from tasks.classify.default_config import choose_config

# The shipped configs by the name that a command gives them, and the data set of each where it has another name.
CONFIGS = {
    "imagenet": "pretrain",
    "deit": "pretrain_deit",
    "s16plus": "pretrain_s16plus",
    "imagenet21k": "pretrain_imagenet21k",
    "jft": "pretrain_jft",
    "sun397": "pretrain_sun397",
    "cifar10": "pretrain_cifar",
    "cifar100": "pretrain_cifar",
    "folder": "pretrain_cifar",
}
DATA = {"deit": "imagenet", "s16plus": "imagenet"}
# The configs that Appendix C's line of the architecture belongs to.
BY_ARCH = ("pretrain", "pretrain_imagenet21k", "pretrain_sun397")
# Config keys that --preset short changes.
SHORTER = {"imagenet": SHORT, "cifar10": SHORT_CIFAR, "cifar100": SHORT_CIFAR, "folder": SHORT_CIFAR}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}
# Configs whose finished networks are probed on ImageNet.
PROBED = ("imagenet21k", "jft")
LEAST_MINIVAL = 0.01


class Stage(Section):
    """One stage of a sweep: every combination of the grid's values is trained, the best one is carried on."""

    epochs: Annotated[float, Field(gt=0)]
    grid: dict[str, Annotated[tuple[float, ...], Field(min_length=1)]] = Field(default_factory=dict)


class NewNetwork(SupervisedNetwork):
    """A network from scratch, described by its config alone."""

    arch: Annotated[str | None, ARCH.replace(unset="needed")] = None
    stem: Annotated[Stem | None, STEM.replace(unset="dpn")] = None
    norm: Annotated[Norm | None, NORM.replace(unset="ln")] = None
    placement: Annotated[Placement | None, PLACEMENT.replace(unset="pre,pre")] = None
    checkpoint: str | None = None
    image_size: Annotated[Pixels | None, IMAGE_SIZE.replace(unset="224")] = None
    posemb: Posemb | None = None
    dropout: Annotated[float, Field(ge=0, lt=1), flag("--dropout", help="Dropout rate.", panel=MODEL)] = 0.0


class PretrainConfig(SupervisedConfig):
    """Config of ``dpn pretrain``."""

    backbone: NewNetwork = NewNetwork()
    freeze: Annotated[tuple[str, ...], BeforeValidator(split_list)] = ()
    fewshot: Annotated[
        Positive | None,
        flag(
            "--eval-fewshot",
            help="Images per class of a linear probe at every evaluation; 25 in the paper.",
            panel=TRAIN,
        ),
    ] = None
    fewshot_data: Annotated[
        DataLocation | None,
        flag(
            "--fewshot-data",
            help="Labelled images, as --data takes them, for a 25-shot probe of the finished network.",
            panel=TRAIN,
            unset="none; imagenet21k and jft: $DPN_DATA_DIR/imagenet, ./imagenet",
        ),
    ] = None
    stages: tuple[Stage, ...] = ()

    @model_validator(mode="after")
    def _shifts_fit(self) -> PretrainConfig:
        if self.stages and self.shift.names:
            raise ValueError(
                "shift.names: stages train networks that are not kept; score the chosen one with dpn eval RUN --shifts"
            )
        return self

    def in_paper(self) -> Plain | None:
        """Return Appendix C's line of the architecture; None without one, and no line for other tables' configs."""
        if "App. C" not in self.about.table:
            return {}
        row = APPENDIX_C.get(self.backbone.arch or "")
        return dict(flatten_keys(regularization_keys(row))) if row else None

    @model_validator(mode="after")
    def _enough_minival(self) -> PretrainConfig:
        share = self.data.minival
        if share is not None and 0 < share < LEAST_MINIVAL:
            raise ValueError(
                f"data.minival ({share:g}) would leave fewer than 1 % of the images for minival: use at least "
                f"{LEAST_MINIVAL:g}, or 0 to train on every image and watch nothing"
            )
        return self


def resolve(
    name: str | None,
    preset: Literal["short"] | None,
    level: str | None,
    config_file: str | None,
    flags: Mapping[str, Any],
    settings: Mapping[str, Any],
    log: Logger = discard_message,
) -> Plain:
    """Merge the layers of the config `name`; without data it becomes the demo's. Changes by a duration are logged.

    A shipped config that `config_file` names is used. Without a name or a preset, images that are not
    ImageNet's get a config of their own, with a message. Later layers win: shipped config, Appendix C's line of
    the architecture, ``--config``, preset, augmentation level, flags and settings. Raises `DpnError` for an
    architecture without a line, unless the level is given, and for what a sweep's stages decide.
    """
    shipped_name = next((config_name for config_name, shipped in CONFIGS.items() if shipped == config_file), None)
    name = shipped_name if shipped_name and name in (None, DATA.get(shipped_name, shipped_name)) else name
    requested_name, name = name or preset, name or "imagenet"
    if name not in CONFIGS:
        raise DpnError(f"--base-config {name!r}: choose one of {', '.join(CONFIGS)}{did_you_mean(name, CONFIGS)}")
    file, command = read_config(config_file) if config_file else {}, merge(flags, settings)
    explicit_source = find_last_value("data", "source", file, command)
    arch = find_last_value("backbone", "arch", file, command)
    source = _part_of(str(explicit_source), name) if explicit_source else find_data(DATA.get(name, name))
    demo = source in DEMOS
    if demo and name == "sun397":
        raise DpnError(
            f"--data: {name} needs train/CLASS, val/CLASS and test/CLASS; name the folder (there is no demo)"
        )
    if demo and not explicit_source and (arch or name != "imagenet"):
        raise DpnError(f"--data: no images to train {arch or 'a network'} on: {_describe_data_location(name)}")
    if preset and (demo or name not in SHORTER):
        data_name = "the demo" if demo else name
        raise DpnError(f"--preset {preset}: shortens the configs of {', '.join(SHORTER)}, not that of {data_name}")
    shipped = "pretrain_demo" if demo and name == "imagenet" else CONFIGS[name]
    if not demo and not requested_name:
        shipped = choose_config(str(source), config_file, shipped, "pretrain_own", log)
    is_explicit = level is not None or {"mixup", "randaugment"} <= merge(file, command).keys()
    row = _row_of(arch, is_explicit=is_explicit, searched=name == "sun397") if shipped in BY_ARCH else {}
    plain = merge_layers(
        merge(read_config(shipped), row),
        merge(file, SHORTER[name] if preset else {}, augmentation_keys(_level(level)) if level else {}),
        command,
        "pretrain",
        log,
    )
    if name in PROBED and not plain.get("fewshot_data"):
        imagenet = find_data("imagenet")
        if imagenet != "demo":
            plain = merge(plain, {"fewshot_data": imagenet})
        else:
            log("no ImageNet for the few-shot probe at the end; name it with --fewshot-data")
    if plain.get("stages"):
        _check_searched(plain, command)
    data = {"source": DEMO_OBJECTS if demo else source}
    if name == "cifar100" and str(source).startswith("hf:"):  # the hub's copy has coarse labels, too
        data["label_column"] = find_last_value("data", "label_column", file, command) or "fine_label"
    return merge(plain, {"data": data})


def _part_of(location: str, name: str) -> str:
    """Return the folder of the data set `name` inside a folder of several, as torchvision unpacks it."""
    folders = (Path(location) / folder for folder in UNPACKED.get(name, ()))
    return next((str(folder) for folder in folders if folder.is_dir()), location)


def _describe_data_location(name: str) -> str:
    """Describe the default locations of a config's data, and a way to get them."""
    if name == "folder":
        return "name a folder of classes with --data"
    folder = DATA.get(name, name)
    search_paths = f"neither $DPN_DATA_DIR/{folder} nor ./{folder}"
    if name in ARCHIVES:
        return (
            f"{search_paths} nor ./{UNPACKED[name][0]} is there; download "
            f"https://www.cs.toronto.edu/~kriz/{ARCHIVES[name]} "
            f"and unpack it here, or name a copy with --data (hf:uoft-cs/{name} is the hub's)"
        )
    demo_hint = ", or leave --arch out to train the small demo tower on built-in scenes" if name == "imagenet" else ""
    return f"{search_paths} is there; name them with --data{demo_hint}"


def _check_searched(plain: Plain, command: Plain) -> None:
    """Raise `DpnError` for what a command sets and the stages, or the splits of a sweep, decide."""
    grids = [stage.get("grid", {}) for stage in plain["stages"] if isinstance(stage, dict)]
    searched_keys = {"epochs", "schedule.steps", "data.val_fraction", "data.minival", "data.val_source"}.union(*grids)
    for key, value in flatten_keys(command):
        if key in searched_keys and value is not None:
            raise DpnError(
                f"{key}={value}: a sweep's stages decide it; change them (--set 'stages=[{{epochs: 5, grid: {{...}}}}, "
                "...]', --config), or train once with the config of imagenet"
            )


def _level(level: str) -> Any:
    if level not in LEVELS:
        raise DpnError(f"--augment {level!r}: choose one of {', '.join(LEVELS)}{did_you_mean(level, LEVELS)}")
    return level


def _row_of(arch: object, *, is_explicit: bool, searched: bool) -> Plain:
    """Return the config keys of Appendix C's line for `arch`; for a search, only keys outside its grids.

    Raises `DpnError` for an architecture without a line, unless the augmentation `is_explicit`.
    """
    if not isinstance(arch, str):
        raise DpnError(f"--arch is needed: {', '.join(APPENDIX_C)} have a line in Appendix C; any SIZE/PATCH works")
    parse_arch(arch)
    row = APPENDIX_C.get(arch)
    if searched:
        return {"backbone": {"pre_logits": row.pre_logits if row else True}}
    if row:
        return regularization_keys(row)
    if not is_explicit:
        raise DpnError(
            f"--arch {arch}: Appendix C has lines for {', '.join(APPENDIX_C)} only; say how strongly to augment it "
            f"with --augment LEVEL ({', '.join(LEVELS)}), and --dropout and --drop-path where you want them"
        )
    return {"backbone": {"pre_logits": True}}


def finalize(config: PretrainConfig) -> PretrainConfig:
    """Check what needs more than one key. Raises `DpnError`."""
    checkpoint = config.backbone.checkpoint or "none"
    stem = config.backbone.stem or ("dpn" if checkpoint == "none" else None)
    backbone = config.backbone.model_copy(update={"checkpoint": checkpoint, "stem": stem})
    for stage in config.stages:
        names = [name for name, _ in trials(config, stage)]
        if len(set(names)) != len(names):
            raise DpnError(f"stages: a grid of {stage.epochs:g} epochs names a run twice ({', '.join(names)})")
        if stage is config.stages[-1] and len(names) != 1:
            raise DpnError(
                f"stages: the last one is scored on the test split, so it is one training, not {len(names)}: empty its "
                "grid"
            )
    return config.model_copy(update={"backbone": check_start(backbone)})


def trials(config: PretrainConfig, stage: Stage) -> Iterator[tuple[str, PretrainConfig]]:
    """Yield the runs of a stage: name and config, in the order of the grid.

    Raises `DpnError` for a grid key that is not a config key, and for a value that the key does not allow.
    """
    for values in itertools.product(*stage.grid.values()):
        settings = dict(zip(stage.grid, values, strict=True))
        name = ",".join(f"{key.rpartition('.')[2]}={value:.12g}" for key, value in settings.items())
        plain = merge(config.model_dump(), {"stages": (), "epochs": stage.epochs}, from_flags(settings))
        yield name or "only", build(PretrainConfig, plain, f"stage of {stage.epochs:g} epochs, {name}")


def list_trials(config: PretrainConfig) -> list[PretrainConfig]:
    """Return all trainings of a config; those after a sweep's first stage with the grid's values only."""
    return [trial for stage in config.stages for _, trial in trials(config, stage)] or [config]
