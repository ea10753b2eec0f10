"""Options of a launch, and the initial weights of a training. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from dpn_cli.arch import check_image_size, parse_arch
from dpn_cli.config.cost import Cost
from dpn_cli.config.network import BackboneConfig
from dpn_cli.config.paths import find_weights, home
from dpn_cli.errors import DpnError

BackboneT = TypeVar("BackboneT", bound=BackboneConfig)
# How many processes share a GPU: a number, or as many as fit.
PerGpu = int | Literal["auto"]
# Input size of a network from scratch where nothing says one.
SCRATCH_PIXELS = 224
# Help of the options that say what happens to a run's folder.
NO_PAGE = "Skip the report page at the end."
OVERWRITE = "Delete an existing run in the output folder first."
RESUME = "Continue the run in the output folder, or start a new one."


@dataclass(frozen=True)
class LaunchOptions:
    """The folder of a run (None: one named after the task and the network), and what happens to a run that is there.

    `on_open` receives the folder. With `dry_run` nothing is written there, and `on_cost` receives what the
    trainings of each network take. Of several trainings `jobs` run at once, started by an `engine` with `resources` for
    each; `jobs_per_gpu` on a GPU, where it is given, and then None for `jobs` is as many as the GPUs have room for.
    `trial` is the number of the only trial that is run, None for all. `explicit_keys` are the config keys that the
    command gave; None where that is not known.
    """

    folder: Path | None = None
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False
    on_open: Callable[[Path], object] = lambda folder: None
    on_cost: Callable[[Cost], object] = lambda cost: None
    jobs: int | None = None
    jobs_per_gpu: PerGpu | None = None
    engine: Literal["local", "ray", "slurm"] = "local"
    resources: Sequence[tuple[str, object]] = ()
    trial: int | None = None
    explicit_keys: Sequence[str] | None = None

    @property
    def starts_processes(self) -> bool:
        """Return whether other processes do the work."""
        return (self.jobs or 1) > 1 or self.jobs_per_gpu is not None or self.engine != "local"

    @property
    def processes(self) -> str:
        """The option that says how many processes do the work."""
        alone = self.jobs is None and self.jobs_per_gpu is not None
        return f"--jobs-per-gpu {self.jobs_per_gpu}" if alone else f"--jobs {self.jobs or 1}"


def find_start(
    backbone: BackboneT,
    *,
    needs: str,
    example: str,
    otherwise: str | None = None,
    stems: Sequence[str] = (),
    pixels: int = SCRATCH_PIXELS,
) -> BackboneT:
    """Return a config's section with its checkpoint decided: the one it names, one of the weights folder, `otherwise`.

    `needs` and `example` complete the error where there is none: "VTAB measures pre-trained networks", and the name of
    public weights. `stems` are those of a comparison. `pixels` is the input size from scratch, where the section has
    none; with a checkpoint None stays, which is the checkpoint's own size.

    Raises `DpnError` without weights, and as `check_start` does.
    """
    stem_names = tuple(stems) or (backbone.stem or "dpn",)
    checkpoint = backbone.checkpoint or find_weights(backbone.arch, stem_names) or otherwise
    if checkpoint is None:
        names = " and ".join(f"{(backbone.arch or 'ARCH').replace('/', '-')}-{stem}.safetensors" for stem in stem_names)
        pattern = "; write {stem} in the name with --compare" if stems else ""
        raise DpnError(
            f"--checkpoint: {needs} and no weights were given. Ways out: --checkpoint FILE ('dpn checkpoint inspect' "
            f"says what is read{pattern}); --checkpoint timm:{example}; put {names} into {home() / 'weights'}; "
            "--checkpoint none with --arch to train from scratch; --data demo to look around"
        )
    return check_start(backbone.model_copy(update={"checkpoint": checkpoint}), pixels)


def check_start(backbone: BackboneT, pixels: int = SCRATCH_PIXELS) -> BackboneT:
    """Return a section with a checkpoint and the input size from scratch, where it has none.

    Raises `DpnError` from scratch without an architecture, and for an image size that the patch does not divide.
    """
    scratch = backbone.checkpoint == "none"
    if scratch and not backbone.arch:
        raise DpnError("--arch is needed to train from scratch; with --checkpoint it is inferred")
    size = backbone.image_size or (pixels if scratch else None)
    if backbone.arch and size:
        patch = parse_arch(backbone.arch)[1]
        check_image_size(size, (patch, patch))
    return backbone.model_copy(update={"image_size": size})
