"""The arithmetic of loading: batches, ranks, processes, and the memory in which they hand images over."""

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
    findings: DataFindings, images: int, batch_size: int, ranks: int, workers: int | Literal["auto"], image_bytes: int
) -> None:
    """Note how a batch is shared by `ranks` of this machine, and what is wrong with that."""
    if batch_size % ranks:
        try:
            refuse_batch(batch_size, ranks)
        except DpnError as error:
            findings.problem("batch", str(error))
        return
    if batch_size > images:
        findings.warnings.append(f"a batch of {batch_size} is more than the {count_noun(images, 'image')} to train on")
    share = batch_size // ranks
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    processes = count_workers(workers, device, ranks)
    handed = ranks * chunks_in_memory(processes) * min(share, chunk_size(image_bytes, processes, ranks))
    needed, free = handed * image_bytes if processes else 0, shared_memory()
    findings.notes.append(
        f"a batch of {batch_size} on {count_noun(ranks, 'rank')}: {share} each, {images / batch_size:.1f} steps an "
        f"epoch; "
        f"decoded by {count_noun(processes, 'process')} a rank, with up to {needed / 1e6:.0f} MB in shared memory"
    )
    if free is not None and needed > free:
        findings.warnings.append(
            f"{SHARED} has {free / 1e9:.2g} GB free, and images that are handed over take up to {needed / 1e9:.2g} "
            "GB; start the container with a larger --shm-size, or pass a smaller -j"
        )
