"""Structure of an autograd graph: operations, their settings and connections, without its tensors and their sizes.

`read_structure` returns one `Structure` for all graphs that are equal in these, and one `Sizes` for those of them whose
shapes are equal, too. A graph is first compared with the structures that were read last; only a graph that differs from
all of them is read in full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import BackwardCFunction

Node = Any  # torch.autograd.graph.Node: attributes differ per operation and are unknown to type checkers
Children = tuple[tuple[Node | None, int], ...]

MOST_KEPT = 2**17  # nodes in all structures and sizes that are kept; all are forgotten when there are more
MOST_RESULTS = 64  # that are kept for a structure
MOST_TRIED = 4  # structures that a graph is compared with before it is read in full

Result = TypeVar("Result")

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
    """What is compared of one node, except sizes."""

    kind: type | None  # of the node; None for a Python function
    identity: object  # name of the parameter, if it is wanted; (operation, module) of a Python function
    settings: tuple[object, ...]  # saved numbers, in the order of `_setting_names`; NUMBER or SIZE for some
    operands: tuple[tuple[int | None, int], ...]  # position and output slot of each operand
    outputs: int  # number of outputs


Shape = tuple[int, ...]
EdgeKey = tuple[int, int]  # an edge of any graph of one structure: position of the node, output slot
NESTED = (-1,)  # in place of the shape of a nested tensor, which has no sizes that can be compared


class Structure:
    """Structure of a graph. Nodes are positions in topological order, consumers before their operands, root first."""

    def __init__(self, slot: int, records: tuple[Record, ...], operations: list[str]):
        self.slot = slot  # output slot of the root
        self.records = records
        self.operations = operations  # by position
        self.leaves: dict[int, str] = {}  # position -> name of a wanted parameter
        self.functions: list[int] = []  # positions of Python functions
        self.sparse = False  # True if an embedding has sparse gradients
        self.sizes: dict[object, Sizes] = {}  # of the graphs so far, by `_Flat.sizes_of`
        self.results: dict[object, Any] = {}  # see `once`
        self._reaches: dict[int | None, Reach] = {}
        for at, (kind, identity, settings, *_) in enumerate(records):
            if kind is None:
                self.functions.append(at)
            elif kind is ACCUMULATE_GRAD and isinstance(identity, str):
                self.leaves[at] = identity
            if "_saved_sparse" in _setting_names.get(kind, ()):
                self.sparse |= settings[_setting_names[kind].index("_saved_sparse")] is True
        self.flat = _Flat(records)

    @cached_property
    def consumers(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """(position of the node, operand position) of each use of an edge, by (position, output slot)."""
        consumers: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for at, record in enumerate(self.records):
            for position, (child, slot) in enumerate(record.operands):
                if child is not None:
                    consumers.setdefault((child, slot), []).append((at, position))
        return consumers

    @cached_property
    def hash(self) -> int:
        """Hash of operations, settings and connections; independent of sizes."""
        return hash((self.slot, self.records))

    def reach(self, goal: int | None) -> Reach:
        """Nodes with a path to a wanted parameter or to the node at position `goal`."""
        if goal not in self._reaches:
            self._reaches[goal] = Reach(self, goal)
        return self._reaches[goal]


def once(results: dict[object, Any], key: object, compute: Callable[[], Result]) -> Result:
    """Return compute(), or what it has returned for this key before. For what depends on a structure alone, and on
    nodes that data may choose: the number of results is bounded.
    """
    if key not in results:
        if len(results) >= MOST_RESULTS:
            results.clear()
        results[key] = compute()
    result: Result = results[key]
    return result


class Reach:
    """Nodes of a structure with a path to a wanted parameter or to a goal, by position."""

    def __init__(self, structure: Structure, goal: int | None):
        self.results: dict[object, Any] = {}  # see `once`
        records = structure.records
        relevant = {*structure.leaves, goal} - {None}
        for at in reversed(range(len(records))):
            if any(child in relevant for child, _ in records[at].operands):
                relevant.add(at)
        self.nodes: list[int] = [at for at in range(len(records)) if at in relevant]  # consumers first
        # For each node, the edge of each operand; None for operands that are not relevant.
        self.operands: dict[int, tuple[EdgeKey | None, ...]] = {}
        consumers: dict[int, list[EdgeKey]] = {at: [] for at in self.nodes}
        slots: dict[int, set[int]] = {at: set() for at in self.nodes}
        slots.setdefault(0, set()).add(structure.slot)
        for at in self.nodes:
            operands: list[EdgeKey | None] = []
            for position, (child, slot) in enumerate(records[at].operands):
                if child is None or child not in relevant:
                    operands.append(None)
                    continue
                operands.append((child, slot))
                consumers[child].append((at, position))
                slots[child].add(slot)
            self.operands[at] = tuple(operands)
        # Tuples of numbers take no time in garbage collections.
        self.consumers = {at: tuple(users) for at, users in consumers.items()}  # (node, position of the operand)
        self.slots = {at: tuple(sorted(used)) for at, used in slots.items()}  # output slots that receive a gradient


class Sizes:
    """Shapes, dtypes and saved sizes: what may differ between graphs of one structure, and a plan depends on."""

    def __init__(self, edges: Iterable[EdgeKey], shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...]):
        self.shapes = dict(zip(edges, shapes, strict=True))  # of all outputs
        self.dtypes = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}  # of gradients
        self.nested = NESTED in shapes  # True if there are nested tensors: their gradients cannot be read one by one
        self.plans: dict[str, Any] = {}  # plans that `Planner` keeps for such graphs, by `interacting`
        self.analyzed = False  # a plan was made before
        self.inner: dict[int | None, dict[int, dict[int, torch.Tensor]]] = {}  # see `Graph`, by position of the goal
        self.hooked: frozenset[EdgeKey] = frozenset()  # edges with hooks that were verified in an earlier graph


class _Flat:
    """Structure as flat lists, so that a graph is compared with it in few passes over its nodes."""

    def __init__(self, records: tuple[Record, ...]):
        positions = range(len(records))
        self.kinds = [record.kind for record in records]
        self.functions = [at for at in positions if records[at].kind is None]
        self.identities = [(at, r.identity) for at, r in enumerate(records) if r.kind in (None, ACCUMULATE_GRAD)]
        settings = [
            (at, name, value)
            for at, record in enumerate(records)
            for name, value in zip(_setting_names.get(record.kind, ()), record.settings, strict=True)
        ]
        self.settings = [setting for setting in settings if setting[2] is not NUMBER and setting[2] is not SIZE]
        self.sizes = [(at, name) for at, name, value in settings if value is SIZE]
        self.operand_counts = [len(record.operands) for record in records]
        self.output_counts = [record.outputs for record in records]
        self.edges = [(at, slot) for at, record in enumerate(records) for slot in range(record.outputs)]
        operands = [operand for record in records for operand in record.operands]
        self.operands = [len(records) if at is None else at for at, _ in operands]  # the last one: no node
        self.operand_slots = [slot for _, slot in operands]
        paths: dict[int | None, tuple[int, int]] = {}
        for at, record in enumerate(records):
            for number, (position, _) in enumerate(record.operands):
                paths.setdefault(position, (at, number))
        self.paths = [paths[at] for at in positions[1:]]  # a consumer of each node, and the operand it is there

    def nodes_of(self, root: Node, leaf_names: Mapping[int, str]) -> tuple[list[Node], list[Any]] | None:
        """Nodes of the graph below `root`, in the order of this structure, and the metadata of their outputs; None if
        the graph has another structure. `leaf_names`: id of a parameter -> name.
        """
        nodes = [root]
        below = [root.next_functions]
        try:
            for at, number in self.paths:
                node = below[at][number][0]
                nodes.append(node)
                below.append(node.next_functions)
        except (IndexError, AttributeError):  # no such operand, or None
            return None
        kinds: list[type | None] = list(map(type, nodes))
        for at in self.functions:
            kinds[at] = None if isinstance(nodes[at], BackwardCFunction) else kinds[at]
        if kinds != self.kinds:
            return None
        for at, identity in self.identities:
            node = nodes[at]
            identity_here = _function_identity(node) if kinds[at] is None else leaf_names.get(id(node.variable))
            if identity_here != identity:
                return None
        for at, name, expected in self.settings:
            value = getattr(nodes[at], name)
            if (value if type(value) in _PLAIN else repr(value)) != expected:  # `_comparable`, without its call
                return None
        outputs = [node._input_metadata for node in nodes]
        if list(map(len, below)) != self.operand_counts or list(map(len, outputs)) != self.output_counts:
            return None
        # Same connections: each position is one node, no node has two positions, and there are no others.
        operands = zip(map([*nodes, None].__getitem__, self.operands), self.operand_slots, strict=True)
        if len(set(nodes)) < len(nodes) or list(chain.from_iterable(below)) != list(operands):
            return None
        return nodes, list(chain.from_iterable(outputs))

    def sizes_of(self, nodes: list[Node], outputs: list[Any]) -> tuple[tuple[Any, ...], ...]:
        """Shapes and dtypes of all outputs, and saved sizes."""
        return (
            tuple([NESTED if output.is_nested_tensor else tuple(output.shape) for output in outputs]),
            tuple(map(_dtype, outputs)),
            tuple([_comparable(getattr(nodes[at], name)) for at, name in self.sizes]) if self.sizes else (),
        )


_dtype = attrgetter("dtype")
_structures: dict[tuple[object, ...], Structure] = {}
_recent: dict[tuple[object, ...], tuple[Structure, ...]] = {}  # the last ones, by kind and output slot of the root
_node_count = 0  # nodes in `_structures`, counted once more for each of their sizes


def read_structure(root: Node, slot: int, leaf_names: Mapping[int, str]) -> tuple[Structure, Sizes, list[Node]]:
    """Structure and sizes of the graph below output `slot` of `root`, and its nodes. `leaf_names`: id of a parameter ->
    name.
    """
    kind = None if isinstance(root, BackwardCFunction) else type(root)  # a class made in forward is new in each call
    recent = _recent.get((kind, slot), ())
    for structure in recent:
        graph = structure.flat.nodes_of(root, leaf_names)
        if graph is not None:
            nodes, outputs = graph
            break
    else:
        structure, nodes, outputs = _read(root, slot, leaf_names)
    key = structure.flat.sizes_of(nodes, outputs)
    sizes = structure.sizes.get(key)
    if sizes is None:
        _make_room(len(structure.records))
        if not _structures:  # all were forgotten
            _structures[slot, structure.records] = structure
        sizes = structure.sizes[key] = Sizes(structure.flat.edges, *key[:2])
    if not recent or recent[0] is not structure:
        older = [candidate for candidate in recent if candidate is not structure]
        _recent[kind, slot] = (structure, *older[: MOST_TRIED - 1])
    return structure, sizes, nodes


def _read(root: Node, slot: int, leaf_names: Mapping[int, str]) -> tuple[Structure, list[Node], list[Any]]:
    """Read all nodes; return the structure that is kept for such graphs, the nodes and the metadata of all outputs."""
    children = children_below(root)
    nodes = list(reversed(children))
    index = dict(zip(nodes, range(len(nodes)), strict=True))
    records = []
    outputs = []
    for node in nodes:
        kind: type | None = type(node)
        identity: object = None
        if kind is ACCUMULATE_GRAD:
            identity = leaf_names.get(id(node.variable))
        elif isinstance(node, BackwardCFunction):
            kind = None
            identity = _function_identity(node)
        settings: list[object] = []
        for name in _names_of_settings(node):
            value = getattr(node, name)
            if name in _NUMBERS or type(value) is float:
                settings.append(NUMBER)
            elif name in _SIZES:
                settings.append(SIZE)
            else:
                settings.append(_comparable(value))
        operands = tuple((index.get(child), below) for child, below in children[node])
        of_node = node._input_metadata
        records.append(Record(kind, identity, tuple(settings), operands, len(of_node)))
        outputs += of_node
    key = (slot, tuple(records))
    structure = _structures.get(key)
    if structure is None:
        _make_room(len(nodes))
        structure = _structures[key] = Structure(*key, list(map(operation, nodes)))
    return structure, nodes, outputs


def _make_room(nodes: int) -> None:
    """Count nodes that are to be kept; forget all others if they would be too many."""
    global _node_count
    if _node_count + nodes > MOST_KEPT:
        forget_structures()
    _node_count += nodes


def forget_structures() -> None:
    """Forget all structures, and with them all plans."""
    global _node_count
    for structure in _structures.values():
        structure.sizes.clear()  # of structures that are still in use, too
    _structures.clear()
    _recent.clear()
    _node_count = 0


def children_below(root: Node) -> dict[Node, Children]:
    """Operands of each node below `root`, in topological order, operands first.

    The search is depth-first without recursion, because graphs of long RNNs are thousands of nodes deep. Each
    `next_functions` is read once, because each read creates a new tuple.
    """
    finished: dict[Node, Children] = {}
    visited = {root}
    first = root.next_functions
    stack = [(root, first, iter(first))]
    while stack:
        node, children, remaining = stack[-1]
        for child, _ in remaining:
            if child is not None and child not in visited:
                visited.add(child)
                below = child.next_functions
                stack.append((child, below, iter(below)))
                break
        else:
            finished[node] = children
            stack.pop()
    return finished


_PLAIN = {int, bool, str, type(None)}  # types of settings that are compared as they are; others by their repr


def _comparable(value: object) -> object:
    return value if type(value) in _PLAIN else repr(value)


# Settings that are numbers to compute with, which may change in each step. They do not say where samples are, and rules
# read them from the node. All floats are such numbers; these may be integers, too.
NUMBER = "number"
_NUMBERS = {
    "_saved_" + name
    for name in (
        *("alpha", "beta", "exponent", "fill_value", "input_lengths", "lambd", "max", "max_val", "min", "min_val"),
        *("negative_slope", "other", "self", "target_lengths", "threshold", "value"),
    )
}
# Settings that change with the shapes. Ownership and plans depend on them, as on shapes.
SIZE = "size"
_SIZES = {
    "_saved_" + name
    for name in (
        *("HxW", "N", "end", "index", "last_dim_size", "max_k", "max_q", "output_size", "pad", "repeats", "size"),
        *("split_size", "split_sizes", "start"),
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
