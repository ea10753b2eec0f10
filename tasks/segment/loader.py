"""Training batches of image crops with labels, made by workers: a function of seed, step and position."""

from __future__ import annotations

import math
from collections.abc import Generator

import numpy as np
from torch.utils.data import Dataset

from dpn_cli.data.collate import Example, open_batches
from dpn_cli.data.sampler import Item, StepSampler
from dpn_cli.engine.fit import Batch, Batches
from dpn_cli.engine.seeds import fold
from dpn_cli.errors import DataError
from dpn_cli.run import distributed
from dpn_cli.run.distributed import World
from tasks.segment.labels import IGNORE, LabelRule
from tasks.segment.pairs import Pairs
from tasks.segment.transforms import SegmentAugmentation, augment, pad

# Bytes of a pixel: three of the image, one of its label.
PIXEL_BYTES = 4


class _Examples(Dataset[Example]):
    def __init__(self, pairs: Pairs, rule: LabelRule, augmentation: SegmentAugmentation, seed: int) -> None:
        self.pairs, self.rule, self.augmentation, self.seed = pairs, rule, augmentation, seed

    def __getitem__(self, item: Item) -> Example:
        step, position, row = item
        try:
            pixels, raw = self.pairs.load(row)
            labels = self.rule.labels(raw, self.pairs.locate_mask(row))
        except DataError as error:
            return error  # raised in a worker process it would come back wrapped in that process's traceback
        draw = np.random.default_rng(fold(self.seed, step, position)).random
        image, target, extent = pad(*augment(pixels, labels, self.augmentation, draw), self.augmentation.crop)
        return image, target, tuple(extent.tolist()), float(np.count_nonzero(target.numpy() != IGNORE))


def segment_batches(
    pairs: Pairs,
    rule: LabelRule,
    augmentation: SegmentAugmentation,
    batch_size: int,
    seed: int,
    world: World,
    *,
    workers: int,
) -> Batches:
    """Return the engine's ``batches``: this rank's rows of ``image`` (b, 3, h, w) and ``label`` (b, h, w), both uint8.

    ``extent`` (b, 2) is how many rows and columns of an image are real, the rest is padding. ``valid`` (b,) is the mean
    number of labelled pixels per image of the whole batch, over all ranks: what the loss divides by.
    Raises `DataError` naming the first image or mask that is unreadable or wrong.
    """
    rows = world.rows(batch_size)

    def batches(start: int) -> Generator[Batch, None, None]:
        with open_batches(
            _Examples(pairs, rule, augmentation, seed),
            StepSampler(len(pairs), batch_size, seed, start, rows),
            workers,
            image_bytes=PIXEL_BYTES * math.prod(augmentation.crop),
            device=world.device,
        ) as batches_of_examples:
            for columns, errors in batches_of_examples:
                if errors:
                    raise errors[0]
                image, label, extent, is_labelled = (tensor.to(world.device, non_blocking=True) for tensor in columns)
                labelled = distributed.reduce_over_ranks(is_labelled.sum())
                valid = (labelled / batch_size).expand(len(label))
                yield {"image": image, "label": label, "extent": extent, "valid": valid}

    return batches
