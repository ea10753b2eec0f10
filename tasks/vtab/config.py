"""The schema of the VTAB config, and the defaults for data and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from dpn_cli.arch import did_you_mean, parse_arch
from dpn_cli.config.launch import SCRATCH_PIXELS, check_start, find_start
from dpn_cli.config.load import Logger, Plain, discard_message, find_last_value, merge, merge_layers, read_config
from dpn_cli.config.network import IMAGE_SIZE, BackboneConfig
from dpn_cli.config.option import DATA, TRAIN, flag
from dpn_cli.config.paths import find_data
from dpn_cli.config.schema import (
    BATCH_SIZE,
    DATA_SOURCE,
    DataLocation,
    ImageReading,
    Lr,
    Optim,
    Pixels,
    Positive,
    Runtime,
    Schedule,
    Seed,
    Side,
    SkipBadImages,
    split_list,
)
from dpn_cli.sweep.grid import SEED_COUNT, SEEDS, CompareConfig, check_distinct, parse_seeds
from tasks.vtab.tasks import DEMO_TASKS, TASKS, choose_tasks, task_names

# Pixels per side of the built-in scenes (dpn_cli.data.sources.synthetic.SCENE_SIZE, which imports too much for this
# module).
DEMO_PIXELS = 64


# How a task's training images are augmented: random crops, mirroring, both or ([]) neither.
Augment = Annotated[
    tuple[Literal["crop", "flip"], ...],
    BeforeValidator(split_list),
    AfterValidator(lambda value: tuple(sorted(set(value)))),
]


def _complete_tasks(incomplete: str) -> list[str]:
    completed, _, word = incomplete.rpartition(",")
    return [f"{completed},{name}".lstrip(",") for name in task_names() if name.startswith(word)]


TASKS_FLAG = flag(
    "--tasks",
    help="all, natural, specialized, structured, or task names, comma separated.",
    panel=DATA,
    complete=_complete_tasks,
    brief="all, natural, specialized, structured, or names.",
)


class VtabData(ImageReading):
    """Location of the tasks' images, and their decoding."""

    source: Annotated[
        DataLocation | None,
        DATA_SOURCE.replace(
            help="Folder with one folder per task (svhn/train800.txt, …), hf:OWNER/NAME, or demo.",
            unset="$DPN_DATA_DIR/vtab-1k, ./vtab-1k, else demo",
        ),
    ] = None
    tasks: Annotated[
        tuple[str, ...],
        BeforeValidator(split_list),
        Field(min_length=1),
        TASKS_FLAG,
    ] = ("all",)
    resize: Side | None = None
    # Holds every task after validation.
    augment: Annotated[dict[str, Augment], Field(validate_default=True)] = Field(default_factory=dict)
    image_column: str | None = None
    label_column: str | None = None
    skip_bad_images: SkipBadImages = False

    @field_validator("augment")
    @classmethod
    def _every_task(cls, augment: dict[str, Augment], info: ValidationInfo) -> dict[str, Augment]:
        """Add the tasks that are not named; drop tasks with usual values that the data do not have."""
        data_tasks, other_tasks = (TASKS, DEMO_TASKS) if info.data.get("source") != "demo" else (DEMO_TASKS, TASKS)
        defaults, other_defaults = ({task.name: task.augment for task in table} for table in (data_tasks, other_tasks))
        for name, value in augment.items():
            if name not in defaults and other_defaults.get(name) != value:
                raise ValueError(
                    f"{name}: not a task of these data; use {', '.join(defaults)}{did_you_mean(name, defaults)}"
                )
        return {name: augment.get(name, value) for name, value in defaults.items()}


class VtabNetwork(BackboneConfig):
    """The network that is trained on every task."""

    image_size: Annotated[
        Pixels | None, IMAGE_SIZE.replace(unset="the checkpoint's; from scratch 224, the demo's about 64")
    ] = None


