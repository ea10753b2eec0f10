"""Files behind URLs, read by fsspec's clients: checked copies in a bounded cache on this machine."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, TypeVar

from dpn_cli.config.paths import cache_bytes, home
from dpn_cli.config.urls import EXTRAS, is_url
from dpn_cli.errors import DpnError, StoreError
from dpn_cli.run import signals
from dpn_cli.run.files import claim, is_leftover, replace_file
from dpn_cli.weights.hub import hub_is_offline

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
# Attempts at a request, and seconds before the second one; each later pause is twice as long.
TRIES, FIRST_PAUSE = 5, 1.0
# Requests that are under way at once where many files are needed.
CLIENTS = 8
# What stores call the version of a file.
VERSIONS = ("ETag", "etag", "generation", "blob_id", "LastModified", "Last-Modified", "mtime")
# Statuses of client errors after which a request is repeated: time-out, too many requests.
AGAIN = (408, 429)
# Seconds without a write after which a copy is one that its process did not finish.
ABANDONED = 3600.0
# Seconds for which a new copy is not deleted to make room, so that the process that fetched it can open it.
OPENING_SECONDS = 10.0
# Errors of this machine's disk, which the store has no part in.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

pause = time.sleep  # tests do not wait

# Folders in which two equal copies of a file had another MD5 than the store states (global, as stores are).
_opaque: set[str] = set()


class MissingError(StoreError):
    """The store has no such file."""


class _FailedError(Exception):
    """An attempt has failed; the cause is the client's error, unless the copy is not what it should be."""


