"""Leases on work among processes that share a folder, on any number of machines.

The owner of a lease rewrites its file ``NAME/N`` at every beat. Whoever sees the file unchanged for `PATIENCE` seconds
of its own clock creates ``NAME/N+1``, in which only one process can succeed, and the owner before finds that it has
lost. Neither locks of the file system nor clocks that agree are needed.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpn_cli.errors import DpnError
from dpn_cli.run.environment import is_at_work, this_process
from dpn_cli.run.files import read_object, save_error

# Folder of the leases, in that of a run.
LEASES = "leases"
# Seconds between two beats.
BEAT = 10.0
# Seconds without a beat after which an owner is taken for dead. NFS may show an old state for a minute.
PATIENCE = 120.0
_GONE = "released"


class LeaseLostError(DpnError):
    """Another process has taken the work over, because this one was not capture_logs of for too long."""

    exit_code = 1


class Unshared:
    """The lease of a process that has the folder to itself."""

    def check(self) -> None:
        """Raise `LeaseLostError` when the lease is lost. Takes no time as long as it is renewed."""

    def confirm(self) -> None:
        """Look whether the lease is still kept, and raise `LeaseLostError` otherwise: before a result is written."""

    def release(self) -> None:
        """Let others have the lease at once."""


class Lease(Unshared):
    """The right to do a piece of work, as long as it is kept."""

    def __init__(self, leases: Leases, name: str, number: int) -> None:
        self.name, self._leases, self._number = name, leases, number
        self._lost, self._beats, self._renewed = False, 0, leases.clock()

    def check(self) -> None:
        """Raise `LeaseLostError` when the lease is lost. Takes no time as long as it is renewed."""
        if self._leases.clock() - self._renewed > PATIENCE / 2:
            self.renew()
        if self._lost:
            raise LeaseLostError(f"{self.name}: another process has taken it over, because this one was suspended")

    def confirm(self) -> None:
        """Look whether the lease is still kept, and raise `LeaseLostError` otherwise: before a result is written."""
        self.renew()
        self.check()

    def renew(self) -> None:
        """Beat, unless another process has the lease."""
        self._lost = self._lost or self._leases.newest(self.name) != self._number
        if not self._lost:
            self._beats += 1
            with suppress(OSError):  # without a beat the lease is lost in time
                began = self._leases.clock()
                self._leases.write(self.name, self._number, {**self._leases.owner, "beat": self._beats})
                self._renewed = began

    def release(self) -> None:
        """Let others have the lease at once."""
        self._leases.forget(self)
        if not self._lost:
            with suppress(OSError):
                self._leases.write(self.name, self._number, {_GONE: True})


class Leases:
    """The leases in a folder, as one process sees them.

    Args:
        folder: where they are.
        clock: seconds that only this process reads.
        owner: what tells this process from all others.
    """

    def __init__(
        self, folder: Path, clock: Callable[[], float] = time.monotonic, owner: dict[str, Any] | None = None
    ) -> None:
        self.folder, self.clock, self.owner = folder, clock, owner or {"token": uuid.uuid4().hex, **this_process()}
        self._held: dict[str, Lease] = {}
        self._seen: dict[Path, tuple[object, float]] = {}
        self._lock = threading.RLock()

    def take(self, name: str) -> Lease | None:
        """Return the lease of that name, or None while another process has it; taken again when its owner died.

        Raises `SaveError` when the folder cannot be written.
        """
        with self._lock:
            if name in self._held:
                return None
            number = self.newest(name)
            if number is not None and not self._free(name, number):
                return None
            number = 0 if number is None else number + 1
            path = self._path(name, number)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                return None
            except OSError as error:
                raise save_error(path, error) from error
            lease = self._held[name] = Lease(self, name, number)
            lease.renew()
            return lease

    def taken(self) -> list[str]:
        """Return the names of leases that other processes have."""
        with self._lock:
            names = sorted(_plain(path.name) for path in self.folder.glob("*") if _plain(path.name) not in self._held)
            newest = ((name, self.newest(name)) for name in names)
            return [name for name, number in newest if number is not None and not self._free(name, number)]

    def beat(self) -> None:
        """Renew all leases of this process."""
        with self._lock:
            for lease in list(self._held.values()):
                lease.renew()

    def wait_for(self, name: str, pause: Callable[[], None]) -> Lease:
        """Return the lease of that name when others have released it, after as many calls of `pause` as that takes."""
        while (lease := self.take(name)) is None:
            pause()
        return lease

    def at_work(self, pause: Callable[[], None]) -> list[str]:
        """Return what other processes work on, after a `pause` until those of other machines beat or are dead."""
        first: dict[str, dict[str, Any]] = {}
        while names := self.taken():
            for name in names:
                content = self._content(name, self.newest(name) or 0)
                if _is_running(content) or content != first.setdefault(name, content):
                    return names
            pause()
        return []

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Renew the leases in a thread; release those that are left at the end."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT):
                self.beat()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for lease in list(self._held.values()):
                lease.release()

    def newest(self, name: str) -> int | None:
        """Return the number of the newest lease of a name; None without one."""
        with suppress(FileNotFoundError):
            entries = (entry.name for entry in (self.folder / _spelt(name)).iterdir())
            return max((int(entry) for entry in entries if entry.isdecimal()), default=None)
        return None

    def write(self, name: str, number: int, content: dict[str, Any]) -> None:
        """Replace the content of a lease's file. Raises `OSError`."""
        path = self._path(name, number)
        temporary = path.with_name(f".{number}.{self.owner['token']}")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)

    def forget(self, lease: Lease) -> None:
        """Stop renewing a lease."""
        with self._lock:
            if self._held.get(lease.name) is lease:
                del self._held[lease.name]

    def _free(self, name: str, number: int) -> bool:
        """Tell whether the owner of a lease has released it, is dead, or has not beaten for too long."""
        path, content = self._path(name, number), self._content(name, number)
        lives = _is_running(content)
        if content.get(_GONE) or lives is not None:
            return not lives
        before, since = self._seen.get(path, (None, 0.0))
        if before != content:
            self._seen[path] = content, self.clock()
            return False
        return self.clock() - since >= PATIENCE

    def _content(self, name: str, number: int) -> dict[str, Any]:
        return read_object(self._path(name, number)) or {}

    def _path(self, name: str, number: int) -> Path:
        return self.folder / _spelt(name) / str(number)


def _spelt(name: str) -> str:
    return name.replace("/", "~")


def _plain(name: str) -> str:
    return name.replace("~", "/")


def _is_running(owner: dict[str, Any]) -> bool | None:
    """Tell whether an owner is a process that is there; None of another machine."""
    return is_at_work(owner) if "pid" in owner else None
