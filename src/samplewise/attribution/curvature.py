"""`Curvature`: interface of the matrices H in influence scores g_train^T (H + damping)^-1 g_query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from samplewise.core.text import listed
from samplewise.errors import ParameterError

Rows = Mapping[str, Tensor]  # parameter name -> (n, *shape), as returned by `Gradients.full`


class Curvature(Protocol):
    """Matrix H over all trainable parameters of a model, such as a Hessian, given by how it is solved.

    `sw.ekfac` and `sw.hessian` return such objects. For another matrix, pass `sw.influence` an object of any class with
    this method.
    """

    def solve(self, rows: Rows, damping: float | None = None) -> dict[str, Tensor]:
        """Product of (H + damping * identity)^-1 with each row.

        rows: parameter name -> (n, *shape), one vector over all parameters for each of n samples; the result is alike
        damping: positive number or 0; None: the default of the class
        """


def check_shapes(found: Mapping[str, tuple[int, ...] | None], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if the parameters of a model are not those that the curvature was computed for."""
    if found == shapes:
        return
    differing = sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
    raise ParameterError(
        "the curvature must be of a model with the same trainable parameters; found other names or shapes: "
        f"{listed(differing)}. Compute it again for this model."
    )


def check_damping(damping: float | None) -> None:
    is_number = isinstance(damping, (int, float)) and not isinstance(damping, bool)
    if damping is not None and not (is_number and 0 <= damping < float("inf")):
        raise ValueError(f"damping must be a number, 0 or more, or None for the default; found {damping!r}.")
