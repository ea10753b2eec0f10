"""Run the command line with ``python -m dpn_cli``."""

from dpn_cli.cli import main

main()
