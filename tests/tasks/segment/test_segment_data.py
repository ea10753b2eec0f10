"""Config, labels, class names and pairs of segmentation: what was asked for, or an error that helps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpn_cli.config.load import build
from dpn_cli.errors import DataError, DpnError
from tasks.segment.config import MaskData, SegmentConfig, resolve, resolve_steps
from tasks.segment.labels import LabelRule
from tasks.segment.pairs import FolderPairs, open_pairs
from tasks.segment.palette import classes_of


def built(source: str, **changes: object) -> SegmentConfig:
    return build(SegmentConfig, resolve("ade20k", None, {"data": {"source": source}, **changes}, {}), "test")


def test_the_warm_up_keeps_its_share_of_epochs() -> None:
    schedule = resolve_steps(built("demo", epochs=1), 384).schedule
    assert (schedule.steps, schedule.warmup) == (24, 1)  # the demo's 50 of 1200
    with pytest.raises(DpnError, match="--epochs 1 and schedule.cooldown=100"):
        resolve_steps(built("demo", epochs=1, schedule={"cooldown": 100}), 384)


@pytest.mark.parametrize(
    ("offset", "ignore", "message"),
    [
        (0, 0, "--ignore-label 0: this is class number 0 as well, as the 3 classes have 0…2"),
        (1, 3, "--ignore-label 3: this is class number 2 as well"),
        (65534, 0, "--label-offset 65534: the last class would be 65536; masks hold 65535 at most"),
    ],
)
def test_a_value_stands_for_one_thing(offset: int, ignore: int, message: str) -> None:
    with pytest.raises(DpnError, match=message):
        LabelRule(3, offset, ignore)
    assert LabelRule(3, 65533, 0).labels(np.array([65535], np.uint16), "").tolist() == [2]


def test_class_names_are_read_as_editors_write_them(tmp_path: Path) -> None:
    listed, data = tmp_path / "classes.txt", MaskData(source=str(tmp_path))
    listed.write_bytes(b"\xef\xbb\xbfstra\xc3\x9fe\r\n sky \r\n\r\n")
    assert [one.name for one in classes_of(data)] == ["straße", "sky"]
    listed.write_bytes(b"stra\xdfe\nsky\n")
    with pytest.raises(DataError, match=r"classes.txt: not text in UTF-8 \(.*0xdf"):
        classes_of(data)


def small_pairs(root: Path, names: list[str]) -> Path:
    for kind, ending in (("images", ".png"), ("annotations", ".png")):
        (root / kind / "training").mkdir(parents=True)
        for name in names:
            Image.new("L", (4, 3), 1).save(root / kind / "training" / f"{name}{ending}")
    return root


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    root = small_pairs(tmp_path, ["a", "b.1", "b.2"])
    assert list(FolderPairs(root, "training").names) == ["a", "b.1", "b.2"]
    Image.new("RGB", (4, 3)).save(root / "images" / "training" / "a.jpg")
    with pytest.raises(DataError, match=r"training/a.jpg and a.png: two files of one name"):
        FolderPairs(root, "training")


def test_the_cap_of_the_longer_side_comes_first() -> None:
    assert built("demo", data={"source": "demo", "scale": [64, 64]}).data.scale == (64, 64)
    with pytest.raises(DpnError, match=r"the longer side's cap comes first \(got \[64, 256\]\)"):
        built("demo", data={"source": "demo", "scale": [64, 256]})


def test_a_row_without_a_mask_is_named(tmp_path: Path) -> None:
    import datasets

    stored = {"bytes": (small_pairs(tmp_path, ["a"]) / "images" / "training" / "a.png").read_bytes(), "path": None}
    rows = {"image": [stored, stored], "mask": [stored, None]}
    features = datasets.Features({name: datasets.Image() for name in rows})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "hub" / "train-0.parquet")
    pairs = open_pairs(MaskData(source=f"hf:{tmp_path / 'hub'}"), "train")
    assert pairs.load(0)[1].tolist() == [[1] * 4] * 3
    with pytest.raises(DataError, match="row 1, column mask: empty; every row needs its image"):
        pairs.load(1)


def test_a_hub_data_set_without_a_name_ends_with_one_line() -> None:
    with pytest.raises(DataError, match=r"--data hf:: not loaded"):
        open_pairs(MaskData(source="hf:"), "train")
