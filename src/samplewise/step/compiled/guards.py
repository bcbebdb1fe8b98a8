"""What must be as it was when an update was compiled: the compiled code knows nothing of later changes.

Tensors may change their values, since the code reads them each time, and so may the optimizer's numbers. Anything else
that the model, the loss function or a transform can look up is compared: attributes of modules, parameters and buffers
by identity, what a function has in its closure or finds by name among the globals, and what is in the lists, dicts and
records (objects of plain values) among those.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import eq
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from samplewise.batches import PLAIN
from samplewise.replay import random_state
from samplewise.step.compiled.formulas import hooks_of
from samplewise.step.compiled.places import (
    Kept,
    generators_in,
    methods_of,
    of_a_library,
    places_of,
    same_things,
    things_in,
    within,
)
from samplewise.step.compiled.problems import CannotCompile

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ANYWHERE = [getattr(nn_module, f"_global{name}") for name in HOOKS if hasattr(nn_module, f"_global{name}")]
OF_EVERY_MODULE = {*vars(nn.Module())} - {"training"}
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LARGE = 100  # entries: of more, only the number is looked at


class Guards:
    """`hold()` is asked before every update that somebody may have done something before: in a few microseconds."""

    def __init__(self, modules: Sequence[nn.Module], functions: Iterable[Any], optimizer: Any):
        self._modules = [module for root in modules for module in root.modules()]
        self._hooks = [*ANYWHERE, *(getattr(m, name) for m in self._modules for name in HOOKS)]
        if any(self._hooks):
            raise CannotCompile("modules have hooks")
        self._fixed, self._numbers = Expression(), Expression()
        self._look_at_modules()
        self._look_around([*functions, *methods_of(self._modules)])
        self._look_at_optimizer(optimizer)

    def _look_at_modules(self) -> None:
        for module in self._modules:
            kept = vars(module)
            self._fixed.items(kept, [key for key in kept if key not in OF_EVERY_MODULE])
            self._fixed.add("len({})", kept)
            for inside in (module._modules, module._parameters, module._buffers):
                self._fixed.items(inside, list(inside))
                if isinstance(module, LISTS) or not of_a_library(type(module)):  # a layer uses what it knows
                    self._fixed.add("len({})", inside)

    def _look_around(self, functions: Sequence[Any]) -> None:
        self._places = places_of(functions)
        for place in self._places:
            self._fixed.add(place.where, place.holder)
        found = [place.read() for place in self._places]
        found += [thing for m in self._modules for name, thing in vars(m).items() if name not in OF_EVERY_MODULE]
        containers = within(found, self._modules)
        for container in containers:
            self._fixed.contents(container)
        self._kept = [Kept(container) for container in (*map(vars, self._modules), *containers)]
        self._generators = generators_in([*found, *(thing for each in containers for thing in things_in(each))])
        self._fixed.add("any({})", self._hooks)
        self._fixed.names(autocast=torch.is_autocast_enabled, autocast_type=torch.get_autocast_dtype)
        self._fixed.add("autocast('cpu') and autocast_type('cpu')")
        self._fixed.add("{}()", torch.get_default_dtype)
        self._fixed.add("{}()", torch.is_grad_enabled)

    def _look_at_optimizer(self, optimizer: Any) -> None:
        self._fixed.add("any({})", hooks_of(optimizer))
        self._fixed.add("{}.get('step')", vars(optimizer))  # somebody may put another one there
        self._fixed.add("len({}.param_groups)", optimizer)
        for group in optimizer.param_groups:
            self._fixed.add("len({})", group["params"])
            self._fixed.items(group, ["params"])
            for key in (key for key in group if key != "params"):
                if isinstance(group[key], Tensor):
                    self._numbers.equal("float({}[" + repr(key) + "])", group)
                else:
                    self._numbers.items(group, [key])
        if hasattr(optimizer, "state"):
            self._fixed.add("{}.state", optimizer)
            self._fixed.equal("[*map(id, {}.values())]", optimizer.state)
            for state in optimizer.state.values():
                self._fixed.items(state, list(state))

    def bind(
        self,
        trained: Sequence[Tensor],
        others: Sequence[Tensor],
        counters: Sequence[Sequence[Any]],
        settings: Callable[[], Any],
    ) -> None:
        """The tensors that the code is given: where they are in memory, and which are trained, must stay. So must
        counters that it takes for one, and settings that it depends on.
        """
        for tensor in (*trained, *others):
            self._fixed.equal("{}.data_ptr()", tensor)
            if isinstance(tensor, nn.Parameter):
                self._fixed.add("{}.requires_grad", tensor)
                if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                    raise CannotCompile("parameters have hooks")
                self._fixed.add("not ({}._backward_hooks or {}._post_accumulate_grad_hooks)", tensor)
        for first, *rest in (cells for cells in counters if cells):
            for other in rest:
                self._fixed.add("{}[0][0] == {}[1][0]", (first, other))
        self._settings, self._set = settings, settings()

    def hold(self) -> bool:
        same = self._fixed.identical() or self._fixed.holds()
        return same and (self._numbers.identical() or self._settings() == self._set)

    def renumbered(self) -> bool:
        """Whether the optimizer's numbers may be others than when it was last asked."""
        return not self._numbers.identical() and self._numbers.note()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """For tracing. Whatever the model notes down about itself meanwhile is not for good, and not compiled."""
        generators = [*self._generators, (random.getstate, random.setstate)]
        numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        generators += [] if numpy is None else [(partial(numpy.get_state, legacy=False), numpy.set_state)]
        restore, drawn = random_state(), [read() for read, _ in generators]
        then = [place.read() for place in self._places]
        try:
            yield
            if str(drawn) != str([read() for read, _ in generators]):
                raise CannotCompile("the model draws random numbers from Python or NumPy")
            if not (self._fixed.identical() or self._fixed.holds()):
                raise CannotCompile("the model changes its own attributes in the forward pass")
        finally:
            restore()
            for (_, write), state in zip(generators, drawn, strict=True):
                write(state)
            for kept in self._kept:
                kept.restore()
            for place, thing in zip(self._places, then, strict=True):
                place.write(thing)


