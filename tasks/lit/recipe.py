"""The schema of the LiT recipe, and where data and weights come from when the command does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from dpn_cli.arch import SIZES, check_image_size, nearest, parse_arch
from dpn_cli.errors import DpnError
from dpn_cli.home import find_weights, home
from dpn_cli.recipe import (
    About,
    Backbone,
    Optim,
    Pictures,
    Plain,
    Positive,
    Runtime,
    Say,
    Schedule,
    Section,
    Seed,
    merge,
    read_recipe,
    scaled_warmup,
    unsaid,
)
from dpn_cli.supervised.recipe import last_given, layered

# Input sizes of a tower from scratch: of real pictures, and of the built-in scenes.
SCRATCH_PIXELS = {False: 224, True: 64}


class Data(Pictures):
    """Where the captioned images are; `images` is the folder that their names are relative to."""

    source: str | None = None
    val_source: str | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    images: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    skip_bad_images: bool = False


class Text(Section):
    """The text tower and what it reads; `size` is the image tower's unless given."""

    size: str | None = None
    tokenizer: str | None = None
    clean: Literal["canonicalize", "lower", "whitespace"] = "canonicalize"
    context: Annotated[int, Field(ge=3)] = 16


class Cache(Section):
    """Whether features of the frozen tower are kept, where, and of how many augmented views (0: of the plain image)."""

    use: bool = True
    folder: str | None = None
    views: Annotated[int, Field(ge=0)] = 0


class LitRecipe(Section):
    """All that ``dpn lit train`` does."""

    about: About
    backbone: Backbone = Backbone()
    data: Data = Data()
    text: Text = Text()
    cache: Cache = Cache()
    loss: Literal["softmax", "siglip"] = "softmax"
    temperature: Annotated[float, Field(gt=0)] = 10.0
    bias: float = -10.0
    lr: Annotated[float, Field(gt=0)]
    seed: Seed = 0
    epochs: Annotated[float, Field(gt=0)] | None = None
    batch_size: Positive
    optim: Optim = Optim()
    schedule: Schedule
    runtime: Runtime = Runtime()

    @property
    def demo(self) -> bool:
        """Whether the data are the built-in scenes."""
        return self.data.source == "demo"


def resolve(config: str | None, flags: Mapping[str, Any], settings: Mapping[str, Any], say: Say = unsaid) -> Plain:
    """Merge the layers of the recipe; without data it becomes the demo's. What a duration changes goes to `say`.

    Raises `DpnError` as `layered` does.
    """
    file, command = read_recipe(config) if config else {}, merge(flags, settings)
    source = last_given("data", "source", file, command) or "demo"
    shipped = "lit_demo" if source == "demo" else "lit"
    return merge(layered(read_recipe(shipped), file, command, shipped, say), {"data": {"source": source}})


def settle(recipe: LitRecipe, demo_checkpoint: str | None = None) -> LitRecipe:
    """Return the recipe with its image tower decided; `demo_checkpoint` is the demo's, and None stays.

    Raises `DpnError` for a text tower or an image size that there is not, for skipping without a cache, and when real
    data meet no weights.
    """
    backbone, size = recipe.backbone, recipe.text.size
    if size is not None and size not in SIZES:
        close = nearest(size, SIZES)
        raise DpnError(
            f"--text-size {size!r}: choose one of {', '.join(SIZES)}" + (f"; did you mean {close!r}?" if close else "")
        )
    if recipe.data.skip_bad_images and not recipe.cache.use:
        raise DpnError(
            "--skip-bad-images with --no-cache: only the cache knows which images are readable before training"
        )
    checkpoint = backbone.checkpoint or find_weights(backbone.arch, (backbone.stem or "dpn",))
    if checkpoint is None and recipe.demo:
        checkpoint = "none" if backbone.arch else demo_checkpoint
    if checkpoint is None and not recipe.demo:
        name = f"{(backbone.arch or 'ARCH').replace('/', '-')}-{backbone.stem or 'dpn'}.safetensors"
        raise DpnError(
            "--checkpoint: LiT needs a trained image tower and no weights were given. Ways out: --checkpoint FILE "
            "('dpn checkpoint inspect' says what is read); --checkpoint "
            f"timm:vit_base_patch32_224.augreg_in21k; put {name} into {home() / 'weights'}; --data demo to look around"
        )
    if checkpoint == "none" and not backbone.arch:
        raise DpnError("--arch is needed for an image tower from scratch; with --checkpoint it is inferred")
    pixels = backbone.image_size or (SCRATCH_PIXELS[recipe.demo] if checkpoint == "none" else None)
    if backbone.arch and pixels:
        patch = parse_arch(backbone.arch)[1]
        check_image_size(pixels, (patch, patch))
    settled = backbone.model_copy(update={"checkpoint": checkpoint, "image_size": pixels})
    return recipe.model_copy(update={"backbone": settled})


def in_steps(recipe: LitRecipe, images: int, say: Say = unsaid) -> LitRecipe:
    """Return the recipe with its duration in steps: big_vision rounds epochs x images / batch, at least to one.

    Raises `DpnError` for a batch that is larger than the data set.
    """
    if recipe.batch_size > images:
        raise DpnError(
            f"--batch-size {recipe.batch_size}: larger than the {images} images to train on, so that an image would be "
            f"its own negative; use at most {images}"
        )
    if recipe.batch_size == 1 and recipe.loss == "softmax":
        raise DpnError("--batch-size 1: the softmax loss of a pair without others is zero; use at least 2")
    if recipe.epochs is None:
        return recipe
    steps = max(1, round(recipe.epochs * images / recipe.batch_size))
    warmup = scaled_warmup(steps, recipe.schedule.warmup, recipe.schedule.steps, say)
    schedule = recipe.schedule.model_copy(update={"steps": steps, "warmup": warmup})
    return recipe.model_copy(update={"schedule": schedule})
