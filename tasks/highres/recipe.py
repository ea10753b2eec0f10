"""The high-resolution recipe, and where data and weights come from when the command does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpn_cli.arch import check_image_size, parse_arch
from dpn_cli.errors import DpnError
from dpn_cli.home import find_data, find_weights, home
from dpn_cli.recipe import Plain, Say, merge, read_recipe, unsaid
from dpn_cli.supervised.recipe import SupervisedRecipe, last_given, layered


class HighresRecipe(SupervisedRecipe):
    """All that ``dpn finetune highres`` does."""


def resolve(config: str | None, flags: Mapping[str, Any], settings: Mapping[str, Any], say: Say = unsaid) -> Plain:
    """Merge the layers of the recipe; without data it becomes the demo's. What a duration changes goes to `say`.

    Raises `DpnError` as `layered` does.
    """
    asked, command = read_recipe(config) if config else {}, merge(flags, settings)
    source = last_given("data", "source", asked, command) or find_data("imagenet")
    shipped = "highres_demo" if source == "demo" else "highres"
    return merge(layered(read_recipe(shipped), asked, command, shipped, say), {"data": {"source": source}})


def settle(recipe: HighresRecipe) -> HighresRecipe:
    """Return the recipe with its checkpoint decided.

    Raises `DpnError` for an image size that the patch does not divide, and when real data meet no weights.
    """
    backbone = recipe.backbone
    if backbone.arch:
        patch = parse_arch(backbone.arch)[1]
        check_image_size(backbone.image_size or 384, (patch, patch))
    found = find_weights(backbone.arch, (backbone.stem or "dpn",))
    checkpoint = backbone.checkpoint or found or ("none" if recipe.demo else None)
    if checkpoint is None:
        name = f"{(backbone.arch or 'ARCH').replace('/', '-')}-{backbone.stem or 'dpn'}.safetensors"
        raise DpnError(
            "--checkpoint: fine-tuning starts from a trained network and no weights were given. Ways out: "
            "--checkpoint FILE ('dpn checkpoint inspect' says what is read); --checkpoint "
            f"timm:vit_base_patch32_224.augreg_in1k; put {name} into {home() / 'weights'}; --checkpoint none to train "
            "from scratch; --data demo to look around"
        )
    if checkpoint == "none" and not backbone.arch:
        raise DpnError("--arch is needed to train from scratch; with --checkpoint it is inferred")
    return recipe.model_copy(update={"backbone": backbone.model_copy(update={"checkpoint": checkpoint})})
