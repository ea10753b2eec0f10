"""The outputs of a training: checkpoints, log, progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import ProgressTick
from dpn_cli.run.run_dir import MetricsLog


@dataclass(frozen=True)
class Outputs:
    """Outputs of a training: its state, its log and its progress; each is optional.

    `tick` is called after every step, `warn` and `info` with a line for the user.
    """

    checkpoints: Checkpoints | None = None
    log: MetricsLog | None = None
    tick: Callable[[ProgressTick], None] = lambda tick: None
    warn: Callable[[str], None] = print
    info: Callable[[str], None] = lambda text: None
