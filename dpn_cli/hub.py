"""The Hugging Face hub: go online when it answers, use what is cached when it does not, and say which at once."""

from __future__ import annotations

import urllib.error
import urllib.request
from functools import cache

from dpn_cli.errors import DataError

# Long enough for a slow network; the client's own retries take 20 to 45 s before they give up.
PROBE_SECONDS = 5


@cache
def offline() -> bool:
    """Tell whether the hub is out of reach, and if so switch its client to cached files only.

    The client reads HF_HUB_OFFLINE once, when it is imported; setting its constant works at any time.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
                pass
        except urllib.error.HTTPError:
            pass  # it answered, whatever it thinks of HEAD
        except (OSError, ValueError):
            constants.HF_HUB_OFFLINE = True
    return bool(constants.HF_HUB_OFFLINE)


def fetch_if_there(repo: str, filename: str) -> str | None:
    """Return the local path of a file of a hub repository; None where it certainly has no such file.

    Raises `DataError` when that cannot be told, because the download failed, or because the hub is out of reach and its
    cache knows nothing of the file; it says what to fetch and where to put it.
    """
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unreachable = offline()
    try:
        return hf_hub_download(repo, filename)
    except LocalEntryNotFoundError as error:
        if unreachable and try_to_load_from_cache(repo, filename) is _CACHED_NO_EXIST:
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
