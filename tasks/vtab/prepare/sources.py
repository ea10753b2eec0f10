"""Sources of the 19 tasks: builders of TensorFlow Datasets, the parts of their splits, and the labels.

Splits, sizes and labels are those of VTAB's own code, google-research/task_adaptation, data/*.py and *_test.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.vtab.tasks import TASKS, TRAIN, VAL, Task

# An example as TensorFlow Datasets gives it: features by name; a sequence of objects is a dictionary of arrays.
Example = Mapping[str, Any]
Label = Callable[[Example], int]

# Lower edges of the bins of clevr_dist and kitti; nothing lies beyond CLEVR's last one.
CLEVR_EDGES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_EDGES = (-100.0, 8.0, 20.0, 999.0)
# Of KITTI's types of objects, cars, vans and trucks come first; an image without one is at this distance, in metres.
KITTI_VEHICLES, KITTI_NOTHING = 3, 1000.0


def class_label(example: Example) -> int:
    """The data set's own class."""
    return int(example["label"])


def clevr_count(example: Example) -> int:
    """The number of objects minus 3: 3 to 10 objects are the classes 0 to 7."""
    return len(example["objects"]["size"]) - 3


def clevr_distance(example: Example) -> int:
    """The bin of the depth of the object that is nearest to the camera: up to 8, 8.5, 9, 9.5, 10, or beyond."""
    return bin_of(min(float(coordinates[2]) for coordinates in example["objects"]["pixel_coords"]), CLEVR_EDGES)


def kitti_distance(example: Example) -> int:
    """The bin of the distance of the nearest car, van or truck: up to 8 m, up to 20 m, beyond, or 3 without one."""
    objects = example["objects"]
    rows = zip(objects["type"], objects["location"], strict=True)
    distances = (float(position[2]) for kind, position in rows if int(kind) < KITTI_VEHICLES)
    return bin_of(min(distances, default=KITTI_NOTHING), KITTI_EDGES)


def dsprites_location(example: Example) -> int:
    """The horizontal position, whose 32 values are put into 16 classes of two."""
    return int(example["label_x_position"]) // 2


def dsprites_orientation(example: Example) -> int:
    """The orientation, whose 40 values are put into 16 classes: of three and of two by turns."""
    return 2 * int(example["label_orientation"]) // 5  # floor(orientation / 2.5)


def smallnorb_azimuth(example: Example) -> int:
    """The azimuth, one of 18."""
    return int(example["label_azimuth"])


def smallnorb_elevation(example: Example) -> int:
    """The elevation, one of 9."""
    return int(example["label_elevation"])


def bin_of(value: float, edges: Sequence[float]) -> int:
    """Return the last bin whose lower edge is below a value: a value on an edge belongs to the bin before it."""
    return bisect_left(edges, value) - 1