SAME = """
def same():
    try:
        return {}
    except (LookupError, AttributeError, ValueError):  # something has gone
        return False
"""


class Expression:
    """Places to look at and what was found there, checked by one expression: a function call for each would take
    longer than a small update does.
    """

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}
        self._checks: list[tuple[str, str, str]] = []  # where, how to compare, the name of what was there
        self.identical: Callable[[], bool] = self._first

    def names(self, **known: Any) -> None:
        """For use in what is added."""
        self._names.update(known)

    def add(self, where: str, what: Any = None, how: str = "is") -> None:
        """`where` is Python, with {} for `what`."""
        thing, then = f"thing{len(self._names)}", f"then{len(self._names)}"
        self._names[thing] = what
        where = where.replace("{}", thing)
        self._names[then] = eval(where, self._names)
        self._checks.append((where, how, then))
        self.identical = self._first

    def equal(self, where: str, what: Any) -> None:
        self.add(where, what, "==")

    def items(self, container: dict[str, Any], keys: Iterable[str]) -> None:
        for key in keys:
            self.add("{}[" + repr(key) + "]", container)

    def contents(self, container: Any) -> None:
        if len(container) > LARGE:
            self.add("len({})", container)
        else:
            self.names(same_things=same_things, things_in=things_in)
            self.add("[*things_in({})]" if isinstance(container, dict) else "[*{}]", container, "same_things")

    def _first(self) -> bool:
        """Whether all that was found are the very same objects: writes the function that tells, and asks it."""
        checks = " and ".join(
            f"same_things({where}, {then})" if how == "same_things" else f"({where}) {how} {then}"
            for where, how, then in self._checks
        )
        exec(SAME.format(checks or True), self._names)
        self.identical = self._names["same"]
        return self.identical()

    def holds(self) -> bool:
        """The same objects, or plain values that are equal."""
        try:
            now = [eval(where, self._names) for where, _, _ in self._checks]
        except (LookupError, AttributeError, ValueError):
            return False
        then = [(how, self._names[name]) for _, how, name in self._checks]
        alike = all(COMPARED[how](a, b) for a, (how, b) in zip(now, then, strict=True))
        return alike and self.note()

    def note(self) -> bool:
        """What is there now is what was there."""
        self._names.update({then: eval(where, self._names) for where, _, then in self._checks})
        return True


def _alike(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and isinstance(now, PLAIN) and now == then)


def _all_alike(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(map(_alike, now, then))


COMPARED: dict[str, Callable[[Any, Any], bool]] = {"is": _alike, "==": eq, "same_things": _all_alike}