@dataclass(frozen=True)
class RemotePath:
    """A file or folder behind a URL; `open` reads a file's copy in the cache.

    `size` in bytes and `sha256` are those that the file must have, where they are known. `version` changes when the
    file in the store does; `stated` is the store's own digest of it, after the name of the algorithm.
    """

    url: str
    size: int | None = None
    sha256: str = ""
    version: str = ""
    expected_version: tuple[str, str] | None = None

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder of the file."""
        return RemotePath(self.url.rpartition("/")[0])

    def with_suffix(self, suffix: str) -> RemotePath:
        """Return the file with another ending."""
        return RemotePath(self.url.rpartition(".")[0] + suffix)

    @property
    def cached(self) -> Path:
        """Return the path of the copy, named after URL and version, or after the content when no version is known."""
        key = hashlib.sha256(f"{self.url} {self.version}".encode()).hexdigest() if self.version else self.sha256
        return cache_dir() / f"{key}{Path(self.name).suffix}"

    def open(self, mode: Literal["rb"] = "rb") -> BufferedReader:
        """Open the copy, which is fetched where there is none. Raises as `fetch` does.

        What is open can be read to its end, even when it leaves the cache meanwhile.
        """
        while True:
            with contextlib.suppress(FileNotFoundError):
                file = self.cached.open(mode)
                mark_used(self.cached)
                return file
            self.fetch(OPENING_SECONDS)

    def fetch(self, retain_seconds: float = 0.0) -> None:
        """Copy the file into the cache unless it is there; processes that want the same file wait for the first.

        A new copy is marked as used for `retain_seconds` before others can see it, and delete it to make room.

        Raises `StoreError` when the store has no such file, does not respond or sends something else, after several
        attempts where that may help, and `SaveError` when the disk is full.
        """
        path, digests = self.cached, list[str]()
        with claim(path, on_wait=signals.check_here):
            if not path.is_file():
                retry(self.url, lambda: replace_file(path, lambda copy: self._download(copy, digests, retain_seconds)))

    def read_bytes(self) -> bytes:
        """Return the content of a small file, without a copy. Raises as `fetch` does, `MissingError` without a file."""

        def read() -> bytes:
            client, path = _client(self.url)
            content: bytes = client.cat_file(path)
            return content

        return retry(self.url, read)

    def read_text(self, encoding: str) -> str:
        """Return the content of a small text file. Raises as `read_bytes` does."""
        return self.read_bytes().decode(encoding)

    def forget(self) -> None:
        """Delete the copy."""
        self.cached.unlink(missing_ok=True)

    def described(self) -> RemotePath:
        """Return the file with what the store says of it. Raises as `fetch` does."""

        def describe() -> Any:
            client, path = _client(self.url)
            return client.info(path)

        info = retry(self.url, describe)
        version = " ".join(str(info[key]) for key in ("size", *VERSIONS) if info.get(key) is not None)
        return replace(self, size=info.get("size"), version=version or "unknown", expected_version=_read_digest(info))

    def _download(self, copy: Path, digests: list[str], retain_seconds: float) -> None:
        """Fetch the file to `copy`, check it, and make room for it. `digests` are those of copies that failed."""
        client, path = _client(self.url)
        try:
            client.get_file(path, str(copy))
        except OSError as error:
            if error.errno in DISK:
                raise
            raise _FailedError from error  # `replace_file` would take it for the disk's
        self._check(copy, digests)
        mark_used(copy, retain_seconds)
        make_room(copy)

    def _check(self, copy: Path, digests: list[str]) -> None:
        """Raise `_FailedError` unless a copy is what it should be."""
        size = copy.stat().st_size
        if self.size is not None and size != self.size:
            raise _FailedError(f"{size} bytes arrived instead of {self.size}")
        expected = ("sha256", self.sha256) if self.sha256 else self.expected_version
        if expected is None or (not self.sha256 and self.parent.url in _opaque):
            return
        with copy.open("rb") as file:
            digest = hashlib.file_digest(file, expected[0]).hexdigest()
        if digest == expected[1]:
            return
        if not self.sha256 and digest in digests:
            # The store states something else: S3's ETag of an object that it encrypts with KMS looks like an MD5.
            _opaque.add(self.parent.url)
            return
        digests.append(digest)
        raise _FailedError(f"other bytes arrived: {expected[0]} {digest[:12]}… instead of {expected[1][:12]}…")


def _read_digest(info: Any) -> tuple[str, str] | None:
    """Return the digest of its content that a store states for a file: the hub's, Google's and HTTP's, or S3's."""
    if info.get("lfs"):
        return "sha256", info["lfs"]["sha256"]
    if md5 := info.get("md5Hash") or info.get("Content-MD5"):
        return "md5", base64.b64decode(md5).hex()
    etag = str(info.get("ETag")).strip('"')
    return ("md5", etag) if re.fullmatch("[0-9a-f]{32}", etag) else None


def resolve_folder(location: str) -> Path | RemotePath:
    """Return the folder that ``--data`` names, on this machine or behind a URL."""
    return RemotePath(location.rstrip("/")) if is_url(location) else Path(location).expanduser()


def glob_files(url: str) -> list[RemotePath]:
    """Return the files of a URL with ``*``, or the file itself. Raises as `RemotePath.fetch` does."""
    if "*" not in url:
        return [RemotePath(url)]

    def find() -> list[RemotePath]:
        client, path = _client(url)
        return [RemotePath(client.unstrip_protocol(name)) for name in sorted(client.glob(path))]

    return retry(url, find)


def map_in_parallel(function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """Yield the results of a function that waits for a store, in order, several at once."""
    pool = ThreadPoolExecutor(CLIENTS)
    try:
        for result in pool.map(function, items):
            signals.check_here()
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


def cache_dir() -> Path:
    """Return the folder of the cache."""
    return home() / "cache" / "remote"


def mark_used(path: Path, seconds: float = 0.0) -> None:
    """Note that a file of the cache is used, or will be for some seconds: until then others are deleted before it.

    The note is the file's time of modification, which ends by itself when the process does.
    """
    expiry = time.time() + seconds
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mtime < expiry - seconds / 2:
            os.utime(path, (expiry, expiry))


def mark_unused(path: Path) -> None:
    """Note that a file of the cache will not be used any more."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mtime > time.time():
            os.utime(path)


