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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from samplewise.batches import PLAIN
from samplewise.replay import random_state
from samplewise.step.compiled.problems import CannotCompile

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ANYWHERE = [getattr(nn_module, f"_global{name}") for name in HOOKS if hasattr(nn_module, f"_global{name}")]


class Guards:
    """`hold()` is asked before every update that the user may have done something before."""

    def __init__(self, modules: Sequence[nn.Module], functions: Iterable[Any], optimizer: Any):
        every = [module for root in modules for module in root.modules()]
        inside = [kept for m in every for kept in (vars(m), m._parameters, m._buffers, m._modules) if kept]
        self._seen = [Seen(kept) for kept in inside]
        self._named = [look for function in functions for look in looked_up(function)]
        self._found = [look() for look in self._named]
        self._hooks = [*ANYWHERE, *(getattr(m, name) for m in every for name in HOOKS)]
        self._hooks += [
            getattr(optimizer, name, {}) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        ]
        self._optimizer, self._groups = optimizer, [list(g["params"]) for g in optimizer.param_groups]
        self._states = (
            [Seen(optimizer.state), *map(Seen, optimizer.state.values())] if hasattr(optimizer, "state") else []
        )
        self._state = getattr(optimizer, "state", None)
        self._autocast = _autocast()
        self._tensors: list[Tensor] = []
        self._addresses: list[tuple[int, bool]] = []
        if any(self._hooks):
            raise CannotCompile("modules or the optimizer have hooks")

    def bind(self, tensors: Sequence[Tensor], settings: Callable[[], Any]) -> None:
        """The tensors that the code is given: where they are in memory, and whether they are trained, must stay. And
        settings that the code depends on.
        """
        self._settings, self._set = settings, settings()
        if any(t._backward_hooks for t in tensors):
            raise CannotCompile("parameters have hooks")
        self._tensors, self._addresses = list(tensors), [(t.data_ptr(), t.requires_grad) for t in tensors]

    def hold(self) -> bool:
        optimizer = self._optimizer
        return (
            not any(self._hooks)
            and [(t.data_ptr(), t.requires_grad) for t in self._tensors] == self._addresses
            and all(seen.same() for seen in self._seen)
            and getattr(optimizer, "state", None) is self._state
            and all(seen.same() for seen in self._states)
            and all(map(_same_items, (g["params"] for g in optimizer.param_groups), self._groups))
            and len(optimizer.param_groups) == len(self._groups)
            and all(map(_alike, (look() for look in self._named), self._found))
            and not any(t._backward_hooks for t in self._tensors)
            and self._settings() == self._set
            and _autocast() == self._autocast
        )

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
            if not all(seen.same() for seen in self._seen):
                raise CannotCompile("the model changes its own attributes in the forward pass")
        finally:
            restore()
            for seen in self._seen:
                seen.restore()


class Seen:
    """A dict, and what was in it."""

    __slots__ = ("_ids", "_kept", "_now")

    def __init__(self, now: dict[Any, Any]):
        self._now, self._kept = now, dict(now)
        self._ids = [*map(id, now.values())]

    def same(self) -> bool:
        ids = [*map(id, self._now.values())]
        if ids == self._ids:
            return True
        kept = self._kept
        same = self._now.keys() == kept.keys() and all(_alike(value, kept[key]) for key, value in self._now.items())
        if same:
            self._ids, self._kept = ids, dict(self._now)
        return same

    def restore(self) -> None:
        if [*map(id, self._now.values())] != self._ids:
            self._now.clear()
            self._now.update(self._kept)


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


def _same_items(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _autocast() -> tuple[Any, ...]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
