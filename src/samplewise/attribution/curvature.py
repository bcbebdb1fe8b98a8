"""`Curvature`: interface of the matrices H in influence scores g_query^T (H + damping)^-1 g_train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from samplewise.core.text import listed
from samplewise.errors import ParameterError

DEFAULT_DAMPING = 0.1

Rows = Mapping[str, Tensor]  # parameter name -> (n, *shape), as returned by `Gradients.full`


class Curvature(Protocol):
    """Matrix H over all trainable parameters of a model, such as a Hessian, given by how it is solved.

    `sw.ekfac` and `sw.attribution.hessian` return such objects. For another matrix, pass `sw.influence` an object of
    any class with this method.

    `damping` is a multiple of the mean eigenvalue of the matrix in all of attribution, so that a value suits losses,
    models and numbers of samples of any scale: the inverse is that of H + damping * mean eigenvalue * identity. None,
    the default, is 0.1 if a matrix is inverted. The mean is taken

        EKFAC                    of each block, which is a layer, over its own eigenvalues
        Hessian                  over the absolute values of all eigenvalues: some may be negative, and cancel others
        trak, ProjectedStore     over the eigenvalues of X^T X, where X are the projected gradients of a model

    `sw.trak` inverts a matrix in any case, `sw.influence` if it is given a curvature, a store if it is given a damping.
    """

    def solve(self, rows: Rows, damping: float | None = None) -> dict[str, Tensor]:
        """Product of (H + damping * mean eigenvalue * identity)^-1 with each row.

        rows: parameter name -> (n, *shape), one vector over all parameters for each of n samples; the result is alike
        damping: 0 or more; None: 0.1
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


def checked_damping(damping: float | None) -> float:
    """Multiple of the mean eigenvalue; the default for None."""
    if damping is None:
        return DEFAULT_DAMPING
    is_number = isinstance(damping, (int, float)) and not isinstance(damping, bool)
    if not (is_number and 0 <= damping < float("inf")):
        raise ValueError(f"damping must be a multiple of the mean eigenvalue, 0 or more; found {damping!r}.")
    return float(damping)
