"""Options of evaluations under shifts of the data; `dpn_cli.data.shifts` computes them. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from dpn_cli.arch import did_you_mean
from dpn_cli.config.option import DATA, flag
from dpn_cli.config.schema import Section, Seed, split_list

Kind = Literal["noise", "blur", "weather", "digital", "light"]
SHIFTS: dict[str, Kind] = {
    "gaussian_noise": "noise",
    "shot_noise": "noise",
    "impulse_noise": "noise",
    "defocus_blur": "blur",
    "glass_blur": "blur",
    "motion_blur": "blur",
    "zoom_blur": "blur",
    "snow": "weather",
    "fog": "weather",
    "brightness": "weather",
    "contrast": "digital",
    "elastic_transform": "digital",
    "pixelate": "digital",
    "jpeg_compression": "digital",
    "gain": "light",
    "flat_contrast": "light",
    "dusk": "light",
}
# ImageNet-C's corruptions (arXiv 1903.12261) without frost, over which its error is averaged.
IMAGENET_C = tuple(name for name, kind in SHIFTS.items() if kind != "light")
SEVERITIES = (1, 2, 3, 4, 5)
_GROUPS: dict[str, tuple[str, ...]] = {
    "all": tuple(SHIFTS),
    "imagenet-c": IMAGENET_C,
    **{kind: tuple(name for name in SHIFTS if SHIFTS[name] == kind) for kind in dict.fromkeys(SHIFTS.values())},
}


def expand_shifts(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the shifts that names and groups stand for, each once. Raises `ValueError` for another word."""
    for word in words:
        if word not in SHIFTS and word not in _GROUPS:
            known = (*_GROUPS, *SHIFTS)
            raise ValueError(f"{word!r}: choose from {', '.join(known)}{did_you_mean(word, known)}")
    return tuple(dict.fromkeys(name for word in words for name in _GROUPS.get(word, (word,))))


SHIFTS_FLAG = flag(
    "--shifts",
    help="Also score under shifts: all, imagenet-c, noise, blur, weather, digital, light, or names: gain,dusk.",
    panel=DATA,
)


ShiftNames = Annotated[tuple[str, ...], BeforeValidator(split_list), AfterValidator(expand_shifts)]


class ShiftSection(Section):
    """Shifts of the data under which a finished network is scored, too."""

    names: Annotated[ShiftNames, SHIFTS_FLAG] = ()
    severities: Annotated[
        tuple[Annotated[int, Field(ge=1, le=5)], ...],
        BeforeValidator(split_list),
        AfterValidator(lambda values: tuple(sorted(set(values)))),
        Field(min_length=1, description="numbers from 1 to 5 with commas, e.g. 1,3,5"),
        flag("--severity", help="Severities of the shifts, 1 to 5.", panel=DATA),
    ] = SEVERITIES
    seed: Annotated[Seed, flag("--shift-seed", help="Seed of the shifts' random numbers.", panel=DATA)] = 0

    def count_passes(self, networks: int = 1) -> int:
        """Return how often each image is scored for the shifts; 0 without any."""
        return networks * (1 + len(self.names) * len(self.severities)) if self.names else 0


class ShownShifts(ShiftSection):
    """Shifts under which a page shows images."""

    names: Annotated[
        ShiftNames,
        SHIFTS_FLAG.replace(
            help="Show the first five images under shifts on the page of --html: all, imagenet-c, noise, blur, "
            "weather, digital, light, or names: gain,dusk.",
            brief="Show images under shifts on the page of --html.",
        ),
    ] = ()


class ShiftOptions(ShiftSection):
    """Shifts of an evaluation, which may score a second network."""

    names: Annotated[ShiftNames, SHIFTS_FLAG.replace(brief="Also score under shifts: all, light, noise, ...")] = ()
    baseline: Annotated[
        str | None,
        flag("--baseline", help="Another run, scored on the same shifted images: the reference of mCE.", panel=DATA),
    ] = None

    @field_validator("baseline")
    @classmethod
    def _has_shifts(cls, baseline: str | None, info: ValidationInfo) -> str | None:
        if baseline and not info.data.get("names"):
            raise ValueError("compares runs under shifts; pass --shifts, e.g. --shifts light")
        return baseline
