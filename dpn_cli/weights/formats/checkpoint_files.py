"""Weight files as they lie on the disk, opened without ever executing what is in them.

NumPy's and PyTorch's loaders are restricted to plain arrays, and a file that unpacks to far more than it holds is
refused before it is unpacked.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from dpn_cli.errors import DataError
from dpn_cli.weights.formats.state_dict import Contents, State
from dpn_cli.weights.safetensors_io import read_weights

# A trained network hardly compresses; archives that unpack to more than both of these are not weights.
MOST_UNPACKED, MOST_RATIO = 2**30, 100
# Tied tensors are stored once and count twice; a tensor of stride zero can claim any size.
MOST_SHARED = 8

# What a hub repository or a saved model's folder calls its weights, best first.
WEIGHT_NAMES = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
CONFIG_NAMES = ("config.json", "open_clip_config.json")
INPUTS_NAME = "preprocessor_config.json"


# Files that are taken for weights, by their first bytes.
_OTHERS = {
    b"GGUF": "a GGUF file (of a language model)",
    b"\x89HDF": "an HDF5 file (Keras)",
    b"version h": "a Git-LFS pointer instead of the file itself; fetch it with git lfs pull",
    b"<": "a web page instead of the file; download it again",
}


def select_weights(folder: Path) -> Path:
    """Return the weight file of a saved model's folder. Raises `DataError` when there is none or more than one."""
    # A repository may hold a CLIP for two libraries: then open_clip's file is the one that is read.
    first = "open_clip" if (folder / "open_clip_config.json").is_file() else "model"
    ordered = sorted(WEIGHT_NAMES, key=lambda name: not name.startswith(first))
    candidates = [folder / name for name in ordered if (folder / name).is_file()]
    candidates = candidates or [path for path in sorted(folder.iterdir()) if path.suffix in {".npz", ".safetensors"}]
    if not candidates:
        raise DataError(f"a folder without {', '.join(WEIGHT_NAMES)}; pass the weight file")
    if len(candidates) > 1 and candidates[0].name not in WEIGHT_NAMES:
        names = ", ".join(path.name for path in candidates[:4])
        raise DataError(f"a folder with several weight files ({names}); pass one of them")
    return candidates[0]


def read_contents(path: Path) -> Contents:
    """Read all tensors of a file, and the descriptions that its library saves next to it."""
    contents = _reader_of(path)(path)
    for name, value in contents.tensors.items():
        if value.is_complex():
            raise ValueError(f"{name} holds complex numbers")
    if path.name in WEIGHT_NAMES:
        for name in CONFIG_NAMES:
            contents.config |= _read_json(path.parent / name)
        contents.inputs = _read_json(path.parent / INPUTS_NAME)
    return contents


def _reader_of(path: Path) -> Callable[[Path], Contents]:
    """Tell the container by its first bytes: files are renamed more often than rewritten."""
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:9] == b"{":  # after the length of the header, its JSON
        return _read_safetensors
    for magic, content_kind in _OTHERS.items():
        if start.lstrip().startswith(magic):
            raise DataError(f"{content_kind}, not a file of plain tensors")
    if start.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            raise DataError(
                "a TorchScript archive, which holds code; save its state dict: torch.jit.load(...).state_dict()"
            )
        return _read_npz if names and all(name.endswith(".npy") for name in names) else _read_torch
    return _read_torch


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path.name} next to it is not JSON ({error}); mend it, or pass a copy of the weights alone"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path.name} next to it holds a {type(content).__name__}, not an object")
    return content


def _check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > max(MOST_UNPACKED, MOST_RATIO * path.stat().st_size):
        raise ValueError(f"{path.stat().st_size} bytes that unpack to {unpacked}")


def _read_npz(path: Path) -> Contents:
    _check_archive(path)
    tensors: State = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                _check_npy(file, member)
            with archive.open(member) as file:
                name = member.filename.removesuffix(".npy")
                tensors[name] = _from_numpy(name, npy.read_array(file, allow_pickle=False))
    return Contents(tensors)


def _check_npy(file: Any, member: zipfile.ZipInfo) -> None:
    """Compare the array that a member's header promises with the bytes that it has: NumPy allocates first."""
    version = npy.read_magic(file)
    with warnings.catch_warnings(action="ignore"):
        shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
    size = dtype.itemsize
    for length in shape:
        size *= length
    if dtype.hasobject or not 0 <= size <= member.file_size:
        raise ValueError(f"{member.filename} claims shape {shape} of {dtype} in {member.file_size} bytes")


def _from_numpy(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype == np.dtype("V2"):  # NumPy has no bfloat16 and stores its two bytes as void
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name} is of type {array.dtype}, not numbers")
    native_array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(native_array).reshape(array.shape))


def _read_safetensors(path: Path) -> Contents:
    return Contents(*read_weights(path))


def _read_torch(path: Path) -> Contents:
    if zipfile.is_zipfile(path):
        _check_archive(path)
    content, notes = _state_dict(_load_plain(path))
    tensors = {str(name): value.detach() for name, value in content.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise ValueError(f"{name} is not a plain tensor")
    if sum(value.nbytes for value in tensors.values()) > MOST_SHARED * max(path.stat().st_size, 2**20):
        raise ValueError("its tensors claim more bytes than the file has")
    return Contents(tensors, notes=notes)


def _state_dict(content: Any) -> tuple[dict[str, Any], list[str]]:
    """Find the state dict in what training scripts save, and note what else was there."""
    inner = content
    for key in ("state_dict", "model"):
        if isinstance(inner, dict) and isinstance(inner.get(key), dict):
            inner = inner[key]
    if not isinstance(inner, dict):
        raise DataError(f"holds a {type(inner).__name__}, not a state dict")
    if not any(isinstance(value, Tensor) for value in inner.values()):
        entries = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in list(inner.items())[:6])
        raise DataError(f"no tensors under 'state_dict' or 'model'; it has {entries or 'nothing'}; save one of them")
    return inner, [f"the file's {key} was not used" for key in ("state_dict_ema", "model_ema") if key in content]


def _load_plain(path: Path) -> Any:
    """Let PyTorch read a file of tensors and plain values; timm and others also store their arguments' Namespace."""
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # about the pickle protocol of files that are refused anyway
            torch.serialization.safe_globals([argparse.Namespace]),
        ):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        content_kind = f"Python objects ({match[1]})" if match else "something else"
        raise DataError(
            f"holds {content_kind}, so it is not a file of plain tensors and is not opened; save the state dict alone"
        ) from error
