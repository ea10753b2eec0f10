"""The high-resolution config, and its default data and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from dpn_cli.config.launch import find_start
from dpn_cli.config.load import Logger, Plain, discard_message, find_last_value, merge, merge_layers, read_config
from dpn_cli.config.option import TRAIN, flag
from dpn_cli.config.paths import DEMOS, find_data
from dpn_cli.config.schema import Optim
from tasks.classify.config import SupervisedConfig
from tasks.classify.default_config import choose_config


class HighresOptim(Optim):
    """An update rule with a learning rate for each layer."""

    layer_decay: Annotated[
        float,
        Field(gt=0, le=1),
        flag("--layer-decay", help="Each layer's lr as a share of the next one's.", panel=TRAIN),
    ] = 1.0


class HighresConfig(SupervisedConfig):
    """Config of ``dpn finetune highres``."""

    optim: HighresOptim = HighresOptim()


def resolve(
    config_file: str | None, flags: Mapping[str, Any], settings: Mapping[str, Any], log: Logger = discard_message
) -> Plain:
    """Merge the layers over the config of the data: the paper's, the demo's (without data), or that of own images.

    The last is pre-training's for a network from scratch. The choice, and keys that a duration changes, are logged.
    Raises `DpnError` as `merge_layers` does.
    """
    file, command = read_config(config_file) if config_file else {}, merge(flags, settings)
    source = find_last_value("data", "source", file, command) or find_data("imagenet")
    scratch = find_last_value("backbone", "checkpoint", file, command) == "none"
    own_config = "pretrain_own" if scratch and config_file != "highres_own" else "highres_own"
    shipped = "highres_demo" if source in DEMOS else choose_config(str(source), config_file, "highres", own_config, log)
    base = read_config(shipped)
    if shipped == "highres_demo" and not scratch and find_last_value("backbone", "checkpoint", file, command):
        base = merge(base, {"backbone": {"arch": None, "pool": None}})  # those of the demo's network from scratch
    return merge(merge_layers(base, file, command, shipped, log), {"data": {"source": source}})


def finalize(config: HighresConfig) -> HighresConfig:
    """Return the config with its checkpoint decided.

    Raises `DpnError` for an image size that the patch does not divide, and for real data without weights.
    """
    backbone = find_start(
        config.backbone,
        needs="fine-tuning starts from a trained network",
        example="vit_base_patch32_224.augreg_in1k",
        otherwise="none" if config.demo else None,
    )
    return config.model_copy(update={"backbone": backbone})
