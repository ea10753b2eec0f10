"""A page about one run or several: the parts that all runs have, around those of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from dpn_cli.report.content import PageSection, Part, Table, TextBlock
from dpn_cli.report.overview import Origins, against_paper, curves, run_summary
from dpn_cli.report.reading import RunRecord
from dpn_cli.report.sweep import Reader, fraction_chart, paired_section, runs_table, sweep_findings


def sections_of(
    runs: Sequence[RunRecord], reader: Callable[[RunRecord], Reader], origins: Callable[[RunRecord], Origins]
) -> list[PageSection]:
    """Return the sections of a page about runs: compared first, then one after the other."""
    is_multi = len(runs) > 1
    prefixes = [f"run{number}_" if is_multi else "" for number in range(1, len(runs) + 1)]
    read_sweep = partial(sweep_findings, reader=reader)
    readers = [read_sweep if run.kind == "comparison" else reader(run) for run in runs]
    findings_by_run = [read(run, prefix) for read, run, prefix in zip(readers, runs, prefixes, strict=True)]
    pairs = list(zip(runs, findings_by_run, strict=True))

    def prefix_name(run: RunRecord, text: str) -> str:
        return f"{run.name}: {text}" if is_multi else text

    overview: list[Part] = [
        TextBlock(prefix_name(run, line), warning=True)
        for run, findings in pairs
        for line in dict.fromkeys([*run.notes, *findings.warnings])
    ]
    overview.append(runs_table(pairs))
    metric_names = {key: name for findings in findings_by_run for key, name in findings.watched.items()}
    charts = curves({run.name: [run] for run in runs}, metric_names, "")
    sections = [PageSection("Overview", overview)]
    if charts:
        sections.append(PageSection("Learning curves", charts))
    if is_multi and (fractions := fraction_chart(pairs)):
        sections.append(PageSection(fractions.title, [fractions]))
    if differences := paired_section(pairs):
        sections.append(differences)
    for run, findings in pairs:
        for section in (*findings.sections, against_paper(run), run_summary(run, origins(run))):
            if section:
                parts = [_prefix_title(run, part) if is_multi else part for part in section.parts]
                sections.append(PageSection(prefix_name(run, section.title), parts))
    return sections


def _prefix_title(run: RunRecord, part: Part) -> Part:
    """Name the run in the title of a table that also stands outside the page."""
    if isinstance(part, Table) and part.name:
        return replace(part, title=f"{run.name}: {part.title}")
    return part
