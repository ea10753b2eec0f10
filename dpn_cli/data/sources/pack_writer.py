"""Write packed data sets: webdataset shards with an index and a digest of each."""

from __future__ import annotations

import io
import multiprocessing
import os
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import ExifTags, Image

from dpn_cli.data.decode import ReadOptions, decode, open_image, orientation
from dpn_cli.data.sources.base import LabelledImages, fingerprint
from dpn_cli.data.sources.packs import FORMAT, MANIFEST, Json, is_pack, read_manifest
from dpn_cli.data.sources.shards import iter_images
from dpn_cli.data.workers import follow_parent, kill_processes, watch_processes
from dpn_cli.errors import DataError, DpnError, WorkerError
from dpn_cli.run import signals
from dpn_cli.run.files import file_digest, is_leftover, remove_leftovers, replace_file, replace_json

# Values of manifest keys that older packs do not have.
OLD_PACK_DEFAULTS = {"decode": "pillow"}
SHARD_IMAGES = 1000
# The ending of images that keep their bytes, by Pillow's name of the format.
KEPT = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "GIF": "gif",
    "TIFF": "tif",
    "PPM": "ppm",
}


@dataclass(frozen=True)
class PackOptions:
    """Storage of packed images: largest shorter side in pixels (None keeps it), as ``jpeg`` or uncompressed ``ppm``."""

    size: int | None = 320
    encode: Literal["jpeg", "ppm"] = "jpeg"
    quality: int = 90


def pack(
    splits: Mapping[str, tuple[LabelledImages, Sequence[int]]],
    classes: Sequence[str],
    out: Path,
    packing: PackOptions,
    *,
    workers: int,
    skip_bad: bool,
    progress: Callable[[str], None],
) -> Json:
    """Write splits, each with the order of its images, as shards into `out`; returns the manifest.

    Shards that an earlier call finished are kept when their digests agree, and written again when not. Raises
    `DpnError` when `out` holds something else, `DataError` for an unreadable image unless `skip_bad` leaves it out,
    `StoppedError` after a signal.
    """
    described: Json = {
        "format": FORMAT,
        **asdict(packing),
        "skip_bad": skip_bad,
        "decode": next(iter(splits.values()))[0].reading.decoder,
        "classes": list(classes),
        "sources": {name: fingerprint(split) for name, (split, _) in splits.items()},
    }
    manifest = _open_manifest(out, described)
    remove_leftovers(out)
    for name, (split, order) in splits.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        names = "".join(f"{line}\n" for line in classes)
        (out / name / "classnames.txt").write_text(names, "utf-8", "surrogateescape")
        finished_parts: dict[str, Json] = manifest["splits"].setdefault(name, {})
        starts = range(0, len(order), SHARD_IMAGES)
        jobs = {f"{number:06d}": order[start : start + SHARD_IMAGES] for number, start in enumerate(starts)}
        remaining = {
            shard: rows
            for shard, rows in jobs.items()
            if not _is_intact(out / name / f"{shard}.tar", finished_parts.get(shard))
        }
        # A split may have a million names: every process receives it once.
        arguments = (split, out / name, packing, skip_bad)
        pool = ProcessPoolExecutor(workers, initializer=_init_worker, initargs=arguments)
        processes = list[BaseProcess]()  # `active_children` leaves out a process that has died by now
        try:
            with watch_processes(processes):
                futures = dict[Future[Json], str]()
                for shard, rows in remaining.items():
                    futures[pool.submit(_write_shard, shard, rows)] = shard
                    processes[:] = pool._processes.values()
                for future in as_completed(futures):
                    finished_parts[futures[future]] = future.result()
                    replace_json(out / MANIFEST, manifest)
                    progress(f"{name}: {len(finished_parts)} of {len(jobs)} shards")
                    signals.check_here()
        except WorkerError:
            kill_processes(multiprocessing.active_children())  # they may wait for a lock of the dead one
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        manifest["splits"][name] = dict(sorted(finished_parts.items()))
    manifest["complete"] = True
    replace_json(out / MANIFEST, manifest)
    return manifest


