"""Ownership: the sample that each element of each gradient between the losses and the parameters belongs to.

`owners(graph)` starts at the losses, whose element i belongs to sample i, and follows the gradient toward the
parameters. Most operations move the samples as their shapes and saved numbers say: see `layouts`. Others route by data
(index, sort) or are not in the table. There the node itself is asked: see `local_probe`. Its answer is a claim about
graphs of this structure, which is verified in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.nn.parallel import distributed as ddp

from samplewise.engine.graph import Edge, Graph, Node, is_python_function, numel
from samplewise.engine.layouts import MOVERS, UNDECIDED, VIEWS, SampleDim, locate
from samplewise.engine.local_probe import COPYING, Claim, probe_node
from samplewise.engine.probe import NO_OWNER
from samplewise.engine.saved import block_of, saved_tensor_names
from samplewise.engine.tags import Irregular, Regular, Tag, merged, owned_by, sole_owner, tag_at


@dataclass
class Ownership:
    """Tags of the gradients that belong to single samples."""

    tags: dict[Edge, Tag]
    claims: list[Claim] = field(default_factory=list)  # about nodes that were probed
    functions: list[Claim] = field(default_factory=list)  # about Python functions, to be verified during a pass
    by_data: bool = False  # a tag has an owner for each element: it is used for this graph only
    recomputed: bool = False  # nodes of a checkpointed block were probed: to be verified by a pass with weights
    probed: bool = False  # a node was probed
    exact: bool = False  # zeros of probed nodes have no owner
    contradicted: bool = False  # samples seem to be mixed, perhaps only because of the owners of zeros


def owners(graph: Graph, probes: bool = True, exact: bool = False) -> Ownership:
    """Return the ownership of all gradients that belong to single samples. With probes=False no node is called, and
    nothing is said about the operands of nodes that would be. With exact=True no owner is assumed for zeros of probed
    nodes.
    """
    ownership = Ownership({graph.root: Regular(graph.samples, 1)}, exact=exact)
    tags = ownership.tags
    conflicts: set[Edge] = set()
    side = set(views_of_leaves(graph)) | set(graph.leaves)
    for node in graph.nodes:
        if node not in graph.relevant or node in side:
            continue
        slots = graph.used_slots(node)
        children = [Edge(child, slot) if child in graph.relevant else None for child, slot in graph.children[node]]
        if not all(Edge(node, slot) in tags for slot in slots):
            # Samples are mixed in a part of what arrives, so they may be in all operands.
            for child in children:
                if child is not None:
                    conflicts.add(child)
                    tags.pop(child, None)
            continue
        moved = _moved(graph, node, {slot: tags[Edge(node, slot)] for slot in slots}, children, side, ownership, probes)
        for child, tag in zip(children, moved, strict=True):
            if child is None or child in conflicts:
                continue
            if child in tags:
                both = (tags[child], tag)
                tag = merged(*both, child.shape)
                ownership.contradicted |= tag is None and None not in both and ownership.probed
            if tag is None:
                conflicts.add(child)
                tags.pop(child, None)
            else:
                tags[child] = tag
        if ownership.contradicted and not exact:
            return owners(graph, probes, exact=True)
    for leaf in side:
        for slot in graph.used_slots(leaf):
            tags.pop(Edge(leaf, slot), None)
    return ownership


def _moved(
    graph: Graph,
    node: Node,
    tags: dict[int, Tag],
    children: list[Edge | None],
    side: set[Node],
    ownership: Ownership,
    probes: bool,
) -> list[Tag | None]:
    """Tag of the gradient of each operand, for gradients of the outputs with these tags; None if samples are mixed."""
    if _is_identity(node, graph.sharded):
        return [tags.get(position) for position in range(len(children))]
    if all(isinstance(tag, Irregular) and not tag.owner.numel() for tag in tags.values()) and not is_python_function(
        node
    ):
        return [owned_by(NO_OWNER, child, graph.samples) if child else None for child in children]  # zeros
    soles = {sole_owner(tag) for tag in tags.values()}
    sole = next(iter(soles)) if len(soles) == 1 else None
    copies = probes and graph.operations[node] in COPYING
    if sole is not None and not copies:  # what is computed from the gradient of one sample belongs to it
        return [owned_by(sole, child, graph.samples) if child else None for child in children]
    by_slot: list[list[Tag | SampleDim | None]]
    if sole is not None:  # but not the elements that were not copied
        by_slot = [[UNDECIDED] * len(children)]
    else:
        by_slot = [_by_layout(graph, node, slot, tag, children, ownership.exact) for slot, tag in tags.items()]
    moved: list[Tag | None] = []
    unknown: list[int] = []
    for position, child in enumerate(children):
        answer = by_slot[0][position]
        for other in by_slot[1:]:
            answer = _sum(answer, other[position], child)
        if answer is UNDECIDED and child is not None and child.node not in side:
            unknown.append(position)
        moved.append(None if isinstance(answer, SampleDim) else answer)
    if unknown and probes:
        answers_of_node = probe_node(graph, node, tags, unknown, ownership.exact)
        ownership.contradicted |= ownership.probed and None in answers_of_node.values()
        for position, tag in answers_of_node.items():
            moved[position] = tag
        _note(graph, node, tags, answers_of_node, ownership)
    return moved


def _sum(first: Tag | SampleDim | None, second: Tag | SampleDim | None, child: Edge | None) -> Tag | SampleDim | None:
    """Tag of the sum of the gradients that come from two outputs."""
    if first == second:
        return first
    if child is None or isinstance(first, SampleDim | None) or isinstance(second, SampleDim | None):
        return UNDECIDED
    return merged(first, second, child.shape) or UNDECIDED


# Operations whose routing is fixed by numbers and shapes, which are equal in all graphs of a structure.
FIXED = {"Cat", "Flip", "Roll", "Select", "Slice", "Split", "SplitWithSizes", "Stack", "Unbind"}


def _note(
    graph: Graph, node: Node, outputs: dict[int, Tag], operands: dict[int, Tag | None], ownership: Ownership
) -> None:
    """Note what a probe of a node has found, so that later graphs verify it."""
    ownership.probed = True
    owned = {position: tag for position, tag in operands.items() if tag is not None}
    if any(isinstance(tag, Irregular) and tag.place is None and tag.owner.numel() for tag in owned.values()):
        ownership.by_data = True  # an owner for each element takes too much memory to be kept
    if block_of(node) is not None:
        ownership.recomputed = True  # each call would compute the block again
        ownership.by_data |= any(isinstance(tag, Irregular) for tag in owned.values())
    elif owned and graph.operations[node] not in FIXED:
        claims = ownership.functions if is_python_function(node) else ownership.claims
        claims.append(Claim(graph.index[node], outputs, owned))


def _by_layout(
    graph: Graph, node: Node, slot: int, tag: Tag, children: list[Edge | None], exact: bool
) -> list[Tag | SampleDim | None]:
    """Tag of each operand as shapes and settings say, for one output; UNDECIDED where they say nothing. With exact=True
    nothing is said about the rows that a slice of the samples leaves out.
    """
    operation = graph.operations[node]
    shape = Edge(node, slot).shape
    if operation in VIEWS:
        if isinstance(tag, Regular):
            return [tag] * len(children)
        return [tag.viewed(child.shape) if child else None for child in children]
    place = locate(tag.inner, shape, graph.samples) if isinstance(tag, Regular) else tag.place
    mover = MOVERS.get(operation)
    if place is None or mover is None:
        return [UNDECIDED] * len(children)
    places = mover(node, place, shape, [child.shape if child else None for child in children])
    moved: list[Tag | SampleDim | None] = []
    for to, child in zip(places, children, strict=True):
        if to is None or child is None:
            moved.append(None)
        elif exact and operation in COPYING and to is not UNDECIDED and child.shape[to.dim] != shape[place.dim]:
            moved.append(UNDECIDED)
        else:
            moved.append(UNDECIDED if to is UNDECIDED else tag_at(to, child.shape, graph.samples) or UNDECIDED)
    return moved


def _is_identity(node: Node, sharded: bool) -> bool:
    """True for the functions with which DDP and `fully_shard` notice that a backward pass has left a module."""
    forward = getattr(type(node), "_forward_cls", None)
    if forward is None:
        return False
    return forward is ddp._DDPSink or (sharded and forward.__module__.startswith("torch.distributed.fsdp."))


def views_of_leaves(graph: Graph) -> list[Node]:
    """Views and casts of parameters. They are on the side of the parameters, also if a single sample uses one."""
    seen = dict.fromkeys(graph.leaves)
    views = []
    for node in reversed(graph.nodes):
        (child, slot), *others = graph.children[node] or [(None, 0)]
        if child in seen and not others and is_plain(graph, node):
            size = numel(Edge(child, slot).shape)
            if all(numel(Edge(node, used).shape) <= size for used in graph.used_slots(node)):
                seen[node] = None
                views.append(node)
    return views


def is_plain(graph: Graph, node: Node) -> bool:
    """True if a node has one operand and saves no tensors."""
    return len(graph.children[node]) == 1 and not saved_tensor_names(node)
