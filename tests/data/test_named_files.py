"""Files that an option names: one that cannot be read ends in one line that says why and what to pass."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpn_cli.data.image_source import ImageSource, open_split
from dpn_cli.errors import DataError
from support.images import write_class_shard
from tasks.lit.tokenizer import open_tokenizer
from tasks.lit.zeroshot import class_names, prompt_set
from tasks.segment.config import MaskData
from tasks.segment.palette import classes_of


def names_of_shards(path: Path) -> None:
    write_class_shard(path.parent / "0.tar", 0, 2)
    (path.parent / "classnames.txt").symlink_to(path)
    open_split(ImageSource(f"wds:{path.parent}/0.tar"), "train")


READERS: dict[str, Callable[[Path], object]] = {
    "--tokenizer": lambda path: open_tokenizer(str(path), 8, "lower"),
    "--class-names": lambda path: class_names(["a", "b"], str(path)),
    "--prompts": lambda path: prompt_set(str(path)),
    "classes.txt": lambda path: classes_of(MaskData(dataset="folder", source="x", classes=str(path))),
    "classnames.txt": names_of_shards,
}
# What messages call a file, where that is not the reader's key.
OPTIONS = {"classes.txt": "--class-names"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["folder", "fifo", "forbidden", "unreadable"])
def test_a_file_that_cannot_be_read_is_named_with_the_reason(reader: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    message = "not a regular file; "
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "forbidden":
        path.write_text("a\nb")
        path.chmod(0)
        message = "permission denied; "
        if os.geteuid() == 0:
            pytest.skip("root may read all files")
    else:
        if sys.platform != "linux":
            pytest.skip("reads a file of /proc that has no content")
        path.symlink_to("/proc/self/mem")
        message = "input/output error; "
    with pytest.raises(DataError, match=f"{OPTIONS.get(reader, reader)}.*: {message}") as raised:
        READERS[reader](path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("reader", ["--tokenizer", "--class-names", "--prompts"])
@pytest.mark.parametrize(
    ("name", "message"),
    [("none", "no such file or directory; "), ("n" * 300, "file name too long; "), ("a\0b", "embedded null byte; ")],
    ids=["missing", "long", "null"],
)
def test_a_name_of_no_file_is_refused_in_the_same_way(reader: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{reader}.*: {message}"):
        READERS[reader](tmp_path / name)


@pytest.mark.parametrize("reader", ["--class-names", "--prompts"])
def test_names_and_prompts_are_text(reader: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "bytes").write_bytes(b"a {}\n\xff")
    for name, message in (
        ("empty", "an empty file; "),
        ("bytes", "not text in UTF-8 .invalid start byte at byte 5.; "),
    ):
        with pytest.raises(DataError, match=f"{reader}.*{name}: {message}"):
            READERS[reader](tmp_path / name)
    (tmp_path / "marked").write_text("a {}\nb {}\n", encoding="utf-8-sig")
    assert prompt_set(str(tmp_path / "marked")) == ("a {}", "b {}")
    assert class_names(["x", "y"], str(tmp_path / "marked"))[0] == ["a {}", "b {}"]
