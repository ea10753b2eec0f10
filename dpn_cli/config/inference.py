"""Options of every command that uses a trained run. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dpn_cli.config.option import OUTPUT, argument, flag
from dpn_cli.config.schema import IMAGE_FILES, PredictionFiles, RunImageReading, Runtime, Section, SkipBadImages

RUN = argument("A run's folder, or its weights.safetensors.")
SCORES_DIR = flag(
    "--output-dir",
    "-o",
    help="Folder for the scores, and what 'dpn report' shows of them.",
    panel=OUTPUT,
    brief="Folder for the scores.",
)


class EvaluationOptions(Section):
    """Options of every command that scores a trained run."""

    reading: RunImageReading = RunImageReading()
    runtime: Runtime = Runtime()
    output_dir: Annotated[Path | None, SCORES_DIR] = None


class ImageFileOptions(Section):
    """Options of every command that applies a trained run to image files."""

    run: Annotated[str, RUN]
    images: Annotated[list[Path], IMAGE_FILES]
    reading: RunImageReading = RunImageReading()
    skip_bad_images: SkipBadImages = False
    written: PredictionFiles = PredictionFiles()
    runtime: Runtime = Runtime()
