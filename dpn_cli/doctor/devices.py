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

from dpn_cli.doctor.packages import REINSTALL_BOTH, first_line, installed_version
from dpn_cli.doctor.result import Finding
from dpn_cli.run.console import gigabytes

# Files of NVIDIA's driver.
DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
# Remedies of import errors by a pattern of their text; the first match counts.
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
MATRIX_SIZE = 256


def check_import(name: str) -> Iterator[Finding]:
    """Import a package; yields its version, or the import error."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # torch's libraries raise errors of many kinds
        found = f"{installed_version(name) or 'it'} cannot be imported: {first_line(error)}"
        yield Finding(name, "problem", found, _remedy(name, error))
        return
    if hasattr(module, "__version__"):
        yield Finding(name, "ok", module.__version__)
    else:
        found = f"{getattr(module, '__file__', None) or module} is imported in its place"
        yield Finding(name, "problem", found, "rename that file")


def _remedy(name: str, error: Exception) -> str:
    text, torch_version = str(error), installed_version("torch")
    remedy = next(remedy for pattern, remedy in REMEDIES if re.search(pattern, text))
    return remedy.format(name=name, torch=torch_version, together=REINSTALL_BOTH.format(f"torch=={torch_version}"))


def check_gpus() -> Iterator[Finding]:
    """Yield a finding for each GPU of this process, after a small product on it; or the reason for having none.

    Each of several ranks on a machine checks its own GPU only, since a check takes GPU memory.
    """
    import torch

    with warnings.catch_warnings(record=True) as messages:  # torch warns of a driver that does not fit
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        yield _describe_missing_gpu([str(warning.message) for warning in messages])
        return
    numbers = range(torch.cuda.device_count())
    local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
    yield from map(_gpu, numbers if local_rank < 0 else [number for number in numbers if number == local_rank])


def _describe_missing_gpu(messages: list[str]) -> Finding:
    import torch

    has_driver = any(path.exists() for path in DRIVER)
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_driver:
        return Finding("GPU", "ok", "none; trainings run on the CPU")
    if torch.version.cuda is None:
        found = f"this machine has NVIDIA's driver, and torch {torch.__version__} is built without CUDA"
        return Finding("GPU", "problem", found, "install a torch built with CUDA, and the torchvision next to it")
    if visible_devices is not None and not re.match(r"\d|GPU-|MIG-", visible_devices):
        found = f"hidden from this process by CUDA_VISIBLE_DEVICES={visible_devices!r}"
        return Finding("GPU", "warning", found, "unset CUDA_VISIBLE_DEVICES")
    reason = messages[0].split("\n")[0][:300] if messages else "torch does not say why"
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
        matrix = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device)
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


def check_precision() -> Iterator[Finding]:
    """Yield the meaning of ``--precision auto`` on this machine, and whether bf16 is computed or emulated."""
    import torch

    from dpn_cli.run.precision import LEAST_WIDTH, has_bf16_products

    if not torch.cuda.is_available():
        found = "fp32 by itself; bf16, which this CPU emulates slowly, with --precision bf16"
        if has_bf16_products():
            found = f"bf16 by itself for networks {LEAST_WIDTH} or more wide, else fp32; fp32 with --precision fp32"
        yield Finding("precision", "ok", f"{found} (the CPU has {torch.backends.cpu.get_cpu_capability()})")
    elif torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("precision", "ok", "bf16 by itself; fp32 with --precision fp32")
    else:
        found = "bf16 by itself, which this GPU emulates slowly"
        yield Finding("precision", "warning", found, "pass --precision fp32")


def check_compiler() -> Iterator[Finding]:
    """Yield whether the programs that ``--compile`` needs are installed."""
    import torch

    compilers = ["gcc", "clang", "cc"] if torch.cuda.is_available() else ["g++", "clang++", "c++"]
    compiler = os.environ.get("CC" if torch.cuda.is_available() else "CXX")
    program = next(filter(None, map(shutil.which, filter(None, [compiler, *compilers]))), None)
    missing = [] if program else ["a compiler (g++)"]
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        missing.append("triton")
    if missing:
        found = f"--compile needs {' and '.join(missing)}, which is not here"
        yield Finding("compile", "warning", found, "install it, or leave --compile out")
    else:
        yield Finding("compile", "ok", f"--compile finds {program}")
