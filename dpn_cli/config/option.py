"""A config key that is a command-line option: the option's name, help and panel stand next to the key in the schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

MODEL, DATA, TRAIN, RUNTIME, OUTPUT = "Model", "Data", "Training", "Runtime", "Output and config"
FACTS = "Facts missing from the file"
PANELS = (MODEL, FACTS, DATA, TRAIN, RUNTIME, OUTPUT)
# Of `flag`: a brief text that is the help text.
HELP = ""
Complete = Callable[[str], Sequence[str | tuple[str, str]]]


@dataclass(frozen=True)
class Flag:
    """Marks a field of a config as an option, in its ``Annotated``.

    `names` are ``"--batch-size", "-b"`` or ``"--cache/--no-cache"``; without one the field is an argument. `unset` says
    in help what stands for null; the other defaults are read from the configs. `complete` returns the values that shell
    completion offers. An option with a `brief` text is one that people use: ``--help`` shows it with this one line,
    the others are left to ``--help-all``.
    """

    names: tuple[str, ...]
    help: str
    panel: str | None
    unset: str = "none"
    complete: Complete | None = None
    brief: str | None = None

    @property
    def parameter(self) -> str:
        """The name of the option's parameter: ``batch_size`` for ``--batch-size``; none for an argument."""
        return (self.names or ("",))[0].partition("/")[0].removeprefix("--").replace("-", "_")

    def replace(self, *, help: str | None = None, unset: str | None = None, brief: str | None = None) -> Flag:
        """Return the same option with another help text, or another meaning of null."""
        return replace(self, help=help or self.help, unset=unset or self.unset, brief=brief or self.brief)


def argument(help: str) -> Flag:
    """Return the `Flag` of a field that is an argument of its own name."""
    return Flag((), help, None)


def flag(
    *names: str, help: str, panel: str, unset: str = "none", complete: Complete | None = None, brief: str | None = None
) -> Flag:
    """Return the `Flag` of a field."""
    return Flag(names, help, panel, unset, complete, help if brief == HELP else brief)