def _open_manifest(out: Path, described: Json) -> Json:
    """Return the manifest to continue with. Raises `DpnError` when `out` is not a pack of these data."""
    path = out / MANIFEST
    if out.is_file():
        raise DpnError(f"--out {out}: a file; name a folder")
    if is_pack(out):
        manifest = read_manifest(out)
        changed = [key for key, value in described.items() if manifest.get(key, OLD_PACK_DEFAULTS.get(key)) != value]
        if changed:
            raise DpnError(
                f"--out {out}: holds a pack with another {', '.join(changed)}; pass another --out, or delete it first"
            )
        return manifest
    if out.is_dir() and not all(is_leftover(entry.name) for entry in out.iterdir()):
        raise DpnError(f"--out {out}: the folder is not empty and is not a pack; pass another --out")
    manifest = {**described, "complete": False, "splits": {}}
    replace_json(path, manifest)
    return manifest


def _is_intact(path: Path, entry: Json | None) -> bool:
    index = path.with_suffix(".npz")
    if entry is None or not path.is_file() or not index.is_file():
        return False
    return (file_digest(path), file_digest(index)) == (entry["sha256"], entry["index_sha256"])


_worker_arguments: list[Any] = []  # the arguments of `_init_worker`, for all shards that the process writes


def _init_worker(split: LabelledImages, folder: Path, packing: PackOptions, skip_bad: bool) -> None:
    follow_parent(0)
    _worker_arguments[:] = split, folder, packing, skip_bad


def _write_shard(shard: str, rows: Sequence[int]) -> Json:
    """Write one shard and its index; returns its entry of the manifest."""
    split, folder, packing, skip_bad = _worker_arguments
    keys, labels, sums = list[str](), list[int](), list[int]()

    def fill(temporary: Path) -> None:
        with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
            for position, row in enumerate(rows):
                try:
                    suffix, encoded = _encode(split.open(row), split.locate(row), packing, split.reading)
                except DataError:
                    if not skip_bad:
                        raise
                    continue
                label = int(split.labels[row])
                for ending, content in ((suffix, encoded), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{shard}{position:04d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
                keys.append(split.key(row))
                labels.append(label)
                sums.append(zlib.crc32(encoded))

    path = folder / f"{shard}.tar"
    digest = replace_file(path, fill)
    extents = [(member.offset, member.size) for member in iter_images(path, ())] if keys else []
    index = {
        "keys": np.array([os.fsencode(key) for key in keys], dtype=np.bytes_),
        "labels": np.array(labels, dtype=np.int32),
        "crc32": np.array(sums, dtype=np.uint32),
        "offsets": np.array([offset for offset, _ in extents], dtype=np.int64),
        "sizes": np.array([size for _, size in extents], dtype=np.int32),
    }

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **index)

    return {
        "images": len(keys),
        "left_out": len(rows) - len(keys),
        "bytes": path.stat().st_size,
        "sha256": digest,
        "index_sha256": replace_file(path.with_suffix(".npz"), save),
    }


def _encode(image: Image.Image, location: str, packing: PackOptions, reading: ReadOptions) -> tuple[str, bytes]:
    """Return an image's stored bytes and ending; an image that need not change keeps its bytes.

    It is decoded in any case. Raises `DataError` when it is unreadable or the encoding cannot hold it.
    """
    file, kind = getattr(image, "fp", None), image.format or ""
    original = b""
    if kind in KEPT and file is not None:
        file.seek(0)
        original = file.read()
        image = open_image(io.BytesIO(original), location, reading)
    shrunk = bool(getattr(image, "decoderconfig", ()))  # a JPEG above the limit was decoded at a smaller size
    tag = _orientation_tag(image) if packing.encode == "jpeg" else {}
    pixels = Image.fromarray(decode(image, location, reading.decoder))
    short = min(pixels.size)
    if packing.size is None or short <= packing.size:
        if original and packing.encode == "jpeg" and not (shrunk and packing.size):
            return KEPT[kind], original
    else:
        width, height = (max(1, round(side * packing.size / short)) for side in pixels.size)
        pixels = pixels.resize((width, height), Image.Resampling.BICUBIC)  # Pillow always antialiases
    buffer = io.BytesIO()
    try:
        pixels.save(buffer, packing.encode, quality=packing.quality, **tag)
    except OSError as error:
        size = "x".join(map(str, pixels.size))
        raise DataError(
            f"{location}: {size} pixels cannot be stored as {packing.encode} ({error}); use --encode ppm, or leave "
            "it out and count it with --skip-bad-images"
        ) from error
    return {"jpeg": "jpg", "ppm": "ppm"}[packing.encode], buffer.getvalue()


def _orientation_tag(image: Image.Image) -> dict[str, Image.Exif]:
    """Return the argument of Pillow's ``save`` that keeps an image's EXIF orientation; none for an upright image."""
    if (value := orientation(image)) == 1:
        return {}
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = value
    return {"exif": exif}
