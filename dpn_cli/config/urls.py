"""URLs in place of folders: which stores are read, and what a URL may hold. Imports no torch."""

from __future__ import annotations

import re

# By the scheme of a URL, the extra that installs its client.
EXTRAS = {"s3": "s3", "gs": "gcs", "https": "http", "http": "http", "hf": ""}


def is_url(source: str) -> bool:
    """Return whether a location is behind a URL; ``hf:OWNER/NAME`` is a data set's name and no URL."""
    return re.match(r"[a-zA-Z0-9+.-]+://", source) is not None


def is_shards(source: str) -> bool:
    """Return whether a location is a pattern of webdataset shards: ``wds:PATTERN``, or a URL that ends in .tar."""
    return source.startswith("wds:") or (is_url(source) and source.endswith(".tar"))


def is_hub(source: str) -> bool:
    """Return whether a location is the name of a data set on the Hugging Face hub."""
    return source.startswith("hf:") and not is_url(source)


def check_url(source: str) -> str:
    """Return a location. Raises `ValueError` for a URL of an unknown store, and for one with a secret in it.

    A run's folder keeps the command line, and the message does not repeat the URL.
    """
    url = source.removeprefix("wds:")
    if not is_url(url):
        return source
    scheme, _, path = url.partition("://")
    if scheme not in EXTRAS:
        raise ValueError(f"{scheme}://: no store that is read; {', '.join(f'{name}://' for name in EXTRAS)} are")
    if "@" in path.partition("/")[0] or "?" in path or "::" in path:
        raise ValueError(
            f"{scheme}://…: a URL with a password, a signature (?) or another URL (::) in it, which the run's folder "
            "would keep; the store's client takes credentials from its environment variables and files"
        )
    return source
