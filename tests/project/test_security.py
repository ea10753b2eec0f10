"""Data, weights and configs of others: none runs code, leaves its folder or fills the memory."""

from __future__ import annotations

import ast
import csv
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpn_cli.data.sources.folder import FileList
from dpn_cli.data.sources.packs import read_manifest
from dpn_cli.data.sources.shards import MAX_TEXT_BYTES, LabelledShardImages
from dpn_cli.errors import DataError
from support.cli import run_dpn
from support.images import png_bytes, write_class_folders, write_png_images
from support.programs import ROOT
from tasks.lit.caption_files import read_coco, read_table


def table(root: Path, name: str) -> object:
    with (root / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "caption"), (name, "an image")])
    return read_table(root / "pairs.csv", root, None, None, False)


def karpathy(root: Path, name: str) -> object:
    image = {"filename": name, "split": "train", "sentences": [{"raw": "an image"}]}
    (root / "coco.json").write_text(json.dumps({"images": [image]}))
    return read_coco(root / "coco.json", root, None, False)


def coco(root: Path, name: str) -> object:
    (root / "val2017").mkdir(exist_ok=True)
    listed = {"images": [{"id": 1, "file_name": name}], "annotations": [{"image_id": 1, "caption": "an image"}]}
    (root / "captions_val2017.json").write_text(json.dumps(listed))
    return read_coco(root / "captions_val2017.json", root, None, False)


def file_list(root: Path, name: str) -> object:
    (root / "test.txt").write_text(f"{name} 0\n")
    return FileList(root, "test")


@pytest.mark.parametrize("read", [table, karpathy, coco, file_list])
def test_names_in_data_do_not_leave_their_folder(read: Callable[[Path, str], object], tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_png_images(root, 1)
    write_png_images(root / "val2017", 1)
    write_png_images(tmp_path, 1)
    (root / "link.png").symlink_to(tmp_path / "0.png")
    (root / "val2017" / "link.png").symlink_to(tmp_path / "0.png")
    for name in ("0.png", "val2017/../0.png", "link.png"):
        if read is not coco or "/" not in name:
            read(root, name)
    for name in (str(tmp_path / "0.png"), "../../0.png", "val2017/../../../0.png", "/etc/hostname"):
        with pytest.raises(DataError, match=f"{root}.*{name} is not in the folder of the data") as found:
            read(root, name)
        assert "\n" not in str(found.value)


def test_a_folder_that_holds_all_files_may_be_named(tmp_path: Path) -> None:
    write_png_images(tmp_path / "images", 1)
    (tmp_path / "pairs.csv").write_text(f"file,caption\n{tmp_path}/images/0.png,an image\n")
    read_table(tmp_path / "pairs.csv", tmp_path / "images", None, None, False)
    read_table(tmp_path / "pairs.csv", Path("/"), None, None, False)


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def sparse(name: str, size: int) -> bytes:
    """A header of GNU tar that says a file of a few bytes has so many, the others being holes."""
    member = tarfile.TarInfo(name)
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (0, 512)
    header[483:495] = b"%011o\0" % size
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(512)


@pytest.mark.parametrize("name", ["0.cls", "0.png"])
def test_a_shard_that_claims_more_than_it_holds_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(sparse(name, 8**11 - 1) + bytes(1024))
    with pytest.raises(DataError, match=f"a.tar: .* \\({name} is stored with holes"):
        LabelledShardImages(str(path))


def test_a_label_of_any_size_is_not_read(tmp_path: Path) -> None:
    full = tarfile.TarInfo("0.png"), png_bytes(0)
    write_tar(tmp_path / "a.tar", full, (tarfile.TarInfo("0.cls"), b"0" * (MAX_TEXT_BYTES + 1)))
    with pytest.raises(DataError, match="0.cls has 1048577 bytes, too many for a label or a caption"):
        LabelledShardImages(str(tmp_path / "a.tar"))


def test_members_of_a_shard_are_read_at_their_offsets(tmp_path: Path) -> None:
    names = "../../0", "/0"
    members = [(tarfile.TarInfo(f"{name}{end}"), content) for name in names for end, content in
               ((".png", png_bytes(0)), (".cls", b"0"))]  # fmt: skip
    (tmp_path / "in").mkdir()
    shards = LabelledShardImages(str(write_tar(tmp_path / "in" / "a.tar", *members)))
    assert [shards.pixels(row).shape[2] for row in range(2)] == [3, 3]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.tar"]


def test_a_pack_names_files_of_its_own(tmp_path: Path) -> None:
    photos = write_class_folders(tmp_path / "photos", classes=2, each=4)
    result = run_dpn("data", "pack", "--data", str(photos), "-o", str(tmp_path / "pack"), "-j", "1")
    assert result.exit_code == 0, result.stderr
    path = tmp_path / "pack" / "manifest.json"
    manifest = json.loads(path.read_text())
    shards = manifest["splits"]["train"]
    manifest["splits"]["train"] = {f"../../{name}": entry for name, entry in shards.items()}
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"manifest.json: a damaged manifest \(shards are files of the pack\)"):
        read_manifest(tmp_path / "pack")


def calls() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield every call in the program: its place, what is called, and the keywords with their values, as text."""
    for path in sorted([*(ROOT / "dpn_cli").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg}
                yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), keywords


def test_no_call_runs_code_that_a_file_holds() -> None:
    never = {"eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads", "os.system", "os.popen"}
    called = set()
    for place, name, keywords in calls():
        called.add(name)
        assert name not in never, place
        assert not name.endswith((".extractall", ".extract", ".unpack_archive", ".unsafe_load", ".full_load")), place
        assert "trust_remote_code" not in keywords, place
        assert keywords.get("allow_pickle", "False") == "False", place
        assert keywords.get("shell", "False") == "False", place
        if name == "torch.load":
            assert keywords["weights_only"] == "True", place
    assert {"torch.load", "np.load", "yaml.load"} <= called  # what is looked for is found
