"""From a resolved config to a result: output folder, ranks, signals, the dry run, and the text of a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.data.turned_images import describe_turned_sample
from dpn_cli.run import console as terminal
from dpn_cli.run.console import Console, count_noun
from dpn_cli.run.run import Run, open_run, run_name
from dpn_cli.weights.resolve_stem import resolve_stem
from tasks.segment.artifact import WEIGHTS
from tasks.segment.config import SegmentConfig, resolve_steps
from tasks.segment.dry_run import dry_run_training
from tasks.segment.evaluate import describe_scores
from tasks.segment.preflight import check_masks
from tasks.segment.train import DEMO_NOTE, describe_length, open_data, train


def run(config: SegmentConfig, launch: LaunchOptions, console: Console) -> dict[str, Any] | None:
    """Train and return the result; None on ranks that do not lead and after a dry run."""
    if config.demo:
        console.info(DEMO_NOTE)
    config = config.model_copy(update={"backbone": resolve_stem(config.backbone, console)})
    with open_run(config, config.runtime, "segmenter", launch, default_folder(config), console) as run:
        if launch.dry_run:
            _dry_run(run, launch)
            return None
        result = run.folder.result or train(run)
        console.info(f"weights: {run.folder.path / WEIGHTS}, for 'dpn segment eval' and 'predict'")
        return result if run.world.leads else None


def default_folder(config: SegmentConfig) -> Path:
    """Return runs/segment_DATASET/ARCH-STEM, with the fraction where it is a part."""
    task = "segment_demo" if config.demo else f"segment_{config.data.dataset}"
    share = f"-{config.data.fraction:g}" if config.data.fraction < 1 else ""
    return Path("runs") / task / f"{run_name(config.backbone)}{share}"


def show(result: dict[str, Any]) -> None:
    """Print a result on stdout."""
    terminal.show(describe_training(result))


def _dry_run(run: Run[SegmentConfig], launch: LaunchOptions) -> None:
    """Check a sample of the masks, measure the training in a dry run, and print its cost."""
    data = open_data(run.config)
    config = resolve_steps(run.config, len(data.train))
    run.console.info(describe_length(config, data))
    if run.world.leads:
        for split in (data.train, data.val):
            check_masks(split, data.rule)
            if message := describe_turned_sample(split, len(split), split.reading.exif):
                run.console.info(message)
    cost = dry_run_training(replace(run, config=config), data)
    if run.world.leads:
        launch.on_cost(cost)


def describe_training(result: dict[str, Any]) -> str:
    """Return the result of a training as text."""
    share = f", fraction {result['fraction']:g}" if result["fraction"] < 1 else ""
    return (
        f"{result['arch']} stem {result['stem']} on {result['dataset']}{share}, crops of {result['crop'][0]}\n"
        f"{describe_scores(result)}\n"
        f"{count_noun(result['steps'], 'step')} on {result['train_images']} images ({result['passes']:g} passes)"
    )
