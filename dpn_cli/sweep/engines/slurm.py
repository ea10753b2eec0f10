"""Engine that runs work as SLURM jobs through submitit: one array, requeued on preemption and time-out."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import submitit

from dpn_cli.errors import DpnError, StoppedError
from dpn_cli.sweep.engines import node
from dpn_cli.sweep.scheduler import Work

# Requeues of a job after its time limit.
REQUEUES = 100
# Seconds between two checks of the jobs, and for a job to save its state.
POLL_SECONDS, SAVE_TIMEOUT = 1.0, 120
CLUSTER = "cluster"


@dataclass
class Command:
    """A command line as submitit runs it on a node."""

    line: tuple[str, ...]
    log: str
    folder: str
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __call__(self) -> int:
        """Run the command and return its exit code."""
        with Path(self.log).open("ab") as file:
            self.process = node.start_command(self.line, file, self.folder)
            return self.process.wait()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Have the state saved, and return the command that resumes from it."""
        if self.process is not None:
            node.save_and_end(self.process, signal.SIGUSR1)
        return submitit.helpers.DelayedSubmission(Command(self.line, self.log, self.folder))


class Slurm:
    """Runs command lines as the jobs of an array; SLURM starts up to `slots` at once.

    Args:
        slots: number of jobs at once.
        logs: folder of their output, ``LOGS/NAME.log``, on a file system that every node has.
        settings: parameters of submitit, such as ``timeout_min``, ``gpus_per_node`` or ``slurm_partition``; ``cluster``
            is ``slurm``, or ``local`` for processes of this machine.

    Raises `DpnError` when there is no SLURM, or a parameter is not known.
    """

    def __init__(self, slots: int, logs: Path, settings: Mapping[str, Any]) -> None:
        self.slots, self.logs = slots, logs.absolute()
        parameters = {"name": "dpn", "timeout_min": 1440, "slurm_array_parallelism": slots}
        parameters |= {"slurm_signal_delay_s": SAVE_TIMEOUT, **settings}
        cluster = str(parameters.pop(CLUSTER, "slurm"))
        try:
            self._executor = submitit.AutoExecutor(
                self.logs / "jobs", cluster=cluster, slurm_max_num_timeout=REQUEUES, local_max_num_timeout=REQUEUES
            )
            self._executor.update_parameters(**parameters)
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            raise DpnError(f"--engine slurm: {' '.join(str(error).split())}") from error
        self._waiting: list[tuple[str, Command]] = []
        self._jobs: dict[str, submitit.Job[int]] = {}
        self._commands: dict[str, Command] = {}
        self._submissions = 0

    def log_of(self, name: str) -> Path:
        """Return the file that holds what a process prints."""
        return self.logs / f"{name.replace('/', '-')}.log"

    def has_room(self, work: Work) -> bool:
        """Return True: SLURM queues work until a node is free."""
        return True

    def start(self, work: Work, slot: int) -> None:
        """Queue work; work that is started together becomes one array."""
        log = self.log_of(work.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        self._waiting.append((work.name, Command(work.line, str(log), str(Path.cwd()))))

    def wait_finished(self, seconds: float) -> list[tuple[str, int]]:
        """Wait up to `seconds` for work to finish; return names and exit codes of what has finished."""
        self._submit()
        finished = [name for name, job in self._jobs.items() if job.done()]
        if not finished:
            time.sleep(min(seconds, POLL_SECONDS))
        codes = [(name, self._exit_code(name, self._jobs.pop(name))) for name in finished]
        for name, code in codes:
            if self._is_stopped(code):
                self._waiting.append((name, self._commands[name]))
        return [(name, code) for name, code in codes if not self._is_stopped(code)]

    def stop(self) -> None:
        """Have all work save its state and end, and wait for it."""
        for job in self._jobs.values():
            job.cancel(check=False)
        while not all(job.done() for job in self._jobs.values()):
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Release nothing."""

    def _submit(self) -> None:
        if self._waiting:
            names, commands = zip(*self._waiting, strict=True)
            self._waiting = []
            try:
                with self._executor.batch():
                    jobs = [self._executor.submit(command) for command in commands]
            except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, OSError) as error:
                raise DpnError(f"--engine slurm: {' '.join(str(error).split())}") from error
            self._jobs |= dict(zip(names, jobs, strict=True))
            self._commands |= dict(zip(names, commands, strict=True))
            self._submissions += 1

    def _is_stopped(self, code: int) -> bool:
        """Return whether the work was stopped on its node and resumes elsewhere."""
        return code == StoppedError(signal.SIGTERM).exit_code and self._submissions < REQUEUES

    def _exit_code(self, name: str, job: submitit.Job[int]) -> int:
        try:
            return job.result()
        except Exception as error:  # any error of the node, with its traceback as text
            lines = str(error).strip().splitlines() or ["no message"]
            raise DpnError(f"--engine slurm: {name}, job {job.job_id}: {lines[-1]} ({job.paths.stderr})") from error
