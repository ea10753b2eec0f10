"""Features of a frozen image tower, computed once per image and kept in memory-mapped shards.

A cache is a folder named by a hash of the inputs of its content: weights, preprocessing, the images' names and sizes,
views. ``cache.json`` says what it is, ``features-00000.npy`` (rows, views, d) in float16 holds unit features, and
``features-00000.json`` the shard's digest and two lists over its rows: ``stamps`` of the images' files
(`captions.stamp_of`), and ``contents``, digests of the encoded images (empty for an unreadable one).

An image whose stamp has changed is read again, and encoded again if its content differs. A few images are encoded again
every time, stamp or not, as a check on the cache itself.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpn_cli.data.compact import Rows
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.base import hash_lines
from dpn_cli.errors import DataError
from dpn_cli.run import distributed, signals
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import World
from dpn_cli.run.files import claim, remove_leftovers, replace_json
from tasks.lit.cache_write import Shard, content_digest, write_cache
from tasks.lit.captions import CaptionedImages
from tasks.lit.features import Features, ImageEncoder

# Images per shard, which a killed run encodes again, and per batch of the tower.
SHARD, BATCH = 4096, 64
# Number of images of an existing cache that are encoded again as a check, and the cosine that they must reach.
SPOT_CHECKS, SPOT_COSINE = 8, 0.999
# Version of the format. Version 1 had neither stamps nor contents, and one decoder only.
VERSION = 2

Json = dict[str, Any]
Plan = dict[int, dict[int, str]]
"""Shards by number, each with the rows to read and their files' current stamps."""


@dataclass(frozen=True)
class ShardState:
    """The state of a finished shard: rows whose stamps have changed, and rows of unreadable images."""

    changed: dict[int, str]
    bad: list[int]


def data_fingerprint(data: CaptionedImages) -> str:
    """Return a hash over the images' names and encoded sizes, in order; their folder does not matter."""
    return hash_lines(f"{data.key(index)} {size}" for index, size in enumerate(data.sizes))


def cached_features(
    data: CaptionedImages, encoder: ImageEncoder, root: Path, world: World, console: Console
) -> Features:
    """Return the features of all images from the cache below `root`, after encoding those that it lacks.

    Ranks share the work and the folder; if another process fills the same folder, wait for it. Damaged shards, caches
    of something else under this name, and images that have changed are reported and encoded again. Finished shards are
    kept whatever happens. Raises `DataError` for an unreadable image unless they are skipped, `StoppedError` when a
    signal asks to stop.
    """
    facts = {
        **encoder.facts,
        "version": VERSION,
        "data": data_fingerprint(data),
        "images": len(data.captions),
        "decoder": data.reading.decoder,
        "image_size": list(encoder.size),
        "views": encoder.views,
        "seed": encoder.seed if encoder.views else None,
        "dtype": "float16",
    }
    if data.reading.exif:
        facts["exif"] = True
    folder = root / _name(facts)

    def wait() -> None:
        signals.check_here()
        console.info(f"waiting for another process, which encodes images into {folder}")

    with claim(folder, wait) if world.leads else nullcontext():
        if world.leads:
            remove_leftovers(folder)
            _remove_version_1(root, facts, console)
        return _encode_missing(folder, facts, data, encoder, world, console)


def _name(facts: Json) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _remove_version_1(root: Path, facts: Json, console: Console) -> None:
    """Remove the cache of the same features that version 1 made."""
    former = root / _name({name: value for name, value in facts.items() if name != "decoder"} | {"version": 1})
    if former.is_dir():
        console.warn(
            f"cache {former}: made by an earlier version, which did not notice images that had changed; it is removed "
            "and its images are encoded again"
        )
        shutil.rmtree(former, ignore_errors=True)


def _encode_missing(
    folder: Path, facts: Json, data: CaptionedImages, encoder: ImageEncoder, world: World, console: Console
) -> Features:
    """Return the features of a cache's folder, after encoding images that are new or have changed."""
    total = len(data.captions)
    shards = [
        Shard(folder / f"features-{number:05d}.npy", first, min(SHARD, total - first))
        for number, first in enumerate(range(0, total, SHARD))
    ]
    finished, plan, unreadable = list[ShardState | None](), Plan(), list[int]()
    previous_contents = dict[int, list[str]]()
    if world.leads:
        finished, distrust = _check_folder(shards, facts, data, encoder, console)
        plan = _plan(shards, finished, data, distrust, console)
        previous_contents = {number: _facts_of(shards[number])["contents"] for number in plan if finished[number]}
    plan = distributed.from_leader(plan)
    if plan:
        rank_shards = sorted(plan)[world.rank :: world.size]
        work = [(shards[number], plan[number]) for number in rank_shards]
        write_cache(data, encoder, work, encoder.batch_size or BATCH, console)
        distributed.barrier()
    if world.leads:
        unreadable = _unreadable(shards, finished, previous_contents, plan, console)
    unreadable = distributed.from_leader(unreadable)
    if len(unreadable) == total:
        raise DataError(f"{problem_of(data, 0)}; no other one is readable either, so nothing is left to work with")
    if unreadable and not encoder.skip_bad:
        raise DataError(
            f"{data.locate(unreadable[0])}: not a readable image, as are {len(unreadable) - 1} others; fetch them "
            "again, or leave them out and count them with --skip-bad-images"
        )
    return Features([np.load(shard.file, mmap_mode="r") for shard in shards], unreadable)


def problem_of(data: CaptionedImages, row: int) -> DataError:
    """Return the error of an image that could not be read."""
    try:
        data.pixels(row)
    except DataError as error:
        return error
    return DataError(f"{data.locate(row)}: not a readable image when it was encoded")


