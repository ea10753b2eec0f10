"""A run from start to end: its folder, ranks and signals, and its status when it ends early."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from torch import nn

from dpn_cli.arch import parse_arch
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.network import BackboneConfig
from dpn_cli.config.provenance import differences
from dpn_cli.config.schema import (
    Config,
    Runtime,
    Section,
)
from dpn_cli.errors import RESUME, DpnError, StoppedError
from dpn_cli.run import signals
from dpn_cli.run.artifact_kinds import Kind
from dpn_cli.run.callbacks import Outputs
from dpn_cli.run.checkpoints import Checkpoints
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.distributed import World, detect_lost_rank, from_leader, join
from dpn_cli.run.elastic import TorchrunLaunch, current_torchrun
from dpn_cli.run.environment import read_config
from dpn_cli.run.files import claim, make_folder
from dpn_cli.run.precision import announce_precision, choose_precision
from dpn_cli.run.run_dir import MetricsLog, RunFolder
from dpn_cli.run.trackers import Track, build_tracker

# Seconds until a file system forgets the claim of a machine that is lost; NFS servers take 90.
LOST_AFTER = 120.0

ConfigT = TypeVar("ConfigT", bound=Section)
SectionT = TypeVar("SectionT", bound=Section)
BackboneT = TypeVar("BackboneT", bound=BackboneConfig)


def run_name(backbone: BackboneConfig, stems: str | None = None) -> str:
    """Return ARCH-STEM, the name of a run's folder. Without an arch, the run is named after the checkpoint file.

    Without both it is the stem alone.
    """
    stems = stems or backbone.stem
    if not backbone.arch and not backbone.checkpoint:
        return str(stems)
    arch = (backbone.arch or Path(backbone.checkpoint or "").stem).replace("/", "-")
    return f"{arch.removesuffix(f'-{stems}')}-{stems}"


@dataclass(frozen=True)
class Run(Generic[ConfigT]):
    """A running run: its config, its folder, and the ranks it runs on.

    `differs` lists differences from the paper; None when there is nothing to compare with. `one_trial` says that the
    process runs one trial of several, and that others may run the rest at the same time.
    """

    config: ConfigT
    folder: RunFolder
    world: World
    console: Console
    differs: list[str] | None = None
    one_trial: bool = False

    def claim(self, path: Path) -> AbstractContextManager[None]:
        """Claim the folder of a part of the work, on rank 0. Raises `DpnError` when another process has claimed it."""
        return claim(path) if self.world.leads else nullcontext()

    def claim_unless(self, fact: str) -> AbstractContextManager[None]:
        """Claim the run's folder for one trial of several, to write a fact of run.json that is not yet there."""
        first = self.one_trial and not self.folder.facts.get(fact)
        return claim(self.folder.path, on_wait=signals.check_here) if first else nullcontext()

    def record_precision(self, runtime: Runtime, *networks: nn.Module) -> None:
        """Save in run.json the precision of the networks that take part in a training; the widest one decides.

        Warns when a resumed run continues in another one.
        """
        precision, saved = announce_precision(runtime, self.world, self.console, *networks), self.folder.precision
        if saved not in (None, precision):
            self.console.warn(
                f"{self.folder.path}: started in {saved} and continues in {precision}; the result is of neither alone"
            )
        if self.world.leads and saved != precision:
            self.folder.update(precision=precision)

    def tracker(self, report_to: str) -> Track:
        """Return a function that sends records to the tracker of that name, from the leading rank only."""
        return build_tracker(report_to if self.world.leads else "none", self.folder.path, self.console)

    @contextmanager
    def outputs(self, label: str, track: Track, path: Path | None = None) -> Iterator[Outputs]:
        """Yield the outputs of a training, in `path` or the run's folder, and show its progress.

        `label` names the training on the screen and to `track`.
        """
        path, console = path or self.folder.path, self.console
        log = MetricsLog(path / "metrics.jsonl", lambda record: track(label, record))
        prefix = f"{label}: " if path != self.folder.path else ""
        with console.progress(label) as show:
            yield Outputs(
                Checkpoints(path / "checkpoints"), log, show, console.warn, lambda text: console.info(prefix + text)
            )


