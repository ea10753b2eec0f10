"""Names of architectures and stems. Imports nothing heavy, because help and completion read it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from dpn_cli.errors import DpnError

NameT = TypeVar("NameT", bound=str)
Stem = Literal["none", "pre", "post", "post_posemb", "dpn", "dpn_no_affine", "affine_only", "rms"]
Pool = Literal["tok", "gap", "map"]
Posemb = Literal["learn", "sincos2d", "rope"]
Act = Literal["gelu_tanh", "gelu", "quick_gelu"]
Norm = Literal["ln", "bn", "in", "gn", "sn", "scalenorm", "powernorm", "un", "prepbn", "rms", "dtn", "none"]
Placement = Literal[
    "pre,pre",
    "pre,post",
    "pre,pre+post",
    "post,pre",
    "post,post",
    "post,pre+post",
    "pre+post,pre",
    "pre+post,post",
    "pre+post,pre+post",
    "normformer",
    "subln",
]

# Dual PatchNorm and its ablations, arXiv 2302.01327 Table 6; p is the flattened patch, e the position embedding.
STEMS: dict[Stem, str] = {
    "none": "plain ViT: W p + b + e",
    "pre": "LN before the projection only",
    "post": "LN after the projection only",
    "post_posemb": "LN after adding the position embedding",
    "dpn": "Dual PatchNorm: LN(W LN(p) + b) + e",
    "dpn_no_affine": "Dual PatchNorm without learned scale and bias",
    "affine_only": "learned scale and bias in both places, no normalisation",
    "rms": "RMSNorm in both places (no centring, no bias)",
}
assert tuple(STEMS) == get_args(Stem), "STEMS and Stem list the same names in the same order"

# Normalisers of the transformer blocks; tokens are x (batch, tokens, channels).
NORMS: dict[Norm, str] = {
    "ln": "LayerNorm: over the channels of a token",
    "bn": "batch norm: per channel over batch and tokens, running statistics in evaluation",
    "in": "instance norm: per image and channel over the tokens",
    "gn": "group norm: per image and head over the tokens and the head's channels",
    "sn": "switchable norm: learned mixture of instance, layer and batch statistics (arXiv 1806.10779)",
    "scalenorm": "ScaleNorm: length of a token, one learned scale (arXiv 1910.05895)",
    "powernorm": "PowerNorm: running second moment per channel (arXiv 2003.07845)",
    "un": "unified normalisation: smoothed second moments per channel (arXiv 2208.01313)",
    "prepbn": "progressive re-parameterised batch norm: from LayerNorm to BN(x) + eta x (arXiv 2405.11582)",
    "rms": "RMSNorm: no centring, no bias",
    "dtn": "dynamic token normalisation: learned mixture within and between tokens (arXiv 2112.02624)",
    "none": "no norm, as in a network whose norms were folded into the layers behind them",
}
assert tuple(NORMS) == get_args(Norm), "NORMS and Norm list the same names in the same order"

# Where the norms of a block are, for its attention and its MLP (arXiv 2302.01327 Figure 1).
PLACEMENTS: dict[Placement, str] = {
    "pre,pre": "before attention and MLP (pre-LN, the ViT's own)",
    "pre,post": "before the attention, after the MLP",
    "pre,pre+post": "before the attention, before and after the MLP",
    "post,pre": "after the attention, before the MLP",
    "post,post": "after attention and MLP (post-LN)",
    "post,pre+post": "after the attention, before and after the MLP",
    "pre+post,pre": "before and after the attention, before the MLP",
    "pre+post,post": "before and after the attention, after the MLP",
    "pre+post,pre+post": "before and after both",
    "normformer": "NormFormer (arXiv 2110.09456): before both, and after the attention and inside the MLP",
    "subln": "Sub-LN (arXiv 2210.06423): before both, and before the last layer of each",
}
assert tuple(PLACEMENTS) == get_args(Placement)


@dataclass(frozen=True)
class Size:
    """Width and shape of a ViT trunk: the letter of ``B/32``."""

    width: int
    depth: int
    mlp: int
    heads: int


# big_vision's decode_variant; mu is its test-sized variant, nano ours for the demo tower.
SIZES: dict[str, Size] = {
    "mu": Size(32, 1, 128, 2),
    "nano": Size(64, 4, 256, 2),
    "Ti": Size(192, 12, 768, 3),
    "S": Size(384, 12, 1536, 6),
    "B": Size(768, 12, 3072, 12),
    "L": Size(1024, 24, 4096, 16),
    "H": Size(1280, 32, 5120, 16),
    # Those of Dynamic Token Normalization (arXiv 2112.02624), whose heads form a square.
    "Ti*": Size(192, 12, 768, 4),
    "S*": Size(432, 12, 1728, 9),
    "B*": Size(768, 12, 3072, 16),
}

# The largest integer of torch and NumPy.
MOST_INTEGER = 2**63 - 1
# Pixels per side of an image, and of a patch, at most: four times what the largest published networks read.
MOST_PIXELS = 16_384

# Shares of letters in common: of a name that may be meant, of one with another first letter, and of a beginning. What
# counts for a name that begins alike, and for one that is part of the other.
LIKE, UNLIKE_AT_FIRST, ALMOST = 0.66, 0.8, 0.85
BEGINS, PART = 0.95, 0.9

# Offered by shell completion; every SIZE/PATCH is accepted.
COMMON_ARCHS = ("mu/8", "Ti/16", "S/32", "S/16", "B/32", "B/16", "L/16", "H/14")


def parse_arch(arch: str) -> tuple[Size, int]:
    """Split ``"B/32"`` into its trunk size and its patch side in pixels.

    Raises `DpnError` for another form or an unknown size, naming what is allowed.
    """
    name, _, side = arch.partition("/")
    patch = parse_whole_number(side)
    if name not in SIZES or not patch or patch > MOST_PIXELS:
        close = find_nearest(arch, (*COMMON_ARCHS, "Ti/8", "S/8", "B/8", "B/14", "L/14", "L/32"))
        hint = f"; did you mean {close!r}?" if close and name not in SIZES else ""
        raise DpnError(
            f"--arch {arch!r}: use SIZE/PATCH with SIZE one of {', '.join(SIZES)} and PATCH in pixels, e.g. B/32{hint}"
        )
    return SIZES[name], patch


def parse_whole_number(text: str) -> int | None:
    """Parse a whole number in decimal digits; returns None for any other text."""
    return int(text) if text.isdecimal() and len(text) < 20 else None


def check_stem(stem: str) -> Stem:
    """Return `stem` when it is a known patch stem; raise `DpnError` with the list otherwise."""
    return _check_choice("--stem", stem, STEMS)


def check_norm(norm: str) -> Norm:
    """Return `norm` when it is a known norm of the blocks; raise `DpnError` with the list otherwise."""
    return _check_choice("--norm", norm, NORMS)


def check_placement(placement: str) -> Placement:
    """Return `placement` when it is a known one; raise `DpnError` with the list otherwise."""
    return _check_choice("--placement", placement, PLACEMENTS)


def _check_choice(option: str, value: str, options: Mapping[NameT, str]) -> NameT:
    for name in options:
        if name == value:
            return name
    raise DpnError(f"{option} {value!r}: choose one of {'; '.join(options)}{did_you_mean(value, options)}")


def check_image_size(image_size: int | tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) in pixels; raise `DpnError` unless the patch divides both."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if max(height, width) > MOST_PIXELS:
        raise DpnError(f"image size {height}x{width}: at most {MOST_PIXELS} pixels a side (--image-size)")
    if height < patch[0] or width < patch[1] or height % patch[0] or width % patch[1]:
        fit = max(1, round(height / patch[0])) * patch[0], max(1, round(width / patch[1])) * patch[1]
        raise DpnError(
            f"image size {height}x{width}: the patch {patch[0]}x{patch[1]} does not divide it; "
            f"the nearest size that fits is {fit[0]}x{fit[1]} (--image-size)"
        )
    return height, width


def size_name(size: Size) -> str | None:
    """Return the letter of a trunk size, or None for a size without one."""
    return next((name for name, size_of_name in SIZES.items() if size_of_name == size), None)


def find_nearest(text: str, allowed: Iterable[str]) -> str | None:
    """Return the one allowed name that is spelt nearly like `given`, begins nearly so, or holds it, or lies in it.

    None where there is no such name, or where several are as close.
    """
    close = {name: _similarity(text.casefold(), name.casefold()) for name in allowed if len(text) < 100}
    best = [name for name, similarity in close.items() if similarity == max(close.values())]
    return best[0] if len(best) == 1 and close[best[0]] >= LIKE else None


def _similarity(text: str, name: str) -> float:
    """Return how alike two names are, from 0 to 1: letters in common, of which the first counts most."""
    ratio = difflib.SequenceMatcher(None, text, name).ratio()
    if len(text) > 2 and any(
        difflib.SequenceMatcher(None, text, name[: len(text) + more]).ratio() >= ALMOST for more in (0, 1)
    ):
        ratio = max(ratio, BEGINS)
    if min(len(text), len(name)) > 3 and (text in name or name in text):
        ratio = max(ratio, PART)
    return ratio if text[:1] == name[:1] or ratio >= UNLIKE_AT_FIRST else 0.0


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest allowed name, or an empty string."""
    close = find_nearest(name, allowed)
    return f"; did you mean {close!r}?" if close else ""
