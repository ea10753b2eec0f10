"""From an image to its label map by sliding windows, in memory independent of image size.

Windows cover an image on a grid; their logits are upsampled bilinearly, averaged where they overlap, and resized
bilinearly to the label's size. All of this is linear and separable into rows and columns, so it is two matrices around
the logits per patch: only tiles of the map of all classes are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dpn_cli.data.resize import Size
from dpn_cli.engine.memory import in_chunks
from tasks.segment.model import LinearSegmenter
from tasks.segment.transforms import fit_into

TILE = 256


@dataclass(frozen=True)
class WindowPlan:
    """The plan of an evaluation: window and stride in pixels (None: the whole image at once), sizes, flips.

    `scale` caps the longer and the shorter side; ``native`` keeps an image's own size unless a window is larger. The
    image is evaluated at each of `ratios`, also mirrored with `flip`; the probabilities are averaged.
    """

    window: int
    stride: int | None
    scale: tuple[int, int]
    native: bool = False
    ratios: tuple[float, ...] = (1.0,)
    flip: bool = False
    batch_size: int = 8

    def size(self, size: Size, ratio: float) -> Size:
        """Return the size to which an image of `size` is resized. A result smaller than a window is padded later."""
        if not self.native:
            longest, shortest = (int(cap * ratio) for cap in self.scale)
            return fit_into(size, longest, shortest)
        enlarged = max(1.0, min(self.window / min(size), self.scale[0] / max(size)))
        factor = ratio * enlarged
        return max(1, int(size[0] * factor + 0.5)), max(1, int(size[1] * factor + 0.5))


def starts(length: int, window: int, stride: int) -> list[int]:
    """Return where windows begin: every stride, the last one shifted back to end with the image (mmsegmentation)."""
    count = max(length - window + stride - 1, 0) // stride + 1
    return [max(min(index * stride, length - window), 0) for index in range(count)]


def resize_rows(matrix: Tensor, rows: int) -> Tensor:
    """Resample the rows of a matrix bilinearly, as ``F.interpolate(align_corners=False)`` without antialiasing does."""
    old = len(matrix)
    if old == rows:
        return matrix
    position = ((torch.arange(rows, dtype=torch.float64) + 0.5) * (old / rows) - 0.5).clamp(0, old - 1)
    lower = position.long()
    upper = (lower + 1).clamp(max=old - 1)
    return torch.lerp(matrix[lower], matrix[upper], (position - lower)[:, None])


def axis_matrix(window: int, window_starts: Sequence[int], patches: int, length: int, out: int) -> Tensor:
    """Return (out, windows * patches): each output pixel as a mean of windows of logits per patch, along one axis.

    A window is `window` pixels and `patches` logits long; windows begin at `begins` in an image of `length` pixels,
    which is resized to `out` pixels.
    """
    upsample = resize_rows(torch.eye(patches, dtype=torch.float64), window)
    matrix = torch.zeros(max(length, window), len(window_starts) * patches, dtype=torch.float64)
    covered = torch.zeros(len(matrix), 1, dtype=torch.float64)
    for index, start in enumerate(window_starts):
        matrix[start : start + window, index * patches : (index + 1) * patches] = upsample
        covered[start : start + window] += 1
    return resize_rows((matrix / covered)[:length], out).float()


class Axis:
    """A matrix (out, windows * patches) from logits to pixels along one axis, on `device`.

    An output pixel has few logits, those near it: a part of the map takes the same time in an image of any size.
    """

    def __init__(self, matrix: Tensor, device: torch.device) -> None:
        used = (matrix != 0).byte()
        # On the CPU, so that a GPU is not waited for.
        self.starts, self.ends = used.argmax(1), matrix.shape[1] - used.flip(1).argmax(1)
        self.matrix = matrix.to(device)

    def part(self, pixels: slice) -> tuple[Tensor, slice]:
        """Return the matrix of some output pixels, and which logits it is for."""
        used = slice(int(self.starts[pixels].min()), int(self.ends[pixels].max()))
        return self.matrix[pixels, used], used


@dataclass
class View:
    """One evaluation of an image: logits per patch (rows, columns, classes), and the matrices to the map."""

    logits: Tensor
    down: Axis
    across: Axis

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Return the logits (rows, columns, classes) of a part of the map."""
        (down, high), (across, wide) = self.down.part(rows), self.across.part(columns)
        part = across @ self.logits[high, wide]
        tile = down @ part.flatten(1)
        return tile.view(len(tile), *part.shape[1:])


def view(network: LinearSegmenter, image: Tensor, out: Size, plan: WindowPlan, *, flip: bool) -> View:
    """Run the network over an image (3, h, w) uint8, for a map of the size `out`."""
    vit, size = network.vit, (image.shape[-2], image.shape[-1])
    patch = vit.config.patch
    starts_by_axis = [starts(side, plan.window, plan.stride) if plan.stride else [0] for side in size]
    window = [plan.window if plan.stride else -(-side // step) * step for side, step in zip(size, patch, strict=True)]
    image = image.flip(-1) if flip else image
    padding = (0, max(window[1] - size[1], 0), 0, max(window[0] - size[0], 0))
    corners = [(top, left) for top in starts_by_axis[0] for left in starts_by_axis[1]]
    rows, columns = (window[axis] // patch[axis] for axis in (0, 1))
    logits = torch.empty(0)
    with nullcontext() if plan.stride else network.at_size((window[0], window[1])):
        for first in range(0, len(corners), plan.batch_size):
            crops = [
                image[:, top : top + window[0], left : left + window[1]]
                for top, left in corners[first : first + plan.batch_size]
            ]
            scores = in_chunks(lambda some: network(F.pad(vit.normalize(some), padding)).float(), torch.stack(crops))
            if not first:
                logits = scores.new_empty(
                    len(starts_by_axis[0]) * rows, len(starts_by_axis[1]) * columns, scores.shape[1]
                )
            for number, one in enumerate(scores, first):
                top, left = number // len(starts_by_axis[1]) * rows, number % len(starts_by_axis[1]) * columns
                logits[top : top + rows, left : left + columns] = rearrange(one, "k h w -> h w k")
    down, across = (
        axis_matrix(window[axis], starts_by_axis[axis], patches, size[axis], out[axis])
        for axis, patches in enumerate((rows, columns))
    )
    return View(logits, Axis(down, logits.device), Axis(across.flip(0) if flip else across, logits.device))


def label_map(network: LinearSegmenter, images: Sequence[Tensor], out: Size, plan: WindowPlan) -> Tensor:
    """Return the class of every pixel, (h, w) uint8 of the size `out`.

    `images` holds the image at each of the plan's ratios, uint8 (3, h, w) on the network's device. Apart from logits
    per patch, one tile of 256 x 256 pixels is in memory at a time.
    """
    views = [view(network, image, out, plan, flip=flip) for image in images for flip in (False, True)[: 1 + plan.flip]]
    labels = torch.empty(out, dtype=torch.uint8, device=images[0].device)
    with torch.autocast(labels.device.type, enabled=False):
        for left in range(0, out[1], TILE):
            for top in range(0, out[0], TILE):
                rows, columns = slice(top, top + TILE), slice(left, left + TILE)
                scores = views[0].tile(rows, columns)
                if len(views) > 1:
                    scores = scores.softmax(-1)
                    for other in views[1:]:
                        scores += other.tile(rows, columns).softmax(-1)
                labels[rows, columns] = scores.argmax(-1)
    return labels
