"""The result of several networks and seeds side by side: means over seeds, differences in pairs, and their tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console as RichConsole
from rich.table import Table

from dpn_cli.errors import DataError, DpnError, StoppedError
from dpn_cli.report.comparison import name_of, scores_of, value_of
from dpn_cli.run.console import cell
from dpn_cli.run.distributed import from_leader
from dpn_cli.run.files import replace_json
from dpn_cli.run.run_dir import RunFolder
from dpn_cli.statistics import PERCENT, Summary, as_text, paired_difference, summarize
from dpn_cli.sweep.grid import format_network, settings_of

Result = dict[str, Any]
LEGEND = (
    "Mean and standard deviation over n {trainings} with different seeds. The difference is the mean over pairs with "
    "the same seed ± its standard error, with the 95 % t-interval."
)


@dataclass(frozen=True)
class ComparedTrial:
    """A network by name, a seed, and the folder of what they gave below the comparison's."""

    network: str
    seed: int
    folder: str

    @property
    def label(self) -> str:
        """The cell as a sentence has it."""
        return f"{format_network(self.network)}, seed {self.seed}"


@contextmanager
def prefix_errors(network: str) -> Iterator[None]:
    """Put the network's name before what is wrong with it."""
    try:
        yield
    except StoppedError:
        raise
    except DpnError as error:
        raise type(error)(f"{format_network(network)}: {error}") from error


def check_weights(folder: RunFolder, digests: Mapping[str, str]) -> None:
    """Raise `DataError` when a network's weights are others than those that a comparison began with."""
    before = from_leader(folder.facts).get("digests", digests)
    if changed := next((name for name in digests if digests[name] != before[name]), None):
        raise DataError(
            f"{format_network(changed)}: the weights have changed since this comparison began; start another with -o"
        )


def build_result(
    scores: Sequence[str],
    cells: Sequence[ComparedTrial],
    results: Mapping[str, Result],
    failed: Mapping[str, str],
    *,
    compared: bool,
) -> Result:
    """Return what result.json holds; `results` and `failed`, the reasons, are by folder, and scores in percent.

    Of `scores` those count that a result has. Networks are described by their names when they are `compared`.
    """
    found = [key for key in scores if any(value_of(one, key) is not None for one in results.values())] or scores[:1]
    networks: dict[str, Any] = {}
    for each in cells:
        own = settings_of(each.network) if compared else {}
        network = networks.setdefault(each.network, {"network": own, "runs": {}})
        if each.folder in results:
            network["runs"][each.folder] = results[each.folder]
    first, *others = networks
    differences: list[Result] = [{"network": name, "minus": first} for name in others]
    for key in found:
        values: dict[str, dict[int, float]] = {name: {} for name in networks}
        for each in cells:
            value = value_of(results.get(each.folder, {}), key)
            if value is not None:
                values[each.network][each.seed] = value
        for name, by_seed in values.items():
            networks[name][key] = _describe_summary(summarize(list(by_seed.values()), PERCENT)) if by_seed else None
        for difference in differences:
            ours, theirs = values[difference["network"]], values[first]
            seeds = [seed for seed in ours if seed in theirs]
            pairs = ([one[seed] for seed in seeds] for one in (ours, theirs))
            difference.setdefault("seeds", seeds)
            difference[key] = _describe_summary(paired_difference(*pairs)) if seeds else None
    return {
        "task": next((result["task"] for result in results.values()), None),
        "score": found[0],
        "scores": list(found),
        "unit": "percent",
        "seeds": list(dict.fromkeys(each.seed for each in cells)),
        "compare": {"networks": networks, "differences": differences},
        "failed": list(failed.values()),
    }


def _describe_summary(summary: Summary) -> dict[str, Any]:
    deviation = None if summary.stderr is None else round(summary.stderr * math.sqrt(len(summary.values)), 4)
    return {**summary.to_dict(), "std": deviation}


def keep_result(folder: RunFolder, result: Result) -> None:
    """Write a result into a comparison's folder: as result.json when nothing failed, else as partial.json."""
    if result["failed"]:
        replace_json(folder.path / "partial.json", result)
        (folder.path / "result.json").unlink(missing_ok=True)  # of a training that was deleted and failed this time
        folder.update(status="some trainings failed")
    else:
        (folder.path / "partial.json").unlink(missing_ok=True)
        folder.finish(result)


def show_comparison(result: Result, trainings: str = "trainings") -> None:
    """Print the tables of a comparison on stdout, one for each score; `trainings` says what a seed is of."""
    console = RichConsole(highlight=False)
    for key in scores_of(result):
        console.print(_table(result, key))
    for line in result["failed"]:
        console.print(f"[red]failed:[/] {cell(line)}")
    console.print(LEGEND.format(trainings=trainings))


def _table(result: Result, key: str) -> Table:
    compared, score = result["compare"], name_of(key)
    differences = {each["network"]: each[key] for each in compared["differences"]}
    minus = f", and the difference to {next(iter(compared['networks']))}, paired by seed" if differences else ""
    table = Table(box=box.SIMPLE_HEAD, title=cell(f"{result['task']}: {score} in %{minus}"), title_justify="left")
    table.add_column("network", overflow="fold")
    for name in (score, "std", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    if differences:
        for name in ("difference", "95 %", "n"):
            table.add_column(name, justify="right", no_wrap=True)
    for name, network in compared["networks"].items():
        found, difference = network[key], differences.get(name)
        row = ["-"] * 3 if found is None else [f"{found['mean']:.2f}", _number(found["std"]), str(found["n"])]
        if difference:
            row += [*as_text(difference, digits=1), str(difference["n"])]
        table.add_row(cell(name), *row)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
