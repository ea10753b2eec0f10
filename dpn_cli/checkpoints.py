"""Weight files of other projects, read into one layout: timm's names plus the stem's norms.

One function per format. A reader renames and reshapes; it decides nothing about the network to build, and it
never drops a tensor silently: what it does not know stays in the state dict under its own name, and loading
refuses it (`dpn_cli.backbone`).
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dpn_cli.arch import Stem
from dpn_cli.errors import DataError
from dpn_cli.files import file_digest

State = dict[str, Tensor]
Act = Literal["gelu_tanh", "gelu"]

# What the loaders and readers raise on a file that is cut off, altered or made of something else than arrays.
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    SafetensorError,
)

# Modules that wrap a network when it is saved from inside a training loop.
WRAPPERS = ("module.", "_orig_mod.", "model.")


@dataclass
class Checkpoint:
    """A weight file in our layout, with what its format fixes about the network.

    `mean` and `std` are those of the inputs it was trained with, on pixels in [0, 1]. `heads` and `grid` are None
    where the file does not say. `renamed` maps names of the file to ours, `dropped` lists what is no weight.
    """

    state: State
    format: str
    stem: Stem
    eps: float
    act: Act
    heads: int | None = None
    grid: tuple[int, int] | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    posemb: Literal["learn", "sincos2d"] = "learn"
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digest: str = ""
    source: str = ""


def read_file(path: Path) -> Checkpoint:
    """Read a weight file of any known format.

    Raises `DataError` when there is no such file, or it is damaged or of no known format.
    No pickled object is ever executed: NumPy's and PyTorch's loaders are restricted to plain arrays.
    """
    if not path.is_file():
        raise DataError(f"--checkpoint {path}: no such file")
    try:
        tensors, metadata = _READ_BY_SUFFIX.get(path.suffix, _read_torch)(path)
        checkpoint = next((read(tensors, metadata) for matches, read in FORMATS if matches(tensors, metadata)), None)
    except _DAMAGE as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise DataError(
            f"--checkpoint {path}: truncated, damaged or not a file of plain tensors ({reason}); "
            "fetch it again, or save it as .safetensors"
        ) from error
    if checkpoint is None:
        seen = ", ".join(sorted(tensors)[:6])
        raise DataError(
            f"--checkpoint {path}: not a format that dpn reads; it holds {len(tensors)} tensors "
            f"({seen}, ...). Known: big_vision .npz, timm state dicts, dpn exports"
        )
    checkpoint.source, checkpoint.digest = str(path), file_digest(path)
    return checkpoint


def _read_npz(path: Path) -> tuple[State, dict[str, str]]:
    # NumPy leaves a file open that it opened itself and could not read.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: _from_numpy(arrays[name]) for name in arrays.files}, {}


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype == np.dtype("V2"):  # NumPy has no bfloat16 and stores its two bytes as void
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def _read_safetensors(path: Path) -> tuple[State, dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _read_torch(path: Path) -> tuple[State, dict[str, str]]:
    with warnings.catch_warnings(action="ignore"):  # about the pickle protocol of files that are refused anyway
        content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, not a state dict")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}, {}


_READ_BY_SUFFIX: dict[str, Callable[[Path], tuple[State, dict[str, str]]]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}


def _is_ours(tensors: State, metadata: dict[str, str]) -> bool:
    return "dpn" in metadata


def _from_ours(tensors: State, metadata: dict[str, str]) -> Checkpoint:
    described = json.loads(metadata["dpn"])
    for key in ("grid", "mean", "std"):
        described[key] = tuple(described[key])
    return Checkpoint(state=tensors, format="dpn", **described)


def describe(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the safetensors metadata that `read_file` needs to give `checkpoint` back."""
    keys = ("stem", "eps", "act", "heads", "grid", "mean", "std", "posemb")
    return {"dpn": json.dumps({key: getattr(checkpoint, key) for key in keys})}


def _is_big_vision(tensors: State, metadata: dict[str, str]) -> bool:
    return any(re.search(r"(^|/)Transformer/encoderblock_\d+/", name) for name in tensors)


# big_vision's module names inside a block, and AugReg's (saved before flax linen numbered modules per kind).
_BLOCK = {
    "LayerNorm_0": "norm1",
    "MultiHeadDotProductAttention_0": "attn",
    "MultiHeadDotProductAttention_1": "attn",
    "LayerNorm_1": "norm2",
    "LayerNorm_2": "norm2",
    "MlpBlock_0": "mlp",
    "MlpBlock_3": "mlp",
    "Dense_0": "fc1",
    "Dense_1": "fc2",
    "out": "proj",
}
# The stem: the paper's listing names its modules ln0, dense and ln1; public code has the convolution `embedding`.
_STEM = {
    "ln0": "patch_embed.norm_in",
    "ln1": "patch_embed.norm",
    "dense": "patch_embed.proj",
    "embedding": "patch_embed.proj",
}
_LEAF = {"kernel": "weight", "scale": "weight", "bias": "bias"}


