"""What must be as it was when an update was compiled: the compiled code knows nothing of later changes.

Tensors may change their values, since the code reads them each time, and so may the optimizer's numbers. Anything else
that the model, the loss function or a transform can look up is compared: attributes of modules, parameters and buffers
by identity, what a function has in its closure or finds by name among the globals. What lies deeper (the entries of a
list, an attribute of a configuration object) is not seen.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from samplewise.batches import PLAIN
from samplewise.replay import random_state
from samplewise.step.compiled.problems import CannotCompile

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ANYWHERE = [getattr(nn_module, f"_global{name}") for name in HOOKS if hasattr(nn_module, f"_global{name}")]
values, requires_grad, hooks_of = methodcaller("values"), attrgetter("requires_grad"), attrgetter("_backward_hooks")


class Guards:
    """`hold()` is asked before every update that somebody may have done something before: in a few microseconds."""

    def __init__(self, modules: Sequence[nn.Module], functions: Iterable[Any], optimizer: Any):
        every = [module for root in modules for module in root.modules()]
        self._modules = Seen([kept for m in every for kept in (vars(m), m._parameters, m._buffers, m._modules) if kept])
        self._optimizer, self._state = optimizer, getattr(optimizer, "state", {})
        self._states = Seen([self._state, *self._state.values()])
        self._groups = Seen(optimizer.param_groups)
        self._params = [[*map(id, group["params"])] for group in optimizer.param_groups]
        self._named = [look for function in functions for look in looked_up(function)]
        self._found = [look() for look in self._named]
        self._hooks = [*ANYWHERE, *(getattr(m, name) for m in every for name in HOOKS)]
        self._autocast = _autocast()
        if any(self._hooks):
            raise CannotCompile("modules have hooks")

    def bind(self, trained: Sequence[Tensor], others: Sequence[Tensor], settings: Callable[[], Any]) -> None:
        """The tensors that the code is given: where they are in memory, and which are trained, must stay. And settings
        that the code depends on.
        """
        if any(map(hooks_of, trained)):
            raise CannotCompile("parameters have hooks")
        self._trained, self._tensors = list(trained), [*trained, *others]
        self._frozen = [t for t in others if isinstance(t, nn.Parameter)]
        self._places = [*map(Tensor.data_ptr, self._tensors)]
        self._settings, self._set = settings, settings()

    def hold(self) -> bool:
        return (
            [*map(Tensor.data_ptr, self._tensors)] == self._places
            and all(map(requires_grad, self._trained))
            and not any(map(requires_grad, self._frozen))
            and not any(map(hooks_of, self._trained))
            and not any(self._hooks)
            and self._modules.same()
            and getattr(self._optimizer, "state", self._state) is self._state
            and self._states.same()
            and (self._groups.identical() or self._still_set())
            and (not self._named or all(map(_alike, (look() for look in self._named), self._found)))
            and _autocast() == self._autocast
        )

    def _still_set(self) -> bool:
        """Another learning rate is no change."""
        groups = self._optimizer.param_groups
        same = [[*map(id, group["params"])] for group in groups] == self._params and self._settings() == self._set
        if same:
            self._groups = Seen(groups)
        return same

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """For tracing. Whatever the model notes down about itself meanwhile is not for good, and not compiled."""
        restore, python = random_state(), random.getstate()
        numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        drawn = None if numpy is None else numpy.get_state()
        try:
            yield
            if random.getstate() != python or (numpy is not None and str(numpy.get_state()) != str(drawn)):
                raise CannotCompile("the model draws random numbers from Python or NumPy")
            if not self._modules.same():
                raise CannotCompile("the model changes its own attributes in the forward pass")
        finally:
            restore()
            self._modules.restore()


class Seen:
    """Dicts, and what was in them. Mostly the very same objects are still there, which is quickly seen."""

    __slots__ = ("_all", "_dicts", "_kept")

    def __init__(self, dicts: Sequence[dict[Any, Any]]):
        self._dicts = dicts
        self._note()

    def _note(self) -> None:
        self._kept, self._all = [dict(now) for now in self._dicts], self._look()

    def _look(self) -> list[Any]:
        return [*chain.from_iterable(map(values, self._dicts))]

    def identical(self) -> bool:
        now = self._look()
        return len(now) == len(self._all) and all(map(is_, now, self._all))

    def same(self) -> bool:
        """Plain values may be equal instead."""
        if self.identical():
            return True
        same = all(
            now.keys() == then.keys() and all(_alike(value, then[key]) for key, value in now.items())
            for now, then in zip(self._dicts, self._kept, strict=True)
        )
        if same:
            self._note()
        return same

    def restore(self) -> None:
        if not self.identical():
            for now, then in zip(self._dicts, self._kept, strict=True):
                now.clear()
                now.update(then)


def looked_up(function: Any, depth: int = 3) -> Iterator[Callable[[], Any]]:
    """What a function, or one that it calls, finds outside itself, as functions that look again."""
    if isinstance(function, partial):
        yield from looked_up(function.func, depth)
        return
    function = inspect.unwrap(function) if callable(function) else function
    owner = getattr(function, "__self__", None)
    if owner is None and not inspect.isfunction(function) and not isinstance(function, (type, nn.Module)):
        owner, function = function, type(function).__dict__.get("__call__")
    if owner is not None and hasattr(owner, "__dict__") and not isinstance(owner, nn.Module):
        yield from (partial(vars(owner).get, name) for name in vars(owner))
    code = getattr(function, "__code__", None)
    if code is None:
        return
    function = getattr(function, "__func__", function)
    looks = [partial(_content, cell) for cell in function.__closure__ or ()]
    looks += [partial(function.__globals__.get, name) for name in _names(code) if name in function.__globals__]
    yield from looks
    for found in (look() for look in looks if depth > 0):
        if inspect.isfunction(found):
            yield from looked_up(found, depth - 1)


def _names(code: Any) -> set[str]:
    """Global names that the code, or a function inside it, uses."""
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return set(code.co_names).union(*map(_names, inner))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _alike(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and isinstance(now, PLAIN) and now == then)


def _autocast() -> tuple[Any, ...]:
    on = torch.is_autocast_enabled("cpu")
    return on, torch.get_autocast_dtype("cpu") if on else None
