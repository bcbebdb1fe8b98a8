"""Quantities that are computed by engine and oracle, with tolerances for their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samplewise.testing.case import seeded
from samplewise.testing.oracle import ExpectedRows, real

Value = Tensor | dict[str, Tensor]


class Disagreement(AssertionError):
    """Engine and oracle differ. The first line of the message gives the error, the rest both results."""


@dataclass(frozen=True)
class Probe:
    """Arguments of the quantities: weights, a direction, and the other gradients of `gram(other)`."""

    weights: Tensor
    by_name: dict[str, Tensor]
    direction: dict[str, Tensor]
    other: Any = None

    def against(self, other: Any) -> Probe:
        return replace(self, other=other)

    def to(self, dtype: torch.dtype) -> Probe:
        return Probe(self.weights.to(dtype), cast_all(self.by_name, dtype), cast_all(self.direction, dtype), self.other)


def probe_for(parameters: dict[str, Tensor], B: int) -> Probe:
    with seeded(1):
        dtype = next(iter(parameters.values())).dtype.to_real()
        device = next(iter(parameters.values())).device
        return Probe(
            torch.randn(B, dtype=dtype).to(device),
            {name: torch.randn(B, dtype=dtype).to(device) for name in parameters},
            {name: torch.randn(p.shape, dtype=p.dtype).to(device) for name, p in parameters.items()},
        )


QUANTITIES: dict[str, Callable[[Any, Probe], Value]] = {
    "norms": lambda g, p: g.norms(),
    "norms by parameter": lambda g, p: g.norms(by="parameter"),
    "dot": lambda g, p: g.dot(p.direction),
    "gram": lambda g, p: g.gram(),
    "gram with another": lambda g, p: g.gram(p.other),
    "sum": lambda g, p: g.sum(),
    "weighted sum": lambda g, p: g.sum(p.weights),
    "sum with weights by parameter": lambda g, p: g.sum(p.by_name),
    "mean": lambda g, p: g.mean(),
    "sum of squares": lambda g, p: g.sum_of_squares(),
    "variance": lambda g, p: g.variance(),
    "full": lambda g, p: g.full(),
    "by name": lambda g, p: {name: g[name] for name in g.names},
    "by sample": lambda g, p: g[len(g) - 1],
}
CORE = ("norms", "norms by parameter", "dot", "weighted sum", "full")


def defined_quantities(rows: ExpectedRows, names: Iterable[str] = tuple(QUANTITIES)) -> list[str]:
    """Filter `names`: variance needs two samples; squares of complex gradients are not defined."""
    undefined = {"variance"} if len(rows) < 2 else set()
    if any(rows[name].is_complex() for name in rows.names):
        undefined |= {"sum of squares", "variance"}
    return [name for name in names if name not in undefined]


def other_losses(losses: Tensor) -> Tensor:
    """Losses of fewer samples in reverse order, from the same graph."""
    return (losses * losses.detach().cos()).flip(0)[: len(losses) // 2 + 1]


@dataclass(frozen=True)
class Tolerance:
    """Allowed error: `relative` times the largest element per parameter plus `floor` times the largest of all.

    The floor is needed for gradients that consist of rounding errors only, such as that of a bias under a softmax.
    """

    relative: float
    floor: float


EXACT = Tolerance(1e-9, 1e-14)
SECOND_ORDER = Tolerance(1e-7, 1e-12)
SINGLE = Tolerance(1e-4, 1e-6)
TENSOR_FLOAT = Tolerance(5e-3, 5e-4)  # ten times the rounding error of a 10-bit mantissa, as HALF for 7 bits
HALF = Tolerance(4e-2, 4e-3)


def assert_same(
    result: Value,
    expected: Value,
    tolerance: Tolerance = EXACT,
    what: str = "",
    scale: Value | None = None,
    terms: float = 0.0,
) -> None:
    """Raise Disagreement if tensors, or dicts of tensors, differ by more than the tolerance.

    `scale` replaces `expected` as the reference for relative errors in low precision. `terms` is the size of the
    summed terms, whose rounding errors remain even if the sum is 0.
    """
    result = as_dict(result)
    expected = as_dict(expected)
    scale = expected if scale is None else as_dict(scale)
    if list(result) != list(expected):
        raise Disagreement(f"{what}: names {list(result)}, expected {list(expected)}")
    overall = max([terms, *(largest(t) for t in scale.values())])
    for name, expected_tensor in expected.items():
        tensor = result[name].detach().to(expected_tensor.dtype)
        location = f"{what} of {name}" if name else what
        if tensor.shape != expected_tensor.shape:
            raise Disagreement(f"{location}: shape {tuple(tensor.shape)}, expected {tuple(expected_tensor.shape)}")
        error = largest(tensor - expected_tensor.detach())
        allowed = tolerance.relative * largest(scale[name]) + tolerance.floor * overall
        if not error <= allowed:  # also true for NaN
            raise Disagreement(f"{location}: off by {error:.2e}, allowed {allowed:.2e}\n{tensor}\n{expected_tensor}")


def assert_agrees(
    g: Any,
    rows: ExpectedRows,
    probe: Probe,
    names: Iterable[str] = CORE,
    tolerance: Tolerance = EXACT,
    other: tuple[Any, ExpectedRows | None] = (None, None),
) -> None:
    """Compare every quantity of `names` of one g with the rows; `other` is a second pair (g, rows) for gram."""
    other_gradients, other_rows = other
    engine_probe = probe.against(other_gradients)
    oracle_probe = probe.against(other_rows).to(rows.dtype)
    for name in defined_quantities(rows, names):
        quantity = QUANTITIES[name]
        scale = scale_of(name, rows, tolerance)
        terms = terms_of(name, rows, probe)
        assert_same(quantity(g, engine_probe), quantity(rows, oracle_probe), tolerance, name, scale, terms)


def scale_of(name: str, rows: ExpectedRows, tolerance: Tolerance) -> dict[str, Tensor] | None:
    """Reference for relative errors: in low precision, the mean squares for a variance; else None."""
    if name == "variance" and tolerance != EXACT:
        return {k: t / len(rows) for k, t in rows.sum_of_squares().items()}
    return None


def terms_of(name: str, rows: ExpectedRows, probe: Probe) -> float:
    """Largest term of a quantity in which terms can cancel (equal samples, or opposite signs); else 0."""
    element = max(largest(t) for t in rows.full().values())
    if name in ("variance", "sum of squares"):
        return element**2
    if name == "by sample":  # one row of all: its own elements may consist of rounding errors
        return element
    if name in ("sum", "mean", "weighted sum", "sum with weights by parameter"):
        return element * max(1.0, largest(probe.weights), *(largest(t) for t in probe.by_name.values()))
    return 0.0


def cast_all(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype.to_complex() if t.is_complex() else dtype) for name, t in tensors.items()}


def as_dict(value: Value) -> dict[str, Tensor]:
    return value if isinstance(value, dict) else {"": value}


def largest(tensor: Tensor) -> float:
    """Largest absolute value; 0 for an empty tensor; NaN if the tensor contains NaN, which fails comparisons."""
    return real(tensor.detach()).abs().max().item() if tensor.numel() else 0.0
