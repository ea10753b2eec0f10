"""Safetensors files that notice damage: each holds a checksum of every tensor and of its own metadata."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpn_cli.errors import DataError
from dpn_cli.run.files import replace_file

KEY = "checksums"


def write_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write tensors, metadata and their checksums to `path` atomically; returns the file's SHA-256.

    Raises `SaveError` when writing fails.
    """
    return replace_file(path, lambda temporary: save_weights(temporary, tensors, metadata))


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors, metadata and their checksums to a file that is not in use yet."""
    state = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    other_metadata = {name: text for name, text in metadata.items() if name != KEY}
    save_file(state, path, {**other_metadata, KEY: json.dumps(_checksums(state, other_metadata))})
    _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a file, so that equal contents are equal files: safetensors does not define its order."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")  # of the header: JSON, padded with spaces
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        assert len(content) == size
        file.seek(8)
        file.write(content)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file. Raises `DataError` when a checksum differs."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    verify(tensors, metadata)
    return tensors, metadata


def verify(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Raise `DataError` if tensors or metadata do not match their checksums; files without checksums pass."""
    if KEY not in metadata:
        return  # of another library, or written before there were checksums
    actual = _checksums(tensors, {name: text for name, text in metadata.items() if name != KEY})
    try:
        description = dict(json.loads(metadata[KEY]))
    except ValueError:
        description = {}
    damaged = [
        name or "its metadata" for name in {**description, **actual} if description.get(name) != actual.get(name)
    ]
    if damaged:
        suffix = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise DataError(
            f"the file is damaged: {', '.join(damaged[:3])}{suffix} differ from the checksums that were written with "
            "them; copy or download the file again, or make it again"
        )


def _checksums(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the CRC-32 of every tensor's bytes, type and shape, and under ``""`` that of the metadata."""
    text = json.dumps(sorted(metadata.items()))
    return {"": f"{zlib.crc32(text.encode()):08x}", **{name: _checksum(value) for name, value in tensors.items()}}


def _checksum(value: Tensor) -> str:
    start = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
    content = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{zlib.crc32(content.data, start):08x}"
