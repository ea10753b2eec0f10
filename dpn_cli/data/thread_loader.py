"""Data sets whose items this process makes in threads, with all cores that its networks compute on, between passes.

During a pass, decoding takes cores from it: the threads of a matrix product wait for the last one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from PIL import Image
from torch.utils.data import Dataset

ItemT = TypeVar("ItemT", covariant=True)


class ThreadedDataset(Dataset[ItemT]):
    """A data set of images that a `DataLoader` without workers reads in threads. Decoders let others run."""

    def __getitems__(self, items: Sequence[Any]) -> list[ItemT]:
        """Make several items, in order; one after the other in a worker, which has one thread."""
        threads = torch.get_num_threads()
        if threads == 1:
            return [self[item] for item in items]
        Image.init()  # Pillow's own call, when it meets a rarer format, is not safe in threads
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(self.__getitem__, items))
        finally:
            torch.set_num_threads(threads)  # which threads that start from now on have
