"""Library calls in recorded updates: matrix products, called through the C interface of libtorch.

The C functions take handles, which are pointers to at::Tensor objects, and return zero on success.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.step.compiled import inductor

aten = torch.ops.aten
SYMBOLS = {
    aten.mm.out: "aoti_torch_cpu_mm_out",
    aten.bmm.out: "aoti_torch_cpu_bmm_out",
    aten.addmm.out: "aoti_torch_cpu_addmm_out",
    aten.baddbmm.out: "aoti_torch_cpu_baddbmm_out",
}
DELETE = "aoti_torch_delete_tensor_object"


@dataclass(frozen=True)
class LibraryCall:
    """C function of a matrix product; `numbers` are its last arguments, beta and alpha."""

    symbol: str
    numbers: tuple[float, ...]

    def source(self, function: str, tensors: Sequence[str]) -> str:
        """C expression of the call, which is true if it fails."""
        types = ["void*"] * len(tensors) + ["double"] * len(self.numbers)
        values = [*tensors, *map(repr, self.numbers)]
        return f"((int32_t (*)({', '.join(types)})){function})({', '.join(values)})"

    @property
    def address(self) -> int:
        found = inductor.libtorch_function(self.symbol)
        assert found is not None
        return found


def as_library_call(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[LibraryCall, tuple[Tensor, ...]] | None:
    """Return the C function of a dispatched operation and its tensors; None if there is none."""
    symbol = SYMBOLS.get(function)
    if symbol is None or None in map(inductor.libtorch_function, (symbol, DELETE)):
        return None
    weighed = function in (aten.addmm.out, aten.baddbmm.out)
    numbers = (float(kwargs.get("beta", 1)), float(kwargs.get("alpha", 1))) if weighed else ()
    return LibraryCall(symbol, numbers), (kwargs["out"], *args)


class Handles:
    """Handles of tensors, deleted together with this object."""

    def __init__(self) -> None:
        self._made: list[int] = []
        delete = inductor.libtorch_function(DELETE)
        if delete is not None:  # otherwise `as_library_call` finds none
            weakref.finalize(self, inductor.delete_tensor_handles, delete, self._made)

    def of(self, tensors: Sequence[Tensor]) -> list[int]:
        made = inductor.tensor_handles(tensors)
        self._made += made
        return made