class VtabConfig(CompareConfig):
    """The config of ``dpn finetune vtab``."""

    backbone: VtabNetwork = VtabNetwork()
    data: VtabData = VtabData()
    protocol: Annotated[
        Literal["paper", "vtab"],
        flag(
            "--protocol",
            help="paper: score the runs on train800; vtab: train again on train800val200.",
            panel=TRAIN,
        ),
    ] = "paper"
    lrs: Annotated[
        tuple[Lr, ...],
        BeforeValidator(split_list),
        Field(min_length=1),
        flag(
            "--lrs",
            help="Peak learning rates to choose from, comma separated.",
            panel=TRAIN,
            brief="Peak learning rates to choose from.",
        ),
    ]
    seeds: Annotated[
        tuple[Seed, ...],
        BeforeValidator(parse_seeds),
        Field(min_length=1, description=SEED_COUNT),
        SEEDS,
    ] = (0, 1, 2)
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    batch_size: Annotated[Positive, BATCH_SIZE]
    eval_batch_size: Positive = 250
    optim: Optim = Optim()
    schedule: Schedule
    allow_failed: bool = False
    keep_weights: Literal["none", "chosen", "all"] = "none"
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _no_repeats(self) -> VtabConfig:
        for values in (self.lrs, self.seeds):
            check_distinct(values)
        return self

    @property
    def demo(self) -> bool:
        """Return whether the data are the built-in scenes."""
        return self.data.source == "demo"


def resolve(
    config_file: str | None, flags: Mapping[str, Any], settings: Mapping[str, Any], log: Logger = discard_message
) -> Plain:
    """Merge the layers of the config, and fill in data, weights and image size that no layer names.

    Without data the config becomes the demo's: `vtab_demo` for the default network, `vtab_demo_large` for one that the
    user chose, with few enough steps to end within minutes.
    """
    file, command = read_config(config_file) if config_file else {}, merge(flags, settings)
    source = find_last_value("data", "source", file, command) or find_data("vtab-1k")
    shipped = "vtab"
    if source == "demo":
        arch, weights = (find_last_value("backbone", key, file, command) for key in ("arch", "checkpoint"))
        small = str(arch).startswith("mu/") if arch else weights in (None, "none")
        shipped = "vtab_demo" if small else "vtab_demo_large"
    return merge(merge_layers(read_config(shipped), file, command, "vtab", log), {"data": {"source": source}})


def finalize(config: VtabConfig) -> VtabConfig:
    """Return the config with checkpoint and image size decided.

    Raises `DpnError` for an unknown task, for an image size that the patch does not divide, and for real data without
    weights: VTAB measures what pre-training brings.
    """
    choose_tasks(config.data.tasks, config.demo)
    networks = [network_config.backbone for network_config in config.by_network().values()]
    patch = math.lcm(*(parse_arch(network.arch)[1] for network in networks if network.arch))
    fits = config.demo and SCRATCH_PIXELS % patch == 0  # an unusual patch size is refused with the image size
    pixels = math.ceil(DEMO_PIXELS / patch) * patch if fits else SCRATCH_PIXELS
    backbone = config.backbone
    if untrained := next((network for network in networks if not network.checkpoint), None):
        start = find_start(
            untrained,
            needs="VTAB measures pre-trained networks",
            example="vit_base_patch32_224.augreg_in1k",
            otherwise="none" if config.demo else None,
            stems=list(dict.fromkeys(network.stem or "dpn" for network in networks)) if config.compare else (),
            pixels=pixels,
        )
        backbone = backbone.model_copy(update={"checkpoint": start.checkpoint})
    resolved = config.model_copy(update={"backbone": backbone})
    sizes = {
        check_start(network_config.backbone, pixels).image_size for network_config in resolved.by_network().values()
    }
    size = sizes.pop() if len(sizes) == 1 else backbone.image_size
    return resolved.model_copy(update={"backbone": backbone.model_copy(update={"image_size": size})})
