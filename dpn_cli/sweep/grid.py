"""Several networks, or one from several seeds, under one config: ``--compare`` and ``--seeds``. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from dpn_cli.arch import did_you_mean, parse_whole_number
from dpn_cli.config.load import build, read_yaml
from dpn_cli.config.network import BackboneConfig
from dpn_cli.config.option import HELP, MODEL, TRAIN, flag
from dpn_cli.config.schema import MOST_SEED, Config, Seed, split_list
from dpn_cli.config.training import TrainingConfig
from dpn_cli.config.validation_errors import explain

MOST_SEEDS = 1000
SEED_COUNT = f"how many seeds, at most {MOST_SEEDS}, or a list of them from 0 to {MOST_SEED}, e.g. 3 or 0,1,2"
SEEDS = flag(
    "--seeds",
    help="Number of seeds, or a list: 3 is 0,1,2.",
    panel=TRAIN,
    brief=HELP,
)
# Characters of a folder's name at most, so that its path parts stay below a file system's limit of 255 bytes.
LONGEST = 100


def parse_seeds(value: object) -> object:
    """Accept a number of seeds, 3 standing for 0, 1, 2, and ``"0,1,2"``."""
    count = parse_whole_number(value) if isinstance(value, str) else value
    if isinstance(count, int) and not isinstance(count, bool) and count <= MOST_SEEDS:
        return list(range(count))
    return value if isinstance(count, int) else split_list(value)


def check_distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values. Raises `ValueError` when one is there twice."""
    if len(set(values)) != len(values):
        raise ValueError("every value may be given once")
    return values


def folders_of(networks: Sequence[str]) -> dict[str, str]:
    """Return the folder of each network, by its name."""
    folders: dict[str, str] = {}
    for name in networks:
        short = re.sub(r"[^\w=,.+-]+", "-", name)[:LONGEST]
        folders[name] = f"{short}-{len(folders)}" if short in folders.values() else short
    return folders


def _networks(value: object) -> object:
    """Accept ``"none,dpn"``, which are stems, and ``"stem=none,norm=ln;stem=dpn,norm=ln"``."""
    if isinstance(value, str) and re.search("[;=]", value):
        return [part.strip() for part in value.split(";")]
    return split_list(value)


Networks = Annotated[tuple[str, ...], BeforeValidator(_networks)]
COMPARE = flag(
    "--compare",
    help="Run several stems under the same config, e.g. none,dpn, or networks, e.g. "
    "'stem=none,norm=ln;stem=dpn,norm=ln;stem=none,norm=bn', and print the paired difference.",
    panel=MODEL,
    brief="Train several stems, none,dpn, and pair them.",
)


def settings_of(network: str) -> dict[str, Any]:
    """Return the keys of the section ``backbone`` that the name of a network sets, with dots for nested keys.

    A word without a key is the stem: ``"dpn,norm=rms"`` is ``"stem=dpn,norm=rms"``. A comma that no key follows belongs
    to the value before it. Raises `ValueError` for a key that is given twice and for an empty value.
    """
    settings: dict[str, Any] = {}
    for part in re.split(r",(?=\s*[\w.]+\s*=)", network):
        key, equals, value = (word.strip() for word in part.partition("="))
        key, value = (key, value) if equals else ("stem", key)
        if not key or not value:
            raise ValueError(f"{network!r}: write KEY=VALUE, e.g. stem=dpn,norm=ln")
        if key in settings:
            raise ValueError(f"{network!r}: {key} is given twice")
        settings[key] = read_yaml(value)
    return settings


def format_network(name: str) -> str:
    """Return a network's name as a sentence has it: a stem alone is "stem dpn"."""
    return name if "=" in name else f"stem {name}"


@dataclass(frozen=True)
class Trial:
    """One network, by its name, from one seed.

    Args:
        network: its name.
        seed: seed of the training, or of the draw of images.
        folder: folder of its result, below the folder of the sweep.
        config: config of its training; None for a draw of a few-shot probe.
    """

    network: str
    seed: int
    folder: str
    config: Any = None

    @property
    def label(self) -> str:
        """The name in messages."""
        return f"{format_network(self.network)}, seed {self.seed}"


