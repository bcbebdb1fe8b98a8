"""Validation of Step's arguments."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

TAILS = ("update", "drop", "carry")
POLICIES = ("raise", "skip", "ignore")


def check_options(samples: Any, tail: Any, on_nonfinite: Any, max_grad_norm: Any, record: Any) -> None:
    """Raise ValueError for invalid values."""
    if not (samples is None or (type(samples) is int and samples > 0)):
        raise ValueError(f"samples must be a positive integer, or None for one update per batch; found {samples!r}.")
    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}; found {tail!r}.")
    if on_nonfinite not in POLICIES:
        raise ValueError(f"on_nonfinite must be one of {', '.join(POLICIES)}; found {on_nonfinite!r}.")
    if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm must be positive; found {max_grad_norm!r}.")
    if record is None or isinstance(record, str) or set(record) - {"norms"}:
        raise ValueError(f"record must be a set of names, and the only name is 'norms'; found {record!r}.")


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise TypeError unless the scheduler can step once per update of this optimizer."""
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "scheduler must step once per update without a metric; found ReduceLROnPlateau. "
            "Call its step(metric) yourself, after validation."
        )
    if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler must be a torch.optim.lr_scheduler of the optimizer; found {scheduler!r}.")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise TypeError(
            "scheduler must be created with the optimizer of the step; found that it has another one. "
            "Create it with the optimizer that is passed to Step(...)."
        )
