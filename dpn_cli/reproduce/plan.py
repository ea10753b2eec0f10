"""Plan of the experiments: their data and trainings, and the cost of the unfinished ones.

The cost is the floating-point operations of the configs, in hours at a GPU's rate or at one measured here. Evaluations,
decoding and the loader are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console as RichConsole

from dpn_cli.arch import SIZES, Size
from dpn_cli.model.config import ViTConfig
from dpn_cli.model.flops import count_macs, training_flops
from dpn_cli.report.reading import hours, read_run
from dpn_cli.reproduce.experiment import Experiment, Locations, PaperTrial, chain
from dpn_cli.reproduce.run import layers
from dpn_cli.reproduce.trainings import DATA_SETS, Trainings
from dpn_cli.run.console import cell, print_columns, width_of, wrap_name
from dpn_cli.weights.backbone import config_from_scratch
from tasks.classify.config import resolve_steps
from tasks.classify.pretrain_config import list_trials
from tasks.vtab.tasks import choose_tasks

Json = dict[str, Any]
# Characters in a line of the data's names: those of the longest.
LONG = max(map(len, DATA_SETS))
# An H100 SXM's dense bfloat16 rate, and the share of it that a well-fed training of a ViT reaches.
H100, SHARE = 989.4e12, 0.3
# Images that are trained on: train[:99%] of ImageNet-1k, TFDS' sun397 split, and the demo's scenes.
IMAGES = {"imagenet": 1_268_355, "sun397": 76_128, "scenes": 216}
DEMO_IMAGES = 9_900
ADE20K_CLASSES = 150


def describe_experiments(experiments: Sequence[Experiment], locations: Locations) -> list[Json]:
    """Describe each experiment: trainings, data, weights, and the FLOPs and hours that are left."""
    trials = {trial.name: trial for experiment in experiments for trial in experiment.trials(locations.weights)}
    rate = read_measured_cost(list(trials.values()), locations)
    return [_row(experiment, locations, rate) for experiment in experiments]


def _row(experiment: Experiment, locations: Locations, rate: float | None) -> Json:
    trials = experiment.trials(locations.weights)
    unfinished_trials = [trial for trial in trials if not locations.is_finished(trial)]
    names = dict.fromkeys(name for trial in trials for _, name in trial.data if name in DATA_SETS)
    available = [group for group in experiment.networks() if group in locations.weights]
    operations = flops(unfinished_trials, locations)
    return {
        "name": experiment.name,
        "title": experiment.title,
        "trainings": len(trials),
        "left": len(unfinished_trials),
        "data": {name: locations.data.get(name) for name in names},
        "weights": {group: locations.weights[group] for group in available},
        "flops_left": operations,
        "h100_hours_left": gpu_hours(operations),
        "flops_per_second_here": rate,
        "hours_left_here": operations / rate / 3600 if rate else None,
    }


def print_list(rows: Sequence[Json], locations: Locations, make: Trainings) -> None:
    """Print the list as a table on stdout, and the search paths of missing data below it."""
    rate = rows[0]["flops_per_second_here"]
    columns = {
        "": [row["name"] for row in rows],
        "shows": [row["title"] for row in rows],
        "data": [_data(row) for row in rows],
        "left": [f"{row['left']} of {row['trainings']}" for row in rows],
        "H100-h": [_hours(row["h100_hours_left"]) for row in rows],
    }
    if rate:
        columns["h here"] = [_hours(row["hours_left_here"]) for row in rows]
    console = RichConsole(highlight=False)
    room = console.width - width_of({**columns, "shows": [""]}) + len("shows")
    columns["shows"] = [wrap_name(text, " ", room) for text in columns["shows"]]
    print_columns(columns, right=("left", "H100-h", "h here"))
    missing = {name for row in rows for name, location in row["data"].items() if not location}
    for name in DATA_SETS:
        if name in missing:
            console.print(cell(f"{name}: {DATA_SETS[name]}; looked for in $DPN_DATA_DIR/{name} and ./{name}"))
    if missing:
        console.print("Other locations: --data NAME=PLACE; networks that are here: --weights GROUP=FILE.")
    console.print(
        f"H100-h: hours of an H100, by the FLOPs that are left, at {SHARE:.0%} of {H100 / 1e12:.0f} TFLOP/s. "
        "Evaluation and loading are not counted; trainings that tables share are counted in each."
    )
    if rate:
        console.print(
            cell(f"h here: hours at {rate / 1e12:.3g} TFLOP/s, as measured in the trainings in {locations.out}.")
        )
    if make.small:
        console.print("All of this is at the demo's size.")


def _data(row: Json) -> str:
    """Return the data sets of an experiment, one a line, or two where the name is long."""
    names = (name if location else f"{name} (missing)" for name, location in row["data"].items())
    return "\n".join(wrap_name(name, " ", LONG) for name in names) or "the demo's"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 0.1 else "<0.1"


def flops(trials: Iterable[PaperTrial], locations: Locations) -> int:
    """Return the FLOPs of trainings, forward and backward."""
    trials = list(trials)
    by_group = {trial.group: trial for trial in trials}  # the seeds of a group cost the same
    costs = {group: _flops(trial, locations) for group, trial in by_group.items()}
    return sum(costs[trial.group] for trial in trials)


def gpu_hours(operations: int) -> float:
    """Return the hours of one H100 at `SHARE` of its rate."""
    return operations / (H100 * SHARE) / 3600


def read_measured_cost(trials: Sequence[PaperTrial], locations: Locations) -> float | None:
    """Return the FLOPs per second of the finished trainings; None without one."""
    operations, seconds = 0, 0.0
    for trial in trials:
        if locations.is_finished(trial) and (duration := hours(read_run(locations.out / trial.name))):
            operations, seconds = operations + _flops(trial, locations), seconds + 3600 * duration
    return operations / seconds if seconds else None


def _flops(trial: PaperTrial, locations: Locations) -> int:
    default_locations = Locations(
        locations.out, {}, {}, locations.settings
    )  # the price does not depend on where the data are
    config, start = layers(trial.line(default_locations)), layers(chain(trial)[0].line(default_locations))
    first, pixels = start.backbone, config.backbone.image_size or start.backbone.image_size
    vit_config = config_from_scratch(
        first.arch, first.stem, first.norm, first.placement, first.norm_options, pixels, first.pool
    )
    if trial.command == "lit train":
        return _lit(config, vit_config)
    image_draws = int(config.schedule.steps * config.batch_size)
    if trial.command == "finetune vtab":
        trainings = len(choose_tasks(config.data.tasks, config.demo)) * len(config.lrs) * len(config.seeds)
        return trainings * image_draws * training_flops(vit_config)
    if trial.command == "segment ade20k":
        patches = vit_config.grid[0] * vit_config.grid[1]
        return image_draws * (training_flops(vit_config) + 3 * 2 * patches * vit_config.size.width * ADE20K_CLASSES)
    images = IMAGES.get(next((name for _, name in trial.data), ""), DEMO_IMAGES)
    runs = list_trials(config) if trial.command == "pretrain" else [config]
    steps = sum(resolve_steps(run, images).schedule.steps for run in runs)
    passes = 4 / 3 if trial.command == "distill" else 1  # the teacher's forward pass
    return int(steps * config.batch_size * passes) * training_flops(vit_config)


def _lit(config: Any, vit_config: ViTConfig) -> int:
    """Count the text tower forward and backward for every pair, and the image tower forward for as many images.

    Where data have fewer images than the training has pairs, an image is encoded once, and the price is lower.
    """
    size = vit_config.size if config.text.size is None else SIZES[config.text.size]
    pairs = int(config.schedule.steps * config.batch_size)
    return pairs * (3 * 2 * _text_macs(size, config.text.context) + 2 * count_macs(vit_config).forward)


def _text_macs(size: Size, tokens: int) -> int:
    linear = tokens * (4 * size.width**2 + 2 * size.width * size.mlp)
    return size.depth * (linear + 2 * tokens**2 * size.width)
