"""Recipes: YAML in, one validated and frozen object out. Imports neither torch nor a task.

Layers, later ones win: schema defaults < shipped recipe < ``--config`` < flags < ``--set a.b=c``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dpn_cli.arch import MOST_PIXELS, Pool, Stem, did_you_mean, parse_arch, whole
from dpn_cli.errors import DpnError
from dpn_cli.explain import explain
from dpn_cli.seeds import MOST_SEED
from dpn_cli.yaml_text import DEEPEST, read_yaml

Plain = dict[str, Any]
# Takes a line for the person at the terminal.
Say = Callable[[str], None]
# Bytes of a recipe's file at most.
MOST_BYTES = 1_000_000
Positive = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Side = Annotated[int, Field(gt=0, le=MOST_PIXELS)]
NonNegative = Annotated[float, Field(ge=0)]
# Pillow's own limit: what it refuses as a decompression bomb.
MAX_PIXELS = 2 * (1024**3 // 4 // 3)
EMPTY = "an empty value (is a shell variable unset?); write null for none"


def _pixels(value: object) -> object:
    """Accept 224, "224", [224, 160] and "224x160" (height x width)."""
    if isinstance(value, str) and "x" in value:
        return tuple(whole(side) or side for side in value.split("x"))
    return value


def listed(value: object) -> object:
    """Accept ``"a,b"`` for ["a", "b"], and 3 for [3]."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",")]
    return [value] if isinstance(value, int | float) else value


Pixels = Annotated[
    Side | tuple[Side, Side],
    BeforeValidator(_pixels),
    Field(description=f"a side of at most {MOST_PIXELS} pixels, or height x width, e.g. 224 or 224x160"),
]


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class About(Section):
    """Where a recipe comes from and what number it should give."""

    paper: str
    table: str
    command: str
    expected: str


class Backbone(Section):
    """Which ViT, and where its weights come from."""

    arch: str | None = None
    stem: Stem | None = None
    checkpoint: str | None = None
    image_size: Pixels | None = None
    pool: Pool | None = None
    pre_logits: bool | None = None
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    grad_checkpointing: bool = False

    @model_validator(mode="after")
    def _known_arch(self) -> Backbone:
        if self.arch is not None:
            parse_arch(self.arch)
        return self


class Pictures(Section):
    """How picture files are read: the decoder of JPEGs, and how many pixels a picture may have."""

    decode: Literal["exact", "pillow"] = "exact"
    max_pixels: Positive = MAX_PIXELS


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optim(Section):
    """The update rule; the learning rate and its schedule are apart (`Schedule`, ``lr``/``lrs``)."""

    name: Literal["momentum", "adam"] = "momentum"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: NonNegative = 0.0
    decay_unit: Literal["schedule", "lr"] = "lr"
    decay_mask: Literal["kernels", "not_1d"] = "kernels"
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0


class Schedule(Section):
    """How long to train and how the learning rate moves, in optimizer steps."""

    steps: Positive
    warmup: Annotated[int, Field(ge=0)] = 0
    decay: Literal["cosine", "linear", "polynomial", "rsqrt", "stair"] = "cosine"
    decay_from: Annotated[int, Field(ge=0)] | None = None
    end: NonNegative = 0.0
    power: Annotated[float, Field(gt=0)] = 1.0
    timescale: Positive = 10_000
    cooldown: Annotated[int, Field(ge=0)] = 0
    stairs: tuple[tuple[int, float], ...] = ()

    @model_validator(mode="after")
    def _phases_fit(self) -> Schedule:
        if self.decay_from is not None and self.decay_from >= self.steps:
            raise ValueError(f"decay_from ({self.decay_from}) must be below steps ({self.steps})")
        if self.warmup >= self.steps:
            raise ValueError(
                f"warmup ({self.warmup}) must be below steps ({self.steps}): "
                f"add --set schedule.warmup={self.steps // 12}"
            )
        return self


def unsaid(line: str) -> None:
    """Drop a line: nobody is at the terminal."""


def scaled_warmup(steps: int, warmup: int, usual: int, say: Say) -> int:
    """Return the warm-up of a training of `steps` by a recipe that has `warmup` of `usual` steps.

    A shorter training than the recipe's has its share of it, and says so; a longer one warms up no longer.
    """
    if steps >= usual:
        return warmup
    share = steps * warmup // usual
    if warmup:
        say(
            f"the training is shorter than the recipe's ({steps} steps, not {usual}), and so is its warm-up: "
            f"{share} steps, not {warmup}"
        )
    return share


class Runtime(Section):
    """How to run: nothing here may change what is computed beyond floating-point rounding."""

    device: str = "auto"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    compile: bool = False
    micro_batch_size: Positive | Literal["auto"] = "auto"
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    checkpoint_every: Positive = 500
    report_to: Literal["none", "tensorboard", "wandb"] = "none"


