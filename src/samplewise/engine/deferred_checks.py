"""Finite checks of values on an accelerator, read together in one host sync. On the CPU each check is made at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.engine.arguments import is_traced


def read_at_once(tensor: Tensor) -> bool:
    """True if the host reads values of this tensor without waiting: on the CPU. Also for a traced tensor, which has no
    values.
    """
    return tensor.device.type == "cpu" or is_traced(tensor)


class PendingCheck(NamedTuple):
    """`check(values, *arguments)` raises if an element of `values` is not finite, and only then."""

    check: Callable[..., object]
    values: Tensor
    arguments: tuple[Any, ...]


class PendingChecks:
    """Checks of values that the host has not read yet, in the order in which they were added."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: list[PendingCheck] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    @property
    def values(self) -> list[Tensor]:
        """Small tensors that must be finite."""
        return [pending.values for pending in self._pending]

    def add(self, check: Callable[..., object], values: Tensor, *arguments: Any) -> None:
        """Call check(values, *arguments), which raises if a value is not finite: now on the CPU, else in `settle`."""
        if read_at_once(values):
            check(values, *arguments)
        else:
            self._pending.append(PendingCheck(check, values.detach(), arguments))

    def add_tensors(self, check: Callable[[Mapping[str, Tensor]], object], tensors: Mapping[str, Tensor]) -> None:
        """As `add`, for named tensors of any size. Only the largest value of each is kept for `settle`."""
        if not tensors or read_at_once(next(iter(tensors.values()))):
            check(tensors)
            return
        filled = {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}
        if filled:
            names = list(filled)  # not `filled`, which would keep the tensors in memory
            self.add(lambda values: check(dict(zip(names, values, strict=True))), largest_values(filled.values()))

    def settle(self) -> None:
        """Raise the error of the first check that fails; forget all checks. One host sync, or none without checks."""
        try:
            if self._pending and not bool(all_finite_flag(self.values)):
                self.raise_first()
        finally:
            self._pending.clear()

    def raise_first(self) -> None:
        """Make the checks one by one, each with its own host sync, and raise the first error."""
        for check, values, arguments in self._pending:
            check(values, *arguments)


def largest_values(tensors: Iterable[Tensor]) -> Tensor:
    """Largest absolute value of each tensor, (len(tensors),), in the widest of their dtypes; NaN if it has one."""
    norms = torch._foreach_norm(list(tensors), ord=math.inf)
    return torch.stack([norm.to(norms[0].device) for norm in norms])


def all_finite_flag(tensors: Sequence[Tensor]) -> Tensor:
    """Scalar on the device: True if all elements of all tensors are finite."""
    return largest_values([tensor for tensor in tensors if tensor.numel()]).isfinite().all()


_collecting: ContextVar[PendingChecks | None] = ContextVar("collecting", default=None)


def collecting() -> PendingChecks | None:
    """Checks of the innermost `collected_in`; None outside."""
    return _collecting.get()


@contextmanager
def collected_in(checks: PendingChecks) -> Iterator[None]:
    """Context manager: checks inside are added to `checks`, which the caller settles."""
    token = _collecting.set(checks)
    try:
        yield
    finally:
        _collecting.reset(token)
