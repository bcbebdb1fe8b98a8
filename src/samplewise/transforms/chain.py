"""Chains of transforms: their stages, what they need and compute, the denominator, and the sensitivity of the sum."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import sqrt
from typing import Any, Literal

from torch import Tensor

from samplewise.core.text import plural
from samplewise.engine.gradients import Gradients
from samplewise.errors import TransformError
from samplewise.transforms.stats import PerSample, SampleStats, concatenate, split_values
from samplewise.transforms.transform import (
    Grouping,
    Reference,
    SampleTransform,
    SumTransform,
    Transform,
    TransformState,
    UnitTransform,
)
from samplewise.transforms.weight import weight

WindowCall = Callable[[SampleTransform, SampleStats], PerSample]


@dataclass(frozen=True, repr=False)
class Stage:
    """Transforms of samples or of groups, applied in order."""

    transforms: tuple[SampleTransform, ...] = ()

    @cached_property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(t.needs for t in self.transforms))

    @cached_property
    def references(self) -> list[Reference]:
        return [t.reference for t in self.transforms if t.reference is not None]

    @cached_property
    def measures(self) -> bool:
        """True if a transform needs norms or dot products of gradients."""
        return "norms" in self.needs or bool(self.references)

    @cached_property
    def by_parameter(self) -> bool:
        return any(t.by_parameter for t in self.transforms)

    @cached_property
    def window(self) -> bool:
        return any(t.window for t in self.transforms)

    @cached_property
    def uses_positions(self) -> bool:
        """True if a transform depends on the positions of samples in the window."""
        return any(t.positions is not None for t in self.transforms)

    def check_positions(self, number: int, unit: str = "sample") -> None:
        """Raise TransformError if a transform has values for another number of samples, or of groups, than the
        `number` of the window.
        """
        for t in self.transforms:
            if t.positions not in (None, number):
                remedy = (
                    "Pass index=, the key of the batch with the sample indices, if the tensor has one value for each "
                    "sample of the dataset; or set Step(samples=) to the number of values, with tail='drop' or "
                    "'carry' if the last window of a loader is shorter."
                )
                if unit == "group":
                    remedy = "Weigh the samples before group(), with index= or a key of the batch."
                raise TransformError(
                    f"{t} must have one value for each {unit} of the window; "
                    f"found a window of {plural(number, unit)}. {remedy}"
                )

    def measure(
        self,
        g: Gradients,
        stats: SampleStats,
        directions: Mapping[Reference, Mapping[str, Tensor]],
        norms: bool,
        scale: float | Tensor = 1.0,
    ) -> None:
        """Add the norms and dots that this stage needs to `stats`, divided by `scale`. `norms`: add norms anyway."""
        by: Literal["parameter"] | None = "parameter" if self.by_parameter else None
        if norms or "norms" in self.needs:
            stats.raw_norms = g.norms(by=by)
        if self.references:
            stats.raw_dots = {r: g.dot(directions[r], by=by) for r in self.references}
        if isinstance(scale, Tensor) or scale != 1:
            if stats.raw_norms is not None:
                stats.raw_norms = _divide(stats.raw_norms, scale)
            stats.raw_dots = {r: _divide(dots, scale) for r, dots in stats.raw_dots.items()}

    def weigh(self, parts: Sequence[SampleStats], call: WindowCall = SampleTransform.__call__) -> list[SampleStats]:
        """The parts of a window with their coefficients. Each transform gets the results of the previous one. `call`
        calls a transform that needs the whole window.
        """
        weighted = list(parts)
        for t in self.transforms:
            if t.window:
                coefficients = split_values(call(t, concatenate(weighted)), [len(part) for part in weighted])
            for k, part in enumerate(weighted):
                weighted[k] = part.scaled(coefficients[k] if t.window else t(part), t.renormalizes, t.drops)
        return weighted


class Divisor:
    """Public constant by which the sum of an update is divided. It may be set later than the chain that contains it:
    the default of a private step depends on the size of the dataset.
    """

    def __init__(self, value: float | None = None):
        self.value = value

    def __str__(self) -> str:
        return "constant" if self.value is None else f"{self.value:.6g}"

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Chain:
    """Sequence of transforms between per-sample gradients and the division by the denominator. str() is its formula."""

    transforms: tuple[Transform, ...]
    samples: Stage
    grouping: Grouping | None
    groups: Stage
    on_sum: tuple[SumTransform, ...]
    divisor: Divisor | None = None  # constant denominator of every update; None: the sum of the counts

    @cached_property
    def weighs(self) -> bool:
        """True if samples or groups have coefficients."""
        return bool(self.samples.transforms or self.grouping)

    @cached_property
    def measures(self) -> bool:
        """True if a transform needs norms or dot products of gradients of single samples or groups."""
        return self.samples.measures or self.groups.measures

    @cached_property
    def window(self) -> bool:
        """True if the whole window must be computed before its gradients are summed."""
        return self.grouping is not None or self.samples.window

    @cached_property
    def states(self) -> list[TransformState]:
        return [t.state for t in self.samples.transforms if t.state is not None]

    @cached_property
    def drops(self) -> bool:
        """True if samples may be left out of an update."""
        return any(t.drops for t in self.samples.transforms)

    @cached_property
    def references(self) -> list[Reference]:
        return [*self.samples.references, *self.groups.references]

    @cached_property
    def batch_keys(self) -> frozenset[Hashable]:
        """Keys of the batch that transforms read by key."""
        readers: list[SampleTransform | Grouping] = list(self.samples.transforms)
        if self.grouping is not None:
            readers.append(self.grouping)
        return frozenset().union(*(reader.batch_keys for reader in readers))

    @cached_property
    def reads_whole_batch(self) -> bool:
        """True if a function gets the batch, and may read any of its columns."""
        functions = [t for t in self.samples.transforms if "batch" in t.needs and not t.batch_keys]
        return bool(functions) or (self.grouping is not None and not self.grouping.batch_keys)

    @property
    def sensitivity(self) -> float:
        """Largest norm by which adding or removing one sample (with `group`: one group) changes the sum.

        Raises TransformError if there is no such bound, or if it depends on the number of parameters.
        """
        return sensitivity(self)

    def directions(self, parameters: Mapping[str, Tensor]) -> dict[Reference, dict[str, Tensor]]:
        """Direction of each reference, as a dict from parameter name to tensor."""
        return {r: r.direction(parameters) for r in self.references}

    def state_dict(self) -> list[dict[str, Any]]:
        """States of the transforms that have one, in their order."""
        return [state.state_dict() for state in self.states]

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]] | None) -> None:
        """Restore the states; None, or another number of them, as after a change of the transforms: new ones."""
        for k, state in enumerate(self.states):
            state.load_state_dict(saved[k] if saved is not None and len(saved) == len(self.states) else None)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.transforms))})"

    def __str__(self) -> str:
        gradient = "g"
        below = ["count"]
        lines: list[str] = []
        symbols = (f"c{k}" for k in count(1))
        for t in self.transforms:
            if isinstance(t, Grouping):
                lines.append(f"s = Σ {gradient} over each {t}")
                gradient = "s"
            elif isinstance(t, SampleTransform):
                symbol = next(symbols)
                lines.append(f"{symbol} = {t.formula.replace('{g}', gradient)}")
                gradient = f"{symbol}·{gradient}"
                below = [symbol, *below] if t.renormalizes else below
        above = " + ".join([f"Σ {gradient}", *(t.formula for t in self.on_sum)])
        denominator = f"Σ {'·'.join(below)}" if self.divisor is None else str(self.divisor)
        return "\n".join([f"({above}) / {denominator}", *lines])


def chain(*transforms: Transform | Chain | Callable[..., Tensor]) -> Chain:
    """Combine transforms into one, applied in order. A plain function is a `weight`."""
    flat: list[Transform] = []
    for element in transforms:
        flat += element.transforms if isinstance(element, Chain) else [as_transform(element)]
    before, grouping, after, on_sum = _stages(flat)
    if grouping is not None and any(t.by_parameter for t in before):
        raise TransformError(
            f"transforms before {grouping} must give one coefficient per sample; found one per parameter. "
            "Put clip(by='parameter') after it."
        )
    _check_drops(before, grouping, after)
    return Chain(tuple(flat), Stage(tuple(before)), grouping, Stage(tuple(after)), tuple(on_sum))


Element = Transform | Chain | Callable[..., Tensor]  # a function that returns weights (B,), see `weight`
Transforms = Element | Iterable[Element]  # what users pass


def as_chain(transforms: Transforms) -> Chain:
    """Chain from the `transforms` argument of `Step`: a transform, or an iterable of transforms."""
    return chain(*transforms) if isinstance(transforms, Iterable) else chain(transforms)


def as_transform(element: Any) -> Transform:
    """The transform itself, or `weight` of a function."""
    if isinstance(element, (SampleTransform, SumTransform, Grouping)):
        return element
    if getattr(element, "__module__", "").startswith("samplewise.transforms."):
        raise TransformError(
            f"a transform must be the result of a call, such as sw.clip(1.0); found the function {element.__name__}. "
            f"Call sw.{element.__name__}(...)."
        )
    if callable(element):
        return weight(element)
    raise TransformError(
        f"a transform must be one of clip, weight, drop, normalize, align, guard, group, noise, or a function; "
        f"found {type(element).__name__}."
    )


def _stages(
    flat: Sequence[Transform],
) -> tuple[list[SampleTransform], Grouping | None, list[SampleTransform], list[SumTransform]]:
    """Split into transforms of samples, grouping, transforms of groups, transforms of the sum; raise for any other
    order.
    """
    before: list[SampleTransform] = []
    after: list[SampleTransform] = []
    on_sum: list[SumTransform] = []
    grouping: Grouping | None = None
    for t in flat:
        if isinstance(t, SumTransform):
            on_sum.append(t)
            continue
        if on_sum:
            raise TransformError(
                f"{t} acts on per-sample gradients and must come before the sum; found it after {on_sum[0]}. Swap them."
            )
        if isinstance(t, Grouping):
            if grouping is not None:
                raise TransformError(f"a chain must have at most one group(); found {grouping} and {t}. Keep one.")
            grouping = t
        else:
            if grouping is not None and "batch" in t.needs:
                raise TransformError(f"{t} reads the batch and must come before {grouping}; found it after. Swap them.")
            (before if grouping is None else after).append(t)
    return before, grouping, after, on_sum


def _check_drops(
    before: Sequence[SampleTransform], grouping: Grouping | None, after: Sequence[SampleTransform]
) -> None:
    """Raise unless a transform that drops samples comes first, and all others need single samples only."""
    drop = next((t for t in (*before, *after) if t.drops), None)
    if drop is None:
        return
    first = next(t for t in (*before, *after) if not isinstance(t, UnitTransform))
    if first is not drop:
        raise TransformError(
            f"{drop} must be the first transform, because its bounds are norms before any transform; found {first} "
            "before it. Put it first."
        )
    others = [t for t in (*before, *after) if t is not drop]
    misfits = [t for t in others if t.window or t.by_parameter or t.positions is not None or t.drops]
    if grouping is not None or misfits:
        raise TransformError(
            f"{drop} must be combined with transforms that give each sample one coefficient, without the rest of the "
            f"window; found {grouping or misfits[0]}. Leave one of them out."
        )


def _divide(values: PerSample, scale: float | Tensor) -> PerSample:
    return values / scale if isinstance(values, Tensor) else {name: v / scale for name, v in values.items()}


# --- sensitivity -----------------------------------------------------------------------------------------------------

RULE = "the sum of a chain has a bounded sensitivity only if"


def sensitivity(chain: Chain, parameters: int | None = None) -> float:
    """Largest norm by which adding or removing one sample, or one group, changes the sum. `parameters`: number of
    parameters, needed for clip(by="parameter").

    The bound needs two properties. The last transform of single gradients bounds their norm (`clip`). And the
    coefficient of a sample does not depend on other samples: otherwise adding one would also change the terms of the
    others.
    """
    for transform in (*chain.samples.transforms, *chain.groups.transforms):
        _check_alone(transform)
    last = (chain.samples if chain.grouping is None else chain.groups).transforms[-1:]
    if not last or last[0].max_norm is None:
        end = f"{last[0]} at its end" if last else "none"
        raise TransformError(
            f"{RULE} its last transform before the sum is a clip of the norm; found {end}. Put sw.clip(C) last."
        )
    bound = last[0].max_norm
    if not last[0].by_parameter:
        return bound
    if parameters is None:
        raise TransformError(
            f"the sensitivity of {last[0]} is {bound} × √(number of parameters); found no number of parameters. Use "
            "samplewise.transforms.chain.sensitivity(chain, parameters)."
        )
    return bound * sqrt(parameters)


def _check_alone(transform: SampleTransform) -> None:
    """Raise unless the coefficient of a sample depends on this sample only."""
    reason = None
    if transform.state is not None:
        reason = "compares a sample with those of earlier updates"
    elif transform.renormalizes:
        reason = "divides by the weights of all samples"
    elif transform.window:
        reason = "compares a sample with the others of its window"
    elif transform.reference is not None:
        reason = "compares gradients with a reference, which may depend on private samples"
    elif transform.positions is not None:
        reason = "depends on the positions of samples in the window"
    if reason is not None:
        raise TransformError(
            f"{RULE} the weight of a sample depends on this sample alone; found {transform}, which {reason}. Leave it "
            "out."
        )