@contextmanager
def open_run(
    config: ConfigT, runtime: Runtime, kind: Kind, launch: LaunchOptions, default: Path, console: Console
) -> Iterator[Run[ConfigT]]:
    """Join the ranks, listen to signals, and open the run's folder: that of `launch`, or `default`.

    The config is that with which the run in the folder started; its differences from the paper are printed.
    On exit the status of the run is written to the folder, unless this process runs one trial of it. A dry run does not
    create the folder. Raises `DpnError` and its subclasses.
    """
    path = launch.folder or default
    _check_options(launch)
    ending = signals.NOTHING_KEPT if launch.dry_run else RESUME
    with signals.listen(ending), join(runtime.device, shard=runtime.shard) as world, ExitStack() as claims:
        if isinstance(runtime.micro_batch_size, int):
            world = replace(world, grain=runtime.micro_batch_size)
        precision = choose_precision(runtime, world.device.type, _named_width(config))
        if launch.dry_run:
            launch.on_open(path)
            yield Run(config, RunFolder(path), world, console, _print_differences(config, precision, console))
            return
        one_trial = launch.trial is not None
        if world.size > 1 and (one_trial or launch.starts_processes):
            explicit_option = f"--trial {launch.trial}" if one_trial else launch.processes
            raise DpnError(f"{explicit_option}: does not go with torchrun; leave one of them out")
        torchrun = current_torchrun()
        open_options = _folder_options(launch, path, torchrun, world, console)
        saved = from_leader(_saved_network(path) if open_options["resume"] or one_trial else None)
        config = with_weights_of(config, saved, launch.explicit_keys, console)
        with ExitStack() as opening:  # one trial of several claims the folder only while it starts the run
            claim_stack = opening if one_trial else claims
            folder = open_folder(
                path, config, kind, world, console, **open_options, one_trial=one_trial, claims=claim_stack
            )
        launch.on_open(path)
        if folder.result is None:
            console.info(f"run folder {path}")
            if world.leads:
                _record_command(folder, launch, torchrun, console)
        with _status(folder, reports=world.leads and not one_trial), detect_lost_rank():
            config = with_saved_decoder(config, from_leader(folder.facts))
            differs = _print_differences(config, precision, console)
            yield Run(config, folder, world, console, differs, one_trial)


def _check_options(launch: LaunchOptions) -> None:
    """Raise `DpnError` for contradicting options about the folder of a run."""
    if launch.resume and launch.overwrite:
        raise DpnError("--resume --overwrite: one continues the existing run, the other deletes it; pass one of them")
    if launch.trial is not None and launch.overwrite:
        raise DpnError(f"--overwrite --trial {launch.trial}: would delete the other trials; delete the folder yourself")


def _folder_options(
    launch: LaunchOptions, path: Path, torchrun: TorchrunLaunch | None, world: World, console: Console
) -> dict[str, Any]:
    """Return the options of `open_folder`: a run that this torchrun started continues without --resume.

    It does not start again with --overwrite, either.
    """
    open_options = {"resume": launch.resume, "overwrite": launch.overwrite}
    folder = RunFolder(path)
    run = folder.facts
    if torchrun is None or not run or folder.is_untouched:
        return open_options
    if torchrun.has_worked_on(run):
        if not launch.resume:
            ranks = count_noun(world.size, "rank")
            console.info(f"{path}: torchrun restarted the ranks; the run continues with {ranks}")
        return open_options | {"resume": True, "overwrite": False, "patience": LOST_AFTER}
    if torchrun.has_id_of(run) and not (launch.resume or launch.overwrite):
        console.info(f"{path}: the run continues, because it started with torchrun's --rdzv-id {torchrun.id}")
        return open_options | {"resume": True}
    return open_options


def _record_command(
    folder: RunFolder, launch: LaunchOptions, torchrun: TorchrunLaunch | None, console: Console
) -> None:
    """Save the explicit config keys of a run, and the torchrun that runs it, in run.json."""
    if launch.explicit_keys is not None and "given" not in folder.facts:
        folder.update(given=list(launch.explicit_keys))
    if torchrun is not None:
        folder.update(**torchrun.facts())
        if warning := torchrun.warning():
            console.warn(warning)


@contextmanager
def _status(folder: RunFolder, *, reports: bool) -> Iterator[None]:
    """Write into a folder why the block ended early, if this process `reports`."""
    try:
        yield
    except StoppedError:
        if reports:
            folder.update(status="stopped")
        raise
    except DpnError as error:
        if reports:
            folder.update(status="failed", error=str(error))
        raise


