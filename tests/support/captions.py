"""Data sets of images with captions, in every layout that is read."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from support.images import png_bytes, write_png_images, write_tar

COLOURS = ("red", "blue", "green")


def caption_of(number: int) -> str:
    """Return the caption of a numbered image."""
    return f"The {COLOURS[number % 3]} house, number {number}!"


def write_colour_pairs(root: Path, numbers: Sequence[int]) -> Path:
    """Write numbered images and a table of captions that name colours."""
    write_png_images(root, 1 + max(numbers))
    return write_caption_table(root / "pairs.csv", [(f"{number}.png", caption_of(number)) for number in numbers])


CAPTIONS = ["a dog", "Two dogs!", "the cat", "a bird_house", "a red car", "one tree"]


def write_caption_table(path: Path, rows: list[tuple[str, str]], header: tuple[str, str] = ("file", "caption")) -> Path:
    """Write a CSV or TSV table of image files and captions."""
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


def write_caption_shard(
    path: Path, numbers: range, ending: str = "txt", text: Callable[[int], str] | None = None
) -> None:
    """Write a tar file of images with captions, as text or JSON."""
    members = dict[str, bytes]()
    for number in numbers:
        words = text(number) if text else CAPTIONS[number]
        beside = words if ending == "txt" else json.dumps({"caption": words, "key": f"{number:09d}"})
        members |= {f"{number:09d}.jpg": png_bytes(number), f"{number:09d}.{ending}": beside.encode()}
    write_tar(path, members)


def write_table_dataset(root: Path) -> str:
    # A second sentence for the first image, in another place of the file.
    """Write images and a table with two captions for the first image."""
    rows = [*zip(write_png_images(root), CAPTIONS, strict=True), ("0.png", "a small dog")]
    return str(write_caption_table(root / "pairs.csv", rows))


def write_coco_dataset(root: Path) -> str:
    """Write images and captions in COCO's folders."""
    names = write_png_images(root / "coco" / "train2017")
    listed = {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
        "annotations": [{"image_id": number, "caption": text} for number, text in enumerate(CAPTIONS)],
    }
    place = root / "coco" / "annotations" / "captions_train2017.json"
    place.parent.mkdir()
    place.write_text(json.dumps(listed))
    return str(place)


def write_karpathy_dataset(root: Path) -> str:
    """Write images and captions in the format of Karpathy's splits."""
    splits = ["train", "train", "restval", "train", "val", "test"]
    images = [
        {"filepath": ".", "filename": name, "split": split, "sentences": [{"raw": sentence}]}
        for name, split, sentence in zip(write_png_images(root), splits, CAPTIONS, strict=True)
    ]
    (root / "dataset_coco.json").write_text(json.dumps({"images": images}))
    return str(root / "dataset_coco.json")


def write_flat_coco_dataset(root: Path) -> str:
    """Write images and COCO's caption file in one folder."""
    names = write_png_images(root)
    images = [{"id": 10 + number, "file_name": name} for number, name in enumerate(names)]
    notes = [{"image_id": 10 + number, "caption": text} for number, text in enumerate(CAPTIONS)]
    notes.append({"image_id": 10, "caption": "a small dog"})
    (root / "captions_train2017.json").write_text(json.dumps({"images": images, "annotations": notes}))
    return str(root / "captions_train2017.json")


def write_folder_dataset(root: Path) -> str:
    """Write images with their captions in text files of the same names."""
    for name, sentence in zip(write_png_images(root), CAPTIONS, strict=True):
        (root / name).with_suffix(".txt").write_text(sentence + "\n")
    return str(root)


def write_shard_dataset(root: Path, ending: str = "txt") -> str:
    """Write two tar files; returns their pattern."""
    root.mkdir(parents=True, exist_ok=True)
    write_caption_shard(root / "00000.tar", range(0, 4), ending)
    write_caption_shard(root / "00001.tar", range(4, 6), ending)
    return f"wds:{root}/{{00000..00001}}.tar"
