"""Programs that `benchmarks/gpu.py` starts: the demos, every task beside the CPU, and a training that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_report import Check, Settings
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
# Seconds after which a program is killed, and how often its end is looked for.
LIMIT, POLL = 180.0, 0.02
# How far a result of a demo may lie below the one on a CPU, in points: other sums give another network.
POINTS = 8.0
# Most relative difference of the losses of a task's first steps from those on the CPU, in float32.
LOSSES = 1e-3
# Most distance of the weights of a training that was killed and resumed from those of one that was not, as a share of
# their length: zero on a CPU, where sums have one order; elsewhere this, or so many times that of two whole trainings.
RESUMED, TIMES = 1e-3, 2.0

Command = list[str]


@dataclass(frozen=True)
class Demo:
    """A demo: the words of its command, and a number of its result with the value that it had on a CPU."""

    words: Command
    key: tuple[str, ...] = ()
    value: float = 0.0


# The values are those of docs/measurements.md.
DEMOS = {
    "highres": Demo(["finetune", "highres"], ("top1",), 86.4),
    "pretrain": Demo(["pretrain"], ("top1",), 52.2),
    "lit": Demo(["lit", "train"], ("zeroshot", "top1"), 53.2),
    "segment": Demo(["segment", "ade20k"], ("miou",), 47.6),
    "distill": Demo(["distill"], ("top1",), 63.9),
    "vtab": Demo(["finetune", "vtab"]),
}
# What takes a finished run: RUN is that of the demo highres.
USES = {
    "doctor": ["doctor"],
    "eval": ["eval", "RUN", "--data", "demo"],
    "predict": ["predict", "RUN", "RUN/mistakes"],
    "inspect": ["inspect", "RUN", "-o", "RUN/../inspected"],
}
# How each task begins its training from the weights of TOWER, and what it is given besides.
TASKS = {
    "highres": ["finetune", "highres", "--checkpoint", "TOWER"],
    "pretrain": ["pretrain"],
    "lit": ["lit", "train", "--checkpoint", "TOWER"],
    "segment": ["segment", "ade20k", "--checkpoint", "TOWER"],
    "distill": ["distill", "--teacher", "TOWER"],
    "vtab": ["finetune", "vtab", "--lrs", "1e-3", "--seeds", "1"],
}


@dataclass
class Started:
    """A program at work, with the files that it writes to."""

    process: subprocess.Popen[bytes]
    folder: Path
    began: float = field(default_factory=time.perf_counter)

    def kill(self) -> None:
        """Kill it with all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True)
class Ended:
    """A program that has ended, or was ended after the limit."""

    code: int
    seconds: float
    output: str
    errors: str

    @property
    def note(self) -> str:
        """How long it took, and its last words if it failed."""
        last = self.errors.strip().rpartition("\n")[2] if self.code else ""
        killed = ", killed" if self.seconds > LIMIT else ""
        return f"{self.seconds:.1f} s{killed}" + (f": {last[:200]}" if last else "")

    @property
    def result(self) -> dict[str, Any]:
        """What it has printed as JSON."""
        found: dict[str, Any] = json.loads(self.output)
        return found


def start(words: Command, folder: Path, threads: int, **environment: str) -> Started:
    """Start `dpn` with some words; `folder` gets what it prints."""
    folder.mkdir(parents=True)
    here = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(str(Path(each).resolve()) for each in (ROOT, *here))  # it starts in another folder
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), **environment}
    with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "dpn_cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=settings,
            cwd=folder,
            start_new_session=True,
        )
    return Started(process, folder)


