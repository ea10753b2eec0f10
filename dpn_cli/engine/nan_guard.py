"""A training goes on from finite losses and gradients only."""

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

    To read the two is to wait for the gradients, and a GPU has nothing to do from then until the next step is launched.
    With `late`, they are read one step later, and the device itself leaves out the update where they are not finite:
    torch's fused optimizers do so by ``found_inf``, which `torch.amp.GradScaler` sets otherwise. With an optimizer that
    cannot, they are read at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, late: bool) -> None:
        self.optimizer = optimizer
        self.late = late and getattr(optimizer, "_step_supports_amp_scaling", False)
        self._unread: _PendingCheck | None = None
        self._read: list[float] = []

    def read(self, pending: Tensor, step: int, *, now: bool) -> list[float]:
        """Return (loss, gradient norm, ...) of a step with gradients; call it right before the optimizer's step.

        Returns those that were read last where they are read late, unless this step's are wanted `now`.
        """
        self.confirm()
        self._unread = _copied(pending, step)
        if self.late:
            self.optimizer.found_inf = (~pending[:2].isfinite().all()).float()  # type: ignore[attr-defined]
        if now or not self.late or not self._read:
            self.confirm()
        return self._read

    def confirm(self) -> None:
        """Read what is still unread. Call it before anything of the training is kept or scored."""
        if self._unread is None:
            return
        step, tensor, copied = self._unread
        self._unread = None
        if copied:
            copied.synchronize()
        self._read = tensor.tolist()
        loss, norm = self._read[:2]
        if not math.isfinite(loss + norm):
            raise NonFiniteError(
                f"step {step + 1}: loss {loss}, gradient norm {norm}; nothing was updated. Lower the learning rate in "
                "another run, or use --precision fp32; --resume alone comes to the same step again"
            )


def _copied(pending: Tensor, step: int) -> _PendingCheck:
    if pending.device.type != "cuda":
        return _PendingCheck(step, pending, None)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    values = pending.to("cpu", non_blocking=True)
    copied.record()
    return _PendingCheck(step, values, copied)
