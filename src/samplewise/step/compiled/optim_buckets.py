"""Buckets of parameters that share the scalars of the optimizer's formula, with views of its step counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samplewise.step.compiled.errors import CannotCompile
from samplewise.step.compiled.optim_formulas import Formula, Group
from samplewise.step.compiled.raw_view import raw_view


@dataclass
class OptimBucket:
    """Parameters of one param group with the same step count; they share the scalars of the formula."""

    group: Group
    names: list[str] = field(default_factory=list)
    counters: list[tuple[Any, Tensor]] = field(default_factory=list)  # (view, tensor) of each `step`

    @property
    def step(self) -> float:
        """Current step count; read each time, because uncompiled updates also change it."""
        return self.counters[0][0][0] if self.counters else 0.0


class OptimBuckets:
    """All buckets of an optimizer. `states`: state tensors of the optimizer, by (parameter name, state name)."""

    def __init__(self, formula: Formula, optimizer: Any, names: dict[int, str]):
        """`names`: names of the parameters that have gradients, by id of the parameter."""
        self.formula = formula
        self.states: dict[tuple[str, str], Tensor] = {}
        self._all: list[OptimBucket] = []
        for group in optimizer.param_groups:
            found: dict[float, OptimBucket] = {}
            for p in (p for p in group["params"] if id(p) in names):
                state = optimizer.state.get(p, {}) if hasattr(optimizer, "state") else {}
                self._keep(names[id(p)], p, group, state)
                step = state.get("step")
                count = 0.0 if step is None else float(step)
                bucket = found.setdefault(count, OptimBucket(group))
                bucket.names.append(names[id(p)])
                bucket.counters += [] if step is None else [(raw_view(step), step)]
            self._all += found.values()
        self.width = len(self.numbers())

    def _keep(self, name: str, p: Tensor, group: Group, state: dict[str, Any]) -> None:
        for key in self.formula.states(group):
            kept = state.get(key)
            if not isinstance(kept, Tensor) or kept.shape != p.shape:
                raise CannotCompile("a parameter has no optimizer state yet")
            self.states[name, key] = kept

    def numbers(self, updates: int = 1) -> list[float]:
        """Scalars of the formula for the next `updates` updates: per update, all buckets in order."""
        found: list[float] = []
        for k in range(updates):
            for bucket in self._all:
                found += self.formula.numbers(bucket.group, bucket.step + 1 + k)
        return found

    def advance(self, updates: int) -> None:
        """Add `updates` to the optimizer's step counters."""
        for bucket in self._all:
            step = bucket.step + updates
            for cell, _ in bucket.counters:
                cell[0] = step

    def apply(
        self,
        trained: dict[str, Tensor],
        gradients: dict[str, Tensor],
        states: dict[tuple[str, str], Tensor],
        numbers: Tensor,
    ) -> tuple[dict[str, Tensor], dict[tuple[str, str], Tensor]]:
        """Return new parameters and new optimizer states; `numbers` are the scalars of one update."""
        new = dict(trained)
        kept = dict(states)
        start = 0
        for bucket in self._all:
            width = len(self.formula.numbers(bucket.group, 1))
            some = numbers[start : start + width].unbind()
            start += width
            for name in bucket.names:
                mine = {key: tensor for (owner, key), tensor in states.items() if owner == name}
                new[name], changed = self._applied(bucket, trained[name], gradients[name], mine, some)
                kept.update({(name, key): tensor for key, tensor in changed.items()})
        return new, kept

    def _applied(
        self, bucket: OptimBucket, p: Tensor, g: Tensor, state: dict[str, Tensor], numbers: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Apply the formula to one parameter, at least in float32: 0.999 rounds to 1 in bfloat16."""
        kind = torch.promote_types(p.dtype, torch.float32)
        wide = {key: tensor.to(kind) for key, tensor in state.items()}
        new, changed = self.formula.apply(
            bucket.group, p.to(kind), g.to(kind), wide, [number.to(kind) for number in numbers]
        )
        return new.to(p.dtype), {key: tensor.to(state[key].dtype) for key, tensor in changed.items()}

    def shape(self) -> Sequence[Any]:
        """Optimizer settings that are compiled into the code; a change requires recompilation."""
        tensors = [isinstance(value, Tensor) for bucket in self._all for value in bucket.group.values()]
        return [self.formula.shape_of(bucket.group) for bucket in self._all] + tensors

    @property
    def counters(self) -> list[list[Any]]:
        """Views of the step counters of each bucket; within a bucket they must stay equal."""
        return [[cell for cell, _ in bucket.counters] for bucket in self._all]
