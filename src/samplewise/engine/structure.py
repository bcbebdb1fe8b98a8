"""Structure of an autograd graph: operations, their settings and connections, and shapes, without its tensors.

`read_structure` returns one `Structure` for all graphs that are equal in these. A graph is first compared with the
topologies that were read last; only a graph that differs from all of them is read in full. Routing by data changes
shapes in each step: graphs that differ in nothing else share their topology.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

Node = Any  # torch.autograd.graph.Node: attributes differ per operation and are unknown to type checkers
Children = tuple[tuple[Node | None, int], ...]

MOST_KEPT = 2**17  # nodes in all structures that are kept; all are forgotten when there are more
MOST_TRIED = 4  # topologies that a graph is compared with before it is read in full

_operations: dict[type, str] = {}


def operation(node: Node) -> str:
    """Name of the forward operation: 'Addmm' for AddmmBackward0, "Function 'Add'" for a Python autograd.Function.

    The prefix separates Python functions, which can have any name, from the ATen operations in the tables of rules.
    """
    kind = type(node)
    if kind not in _operations:
        name = re.sub(r"Backward\d*$", "", node.name())
        if is_python_function(node):
            return f"Function {name!r}"  # not cached: a class defined inside forward is a new class in each call
        _operations[kind] = name
    return _operations[kind]


def is_python_function(node: Node) -> bool:
    """True for the node of a Python subclass of torch.autograd.Function."""
    return isinstance(node, BackwardCFunction)


ACCUMULATE_GRAD = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)


class Record(NamedTuple):
    """What is compared of one node, except the shapes of its outputs."""

    kind: type | None  # of the node; None for a Python function
    identity: object  # name of the parameter, if it is wanted; (operation, module) of a Python function
    settings: tuple[object, ...]  # saved numbers, in the order of `_setting_names`; NUMBER for those that may change
    operands: tuple[tuple[int | None, int], ...]  # position and output slot of each operand


Output = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of one output of a node
NESTED = (-1,)  # in place of the shape of a nested tensor, which has no sizes that can be compared


class Topology:
    """Operations, settings and connections of graphs, without shapes. As flat lists, so that a graph is compared in few
    passes over its nodes. Nodes are positions in topological order, consumers before their operands, root first.
    """

    def __init__(self, slot: int, records: tuple[Record, ...], counts: tuple[int, ...]):
        positions = range(len(records))
        self.key = (slot, records, counts)  # `slot`: output slot of the root
        self.hash = hash((slot, records))
        self.structures: dict[tuple[Output, ...], Structure] = {}  # by the outputs of all nodes
        self.last: Structure | None = None
        self.nested = False  # True if there were nested tensors: their gradients cannot be read one by one
        self.leaves: dict[int, str] = {}  # position -> name of a wanted parameter
        self.sparse = False  # True if an embedding has sparse gradients
        for at, (kind, identity, settings, _) in enumerate(records):
            if kind is ACCUMULATE_GRAD and isinstance(identity, str):
                self.leaves[at] = identity
            if "_saved_sparse" in _setting_names.get(kind, ()):
                self.sparse |= settings[_setting_names[kind].index("_saved_sparse")] is True
        self.kinds = [record.kind for record in records]
        self.functions = [at for at in positions if records[at].kind is None]  # positions of Python functions
        self.identities = [(at, r.identity) for at, r in enumerate(records) if r.kind in (None, ACCUMULATE_GRAD)]
        self.settings = [
            (at, name, value)
            for at, record in enumerate(records)
            for name, value in zip(_setting_names.get(record.kind, ()), record.settings, strict=True)
            if value is not NUMBER
        ]
        self.counts = [(len(record.operands), count) for record, count in zip(records, counts, strict=True)]
        self.operands = [operand for record in records for operand in record.operands]
        paths: dict[int | None, tuple[int, int]] = {}
        for at, record in enumerate(records):
            for number, (position, _) in enumerate(record.operands):
                paths.setdefault(position, (at, number))
        self.paths = [paths[at] for at in positions[1:]]  # a consumer of each node, and the operand it is there

    def match(self, root: Node, leaf_names: Mapping[int, str]) -> tuple[Structure, list[Node]] | None:
        """Structure and nodes of the graph below `root`; None if the graph has another topology. `leaf_names`: id of a
        parameter -> name.
        """
        if self.nested:
            return None
        nodes = [root]
        below = [root.next_functions]
        for at, number in self.paths:
            operands = below[at]
            node = operands[number][0] if number < len(operands) else None
            if node is None:
                return None
            nodes.append(node)
            below.append(node.next_functions)
        kinds: list[type | None] = list(map(type, nodes))
        for at in self.functions:
            kinds[at] = None if isinstance(nodes[at], BackwardCFunction) else kinds[at]
        if kinds != self.kinds:
            return None
        for at, identity in self.identities:
            node = nodes[at]
            found = _function_identity(node) if kinds[at] is None else leaf_names.get(id(node.variable))
            if found != identity:
                return None
        for at, name, expected in self.settings:
            value = getattr(nodes[at], name)
            if (value if type(value) in _PLAIN else repr(value)) != expected:
                return None
        outputs = [node._input_metadata for node in nodes]
        if [(len(a), len(b)) for a, b in zip(below, outputs, strict=True)] != self.counts:
            return None
        # Same connections: each position is one node, no node has two positions, and there are no others.
        index: dict[Node, int | None] = dict(zip(nodes, range(len(nodes)), strict=True))
        if len(index) < len(nodes):
            return None
        index[None] = None
        if [(index.get(child, -1), slot) for of_node in below for child, slot in of_node] != self.operands:
            return None
        try:
            shapes = tuple([(tuple(one.shape), one.dtype) for of_node in outputs for one in of_node])
            return self.structure_of(shapes), nodes
        except (RuntimeError, ValueError, TypeError):  # a nested tensor has no shape, or one that cannot be compared
            return None

    def structure_of(self, outputs: tuple[Output, ...]) -> Structure:
        """The structure of graphs of this topology with these outputs, made when it is first asked for."""
        structure = self.last  # other threads may replace it
        if structure is None or structure.outputs != outputs:
            structure = self.structures.get(outputs)
            if structure is None:
                _make_room(self)
                structure = self.structures[outputs] = Structure(self, outputs)
            self.last = structure
        return structure


class Structure:
    """Structure of a graph: a topology with the shapes and dtypes of all outputs."""

    def __init__(self, topology: Topology, outputs: tuple[Output, ...]):
        self.outputs = outputs
        self.hash = topology.hash  # of operations, settings and connections; independent of shapes
        self.leaves = topology.leaves
        self.functions = topology.functions
        self.sparse = topology.sparse
        self.nested = any(shape is NESTED for shape, _ in outputs)
        self.plans: dict[str, Any] = {}  # plans that `Planner` keeps for such graphs, by `interacting`
        self.analyzed = False  # a plan was made before

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of the gradients of all outputs."""
        return {dtype for _, dtype in self.outputs if dtype.is_floating_point or dtype.is_complex}


