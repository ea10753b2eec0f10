"""The format that dpn writes: its own layout as safetensors, described in the file's metadata."""

from __future__ import annotations

import json

from dpn_cli.config.network import NormOptions
from dpn_cli.weights.formats.state_dict import Checkpoint, Contents

KEY = "dpn"
_DESCRIBED = ("stem", "eps", "act", "heads", "grid", "mean", "std", "posemb")
# Not in older files, which have LayerNorm before attention and MLP, and average only without a class token.
_NEWER = ("norm", "placement", "pool")


def read(contents: Contents) -> Checkpoint:
    """Read a file that `network_metadata` describes."""
    described = json.loads(contents.metadata[KEY])
    facts = {key: described[key] for key in _DESCRIBED} | {key: described[key] for key in _NEWER if key in described}
    facts["norm_options"] = NormOptions.model_validate(described.get("norm_options", {}))
    for key in ("grid", "mean", "std"):
        facts[key] = tuple(facts[key])
    checkpoint = Checkpoint(state=dict(contents.tensors), format="dpn", **facts)
    if origin := contents.metadata.get("origin"):
        checkpoint.notes.append(f"made from {json.loads(origin)['source']}")
    return checkpoint


def network_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the safetensors metadata that `read` needs to give `checkpoint` back."""
    described = {key: getattr(checkpoint, key) for key in (*_DESCRIBED, *_NEWER)}
    described["norm_options"] = checkpoint.norm_options.model_dump(exclude_defaults=True)
    return {KEY: json.dumps(described)}