@dataclass(frozen=True)
class TfdsPart:
    """The examples `start` up to `stop` of a builder's split, in the order in which they are stored."""

    split: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.split}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Source:
    """A builder of TensorFlow Datasets, and the tasks that are made of it.

    `majors` are the major versions that hold the same images in the same order; `sizes` the splits that are used, with
    the number of their examples; `val` and `test` say where val200 and the test split begin; `by_hand` says what has to
    be fetched by hand, ending where the name of the folder for such files follows, and `needs` names what then lies in
    that folder; `features` are what the labels are made of; `white` is the value of a white pixel.
    """

    builder: str
    majors: tuple[int, ...]
    sizes: Mapping[str, int]
    val: tuple[str, int]
    test: tuple[str, int]
    labels: Mapping[str, Label]
    by_hand: str = ""
    needs: tuple[str, ...] = ()
    features: tuple[str, ...] = ("label",)
    white: int = 255

    def parts(self, sizes: Mapping[str, int]) -> dict[str, TfdsPart]:
        """Return the three splits of a task; the test split goes to the end of the builder's, which has `sizes`."""
        val, val_start = self.val
        test, test_start = self.test
        return {
            "train800": TfdsPart("train", 0, TRAIN),
            "val200": TfdsPart(val, val_start, val_start + VAL),
            "test": TfdsPart(test, test_start, sizes[test]),
        }

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that are made of it, in the order of the table."""
        return tuple(task for task in TASKS if task.name in self.labels)


RESISC45 = "NWPU-RESISC45.rar from OneDrive (link: tensorflow.org/datasets/catalog/resisc45), unpacked to"
RETINOPATHY = (
    "the files of kaggle.com/c/diabetic-retinopathy-detection: trainLabels.csv, and sample.zip, train.zip and test.zip "
    "unpacked to folders of those names, in"
)
SOURCES: tuple[Source, ...] = (
    Source(
        "caltech101",
        (3,),
        {"train": 3060, "test": 6084},
        ("train", 2754),
        ("test", 0),
        {"caltech101": class_label},
    ),
    Source(
        "cifar100",
        (3,),
        {"train": 50_000, "test": 10_000},
        ("train", 45_000),
        ("test", 0),
        {"cifar100": class_label},
    ),
    Source(
        "dtd",
        (3,),
        {"train": 1880, "validation": 1880, "test": 1880},
        ("validation", 0),
        ("test", 0),
        {"dtd": class_label},
    ),
    Source(
        "oxford_flowers102",
        (2,),
        {"train": 1020, "validation": 1020, "test": 6149},
        ("validation", 0),
        ("test", 0),
        {"flowers102": class_label},
    ),
    Source(
        "oxford_iiit_pet",
        (3, 4),  # 4.0.0 adds boxes and mends damaged files; images are ordered by a hash of their names in both
        {"train": 3680, "test": 3669},
        ("train", 2944),
        ("test", 0),
        {"pets": class_label},
    ),
    Source(
        "sun397/tfds",
        (4,),
        {"train": 76_128, "validation": 10_875, "test": 21_750},
        ("validation", 0),
        ("test", 0),
        {"sun397": class_label},
    ),
    Source(
        "svhn_cropped",
        (3,),
        {"train": 73_257, "test": 26_032},
        ("train", 65_931),
        ("test", 0),
        {"svhn": class_label},
    ),
    Source(
        "patch_camelyon",
        (2,),
        {"train": 262_144, "validation": 32_768, "test": 32_768},
        ("validation", 0),
        ("test", 0),
        {"camelyon": class_label},
    ),
    Source(
        "eurosat/rgb",
        (2,),
        {"train": 27_000},
        ("train", 16_200),
        ("train", 21_600),
        {"eurosat": class_label},
    ),
    Source(
        "resisc45",
        (3,),
        {"train": 31_500},
        ("train", 18_900),
        ("train", 25_200),
        {"resisc45": class_label},
        by_hand=RESISC45,
        needs=("NWPU-RESISC45",),
    ),
    Source(
        "diabetic_retinopathy_detection/btgraham-300",
        (3,),
        {"train": 35_126, "validation": 10_906, "test": 42_670},
        ("validation", 0),
        ("test", 0),
        {"retinopathy": class_label},
        by_hand=RETINOPATHY,
        needs=("sample", "train", "test", "trainLabels.csv"),
    ),
    Source(
        "clevr",
        (3,),
        {"train": 70_000, "validation": 15_000},
        ("train", 63_000),
        ("validation", 0),
        {"clevr_count": clevr_count, "clevr_dist": clevr_distance},
        features=("objects",),
    ),
    Source(
        "dmlab",
        (2,),
        {"train": 65_550, "validation": 22_628, "test": 22_735},
        ("validation", 0),
        ("test", 0),
        {"dmlab": class_label},
    ),
    Source(
        "dsprites",
        (2,),
        {"train": 737_280},
        ("train", 589_824),
        ("train", 663_552),
        {"dsprites_loc": dsprites_location, "dsprites_ori": dsprites_orientation},
        features=("label_x_position", "label_orientation"),
        white=1,
    ),
    Source(
        "kitti",
        (3,),
        {"train": 6347, "validation": 423, "test": 711},
        ("validation", 0),
        ("test", 0),
        {"kitti": kitti_distance},
        features=("objects",),
    ),
    Source(
        "smallnorb",
        (2,),
        {"train": 24_300, "test": 24_300},
        ("test", 0),
        ("test", 12_150),
        {"smallnorb_azi": smallnorb_azimuth, "smallnorb_ele": smallnorb_elevation},
        features=("label_azimuth", "label_elevation"),
    ),
)
