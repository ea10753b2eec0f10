"""The stem of a config that leaves it to its checkpoint, and the message about where a training starts."""

from __future__ import annotations

from typing import TypeVar

from dpn_cli.config.network import BackboneConfig
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Console
from dpn_cli.weights.backbone import LoadReport
from dpn_cli.weights.infer_config import config_of
from dpn_cli.weights.locate import open_checkpoint

BackboneT = TypeVar("BackboneT", bound=BackboneConfig)


def with_own_stem(backbone: BackboneT, console: Console) -> BackboneT:
    """Return a config's backbone with the stem that it leaves out: its checkpoint's, or dpn from scratch.

    Says which network the checkpoint is. Raises as `open_checkpoint` and `config_of` do.
    """
    place = backbone.checkpoint or "none"
    if backbone.stem is not None:
        return backbone
    if place == "none" or "{stem}" in place:
        return backbone.model_copy(update={"stem": "dpn"})
    source = open_checkpoint(place)
    config = config_of(source, backbone.arch, backbone.pool, backbone.image_size)
    console.info(f"{source.source}: {config}; its stem is used, since --stem was left out")
    return backbone.model_copy(update={"stem": config.stem})


def describe_start(report: LoadReport, checkpoints: Checkpoints | None) -> str:
    """Say where the weights of a training come from: from the state that it saved, or how they were loaded."""
    if checkpoints and checkpoints.started:
        millions = report.parameters / 1e6
        return f"{report.network}: from what this run saved in {checkpoints.path} ({millions:.2f} M parameters)"
    return report.summary()
