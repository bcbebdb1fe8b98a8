"""One warning for a model that stays on a slow path: what makes it slow, where, what it costs and what to do."""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from samplewise.engine.graph.graph import Graph, Node
from samplewise.errors import TrainingWarning

STEPS = 3  # with the same cause, before the warning: the first steps of a model are always slower
Seen = dict[str, list[weakref.ref[Graph]]]  # graphs on a slow path, by cause; at most STEPS of them
_seen: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the first parameter of a model


class SlowPath(NamedTuple):
    """Why the steps of a model take longer than those of other models."""

    cause: str
    cost: str
    remedy: str

    @property
    def warning(self) -> str:
        return (
            "per-sample gradients of this model are computed in a slow way in each step: "
            f"{self.cause}. This costs {self.cost}. {self.remedy} g.explain() shows where the time goes."
        )

    def __str__(self) -> str:
        return f"{self.cause}. This costs {self.cost}. {self.remedy}"


_collection: ContextVar[dict[SlowPath, None] | None] = ContextVar("_collection", default=None)


def warn_if_slow(graph: Graph, cause: str, cost: str, remedy: str) -> None:
    """Count a graph on a slow path; warn once per model, in its step STEPS."""
    path = SlowPath(cause, cost, remedy)
    collection = _collection.get()
    if collection is not None:
        collection[path] = None
        return
    paths: Seen = _seen.setdefault(next(iter(graph.wanted.values())), {})
    graphs = paths.setdefault(cause, [])
    if len(graphs) == STEPS or any(reference() is graph for reference in graphs):
        return
    graphs.append(weakref.ref(graph))
    if len(graphs) == STEPS:
        warnings.warn(path.warning, TrainingWarning, stacklevel=_outside())


@contextmanager
def slow_paths_collected() -> Iterator[dict[SlowPath, None]]:
    """Context manager: slow paths of steps in the block are added to a dict, and neither counted nor warned of."""
    collection: dict[SlowPath, None] = {}
    token = _collection.set(collection)
    try:
        yield collection
    finally:
        _collection.reset(token)


def _outside() -> int:
    """Stack level of the user's code, seen from `warn_if_slow`."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("samplewise.", "torch.")):
        frame = frame.f_back
        level += 1
    return level


def place_of(graph: Graph, node: Node, modules: Iterable[nn.Module]) -> str:
    """Where a node comes from, as far as the graph says: the module of the nearest parameter below it, and the forward
    method of the user's code that contains this module.
    """
    below = set(graph.below([node]))
    names = [name for leaf, name in graph.leaves.items() if leaf in below]
    if not names:
        return ""
    path = names[0].rpartition(".")[0]
    for root in modules:
        owner = path
        named = dict(root.named_modules())
        while True:
            module = named.get(owner)
            if module is not None and not type(module).__module__.startswith("torch."):
                try:
                    line = inspect.getsourcelines(type(module).forward)[1]
                    file = inspect.getsourcefile(type(module)) or ""
                except (OSError, TypeError):
                    break
                return f" (above {path!r}; {type(module).__name__}.forward, {file.rpartition('/')[2]}:{line})"
            if not owner:
                break
            owner = owner.rpartition(".")[0]
    return f" (above {path!r})"
