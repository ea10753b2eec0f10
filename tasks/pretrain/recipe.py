"""The pre-training recipe: Appendix C by architecture, presets, and the stages of a sweep. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dpn_cli.arch import check_image_size, did_you_mean, parse_arch
from dpn_cli.errors import DpnError
from dpn_cli.home import find_data
from dpn_cli.recipe import Plain, Section, build, from_settings, merge, read_recipe
from dpn_cli.supervised.recipe import SupervisedRecipe, duration
from tasks.pretrain.table import APPENDIX_C, LEVELS, SHORT, augmented, regularized

RECIPES = {"imagenet": "pretrain", "sun397": "pretrain_sun397"}
# The built-in scenes with the question that takes most of them in.
DEMO_OBJECTS = "demo:objects"
LEAST_MINIVAL = 0.01
# Sections that say where and how a run runs, not what it computes.
APART = ("about", "data", "runtime")


class Stage(Section):
    """One stage of a sweep: every combination of the grid's values is trained, the best one is carried on."""

    epochs: Annotated[float, Field(gt=0)]
    grid: dict[str, tuple[float, ...]] = Field(default_factory=dict)


class PretrainRecipe(SupervisedRecipe):
    """All that ``dpn pretrain`` does."""

    stages: tuple[Stage, ...] = ()

    @model_validator(mode="after")
    def _enough_minival(self) -> PretrainRecipe:
        share = self.data.minival
        if share is not None and 0 < share < LEAST_MINIVAL:
            raise ValueError(
                f"data.minival ({share:g}) would leave fewer than 1 % of the images for minival: use at least "
                f"{LEAST_MINIVAL:g}, or 0 to train on every image and watch nothing"
            )
        return self


def resolve(
    name: str,
    preset: Literal["short"] | None,
    level: str | None,
    config: str | None,
    flags: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Plain:
    """Merge the layers of the recipe `name`; without data it becomes the demo's.

    Later layers win: shipped recipe, Appendix C's line of the architecture, preset, augmentation level, then what was
    asked. Raises `DpnError` for an architecture without a line, unless the level is given.
    """
    if name not in RECIPES:
        raise DpnError(f"--recipe {name!r}: choose {' or '.join(RECIPES)}{did_you_mean(name, RECIPES)}")
    asked = merge(read_recipe(config) if config else {}, flags, settings)
    data = asked.get("data")
    given = data.get("source") if isinstance(data, dict) else None
    source = given or find_data(name)
    section = asked.get("backbone")
    arch = section.get("arch") if isinstance(section, dict) else None
    if source == "demo" and not given and arch:
        raise DpnError(
            f"--data: no images to train {arch} on: neither $DPN_DATA_DIR/{name} nor ./{name} is there; name them with "
            "--data, or leave --arch out to train the small demo tower on built-in scenes"
        )
    demo = source in ("demo", DEMO_OBJECTS)
    if preset and (demo or name != "imagenet"):
        raise DpnError(f"--preset {preset}: shortens the recipe of ImageNet, not {'the demo' if demo else name}")
    shipped = "pretrain_demo" if demo else RECIPES[name]
    row = {} if demo else _row_of(arch, level)
    if name == "sun397" and row:
        row = {"backbone": {"pre_logits": row["backbone"]["pre_logits"]}}  # the stages search for the others
    return merge(
        read_recipe(shipped),
        row,
        SHORT if preset else {},
        augmented(_level(level)) if level else {},
        duration(asked, shipped),
        asked,
        {"data": {"source": DEMO_OBJECTS if demo else source}},
    )


def _level(level: str) -> Any:
    if level not in LEVELS:
        raise DpnError(f"--augment {level!r}: choose one of {', '.join(LEVELS)}{did_you_mean(level, LEVELS)}")
    return level


def _row_of(arch: object, level: str | None) -> Plain:
    """Return the recipe keys of Appendix C's line for `arch`."""
    if not isinstance(arch, str):
        raise DpnError(f"--arch is needed: {', '.join(APPENDIX_C)} have a line in Appendix C; any SIZE/PATCH works")
    parse_arch(arch)
    if arch in APPENDIX_C:
        return regularized(APPENDIX_C[arch])
    if level is None:
        raise DpnError(
            f"--arch {arch}: Appendix C has lines for {', '.join(APPENDIX_C)} only; say how strongly to augment it "
            f"with --augment LEVEL ({', '.join(LEVELS)}), and --dropout and --drop-path where you want them"
        )
    return {"backbone": {"pre_logits": True}}


def settle(recipe: PretrainRecipe) -> PretrainRecipe:
    """Check what needs more than one key. Raises `DpnError`."""
    backbone = recipe.backbone
    if backbone.arch is None:
        raise DpnError("--arch is needed to train from scratch")
    patch = parse_arch(backbone.arch)[1]
    check_image_size(backbone.image_size or 224, (patch, patch))
    for stage in recipe.stages:
        runs = len(list(cells(recipe, stage)))
        if stage is recipe.stages[-1] and runs != 1:
            raise DpnError(
                f"stages: the last one is scored on the test split, so it is one training, not {runs}: empty its grid"
            )
    return recipe


def cells(recipe: PretrainRecipe, stage: Stage) -> Iterator[tuple[str, PretrainRecipe]]:
    """Yield the runs of a stage: name and recipe, in the order of the grid.

    Raises `DpnError` for a grid key that is no recipe key, or a value that it does not take.
    """
    for values in itertools.product(*stage.grid.values()):
        settings = [f"{key}={value:g}" for key, value in zip(stage.grid, values, strict=True)]
        plain = merge(recipe.model_dump(), {"stages": (), "epochs": stage.epochs}, from_settings(settings))
        yield (
            ",".join(setting.rpartition(".")[2] for setting in settings) or "only",
            build(PretrainRecipe, plain, f"stage {stage.epochs:g} epochs, {', '.join(settings)}"),
        )


def differences(recipe: PretrainRecipe) -> list[str]:
    """Return what differs from Appendix C for this architecture as ``key: here (there)``; none for other recipes."""
    arch = recipe.backbone.arch or ""
    if recipe.demo or recipe.stages or arch not in APPENDIX_C:
        return []
    paper = build(PretrainRecipe, merge(read_recipe("pretrain"), regularized(APPENDIX_C[arch])), "pretrain")
    here, there = (dict(_flat(each.model_dump(mode="json", exclude=set(APART)))) for each in (recipe, paper))
    skipped = {"backbone.arch", "backbone.stem", "seed", "fewshot"}
    if recipe.epochs is not None:
        skipped |= {"schedule.steps", "schedule.warmup"}
    return [f"{key}: {here[key]} ({there[key]})" for key in here if key not in skipped and here[key] != there[key]]


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
