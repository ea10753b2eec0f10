"""Checkpoints of a training: folders that are renamed into place, with digests inside.

A state is one file of whole tensors, or a file of parts of them from each rank. Both are safetensors files, so that
nothing is ever unpickled, and both are a checkpoint to torch.distributed.checkpoint: any number of ranks reads either,
as whole tensors or in parts.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpn_cli.errors import DataError
from dpn_cli.run import distributed
from dpn_cli.run.distributed import World
from dpn_cli.run.files import file_digest, flush, save_error

# The files of a state: its tensors where they are whole, its plain values where they are not, and the digests.
WHOLE_STATE, PLAIN_STATE, DIGESTS = "state.safetensors", "state.json", "sha256"
State = tuple[dict[str, Tensor], dict[str, Any]]
Empty = Callable[[str, torch.Size, torch.dtype], Tensor]
"""``empty(name, size, dtype)`` returns what a saved tensor is read into, which may be in parts over the ranks."""


class Checkpoints:
    """``last`` and ``best`` of one training. A saved state is readable at every moment of a save."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def started(self) -> bool:
        """Return whether there is a saved state from which the training continues."""
        return any((self.path / name).is_dir() for name in ("last", "last.previous"))

    def save(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write tensors and plain values as `name`, and keep the state before it as ``name.previous``.

        Raises `SaveError`.
        """
        with self._saving(name):
            data = self._new_folder(name) / WHOLE_STATE
            save_file(
                {key: value.detach().cpu().contiguous() for key, value in tensors.items()},
                data,
                {"state": json.dumps(state)},
            )
            self._publish(name, file_digest(data))

    def save_parts(self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any], world: World) -> None:
        """Do the same with sharded tensors: each rank writes its parts. All ranks call it.

        Raises `SaveError`, on all of them when one cannot write.
        """
        from torch.distributed.checkpoint.api import CheckpointException  # 0.3 s, and not needed without parts
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        def create_folder() -> Path:
            with self._saving(name):
                return self._new_folder(name)

        def compute_digests() -> dict[str, str]:
            with self._saving(name):
                return {path.name: file_digest(path) for path in part_files[world.rank :: world.size]}

        def publish() -> None:
            with self._saving(name):
                (new_folder / PLAIN_STATE).write_text(json.dumps(state), encoding="utf-8")
                all_digests = [{PLAIN_STATE: file_digest(new_folder / PLAIN_STATE)}, *digests]
                self._publish(
                    name,
                    "\n".join(
                        f"{digest}  {file}" for file_digests in all_digests for file, digest in file_digests.items()
                    ),
                )

        new_folder = distributed.run_on_leader(world, create_folder)
        with self._saving(name):
            try:
                whole_tensors = {key: value.detach() for key, value in tensors.items()}
                save(whole_tensors, storage_writer=HuggingFaceStorageWriter(str(new_folder), save_distributed=True))
            except CheckpointException as error:  # which holds the errors of all ranks
                raise next(iter(error.failures.values()))[0] from error
        part_files = sorted(new_folder.glob("*.safetensors"))
        digests = distributed.run_on_all(compute_digests)
        distributed.run_on_leader(world, publish)

    def load(self, name: str, warn: Callable[[str], None], empty: Empty | None = None) -> State | None:
        """Return the state that was saved last under `name`, or the one before it when that is damaged.

        Tensors are read into those that `empty` returns; without it they are whole. With several ranks all call it.
        Returns None when nothing was saved. Raises `DataError` when all that was saved is damaged.
        """
        copies = [path for path in (self.path / name, self.path / f"{name}.previous") if path.is_dir()]
        for path in copies:
            if _is_intact(path):
                return _read(path, empty)
            warn(f"{path}: the checkpoint is damaged (its digest differs); trying the one before it")
        if copies:
            raise DataError(f"{self.path}: no checkpoint there is intact; delete it to start this training again")
        return None

    def clear(self) -> None:
        """Delete all checkpoints of this training."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def _saving(self, name: str) -> Iterator[None]:
        """Turn an error of a save into a `SaveError`, and delete the unfinished files."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self.path / f".{name}", ignore_errors=True)
            raise save_error(self.path / name, error) from error

    def _new_folder(self, name: str) -> Path:
        """Make an empty folder for a state."""
        new_folder = self.path / f".{name}"
        shutil.rmtree(new_folder, ignore_errors=True)
        new_folder.mkdir(parents=True)
        return new_folder

    def _publish(self, name: str, digests: str) -> None:
        """Flush the new state and rename it into place, with its digests."""
        new_folder, last, previous = (self.path / part for part in (f".{name}", name, f"{name}.previous"))
        (new_folder / DIGESTS).write_text(digests + "\n", encoding="utf-8")
        for path in (*sorted(new_folder.iterdir()), new_folder):
            flush(path)
        if last.is_dir():
            shutil.rmtree(previous, ignore_errors=True)
            last.rename(previous)
        new_folder.rename(last)
        flush(self.path)


def _is_intact(path: Path) -> bool:
    """Return whether all files of a state have their digests. Ranks share the files of a state in parts."""
    if not (path / DIGESTS).is_file():
        return False
    lines = [line.split() for line in (path / DIGESTS).read_text("utf-8", "replace").splitlines()]
    if (path / WHOLE_STATE).is_file():
        return lines == [[file_digest(path / WHOLE_STATE)]]
    listed = {line[1]: line[0] for line in lines if len(line) == 2}
    rank, size = distributed.rank_and_size()
    own_files = list(listed.items())[rank::size]
    damaged = any(not (path / file).is_file() or file_digest(path / file) != digest for file, digest in own_files)
    return PLAIN_STATE in listed and not distributed.max_over_ranks(damaged)


def _read(path: Path, empty: Empty | None) -> State:
    whole_file = path / WHOLE_STATE
    if not whole_file.is_file():
        return _read_parts(path, empty or _whole), json.loads((path / PLAIN_STATE).read_text("utf-8"))
    with safe_open(whole_file, framework="pt") as file:
        state: dict[str, Any] = json.loads(file.metadata()["state"])
        if empty is None:
            return {key: file.get_tensor(key) for key in file.keys()}, state  # noqa: SIM118
    return _read_parts(path, empty), state


def _read_parts(path: Path, empty: Empty) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    saved = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    described = {name: one for name, one in saved.items() if isinstance(one, TensorStorageMetadata)}
    tensors = {name: empty(name, one.size, one.properties.dtype) for name, one in described.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=not dist.is_initialized())
    return tensors


def _whole(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype)
