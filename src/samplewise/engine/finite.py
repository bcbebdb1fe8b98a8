"""Losses can be finite and their gradients not: a root, a norm or a logarithm at zero. That is an error."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from samplewise.errors import NonFiniteGradientError


def traced(tensor: Tensor) -> bool:
    """Whether it has no values, because what is done with it is only written down, to be compiled."""
    return isinstance(tensor, FakeTensor)


def all_finite(tensor: Tensor) -> bool:
    """What is compiled looks for itself."""
    return traced(tensor) or bool(tensor.detach().isfinite().all())


def finite_numbers(numbers: Tensor, what: str) -> Tensor:
    """One number per sample."""
    if not all_finite(numbers):
        bad = (~numbers.detach().isfinite()).nonzero().flatten().tolist()
        raise _error(f"the {what} {numbers[bad[0]].item()} at sample {bad[0]} ({len(bad)} of {len(numbers)} samples)")
    return numbers


def finite_tensors(found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """One tensor per parameter. The sum is cheaper to look at; it may overflow by itself, so look again."""
    for name, tensor in found.items():
        if not all_finite(tensor.detach().sum()) and not all_finite(tensor):
            raise _error(f"NaN or infinity in that of {name!r}")
    return found


def _error(found: str) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"gradients must be finite; found {found} though every loss is finite. "
        "Look for a square root, norm, division or logarithm at zero, or for gradients too large to be squared."
    )
