"""Checks of a batch: whether ranks divide it, and the shared memory that its loading takes."""

from __future__ import annotations

from typing import Literal

import torch

from dpn_cli.data.collate import chunk_size, chunks_in_memory
from dpn_cli.data.findings import DataFindings
from dpn_cli.data.loader import count_workers
from dpn_cli.engine.fit import refuse_batch
from dpn_cli.errors import DpnError
from dpn_cli.run.console import count_noun
from dpn_cli.run.cores import SHARED, shared_memory


def check_batch(
    findings: DataFindings,
    images: int,
    batch_size: int,
    ranks: int,
    workers: int | Literal["auto"],
    image_bytes: int | None = None,
) -> None:
    """Check that `ranks` of this machine divide a batch, and add a note about the memory of its loading.

    Args:
        findings: receives problems, warnings and notes.
        images: those to train on.
        batch_size: images of all ranks.
        ranks: number of them.
        workers: those of one rank.
        image_bytes: bytes of a loaded image; None for a training that reads features from a cache.
    """
    if batch_size % ranks:
        try:
            refuse_batch(batch_size, ranks)
        except DpnError as error:
            findings.add_problems("batch", str(error))
        return
    if batch_size > images:
        findings.warnings.append(f"a batch of {batch_size} is more than the {count_noun(images, 'image')} to train on")
    if image_bytes is None:
        return
    rank_batch = batch_size // ranks
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    processes = count_workers(workers, device, ranks)
    shared_images = ranks * chunks_in_memory(processes) * min(rank_batch, chunk_size(image_bytes, processes, ranks))
    required, free = shared_images * image_bytes if processes else 0, shared_memory()
    steps, loaders = images / batch_size, count_noun(processes, "process")
    findings.notes.append(
        f"a batch of {batch_size} on {count_noun(ranks, 'rank')}: {rank_batch} each, {steps:.1f} steps an epoch; "
        f"decoded by {loaders} a rank, with up to {required / 1e6:.0f} MB in shared memory"
    )
    if free is not None and required > free:
        findings.warnings.append(
            f"{SHARED} has {free / 1e9:.2g} GB free, and images that are handed over take up to {required / 1e9:.2g} "
            "GB; start the container with a larger --shm-size, or pass a smaller -j"
        )
