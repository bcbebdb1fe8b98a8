"""Hooks registered in the process, which tell whether a graph may have other gradients than a verified one.

torch numbers all hooks on tensors, autograd nodes and modules. Hooks of the engine itself, of the forward passes of
sharded models, and forward hooks of the model are not counted: they do not change gradients.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from samplewise.distributed.sharded_parameters import harmless_hooks
from samplewise.engine.checks import is_traced
from samplewise.engine.graph import Graph, Node

_own_hooks = 0
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
        return _counted - _own_hooks - _forward_hooks - harmless_hooks.registered


class HookState(NamedTuple):
    """Hooks that the gradients of a graph may have. Graphs of the same structure and state have the same hooks."""

    registered: int  # `foreign_hooks`
    graph: int = 0  # unlike that of all other graphs, if a hook was registered after this graph was made


UNVERIFIED = HookState(-1)


def hook_state(graph: Graph) -> HookState:
    """State of a graph: see `has_hooks_of`.

    A graph that was made before the last hook was registered may have that hook, also if another graph of the same
    structure has been verified since. A graph is compared with hooks seen in this thread, in which it should have been
    made.
    """
    count = foreign_hooks()
    if is_traced(graph.losses):
        return HookState(count)
    if getattr(_last_seen, "count", 0) != count:
        _last_seen.sequence = _next_sequence_number()
        _last_seen.count = count
    if count and graph.first_sequence_number < _last_seen.sequence:
        return HookState(count, next(_unlike_others))
    return HookState(count)


def has_hooks_of(graph: Graph, state: HookState) -> bool:
    """True if the gradients of a graph have the hooks of another graph of the same structure with this state. Traced
    graphs follow eager ones: only the number of hooks is compared.
    """
    now = hook_state(graph)
    return now.registered == state.registered if is_traced(graph.losses) else now == state


_last_seen = threading.local()  # number of foreign hooks, and the sequence number of a node made at its last change
_unlike_others = itertools.count(1)


def _next_sequence_number() -> int:
    with torch.inference_mode(False), torch.enable_grad():
        node: Node = torch.zeros((), requires_grad=True).view(()).grad_fn
    return node._sequence_nr()


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
        found: set[int] = set()
        for module in (module for root in modules for module in root.modules()):
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                found.update(number for number in hooks if number in new)
        _forward_hooks += len(found)
        _counted = new.stop


@contextmanager
def removed_afterwards(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Context manager: removes these hooks of the engine on exit, and does not count them as foreign."""
    global _own_hooks
    _own_hooks += len(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
