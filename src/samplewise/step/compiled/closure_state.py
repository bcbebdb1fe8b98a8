"""Python state that the model, loss function and transforms can read besides parameters.

Closure variables, globals and attributes, and the lists, dicts and records (objects with plain values) among them.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.core.batches import PLAIN

CONTAINERS = (dict, list, tuple, set, deque)
VALUES = (*PLAIN, *CONTAINERS, Tensor, torch.dtype, torch.device)
DEPTH = 4  # maximum nesting of containers


class Variable(NamedTuple):
    """Reference to a closure variable or a dict entry (a global variable or an attribute)."""

    holder: Any
    name: str

    @property
    def where(self) -> str:
        """Python expression that reads the variable, with {} for the holder."""
        return "{}.cell_contents" if isinstance(self.holder, CellType) else f"{{}}[{self.name!r}]"

    def read(self) -> Any:
        return self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder[self.name]

    def write(self, thing: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = thing
        else:
            self.holder[self.name] = thing


def places_of(functions: Iterable[Any]) -> list[Variable]:
    """References to all variables that the functions look up, without duplicates."""
    found = {(id(place.holder), place.name): place for function in functions for place in looked_up(function)}
    return list(found.values())


def methods_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Methods of the modules' user-defined classes, without __init__."""
    kinds: dict[type, None] = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    ours = [kind for kind in kinds if not of_a_library(kind) and kind is not object]
    own = [(name, method) for kind in ours for name, method in vars(kind).items() if name != "__init__"]
    return [method for _, method in own if inspect.isfunction(method)]


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
    places = [Variable(cell, "") for cell in function.__closure__ or () if _is_filled(cell)]
    places += [Variable(function.__globals__, name) for name in _names(code) if name in function.__globals__]
    modules = [module for place in places if inspect.ismodule(module := place.read())]
    places = [place for place in places if not inspect.ismodule(place.read())]
    there = [Variable(vars(m), name) for m in modules if not of_torch(m) for name in _names(code) if name in vars(m)]
    places += [
        place for place in there if isinstance(place.read(), (*PLAIN, Tensor)) or inspect.isfunction(place.read())
    ]
    yield from places
    for found in (place.read() for place in places if depth > 0):
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


def within(things: Iterable[Any], known: Sequence[nn.Module], depth: int = DEPTH) -> list[Any]:
    """Containers among the things and nested in them, without duplicates.

    A record, or a module that is not in `known`, contributes the dict of its attributes.
    """
    found: dict[int, Any] = {}
    seen = {id(module) for module in known} | {id(sys.modules)}  # compiling imports modules, which changes sys.modules

    def go(thing: Any, depth: int) -> None:
        if depth == 0 or id(thing) in seen or isinstance(thing, (*PLAIN, Tensor)):
            return
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            inside: Any = [vars(thing), *vars(thing).values()]
            depth += 1  # nesting of modules is not limited
        elif isinstance(thing, CONTAINERS):
            found[id(thing)] = thing
            inside = thing.values() if isinstance(thing, dict) else thing
        else:
            inside = [vars(thing)] if _is_record(thing) else ()
        for each in list(inside):
            go(each, depth - 1)

    for thing in things:
        go(thing, depth)
    return list(found.values())


def _is_record(thing: Any, depth: int = 3) -> bool:
    """Test for an object with plain values and records only, such as a configuration."""
    if depth == 0 or not hasattr(thing, "__dict__") or callable(thing) or of_a_library(type(thing)):
        return False
    return all(isinstance(value, VALUES) or _is_record(value, depth - 1) for value in vars(thing).values())


def of_a_library(kind: type) -> bool:
    """Test for a class of torch or samplewise, which does not read the user's globals."""
    return _is_ours_or_torch(kind.__module__)


def of_torch(module: Any) -> bool:
    """Test for a Python module of torch or samplewise."""
    return _is_ours_or_torch(module.__name__)


def _is_ours_or_torch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "samplewise")


class ContainerSnapshot:
    """Snapshot of the contents of a container; `restore` puts them back."""

    def __init__(self, container: Any):
        self._container = container
        self._then = list(things_in(container))

    def restore(self) -> None:
        c = self._container
        then = self._then
        if isinstance(c, tuple) or same_things(list(things_in(c)), then):
            return
        c.clear()
        if isinstance(c, dict):
            c.update(zip(then[::2], then[1::2], strict=True))
        elif isinstance(c, set):
            c.update(then)
        else:
            c.extend(then)


def things_in(container: Any) -> Iterable[Any]:
    """Items of a container; for a dict, keys and values alternately."""
    if isinstance(container, dict):
        return (thing for pair in container.items() for thing in pair)
    return container


def same_things(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Test whether two sequences hold identical objects."""
    return len(now) == len(then) and all(map(is_, now, then))


# --- random number generators -----------------------------------------------------------------------------------------


def generators_in(things: Iterable[Any]) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Pairs (get_state, set_state) of the Python and NumPy generators among the things."""
    found: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
    for thing in things:
        if isinstance(thing, random.Random):
            found.append((thing.getstate, thing.setstate))
        elif hasattr(type(thing), "bit_generator"):  # NumPy's
            bits = thing.bit_generator
            found.append((partial(getattr, bits, "state"), partial(setattr, bits, "state")))
    return found
