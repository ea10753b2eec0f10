"""Hugging Face hub: downloads while it is online, the client's cache while it is not."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from functools import cache

from dpn_cli.errors import DataError

# Long enough for a slow network; the client's own retries take 20 to 45 s before they give up.
PROBE_SECONDS = 5


@cache
def hub_is_offline() -> bool:
    """Return whether the hub is out of reach; if it is, its client uses only its cache from now on.

    Call it before `datasets` is imported, which reads its own setting then.
    """
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return True
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
            return False
    except urllib.error.HTTPError:
        return False  # an HTTP error is a response, too
    except (OSError, ValueError):
        get_session().event_hooks = {"request": [_raise_offline]}
        os.environ["HF_DATASETS_OFFLINE"] = "1"
        return True


def _raise_offline(request: object) -> None:
    """Raise the client's error for HF_HUB_OFFLINE."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    raise OfflineModeIsEnabled("the hub did not respond")


def fetch_if_exists(repo: str, filename: str) -> str | None:
    """Return the local path of a file of a hub repository; None if the repository has no such file.

    Raises `DataError` when the download fails, or when the hub is out of reach and its cache has no record of the file.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unreachable = hub_is_offline()
    try:
        return hf_hub_download(repo, filename)
    except LocalEntryNotFoundError as error:
        # None: the cache does not know the file. Another value that is not a path: the file does not exist.
        if unreachable and try_to_load_from_cache(repo, filename) is not None:
            return None
        raise DataError(
            f"hf-hub:{repo}: {'the hub is out of reach' if unreachable else 'the download failed'} and "
            f"{filename} is not in the local cache. On a machine with a network: "
            f"'hf download {repo} {filename}', copy the file here and pass its path instead"
        ) from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # the client's HTTP library has kinds of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"hf-hub:{repo}: cannot fetch {filename} ({reason}); check the name, or pass the path of a local file"
        ) from error
