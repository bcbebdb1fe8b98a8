"""Python state that the model, loss function and transforms can read besides parameters.

Closure variables, globals and attributes, and the lists, dicts and records (objects with plain values) among them.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.core.batches import PLAIN
from samplewise.core.snapshot import RandomState

CONTAINERS = (dict, list, tuple, set, deque)
VALUES = (*PLAIN, *CONTAINERS, Tensor, torch.dtype, torch.device)
DEPTH = 4  # maximum nesting of containers


class Variable(NamedTuple):
    """Reference to a closure variable, a dict entry (a global variable or an attribute) or an attribute of a class."""

    holder: Any
    name: str

    @property
    def where(self) -> str:
        """Python expression that reads the variable, with {} for the holder."""
        if isinstance(self.holder, CellType):
            return "{}.cell_contents"
        return ("vars({})" if isinstance(self.holder, type) else "{}") + f"[{self.name!r}]"

    def read(self) -> Any:
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents
        return (vars(self.holder) if isinstance(self.holder, type) else self.holder)[self.name]

    def write(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            if vars(self.holder).get(self.name) is not value:
                setattr(self.holder, self.name, value)
        else:
            self.holder[self.name] = value


def variables_of(functions: Iterable[Any]) -> list[Variable]:
    """References to all variables that the functions look up, without duplicates."""
    found = {
        (id(variable.holder), variable.name): variable for function in functions for variable in looked_up(function)
    }
    return list(found.values())


def methods_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Methods of the modules' user-defined classes, without __init__."""
    ours = _user_classes(modules)
    own = [(name, method) for kind in ours for name, method in vars(kind).items() if name != "__init__"]
    return [method for _, method in own if inspect.isfunction(method)]


def class_attributes_of(modules: Iterable[nn.Module]) -> list[Variable]:
    """References to the attributes and methods of the modules' user-defined classes, without those of the language."""
    ours = _user_classes(modules)
    return [Variable(kind, name) for kind in ours for name in vars(kind) if not name.startswith(("__", "_abc_"))]


def _user_classes(modules: Iterable[nn.Module]) -> list[type]:
    kinds: dict[type, None] = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    return [kind for kind in kinds if not is_library_class(kind) and kind is not object]


def looked_up(function: Any, depth: int = 3) -> Iterator[Variable]:
    """References to variables outside a function that it, or functions it calls up to `depth` levels deep, look up."""
    if isinstance(function, partial):
        yield from looked_up(function.func, depth)
        return
    function = inspect.unwrap(function) if callable(function) else function
    owner = getattr(function, "__self__", None)
    if owner is None and not inspect.isfunction(function) and not isinstance(function, (type, nn.Module)):
        owner, function = function, type(function).__dict__.get("__call__")
    if owner is not None and hasattr(owner, "__dict__") and not isinstance(owner, nn.Module):
        yield from (Variable(vars(owner), name) for name in vars(owner))
    code = getattr(function, "__code__", None)
    if code is None:
        return
    function = getattr(function, "__func__", function)
    variables = [Variable(cell, "") for cell in function.__closure__ or () if _is_filled(cell)]
    variables += [Variable(function.__globals__, name) for name in _names(code) if name in function.__globals__]
    modules = [module for variable in variables if inspect.ismodule(module := variable.read())]
    variables = [variable for variable in variables if not inspect.ismodule(variable.read())]
    there = [
        Variable(vars(m), name) for m in modules if not is_library_module(m) for name in _names(code) if name in vars(m)
    ]
    variables += [
        variable
        for variable in there
        if isinstance(variable.read(), (*PLAIN, Tensor)) or inspect.isfunction(variable.read())
    ]
    yield from variables
    for found in (variable.read() for variable in variables if depth > 0):
        if inspect.isfunction(found):
            yield from looked_up(found, depth - 1)


def _names(code: Any) -> set[str]:
    """Global names used by a code object and its nested functions."""
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return set(code.co_names).union(*map(_names, inner))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# --- containers -------------------------------------------------------------------------------------------------------