def make_room(copy: Path) -> None:
    """Delete the files of the cache that were used longest ago, until it fits its limit with `copy`.

    Shards go first: the lists of what is in them are small, and fetching one again means fetching its shard. Returns
    without having done anything where another thread has deleted the copy to make room for its own. Raises `DpnError`
    when the copy alone is above the limit.
    """
    try:
        limit, size = cache_bytes(), copy.stat().st_size
    except FileNotFoundError:
        return
    if size > limit:
        raise DpnError(
            f"DPN_CACHE_GB={limit / 1e9:g}: a file of {size / 1e9:.3g} GB is needed; allow more for the cache "
            f"({copy.parent}), or make smaller shards"
        )
    with claim(copy.parent, on_wait=signals.check_here):
        files = []
        for path in copy.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):
                files.append((path.suffix != ".tar", (status := path.stat()).st_mtime, status.st_size, path))
        total = sum(size for _, _, size, _ in files)
        for _, used, size, path in sorted(files):
            is_complete = not path.name.startswith(".") or (is_leftover(path.name) and time.time() - used > ABANDONED)
            if total > limit and is_complete:
                path.unlink(missing_ok=True)
                total -= size


def retry(url: str, attempt: Callable[[], ResultT]) -> ResultT:
    """Return what an attempt returns, after a pause and another attempt where it fails. Raises `StoreError`."""
    for count in itertools.count(1):
        signals.check_here()
        try:
            return attempt()
        except DpnError:
            raise
        except Exception as error:  # every client has kinds of its own
            cause = _find_cause(url, error)
            final = _find_fatal_error(url, cause)
            if final or count == TRIES:
                raise final or StoreError(
                    f"{url}: {_describe_error(cause)}; given up after {TRIES} attempts. Run the same command again "
                    "when the store responds; in a run's folder with --resume"
                ) from error
        pause(FIRST_PAUSE * 2 ** (count - 1))
    raise AssertionError("the last attempt returns or raises")


def _find_cause(url: str, error: BaseException) -> BaseException:
    """Return what an error stands for: fsspec calls a file missing for any error of an HTTP server on HEAD."""
    if isinstance(error, _FailedError):
        error = error.__cause__ or error
    if isinstance(error, FileNotFoundError) and url.startswith("http"):
        error = error.__cause__ or error
    return error


def _find_fatal_error(url: str, error: BaseException) -> StoreError | None:
    """Return the error that another attempt would not help."""
    status = getattr(error, "status", 0)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return MissingError(
            f"{url}: no such file; check the name. A URL leads to .tar shards or to a folder that 'dpn data pack' wrote"
        )
    if isinstance(error, PermissionError) or status in (401, 403) or type(error).__name__ == "NoCredentialsError":
        return StoreError(
            f"{url}: no access ({_describe_error(error)}); the store's client takes credentials from its environment "
            f"variables "
            "and files"
        )
    if isinstance(error, (ValueError, NotImplementedError)) or (400 <= status < 500 and status not in AGAIN):
        return StoreError(f"{url}: {_describe_error(error)}; check the URL")
    return None


def _describe_error(error: BaseException) -> str:
    """Describe a client's error in a few words."""
    if status := getattr(error, "status", 0):
        return f"HTTP {status} {getattr(error, 'message', '')}".strip()
    return " ".join(str(error).split())[:160].rstrip(".") or type(error).__name__


def _client(url: str) -> tuple[Any, str]:
    """Return fsspec's client of a URL, one for each process and thread, and the path in its terms.

    Raises `DpnError` when it is not installed, `StoreError` when the hub is out of reach.
    """
    scheme = url.partition("://")[0]
    if scheme == "hf" and hub_is_offline():
        raise StoreError(f"{url}: the hub is out of reach (or HF_HUB_OFFLINE is set); pass a local copy")
    from fsspec.core import url_to_fs

    try:
        client, path = url_to_fs(url)
    except ImportError as error:
        raise DpnError(f"{url}: its client is not installed; pip install 'dpn-cli[{EXTRAS[scheme]}]'") from error
    return client, path
