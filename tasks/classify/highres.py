"""`dpn finetune highres`, from a finalized config to a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.run import console as terminal
from dpn_cli.run.console import Console
from dpn_cli.run.run import open_run
from dpn_cli.weights.resolve_stem import resolve_stem
from tasks.classify.classifier import WEIGHTS
from tasks.classify.config import resolve_steps
from tasks.classify.data import open_data
from tasks.classify.dry_run import dry_run
from tasks.classify.highres_config import HighresConfig
from tasks.classify.preflight import augment_by_images
from tasks.classify.train import default_folder as task_folder
from tasks.classify.train import describe_training, train

DEMO_NOTE = (
    "This is the demo: generated scenes. Nothing here is an ImageNet number. "
    "For your own images: dpn finetune highres --data FOLDER --checkpoint WEIGHTS"
)


def run(config: HighresConfig, launch: LaunchOptions, console: Console) -> dict[str, Any] | None:
    """Fine-tune and return the result; None on ranks that do not lead and after a dry run."""
    if config.demo:
        console.info(DEMO_NOTE)
    config = config.model_copy(update={"backbone": resolve_stem(config.backbone, console)})
    with open_run(config, config.runtime, "classifier", launch, default_folder(config), console) as run:
        if launch.dry_run:
            data = open_data(config)
            dry_run(run, data, [augment_by_images(config, data, console.info)], launch)
            return None
        result = run.folder.result
        if result is None:
            data = open_data(run.config)
            augmented = augment_by_images(run.config, data, console.info)
            counted = resolve_steps(augmented, len(data.train.labels), console.info)
            result = train(replace(run, config=counted), data, "highres")
        console.info(f"weights: {run.folder.path / WEIGHTS}, for --checkpoint of any command")
        return result if run.world.leads else None


def default_folder(config: HighresConfig) -> Path:
    """Return runs/highres/ARCH-STEM."""
    return task_folder(config, "highres_demo" if config.demo else "highres")


def show(result: dict[str, Any]) -> None:
    """Print a result on stdout."""
    terminal.show(describe_training(result))
