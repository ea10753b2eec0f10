"""`dpn doctor`: check whether this machine can run a training."""

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
    """Check packages, machine, folders, torch, devices, and the ranks that torchrun has started."""
    from dpn_cli.doctor.machine import check_machine
    from dpn_cli.doctor.packages import check_packages
    from dpn_cli.doctor.storage import check_storage
    from dpn_cli.doctor.subprocess_check import start_checks

    with start_checks() as checks:  # torch loads while the rest is checked
        findings = [*check_packages(), *check_machine(), *check_storage()]
        return [*findings, *checks.findings(findings)]


def add_to(app: typer.Typer) -> None:
    """Add the command to a Typer app."""
    register_command(app, "doctor", DoctorOptions, "dpn doctor", quiet=False)(_doctor)


def _doctor(options: DoctorOptions, console: Console) -> Outcome:
    """Check this machine before a training: packages, GPUs, memory, disk, network, ranks."""
    findings = examine()
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    rank = int(os.environ.get("RANK", "0"))
    ranks_found = any(finding.name == "ranks" and finding.level == "ok" for finding in findings)
    if rank and ranks_found:  # the leading rank reports for all
        return None, _describe
    problems = count_noun(counts["problem"], "problem")
    error = CheckError(f"{problems}, as listed above") if counts["problem"] else None
    listed = [{"name": item.name, "level": item.level, "found": item.found, "remedy": item.remedy} for item in findings]
    return {"problems": counts["problem"], "warnings": counts["warning"], "findings": listed}, _describe, error


def _describe(result: dict[str, Any]) -> str:
    width = max((len(finding["name"]) for finding in result["findings"]), default=0)
    lines = []
    for finding in result["findings"]:
        lines.append(f"{finding['level']:<7}  {finding['name']:<{width}}  {finding['found']}")
        lines += [f"{'':7}  {'':<{width}}  -> {finding['remedy']}"] if finding["remedy"] else []
    lines.append(f"{count_noun(result['problems'], 'problem')}, {count_noun(result['warnings'], 'warning')}")
    return "\n".join(lines)
