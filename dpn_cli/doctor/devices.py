"""Checks of torch, its extensions and the devices. Imports torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from dpn_cli.doctor.packages import TOGETHER, first_line, installed
from dpn_cli.doctor.result import Finding
from dpn_cli.run.console import gigabytes

# Files that the driver of NVIDIA's GPUs makes.
DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
# What the errors of an import mean, and what to do. The first pattern that is found decides.
REMEDIES = (
    (r"torchvision::\w+ does not exist|different CUDA", "it is built for another torch than {torch}; {together}"),
    (r"GLIBC|GLIBCXX", "the system's libraries are too old for this build; use a newer system or container"),
    (
        r"\.so|undefined symbol|DLL",
        "libraries of another version are found first, or some are missing: unset LD_LIBRARY_PATH, or reinstall: "
        "pip install --force-reinstall {name}",
    ),
    ("", "reinstall it: pip install --force-reinstall {name}"),
)
# Side of the matrices that each GPU multiplies, as a test that this torch has code for it.
SIDE = 256


def imported(name: str) -> Iterator[Finding]:
    """Import a package; yields its version, or why it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # torch's libraries raise errors of many kinds
        found = f"{installed(name) or 'it'} cannot be imported: {first_line(error)}"
        yield Finding(name, "problem", found, _remedy(name, error))
        return
    if hasattr(module, "__version__"):
        yield Finding(name, "ok", module.__version__)
    else:
        found = f"{getattr(module, '__file__', None) or module} is imported in its place"
        yield Finding(name, "problem", found, "rename that file")


def _remedy(name: str, error: Exception) -> str:
    text, here = str(error), installed("torch")
    remedy = next(remedy for pattern, remedy in REMEDIES if re.search(pattern, text))
    return remedy.format(name=name, torch=here, together=TOGETHER.format(f"torch=={here}"))


def gpus() -> Iterator[Finding]:
    """Yield each GPU that this process may use, after a small product on it; or why there is none.

    Of several ranks on a machine, each looks at its own: to look at a GPU takes memory of it.
    """
    import torch

    with warnings.catch_warnings(record=True) as told:  # where the driver does not fit, torch warns
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        yield _no_gpu([str(warning.message) for warning in told])
        return
    numbers = range(torch.cuda.device_count())
    own = int(os.environ.get("LOCAL_RANK", "-1"))
    yield from map(_gpu, numbers if own < 0 else [number for number in numbers if number == own])


def _no_gpu(told: list[str]) -> Finding:
    import torch

    there = any(path.exists() for path in DRIVER)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not there:
        return Finding("GPU", "ok", "none; trainings run on the CPU")
    if torch.version.cuda is None:
        found = f"this machine has NVIDIA's driver, and torch {torch.__version__} is built without CUDA"
        return Finding("GPU", "problem", found, "install a torch built with CUDA, and the torchvision beside it")
    if hidden is not None and not re.match(r"\d|GPU-|MIG-", hidden):
        found = f"hidden from this process by CUDA_VISIBLE_DEVICES={hidden!r}"
        return Finding("GPU", "warning", found, "unset CUDA_VISIBLE_DEVICES")
    reason = told[0].split("\n")[0][:300] if told else "torch does not say why"
    return Finding(
        "GPU",
        "problem",
        f"not usable with torch {torch.__version__} (CUDA {torch.version.cuda}): {reason}",
        "update NVIDIA's driver, or install a torch that is built for an older CUDA; 'nvidia-smi' shows what the "
        "driver supports",
    )


def _gpu(number: int) -> Finding:
    import torch

    name, device = f"GPU {number}", torch.device("cuda", number)
    try:
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        matrix = torch.randn(SIDE, SIDE, device=device)
        product, expected = (matrix @ matrix).cpu(), matrix.cpu() @ matrix.cpu()
    except RuntimeError as error:
        built = ", ".join(torch.cuda.get_arch_list())
        remedy = f"this torch has code for {built}; install one that is built for this GPU, or restart the driver"
        return Finding(name, "problem", first_line(error), remedy)
    found = f"{properties.name} ({properties.major}.{properties.minor}), {gigabytes(free)} of {gigabytes(total)} free"
    if not torch.allclose(product, expected, atol=1.0):  # TF32 is right to a thousandth of the sums of 256 products
        return Finding(name, "problem", f"{found}; a product of matrices is wrong on it", "use another GPU")
    if free < total / 2:
        return Finding(name, "warning", f"{found}; other programs use it", "'nvidia-smi' shows them")
    return Finding(name, "ok", found)


def precision() -> Iterator[Finding]:
    """Yield what ``--precision auto`` stands for here, and whether bf16 is computed or emulated."""
    import torch

    if not torch.cuda.is_available():
        found = f"fp32 by itself; bf16 with --precision bf16 (the CPU has {torch.backends.cpu.get_cpu_capability()})"
        yield Finding("precision", "ok", found)
    elif torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("precision", "ok", "bf16 by itself; fp32 with --precision fp32")
    else:
        found = "bf16 by itself, which this GPU emulates slowly"
        yield Finding("precision", "warning", found, "pass --precision fp32")


def compiler() -> Iterator[Finding]:
    """Yield whether ``--compile`` has the programs that it needs."""
    import torch

    wanted = ["gcc", "clang", "cc"] if torch.cuda.is_available() else ["g++", "clang++", "c++"]
    named = os.environ.get("CC" if torch.cuda.is_available() else "CXX")
    program = next(filter(None, map(shutil.which, [named, *wanted] if named else wanted)), None)
    missing = [] if program else ["a compiler (g++)"]
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        missing.append("triton")
    if missing:
        found = f"--compile needs {' and '.join(missing)}, which is not here"
        yield Finding("compile", "warning", found, "install it, or leave --compile out")
    else:
        yield Finding("compile", "ok", f"--compile finds {program}")