_topologies: dict[tuple[object, ...], Topology] = {}
_recent: dict[tuple[object, ...], tuple[Topology, ...]] = {}  # the last ones, by kind and output slot of the root
_kept = 0  # nodes in all structures


def read_structure(root: Node, slot: int, leaf_names: Mapping[int, str]) -> tuple[Structure, list[Node]]:
    """Structure of the graph below output `slot` of `root`, and its nodes. `leaf_names`: id of a parameter -> name."""
    kind = None if is_python_function(root) else type(root)  # a class defined inside forward is new in each call
    recent = _recent.get((kind, slot), ())
    for topology in recent:
        match = topology.match(root, leaf_names)
        if match is not None:
            structure, nodes = match
            break
    else:
        topology, structure, nodes = _read(root, slot, leaf_names)
    if not recent or recent[0] is not topology:
        others = [other for other in _recent.get((kind, slot), ()) if other is not topology]
        _recent[kind, slot] = (topology, *others[: MOST_TRIED - 1])
    return structure, nodes


def _read(root: Node, slot: int, leaf_names: Mapping[int, str]) -> tuple[Topology, Structure, list[Node]]:
    """Read all nodes; return the topology and structure that are kept for such graphs."""
    children = children_below(root)
    nodes = list(reversed(children))
    index = dict(zip(nodes, range(len(nodes)), strict=True))
    records = []
    counts = []
    outputs: list[Output] = []
    for node in nodes:
        kind: type | None = type(node)
        identity: object = None
        if kind is ACCUMULATE_GRAD:
            identity = leaf_names.get(id(node.variable))
        elif isinstance(node, BackwardCFunction):
            kind = None
            identity = _function_identity(node)
        settings = []
        for name in _names_of_settings(node):
            value = getattr(node, name)
            if name in _NUMBERS or type(value) is float:
                settings.append(NUMBER)
            else:
                settings.append(value if type(value) in _PLAIN else repr(value))
        operands = tuple((index.get(child), below) for child, below in children[node])
        records.append(Record(kind, identity, tuple(settings), operands))
        metadata = node._input_metadata
        counts.append(len(metadata))
        outputs += [(NESTED if one.is_nested_tensor else tuple(one.shape), one.dtype) for one in metadata]
    key = (slot, tuple(records), tuple(counts))
    topology = _topologies.get(key) or Topology(*key)
    structure = topology.structure_of(tuple(outputs))
    topology.nested |= structure.nested
    return topology, structure, nodes


