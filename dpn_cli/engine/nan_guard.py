"""Stop on a non-finite loss or gradient norm."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dpn_cli.errors import NonFiniteError


class _PendingCheck(NamedTuple):
    step: int
    values: Tensor  # on the CPU as soon as `copied` has happened
    copied: torch.cuda.Event | None


class FiniteCheck:
    """Raises `NonFiniteError` for a step whose loss or gradient norm is NaN or infinite; nothing is updated then.

    Reading the two waits for the gradients, and a GPU then idles until the next step is launched. With `late`, they are
    read one step later, and the device itself skips the update where they are not finite: torch's fused optimizers do
    so by ``found_inf``, which `torch.amp.GradScaler` sets otherwise. With other optimizers they are read immediately.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, late: bool) -> None:
        self.optimizer = optimizer
        self.late = late and getattr(optimizer, "_step_supports_amp_scaling", False)
        self._pending: _PendingCheck | None = None
        self._last_values: list[float] = []

    def read(self, pending: Tensor, step: int, *, now: bool) -> list[float]:
        """Return (loss, gradient norm, ...) of a step with gradients; call it right before the optimizer's step.

        With `late` and not `now`, returns the values that were read last.
        """
        self.confirm()
        self._pending = _start_copy(pending, step)
        if self.late:
            self.optimizer.found_inf = (~pending[:2].isfinite().all()).float()  # type: ignore[attr-defined]
        if now or not self.late or not self._last_values:
            self.confirm()
        return self._last_values

    def confirm(self) -> None:
        """Read a pending check. Call it before the training is saved or evaluated."""
        if self._pending is None:
            return
        step, tensor, copied = self._pending
        self._pending = None
        if copied:
            copied.synchronize()
        self._last_values = tensor.tolist()
        loss, norm = self._last_values[:2]
        if not math.isfinite(loss + norm):
            raise NonFiniteError(
                f"step {step + 1}: loss {loss}, gradient norm {norm}; nothing was updated. Lower the learning rate in "
                "another run, or use --precision fp32; --resume alone comes to the same step again"
            )


def _start_copy(pending: Tensor, step: int) -> _PendingCheck:
    if pending.device.type != "cuda":
        return _PendingCheck(step, pending, None)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    values = pending.to("cpu", non_blocking=True)
    copied.record()
    return _PendingCheck(step, values, copied)
