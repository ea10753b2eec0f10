"""Optional trackers, TensorBoard and Weights & Biases. metrics.jsonl stays the source of truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpn_cli.run.console import Console

Track = Callable[[str, dict[str, Any]], None]


def build_tracker(name: str, path: Path, console: Console) -> Track:
    """Return ``track(label, record)``. An error in a tracker is a warning, and ends the tracking but not the run."""
    try:
        write = {"none": _none, "tensorboard": _tensorboard, "wandb": _wandb}[name](path)
    except Exception as error:  # trackers raise anything, and nothing of it may stop a run
        console.warn(f"--report-to {name}: not available ({error}); pip install 'dpn-cli[{name}]'. The run continues")
        return lambda label, record: None
    is_alive = True

    def track(label: str, record: dict[str, Any]) -> None:
        nonlocal is_alive
        try:
            if is_alive:
                write(label, record)
        except Exception as error:
            is_alive = False
            console.warn(f"--report-to {name}: stopped working ({error}); the run continues, see metrics.jsonl")

    return track


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}


def _none(path: Path) -> Track:
    return lambda label, record: None


def _tensorboard(path: Path) -> Track:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(path / "tensorboard"))

    def write(label: str, record: dict[str, Any]) -> None:
        for key, value in _numbers(record).items():
            writer.add_scalar(f"{label}/{key}", value, record["step"])
        writer.flush()

    return write


def _wandb(path: Path) -> Track:
    import wandb

    run = wandb.init(project="dpn", dir=str(path), name=path.name)
    labels: set[str] = set()

    def write(label: str, record: dict[str, Any]) -> None:
        if label not in labels:
            # Each training of a sweep counts its own steps, and wandb drops records whose global step goes back.
            run.define_metric(f"{label}/*", step_metric=f"{label}/step")
            labels.add(label)
        values = {"step": record["step"], **_numbers(record)}
        run.log({f"{label}/{key}": value for key, value in values.items()})

    return write
