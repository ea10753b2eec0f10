"""Figures 1 to 4 of arXiv 2302.01327, and the table of norms of arXiv 2112.02624. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from dpn_cli.arch import PLACEMENTS
from dpn_cli.reproduce.cells import Drawing, Experiment, Number
from dpn_cli.reproduce.tables import ABLATED, STEMS
from dpn_cli.reproduce.trainings import TOP1, Trainings

# ImageNet-1k top-1 in percent by norm, with heads of ViT's and of DTN's shapes.
NORMS: dict[str, dict[str, float]] = {
    "ln": {"S/16": 79.9, "S*/16": 80.6, "Ti*/16": 72.3, "B*/16": 81.7},
    "bn": {"S/16": 77.3, "S*/16": 77.2},
    "in": {"S/16": 77.7, "S*/16": 77.6},
    "gn": {"S/16": 78.3, "S*/16": 79.5},
    "sn": {"S/16": 80.1, "S*/16": 81.0},
    "scalenorm": {"S/16": 80.0, "S*/16": 80.6},
    "powernorm": {"S/16": 79.8, "S*/16": 80.4},
    "dtn": {"S/16": 80.6, "S*/16": 81.7, "Ti*/16": 73.2, "B*/16": 82.5},
}


def fig1(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Return the gain of every LayerNorm placement, and of Dual PatchNorm, over norms before both halves of a block."""
    networks = [("none", place) for place in PLACEMENTS if place != "pre,pre"] + [("dpn", "pre,pre")]
    numbers = []
    for stem, place in networks:
        for arch in make.some(ABLATED):
            jobs = tuple(make.imagenet(arch, stem, seed, place) for seed in seeds)
            plain = tuple(make.imagenet(arch, "none", seed) for seed in seeds)
            row = "Dual PatchNorm" if stem == "dpn" else place
            numbers.append(Number(row, arch, jobs, TOP1, minus=plain))
    return Experiment("fig1", "Placements of LayerNorm, relative to (pre, pre)", "points of top-1", numbers)


def _gradients(name: str, title: str, archs: Sequence[str], make: Trainings) -> Experiment:
    drawings = []
    for arch in make.some(archs):
        jobs = tuple(make.imagenet(arch, stem, 0) for stem in STEMS)
        drawings.append(Drawing(arch.replace("/", "-"), "report", jobs))
    return Experiment(name, title, "", drawings=drawings)


def fig2(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Norms of gradients over depth, and of the embedding over the training."""
    return _gradients("fig2", "Norms of gradients, B/16", ("B/16",), make)


def fig3(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Scales of the first norm."""
    jobs = [make.imagenet("Ti/16", "dpn", 0), *([] if make.small else [make.large("jft", 1_100_000, "L/16", "dpn")])]
    drawings = [Drawing(job.group.replace("/", "-"), "inspect", (job,)) for job in jobs]
    return Experiment("fig3", "Scales of the first norm", "", drawings=drawings)


def fig4(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Norms of gradients over depth of the other networks."""
    return _gradients("fig4", "Norms of gradients, B/32, S/32, S/16", ("B/32", "S/32", "S/16"), make)


def dtn_table(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Norms in the blocks on ImageNet-1k with DeiT's config; one training each, as it was published."""
    numbers = []
    for norm, row in NORMS.items():
        for arch in make.some(tuple(row)):
            jobs = (make.deit(arch, "none", 0, norm),)
            numbers.append(Number(norm, arch, jobs, TOP1, row[arch]))
    return Experiment("dtn-table", "Norms of the blocks (Dynamic Token Normalization)", "top-1 in %", numbers)
