"""What a transform is. The type says the stage: a `SampleTransform` answers with one coefficient per sample, before
gradients are summed; a `SumTransform` changes the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samplewise.engine.finite import all_finite
from samplewise.errors import TransformError
from samplewise.transforms.numbers import Numbers, PerSample
from samplewise.transforms.reference import Reference

NEEDS = ("losses", "counts", "norms", "batch")


@dataclass(frozen=True, repr=False)
class SampleTransform:
    """Coefficients for samples, from the numbers it needs and nothing else."""

    name: str  # as it is written: clip(1.0)
    formula: str  # what it multiplies a gradient {g} with
    answer: Callable[[Numbers], PerSample] = field(repr=False)
    needs: frozenset[str] = frozenset()  # of losses, counts, norms, batch
    reference: Reference | None = None  # whose dot products it needs
    window: bool = False  # must see all samples of the window at once
    by_parameter: bool = False  # answers with a dict, name -> (B,)
    renormalises: bool = False  # its coefficients count in the denominator too
    positions: int | None = None  # if it depends on a sample's place in the window: how many places it knows

    def __call__(self, numbers: Numbers) -> PerSample:
        """The coefficients, checked."""
        found = self.answer(numbers)
        if not self.by_parameter:
            return self._checked(found, len(numbers), "one coefficient per sample")
        if not isinstance(found, Mapping):
            raise TransformError(f"{self} must answer with a dict name -> (B,); found {type(found).__name__}.")
        return {
            name: self._checked(c, len(numbers), f"one coefficient per sample for {name!r}")
            for name, c in found.items()
        }

    def needed(self, numbers: Numbers) -> Numbers:
        """What it needs of them, and nothing that somebody else has asked for."""
        return Numbers(
            numbers.losses,
            numbers.counts,
            places=numbers.places,
            raw_norms=numbers.raw_norms if "norms" in self.needs else None,
            raw_dots={} if self.reference is None else {self.reference: numbers.raw_dots[self.reference]},
            coefficients=numbers.coefficients,
            shares=numbers.denominators,
        )

    def _checked(self, found: Any, samples: int, what: str) -> Tensor:
        if not isinstance(found, Tensor) or found.shape != (samples,):
            kind = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TransformError(f"{self} must answer with {what}, a tensor of shape ({samples},); found {kind}.")
        found = found.detach()
        found = found if found.is_floating_point() else found.to(torch.get_default_dtype())
        if not all_finite(found):
            bad = int((~found.isfinite()).nonzero()[0])
            raise TransformError(
                f"{self} must answer with finite coefficients; found {found[bad].item()} at sample {bad}."
            )
        return found

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class SumTransform:
    """Acts on the sum of all gradients, in place, once per update and before it is divided."""

    name: str
    formula: str  # what it adds
    act: Callable[[list[Tensor]], None] = field(repr=False)
    additive: bool = False  # whether it adds something that does not depend on the sum
    generator: torch.Generator | None = None  # where it draws random numbers from; None: torch's own, if at all

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class Grouping:
    """Sums the gradients of samples with the same key. What comes after it sees groups instead of samples."""

    name: str
    keys: Callable[[Any], list[Any]] = field(repr=False)  # of a batch: one per sample

    def __repr__(self) -> str:
        return self.name


Transform = SampleTransform | SumTransform | Grouping


def positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive; found {value!r}.")
    return value


def quotient(numerator: float | Tensor, denominator: Tensor) -> Tensor:
    """With 0/0 = 0, and x/0 = 0 too: where there is no gradient nothing is to be scaled."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def function_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else name
