"""Plain and Dual PatchNorm networks under less light, less contrast and noise: not in the paper. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from dpn_cli.reproduce.experiment import Experiment, Number, Score
from dpn_cli.reproduce.trainings import Trainings

# By the name of a row: a stem, and what makes its network less sensitive to shifts.
REMEDIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("none", ()),
    "plain, jitter 0.5": ("none", ("--jitter", "0.5")),
    "Dual PatchNorm": ("dpn", ()),
    "Dual PatchNorm, noise 20": ("dpn", ("--noise", "20")),
}
SHIFT_COLUMNS: dict[str, Score] = {
    "unshifted": ("clean",),
    "light 1/2": ("scores", "gain", 0),
    "light 1/4": ("scores", "gain", 1),
    "light 1/8": ("scores", "gain", 2),
    "contrast 1/8": ("scores", "flat_contrast", 2),
    "dusk 1/8": ("scores", "dusk", 1),
    "dusk 1/32": ("scores", "dusk", 2),
    "noise 20": ("scores", "gaussian_noise", 0),
    "noise 46": ("scores", "gaussian_noise", 1),
}


def shifts(make: Trainings, seeds: Sequence[int]) -> Experiment:
    """Accuracy under less light, less contrast and noise; not in the paper."""
    trials = {
        row: (f"{make.shifted_arch} {stem}", tuple(make.photographs(stem, seed, *remedy) for seed in seeds))
        for row, (stem, remedy) in REMEDIES.items()
    }
    students = tuple(make.distilled(make.photographs("none", seed), seed) for seed in seeds)
    trials["distilled without labels"] = ("student", students)
    numbers = [
        Number(row, column, row_trials, ("shifts", "networks", network, *score))
        for row, (network, row_trials) in trials.items()
        for column, score in SHIFT_COLUMNS.items()
    ]
    return Experiment("shifts", "Light, contrast and noise (not in the paper)", "top-1 in %", numbers)
