"""The record of what loading a weight file changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# Source of a network without a weight file.
SCRATCH = "from scratch"


@dataclass
class LoadReport:
    """Record of every change between a weight file and the network."""

    source: str
    format: str
    digest: str = ""
    network: str = ""
    parameters: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    resized: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return the report in one line, with the first names of each list."""
        origin = self.format if self.source == SCRATCH else f"format {self.format}"
        parts = [f"{self.network}: {self.source} ({origin}, {self.parameters / 1e6:.2f} M parameters)"]
        parts += [f"{len(self.renamed)} arrays renamed"] if self.renamed else []
        lists = {"resized": self.resized, "dropped": self.dropped, "new": self.new, "assumed": self.assumed}
        parts += [f"{label} {shorten(names)}" for label, names in lists.items() if names]
        return "; ".join(parts + self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for run.json."""
        return asdict(self)


def shorten(names: list[str], most: int = 6) -> str:
    """Join the first `most` names with commas, and count the rest."""
    suffix = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + suffix
