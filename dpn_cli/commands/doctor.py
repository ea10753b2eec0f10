"""`dpn doctor`: whether this machine can run a training."""

from __future__ import annotations

import os
from typing import Any

import typer

from dpn_cli.commands.command import Outcome, register_command
from dpn_cli.config.schema import Section
from dpn_cli.doctor.result import Finding
from dpn_cli.errors import CheckError
from dpn_cli.run.console import Console, count_noun


class DoctorOptions(Section):
    """``dpn doctor`` has no options of its own."""


def examine() -> list[Finding]:
    """Look at the packages, the machine, its folders, torch, the devices, and the ranks that torchrun has started."""
    from dpn_cli.doctor.machine import machine
    from dpn_cli.doctor.packages import packages
    from dpn_cli.doctor.storage import places
    from dpn_cli.doctor.subprocess_check import start_checks

    with start_checks() as apart:  # torch loads while the rest is looked at
        found = [*packages(), *machine(), *places()]
        return [*found, *apart.findings(found)]


def add_to(app: typer.Typer) -> None:
    """Add the command to a Typer app."""
    register_command(app, "doctor", DoctorOptions, "dpn doctor", quiet=False)(_doctor)


def _doctor(options: DoctorOptions, console: Console) -> Outcome:
    """Check this machine before a training: packages, GPUs, memory, disk, network, ranks."""
    found = examine()
    counts = {level: sum(finding.level == level for finding in found) for level in ("problem", "warning")}
    rank = int(os.environ.get("RANK", "0"))
    met = any(finding.name == "ranks" and finding.level == "ok" for finding in found)
    if rank and met:  # the leading rank says it all
        return None, _describe
    problems = count_noun(counts["problem"], "problem")
    error = CheckError(f"{problems}, as listed above") if counts["problem"] else None
    listed = [{"name": each.name, "level": each.level, "found": each.found, "remedy": each.remedy} for each in found]
    return {"problems": counts["problem"], "warnings": counts["warning"], "findings": listed}, _describe, error


def _describe(result: dict[str, Any]) -> str:
    width = max((len(each["name"]) for each in result["findings"]), default=0)
    lines = []
    for each in result["findings"]:
        lines.append(f"{each['level']:<7}  {each['name']:<{width}}  {each['found']}")
        lines += [f"{'':7}  {'':<{width}}  -> {each['remedy']}"] if each["remedy"] else []
    lines.append(f"{count_noun(result['problems'], 'problem')}, {count_noun(result['warnings'], 'warning')}")
    return "\n".join(lines)
