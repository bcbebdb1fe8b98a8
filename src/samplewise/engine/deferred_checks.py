"""Checks that values are finite: at once on the CPU; deferred on an accelerator, and read together in one host sync."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from samplewise.errors import NonFiniteGradientError, NonFiniteLossError, ParameterError


def is_traced(tensor: Tensor) -> bool:
    """True for a tensor without values: its operations are only recorded, to be compiled."""
    return isinstance(tensor, FakeTensor)


def read_at_once(tensor: Tensor) -> bool:
    """True if the host reads values of this tensor without waiting: on the CPU. Also for a traced tensor, which has no
    values.
    """
    return tensor.device.type == "cpu" or is_traced(tensor)


class DeferredCheck(NamedTuple):
    """`check(values, *arguments)` raises if an element of `values` is not finite, and only then."""

    check: Callable[..., object]
    values: Tensor
    arguments: tuple[Any, ...]


class DeferredChecks:
    """Checks of values that the host has not read yet, in the order in which they were added."""

    __slots__ = ("_deferred",)

    def __init__(self) -> None:
        self._deferred: list[DeferredCheck] = []

    def __bool__(self) -> bool:
        return bool(self._deferred)

    @property
    def values(self) -> list[Tensor]:
        """Small tensors that must be finite."""
        return [deferred.values for deferred in self._deferred]

    def add(self, check: Callable[..., object], values: Tensor, *arguments: Any) -> None:
        """Call check(values, *arguments), which raises if a value is not finite: now on the CPU, else in `settle`."""
        if read_at_once(values):
            check(values, *arguments)
        else:
            self._deferred.append(DeferredCheck(check, values.detach(), arguments))

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
            if self._deferred and not bool(all_finite_flag(self.values)):
                self.raise_first()
        finally:
            self._deferred.clear()

    def raise_first(self) -> None:
        """Make the checks one by one, each with its own host sync, and raise the first error."""
        for check, values, arguments in self._deferred:
            check(values, *arguments)


def largest_values(tensors: Iterable[Tensor]) -> Tensor:
    """Largest absolute value of each tensor, (len(tensors),), in the widest of their dtypes; NaN if it has one."""
    norms = torch._foreach_norm(list(tensors), ord=math.inf)
    return torch.stack([norm.to(norms[0].device) for norm in norms])


def all_finite_flag(tensors: Sequence[Tensor]) -> Tensor:
    """Scalar on the device: True if all elements of all tensors are finite."""
    return largest_values([tensor for tensor in tensors if tensor.numel()]).isfinite().all()


_current_checks: ContextVar[DeferredChecks | None] = ContextVar("current_checks", default=None)


def current_checks() -> DeferredChecks | None:
    """Checks of the innermost `collect_in`; None outside."""
    return _current_checks.get()


@contextmanager
def collect_in(checks: DeferredChecks) -> Iterator[None]:
    """Context manager: checks inside are added to `checks`, which the caller settles."""
    token = _current_checks.set(checks)
    try:
        yield
    finally:
        _current_checks.reset(token)


# --- checks of values, each with one host sync ------------------------------------------------------------------------

LARGE = 1e30  # sums of fewer than 1e8 such values do not overflow in float32


def all_finite(tensor: Tensor) -> bool:
    """True if all elements are finite, or if the tensor is traced: compiled updates check their values themselves."""
    if isinstance(tensor, FakeTensor):
        return True
    # The sum is cheaper to check, but it can overflow when all elements are finite: then check the elements.
    tensor = tensor.detach()
    return cmath.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def finite_losses(losses: Tensor) -> None:
    """Raise NonFiniteLossError with the first non-finite sample."""
    if not all_finite(losses):
        bad = (~losses.detach().isfinite()).nonzero().flatten().tolist()
        raise NonFiniteLossError(
            f"losses must be finite; found {losses[bad[0]].item()} at sample {bad[0]} "
            f"({len(bad)} of {len(losses)} samples are NaN or infinite). "
            "Inspect those samples, or leave them out of the batch."
        )


def finite_weights(weights: Tensor, what: str) -> None:
    """Raise ParameterError with the first non-finite sample."""
    if not all_finite(weights):
        bad = int((~weights.detach().isfinite()).nonzero()[0])
        raise ParameterError(
            f"{what} must be finite; found {weights[bad].item()} at sample {bad}. "
            "Check for a division by a norm that is zero."
        )


def finite_numbers(numbers: Tensor, what: str) -> Tensor:
    """Return `numbers` (b,), or raise NonFiniteGradientError with the first non-finite sample."""
    if not all_finite(numbers):
        bad = (~numbers.detach().isfinite()).nonzero().flatten().tolist()
        raise _non_finite(
            f"the {what} {numbers[bad[0]].item()} at sample {bad[0]} ({len(bad)} of {len(numbers)} samples)"
        )
    return numbers


def finite_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return `tensors` (name -> tensor), or raise NonFiniteGradientError with the first non-finite parameter."""
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise _non_finite(f"NaN or infinity in the gradient of {name!r}")
    return tensors


def _non_finite(value: str) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"gradients must be finite; found {value} although every loss is finite. "
        "Check for a square root, norm, division or logarithm at zero, or for gradients too large to be squared."
    )


def are_ordinary_norms(norms: Tensor) -> bool:
    """True if all norms (b,) are large enough that no squares have underflowed, and so small that their sum cannot
    overflow; always if traced.

    One kernel and one host sync for both checks. In compiled updates a gradient too small to be squared counts as zero.
    """
    if isinstance(norms, FakeTensor):
        return True
    smallest, largest = torch.aminmax(norms.detach())  # NaN if an element is NaN
    return smallest.item() >= underflow_limit(norms.dtype) and largest.item() < LARGE


def are_at_most_one(weights: Tensor) -> bool:
    """True if no weight (b,) exceeds 1 in magnitude. Causes a host sync; False if traced."""
    if isinstance(weights, FakeTensor):
        return False
    smallest, largest = torch.aminmax(weights.detach())
    return smallest.item() >= -1 and largest.item() <= 1


def underflow_limit(dtype: torch.dtype) -> float:
    """Norm below which squares may have underflowed: 1e-150 in float64, 1e-9 otherwise."""
    return 1e-150 if dtype is torch.float64 else 1e-9
