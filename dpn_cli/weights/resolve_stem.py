"""The stem of a config without one, and the description of a training's initial weights."""

from __future__ import annotations

from typing import TypeVar

from dpn_cli.config.network import BackboneConfig
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Console
from dpn_cli.weights.infer_config import infer_config
from dpn_cli.weights.load_report import LoadReport
from dpn_cli.weights.locate import open_checkpoint

BackboneT = TypeVar("BackboneT", bound=BackboneConfig)


def resolve_stem(backbone: BackboneT, console: Console) -> BackboneT:
    """Fill in the stem of a config's backbone: its checkpoint's, or dpn from scratch.

    Logs the checkpoint's network. Raises as `open_checkpoint` and `infer_config` do.
    """
    checkpoint = backbone.checkpoint or "none"
    if backbone.stem is not None:
        return backbone
    if checkpoint == "none" or "{stem}" in checkpoint:
        return backbone.model_copy(update={"stem": "dpn"})
    source = open_checkpoint(checkpoint)
    config = infer_config(source, backbone.arch, backbone.pool, backbone.image_size)
    console.info(f"{source.source}: {config}; its stem is used, since --stem was left out")
    return backbone.model_copy(update={"stem": config.stem})


def describe_start(report: LoadReport, checkpoints: Checkpoints | None) -> str:
    """Describe the initial weights of a training: its saved state, or the load report."""
    if checkpoints and checkpoints.started:
        millions = report.parameters / 1e6
        return f"{report.network}: from what this run saved in {checkpoints.path} ({millions:.2f} M parameters)"
    return report.summary()