def containers_in(values: Iterable[Any], known: Sequence[nn.Module], depth: int = DEPTH) -> list[Any]:
    """Containers among the values and nested in them, without duplicates.

    A record, or a module that is not in `known`, contributes the dict of its attributes.
    """
    found: dict[int, Any] = {}
    seen = {id(module) for module in known} | {id(sys.modules)}  # compiling imports modules, which changes sys.modules

    def go(value: Any, depth: int) -> None:
        if depth == 0 or id(value) in seen or isinstance(value, (*PLAIN, Tensor)):
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            inside: Any = [vars(value), *vars(value).values()]
            depth += 1  # nesting of modules is not limited
        elif isinstance(value, CONTAINERS):
            found[id(value)] = value
            inside = value.values() if isinstance(value, dict) else value
        else:
            inside = [vars(value)] if _is_record(value) else ()
        for each in list(inside):
            go(each, depth - 1)

    for value in values:
        go(value, depth)
    return list(found.values())


def _is_record(value: Any, depth: int = 3) -> bool:
    """Test for an object with plain values and records only, such as a configuration."""
    if depth == 0 or not hasattr(value, "__dict__") or callable(value) or is_library_class(type(value)):
        return False
    return all(isinstance(value, VALUES) or _is_record(value, depth - 1) for value in vars(value).values())


def is_library_class(kind: type) -> bool:
    """Test for a class of torch or samplewise, which does not read the user's globals."""
    return _is_library_name(kind.__module__)


def is_library_module(module: Any) -> bool:
    """Test for a Python module of torch or samplewise."""
    return _is_library_name(module.__name__)


def _is_library_name(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "samplewise")


class ContainerSnapshot:
    """Snapshot of the contents of a container; `restore` puts them back."""

    def __init__(self, container: Any):
        self._container = container
        self._then = list(items_of(container))

    def restore(self) -> None:
        c = self._container
        then = self._then
        if isinstance(c, tuple) or all_identical(list(items_of(c)), then):
            return
        c.clear()
        if isinstance(c, dict):
            c.update(zip(then[::2], then[1::2], strict=True))
        elif isinstance(c, set):
            c.update(then)
        else:
            c.extend(then)


def items_of(container: Any) -> Iterable[Any]:
    """Items of a container; for a dict, keys and values alternately."""
    if isinstance(container, dict):
        return (value for pair in container.items() for value in pair)
    return container


def all_identical(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Test whether two sequences hold identical objects."""
    return len(now) == len(then) and all(map(is_, now, then))


# --- random number generators -----------------------------------------------------------------------------------------


def generators_in(values: Iterable[Any]) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Pairs (get_state, set_state) of the Python and NumPy generators among the values."""
    found: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
    for value in values:
        if isinstance(value, random.Random):
            found.append((value.getstate, value.setstate))
        elif hasattr(type(value), "bit_generator"):  # NumPy's
            bits = value.bit_generator
            found.append((partial(getattr, bits, "state"), partial(setattr, bits, "state")))
    return found


def _is_callable_object(value: Any) -> bool:
    """True for an object of a user's class with __call__."""
    return callable(value) and hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, nn.Module))


def _is_state(value: Any) -> bool:
    """True for a tensor that a function may change in place. A parameter changes in updates only, and may be large."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


@contextmanager
def state_restored(functions: Iterable[Any]) -> Iterator[None]:
    """Context manager for additional calls of these functions: on exit, restores the variables that they look up, the
    containers and tensors among and inside these, and the random generators. Parameters are not restored.
    """
    variables = variables_of(functions)
    variables += variables_of(v for variable in variables if _is_callable_object(v := variable.read()))
    values = [variable.read() for variable in variables]
    inside = containers_in(values, known=())
    containers = [ContainerSnapshot(container) for container in inside]
    found = {id(value): value for part in (values, *map(items_of, inside)) for value in part if _is_state(value)}
    tensors = [(tensor, tensor.detach().clone()) for tensor in found.values()]
    generators = [(write, read()) for read, write in generators_in(values)]
    torch_generators = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
    random_state = RandomState()
    try:
        yield
    finally:
        random_state.restore()
        for generator, state in torch_generators:
            generator.set_state(state)
        for write, state in generators:
            write(state)
        for container in containers:
            container.restore()
        for variable, value in zip(variables, values, strict=True):
            variable.write(value)
        for tensor, content in tensors:
            if not torch.equal(tensor.detach(), content):
                tensor.detach().copy_(content)
