"""Transforms one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from samplewise.errors import TransformError
from samplewise.transforms.numbers import Numbers, PerSample, joined, split
from samplewise.transforms.reference import Reference
from samplewise.transforms.transform import Grouping, SampleTransform, SumTransform, Transform
from samplewise.transforms.weight import weight

Ask = Callable[[SampleTransform, Numbers], PerSample]


@dataclass(frozen=True, repr=False)
class Stage:
    """Transforms of samples, or of groups, in order."""

    transforms: tuple[SampleTransform, ...] = ()

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(t.needs for t in self.transforms))

    @property
    def references(self) -> list[Reference]:
        return [t.reference for t in self.transforms if t.reference is not None]

    @property
    def measures(self) -> bool:
        """Whether it must know anything of the gradients themselves."""
        return "norms" in self.needs or bool(self.references)

    @property
    def by_parameter(self) -> bool:
        return any(t.by_parameter for t in self.transforms)

    @property
    def window(self) -> bool:
        return any(t.window for t in self.transforms)

    @property
    def counts_places(self) -> bool:
        """Whether it matters where in the window a sample stands."""
        return any(t.positions is not None for t in self.transforms)

    def weigh(self, parts: Sequence[Numbers], ask: Ask = SampleTransform.__call__) -> list[Numbers]:
        """The parts of a window with their coefficients. Each transform sees what the one before it left; `ask` puts
        the question to one that must see the window as a whole.
        """
        parts = list(parts)
        for t in self.transforms:
            found = split(ask(t, joined(parts)), [len(p) for p in parts]) if t.window else [t(p) for p in parts]
            parts = [p.scaled(c, t.renormalises) for p, c in zip(parts, found, strict=True)]
        return parts


@dataclass(frozen=True, repr=False)
class Chain:
    """What happens between "each sample's gradient is known" and "divided": str() says it as a formula."""

    transforms: tuple[Transform, ...]
    samples: Stage
    grouping: Grouping | None
    groups: Stage
    on_sum: tuple[SumTransform, ...]

    @property
    def weighs(self) -> bool:
        """Whether samples have coefficients."""
        return bool(self.samples.transforms or self.grouping)

    @property
    def measures(self) -> bool:
        """Whether it must know the gradients of single samples or groups."""
        return self.samples.measures or self.groups.measures

    @property
    def window(self) -> bool:
        return self.grouping is not None or self.samples.window

    @property
    def references(self) -> list[Reference]:
        return [*self.samples.references, *self.groups.references]

    def directions(self, parameters: Mapping[str, Tensor]) -> dict[Reference, dict[str, Tensor]]:
        return {r: r.direction(parameters) for r in self.references}

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.transforms))})"

    def __str__(self) -> str:
        gradient, below, lines = "g", ["count"], list[str]()
        symbols = (f"c{k}" for k in count(1))
        for t in self.transforms:
            if isinstance(t, Grouping):
                lines.append(f"s = Σ {gradient} over each {t}")
                gradient = "s"
            elif isinstance(t, SampleTransform):
                symbol = next(symbols)
                lines.append(f"{symbol} = {t.formula.replace('{g}', gradient)}")
                gradient = f"{symbol}·{gradient}"
                below = [symbol, *below] if t.renormalises else below
        above = " + ".join([f"Σ {gradient}", *(t.formula for t in self.on_sum)])
        return "\n".join([f"({above}) / Σ {'·'.join(below)}", *lines])


def chain(*transforms: Transform | Chain | Callable[..., Any]) -> Chain:
    """One transform after the other. A plain function is a `weight`."""
    flat = [
        t for given in transforms for t in (given.transforms if isinstance(given, Chain) else (as_transform(given),))
    ]
    before, grouping, after, on_sum = _stages(flat)
    if grouping is not None and any(t.by_parameter for t in before):
        raise TransformError(
            f"what comes before {grouping} must have one coefficient per sample; found one per parameter. "
            "Put clip(by='parameter') after it."
        )
    return Chain(tuple(flat), Stage(tuple(before)), grouping, Stage(tuple(after)), tuple(on_sum))


def as_chain(transforms: Any) -> Chain:
    """What a `Step` was given as its transforms."""
    if isinstance(transforms, Iterable):
        return chain(*transforms)
    return chain(transforms)


def as_transform(given: Any) -> Transform:
    if isinstance(given, (SampleTransform, SumTransform, Grouping)):
        return given
    if callable(given):
        return weight(given)
    raise TransformError(
        f"a transform must be one of clip, weight, drop, normalize, align, group, noise, or a function; "
        f"found {type(given).__name__}."
    )


def _stages(
    flat: Sequence[Transform],
) -> tuple[list[SampleTransform], Grouping | None, list[SampleTransform], list[SumTransform]]:
    """In the only order there is: samples, groups, the sum."""
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
                f"{t} acts on single gradients and must come before the sum; found it after {on_sum[0]}. Swap them."
            )
        if isinstance(t, Grouping):
            if grouping is not None:
                raise TransformError(f"a chain can group once; found {grouping} and {t}. Keep one.")
            grouping = t
        else:
            _check_batch_is_there(t, grouping)
            (before if grouping is None else after).append(t)
    return before, grouping, after, on_sum


def _check_batch_is_there(t: SampleTransform, grouping: Grouping | None) -> None:
    if grouping is not None and "batch" in t.needs:
        raise TransformError(f"{t} looks into the batch and must come before {grouping}; found it after. Swap them.")
