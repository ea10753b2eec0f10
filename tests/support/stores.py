"""Stores for tests, on this machine alone: a real HTTP server, and moto's S3 server behind it, with faults on order."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest

from support.programs import LIMIT

Fault = Literal["cut", "wrong", "short", 503, 403, 400]
BUCKET = "images"


class Store:
    """A server of files at `url`, which counts the GETs, HEADs and bytes sent of every name.

    `faults` has, by name, what the next GETs of the file get instead of it. `etag` is sent with every file. GETs of the
    names in `held` wait until they are not in it.
    """

    def __init__(self, root: Path | None, upstream: int | None) -> None:
        self.root, self.upstream = root, upstream
        self.gets, self.heads, self.sent = Counter[str](), Counter[str](), Counter[str]()
        self.held: set[str] = set()
        self.changed = threading.Condition()
        self.faults: dict[str, list[Fault]] = {}
        self.etag = ""
        self.url = ""

    def clear(self) -> None:
        """Forget what was asked for."""
        for count in (self.gets, self.heads, self.sent):
            count.clear()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait until a GET has made something true. Raises `TimeoutError` after a while."""
        with self.changed:
            if not self.changed.wait_for(happened, LIMIT):
                raise TimeoutError(f"the server was asked for {dict(self.gets)} only")

    def begin(self, name: str) -> Fault | None:
        """Note a GET and wait while the file is held; returns its fault."""
        with self.changed:
            self.gets[name] += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: name not in self.held, LIMIT)
        faults = self.faults.get(name)
        return faults.pop(0) if faults else None

    def let_go(self) -> None:
        """Answer the GETs that wait."""
        with self.changed:
            self.held.clear()
            self.changed.notify_all()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of a file, or what moto answers."""
        if self.upstream is not None:
            moto = http.client.HTTPConnection("127.0.0.1", self.upstream)
            moto.request(method, path, headers=headers)
            response = moto.getresponse()
            body = response.read()
            moto.close()
            return response.status, dict(response.headers), body
        assert self.root is not None
        file = self.root / path.lstrip("/")
        if not file.is_file():
            return 404, {}, b""
        return 200, {"ETag": self.etag}, file.read_bytes()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, store: Store, *arguments: object) -> None:
        self.store = store
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.store.heads[self.path] += 1
        self._send(None)

    def do_GET(self) -> None:
        self._send(self.store.begin(self.path.rpartition("/")[2]))

    def _send(self, fault: Fault | None) -> None:
        status, headers, body = self.store.answer(self.command, self.path, dict(self.headers))
        if isinstance(fault, int):
            status, headers, body = fault, {}, b""
        elif fault == "wrong":
            body = bytes([body[0] ^ 1]) + body[1:]
        elif fault == "short":
            body = body[:-1]
        length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        kept = {name: headers[name] for name in ("ETag", "Last-Modified", "Content-Type") if headers.get(name)}
        self.send_response(status)
        for name, value in {**kept, "Content-Length": length}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            body = body[: len(body) // 2] if fault == "cut" else body
            self.store.sent[self.path.rpartition("/")[2]] += len(body)
            with contextlib.suppress(OSError):  # the process that asked may have been ended
                self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def serve_files(root: Path | None, upstream: int | None = None) -> Iterator[Store]:
    """Serve a folder over HTTP, or pass requests on to moto at another port."""
    store = Store(root, upstream)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, store)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        store.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield store
        server.shutdown()
        thread.join()


def _reset(port: int) -> None:
    """Delete the buckets of earlier servers of this process: moto keeps them."""
    moto = http.client.HTTPConnection("127.0.0.1", port)
    moto.request("POST", "/moto-api/reset")
    assert moto.getresponse().status == 200
    moto.close()


@contextmanager
def serve_s3(root: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Serve the files of a folder from a bucket; the client's environment variables lead to it, and it asks once."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    moto = ThreadedMotoServer("127.0.0.1", 0)
    moto.start()
    try:
        _, port = moto.get_host_and_port()
        _reset(port)
        direct = S3FileSystem(key="k", secret="s", endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True)
        direct.mkdir(BUCKET)
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            direct.pipe_file(f"{BUCKET}/{file.relative_to(root)}", file.read_bytes())
        with serve_files(None, port) as store:
            for name, value in {
                "AWS_ENDPOINT_URL": store.url,
                "AWS_ACCESS_KEY_ID": "k",
                "AWS_SECRET_ACCESS_KEY": "s",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_MAX_ATTEMPTS": "1",
            }.items():
                patch.setenv(name, value)
            patch.setattr(S3FileSystem, "retries", 1)
            store.url = f"s3://{BUCKET}"
            yield store
    finally:
        S3FileSystem.clear_instance_cache()  # clients that were made meanwhile lead to this server
        moto.stop()
