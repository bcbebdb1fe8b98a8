"""Types of transforms, one per stage: a `SampleTransform` returns one coefficient per sample, before gradients are
summed; a `Grouping` sums samples of one group; a `SumTransform` changes the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samplewise.engine.deferred_checks import all_finite, current_checks
from samplewise.errors import TransformError
from samplewise.transforms.reference import Reference
from samplewise.transforms.stats import PerSample, SampleStats

NEEDS = ("losses", "counts", "norms", "batch")


class NonFiniteCoefficientError(TransformError):
    """A transform has returned NaN or infinity for a sample."""


@dataclass(frozen=True, repr=False)
class SampleTransform:
    """Transform that returns coefficients (B,) for samples, computed from the values that it declares in `needs`."""

    name: str  # as in code: clip(1.0)
    formula: str  # the coefficient of a gradient {g}
    answer: Callable[[SampleStats], PerSample] = field(repr=False)
    needs: frozenset[str] = frozenset()  # subset of losses, counts, norms, batch
    reference: Reference | None = None  # direction whose dot products it needs
    window: bool = False  # whether it needs all samples of the window at once
    by_parameter: bool = False  # whether it returns a dict, name -> (B,)
    renormalizes: bool = False  # whether its coefficients also multiply the counts in the denominator
    positions: int | None = None  # number of window positions it has values for; None: independent of the position
    batch_keys: frozenset[Hashable] = frozenset()  # keys of the batch that it reads; none with need "batch": all
    rescales: bool = False  # whether it gives every gradient a chosen norm, so that small coefficients are no surprise
    max_norm: float | None = None  # bound of the norm of each gradient (by_parameter: of each part); None: no bound

    def __call__(self, stats: SampleStats) -> PerSample:
        """Coefficients, after a check of type, shape and finiteness."""
        coefficients = self.answer(stats)
        if not self.by_parameter:
            return self._checked(coefficients, stats.losses.shape[0], "one coefficient per sample")
        if not isinstance(coefficients, Mapping):
            found = type(coefficients).__name__
            raise TransformError(f"{self} must return a dict of parameter names and tensors (B,); found {found}.")
        return {
            name: self._checked(c, len(stats), f"one coefficient per sample for {name!r}")
            for name, c in coefficients.items()
        }

    def needed(self, stats: SampleStats) -> SampleStats:
        """`stats` restricted to the values that this transform needs."""
        return SampleStats(
            stats.losses,
            stats.counts,
            positions=stats.positions,
            raw_norms=stats.raw_norms if "norms" in self.needs else None,
            raw_dots={} if self.reference is None else {self.reference: stats.raw_dots[self.reference]},
            coefficients=stats.coefficients,
            shares=stats.denominators,
        )

    def _checked(self, values: Any, samples: int, what: str) -> Tensor:
        if not isinstance(values, Tensor) or values.shape != (samples,):
            found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise TransformError(f"{self} must return {what}, a tensor of shape ({samples},); found {found}.")
        values = values.detach()
        if not values.is_floating_point():
            values = values.to(torch.get_default_dtype())
        checks = current_checks()
        if checks is None:
            self._check_finite(values)
        else:
            checks.add(self._check_finite, values)
        return values

    def _check_finite(self, values: Tensor) -> None:
        if not all_finite(values):
            bad = int((~values.isfinite()).nonzero()[0])
            raise NonFiniteCoefficientError(
                f"{self} must return finite coefficients; found {values[bad].item()} at sample {bad}."
            )

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class SumTransform:
    """Transform of the sum of all gradients, in place, once per update, before the division by the denominator."""

    name: str
    formula: str  # the term that it adds
    act: Callable[[list[Tensor]], None] = field(repr=False)
    additive: bool = False  # whether it only adds values that do not depend on the sum
    generator: torch.Generator | None = None  # source of its random stats; None: torch's default generators

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class Grouping:
    """Sum of the gradients of samples with the same key. Transforms after it act on groups instead of samples."""

    name: str
    keys: Callable[[Any], list[Any]] = field(repr=False)  # batch -> one key per sample
    batch_keys: frozenset[Hashable] = frozenset()  # keys of the batch that it reads; none: a function reads the batch

    def __repr__(self) -> str:
        return self.name


Transform = SampleTransform | SumTransform | Grouping


def positive(name: str, value: float) -> float:
    """The value, if it is positive; otherwise raise ValueError."""
    if not value > 0:
        raise ValueError(f"{name} must be positive; found {value!r}.")
    return value


def quotient(numerator: float | Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 if the denominator is 0: a zero gradient needs no scaling."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def function_name(function: Callable[..., Any]) -> str:
    """Name of a function for formulas; "function" for a lambda."""
    name = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else name
