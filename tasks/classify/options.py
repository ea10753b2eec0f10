"""The options of the commands that use a classifier. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dpn_cli.config.inference import RUN, SCORES_DIR, EvaluationOptions, ImageFileOptions
from dpn_cli.config.launch import NO_PAGE, OVERWRITE, RESUME
from dpn_cli.config.network import IMAGE_SIZE
from dpn_cli.config.option import DATA, HELP, MODEL, OUTPUT, argument, flag
from dpn_cli.config.schema import (
    VAL_DATA,
    VAL_FRACTION,
    DataLocation,
    ForwardBatchSize,
    ImageColumn,
    ImageReading,
    LabelColumn,
    Pixels,
    Positive,
    RunExif,
    Runtime,
    Section,
    Seed,
    SkipBadImages,
    split_list,
)
from dpn_cli.config.shift_options import ShiftOptions, ShownShifts
from dpn_cli.sweep.grid import COMPARE, SEED_COUNT, Networks, fill_checkpoint_name, parse_seeds, settings_of
from tasks.classify.config import Share

LABELLED = flag(
    "--data",
    help="Folder with val/CLASS or CLASS, hf:OWNER/NAME[:CONFIGURATION], wds:PATTERN, or demo.",
    panel=DATA,
    brief="Images to score; by default the run's own.",
)
OWN_SIZE = IMAGE_SIZE.replace(unset="the checkpoint's own")


class EvalOptions(EvaluationOptions):
    """Options of ``dpn eval``."""

    network: Annotated[str, argument("A run's folder, or a checkpoint with a head.")]
    source: Annotated[DataLocation | None, LABELLED.replace(unset="the run's")] = None
    split: Annotated[
        Literal["train", "val", "test", "all"] | None,
        flag(
            "--split",
            help="Part of the data.",
            panel=DATA,
            unset="val, which of a run's own data are the images that it set apart",
            brief="Part of the data: train, val, test or all.",
        ),
    ] = None
    image_column: ImageColumn = None
    label_column: LabelColumn = None
    skip_bad_images: SkipBadImages = False
    real: Annotated[
        Path | None, flag("--real", help="ImageNet-ReaL's real.json: score against it too.", panel=DATA)
    ] = None
    shift: ShiftOptions = ShiftOptions()
    image_size: Annotated[Pixels | None, OWN_SIZE] = None
    batch_size: ForwardBatchSize = 64
    output_dir: Annotated[
        Path | None,
        SCORES_DIR.replace(help="Folder for the scores, every prediction, and what 'dpn report' shows of them."),
    ] = None


class ProbeFolder(Section):
    """Folder of the draws of a few-shot probe, and the treatment of an existing run."""

    output_dir: Annotated[
        Path | None,
        flag(
            "--output-dir",
            "-o",
            help="Folder of a run that keeps every draw.",
            panel=OUTPUT,
            unset="none; with --compare runs/fewshot/NETWORKS",
            brief="Folder for what is written.",
        ),
    ] = None
    resume: Annotated[bool, flag("--resume", help=RESUME, panel=OUTPUT)] = False
    overwrite: Annotated[bool, flag("--overwrite", help=OVERWRITE, panel=OUTPUT)] = False
    no_report: Annotated[bool, flag("--no-report", help=NO_PAGE, panel=OUTPUT)] = False


class ProbeImageReading(ImageReading):
    """Options for reading the image files of a probe."""

    exif: RunExif = None


class ProbeOptions(Section):
    """Options of ``dpn eval fewshot``."""

    checkpoint: Annotated[
        str | None,
        argument(
            "Weights of any format, a run's weights.safetensors, or none; {stem} in it is the stem of each network of "
            "--compare."
        ),
    ] = None
    source: Annotated[DataLocation, LABELLED]
    compare: Annotated[
        Networks,
        COMPARE.replace(
            help="Probe several networks on the same draws and print the paired difference: stems, e.g. none,dpn, with "
            "{stem} in CHECKPOINT, or 'checkpoint=A.npz;checkpoint=B.npz'."
        ),
    ] = ()
    val_source: Annotated[DataLocation | None, VAL_DATA] = None
    val_fraction: Annotated[Share | None, VAL_FRACTION] = None
    image_column: ImageColumn = None
    label_column: LabelColumn = None
    reading: ProbeImageReading = ProbeImageReading()
    skip_bad_images: SkipBadImages = False
    shots: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...],
        BeforeValidator(split_list),
        AfterValidator(lambda shots: tuple(sorted(shots))),  # the order in which results list them
        Field(min_length=1, description="numbers from 1 to 1000000, each once, with commas, e.g. 1,5,10"),
        flag("--shots", help="Images per class, comma separated.", panel=DATA, brief="Images per class."),
    ] = (1, 5, 10, 25)
    seeds: Annotated[
        tuple[Seed, ...],
        BeforeValidator(parse_seeds),
        Field(min_length=1, description=SEED_COUNT),
        flag("--seeds", help="Number of draws of the images, or a list of their seeds: 3 is 0,1,2.", panel=DATA),
    ] = (0, 1, 2)
    pool: Annotated[
        Positive,
        flag("--pool", help="Training images to draw from, by the order of their names' hashes.", panel=DATA),
    ] = 65_000
    image_size: Annotated[Pixels | None, OWN_SIZE] = None
    batch_size: ForwardBatchSize = 64
    runtime: Runtime = Runtime()
    run: ProbeFolder = ProbeFolder()

    @model_validator(mode="after")
    def _with_weights(self) -> ProbeOptions:
        """Refuse networks without weights, and with those of another one."""
        if self.compare:
            examples = (
                "two stems or more, e.g. none,dpn with {stem} in CHECKPOINT, or 'checkpoint=A.npz;checkpoint=B.npz'"
            )
            if len(self.compare) == 1:
                raise ValueError(f"--compare: needs {examples}")
            weights = self.checkpoints
            if duplicate := next((name for name in weights if list(weights.values()).count(weights[name]) > 1), None):
                raise ValueError(
                    f"--compare: {duplicate!r} and another network are both {weights[duplicate]}; name {examples}"
                )
        elif self.checkpoint is None:
            raise ValueError("CHECKPOINT: missing; name weights of any format, a run, or none")
        elif "{stem}" in self.checkpoint:
            raise ValueError(f"{self.checkpoint}: {{stem}} is the stem of each network of --compare, and there is none")
        elif self.run.output_dir is None and (self.run.resume or self.run.overwrite):
            raise ValueError("--resume and --overwrite: nothing is kept without -o or --compare")
        return self

    @property
    def checkpoints(self) -> dict[str, str]:
        """The weights of each network of a comparison, by its name.

        Raises `ValueError` for a network without weights, and for a key that is not in the checkpoint's name.
        """
        checkpoints = {}
        for name in self.compare:
            settings = settings_of(name)
            source = str(settings.pop("checkpoint", self.checkpoint or ""))
            if not source:
                raise ValueError(
                    f"--compare: {name!r} has no weights; write checkpoint=FILE, or CHECKPOINT with {{stem}} in it"
                )
            if unused_key := next((key for key in settings if key != "stem" and f"{{{key}}}" not in source), None):
                raise ValueError(
                    f"--compare: {name!r}: {unused_key} is no key; use checkpoint, or write {{{unused_key}}} in "
                    "CHECKPOINT"
                )
            checkpoints[name] = fill_checkpoint_name(source, settings)
        return checkpoints


class PredictOptions(ImageFileOptions):
    """Options of ``dpn predict``."""

    top: Annotated[Positive, flag("--top", "-k", help="Classes per image.", panel=OUTPUT, brief=HELP)] = 3
    shift: ShownShifts = ShownShifts()
    batch_size: ForwardBatchSize = 64

    @model_validator(mode="after")
    def _shifts_have_a_page(self) -> PredictOptions:
        if self.shift.names and not self.written.html:
            raise ValueError("--shifts: shows images under shifts on a page; name its file with --html")
        return self


class ExportOptions(Section):
    """Options of ``dpn export``."""

    run: Annotated[str, RUN]
    to: Annotated[
        Literal["safetensors", "pt2", "onnx"],
        flag("--to", help="Format; pt2 is torch.export's.", panel=MODEL),
    ] = "safetensors"
    output_dir: Annotated[
        Path,
        flag(
            "--output-dir",
            "-o",
            help="Folder for the network and its card.",
            panel=OUTPUT,
            brief="Folder for what is written.",
        ),
    ] = Path("export")
