"""Hooks registered in the process, which tell whether the gradients of a graph may be changed by one.

torch numbers all hooks on tensors, autograd nodes and modules. Hooks of the engine itself, of the forward passes of
sharded models, and forward hooks of the model are not counted: they do not change gradients.

A hook on a tensor or node of a graph is registered after the oldest node of the graph was made; hooks of modules that
change gradients register such hooks in each forward pass. So a graph that is newer than all hooks has none of them,
whatever was registered in the process before: `note_hooks` before a forward pass records how old the hooks are.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode
from torch.utils.hooks import RemovableHandle

from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.graph.graph import EdgeKey, Graph, Node
from samplewise.parallel.sharded_parameters import harmless_hooks

Hooks = list[Callable[..., Any]]

_engine_hooks = 0
_forward_hooks = 0
_counted = 0  # hooks with smaller numbers have been counted, as foreign or not
_counting = threading.Lock()


def foreign_hooks() -> int:
    """Number of hooks registered in this process so far on tensors, nodes and modules, except by this module, by the
    forward passes of sharded models, and by `leave_out_forward_hooks`.
    """
    global _counted
    with _counting:
        _counted = RemovableHandle.next_id
        return _counted - _engine_hooks - _forward_hooks - harmless_hooks.registered


@dataclass(frozen=True)
class HookPlaces:
    """Where a graph has hooks. Nodes are positions in the graph."""

    edges: frozenset[EdgeKey] = frozenset()  # of tensors that have hooks
    before: Mapping[int, Hooks] = field(default_factory=dict)  # prehooks of nodes
    after: Mapping[int, Hooks] = field(default_factory=dict)  # hooks of nodes that run after them

    @cached_property
    def keys(self) -> frozenset[object]:
        """One key for each place, equal in all graphs of a structure."""
        return self.edges.union(("before", at) for at in self.before).union(("after", at) for at in self.after)

    @cached_property
    def nodes(self) -> set[int]:
        """Nodes with hooks of any kind."""
        return {at for at, _ in self.edges}.union(self.before, self.after)


NO_HOOKS = HookPlaces()


class HookScan(NamedTuple):
    """Where a graph has hooks, as long as no others are registered."""

    next_id: int  # number of the next hook of the process
    foreign: int  # number of foreign hooks
    places: HookPlaces | None  # None: they may be anywhere


def may_have_hooks(graph: Graph) -> bool:
    """False if this graph has no hooks: all foreign ones were registered before it was made, or none is found on it.
    A dispatch mode can do what a hook does.
    """
    places = hook_places(graph)
    return places is None or bool(places.keys)


def hook_places(graph: Graph) -> HookPlaces | None:
    """Where this graph has hooks; None if they may be anywhere."""
    if _len_torch_dispatch_stack() and not is_traced(graph.losses) and not _only_observers():
        return None
    next_id = RemovableHandle.next_id
    if graph.hooks is None or graph.hooks.next_id != next_id:  # hooks were registered since the last call
        count = foreign_hooks()
        _note(count)
        if count <= 0 or graph.first_sequence_number >= _last_seen.sequence:  # newer than the last foreign hook
            graph.hooks = HookScan(next_id, count, NO_HOOKS)
        elif graph.hooks is not None and graph.hooks.foreign == count:  # by the engine
            graph.hooks = graph.hooks._replace(next_id=next_id)
        else:
            places = _find_hooks(graph)  # registers hooks itself
            graph.hooks = HookScan(RemovableHandle.next_id, count, places)
    scan: HookScan = graph.hooks
    return scan.places


def _only_observers() -> bool:
    """True if all dispatch modes are known to return what the operations return: FlopCounterMode."""
    return all(
        type(mode) is _FlopCounterMode and type(mode.counter) is FlopCounterMode
        for mode in _get_current_dispatch_mode_stack()
    )


def _find_hooks(graph: Graph) -> HookPlaces | None:
    """Where hooks are found on nodes and tensors of the graph; None if that cannot be found out.

    torch does not show the hooks of a tensor. So zeros, which take no memory, are sent to the edge of each tensor and
    come out there at once, after its hooks: they are seen as calls of Python functions, or because something else
    comes out. Edges with hooks that were verified in an earlier graph are not tried: they count as hooked, and hooks
    that record gradients are not called with zeros in each step.
    """
    # In a sharded model, zeros would call the hooks of fully_shard, which gather parameters.
    can_look = graph.losses.device.type == "cpu" and not graph.sharded and sys.getprofile() is None
    if not can_look or is_traced(graph.losses):
        return None
    calls: list[str] = []

    def look(frame: object, event: str, argument: object) -> None:
        if event == "call":
            calls.append(event)

    run_backward = torch.autograd.Variable._execution_engine.run_backward
    nodes = graph.nodes
    hooked = graph.sizes.hooked
    edges = set(hooked)
    sent = [
        ((at, slot), (GradientEdge(nodes[at], slot),), zeros)
        for at, slots in graph.inner.items()
        for slot, zeros in slots.items()
        if (at, slot) not in hooked
    ]
    sys.setprofile(look)
    try:
        # No Python function is called here, except by hooks.
        for key, edge, zeros in sent:
            try:
                (gradient,) = run_backward(edge, (zeros,), True, False, edge, True, accumulate_grad=False)
                if calls or (gradient is not zeros and gradient.data_ptr() != zeros.data_ptr()):
                    edges.add(key)
            except Exception:  # of a hook, for example of one that changes its gradient in place
                edges.add(key)
            calls.clear()
    finally:
        sys.setprofile(None)
    return HookPlaces(frozenset(edges), *node_hooks(graph, graph.inner))


def node_hooks(graph: Graph, nodes: Iterable[int]) -> tuple[dict[int, Hooks], dict[int, Hooks]]:
    """Hooks registered on autograd nodes themselves, not on tensors, by position: those that run before and after the
    node. torch shows them with a new hook.
    """
    nodes = list(nodes)
    before = [graph.nodes[at].register_prehook(_no_hook) for at in nodes]
    after = [graph.nodes[at].register_hook(_no_hook) for at in nodes]
    with remove_afterwards([*before, *after]):
        return _other_hooks(nodes, before), _other_hooks(nodes, after)


def _other_hooks(nodes: Sequence[int], handles: Sequence[RemovableHandle]) -> dict[int, Hooks]:
    """Hooks that are registered next to these, where there are any."""
    foreign: dict[int, Hooks] = {}
    for at, handle in zip(nodes, handles, strict=True):
        hooks: dict[int, Callable[..., Any]] = handle.hooks_dict_ref() or {}
        if len(hooks) > 1:
            foreign[at] = [hook for number, hook in hooks.items() if number != handle.id]
    return foreign


def have_hooks(graph: Graph, nodes: Collection[int]) -> bool:
    """True if the nodes at these positions may have hooks, of their own or on the tensors that they return."""
    places = hook_places(graph)
    if places is not None:
        return not places.nodes.isdisjoint(nodes)
    return any(node_hooks(graph, nodes))


def _no_hook(*gradients: object) -> None:
    """Hook that changes nothing."""


def note_hooks(modules: Iterable[nn.Module]) -> None:
    """Note the hooks that exist before a forward pass of these modules: its graph has none of them."""
    if getattr(_last_seen, "next_id", -1) == RemovableHandle.next_id:  # none was registered since the last call
        return
    leave_out_forward_hooks(modules)
    next_id = RemovableHandle.next_id
    _note(foreign_hooks())
    _last_seen.next_id = next_id


def _note(count: int) -> None:
    """Note the sequence number of a node that is made now, if the number of foreign hooks has changed."""
    if getattr(_last_seen, "count", 0) != count:
        with torch.inference_mode(False), torch.enable_grad():
            node: Node = torch.zeros((), requires_grad=True).view(()).grad_fn
        _last_seen.sequence = node._sequence_nr()
        _last_seen.count = count


# Number of foreign hooks, the sequence number of a node made at its last change, and the number of the next hook.
_last_seen = threading.local()


def leave_out_forward_hooks(modules: Iterable[nn.Module]) -> None:
    """Do not count forward hooks of these modules as foreign: they run before the graph is read, and cannot change its
    gradients later. Hooks on tensors that a forward hook registers are counted.

    Only hooks registered since the last count are left out, so that two equal counts always mean that no other hook has
    been registered in between.
    """
    global _forward_hooks, _counted
    if RemovableHandle.next_id == _counted:
        return
    with _counting:
        new = range(_counted, RemovableHandle.next_id)
        forward_hooks: set[int] = set()
        for module in (module for root in modules for module in root.modules()):
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                forward_hooks.update(number for number in hooks if number in new)
        _forward_hooks += len(forward_hooks)
        _counted = new.stop


@contextmanager
def remove_afterwards(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Context manager: removes these hooks of the engine on exit, and does not count them as foreign."""
    global _engine_hooks
    _engine_hooks += len(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
