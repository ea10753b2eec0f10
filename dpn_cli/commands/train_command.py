"""A command that trains, as data: its help, its configs, their schema and the module of its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any, Protocol

from dpn_cli.commands.options import Variant, default_of, explicit_options, keys_of, option_names, parameter_of
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import Logger, Plain, build, from_settings, merge, merge_with_shipped, read_config
from dpn_cli.config.paths import check_location
from dpn_cli.config.provenance import flatten_keys, read_sources
from dpn_cli.config.schema import Config
from dpn_cli.run.console import Console

Result = dict[str, Any]


class TrainingModule(Protocol):
    """The module of a task that loads torch."""

    def run(self, config: Any, launch: LaunchOptions, console: Console) -> Result | None:
        """Train and return the result; None on ranks that do not lead and after a dry run."""

    def show(self, result: Result) -> None:
        """Print the result on stdout."""


class SupportsTrials(Protocol):
    """The module of a task whose work processes can share."""

    def trial_names(self, config: Any) -> list[str]:
        """Return the names of the trials, in the order of their numbers (``--trial``)."""


@dataclass(frozen=True)
class TrainCommand:
    """A command that trains.

    Args:
        help: the command's help.
        example: a command line, for the end of the help.
        schema: the class of its configs.
        module: the name of the `Trainer`, imported when a training begins, because it loads torch.
        layout: what ``--data`` may be, for the message about data that do not exist.
        configs: names of the shipped configs that it starts from, by the label that help gives them; the usual one
            comes first and has no label. Help reads the defaults in them.
        resolve: merges ``--config``, flags and ``--set`` over one of the configs; by default over the usual one.
        finalize: decides what needs more than one key, such as the weights to start from; its last argument is whether
            it does so for a dry run.
        variants: the configs that help reads, where `configs` does not say all.
        without: config keys that are not options of this command.
        extra: options that are not config keys; `resolve` receives them by name.
        failures: returns what failed of several trainings.
        scores: the numbers of a result, in percent, by which ``--compare`` compares trainings: the first one that a
            result has is the headline. A dot leads inside, ``zeroshot.top1``.
    """

    help: str
    example: str
    schema: type[Config]
    module: str
    layout: str
    configs: Mapping[str, str]
    resolve: Callable[..., Plain] | None = None
    finalize: Callable[[Any, Console, bool], Any] = lambda config, console, dry_run: config
    variants: Callable[[], Sequence[Variant]] | None = None
    without: frozenset[str] = frozenset()
    extra: tuple[Parameter, ...] = ()
    failures: Callable[[Result], Sequence[str]] = lambda result: result.get("failed", ())
    scores: tuple[str, ...] = ("top1",)

    def layers(self, arguments: Mapping[str, Any], log: Logger) -> Any:
        """Return the validated config of a command line. Raises `DpnError`."""
        keys = list(keys_of(self.schema))
        flags = explicit_options(keys, arguments)
        settings = from_settings(arguments.get("set") or [])
        extra = {parameter.name: arguments.get(parameter.name) for parameter in self.extra}
        resolve = self.resolve or partial(merge_with_shipped, self.configs[""])
        config_file = arguments.get("config")
        plain = resolve(config_file, flags, settings, log, **extra)
        if config_file:
            read_sources(config_file, self.schema)  # reports mistakes in them; the run does not need them
        return build(self.schema, plain, "config", option_names(keys, arguments))

    def check_locations(self, config: Any) -> None:
        """Raise `DataError` for data that do not exist, before anything is loaded that takes seconds."""
        check_location("--data", config.data.source, self.layout)
        check_location("--val-data", getattr(config.data, "val_source", None), self.layout)

    def explicit_keys(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the config keys that a command line gives, those of its configuration file among them."""
        config_file = arguments.get("config")
        flags, settings = (
            explicit_options(list(keys_of(self.schema)), arguments),
            from_settings(arguments.get("set") or []),
        )
        return [key for key, _ in flatten_keys(merge(read_config(config_file) if config_file else {}, flags, settings))]

    def parameters(self, only: frozenset[str] | None = None) -> list[Parameter]:
        """Return the options of config keys, all of them or `only` some, with their defaults in help."""
        shipped = [Variant(label, read_config(name)) for label, name in self.configs.items()]
        variants = self.variants() if self.variants else shipped
        return [
            parameter_of(key, default_of(key, self.schema, variants))
            for key in keys_of(self.schema)
            if key.name not in self.without and (only is None or key.parameter in only)
        ]
