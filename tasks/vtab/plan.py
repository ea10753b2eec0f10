"""Estimate of a sweep's cost without data: hours from FLOP counts and a measured matrix-product rate, memory, disk."""

from __future__ import annotations

from dataclasses import replace

from dpn_cli.config.cost import Cost
from dpn_cli.config.launch import check_start
from dpn_cli.engine.planning import TRAINING_FRACTION, estimate_disk, estimate_memory, measure_device
from dpn_cli.model.flops import count_macs, training_flops
from dpn_cli.weights.backbone import backbone_of
from tasks.vtab.config import VtabConfig
from tasks.vtab.dry_run import sweep_cost
from tasks.vtab.tasks import choose_tasks


def estimate(config: VtabConfig, ranks: int) -> tuple[list[Cost], str]:
    """Count the FLOPs of the sweep of every network, measure the device, and return their costs and the device.

    A network without a checkpoint has the shape of its keys. Reading the images is left out. Raises `DpnError` and its
    subclasses.
    """
    tasks = choose_tasks(config.data.tasks, config.demo)
    costs = []
    for name, network in config.by_network().items():
        checkpoint = network.backbone.checkpoint or "none"
        start = check_start(network.backbone.model_copy(update={"checkpoint": checkpoint}))
        model = backbone_of(start, num_classes=max(task.classes for task in tasks))
        device, rate = measure_device(config.runtime, model)
        seconds = 1 / (TRAINING_FRACTION * rate)  # of a FLOP
        shapes = [replace(model.config, num_classes=task.classes) for task in tasks]
        checkpointing = network.backbone.grad_checkpointing
        flops = sum(training_flops(shape, grad_checkpointing=checkpointing) for shape in shapes) / len(shapes)
        disk = estimate_disk(config.optim, model.report.parameters, ema=False, best=False)
        memory = estimate_memory(model, config.optim, config.runtime, config.batch_size, ranks, ema=False)
        trial = Cost(
            name=name if config.compare else f"{model.config.arch} {name}",
            memory=memory["memory_bytes"],
            step_seconds=config.batch_size * flops * seconds / ranks,
            steps=config.schedule.steps,
            trainings=1,
            evaluation_seconds=2 * count_macs(model.config).forward * seconds / ranks,
            kept=disk["weights_bytes"],
            passing=disk["checkpoints_bytes"],
        )
        costs.append(sweep_cost(config, trial, tasks))
    return costs, str(device)
