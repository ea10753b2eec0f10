"""The schema of the VTAB recipe, and where data and weights come from when the command does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dpn_cli.arch import Stem, check_image_size, parse_arch, whole
from dpn_cli.errors import DpnError
from dpn_cli.home import find_data, find_weights, home
from dpn_cli.recipe import (
    About,
    Backbone,
    Optim,
    Pictures,
    Plain,
    Positive,
    Runtime,
    Schedule,
    Section,
    Seed,
    Side,
    listed,
    merge,
    read_recipe,
)
from dpn_cli.seeds import MOST_SEED
from tasks.vtab.table import choose_tasks

MOST_SEEDS = 1000
SEEDS = f"how many seeds, at most {MOST_SEEDS}, or a list of them from 0 to {MOST_SEED}, e.g. 3 or 0,1,2"
# Pixels per side of the built-in scenes (dpn_cli.data.scenes.SCENE_SIZE, which imports too much for this module).
DEMO_PIXELS = 64


def _counted(value: object) -> object:
    """Accept a number of seeds, 3 standing for 0, 1, 2, and ``"0,1,2"``."""
    count = whole(value) if isinstance(value, str) else value
    if isinstance(count, int) and not isinstance(count, bool) and count <= MOST_SEEDS:
        return list(range(count))
    return value if isinstance(count, int) else listed(value)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError("every value may be given once")
    return values


Lr = Annotated[float, Field(gt=0)]


class Data(Pictures):
    """Where the tasks' images are, and how they become pixels."""

    source: str | None = None
    tasks: Annotated[tuple[str, ...], BeforeValidator(listed), Field(min_length=1)] = ("all",)
    resize: Side | None = None
    image_column: str | None = None
    label_column: str | None = None
    skip_bad_images: bool = False


class VtabRecipe(Section):
    """All that ``dpn finetune vtab`` does."""

    about: About
    backbone: Backbone = Backbone()
    data: Data = Data()
    protocol: Literal["paper", "vtab"] = "paper"
    lrs: Annotated[tuple[Lr, ...], BeforeValidator(listed), Field(min_length=1)]
    seeds: Annotated[tuple[Seed, ...], BeforeValidator(_counted), Field(min_length=1, description=SEEDS)] = (0, 1, 2)
    compare: Annotated[tuple[Stem, ...], BeforeValidator(listed)] = ()
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    batch_size: Positive
    eval_batch_size: Positive = 250
    optim: Optim = Optim()
    schedule: Schedule
    allow_failed: bool = False
    keep_weights: Literal["none", "chosen", "all"] = "none"
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _no_repeats(self) -> VtabRecipe:
        for values in (self.lrs, self.seeds, self.compare):
            _distinct(values)
        if self.compare and len(self.compare) < 2:
            raise ValueError("compare needs two stems or more, e.g. none,dpn")
        return self

    @property
    def stems(self) -> tuple[Stem, ...]:
        """The stems to run, one after another."""
        return self.compare or (self.backbone.stem or "dpn",)

    @property
    def demo(self) -> bool:
        """Whether the data are the built-in scenes."""
        return self.data.source == "demo"


def resolve(config: str | None, flags: Mapping[str, Any], settings: Mapping[str, Any]) -> Plain:
    """Merge the layers of the recipe and fill in data, weights and image size where nothing names them.

    Without data the recipe becomes the demo's: `vtab_demo` for the mu-sized default, `vtab_demo_large` for a
    network that the user chose, shortened so that it ends within minutes.
    """
    asked = merge(read_recipe(config) if config else {}, flags, settings)
    for section in ("data", "backbone"):
        if not isinstance(asked.get(section, {}), dict):
            raise DpnError(f"{section}: a section of keys, not a value; see dpn recipes show vtab")
    source = asked.get("data", {}).get("source") or find_data("vtab-1k")
    backbone = asked.get("backbone", {})
    layers = [read_recipe("vtab")]
    if source == "demo":
        arch, weights = backbone.get("arch"), backbone.get("checkpoint") or "none"
        small = str(arch).startswith("mu/") if arch else weights == "none"
        layers = [read_recipe("vtab_demo" if small else "vtab_demo_large")]
    return merge(*layers, asked, {"data": {"source": source}})


def settle(recipe: VtabRecipe) -> VtabRecipe:
    """Return the recipe with checkpoint and image size decided.

    Raises `DpnError` for an unknown task, an image size that the patch does not divide, and when real data meet no
    weights: VTAB measures what pre-training brought.
    """
    choose_tasks(recipe.data.tasks, recipe.demo)
    backbone = recipe.backbone
    checkpoint = backbone.checkpoint or find_weights(backbone.arch, recipe.stems) or ("none" if recipe.demo else None)
    if checkpoint is None:
        raise DpnError(_no_weights(backbone.arch, recipe.stems))
    size = backbone.image_size or 224
    if backbone.arch:
        patch = parse_arch(backbone.arch)[1]
        if backbone.image_size is None and recipe.demo and 224 % patch == 0:
            size = math.ceil(DEMO_PIXELS / patch) * patch  # the scenes are that small
        check_image_size(size, (patch, patch))
    settled = backbone.model_copy(update={"checkpoint": checkpoint, "image_size": size})
    return recipe.model_copy(update={"backbone": settled})


def _no_weights(arch: str | None, stems: tuple[Stem, ...]) -> str:
    wanted = " and ".join(f"{(arch or 'ARCH').replace('/', '-')}-{stem}.safetensors" for stem in stems)
    return (
        "--checkpoint: VTAB measures pre-trained networks and no weights were given. Ways out: --checkpoint FILE "
        "(big_vision .npz, timm or dpn .safetensors; write {stem} in the name with --compare); "
        "--checkpoint timm:vit_base_patch32_224.augreg_in1k; "
        f"put {wanted} into {home() / 'weights'}; --checkpoint none to train from scratch; --data demo to look around"
    )
