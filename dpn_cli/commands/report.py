"""`dpn report`: a page with figures about runs. `dpn runs`: what runs there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from dpn_cli.commands.command import Outcome, register_command
from dpn_cli.commands.trainers import EVALUATIONS, PAGES, schema_of
from dpn_cli.config.load import build, read_config, shipped_configs
from dpn_cli.config.option import OUTPUT, argument, flag
from dpn_cli.config.provenance import flatten_keys, format_value, read_sources
from dpn_cli.config.schema import Section
from dpn_cli.errors import DataError, DpnError, StoppedError
from dpn_cli.report.content import PAGE, Findings
from dpn_cli.report.overview import Origins
from dpn_cli.report.reading import RunRecord, folder_of, read_run, unique_names
from dpn_cli.run.console import Console
from dpn_cli.run.environment import read_config as run_config
from dpn_cli.run.files import open_report, read_object, real_path
from dpn_cli.sweep.grid import settings_of

# Where a run has its own page, and the variable that leaves it out, as --no-report does.
PAGE_PATH, NO_REPORT = Path("report") / PAGE, "DPN_NO_REPORT"


class ReportOptions(Section):
    """Options of ``dpn report``."""

    runs: Annotated[list[Path], argument("Folders of runs or evaluations; several are compared.")]
    output_dir: Annotated[
        Path, flag("--output-dir", "-o", help="Folder to write the page, figures and tables to.", panel=OUTPUT)
    ] = Path("report")


def report(
    options: ReportOptions, console: Console, check: Callable[[], object] = lambda: None, title: str = ""
) -> dict[str, Any]:
    """Write a page about runs and return where; `check` is called between figures, and may raise.

    Without a `title` the page is named after its runs.

    Raises `DataError` for a folder that is no run.
    """
    paths = [folder_of(path) for path in dict.fromkeys(options.runs)]
    runs = [read_run(path, name) for path, name in zip(paths, unique_names(paths), strict=True)]
    open_report(options.output_dir)
    from dpn_cli.report.assemble import sections_of
    from dpn_cli.report.page import write_page  # matplotlib takes a second

    sections = sections_of(runs, _reader, origins_of)
    for run in runs:
        for note in run.notes:
            console.warn(f"{run.path}: {note}")
    title = title or f"dpn report: {', '.join(run.name for run in runs)}"
    page = write_page(options.output_dir, title, sections, check)
    return {"page": str(page), "runs": [str(run.path) for run in runs]}


def write_final_page(folder: Path, console: Console) -> None:
    """Write the page of a run that has ended into its folder, unless it is there since the result was written.

    The result is there already: whatever goes wrong here, a stop signal included, is a warning.
    """
    if os.environ.get(NO_REPORT):
        return
    from dpn_cli.run import signals

    page, advice = folder / PAGE_PATH, f"'dpn report {folder}' writes it"
    try:
        with signals.listen():
            if not _is_newest(page, [folder / name for name in ("result.json", "partial.json")]):
                report(ReportOptions(runs=[folder], output_dir=page.parent), console, signals.check_here)
        console.info(f"report: {page}")
    except (StoppedError, KeyboardInterrupt):
        console.warn(f"stopped at the run's page; the run is finished, and {advice}")
    except Exception as error:  # a chart may fail in any way, and the run has not
        console.warn(
            f"the run's page was not written ({type(error).__name__}: {error}); the run is finished, and {advice}"
        )


def _is_newest(page: Path, results: Sequence[Path]) -> bool:
    return page.is_file() and all(
        page.stat().st_mtime_ns >= result.stat().st_mtime_ns for result in results if result.is_file()
    )


def _reader(run: RunRecord) -> Callable[[RunRecord, str], Findings]:
    """Return the function of the run's task that reads it."""
    kind = EVALUATIONS.get(run.result["task"], "") if run.kind == "eval" else run.kind
    if kind not in PAGES:
        raise DataError(f"{run.path}: a run of the kind {kind!r}, of which this version of dpn knows nothing")
    reader: Callable[[RunRecord, str], Findings] = import_module(PAGES[kind]).findings

    def read(run: RunRecord, prefix: str) -> Findings:
        try:
            return reader(run, prefix)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{run.path / 'result.json'}: not what a run of this kind holds ({type(error).__name__}: {error}); the "
                "command that began the run writes it again with --resume, once the file is deleted"
            ) from error

    return read


def origins_of(run: RunRecord) -> Origins:
    """Return every key of a run's config with its value, and whether a shipped config has that, or it is a default."""
    if run.config is None:
        return ()
    name = next((name for name in shipped_configs() if read_config(name)["about"] == run.config.get("about")), None)
    if name is None:
        origin = "a config file" if "about" in run.config else ""  # a probe has options alone
        return [(key, format_value(value), origin) for key, value in flatten_keys(run.config)]
    plain = read_config(name)
    try:
        schema = schema_of(plain, name)
        defaults = dict(flatten_keys(build(schema, plain, name).model_dump(mode="json")))
        sources = read_sources(name, schema)
    except DpnError:
        return [(key, format_value(value), "") for key, value in flatten_keys(run.config)]
    config_keys, explicit_keys = {key for key, _ in flatten_keys(plain)}, _explicit_keys_of(run)
    origins = []
    for key, value in flatten_keys(run.config):
        parts = key.split(".")
        parent_keys = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        source = next((sources[parent_key].comment() for parent_key in parent_keys if parent_key in sources), "")
        if value != defaults.get(key):
            is_explicit = explicit_keys is not None and explicit_keys.intersection(parent_keys)
            origin = "given" if is_explicit else "given or derived" if explicit_keys is None else "derived"
            origin = f"{origin}; the config {name} has {format_value(defaults[key])}" if key in defaults else origin
        else:
            origin = f"config {name}" if key in config_keys else "default"
        origins.append((key, format_value(value), "; ".join(filter(None, (origin, source)))))
    return origins


def _explicit_keys_of(run: RunRecord) -> set[str] | None:
    """Return the config keys that the command of a run gave, with those by which a comparison tells its trainings.

    None where the run does not say. The others follow from these, from the data and from the weights.
    """
    for parent in real_path(run.path).parents[:2]:
        facts, config = read_object(parent / "run.json") or {}, run_config(parent / "config.yaml") or {}
        if facts.get("kind") == "comparison" and "given" in facts:
            network_keys = {f"backbone.{key}" for network in config.get("compare", ()) for key in settings_of(network)}
            return {*facts["given"], "seed", *network_keys}
    explicit_keys = run.facts.get("given")
    return None if explicit_keys is None else set(explicit_keys)


def add_to(root: typer.Typer) -> None:
    """Add ``report`` to the root of all commands."""
    register_command(root, "report", ReportOptions, "dpn report runs/highres/B-32-dpn -o report")(_report)


def _report(options: ReportOptions, console: Console) -> Outcome:
    """Write a page with figures and tables about runs and evaluations."""
    return report(options, console), lambda result: f"{result['page']}: open it in a browser"