def end(started: Started) -> Ended:
    """Return how a program has ended that has."""
    output, errors = ((started.folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return Ended(started.process.returncode, time.perf_counter() - started.began, output, errors)


def run_all(
    commands: Mapping[str, Command], folder: Path, **environment: str
) -> Generator[tuple[str, Ended], None, None]:
    """Run programs, a few at a time, and yield each as it ends. None outlives the generator."""
    cores = os.cpu_count() or 1
    at_once = max(1, min(len(commands), cores // 2))
    waiting, working = list(commands.items()), dict[str, Started]()
    try:
        while waiting or working:
            while waiting and len(working) < at_once:
                name, words = waiting.pop(0)
                working[name] = start(words, folder / name, max(1, cores // at_once), **environment)
            for name, started in list(working.items()):
                if time.perf_counter() - started.began > LIMIT:
                    started.kill()
                if started.process.poll() is not None:
                    del working[name]
                    yield name, end(started)
            time.sleep(POLL)
    finally:
        for started in working.values():
            started.kill()


def demos(settings: Settings) -> Iterator[Check]:
    """Run the demo of every task as a program, then what takes a finished run; a small trial makes dry runs of them."""
    here = ["--device", str(settings.device)]
    with scratch() as place:
        common = [*here, "--json", "-q"]
        commands = {name: [*demo.words, "--data", "demo", *common] for name, demo in DEMOS.items()}
        if settings.trial:
            commands = {name: [*words, "--dry-run"] for name, words in commands.items()}
            commands["highres"] = [*commands["highres"][:-1], "--steps", "4"]
        run = place / "run"
        commands["highres"] += ["-o", str(run)]
        commands["dry run"] = ["finetune", "highres", "--data", "demo", *common, "--dry-run"]
        with closing(run_all(commands, place / "demos", DPN_HOME=str(place / "home"))) as ended:
            for name, done in ended:
                yield Check(f"dpn {' '.join(commands[name])}".replace(str(place), "…"), done.code, 0, done.note)
                if name in DEMOS and not done.code and not settings.trial:
                    yield from result_beside_the_cpus(name, done.result)
        uses = {name: [word.replace("RUN", str(run)) for word in words] for name, words in USES.items()}
        uses = {name: words if name == "doctor" else [*words, *here] for name, words in uses.items()}
        with closing(run_all(uses, place / "uses", DPN_HOME=str(place / "home"))) as ended:
            for name, done in ended:
                yield Check(f"dpn {' '.join(uses[name])}".replace(str(place), "…"), done.code, 0, done.note)


def result_beside_the_cpus(name: str, result: dict[str, Any]) -> Iterator[Check]:
    """Yield by how many points the result of a demo is below that on a CPU, where one is known."""
    demo = DEMOS[name]
    found: Any = result
    if demo.key:
        for key in demo.key:
            found = found[key]
        what = f"{name}: points of {'.'.join(demo.key)} below the CPU's"
        yield Check(what, demo.value - found, POINTS, f"{found:.1f}, on a CPU {demo.value:.1f}")


def tasks(settings: Settings) -> Iterator[Check]:
    """Train five steps of every task in float32 here and on the CPU, and compare their losses."""
    training = ["--data", "demo", "--steps", "5", "--precision", "fp32", "--no-report", "--json", "-q"]
    with scratch() as place:
        tower, home = place / "tower", str(place / "home")
        begin = {"tower": ["finetune", "highres", "--stem", "none", *training, "--device", "cpu", "-o", str(tower)]}
        ((_, made),) = run_all(begin, place / "made", DPN_HOME=home)
        if made.code:
            raise RuntimeError(f"no tower to begin with: {made.note}")
        commands = {}
        for name, words in TASKS.items():
            whole = [str(tower) if word == "TOWER" else word for word in words]
            for where, device in (("here", str(settings.device)), ("cpu", "cpu")):
                out = ["--device", device, "-o", str(place / where / name)]
                commands[f"{name} {where}"] = [*whole, *training, *out]
        codes = dict[str, int]()
        with closing(run_all(commands, place / "programs", DPN_HOME=home)) as ended:
            for name, done in ended:
                codes[name], task = done.code, name.partition(" ")[0]
                if done.code:
                    yield Check(f"dpn {' '.join(commands[name])}".replace(str(place), "…"), done.code, 0, done.note)
                elif [codes.get(f"{task} {where}") for where in ("here", "cpu")] == [0, 0]:
                    yield losses_beside(task, place / "here" / task, place / "cpu" / task)


def losses_beside(task: str, here: Path, there: Path) -> Check:
    """Compare the losses of a run with those of one on the CPU."""
    ours, theirs = losses(here), losses(there)
    apart = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(ours, theirs, strict=True))
    note = f"{len(ours)} steps, from {theirs[0]:.4f} to {theirs[-1]:.4f}"
    return Check(f"{task}: loss of the first steps, relative to the CPU's", apart, LOSSES, note)


def losses(run: Path) -> list[float]:
    """Return the losses of all steps of a run, of all of its trainings."""
    lines = [json.loads(line) for log in sorted(run.rglob("metrics.jsonl")) for line in log.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def kill(settings: Settings) -> Iterator[Check]:
    """Kill a training with SIGKILL after it has saved its state, resume it, and compare with one that nobody killed."""
    steps = 60 if settings.trial else 600
    words = ["pretrain", "--data", "demo", "--steps", str(steps), "--set", "runtime.checkpoint_every=10"]
    words += ["--precision", "fp32", "--device", str(settings.device), "--no-report", "--json", "-q", "-o"]
    with scratch() as place:
        whole, again, killed, home = place / "whole", place / "again", place / "killed", str(place / "home")
        cores = os.cpu_count() or 1
        started = start([*words, str(killed)], place / "programs" / "first", cores, DPN_HOME=home)
        try:
            while not (killed / "checkpoints" / "last").exists() and started.process.poll() is None:
                if time.perf_counter() - started.began > LIMIT:
                    raise TimeoutError(f"no state was saved within {LIMIT:g} s")
                time.sleep(POLL / 4)
        finally:
            started.kill()
        first = end(started)
        yield Check("killed while it trained: exit code beside SIGKILL's", abs(first.code + 9), 0, first.note)
        if first.code != -signal.SIGKILL:
            return
        reached = len((killed / "metrics.jsonl").read_text().splitlines())
        commands = {"resumed": [*words, str(killed), "--resume"]}
        commands |= {path.name: [*words, str(path)] for path in (whole, again)}
        with closing(run_all(commands, place / "programs", DPN_HOME=home)) as ended:
            codes = {name: (done.code, done.note) for name, done in ended}
        for name, (code, note) in codes.items():
            yield Check(f"training, {name}: exit code", code, 0, note)
        if not any(code for code, _ in codes.values()):
            usual = weights_apart(again, whole)
            limit = 0.0 if settings.device.type == "cpu" else max(RESUMED, TIMES * usual)
            note = f"killed after {reached} records of the log; of two whole runs: {usual:.3g}"
            what = "resumed: distance of the weights from those of a whole run"
            yield Check(what, weights_apart(killed, whole), limit, note)


def weights_apart(here: Path, there: Path) -> float:
    """Return the distance of the weights of two runs as a share of the length of the second's."""
    ours, theirs = (load_file(run / "weights.safetensors") for run in (here, there))
    apart = torch.cat([(ours[name] - theirs[name]).double().flatten() for name in theirs]).norm()
    return float(apart / torch.cat([value.double().flatten() for value in theirs.values()]).norm())


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder for the block."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