SectionT = TypeVar("SectionT", bound=Section)


def recipe_dir() -> Traversable:
    """Return the folder of shipped recipes: dpn_cli/configs in a wheel, ./configs in a checkout."""
    shipped = files("dpn_cli") / "configs"
    return shipped if shipped.is_dir() else Path(__file__).parents[1] / "configs"


def shipped_recipes() -> Iterator[str]:
    """Yield the names of the shipped recipes in alphabetical order."""
    yield from sorted(
        entry.name.removesuffix(".yaml") for entry in recipe_dir().iterdir() if entry.name.endswith(".yaml")
    )


def read_recipe(name: str) -> Plain:
    """Read a shipped recipe by name, or a YAML file by path.

    Raises `DpnError` when there is no such recipe, or the file holds no YAML mapping.
    """
    if Path(name).suffix in {".yaml", ".yml"}:
        text = _read_text(name)
    elif name in set(shipped_recipes()):
        text = (recipe_dir() / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise DpnError(
            f"recipe {name!r}: not a shipped recipe ({', '.join(shipped_recipes())}) "
            f"and not a .yaml file{did_you_mean(name, shipped_recipes())}"
        )
    try:
        plain = read_yaml(text)
    except ValueError as error:
        raise DpnError(f"{name}: {error}") from error
    if not isinstance(plain, dict):
        raise DpnError(f"{name}: a recipe is a mapping of keys to values; see 'dpn recipes show vtab'")
    if (empty := _empty_in(plain)) is not None:
        raise DpnError(f"{name}: {empty}: {EMPTY}")
    return plain


def _read_text(name: str) -> str:
    """Read a recipe's file. Raises `DpnError` for one that is not there, not readable, too large or not UTF-8."""
    try:
        with Path(name).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DpnError(f"--config {name}: no such file; shipped recipes are {', '.join(shipped_recipes())}") from error
    except (OSError, ValueError) as error:
        raise DpnError(f"--config {name}: not readable ({getattr(error, 'strerror', None) or error})") from error
    if len(data) > MOST_BYTES:
        raise DpnError(f"--config {name}: larger than {MOST_BYTES // 1000} kB, which no recipe is")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DpnError(
            f"--config {name}: not UTF-8 text (byte {data[error.start]:#04x} at {error.start}); save it as UTF-8"
        ) from error


def _empty_in(value: object, key: str = "") -> str | None:
    """Return the dotted key of an empty text in a value, or None: what is left out in a recipe is null."""
    if value == "":
        return key
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next(
        (found for name, part in parts if (found := _empty_in(part, f"{key}.{name}".lstrip("."))) is not None), None
    )


def from_flags(flags: Mapping[str, object]) -> Plain:
    """Turn ``{"optim.lr": 0.1, ...}`` into nested form, leaving out flags that were not given (None)."""
    plain: Plain = {}
    for key, value in flags.items():
        if value is not None:
            _put(plain, key, value)
    return plain


def from_settings(settings: Sequence[str]) -> Plain:
    """Parse ``--set a.b=c`` items; the value is YAML, so ``[1, 2]``, ``true`` and ``null`` work."""
    plain: Plain = {}
    for item in settings:
        key, equals, value = item.partition("=")
        if not equals or not all(key.split(".")):
            raise DpnError(f"--set {item!r}: write KEY=VALUE, e.g. --set optim.clip_norm=0.5")
        if key.count(".") >= DEEPEST:
            raise DpnError(f"--set {item!r}: no key of a recipe is nested that deep")
        try:
            found = read_yaml(value)
        except ValueError as error:
            raise DpnError(f"--set {item!r}: {error}; quote a value that holds : or #") from error
        if not value or _empty_in(found) is not None:
            raise DpnError(f"--set {item!r}: {EMPTY}")
        _put(plain, key, found)
    return plain


def merge(*layers: Mapping[str, Any]) -> Plain:
    """Merge nested mappings; later layers win key by key, and lists are replaced as a whole."""
    merged: Plain = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merge(merged[key], value) if both else value
    return merged


def build(schema: type[SectionT], plain: Mapping[str, Any], source: str) -> SectionT:
    """Validate a merged recipe. Raises `DpnError` naming every wrong key, what was given and what is allowed."""
    try:
        return schema.model_validate(dict(plain))
    except ValidationError as error:
        raise DpnError(f"{source}: {explain(schema, plain, error)}") from error


def dump(recipe: Section) -> str:
    """Return a recipe as YAML with every key resolved."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=100)


def _put(plain: Plain, dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        plain = plain.setdefault(parent, {})
        if not isinstance(plain, dict):
            raise DpnError(f"--set {dotted!r}: {parent!r} is a value, not a section")
    plain[last] = value
