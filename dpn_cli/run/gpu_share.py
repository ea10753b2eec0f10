"""The part of a GPU that this process has, where several trainings run on one.

What starts them says so in the environment: ``DPN_GPU_SHARE=4`` is one of four equal parts. ``DPN_GPU_SHARE=8:FILE`` is
the whole GPU until the training has been measured, then one of as many parts as fit, at most 8; FILE
receives the number.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dpn_cli.errors import DpnError
from dpn_cli.run.files import replace_json
from dpn_cli.run.process import SHARE

# Share of a GPU's memory that is left free.
SPARE = 0.1
# Bytes of a process on a GPU outside PyTorch's allocator: CUDA's context and its loaded kernels.
CONTEXT = 800_000_000
# Steps after which a training is measured: the optimizer has its state after the first one.
MEASURED_STEPS = 3


def part_of(memory: int, parts: int) -> int:
    """Return the bytes that the allocator may reserve in one of several processes on a GPU with so much memory.

    Raises `DpnError` when nothing is left for it.
    """
    part = int((1 - SPARE) * memory / parts) - CONTEXT
    if part <= 0:
        raise DpnError(
            f"{parts} processes do not fit into {memory / 1e9:.0f} GB of GPU memory; use a smaller --jobs-per-gpu or "
            "--jobs"
        )
    return part


def max_processes_per_gpu(memory: int, reserved: int, most: int) -> int:
    """Return how many processes, at most `most`, fit on a GPU when the allocator of each reserves so many bytes."""
    return max(1, min(most, int((1 - SPARE) * memory / (reserved + CONTEXT))))


def is_shared() -> bool:
    """Return whether this process has to leave memory of its GPU to others."""
    return os.environ.get(SHARE, "").isdecimal()


def keep_to_part(device: torch.device) -> None:
    """Have PyTorch's allocator keep to this process's part of a GPU: there is no more for it, as on a smaller GPU.

    Two processes that both look for the largest micro-batch then find it, whatever the other one takes meanwhile.
    """
    if device.type == "cuda" and is_shared():
        memory = torch.cuda.get_device_properties(device).total_memory
        part = part_of(memory, int(os.environ[SHARE]))
        torch.cuda.set_per_process_memory_fraction(part / memory, device)


def measure(device: torch.device) -> None:
    """Tell how many processes like this one fit on the GPU, if that was asked for, and keep to one's part from now on.

    Call it when a training has taken `MEASURED_STEPS`, or has ended before.
    """
    most, _, file = os.environ.get(SHARE, "").partition(":")
    if device.type != "cuda" or not file:
        return
    reserved = torch.cuda.max_memory_reserved(device)
    parts = max_processes_per_gpu(torch.cuda.get_device_properties(device).total_memory, reserved, int(most))
    del os.environ[SHARE]
    if parts > 1:
        os.environ[SHARE] = str(parts)
        keep_to_part(device)
    replace_json(Path(file), {"reserved_bytes": reserved, "parts": parts})
