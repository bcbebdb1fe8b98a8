"""Errors for non-finite gradients of finite losses, such as those of a root, norm or logarithm at zero."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from samplewise.errors import NonFiniteGradientError


def traced(tensor: Tensor) -> bool:
    """True for a tensor without values: its operations are only recorded, to be compiled."""
    return isinstance(tensor, FakeTensor)


def all_finite(tensor: Tensor) -> bool:
    """True if all elements are finite, or if the tensor is traced: compiled updates check their values themselves."""
    return traced(tensor) or bool(tensor.detach().isfinite().all())


def finite_numbers(numbers: Tensor, what: str) -> Tensor:
    """Return `numbers` (b,), or raise NonFiniteGradientError with the first non-finite sample."""
    if not all_finite(numbers):
        bad = (~numbers.detach().isfinite()).nonzero().flatten().tolist()
        raise _error(f"the {what} {numbers[bad[0]].item()} at sample {bad[0]} ({len(bad)} of {len(numbers)} samples)")
    return numbers


def finite_tensors(found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return `found` (name -> tensor), or raise NonFiniteGradientError with the first non-finite parameter."""
    # The sum is cheaper to check, but it can overflow when all elements are finite: then check the elements.
    for name, tensor in found.items():
        if not all_finite(tensor.detach().sum()) and not all_finite(tensor):
            raise _error(f"NaN or infinity in the gradient of {name!r}")
    return found


def _error(found: str) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"gradients must be finite; found {found} although every loss is finite. "
        "Check for a square root, norm, division or logarithm at zero, or for gradients too large to be squared."
    )