def _make_room(topology: Topology) -> None:
    """Count one more structure of a topology; forget all others if there are too many nodes."""
    global _kept
    nodes = len(topology.kinds)
    if _kept + nodes > MOST_KEPT:
        forget_structures()
    _topologies[topology.key] = topology
    _kept += nodes


def forget_structures() -> None:
    """Forget all structures, and with them all plans."""
    global _kept
    for topology in _topologies.values():
        topology.structures.clear()
        topology.last = None
    _topologies.clear()
    _recent.clear()
    _kept = 0


def children_below(root: Node) -> dict[Node, Children]:
    """Operands of each node below `root`, in topological order, operands first.

    The search is depth-first without recursion, because graphs of long RNNs are thousands of nodes deep. Each
    `next_functions` is read once, because each read creates a new tuple.
    """
    finished: dict[Node, Children] = {}
    seen = {root}
    first = root.next_functions
    stack = [(root, first, iter(first))]
    while stack:
        node, children, remaining = stack[-1]
        for child, _ in remaining:
            if child is not None and child not in seen:
                seen.add(child)
                below = child.next_functions
                stack.append((child, below, iter(below)))
                break
        else:
            finished[node] = children
            stack.pop()
    return finished


_PLAIN = {int, bool, str, type(None)}  # types of settings that are compared as they are; others by their repr
# Settings that are numbers to compute with, which may change in each step. They do not say where samples are, and rules
# read them from the node. All floats are such numbers; these may be integers, too.
NUMBER = "number"
_NUMBERS = {
    "_saved_" + name
    for name in (
        *("alpha", "beta", "exponent", "fill_value", "lambd", "max", "max_val", "min", "min_val"),
        *("negative_slope", "other", "self", "threshold", "value"),
    )
}
_setting_names: dict[type | None, tuple[str, ...]] = {}


def _names_of_settings(node: Node) -> tuple[str, ...]:
    """Names of a node's saved numbers except sizes. Cached by type; not for Python functions, which have none."""
    kind = type(node)
    names = _setting_names.get(kind)
    if names is not None:
        return names
    if is_python_function(node):
        return ()
    saved = [name for name in dir(node) if name.startswith("_saved_") and "_sym_" not in name]
    _setting_names[kind] = tuple(name for name in saved if not hasattr(kind, "_raw" + name))
    return _setting_names[kind]


def _function_identity(node: Node) -> tuple[str, str]:
    return operation(node), type(node)._forward_cls.__module__
