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
OF_EVERY_MODULE = {*vars(nn.Module())} - {"training"}


class Guards:
    """`hold()` is asked before every update that somebody may have done something before: in a few microseconds."""

    def __init__(self, modules: Sequence[nn.Module], functions: Iterable[Any], optimizer: Any):
        self._modules = [module for root in modules for module in root.modules()]
        self._kept = [dict(vars(module)) for module in self._modules]
        self._hooks = [*ANYWHERE, *(getattr(m, name) for m in self._modules for name in HOOKS)]
        if any(self._hooks):
            raise CannotCompile("modules have hooks")
        self._fixed, self._numbers = Expression(), Expression()
        for module in self._modules:
            self._fixed.items(vars(module), [key for key in vars(module) if key not in OF_EVERY_MODULE])
            for kept in (module._modules, module._parameters, module._buffers):
                self._fixed.items(kept, list(kept))
        for look in (look for function in functions for look in looked_up(function)):
            self._fixed.add("{}()", look)
        self._fixed.add("any({})", self._hooks)
        self._fixed.names(autocast=torch.is_autocast_enabled, autocast_type=torch.get_autocast_dtype)
        self._fixed.add("autocast('cpu') and autocast_type('cpu')")
        self._fixed.add("len({}.param_groups)", optimizer)
        for group in optimizer.param_groups:
            self._fixed.add("len({})", group["params"])
            self._fixed.items(group, ["params"])
            self._numbers.items(group, [key for key in group if key != "params"])
        if hasattr(optimizer, "state"):
            self._fixed.add("{}.state", optimizer)
            self._fixed.equal("[*map(id, {}.values())]", optimizer.state)
            for state in optimizer.state.values():
                self._fixed.items(state, list(state))

    def bind(self, trained: Sequence[Tensor], others: Sequence[Tensor], settings: Callable[[], Any]) -> None:
        """The tensors that the code is given: where they are in memory, and which are trained, must stay. And settings
        that the code depends on.
        """
        for tensor in (*trained, *others):
            self._fixed.equal("{}.data_ptr()", tensor)
            if isinstance(tensor, nn.Parameter):
                self._fixed.add("{}.requires_grad", tensor)
                if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                    raise CannotCompile("parameters have hooks")
                self._fixed.add("{}._backward_hooks", tensor)
                self._fixed.add("{}._post_accumulate_grad_hooks", tensor)
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
        restore, python = random_state(), random.getstate()
        numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        drawn = None if numpy is None else numpy.get_state()
        try:
            yield
            if random.getstate() != python or (numpy is not None and str(numpy.get_state()) != str(drawn)):
                raise CannotCompile("the model draws random numbers from Python or NumPy")
            if not (self._fixed.identical() or self._fixed.holds()):
                raise CannotCompile("the model changes its own attributes in the forward pass")
        finally:
            restore()
            for module, then in zip(self._modules, self._kept, strict=True):
                if [*map(id, vars(module).values())] != [*map(id, then.values())]:
                    vars(module).clear()
                    vars(module).update(then)


SAME = """
def same():
    try:
        return {}
    except (LookupError, AttributeError):  # something has gone
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

    def _first(self) -> bool:
        """Whether all that was found are the very same objects: writes the function that tells, and asks it."""
        checks = " and ".join(f"({where}) {how} {then}" for where, how, then in self._checks) or "True"
        exec(SAME.format(checks), self._names)
        self.identical = self._names["same"]
        return self.identical()

    def holds(self) -> bool:
        """The same objects, or plain values that are equal."""
        try:
            now = [eval(where, self._names) for where, _, _ in self._checks]
        except (LookupError, AttributeError):
            return False
        then = [(how, self._names[name]) for _, how, name in self._checks]
        alike = all(a == b if how == "==" else _alike(a, b) for a, (how, b) in zip(now, then, strict=True))
        return alike and self.note()

    def note(self) -> bool:
        """What is there now is what was there."""
        self._names.update({then: eval(where, self._names) for where, _, then in self._checks})
        return True


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