def fill_checkpoint_name(checkpoint: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a checkpoint with the values of keys in braces in their places; ``B/16`` is B-16."""
    for key, value in settings.items():
        if value is not None:
            checkpoint = checkpoint.replace(f"{{{key}}}", str(value).replace("/", "-"))
    return checkpoint


def _network_settings(backbone: BackboneConfig, network: str) -> dict[str, Any]:
    """Return a section with the keys of a network merged in, and the checkpoint's name filled in.

    Raises `ValueError` for a key that the section does not have.
    """
    plain = backbone.model_dump()
    for key, value in settings_of(network).items():
        section_key, _, nested_key = key.partition(".")
        if section_key not in plain:
            suggestion = did_you_mean(section_key, plain)
            raise ValueError(f"{network!r}: {section_key} is no key; use {', '.join(plain)}{suggestion}")
        section = plain[section_key] if isinstance(plain[section_key], dict) else {}
        plain[section_key] = {**section, nested_key: value} if nested_key else value
    if isinstance(plain["checkpoint"], str):
        plain["checkpoint"] = fill_checkpoint_name(plain["checkpoint"], plain)
    return plain


class CompareConfig(Config):
    """A config for one network, or for several that differ in keys of the section ``backbone``."""

    backbone: BackboneConfig = BackboneConfig()
    compare: Annotated[Networks, COMPARE] = ()

    @field_validator("compare")
    @classmethod
    def _comparable(cls, networks: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if len(networks) == 1:
            raise ValueError(
                "needs two stems or more, e.g. none,dpn, or networks, e.g. 'stem=none,norm=ln;stem=dpn,norm=ln'"
            )
        check_distinct(tuple(str(sorted(settings_of(network).items())) for network in networks))
        backbone: BackboneConfig | None = info.data.get("backbone")  # None where it is invalid itself
        for network in networks if backbone else ():
            assert backbone
            plain, section = _network_settings(backbone, network), type(backbone)
            try:
                section.model_validate(plain)
            except ValidationError as error:
                raise ValueError(f"{network!r}: {explain(section, plain, error, {})}") from error
        return networks

    @property
    def networks(self) -> tuple[str, ...]:
        """The names of the networks, which are stems where they differ in nothing else, in the order of training."""
        return self.compare or (self.backbone.stem or "dpn",)

    @property
    def folders(self) -> dict[str, str]:
        """The folder of each network, by its name."""
        return folders_of(self.networks)

    @property
    def joined_networks(self) -> str:
        """The names of the networks, joined for the name of a folder."""
        return "-vs-".join(self.folders.values())[: 2 * LONGEST]

    def unused_checkpoint_warning(self) -> str | None:
        """Return a warning about a checkpoint that is unused because every network names its own; None otherwise."""
        checkpoint = self.backbone.checkpoint
        if checkpoint in (None, "none") or not self.compare:
            return None
        if any("checkpoint" not in settings_of(network) for network in self.compare):
            return None
        return f"--checkpoint {checkpoint}: not used, because every network of --compare has a checkpoint of its own"

    def by_network(self) -> dict[str, Self]:
        """Return the config of each network, by its name, without the comparison.

        ``{stem}`` in the name of the checkpoint, and any other key in braces, is that of the network; ``B/16`` is B-16.
        Raises `DpnError` for a network that does not go with the rest of the config.
        """
        if not self.compare:
            return {self.networks[0]: self}
        plain, schema = {**self.model_dump(), "compare": ()}, type(self)
        return {
            name: build(schema, {**plain, "backbone": _network_settings(self.backbone, name)}, f"compare: {name!r}")
            for name in self.compare
        }


class SweepConfig(CompareConfig, TrainingConfig):
    """The config of one training, or of the same one for several networks and seeds."""

    seeds: Annotated[
        tuple[Seed, ...],
        BeforeValidator(parse_seeds),
        Field(description=SEED_COUNT),
        SEEDS.replace(
            help="Train from several seeds, a number of them or a list (3 is 0,1,2), and print mean and deviation.",
            unset="the one of --seed",
        ),
    ] = ()

    @field_validator("seeds")
    @classmethod
    def _one_kind_of_seed(cls, seeds: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if seeds and info.data.get("seed"):
            raise ValueError(f"--seed {info.data['seed']} is given too; give one of them")
        return check_distinct(seeds)

    @property
    def is_sweep(self) -> bool:
        """True for a config of more than one training."""
        return bool(self.compare or self.seeds)

    def by_seed(self) -> dict[int, Self]:
        """Return the config of each training of one network, by its seed."""
        return {seed: self.model_copy(update={"seed": seed, "seeds": ()}) for seed in self.seeds or (self.seed,)}
