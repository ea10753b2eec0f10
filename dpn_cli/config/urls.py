"""URLs in place of folders: which stores are read, and what a URL may hold. Imports no torch."""

from __future__ import annotations

import re

# By the scheme of a URL, the extra that installs its client.
EXTRAS = {"s3": "s3", "gs": "gcs", "https": "http", "http": "http", "hf": ""}


def is_url(place: str) -> bool:
    """Return whether a place is behind a URL; ``hf:OWNER/NAME`` is a data set's name and no URL."""
    return re.match(r"[a-zA-Z0-9+.-]+://", place) is not None


def is_shards(place: str) -> bool:
    """Return whether a place is a pattern of webdataset shards: ``wds:PATTERN``, or a URL that ends in .tar."""
    return place.startswith("wds:") or (is_url(place) and place.endswith(".tar"))


def is_hub(place: str) -> bool:
    """Return whether a place is the name of a data set on the Hugging Face hub."""
    return place.startswith("hf:") and not is_url(place)


def check_url(place: str) -> str:
    """Return a place. Raises `ValueError` for a URL of an unknown store, and for one with a secret in it.

    A run's folder keeps the command line, and the message does not repeat the URL.
    """
    url = place.removeprefix("wds:")
    if not is_url(url):
        return place
    scheme, _, path = url.partition("://")
    if scheme not in EXTRAS:
        raise ValueError(f"{scheme}://: no store that is read; {', '.join(f'{name}://' for name in EXTRAS)} are")
    if "@" in path.partition("/")[0] or "?" in path or "::" in path:
        raise ValueError(
            f"{scheme}://…: a URL with a password, a signature (?) or another URL (::) in it, which the run's folder "
            "would keep; the store's client takes credentials from its environment variables and files"
        )
    return place
