"""Weight files of other projects, read into one layout: one reader per format, found by names alone."""

from __future__ import annotations

from collections.abc import Collection
from math import inf, isfinite
from pathlib import Path
from typing import get_args

import torch

from dpn_cli.arch import Act, Norm, Placement, Pool, Posemb, Stem
from dpn_cli.errors import DataError
from dpn_cli.run.artifact_kinds import DESCRIPTIONS, KEY, digest_in_run, resolve
from dpn_cli.run.files import file_digest
from dpn_cli.weights.formats import (
    big_vision,
    dtn_vit,
    open_clip_vit,
    ours,
    slab_deit,
    timm_vit,
    torchvision_vit,
    transformers_clip,
    transformers_dino,
    transformers_vit,
    vit_pytorch,
)
from dpn_cli.weights.formats.checkpoint_files import read_contents, select_weights
from dpn_cli.weights.formats.ours import network_metadata
from dpn_cli.weights.formats.state_dict import Checkpoint, Contents, Format, State
from dpn_cli.weights.formats.unsupported import reason_against

__all__ = ["FORMATS", "Act", "Checkpoint", "State", "check_facts", "formats_of", "network_metadata", "read_file"]

FORMATS = (
    Format("big_vision", big_vision.matches, big_vision.read),
    Format("timm", timm_vit.matches, timm_vit.read),
    Format("timm NaFlexViT", timm_vit.matches_naflex, timm_vit.read_naflex),
    Format("vit-pytorch", vit_pytorch.matches, vit_pytorch.read),
    Format("open_clip", open_clip_vit.matches, open_clip_vit.read),
    Format("open_clip (timm trunk)", open_clip_vit.matches_trunk, open_clip_vit.read_trunk),
    Format("torchvision", torchvision_vit.matches, torchvision_vit.read),
    Format("transformers", transformers_vit.matches, transformers_vit.read),
    Format("transformers CLIP", transformers_clip.matches, transformers_clip.read),
    Format("transformers DINOv3", transformers_dino.matches, transformers_dino.read),
    Format("DTN", dtn_vit.matches, dtn_vit.read),
    Format("SLAB", slab_deit.matches, slab_deit.read),
)
_OURS = Format("dpn", lambda names: False, ours.read)


def formats_of(names: Collection[str], metadata: Collection[str] = ()) -> list[Format]:
    """Return the formats that a file's tensor names (and its metadata's keys) fit: one, or none that dpn reads."""
    if ours.KEY in metadata:
        return [_OURS]
    return [fmt for fmt in FORMATS if fmt.matches(names)]


def read_file(path: Path) -> Checkpoint:
    """Read a weight file, or the folder of a saved model, of any known format.

    Raises `DataError` when there is no such file, or it is damaged or of no known format.
    No pickled object is ever executed: NumPy's and PyTorch's loaders are restricted to plain arrays.
    """
    path = Path(resolve(str(path), "--checkpoint"))
    try:
        if path.is_dir():
            path = select_weights(path)
        if not path.is_file():
            raise DataError("no such file")
        contents = _contents(path)
        checkpoint = _read(_only_format(contents), contents)
        checkpoint.source, checkpoint.digest = str(path), file_digest(path)
        if digest_in_run(path) not in (None, checkpoint.digest):
            raise DataError(
                "not the file that its run wrote (another SHA-256 is in run.json); bring that one back, or keep this "
                "one in a folder of its own"
            )
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    checkpoint.about = {key: text for key, text in contents.metadata.items() if key in (KEY, *DESCRIPTIONS)}
    return checkpoint


def _contents(path: Path) -> Contents:
    try:
        return read_contents(path)
    except DataError:
        raise
    except Exception as error:  # parsers of damaged files raise whatever the damage leads them to
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise DataError(
            f"truncated, damaged or not a file of plain tensors ({reason}); fetch it again, or save it as .safetensors"
        ) from error


def _read(fmt: Format, contents: Contents) -> Checkpoint:
    try:
        checkpoint = fmt.read(contents)
        check_facts(checkpoint)
        _check_numbers(checkpoint)
    except DataError:
        raise
    except Exception as error:  # a reader takes the layers for granted that its format has
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise DataError(f"it has the names of {fmt.name} but not its layers ({reason})") from error
    return checkpoint


def _only_format(contents: Contents) -> Format:
    names = list(contents.tensors)
    matching = formats_of(names, contents.metadata)
    if len(matching) == 1:
        return matching[0]
    if matching:
        format_names = " and ".join(fmt.name for fmt in matching)
        raise DataError(f"it has the names of {format_names}; keep one network in a file")
    if fmt := reason_against(names):
        raise DataError(f"not read. It looks like {fmt}")
    first_names = ", ".join(sorted(names)[:6]) or "nothing"
    raise DataError(
        f"not a format that dpn reads; it holds {len(names)} tensors "
        f"({first_names}{', ...' if len(names) > 6 else ''}). Known: dpn, {', '.join(fmt.name for fmt in FORMATS)}"
    )


def check_facts(checkpoint: Checkpoint) -> None:
    """Refuse a description that no network can have: it is as easily damaged as the weights. Raises `ValueError`."""
    pairs = list(zip(checkpoint.mean, checkpoint.std, strict=True))
    checks = {
        "stem": checkpoint.stem in get_args(Stem),
        "act": checkpoint.act in get_args(Act),
        "norm": checkpoint.norm in get_args(Norm),
        "placement": checkpoint.placement in get_args(Placement),
        "pool": checkpoint.pool in (None, *get_args(Pool)),
        "posemb": checkpoint.posemb in get_args(Posemb),
        "eps": 0 <= checkpoint.eps < 1,
        "heads": checkpoint.heads is None or checkpoint.heads > 0,
        "grid": checkpoint.grid is None or (len(checkpoint.grid) == 2 and min(checkpoint.grid) > 0),
        "mean and std": len(pairs) == 3 and all(isfinite(mean) and 0 < std < inf for mean, std in pairs),
    }
    for name, is_valid in checks.items():
        if not is_valid:
            raise ValueError(f"its description has no sound {name}")


def _check_numbers(checkpoint: Checkpoint) -> None:
    """Refuse weights that are not floating point, or not finite."""
    for name, value in checkpoint.state.items():
        if not value.is_floating_point():
            raise DataError(f"{name} is {str(value.dtype).removeprefix('torch.')}, not floating point")
        if not torch.isfinite(value).all():
            raise DataError(f"{name} holds NaN or infinite values; its training went wrong")
