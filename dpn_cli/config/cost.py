"""Cost of trainings in memory, time and disk, measured by a dry run or estimated by a plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of the trainings of one network, one after the other, in bytes and seconds.

    Args:
        name: the network's.
        part: which part of its trainings this is, where there are several.
        memory: the peak of one of its processes: of what the allocator gave out on a GPU, else of the resident memory.
            A plan's is that of a step's tensors.
        step_seconds: of one step.
        steps: those of all trainings.
        trainings: how many there are.
        evaluation_seconds: all evaluations of all trainings.
        cache_seconds: what is computed once for all of them.
        kept: what all trainings leave on the disk.
        passing: additional bytes on the disk until one training has ended.
        cached: the bytes of what is computed once.
    """

    name: str
    part: str = ""
    memory: int
    step_seconds: float
    steps: int
    trainings: int
    evaluation_seconds: float
    kept: int
    passing: int
    cached: int = 0
    cache_seconds: float = 0.0

    @property
    def hours(self) -> float:
        """Those of all steps, all evaluations and the cache."""
        return (self.steps * self.step_seconds + self.evaluation_seconds + self.cache_seconds) / 3600

    @property
    def disk(self) -> int:
        """The most bytes that are on the disk at once."""
        return self.kept + self.passing + self.cached

    def times(self, count: int) -> Cost:
        """Return what `count` times as many trainings take."""
        return replace(
            self,
            steps=count * self.steps,
            trainings=count * self.trainings,
            evaluation_seconds=count * self.evaluation_seconds,
            kept=count * self.kept,
        )

    def of_steps(self, steps: int, trainings: int) -> Cost:
        """Return what so many trainings take, of which this is one, that have `steps` in all."""
        share = steps / self.steps
        return replace(self.times(trainings), steps=steps, evaluation_seconds=share * self.evaluation_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, with the hours and the bytes on the disk."""
        return {**asdict(self), "hours": self.hours, "disk": self.disk}


def total_disk(costs: Sequence[Cost]) -> int:
    """Return the most bytes on the disk at once where one training ends before the next one begins."""
    return sum(cost.kept + cost.cached for cost in costs) + max((cost.passing for cost in costs), default=0)


def total_hours(costs: Sequence[Cost]) -> float:
    """Return the hours of trainings one after the other."""
    return sum(cost.hours for cost in costs)
