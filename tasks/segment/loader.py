"""Training batches of image crops with their labels, made by worker processes: a function of seed, step and place."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dpn_cli.data.loader import Item, Steps
from dpn_cli.data.workers import open_loader
from dpn_cli.engine.fit import Batch, Batches
from dpn_cli.engine.seeds import fold
from dpn_cli.errors import DataError
from dpn_cli.run import distributed
from dpn_cli.run.distributed import World
from tasks.segment.labels import IGNORE, LabelRule
from tasks.segment.pairs import Pairs
from tasks.segment.transforms import SegmentAugmentation, augment, pad

Example = tuple[Tensor, Tensor, Tensor, Tensor] | DataError


class _Examples(Dataset[Example]):
    def __init__(self, pairs: Pairs, rule: LabelRule, how: SegmentAugmentation, seed: int) -> None:
        self.pairs, self.rule, self.how, self.seed = pairs, rule, how, seed

    def __getitem__(self, item: Item) -> Example:
        step, place, row = item
        try:
            pixels, raw = self.pairs.load(row)
            labels = self.rule.labels(raw, self.pairs.where_mask(row))
        except DataError as error:
            return error  # raised in a worker process it would come back wrapped in that process's traceback
        draw = np.random.default_rng(fold(self.seed, step, place)).random
        image, target, extent = pad(*augment(pixels, labels, self.how, draw), self.how.crop)
        return image, target, extent, torch.tensor(float(np.count_nonzero(target.numpy() != IGNORE)))


def _collate(examples: Sequence[Example]) -> list[Tensor] | DataError:
    bad = next((example for example in examples if isinstance(example, DataError)), None)
    return bad or [torch.stack(parts) for parts in zip(*(e for e in examples if isinstance(e, tuple)), strict=True)]


def segment_batches(
    pairs: Pairs, rule: LabelRule, how: SegmentAugmentation, batch_size: int, seed: int, world: World, *, workers: int
) -> Batches:
    """Return the engine's ``batches``: this rank's rows of ``image`` (b, 3, h, w) and ``label`` (b, h, w), both uint8.

    ``extent`` (b, 2) is how many rows and columns of an image are real, the rest is padding. ``valid`` (b,) is the mean
    number of labelled pixels per image of the whole batch, over all ranks: what the loss divides by.
    Raises `DataError` naming the first image or mask that is unreadable or wrong.
    """
    mine = world.rows(batch_size)

    def batches(start: int) -> Generator[Batch, None, None]:
        with open_loader(
            _Examples(pairs, rule, how, seed),
            workers,
            batch_sampler=Steps(len(pairs), batch_size, seed, start, mine),
            collate_fn=_collate,
            pin_memory=world.device.type == "cuda",
        ) as items:
            for loaded in items:
                if isinstance(loaded, DataError):
                    raise loaded
                image, label, extent, known = (tensor.to(world.device, non_blocking=True) for tensor in loaded)
                labelled = distributed.reduce_over_ranks(known.sum())
                valid = (labelled / batch_size).expand(len(label))
                yield {"image": image, "label": label, "extent": extent, "valid": valid}

    return batches
