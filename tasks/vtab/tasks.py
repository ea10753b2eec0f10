"""The tasks of VTAB-1k and of the demo. Imports nothing heavy, because shell completion reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dpn_cli.arch import did_you_mean
from dpn_cli.errors import DpnError

GROUPS = ("natural", "specialized", "structured")
# Networks of Table 3, (arch, stem).
PAPER_COLUMNS = (("B/32", "none"), ("B/32", "dpn"), ("B/16", "none"), ("B/16", "dpn"))
# Number of training and validation images of every task; train800val200 is their union.
TRAIN, VAL = 800, 200


@dataclass(frozen=True)
class Task:
    """A task: its name in VTAB, its folder in the usual layout, and the sizes that its data must have.

    `crop` and `flip` are the default augmentation of training images, which the config's ``data.augment`` overrides;
    `test` is the size of the official test split; `paper` holds the accuracies of Table 3 in percent, in the order of
    `PAPER_COLUMNS`.
    """

    name: str
    group: str
    folder: str
    classes: int
    crop: bool
    flip: bool
    test: int
    paper: tuple[float, ...] = ()

    @property
    def augment(self) -> tuple[Literal["crop", "flip"], ...]:
        """The task's default in the config's ``data.augment``."""
        crop: tuple[Literal["crop", "flip"], ...] = ("crop",) if self.crop else ()
        return (*crop, "flip") if self.flip else crop


# Sizes and classes: task_adaptation's data/*.py. Augmentation: Scenic's plainvit/configs/vtab_plainvit_config.py.
TASKS: tuple[Task, ...] = (
    #    name              group          folder                 classes crop   flip   test  Table 3
    Task("caltech101", "natural", "caltech101", 102, True, True, 6_084, (87.1, 87.7, 86.1, 86.6)),
    Task("cifar100", "natural", "cifar", 100, True, True, 10_000, (53.7, 58.1, 35.5, 51.4)),
    Task("dtd", "natural", "dtd", 47, True, True, 1_880, (56.0, 60.7, 60.1, 63.1)),
    Task("flowers102", "natural", "oxford_flowers102", 102, True, True, 6_149, (83.9, 86.4, 90.8, 91.3)),
    Task("pets", "natural", "oxford_iiit_pet", 37, True, True, 3_669, (87.2, 88.0, 90.9, 92.1)),
    Task("sun397", "natural", "sun397", 397, True, True, 21_750, (32.0, 35.4, 33.9, 32.5)),
    Task("svhn", "natural", "svhn", 10, True, True, 26_032, (76.8, 80.3, 76.7, 78.3)),
    Task("camelyon", "specialized", "patch_camelyon", 2, True, True, 32_768, (77.9, 78.5, 81.3, 80.6)),
    Task("eurosat", "specialized", "eurosat", 10, True, True, 5_400, (94.8, 95.0, 95.9, 95.8)),
    Task("resisc45", "specialized", "resisc45", 45, True, True, 6_300, (78.2, 81.6, 81.2, 83.5)),
    Task("retinopathy", "specialized", "diabetic_retinopathy", 5, True, True, 42_670, (71.2, 70.3, 74.7, 73.3)),
    Task("clevr_count", "structured", "clevr_count", 8, False, True, 15_000, (58.3, 62.5, 65.2, 73.7)),
    Task("clevr_dist", "structured", "clevr_dist", 6, False, True, 15_000, (52.6, 55.5, 59.8, 48.3)),
    Task("dmlab", "structured", "dmlab", 6, False, True, 22_735, (39.2, 40.7, 39.7, 41.0)),
    Task("dsprites_loc", "structured", "dsprites_loc", 16, False, False, 73_728, (71.3, 60.8, 72.1, 72.4)),
    Task("dsprites_ori", "structured", "dsprites_ori", 16, True, False, 73_728, (59.8, 61.6, 61.9, 63.0)),
    Task("kitti", "structured", "kitti", 4, False, True, 711, (73.6, 73.4, 81.3, 80.6)),
    Task("smallnorb_azi", "structured", "smallnorb_azi", 18, True, False, 12_150, (20.7, 20.9, 18.9, 21.6)),
    Task("smallnorb_ele", "structured", "smallnorb_ele", 9, True, True, 12_150, (47.2, 34.4, 50.4, 36.2)),
)

# Labels of the built-in scenes. Mirroring would change where the light comes from and where the object is.
DEMO_TASKS: tuple[Task, ...] = (
    Task("demo_color", "natural", "demo_color", 6, False, True, 1_000),
    Task("demo_light", "specialized", "demo_light", 4, False, False, 1_000),
    Task("demo_count", "structured", "demo_count", 4, False, True, 1_000),
    Task("demo_position", "structured", "demo_position", 4, False, False, 1_000),
)


def choose_tasks(words: Sequence[str], demo: bool) -> tuple[Task, ...]:
    """Return the tasks that are meant by ``all``, group, task and folder names, in the table's order.

    Raises `DpnError` for an unknown name and suggests the nearest one.
    """
    table = DEMO_TASKS if demo else TASKS
    selected = set()
    for word in words:
        members = {task.name for task in table if word in {"all", task.group, task.name, task.folder}}
        if not members:
            allowed = ("all", *GROUPS, *(task.name for task in table))
            raise DpnError(f"--tasks {word!r}: unknown; choose from {', '.join(allowed)}{did_you_mean(word, allowed)}")
        selected |= members
    return tuple(task for task in table if task.name in selected)


def task_names() -> list[str]:
    """Return every word that ``--tasks`` accepts for real data, for shell completion."""
    return ["all", *GROUPS, *(task.name for task in TASKS)]
