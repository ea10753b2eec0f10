"""The precision in which the matrices of a network are multiplied."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import nn

from dpn_cli.config.schema import Runtime
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World

Precision = Literal["bf16", "fp32"]

# Narrower networks are no faster in bfloat16 on a CPU; `benchmarks/precision.py` measures it.
LEAST_WIDTH = 128


@cache
def has_bf16_products() -> bool:
    """Return whether this machine's CPU multiplies matrices of bfloat16 (AVX-512 BF16 or AMX), and torch uses it."""
    capabilities = torch.cpu.get_capabilities()
    return bool(torch.backends.mkldnn.is_available()) and any(  # type: ignore[no-untyped-call]
        capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16")
    )


def width_of(network: nn.Module) -> int:
    """Return the width of a transformer's tokens: the largest of the shorter sides of its matrices, 0 without any."""
    return max((min(module.weight.shape) for module in network.modules() if isinstance(module, nn.Linear)), default=0)


def choose_precision(runtime: Runtime, device: str, width: int) -> Precision:
    """Return the precision of a network of a width on a type of device ("cpu", "cuda").

    ``auto`` is bf16 on a GPU, and on a CPU where that is faster: with products of bfloat16, and a network of at least
    `LEAST_WIDTH`. Otherwise it is fp32.
    """
    if runtime.precision != "auto":
        return runtime.precision
    return "bf16" if device == "cuda" or (width >= LEAST_WIDTH and has_bf16_products()) else "fp32"


def precision_of(runtime: Runtime, device: torch.device, *networks: nn.Module) -> Precision:
    """Return the precision of networks that are computed together; the widest one decides."""
    return choose_precision(runtime, device.type, max(map(width_of, networks)))


def announce_precision(runtime: Runtime, world: World, console: Console, *networks: nn.Module) -> Precision:
    """Return `precision_of` networks, and say that it is bf16 where a CPU decides it."""
    precision = precision_of(runtime, world.device, *networks)
    if runtime.precision == "auto" and world.device.type == "cpu" and precision == "bf16":
        console.info("matrices are multiplied in bf16, in which this CPU is faster; --precision fp32 is exact")
    return precision


def autocast(runtime: Runtime, device: torch.device, *networks: nn.Module) -> torch.autocast:
    """Return the context in which networks are computed: `precision_of` them, with weights of float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision_of(runtime, device, *networks) == "bf16")
