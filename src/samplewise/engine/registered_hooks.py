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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.autograd.graph import GradientEdge
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


def may_have_hooks(graph: Graph) -> bool:
    """False if this graph has no hooks: all foreign ones were registered before it was made, or none is found on it.
    A dispatch mode can do what a hook does.
    """
    if _len_torch_dispatch_stack() and not is_traced(graph.losses):
        return True
    count = foreign_hooks()
    if not _is_older(graph, count):
        return False
    if graph.hooks is None or graph.hooks[0] != count:
        graph.hooks = (count, _finds_hooks(graph))
    return graph.hooks[1]


def _finds_hooks(graph: Graph) -> bool:
    """True if a hook is found on a node or tensor of the graph, or if that cannot be found out.

    torch does not show the hooks of a tensor. So a constant gradient, which takes no memory, is sent to the edge of
    each tensor and comes out there at once, after its hooks: they are seen as calls of Python functions, or because
    something else comes out.
    """
    can_look = graph.losses.device.type == "cpu" and not graph.sharded and sys.getprofile() is None
    if not can_look or is_traced(graph.losses):
        return True
    nodes = [node for node in graph.nodes if node in graph.relevant and node not in graph.leaves]
    if have_hooks(nodes):
        return True
    is_called = False

    def look(frame: object, event: str, argument: object) -> None:
        nonlocal is_called
        is_called = is_called or event == "call"

    run_backward = torch.autograd.Variable._execution_engine.run_backward
    constants: dict[torch.dtype, Tensor] = {}
    sent: list[tuple[tuple[GradientEdge], Tensor]] = []
    for node in nodes:
        for slot in graph.used_slots(node):
            metadata = node._input_metadata[slot]
            if metadata.dtype not in constants:
                constants[metadata.dtype] = torch.full((), 1.5, dtype=metadata.dtype)
            sent.append(((GradientEdge(node, slot),), constants[metadata.dtype].expand(metadata.shape)))
    sys.setprofile(look)
    try:
        # No Python function is called here, except by hooks.
        for edge, constant in sent:
            (gradient,) = run_backward(edge, (constant,), True, False, edge, True, accumulate_grad=False)
            if gradient.data_ptr() != constant.data_ptr() or any(gradient.stride()):
                return True
    except Exception:  # of a hook, for example of one that changes its gradient in place
        return True
    finally:
        sys.setprofile(None)
    return is_called


def have_hooks(nodes: Iterable[Node]) -> bool:
    """True if hooks are registered on an autograd node itself, not on a tensor. torch shows them with a new hook."""
    handles = [register(_no_hook) for node in nodes for register in (node.register_prehook, node.register_hook)]
    with removed_afterwards(handles):
        return any(len(handle.hooks_dict_ref()) > 1 for handle in handles)


def _no_hook(*gradients: object) -> None:
    """Hook that changes nothing."""


def note_hooks(modules: Iterable[nn.Module]) -> None:
    """Note the hooks that exist before a forward pass of these modules: its graph has none of them."""
    leave_out_forward_hooks(modules)
    _note(foreign_hooks())


def _is_older(graph: Graph, count: int) -> bool:
    """True if the graph may be older than the last of `count` foreign hooks."""
    _note(count)
    return count > 0 and graph.first_sequence_number < _last_seen.sequence


def _note(count: int) -> None:
    if getattr(_last_seen, "count", 0) != count:
        _last_seen.sequence = _next_sequence_number()
        _last_seen.count = count


_last_seen = threading.local()  # number of foreign hooks, and the sequence number of a node made at its last change


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
