"""Response of the stem to probe patches: an ordinary one, the same in less light, a flat one, and noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from dpn_cli.analysis.patches import cut_patches
from dpn_cli.weights.backbone import Backbone

GREY = 128


@dataclass(frozen=True)
class Probe:
    """A patch before and after the stem.

    Args:
        name: what patch it is.
        pixels: (3, p, q) in grey levels 0 ... 255.
        normalised: (3, p, q), what the projection receives: after the first norm where there is one.
        contrast: standard deviation of the patch in the network's input range.
        contrast_after: that of `normalised`.
        length: L2 norm of the stem's token, before positions.
        cosine: cosine similarity of the token with the ordinary patch's.
        change: distance to that token, relative to its length.
    """

    name: str
    pixels: Tensor
    normalised: Tensor
    contrast: float
    contrast_after: float
    length: float
    cosine: float
    change: float


def ordinary_patch(model: Backbone, pixels: Tensor) -> Tensor:
    """Return the patch (3, p, q) of median contrast among those of images (b, 3, h, w) in grey levels."""
    patch = model.config.patch
    patches = cut_patches(pixels.float(), patch).flatten(0, 1)
    middle = patches.std(1).argsort()[len(patches) // 2]
    return rearrange(patches[middle], "(p q c) -> c p q", p=patch[0], q=patch[1])


def kinds_of_patches(ordinary: Tensor) -> dict[str, Tensor]:
    """Return patches (3, p, q) in grey levels by their names; `ordinary` is the first of them."""
    g = torch.Generator().manual_seed(0)
    flat = torch.full_like(ordinary, GREY)
    return {
        "ordinary": ordinary,
        "half the light": ordinary / 2,
        "half the contrast": ordinary.mean() + (ordinary - ordinary.mean()) / 2,
        "flat grey": flat,
        "flat, noise of one level": flat + torch.randint(2, flat.shape, generator=g),
        "noise": torch.randint(256, flat.shape, generator=g).to(flat),
    }


@torch.no_grad()
def probe_stem(model: Backbone, ordinary: Tensor) -> list[Probe]:
    """Send patches of all kinds through the stem; `ordinary` (3, p, q) is a usual one in grey levels."""
    kinds = kinds_of_patches(ordinary.cpu().float())
    rows, columns = model.config.grid
    device = model.patch_embed.proj.weight.device
    images = repeat(torch.stack(list(kinds.values())), "k c p q -> k c (h p) (w q)", h=rows, w=columns)
    images = model.normalize(images.to(device))
    tokens = model.patch_embed(images)[:, 0].double().cpu()
    patches = cut_patches(images, model.config.patch)[:, :1]
    normalized = model.patch_embed.norm_in(patches)
    shape = {"p": model.config.patch[0], "q": model.config.patch[1]}
    first = tokens[0]
    return [
        Probe(
            name,
            kinds[name],
            rearrange(normalized[index, 0].cpu(), "(p q c) -> c p q", **shape),
            float(patches[index].double().std(correction=0)),
            float(normalized[index].double().std(correction=0)),
            float(tokens[index].norm()),
            float(F.cosine_similarity(tokens[index], first, dim=0)),
            float((tokens[index] - first).norm() / first.norm()),
        )
        for index, name in enumerate(kinds)
    ]
