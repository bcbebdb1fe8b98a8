"""Types of transforms, one per stage: a `SampleTransform` returns one coefficient per sample, before gradients are
summed; a `Grouping` sums samples of one group; a `SumTransform` changes the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samplewise.engine.deferred_checks import all_finite, current_checks
from samplewise.errors import TransformError
from samplewise.transforms.stats import PerSample, SampleStats

NEEDS = ("losses", "counts", "norms", "batch")
Direction = Mapping[str, Tensor]  # name of a parameter -> tensor of its shape


class TransformState(ABC):
    """State of a transform that depends on earlier updates. It changes once per update, after the parameters have
    changed: coefficients do not depend on the batches and microbatches that an update is cut into.
    """

    # False in loops of other frameworks, which make an update of several calls of `sw.backward` and commit it.
    commits_each_pass = True

    @abstractmethod
    def values(self, stats: SampleStats) -> Tensor:
        """One value (B,) for each sample, from the results of an update or of a part of it."""

    @abstractmethod
    def commit(self, values: Tensor) -> None:
        """Change the state by the values of all samples of an update, of all ranks."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State as numbers, strings and lists of these."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a state; None: that of a new transform."""


class NonFiniteCoefficientError(TransformError):
    """A transform has returned NaN or infinity for a sample."""


@dataclass(frozen=True, eq=False)
class Reference:
    """Direction in parameter space, recomputed for every window if `source` is a function."""

    source: Direction | Callable[[], Direction]
    unit: bool  # whether the direction is scaled to norm 1

    def __post_init__(self) -> None:
        if not callable(self.source) and not isinstance(self.source, Mapping):
            raise TransformError(
                "reference must be a dict name -> tensor, or a function that returns one; "
                f"found {type(self.source).__name__}."
            )

    def direction(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameter name -> tensor of the parameter's shape; zero if the direction to be scaled is zero."""
        tensors = self.source() if callable(self.source) else self.source
        missing = [name for name, p in parameters.items() if name not in tensors or tensors[name].shape != p.shape]
        if missing:
            raise TransformError(
                "the reference must have a tensor of the same name and shape for every trained parameter; found none "
                f"for {missing[0]!r}. Compute it with sw.gradients(losses, model).mean()."
            )
        direction = {name: tensors[name].detach() for name in parameters}
        if not self.unit:
            return direction
        length = torch.stack([d.norm() for d in direction.values()]).norm()
        return {name: torch.where(length > 0, d / length, 0.0) for name, d in direction.items()}


@dataclass(frozen=True, repr=False)
class SampleTransform:
    """Transform that returns coefficients (B,) for samples, computed from the values that it declares in `needs`."""

    name: str  # as in code: clip(1.0)
    formula: str  # the coefficient of a gradient {g}
    coefficients: Callable[[SampleStats], PerSample] = field(repr=False)
    needs: frozenset[str] = frozenset()  # subset of losses, counts, norms, batch
    reference: Reference | None = None  # direction whose dot products it needs
    window: bool = False  # whether it needs all samples of the window at once
    by_parameter: bool = False  # whether it returns a dict, name -> (B,)
    renormalizes: bool = False  # whether its coefficients also multiply the counts in the denominator
    positions: int | None = None  # number of window positions it has values for; None: independent of the position
    batch_keys: frozenset[Hashable] = frozenset()  # keys of the batch that it reads; none with need "batch": all
    sets_norm: bool = False  # whether it gives every gradient a chosen norm, so that small coefficients are no surprise
    max_norm: float | None = None  # bound of the norm of each gradient (by_parameter: of each part); None: no bound
    state: TransformState | None = None  # what coefficients depend on besides the sample; None: nothing
    drops: bool = False  # whether samples with coefficient 0, and those that are not finite, are left out of an update

    def __call__(self, stats: SampleStats) -> PerSample:
        """Coefficients, after a check of type, shape and finiteness."""
        coefficients = self.coefficients(stats)
        if not self.by_parameter:
            return self._validate(coefficients, stats.losses.shape[0], "one coefficient per sample")
        if not isinstance(coefficients, Mapping):
            kind = type(coefficients).__name__
            raise TransformError(f"{self} must return a dict of parameter names and tensors (B,); found {kind}.")
        return {
            name: self._validate(c, len(stats), f"one coefficient per sample for {name!r}")
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

    def _validate(self, values: Any, samples: int, meaning: str) -> Tensor:
        if not isinstance(values, Tensor) or values.shape != (samples,):
            kind = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise TransformError(f"{self} must return {meaning}, a tensor of shape ({samples},); found {kind}.")
        values = values.detach()
        if not values.is_floating_point():
            values = values.to(torch.get_default_dtype())
        checks = current_checks()
        if checks is not None:
            checks.add(self._check_finite, values)
        elif not all_finite(values):
            self._check_finite(values)  # raises
        return values

    def _check_finite(self, values: Tensor) -> None:
        if not all_finite(values):
            bad = int((~values.isfinite()).nonzero()[0])
            raise NonFiniteCoefficientError(
                f"{self} must return finite coefficients; found {values[bad].item()} at sample {bad}."
            )

    def __repr__(self) -> str:
        return self.name


class UnitTransform(SampleTransform):
    """Factor that converts each sample's gradient to another unit, before the transforms of the user."""


@dataclass(frozen=True, repr=False)
class SumTransform:
    """Transform of the sum of all gradients, in place, once per update, before the division by the denominator."""

    name: str
    formula: str  # the term that it adds
    apply_: Callable[[list[Tensor]], None] = field(repr=False)
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


def quotient(numerator: float | Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 if the denominator is 0: a zero gradient needs no scaling."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def function_name(function: Callable[..., Any]) -> str:
    """Name of a function for formulas; "function" for a lambda."""
    name = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else name