def _check_folder(
    shards: Sequence[Shard], facts: Json, data: CaptionedImages, encoder: ImageEncoder, console: Console
) -> tuple[list[ShardState | None], bool]:
    """Return the state of each shard, None for those to encode, and whether stamps cannot be trusted.

    A cache whose content does not match its name is cleared and started anew.
    """
    folder = shards[0].file.parent
    path = folder / "cache.json"
    if folder.is_dir():
        try:
            described = json.loads(path.read_text(encoding="utf-8"))
            other = [name for name, value in facts.items() if described.get(name) != value]
            problem = f"it is of another {', '.join(other)}" if other else None
        except (OSError, ValueError, AttributeError) as error:
            problem = f"cache.json cannot be read ({error})"
        if problem is None:
            finished = [_shard_state(shard, data, console) for shard in shards]
            problem, replaced = _spot_check(shards, finished, data, encoder)
            if replaced is not None:
                console.warn(f"{replaced} was replaced and its date and inode do not show it; all images are compared")
            if problem is None:
                return finished, replaced is not None
        console.warn(f"cache {folder}: {problem}; its images are encoded again")
        shutil.rmtree(folder)
    replace_json(path, facts)
    return [None] * len(shards), False


def _shard_state(shard: Shard, data: CaptionedImages, console: Console) -> ShardState | None:
    """Return the state of a shard, None for one to encode; report a damaged one."""
    try:
        facts = shard.facts()
    except DataError as error:
        console.warn(f"{error}; its images are encoded again")
        return None
    if facts is None:
        return None
    pairs = zip(_stamps(shard, data).items(), facts["stamps"], strict=True)
    changed = {row: stamp for (row, stamp), previous in pairs if not stamp or stamp != previous}
    return ShardState(changed, [row for row, content in enumerate(facts["contents"], shard.first) if not content])


def _stamps(shard: Shard, data: CaptionedImages) -> dict[int, str]:
    """Return the current stamps of a shard's rows."""
    return dict(enumerate(data.stamps[shard.first : shard.first + shard.count], shard.first))


def _facts_of(shard: Shard) -> Json:
    """Return the facts of a finished shard."""
    facts = shard.facts()
    assert facts is not None
    return facts


def _spot_check(
    shards: Sequence[Shard], finished: Sequence[ShardState | None], data: CaptionedImages, encoder: ImageEncoder
) -> tuple[str | None, str | None]:
    """Read and encode a few images of the finished shards again.

    Returns what is wrong with the stored features, and the location of an image that was replaced although its stamp is
    the same; None where nothing is.
    """
    replaced = None
    is_readable = np.zeros(len(data.captions), dtype=bool)
    for shard, state in zip(shards, finished, strict=True):
        if state:
            is_readable[shard.first : shard.first + shard.count] = True
            is_readable[state.bad] = False
    for row in _sample_evenly(np.flatnonzero(is_readable), SPOT_CHECKS).tolist():
        shard = shards[row // SHARD]
        saved, position = _facts_of(shard), row - shard.first
        try:
            content, pixels = content_digest(data, row), data.pixels(row)
        except DataError:  # an image that is missing now was encoded
            continue
        if content != saved["contents"][position]:
            replaced = data.locate(row) if data.stamps[row] == saved["stamps"][position] else replaced
            continue
        saved_features = torch.from_numpy(np.load(shard.file, mmap_mode="r")[position].astype(np.float32))
        current = encoder.encode_views(resize(pixels, encoder.read_size)[None], [row])[0]
        if not (saved_features * current).sum(-1).min() > SPOT_COSINE:
            return f"{data.locate(row)} gives other features now", replaced
    return None, replaced


def _sample_evenly(rows: Rows, count: int) -> Rows:
    return rows[:: -(-len(rows) // count) or 1]


def _plan(
    shards: Sequence[Shard],
    finished: Sequence[ShardState | None],
    data: CaptionedImages,
    distrust: bool,
    console: Console,
) -> Plan:
    """Return the rows to read: all of new shards, and those whose files have other stamps now."""
    plan = Plan()
    new = compared = 0
    for number, (shard, state) in enumerate(zip(shards, finished, strict=True)):
        rows = _stamps(shard, data) if state is None or distrust else state.changed
        if rows:
            plan[number] = rows
        new, compared = (new + len(rows), compared) if state is None else (new, compared + len(rows))
    if new:
        console.info(f"encoding {count_noun(new, 'image')} once, into {shards[0].file.parent}")
    if compared:
        console.info(
            f"comparing {compared} images with the encoded ones: their files have other dates or inodes than before, "
            "as copies have"
        )
    return plan


def _unreadable(
    shards: Sequence[Shard],
    finished: Sequence[ShardState | None],
    previous_contents: Mapping[int, Sequence[str]],
    plan: Plan,
    console: Console,
) -> list[int]:
    """Return the rows of unreadable images, and report the number of images that have changed."""
    unreadable, changed, compared = list[int](), 0, 0
    for number, (shard, state) in enumerate(zip(shards, finished, strict=True)):
        compared += shard.count if state else 0
        if state and number not in plan:
            unreadable += state.bad
            continue
        current = _facts_of(shard)["contents"]
        unreadable += [row for row, content in enumerate(current, shard.first) if not content]
        previous = previous_contents.get(number, current)
        changed += sum(previous_content != new for previous_content, new in zip(previous, current, strict=True))
    if changed:
        console.warn(f"{changed} of {compared} images changed since they were encoded; these were encoded again")
    return unreadable
