"""The format that dpn writes: its own layout as safetensors, described in the file's metadata."""

from __future__ import annotations

import json

from dpn_cli.weights.formats.layout import Checkpoint, Contents

KEY = "dpn"
_DESCRIBED = ("stem", "eps", "act", "heads", "grid", "mean", "std", "posemb")


def read(contents: Contents) -> Checkpoint:
    """Read a file that `network_metadata` describes."""
    described = json.loads(contents.metadata[KEY])
    facts = {key: described[key] for key in _DESCRIBED}
    for key in ("grid", "mean", "std"):
        facts[key] = tuple(facts[key])
    checkpoint = Checkpoint(state=dict(contents.tensors), format="dpn", **facts)
    if origin := contents.metadata.get("origin"):
        checkpoint.notes.append(f"made from {json.loads(origin)['source']}")
    return checkpoint


def network_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the safetensors metadata that `read` needs to give `checkpoint` back."""
    return {KEY: json.dumps({key: getattr(checkpoint, key) for key in _DESCRIBED})}
