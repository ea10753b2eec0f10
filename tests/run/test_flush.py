"""What is renamed into place is on the disk before, and the rename itself after: a power cut leaves old or new."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dpn_cli.run.arrays import save_array
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.files import replace_file, replace_json, replace_text
from dpn_cli.run.run_dir import RunFolder
from dpn_cli.weights.backbone import export_backbone, load_backbone
from dpn_cli.weights.safetensors_io import write_weights

FSYNC = os.fsync  # conftest.py replaces it in tests


@dataclass
class Disk:
    """What has been flushed, by inode: a file's bytes, a folder's names; and the renames that came too early."""

    flushed: dict[int, object] = field(default_factory=dict)
    renames: int = 0
    early: list[str] = field(default_factory=list)
    pending: dict[Path, str] = field(default_factory=dict)

    def flush(self, path: Path) -> None:
        self.flushed[path.stat().st_ino] = self.content(path)
        self.pending.pop(path.resolve(), None)

    def content(self, path: Path) -> object:
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else path.read_bytes()

    def rename(self, source: Path, target: Path) -> None:
        self.renames += 1
        for path in (source, *source.rglob("*")):
            if self.flushed.get(path.stat().st_ino) != self.content(path):
                self.early.append(f"{path} -> {target}")
        self.pending[target.parent.resolve()] = str(target)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    actual = Disk()

    def flush(descriptor: int) -> None:
        FSYNC(descriptor)
        actual.flush(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", flush)
    for name in ("rename", "replace"):
        original = getattr(os, name)

        def rename(source: Any, target: Any, original: Callable[..., None] = original, **named: Any) -> None:
            actual.rename(Path(source), Path(target))
            original(source, target, **named)

        monkeypatch.setattr(os, name, rename)
    return actual


def save_checkpoints(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    for step in range(3):
        checkpoints.save("last", {"w": torch.full((3,), float(step))}, {"step": step})


def begin(folder: Path) -> None:
    config: dict[str, Any] = {"backbone": {}, "data": {}, "optim": {}, "schedule": {}, "runtime": {}}
    run = RunFolder.open(folder, config, "classifier", resume=False, overwrite=False, warn=pytest.fail)
    run.finish({"top1": 50.0})


WRITERS: dict[str, tuple[Callable[[Path], object], int]] = {
    "replace_file": (lambda folder: replace_file(folder / "x", lambda to: to.write_bytes(b"abc")), 1),
    "replace_text": (lambda folder: replace_text(folder / "x", "abc"), 1),
    "replace_json": (lambda folder: replace_json(folder / "x", [1, 2]), 1),
    "safetensors": (lambda folder: replace_file(folder / "x", lambda to: save_file({"w": torch.ones(9)}, to)), 1),
    "write_weights": (lambda folder: write_weights(folder / "x", {"w": torch.ones(9)}, {}), 1),
    "export_backbone": (lambda folder: export_backbone(load_backbone("mu/8", image_size=16), folder / "x"), 1),
    "save_array": (lambda folder: save_array(folder / "x.npy", torch.ones(3).numpy()), 2),
    "RunFolder": (begin, 4),
    "Checkpoints.save": (save_checkpoints, 5),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_files_are_flushed_before_a_rename_and_folders_after_it(writer: str, disk: Disk, tmp_path: Path) -> None:
    write, renames = WRITERS[writer]
    write(tmp_path)
    assert disk.renames == renames
    assert disk.early == []
    assert disk.pending == {}
