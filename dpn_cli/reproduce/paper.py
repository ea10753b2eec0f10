"""Numbers of arXiv 2302.01327 (tables 1 to 7, figures 1 to 4) and of arXiv 2112.02624, with the trials behind each.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from dpn_cli.arch import PLACEMENTS
from dpn_cli.reproduce.experiment import Drawing, Experiment, Number, PaperTrial
from dpn_cli.reproduce.shifted import shifts
from dpn_cli.reproduce.trainings import MIOU, PROBE, STAGES, TOP1, ZEROSHOT, Trainings
from tasks.vtab.tasks import PAPER_COLUMNS

STEMS = ("none", "dpn")
# Accuracies of the plain stem and of Dual PatchNorm in percent, with standard errors over three trainings.
Pair = tuple[tuple[float, float], tuple[float, float]]
IMAGENET: dict[str, Pair] = {
    "S/32": ((72.1, 0.07), (74.0, 0.09)),
    "Ti/16": ((72.5, 0.07), (73.9, 0.09)),
    "B/32": ((74.8, 0.06), (76.2, 0.07)),
    "S/16": ((78.6, 0.32), (79.7, 0.2)),
    "B/16": ((80.4, 0.06), (81.1, 0.09)),
}
S16PLUS: Pair = ((79.7, 0.09), (80.2, 0.03))
DEIT: dict[str, Pair] = {"S/16": ((80.1, 0.03), (80.4, 0.06)), "B/16": ((81.8, 0.03), (82.0, 0.05))}
HIGHRES: dict[str, Pair] = {"B/32": ((79.0, 0.0), (80.0, 0.03)), "B/16": ((82.2, 0.03), (82.8, 0.0))}
IMAGENET21K: dict[int, dict[str, Pair]] = {
    93_000: {
        "S/32": ((54.1, 0.03), (56.7, 0.03)),
        "Ti/16": ((52.2, 0.07), (53.6, 0.07)),
        "B/32": ((60.9, 0.03), (63.7, 0.03)),
        "S/16": ((64.3, 0.15), (65.0, 0.06)),
        "B/16": ((70.8, 0.09), (72.0, 0.03)),
    },
    930_000: {
        "S/32": ((63.8, 0.0), (65.1, 0.12)),
        "Ti/16": ((61.0, 0.03), (61.2, 0.03)),
        "B/32": ((72.8, 0.03), (73.1, 0.07)),
        "S/16": ((72.5, 0.1), (72.5, 0.1)),
        "B/16": ((78.0, 0.06), (78.4, 0.03)),
    },
}
JFT: dict[int, dict[str, Pair]] = {
    220_000: {
        "B/32": ((63.8, 0.03), (65.2, 0.03)),
        "B/16": ((72.1, 0.09), (72.4, 0.07)),
        "L/16": ((77.3, 0.0), (77.9, 0.06)),
    },
    1_100_000: {
        "B/32": ((70.7, 0.1), (71.1, 0.09)),
        "B/16": ((76.9, 0.03), (76.6, 0.03)),
        "L/16": ((80.9, 0.03), (81.4, 0.06)),
    },
}
# By architecture, steps on JFT and pixels.
FINE_TUNED: dict[str, dict[tuple[int, int], Pair]] = {
    "B/32": {
        (220_000, 224): ((77.6, 0.06), (78.3, 0.0)),
        (220_000, 384): ((81.3, 0.09), (81.6, 0.0)),
        (1_100_000, 224): ((80.8, 0.1), (81.3, 0.0)),
        (1_100_000, 384): ((83.8, 0.03), (84.1, 0.0)),
    },
    "L/16": {
        (220_000, 224): ((84.9, 0.06), (85.3, 0.03)),
        (220_000, 384): ((86.7, 0.03), (87.0, 0.0)),
        (1_100_000, 224): ((86.7, 0.03), (87.1, 0.0)),
        (1_100_000, 384): ((88.2, 0.0), (88.3, 0.06)),
    },
}
LIT: dict[str, dict[int, Pair]] = {
    "B/32": {220_000: ((61.9, 0.12), (63.0, 0.09)), 1_100_000: ((67.4, 0.07), (68.0, 0.09))},
    "L/16": {220_000: ((75.0, 0.11), (75.4, 0.0)), 1_100_000: ((78.7, 0.05), (78.7, 0.1))},
}
ADE20K: dict[str, Pair] = {
    "1/16": ((27.3, 0.09), (28.0, 0.21)),
    "1/8": ((32.6, 0.09), (33.7, 0.11)),
    "1/4": ((36.9, 0.13), (38.0, 0.11)),
    "1/2": ((40.8, 0.1), (41.9, 0.09)),
    "1": ((45.6, 0.08), (46.1, 0.11)),
}
# Points of ImageNet-1k accuracy relative to Dual PatchNorm, in the order of ABLATED.
ABLATED = ("B/16", "S/16", "B/32", "S/32", "Ti/16")
ABLATIONS: dict[str, tuple[float, ...]] = {
    "pre": (-0.1, 0.0, -2.6, -0.2, -0.3),
    "post": (0.0, -0.2, -0.5, -0.7, -1.1),
    "post_posemb": (0.0, -0.1, -0.4, -0.9, -1.1),
    "affine_only": (-0.8, -0.9, -1.2, -1.6, -1.6),
    "rms": (0.0, -0.1, -0.4, -0.5, -1.7),
    "dpn_no_affine": (-0.5, 0.0, -0.2, -0.1, -0.1),
}
SUN397: dict[str, tuple[tuple[float, float], ...]] = {
    "B/32": ((41.4, 47.5), (48.3, 50.7), (52.5, 56.0)),
    "B/16": ((45.6, 51.8), (58.7, 63.0), (60.8, 66.3)),
}
SEARCH = ("tuned baseline", "+ augmentation", "+ longer training")
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

MakeTrial = Callable[[str, int], PaperTrial]


def _pair(
    row: str, make: MakeTrial, paper: Pair, seeds: Sequence[int], score: tuple[str | int, ...] = TOP1
) -> list[Number]:
    """Return the numbers of the plain stem and of Dual PatchNorm; `make` takes a stem and a seed."""
    return [
        Number(row, stem, tuple(make(stem, seed) for seed in seeds), score, value, stderr)
        for stem, (value, stderr) in zip(STEMS, paper, strict=True)
    ]


def _steps(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1_000_000 else f"{steps // 1000}k"


def _chain_makers(start: MakeTrial, next_one: Callable[[PaperTrial, int], PaperTrial]) -> MakeTrial:
    """Return a function that creates a training from the network of the one that `start` creates."""

    def make(stem: str, seed: int) -> PaperTrial:
        return next_one(start(stem, seed), seed)

    return make


def _first_seed(make: MakeTrial, stem: str, seed: int) -> PaperTrial:
    """Make the training of the first seed, from which those of all seeds start."""
    return make(stem, 0)


def table1(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """ImageNet-1k from scratch, and ImageNet-21k with a probe of 25 images per class."""
    numbers: list[Number] = []
    for arch in make.select_archs(tuple(IMAGENET)):
        row = f"{arch}, ImageNet-1k"
        numbers += _pair(row, partial(make.imagenet, arch), IMAGENET[arch], seeds)
    numbers += _pair("S/16+, ImageNet-1k", make.s16plus, S16PLUS, seeds)
    for arch in make.select_archs(tuple(DEIT)):
        row = f"{arch}, DeiT"
        numbers += _pair(row, partial(make.deit, arch), DEIT[arch], seeds)
    for arch in make.select_archs(tuple(HIGHRES)):
        numbers += _pair(
            f"{arch}, ImageNet-1k, 384 px",
            _chain_makers(partial(make.imagenet, arch), partial(make.highres, 384)),
            HIGHRES[arch],
            seeds,
        )
    numbers += _probe_numbers(make, "imagenet21k", "ImageNet-21k", IMAGENET21K)
    return Experiment("table1", "ImageNet-1k and ImageNet-21k", "top-1 in %; ImageNet-21k: 25-shot", numbers)


def _probe_numbers(make: Trainings, source: str, name: str, paper: dict[int, dict[str, Pair]]) -> list[Number]:
    """Return the accuracies of the probe, over its three draws, after trainings by steps."""
    numbers: list[Number] = []
    for steps, pairs in paper.items():
        for arch in make.select_archs(tuple(pairs)):
            numbers += _pair(
                f"{arch}, {name}, {_steps(steps)} steps",
                partial(make.large, source, steps, arch),
                pairs[arch],
                (0,),
                PROBE,
            )
    return numbers


def table2(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Pre-training on JFT-4B with a probe, and fine-tuning on ImageNet-1k."""
    numbers = _probe_numbers(make, "jft", "JFT, 25-shot", JFT)
    for arch in make.select_archs(tuple(FINE_TUNED)):
        for (steps, pixels), pair in FINE_TUNED[arch].items():
            numbers += _pair(
                f"{arch}, JFT {_steps(steps)}, fine-tuned at {pixels}",
                _chain_makers(partial(make.large, "jft", steps, arch), partial(make.highres, pixels)),
                pair,
                seeds,
            )
    return Experiment("table2", "JFT-4B: probe and fine-tuning on ImageNet-1k", "top-1 in %", numbers)


