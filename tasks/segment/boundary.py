"""Scores of outlines in label maps: boundary IoU (arXiv 2103.16562) and boundary F (Csurka et al., BMVC 2013)."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from scipy import ndimage
from torch import Tensor

from tasks.segment.labels import IGNORE

# Width of a boundary region, and how far apart two outlines may be, as shares of the image's diagonal.
BAND, TOLERANCE = 0.02, 0.0075


def count_boundaries(predicted: Tensor, label: Tensor, classes: int) -> Tensor:
    """Return the counts of an image's boundaries (7, classes), int64, from label maps (h, w) without label 255.

    Rows 0 to 2 are pixels of boundary regions: in both maps, in the truth, in the prediction. Rows 3 and 4 are pixels
    of the predicted outline, near the true one and in all; 5 and 6 those of the true outline, near the predicted one.
    """
    diagonal = math.hypot(*label.shape)
    is_labelled = label != IGNORE
    predicted = torch.where(is_labelled, predicted, IGNORE)  # what no label judges ends both maps alike
    width = max(1, round(BAND * diagonal))
    true_band, predicted_band = (_boundary_region(one, width) & is_labelled for one in (label, predicted))
    is_shared = true_band & predicted_band & (label == predicted)
    rows = [_count(label[is_shared], classes), _count(label[true_band], classes)]
    rows.append(_count(predicted[predicted_band], classes))
    true_outline, predicted_outline = (_outline(one, is_labelled) for one in (label, predicted))
    tolerance = max(1, round(TOLERANCE * diagonal))
    for own_map, own, other_map, other in (
        (predicted, predicted_outline, label, true_outline),
        (label, true_outline, predicted, predicted_outline),
    ):
        is_near = own & _is_near(own_map, other_map, other, tolerance)
        rows += [_count(own_map[is_near], classes), _count(own_map[own], classes)]
    return torch.stack(rows)


def boundary_iou(counts: Tensor) -> Tensor:
    """Return the boundary IoU per class in percent from summed counts; NaN for classes without boundary pixels."""
    shared, truth, predicted = counts[:3].double()
    values: Tensor = 100 * shared / (truth + predicted - shared)
    return values


def boundary_f(counts: Tensor) -> Tensor:
    """Return the F score per class in percent of outlines from summed counts; NaN for classes without any."""
    near_truth, predicted, near_predicted, truth = counts[3:].double()
    precision, recall = near_truth / predicted, near_predicted / truth
    score = 2 * precision * recall / (precision + recall)
    has_outline = predicted + truth > 0
    return 100 * torch.where(has_outline, score.nan_to_num(0.0), torch.nan)


def _count(labels: Tensor, classes: int) -> Tensor:
    return torch.bincount(labels.int(), minlength=classes)


def _boundary_region(labels: Tensor, width: int) -> Tensor:
    """Return where a pixel of another class, or the image's edge, is at most `width` rows and columns away (h, w)."""
    side = 2 * width + 1
    padded = F.pad(labels.float()[None, None], (width,) * 4, value=-1.0)
    highest, lowest = (
        F.max_pool2d(F.max_pool2d(sign * padded, (side, 1), 1), (1, side), 1)[0, 0] * sign for sign in (1, -1)
    )
    differs: Tensor = highest != lowest
    return differs


def _outline(labels: Tensor, is_labelled: Tensor) -> Tensor:
    """Return the labelled pixels that have one of another class among their eight labelled neighbours (h, w)."""
    values = labels.float()[None, None]
    outside = ~is_labelled[None, None]
    highest, lowest = (
        F.max_pool2d((sign * values).masked_fill(outside, -math.inf), 3, 1, 1)[0, 0] * sign for sign in (1, -1)
    )
    return is_labelled & (highest != lowest)


def _is_near(own: Tensor, other: Tensor, outline: Tensor, tolerance: int) -> Tensor:
    """Return where the outline of a pixel's own class in the other map is at most `tolerance` pixels away (h, w)."""
    near = np.zeros(own.shape, dtype=bool)
    own_labels, other_labels, other_outline = (one.cpu().numpy() for one in (own, other, outline))
    for label in np.unique(other_labels[other_outline]):
        distance = ndimage.distance_transform_edt(~(other_outline & (other_labels == label)))
        near |= (own_labels == label) & (distance <= tolerance)
    return torch.from_numpy(near).to(own.device)
