"""The command line, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result


def run_dpn(*arguments: str) -> Result:
    """Run the command line in this process: torch is loaded already."""
    from dpn_cli.cli import app

    return CliRunner().invoke(app, arguments)
