"""Where the model, the loss function and transforms find things that are no parameters: closures, globals, attributes,
and the lists, dicts and records in there.
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

from samplewise.batches import PLAIN

CONTAINERS = (dict, list, tuple, set, deque)
VALUES = (*PLAIN, *CONTAINERS, Tensor, torch.dtype, torch.device)
DEPTH = 4  # of containers in containers


class Place(NamedTuple):
    """A variable of a closure, or an entry of a dict: a global variable, or an attribute."""

    holder: Any
    name: str

    @property
    def where(self) -> str:
        """As Python, with {} for the holder."""
        return "{}.cell_contents" if isinstance(self.holder, CellType) else f"{{}}[{self.name!r}]"

    def read(self) -> Any:
        return self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder[self.name]

    def write(self, thing: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = thing
        else:
            self.holder[self.name] = thing


def places_of(functions: Iterable[Any]) -> list[Place]:
    """What functions look up, each place once."""
    found = {(id(place.holder), place.name): place for function in functions for place in looked_up(function)}
    return list(found.values())


def methods_of(modules: Iterable[nn.Module]) -> list[Any]:
    """What their own classes may do in the forward pass."""
    kinds: dict[type, None] = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    ours = [kind for kind in kinds if not of_a_library(kind) and kind is not object]
    own = [(name, method) for kind in ours for name, method in vars(kind).items() if name != "__init__"]
    return [method for _, method in own if inspect.isfunction(method)]


def looked_up(function: Any, depth: int = 3) -> Iterator[Place]:
    """What a function, or one that it calls, finds outside itself."""
    if isinstance(function, partial):
        yield from looked_up(function.func, depth)
        return
    function = inspect.unwrap(function) if callable(function) else function
    owner = getattr(function, "__self__", None)
    if owner is None and not inspect.isfunction(function) and not isinstance(function, (type, nn.Module)):
        owner, function = function, type(function).__dict__.get("__call__")
    if owner is not None and hasattr(owner, "__dict__") and not isinstance(owner, nn.Module):
        yield from (Place(vars(owner), name) for name in vars(owner))
    code = getattr(function, "__code__", None)
    if code is None:
        return
    function = getattr(function, "__func__", function)
    places = [Place(cell, "") for cell in function.__closure__ or () if _is_filled(cell)]
    places += [Place(function.__globals__, name) for name in _names(code) if name in function.__globals__]
    modules = [module for place in places if inspect.ismodule(module := place.read())]
    places = [place for place in places if not inspect.ismodule(place.read())]
    there = [Place(vars(m), name) for m in modules if not of_torch(m) for name in _names(code) if name in vars(m)]
    places += [
        place for place in there if isinstance(place.read(), (*PLAIN, Tensor)) or inspect.isfunction(place.read())
    ]
    yield from places
    for found in (place.read() for place in places if depth > 0):
        if inspect.isfunction(found):
            yield from looked_up(found, depth - 1)


def _names(code: Any) -> set[str]:
    """Global names that the code, or a function inside it, uses."""
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return set(code.co_names).union(*map(_names, inner))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# --- things with things in them ---------------------------------------------------------------------------------------


def within(things: Iterable[Any], known: Sequence[nn.Module], depth: int = DEPTH) -> list[Any]:
    """The containers among the things and inside them, each once. Of a record, and of a module that is not among the
    `known` ones, that is the dict of its attributes.
    """
    found: dict[int, Any] = {}
    seen = {id(module) for module in known} | {id(sys.modules)}  # compiling imports some

    def go(thing: Any, depth: int) -> None:
        if depth == 0 or id(thing) in seen or isinstance(thing, (*PLAIN, Tensor)):
            return
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            inside: Any = [vars(thing), *vars(thing).values()]
            depth += 1  # modules are as deep as they like
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
    """An object of plain values and records, such as a configuration."""
    if depth == 0 or not hasattr(thing, "__dict__") or callable(thing) or of_a_library(type(thing)):
        return False
    return all(isinstance(value, VALUES) or _is_record(value, depth - 1) for value in vars(thing).values())


def of_a_library(kind: type) -> bool:
    """One that keeps count of itself, and does not look at the user's globals."""
    return _is_ours_or_torch(kind.__module__)


def of_torch(module: Any) -> bool:
    return _is_ours_or_torch(module.__name__)


def _is_ours_or_torch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "samplewise")


class Kept:
    """What is in a container now, to be put back."""

    def __init__(self, container: Any):
        self._container, self._then = container, list(things_in(container))

    def restore(self) -> None:
        c, then = self._container, self._then
        if isinstance(c, tuple) or same_things(list(things_in(c)), then):
            return
        c.clear()
        if isinstance(c, dict):
            c.update(zip(then[::2], then[1::2], strict=True))
        else:
            c.update(then) if isinstance(c, set) else c.extend(then)


def things_in(container: Any) -> Iterable[Any]:
    """Of a dict, each key and what it has."""
    return (thing for pair in container.items() for thing in pair) if isinstance(container, dict) else container


def same_things(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


# --- generators of random numbers -------------------------------------------------------------------------------------


def generators_in(things: Iterable[Any]) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """How to read and to write the state of each."""
    found: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
    for thing in things:
        if isinstance(thing, random.Random):
            found.append((thing.getstate, thing.setstate))
        elif hasattr(type(thing), "bit_generator"):  # NumPy's
            bits = thing.bit_generator
            found.append((partial(getattr, bits, "state"), partial(setattr, bits, "state")))
    return found
