"""Data that are not what VTAB-1k has: every flaw is named before anything is trained; hub data sets."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpn_cli.errors import DataError
from support.vtab import run_vtab
from tasks.vtab.train import Trainer


@pytest.fixture
def broken(digits: Path, tmp_path: Path) -> Path:
    root = tmp_path / "vtab-1k"
    shutil.copytree(digits, root)
    return root


def edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")


@pytest.mark.parametrize(
    ("split", "change", "message"),
    [
        ("train800", lambda lines: lines[:799], "svhn: train800 has 799 images, VTAB-1k has 800"),
        ("val200", lambda lines: [*lines, lines[0]], "svhn: val200 has 201 images"),
        (
            "train800",
            lambda lines: [*lines[:4], lines[4].rsplit(" ", 1)[0] + " 10", *lines[5:]],
            r"000004.png \(train800.txt, line 5\): label 10, but svhn has 10 classes, 0 to 9",
        ),
        ("test", lambda lines: [*lines[:9], lines[9].rsplit(" ", 1)[0] + " -1", *lines[10:]], "line 10.*label -1"),
        ("val200", lambda lines: [*lines[:2], "nonsense", *lines[3:]], "val200.txt, line 3: 'nonsense' is not"),
        ("test", lambda lines: [*lines, "images/test/gone.png 3"], "line 798.*no such image"),
    ],
)
def test_wrong_data_end_the_run_before_training(
    split: str,
    change: Callable[[list[str]], list[str]],
    message: str,
    broken: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trainer, "job", lambda *_: pytest.fail("trained"))
    edit(broken / "svhn" / f"{split}.txt", change)
    with pytest.raises(DataError, match=message) as caught:
        run_vtab(broken, tmp_path / "run", "data.tasks=svhn")
    assert caught.value.exit_code == 3


def test_a_run_that_ended_before_training_does_not_block_its_folder(broken: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needed for dtd"):
        run_vtab(broken, tmp_path / "run", "data.tasks=svhn,dtd")
    result = run_vtab(broken, tmp_path / "run", "data.tasks=svhn", "seeds=1", "lrs=[0.01]")
    assert result["tasks"]["svhn"]["test"]["n"] == 1


def test_missing_splits_and_folders_are_named(broken: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dtd: missing, needed for dtd; get it, or choose other --tasks"):
        run_vtab(broken, tmp_path / "run", "data.tasks=svhn,dtd")
    (broken / "svhn" / "val200.txt").unlink()
    with pytest.raises(DataError, match="val200.txt: missing"):
        run_vtab(broken, tmp_path / "run2", "data.tasks=svhn")


def test_a_corrupt_image_is_named_or_counted(broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, number in (("train800", 799), ("test", 5)):
        path = broken / "svhn" / "images" / split / f"{number:06d}.png"
        path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"000799.png \(train800.txt, line 800\): not a readable image"):
        run_vtab(broken, tmp_path / "run", "data.tasks=svhn")
    result = run_vtab(
        broken, tmp_path / "run2", "data.tasks=svhn", "data.skip_bad_images=true", "seeds=1", "lrs=[0.01]"
    )
    assert result["tasks"]["svhn"]["test_images"] == 796
    warnings = " ".join(capsys.readouterr().err.split())
    assert "1 unreadable images of train800 are left out" in warnings
    assert "1 unreadable test images are left out of the score" in warnings


def test_jpeg_copies_and_odd_test_sizes_are_warned_about(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    folder = broken / "svhn" / "images" / "train800"
    for path in folder.glob("*.png"):
        Image.open(path).save(path.with_suffix(".jpg"))
    edit(broken / "svhn" / "train800.txt", lambda lines: [line.replace(".png", ".jpg") for line in lines])
    run_vtab(broken, tmp_path / "run", "data.tasks=svhn", "seeds=1", "lrs=[0.01]")
    warnings = " ".join(capsys.readouterr().err.split())
    assert "JPEG files in svhn" in warnings
    assert "797 test images, VTAB has 26032" in warnings


def test_hub_data_sets_are_read_by_split_and_column(digits: Path, tmp_path: Path) -> None:
    import datasets

    names = {"train800": 800, "val200": 200, "test": 797}
    root = tmp_path / "hub"
    (root / "svhn").mkdir(parents=True)
    lines = ["---", "configs:", "- config_name: svhn", "  data_files:"]
    for split in names:
        rows = [line.rsplit(" ", 1) for line in (digits / "svhn" / f"{split}.txt").read_text().splitlines()]
        features = datasets.Features(
            image=datasets.Image(), digit=datasets.ClassLabel(num_classes=10), writer=datasets.Value("int64")
        )
        table = [
            {
                "image": {"bytes": (digits / "svhn" / name).read_bytes(), "path": None},
                "digit": int(label),
                "writer": 0,
            }
            for name, label in rows
        ]
        datasets.Dataset.from_list(table, features=features).to_parquet(root / "svhn" / f"{split}.parquet")
        lines += [f"  - split: {split}", f"    path: svhn/{split}.parquet"]
    (root / "README.md").write_text("\n".join([*lines, "---"]))
    settings = ["data.tasks=svhn", "seeds=1", "lrs=[0.01]"]
    hub = run_vtab(f"hf:{root}", tmp_path / "hub_run", *settings)
    files = run_vtab(digits, tmp_path / "file_run", *settings)
    assert hub["tasks"] == files["tasks"]
    assert hub["data"]["fingerprints"] == files["data"]["fingerprints"]
    with pytest.raises(DataError, match="which column holds the label.*image, digit, writer"):
        run_vtab(f"hf:{root}", tmp_path / "x", *settings, "data.label_column=nope")


def test_a_hub_data_set_of_other_tasks_is_refused(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"label": [0]}).to_parquet(tmp_path / "data" / "train800.parquet")
    with pytest.raises(DataError, match="no configuration 'dtd'; it has default. VTAB needs one per task"):
        run_vtab(f"hf:{tmp_path}", tmp_path / "run", "data.tasks=svhn,dtd")
