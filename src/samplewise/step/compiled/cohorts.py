"""Which numbers of the optimizer's formula go to which parameter, and where the optimizer counts its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samplewise.step.compiled.cells import cells
from samplewise.step.compiled.formulas import Formula, Group
from samplewise.step.compiled.problems import CannotCompile


@dataclass
class Cohort:
    """Parameters of one group that have made equally many steps: they share the numbers of the formula."""

    group: Group
    names: list[str] = field(default_factory=list)
    counters: list[tuple[Any, Tensor]] = field(default_factory=list)  # the optimizer's own counts

    @property
    def step(self) -> float:
        """Read again each time: others may have made some."""
        return self.counters[0][0][0] if self.counters else 0.0


class Cohorts:
    """`states`: the tensors that the optimizer keeps, by parameter and name."""

    def __init__(self, formula: Formula, optimizer: Any, names: dict[int, str]):
        """`names` are those of the parameters that have gradients, by id."""
        self.formula = formula
        self.states: dict[tuple[str, str], Tensor] = {}
        self._all: list[Cohort] = []
        for group in optimizer.param_groups:
            found: dict[float, Cohort] = {}
            for p in (p for p in group["params"] if id(p) in names):
                state = optimizer.state.get(p, {}) if hasattr(optimizer, "state") else {}
                self._keep(names[id(p)], p, group, state)
                step = state.get("step")
                count = 0.0 if step is None else float(step)
                cohort = found.setdefault(count, Cohort(group))
                cohort.names.append(names[id(p)])
                cohort.counters += [] if step is None else [(cells(step), step)]
            self._all += found.values()
        self.width = len(self.numbers())

    def _keep(self, name: str, p: Tensor, group: Group, state: dict[str, Any]) -> None:
        for key in self.formula.states(group):
            kept = state.get(key)
            if not isinstance(kept, Tensor) or kept.shape != p.shape:
                raise CannotCompile("the optimizer has no state for some parameter yet")
            self.states[name, key] = kept

    def numbers(self, updates: int = 1) -> list[float]:
        """For the next updates, one after the other."""
        return [
            number
            for k in range(updates)
            for c in self._all
            for number in self.formula.numbers(c.group, c.step + 1 + k)
        ]

    def advance(self, updates: int) -> None:
        for cohort in self._all:
            step = cohort.step + updates
            for cell, _ in cohort.counters:
                cell[0] = step

    def apply(
        self,
        trained: dict[str, Tensor],
        gradients: dict[str, Tensor],
        states: dict[tuple[str, str], Tensor],
        numbers: Tensor,
    ) -> tuple[dict[str, Tensor], dict[tuple[str, str], Tensor]]:
        """New parameters and new states."""
        new, kept, start = dict(trained), dict(states), 0
        for cohort in self._all:
            width = len(self.formula.numbers(cohort.group, 1))
            some = numbers[start : start + width].unbind()
            start += width
            for name in cohort.names:
                mine = {key: tensor for (owner, key), tensor in states.items() if owner == name}
                new[name], changed = self._applied(cohort, trained[name], gradients[name], mine, some)
                kept.update({(name, key): tensor for key, tensor in changed.items()})
        return new, kept

    def _applied(
        self, cohort: Cohort, p: Tensor, g: Tensor, state: dict[str, Tensor], numbers: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """In float32 at least: 0.999 is 1 in bfloat16."""
        kind = torch.promote_types(p.dtype, torch.float32)
        wide = {key: tensor.to(kind) for key, tensor in state.items()}
        new, changed = self.formula.apply(
            cohort.group, p.to(kind), g.to(kind), wide, [number.to(kind) for number in numbers]
        )
        return new.to(p.dtype), {key: tensor.to(state[key].dtype) for key, tensor in changed.items()}

    def shape(self) -> Sequence[Any]:
        """What the code depends on."""
        tensors = [isinstance(value, Tensor) for cohort in self._all for value in cohort.group.values()]
        return [self.formula.shape_of(cohort.group) for cohort in self._all] + tensors

    @property
    def counters(self) -> list[list[Any]]:
        """The counts of each cohort, which are one number."""
        return [[cell for cell, _ in cohort.counters] for cohort in self._all]