def table3(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """VTAB-1k. A sweep has seeds of its own."""
    archs = make.select_archs(tuple(dict.fromkeys(arch for arch, _ in PAPER_COLUMNS)))
    columns = [(number, *column) for number, column in enumerate(PAPER_COLUMNS) if column[0] in archs]
    numbers = []
    for task in make.tasks:
        for number, arch, stem in columns:
            sweep = make.vtab(make.imagenet(arch, stem, 0), len(seeds))
            paper = task.paper[number] if task.paper else None
            score = ("tasks", task.name, "test", "values")
            numbers.append(Number(task.name, f"{arch} {stem}", (sweep,), score, paper))
    return Experiment("table3", "VTAB-1k", "accuracy on the test split in %", numbers)


def table4(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """LiT: zero-shot accuracy on ImageNet-1k."""
    numbers: list[Number] = []
    for arch in make.select_archs(tuple(LIT)):
        for steps, pair in LIT[arch].items():
            numbers += _pair(
                f"{arch}, JFT {_steps(steps)}",
                _chain_makers(partial(make.large, "jft", steps, arch), make.lit),
                pair,
                seeds,
                ZEROSHOT,
            )
    return Experiment("table4", "LiT: zero-shot ImageNet-1k", "top-1 in %", numbers)


def table5(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """ADE20K with parts of its training images; the paper has ten seeds."""
    numbers: list[Number] = []
    for fraction, pair in ADE20K.items():
        numbers += _pair(
            f"B/16, {fraction} of ADE20K",
            _chain_makers(partial(_first_seed, partial(make.imagenet, "B/16")), partial(make.segmentation, fraction)),
            pair,
            seeds,
            MIOU,
        )
    return Experiment("table5", "ADE20K", "mIoU in %", [replace(number, seeds=10) for number in numbers])


def table6(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Stems on ImageNet-1k, relative to Dual PatchNorm."""
    numbers = []
    for stem, points in ABLATIONS.items():
        for arch in make.select_archs(ABLATED):
            trials = tuple(make.imagenet(arch, stem, seed) for seed in seeds)
            full = tuple(make.imagenet(arch, "dpn", seed) for seed in seeds)
            paper = points[ABLATED.index(arch)]
            numbers.append(Number(stem, arch, trials, TOP1, paper, minus=full))
    return Experiment("table6", "Stems, relative to Dual PatchNorm", "points of top-1", numbers)


def table7(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """SUN397 from scratch, in three stages."""
    numbers = []
    for arch in make.select_archs(tuple(SUN397)):
        for row, score, values in zip(SEARCH, STAGES, SUN397[arch], strict=True):
            for stem, paper in zip(STEMS, values, strict=True):
                trials = (make.sun397(arch, stem),)
                numbers.append(Number(f"{arch}, {row}", stem, trials, score, paper))
    return Experiment("table7", "SUN397 from scratch", "top-1 on the test split in %", numbers)


def fig1(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Return the gain of every LayerNorm placement, and of Dual PatchNorm, over norms before both halves of a block."""
    networks = [("none", placement) for placement in PLACEMENTS if placement != "pre,pre"] + [("dpn", "pre,pre")]
    numbers = []
    for stem, placement in networks:
        for arch in make.select_archs(ABLATED):
            trials = tuple(make.imagenet(arch, stem, seed, placement) for seed in seeds)
            plain = tuple(make.imagenet(arch, "none", seed) for seed in seeds)
            row = "Dual PatchNorm" if stem == "dpn" else placement
            numbers.append(Number(row, arch, trials, TOP1, minus=plain))
    return Experiment("fig1", "Placements of LayerNorm, relative to (pre, pre)", "points of top-1", numbers)


def _gradients(name: str, title: str, archs: Sequence[str], make: Trainings) -> Experiment:
    drawings = []
    for arch in make.select_archs(archs):
        trials = tuple(make.imagenet(arch, stem, 0) for stem in STEMS)
        drawings.append(Drawing(arch.replace("/", "-"), "report", trials))
    return Experiment(name, title, "", drawings=drawings)


def fig2(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Norms of gradients over depth, and of the embedding over the training."""
    return _gradients("fig2", "Norms of gradients, B/16", ("B/16",), make)


def fig3(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Scales of the first norm."""
    trials = [make.imagenet("Ti/16", "dpn", 0), *([] if make.small else [make.large("jft", 1_100_000, "L/16", "dpn")])]
    drawings = [Drawing(trial.group.replace("/", "-"), "inspect", (trial,)) for trial in trials]
    return Experiment("fig3", "Scales of the first norm", "", drawings=drawings)


def fig4(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Norms of gradients over depth of the other networks."""
    return _gradients("fig4", "Norms of gradients, B/32, S/32, S/16", ("B/32", "S/32", "S/16"), make)


def dtn_table(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Norms in the blocks on ImageNet-1k with DeiT's config; one training each, as it was published."""
    numbers = []
    for norm, row in NORMS.items():
        for arch in make.select_archs(tuple(row)):
            trials = (make.deit(arch, "none", 0, norm),)
            numbers.append(Number(norm, arch, trials, TOP1, row[arch]))
    return Experiment("dtn-table", "Norms of the blocks (Dynamic Token Normalization)", "top-1 in %", numbers)


# The tables and figures by their names, and how often the paper trains each network.
EXPERIMENTS: Mapping[str, tuple[Callable[[Trainings, Sequence[int]], Experiment], int]] = {
    "table1": (table1, 3),
    "table2": (table2, 3),
    "table3": (table3, 3),
    "table4": (table4, 3),
    "table5": (table5, 10),
    "table6": (table6, 3),
    "table7": (table7, 1),
    "fig1": (fig1, 3),
    "fig2": (fig2, 1),
    "fig3": (fig3, 1),
    "fig4": (fig4, 1),
    "dtn-table": (dtn_table, 1),
    "shifts": (shifts, 3),
}
