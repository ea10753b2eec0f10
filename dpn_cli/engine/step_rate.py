"""The rate of a training over its last seconds: a mean over all of it hides what has changed."""

from __future__ import annotations

from collections import deque

RECENT_SECONDS = 30.0


class StepRate:
    """Seconds per step over the last `RECENT_SECONDS` of a training, or over its last step if that took longer."""

    def __init__(self) -> None:
        self._ends = deque[tuple[float, int]]()  # the seconds and the number of steps at the end of each step

    def restart(self, seconds: float, step: int) -> None:
        """Forget earlier steps, as after an evaluation, which is not training at another rate."""
        self._ends.clear()
        self._ends.append((seconds, step))

    def seconds_per_step(self, seconds: float, step: int) -> float:
        """Return the rate at the end of a step."""
        while len(self._ends) > 1 and self._ends[0][0] < seconds - RECENT_SECONDS:
            self._ends.popleft()
        first_seconds, first_step = self._ends[0]
        self._ends.append((seconds, step))
        return (seconds - first_seconds) / (step - first_step)
