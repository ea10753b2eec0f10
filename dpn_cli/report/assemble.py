"""A page about one run or several: the parts that all runs have, around those of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from dpn_cli.report import comparison
from dpn_cli.report.comparison import Reader
from dpn_cli.report.content import PageSection, Part, Table, TextBlock
from dpn_cli.report.overview import Origins, against_paper, curves, run_summary
from dpn_cli.report.reading import RunRecord
from dpn_cli.report.side import over_fractions, paired, summary


def sections_of(
    runs: Sequence[RunRecord], reader: Callable[[RunRecord], Reader], origins: Callable[[RunRecord], Origins]
) -> list[PageSection]:
    """Return the sections of a page about runs: side by side first, then one after the other."""
    several = len(runs) > 1
    prefixes = [f"run{number}_" if several else "" for number in range(1, len(runs) + 1)]
    trainings = partial(comparison.findings, reader=reader)
    readers = [trainings if run.kind == "comparison" else reader(run) for run in runs]
    found = [read(run, prefix) for read, run, prefix in zip(readers, runs, prefixes, strict=True)]
    pairs = list(zip(runs, found, strict=True))

    def call(run: RunRecord, text: str) -> str:
        return f"{run.name}: {text}" if several else text

    overview: list[Part] = [
        TextBlock(call(run, line), warning=True)
        for run, findings in pairs
        for line in dict.fromkeys([*run.notes, *findings.warnings])
    ]
    overview.append(summary(pairs))
    watched = {key: name for findings in found for key, name in findings.watched.items()}
    charts = curves({run.name: [run] for run in runs}, watched, "")
    pages = [PageSection("Overview", overview)]
    if charts:
        pages.append(PageSection("Learning curves", charts))
    if several and (fractions := over_fractions(pairs)):
        pages.append(PageSection(fractions.title, [fractions]))
    if difference := paired(pairs):
        pages.append(difference)
    for run, findings in pairs:
        own = [*findings.sections, against_paper(run), run_summary(run, origins(run))]
        pages += [
            PageSection(call(run, one.title), [_titled(run, part, several) for part in one.parts]) for one in own if one
        ]
    return pages


def _titled(run: RunRecord, part: Part, several: bool) -> Part:
    """Name the run in the title of a table that also stands outside the page."""
    if several and isinstance(part, Table) and part.name:
        return replace(part, title=f"{run.name}: {part.title}")
    return part
