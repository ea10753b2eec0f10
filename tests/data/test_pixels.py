"""Pixels: the reference's resize, the order of training, augmentation, and what is done with odd files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dpn_cli.data.decode import decode, open_image
from dpn_cli.data.pixels import PixelSet, crop_and_flip, load, shuffled_batches, stream
from dpn_cli.data.resize import resize, to_batch
from dpn_cli.data.sampler import rows_of_step
from dpn_cli.data.sources.folder import FileList
from dpn_cli.errors import DataError
from dpn_cli.run.distributed import World
from support.goldens import Arrays

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["preprocess_img0", "preprocess_img1", "preprocess_img2"])
@pytest.mark.parametrize(("op", "size"), [("resize", (33, 33)), ("resize_rect_up", (70, 57))])
def test_resize_equals_the_reference(
    name: str, op: str, size: tuple[int, int], golden: Callable[[str], Arrays]
) -> None:
    arrays = golden(name)
    actual = resize(arrays["in"], size).permute(1, 2, 0).numpy().astype(int)
    off = np.abs(actual - arrays[op].astype(int))
    assert off.max() <= 1
    assert (off > 0).mean() < 0.02  # where the exact value is a whole number up to rounding
    if op == "resize":
        antialiased = np.abs(arrays["resize_aa"].astype(int) - arrays[op].astype(int))
        assert antialiased.mean() > 5 * off.mean()


@pytest.mark.parametrize("header", [b"P6\n5 4\n255\n", b"P6 # 4:3\n5 4 255\n", b"P6\n5 4\n254\n", b"P5\n5 4\n255\n"])
def test_ppm_files_are_read_as_pillow_reads_them(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "image.ppm"
    values = np.random.default_rng(0).integers(0, 255, (4, 5, 3 if header[:2] == b"P6" else 1), dtype=np.uint8)
    path.write_bytes(header + values.tobytes())
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(decode(open_image(path, "it"), "it"), expected)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="it: not a readable image"):
        decode(open_image(path, "it"), "it")


def test_resizing_makes_no_detour_through_other_memory_formats() -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)[1:, ::-1]
    batch = to_batch(image)
    resized = F.interpolate(batch, (5, 6), mode="bilinear")
    assert resized.is_contiguous(memory_format=torch.channels_last)  # which torch makes three times as fast
    assert np.array_equal(batch[0].permute(1, 2, 0).numpy(), image)
    assert all(resize(image, size).is_contiguous() for size in ((8, 12), (5, 6)))


def test_resize_keeps_an_image_of_the_right_size() -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    assert np.array_equal(resize(image, (9, 7)).permute(1, 2, 0).numpy(), image)


def test_epochs_follow_each_other_without_a_gap() -> None:
    observed = torch.cat([rows_of_step(10, 4, seed=1, step=step) for step in range(10)])
    for epoch in range(4):
        assert sorted(observed[epoch * 10 : epoch * 10 + 10].tolist()) == list(range(10))
    assert not torch.equal(observed[:10], observed[10:20])
    assert not torch.equal(observed[:10], torch.cat([rows_of_step(10, 5, seed=2, step=step) for step in range(2)]))
    assert len(rows_of_step(3, 10, seed=0, step=7)) == 10


@pytest.fixture
def pixels() -> PixelSet:
    generator = torch.Generator().manual_seed(0)
    return PixelSet(torch.randint(0, 256, (20, 3, 12, 10), dtype=torch.uint8, generator=generator), torch.arange(20))


@pytest.mark.parametrize("crop", [True, False])
def test_ranks_share_the_batch_of_one_process(crop: bool, pixels: PixelSet) -> None:
    size = (8, 6) if crop else (12, 10)

    def batch(rank: int, ranks: int) -> dict[str, torch.Tensor]:
        batches = shuffled_batches(pixels, size, 8, 3, crop=crop, flip=True, world=World(rank, ranks, CPU))
        return next(batches(5))

    full, shares = batch(0, 1), [batch(rank, 4) for rank in range(4)]
    for key in ("image", "label"):
        assert torch.equal(full[key], torch.cat([share[key] for share in shares]))


def test_batches_are_a_function_of_seed_and_step(pixels: PixelSet) -> None:
    def stream_from(start: int, seed: int = 3) -> list[torch.Tensor]:
        batches = shuffled_batches(pixels, (8, 6), 8, seed, crop=True, flip=True, world=World(0, 1, CPU))(start)
        return [next(batches)["image"] for _ in range(3)]

    assert torch.equal(stream_from(0)[2], stream_from(2)[0])
    assert not torch.equal(stream_from(0)[0], stream_from(0)[1])
    assert not torch.equal(stream_from(0)[0], stream_from(0, seed=4)[0])


def test_every_offset_is_drawn_and_half_are_mirrored() -> None:
    image = torch.arange(12).reshape(1, 1, 3, 4).expand(1, 3, 3, 4).to(torch.uint8)
    rows = torch.zeros(4000, dtype=torch.int64)
    out = crop_and_flip(
        image, rows, (2, 2), crop=True, flip=True, generator=torch.Generator().manual_seed(0), own_rows=slice(0, 4000)
    )
    corners = Counter((int(crop[0, 0, 0]), int(crop[0, 0, 1])) for crop in out)
    plain = {(top * 4 + left, top * 4 + left + 1) for top in range(2) for left in range(3)}
    assert set(corners) == plain | {(b, a) for a, b in plain}
    # 12 equally likely outcomes: 333 expected each, 6 standard deviations are 105.
    assert all(abs(count - 333) < 105 for count in corners.values())


def test_no_flip_and_no_crop_give_the_images_themselves(pixels: PixelSet) -> None:
    rows = torch.tensor([3, 1, 1, 7])
    out = crop_and_flip(
        pixels.images, rows, (12, 10), crop=False, flip=False, generator=torch.Generator(), own_rows=slice(0, 4)
    )
    assert torch.equal(out, pixels.images[rows])


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", ".png"), ("RGBA", ".png"), ("P", ".png"), ("CMYK", ".jpg"), ("1", ".png")]
)
def test_odd_image_modes_become_rgb(mode: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"image{suffix}"
    Image.new(mode, (5, 4)).save(path)
    assert decode(open_image(path, "here"), "here").shape == (4, 5, 3)


def test_sixteen_bit_images_keep_their_upper_byte(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    Image.fromarray(np.array([[0, 256 * 200 + 77]], dtype=np.uint16)).save(path)
    assert decode(open_image(path, "here"), "here")[0, :, 0].tolist() == [0, 200]


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_unreadable_images_are_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:600] if content is None else content)
    with pytest.raises(DataError, match=r"row 7: not a readable image \(.*\); fetch it again, or remove it") as caught:
        decode(open_image(path, "row 7"), "row 7")
    assert caught.value.exit_code == 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    lines = []
    for i in range(5):
        Image.new("RGB", (6, 6), (i, 2 * i, 3 * i)).save(tmp_path / "images" / f"a {i}.png")
        lines.append(f"images/a {i}.png {i % 2}")
    (tmp_path / "test.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_list_file_gives_its_images_in_order_once(folder: Path) -> None:
    split = FileList(folder, "test")
    with stream(split, partial(resize, size=(6, 6)), 2) as decoded:
        parts = list(decoded)
    assert [len(part.labels) for part in parts] == [2, 2, 1]
    assert torch.cat([part.images for part in parts])[:, :, 0, 0].tolist() == [[i, 2 * i, 3 * i] for i in range(5)]
    assert torch.cat([part.labels for part in parts]).tolist() == [0, 1, 0, 1, 0]
    assert torch.equal(load(split, (6, 6)).images, torch.cat([part.images for part in parts]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_worker_processes_give_the_same_pixels(folder: Path) -> None:
    split = FileList(folder, "test")
    one, two = load(split, (4, 4), workers=0), load(split, (4, 4), workers=2)
    assert torch.equal(one.images, two.images)
    assert torch.equal(one.labels, two.labels)


def test_bad_images_are_skipped_and_counted_only_when_asked(folder: Path) -> None:
    (folder / "images" / "a 3.png").write_bytes(b"nothing")
    split = FileList(folder, "test")
    with pytest.raises(DataError, match=r"a 3.png \(test.txt, line 4\)"):
        load(split, (6, 6))
    kept = load(split, (6, 6), skip_bad=True)
    assert (kept.skipped, kept.labels.tolist()) == (1, [0, 1, 0, 0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/a 0.png", "line 6: 'images/a 0.png' is not"),
        ("images/a 0.png x", "line 6"),
        ("images/none.png 1", r"none.png \(test.txt, line 6\): no such image"),
        ("", "line 6: ''"),
    ],
)
def test_wrong_lines_are_named(line: str, message: str, folder: Path) -> None:
    with (folder / "test.txt").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        FileList(folder, "test")


def test_a_resumed_training_shuffles_the_epoch_that_it_is_in_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled, shuffle = list[int](), torch.randperm

    def counted(images: int, **options: Any) -> torch.Tensor:
        shuffled.append(images)
        return shuffle(images, **options)

    monkeypatch.setattr(torch, "randperm", counted)
    images, batch = 1003, 64
    inside, across = 20 * images // batch + 3, 40 * images // batch  # of the 21st epoch, and of two epochs
    for step, epochs in ((inside, 1), (inside + 1, 0), (across, 2)):
        shuffled.clear()
        assert len(rows_of_step(images, batch, 91, step)) == batch
        assert shuffled == [images] * epochs