def _named_width(config: Section) -> int:
    """Return the width of the config's architecture; 0 where it names none, for which the paper has no values."""
    backbone = getattr(config, "backbone", None)
    return parse_arch(backbone.arch)[0].width if isinstance(backbone, BackboneConfig) and backbone.arch else 0


def _print_differences(config: Section, precision: str, console: Console) -> list[str] | None:
    """Return a run's differences from the paper, and print them."""
    differs = differences(config, precision) if isinstance(config, Config) else None
    if differs:
        console.info(f"differs from the paper: {'; '.join(differs)}")
    return differs


def _saved_network(path: Path) -> object:
    """Return the network of the run in a folder; None without a run that has produced anything."""
    folder = RunFolder(path)
    config = None if path.is_dir() and folder.is_untouched else read_config(path / "config.yaml")
    return (config or {}).get("backbone")


def with_weights_of(config: SectionT, saved: object, explicit_keys: Sequence[str] | None, console: Console) -> SectionT:
    """Return the config with the `saved` network of a run's start, unless the command names weights.

    Weights that dpn finds by itself may have appeared or disappeared since. `explicit_keys` are the keys of the
    command; where they are not known the config stays.
    """
    backbone = getattr(config, "backbone", None)
    if explicit_keys is None or backbone is None:
        return config
    try:
        saved_backbone = type(backbone).model_validate(saved)
    except ValidationError:
        return config  # nothing is saved, or the differences are reported key by key
    changed = {key for key, value in saved_backbone if getattr(backbone, key) != value}
    if "checkpoint" not in changed or any(f"backbone.{key}" in explicit_keys for key in changed):
        return config
    console.info(
        f"continues with --checkpoint {saved_backbone.checkpoint}, as it started, and not with {backbone.checkpoint}"
    )
    return config.model_copy(update={"backbone": saved_backbone})


def with_saved_decoder(config: SectionT, facts: Mapping[str, Any]) -> SectionT:
    """Return the config with the decoder of the run's start, by the `facts` of its run.json.

    In runs that started before simplejpeg was among the versions, ``exact`` was Pillow's decoder.
    """
    data, versions = getattr(config, "data", None), facts.get("versions")
    if versions is None or "simplejpeg" in versions or getattr(data, "decode", None) != "exact":
        return config
    assert isinstance(data, Section)
    return config.model_copy(update={"data": data.model_copy(update={"decode": "pillow"})})


def open_folder(
    path: Path,
    config: Section,
    kind: Kind,
    world: World,
    console: Console,
    *,
    resume: bool,
    overwrite: bool,
    one_trial: bool = False,
    claims: ExitStack | None = None,
    patience: float | None = None,
) -> RunFolder:
    """Open a run folder on rank 0, with the outcome on all ranks, and claim it until `claims` closes.

    `patience` is the number of seconds to wait for another process to leave the folder, by default 10.

    With `one_trial` an existing run is not claimed: other processes may run its other trials. Raises the errors of
    `RunFolder.open`, and `DpnError` for a folder that another process has claimed.
    """
    problem: DpnError | None = None
    if world.leads:
        try:
            if claims is not None:
                if not (one_trial and RunFolder(path).facts):
                    claims.enter_context(claim(path, patience=patience))
                make_folder(path)
            plain = config.model_dump(mode="json")
            complete = partial(_complete_config, config, RunFolder(path).facts)
            open_options = {"resume": resume, "overwrite": overwrite, "one_trial": one_trial}
            RunFolder.open(path, plain, kind, **open_options, complete=complete, warn=console.warn)
        except DpnError as error:
            problem = error
    problem = from_leader(problem)
    if problem is not None:
        raise problem
    return RunFolder(path)


def _complete_config(config: Section, facts: Mapping[str, Any], saved: Any) -> Any:
    """Return a saved config with today's keys: missing ones at their defaults, ``exact`` as the decoder it was."""
    try:
        complete_config = type(config).model_validate(saved)
    except ValidationError:
        return saved  # the differences are listed key by key
    is_unchanged = with_saved_decoder(config, facts) is config
    return (with_saved_decoder(complete_config, facts) if is_unchanged else complete_config).model_dump(mode="json")
