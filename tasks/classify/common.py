"""Functions around the training of a classifier: data, folder, dry run, text of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.data.decode import ReadOptions, decoder_of
from dpn_cli.data.image_source import ImageSource
from dpn_cli.data.splits import ClassData, open_class_data
from dpn_cli.run.console import count_noun
from dpn_cli.run.run import Run, run_name
from tasks.classify.config import ConfigT, SupervisedConfig, in_steps
from tasks.classify.dry_run import dry_run_training
from tasks.classify.fewshot import check_transfer, describe_accuracies, probing_of
from tasks.classify.preflight import check_batch, check_images, check_shards


def open_data(config: SupervisedConfig) -> ClassData:
    """Open the config's training images, minival and validation images. Raises `DataError`."""
    return open_class_data(source_of(config), config.data.minival, chooses=config.select == "best")


def source_of(config: SupervisedConfig) -> ImageSource:
    """Return where the config's images are."""
    data = config.data
    return ImageSource(
        data.source or "demo",
        data.val_source,
        data.val_fraction,
        data.image_column,
        data.label_column,
        ReadOptions(decoder_of(data.decode), data.max_pixels),
    )


def default_folder(config: SupervisedConfig, task: str) -> Path:
    """Return runs/TASK/ARCH-STEM."""
    return Path("runs") / task / run_name(config.backbone)


def dry_run(run: Run[ConfigT], data: ClassData, trainings: Sequence[ConfigT], launch: LaunchOptions) -> None:
    """Check the data, measure the last of some trainings in a dry run, and print the cost of all."""
    config, world = run.config, run.world
    counted = [in_steps(each, len(data.train.labels)) for each in trainings]
    check_batch(config, world)
    check_shards(counted[-1], data, world)
    if world.leads:
        check_images(config, data, run.console)
    if options := probing_of(config):
        check_transfer(options)
    run.console.info(
        f"{len(data.train.labels)} + {len(data.minival.labels)} + {len(data.val.labels)} images, "
        f"{len(data.classes)} classes"
    )
    cost = dry_run_training(replace(run, config=counted[-1]), data)
    steps = sum(each.schedule.steps for each in counted)
    networks = min(2, len(counted))  # of a sweep's, the best one so far and the one that may be better
    if world.leads:
        launch.on_cost(replace(cost.of_steps(steps, len(counted)), kept=networks * cost.kept))


def describe_training(result: dict[str, Any]) -> str:
    """Return the result as text."""
    images, lost = result["images"], result.get("lost_records", 0)
    height, width = result["image_size"]
    if result["minival_top1"] is None:
        chosen = "the last step is scored; there was no minival to watch"
    else:
        last = result["best_step"] == result["steps"]
        which = "the last step is scored" if last else f"step {result['best_step']} was best on minival and is scored"
        chosen = f"{which}; minival: top-1 {result['minival_top1']:.2f} % ({images['minival']} images)"
    skipped = f", {result['skipped']} unreadable ones left out" if result["skipped"] else ""
    probe = result.get("fewshot")
    probed = [f"{probe['data']}: {line.strip()}" for line in describe_accuracies(probe)] if probe else []
    return (
        f"{result['arch']} stem {result['stem']} at {height}x{width}, {result['classes']} classes\n"
        f"validation: top-1 {result['top1']:.2f} %, top-5 {result['top5']:.2f} %, loss {result['loss']:.4g} "
        f"({images['val']} images{skipped})\n"
        f"{chosen}; {count_noun(result['steps'], 'step')} on {images['train']} images"
        + "".join(f"\n{line}" for line in probed)
        + (f"\nthe curve is incomplete: {lost} records of metrics.jsonl were lost" if lost else "")
    )
