"""`dpn finetune highres`, from a settled config to a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.run import console as terminal
from dpn_cli.run.console import Console
from dpn_cli.run.run import open_run
from dpn_cli.weights.resolve_stem import with_own_stem
from tasks.classify import common as command
from tasks.classify.classifier import WEIGHTS
from tasks.classify.config import in_steps
from tasks.classify.highres_config import HighresConfig
from tasks.classify.train import train_classifier

DEMO_NOTE = (
    "This is the demo: generated scenes. Nothing here is an ImageNet number. "
    "For your own images: dpn finetune highres --data FOLDER --checkpoint WEIGHTS"
)


def run(config: HighresConfig, launch: LaunchOptions, console: Console) -> dict[str, Any] | None:
    """Fine-tune and return the result; None on ranks that do not lead and after a dry run."""
    if config.demo:
        console.info(DEMO_NOTE)
    config = config.model_copy(update={"backbone": with_own_stem(config.backbone, console)})
    with open_run(config, config.runtime, "classifier", launch, default_folder(config), console) as run:
        if launch.dry_run:
            command.dry_run(run, command.open_data(config), [config], launch)
            return None
        result = run.folder.result
        if result is None:
            data = command.open_data(run.config)
            counted = in_steps(run.config, len(data.train.labels), console.info)
            result = train_classifier(replace(run, config=counted), data, "highres")
        console.info(f"weights: {run.folder.path / WEIGHTS}, for --checkpoint of any command")
        return result if run.world.leads else None


def default_folder(config: HighresConfig) -> Path:
    """Return runs/highres/ARCH-STEM."""
    return command.default_folder(config, "highres_demo" if config.demo else "highres")


def show(result: dict[str, Any]) -> None:
    """Print a result on stdout."""
    terminal.show(command.describe_training(result))
