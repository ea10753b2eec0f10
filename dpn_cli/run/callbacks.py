"""The outputs of a training: checkpoints, log, progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Tick
from dpn_cli.run.run_dir import MetricsLog


@dataclass(frozen=True)
class Outputs:
    """Where a training saves its state, writes its log and shows its progress; each part is optional.

    `tick` is called after every step, `warn` and `info` with a line for the user.
    """

    checkpoints: Checkpoints | None = None
    log: MetricsLog | None = None
    tick: Callable[[Tick], None] = lambda tick: None
    warn: Callable[[str], None] = print
    info: Callable[[str], None] = lambda text: None