def _from_big_vision(tensors: State, metadata: dict[str, str]) -> Checkpoint:
    prefix = next((p for p in ("params/", "opt/target/") if any(n.startswith(p) for n in tensors)), "")
    dropped = [name for name in tensors if not name.startswith(prefix)]
    arrays = {name.removeprefix(prefix): value.float() for name, value in tensors.items() if name.startswith(prefix)}
    state: State = {}
    renamed: dict[str, str] = {}
    heads = None
    for name, value in arrays.items():
        ours = _big_vision_name(name)
        if re.search(r"/(query|key|value)/kernel$", name):
            heads = value.shape[1]
        if ours is not None:
            state[ours], renamed[prefix + name] = _big_vision_layout(ours, value), ours
        else:
            state[name] = value
    _fuse_qkv(state, renamed)
    notes = _split_class_position(state)
    sincos = "pos_embed" not in state
    return Checkpoint(
        state,
        "big_vision",
        _stem_of(state),
        eps=1e-6,
        act="gelu_tanh",
        heads=heads,
        renamed=renamed,
        dropped=dropped,
        notes=notes,
        posemb="sincos2d" if sincos else "learn",
    )


def _big_vision_name(name: str) -> str | None:
    """Return our name of a big_vision array (q, k and v still apart), or None for an unknown one."""
    parts = name.split("/")
    if name in {"cls", "pos_embedding", "Transformer/pos_embedding", "Transformer/posembed_input/pos_embedding"}:
        return "cls_token" if name == "cls" else "pos_embed"
    leaf = _LEAF.get(parts[-1])
    if leaf is None:
        return None
    match parts[:-1]:
        case ["Transformer", "encoder_norm"]:
            return f"norm.{leaf}"
        case ["pre_logits" | "head" as module]:
            return f"{module}.{leaf}"
        case [module] | ["embedding" | "stem" | "patch_embed", module] if module in _STEM:
            return f"{_STEM[module]}.{leaf}"
        case ["Transformer", block, *inner] if block.startswith("encoderblock_"):
            known = [_BLOCK.get(part, part if part in {"query", "key", "value"} else None) for part in inner]
            if None not in known:
                return f"blocks.{block.removeprefix('encoderblock_')}.{'.'.join(map(str, known))}.{leaf}"
    return None


def _big_vision_layout(ours: str, value: Tensor) -> Tensor:
    """Turn a flax array into PyTorch's layout: kernels are (in, out), attention keeps its heads apart."""
    if ours == "patch_embed.proj.weight":
        if value.ndim == 4:
            return value.permute(3, 2, 0, 1)  # p q c d -> d c p q
        side = int((value.shape[0] // 3) ** 0.5)
        return value.reshape(side, -1, 3, value.shape[1]).permute(3, 2, 0, 1)
    if re.search(r"attn\.(query|key|value)\.weight$", ours):
        return value.flatten(1).T  # d heads k -> (heads k) d
    if re.search(r"attn\.(query|key|value)\.bias$", ours):
        return value.flatten()
    if ours.endswith("attn.proj.weight"):
        return value.flatten(0, 1).T  # heads k d -> d (heads k)
    return value.T if ours.endswith(".weight") and value.ndim == 2 else value


def _fuse_qkv(state: State, renamed: dict[str, str]) -> None:
    """Stack q, k and v of every block into timm's qkv, where all three are present."""
    for first in [name for name in state if ".attn.query." in name]:
        parts = [first.replace("query", part) for part in ("query", "key", "value")]
        if all(part in state for part in parts):
            fused = first.replace("query", "qkv")
            state[fused] = torch.cat([state.pop(part) for part in parts])
            renamed.update({theirs: fused for theirs, ours in renamed.items() if ours in parts})


def _split_class_position(state: State) -> list[str]:
    """Move the class token's own position entry, where there is one, into the class token: the same function."""
    posemb, token = state.get("pos_embed"), state.get("cls_token")
    if posemb is None or token is None:
        return []
    patches = posemb.shape[1] - 1
    if patches < 1 or int(patches**0.5) ** 2 != patches:
        return []
    state["cls_token"] = token + posemb[:, :1]
    state["pos_embed"] = posemb[:, 1:]
    return ["the class token's position entry was added to the class token"]


def _is_timm(tensors: State, metadata: dict[str, str]) -> bool:
    names = {_unwrap(name) for name in tensors}
    return {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= names


def from_timm(tensors: State, metadata: dict[str, str]) -> Checkpoint:
    """Read a timm VisionTransformer's state dict, its wrappers' prefixes removed."""
    renamed = {name: _unwrap(name) for name in tensors if _unwrap(name) != name}
    state = {_unwrap(name): value.float() for name, value in tensors.items()}
    notes = _split_class_position(state)
    notes.append("eps 1e-6, erf GELU and mean = std = 0.5 are assumed: a bare timm file does not say")
    return Checkpoint(state, "timm", _stem_of(state), eps=1e-6, act="gelu", renamed=renamed, notes=notes)


def _unwrap(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def _stem_of(state: State) -> Stem:
    """Tell the stem by the names of its norms, never by their shapes: for B/16 both have 768 features."""
    first, second = "patch_embed.norm_in.weight" in state, "patch_embed.norm.weight" in state
    if first and second:
        centred = "patch_embed.norm_in.bias" in state or "patch_embed.norm.bias" in state
        return "dpn" if centred else "rms"
    if "norm_posemb.weight" in state:
        return "post_posemb"
    return "pre" if first else "post" if second else "none"


# The first match wins; no two can match one file, because each asks for names that the others do not use.
FORMATS: tuple[tuple[Callable[[State, dict[str, str]], bool], Callable[[State, dict[str, str]], Checkpoint]], ...] = (
    (_is_ours, _from_ours),
    (_is_big_vision, _from_big_vision),
    (_is_timm, from_timm),
)
