"""Ownership: the sample that each element of each gradient between the losses and the parameters belongs to.

`owners(graph)` starts at the losses, whose element i belongs to sample i, and follows the gradient toward the
parameters. Most operations move the samples as their shapes and saved numbers say: see `layouts`. Others route by data
(index, sort) or are not in the table. There the node itself is asked: see `local_probe`. Its answer is a claim about
graphs of this structure, which is verified in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.parallel import distributed as ddp

from samplewise.engine.graph.graph import EdgeKey, Graph, Node, is_python_function, numel
from samplewise.engine.graph.saved import block_of, saved_tensor_names
from samplewise.engine.ownership.layouts import MOVERS, UNDECIDED, VIEWS, Mover, RowOwners, SampleDim, locate
from samplewise.engine.ownership.local_probe import COPYING, Claim, hold, probe_node
from samplewise.engine.ownership.owner_map import (
    Irregular,
    OwnerMap,
    Regular,
    distinct,
    merge_owners,
    owner_map_at,
    single_owner,
    sole_owner,
)
from samplewise.engine.ownership.probe import NO_OWNER


@dataclass
class Ownership:
    """Owner maps of the gradients that belong to single samples."""

    owner_maps: dict[EdgeKey, OwnerMap]
    claims: list[Claim] = field(default_factory=list)  # about nodes that were probed
    functions: list[Claim] = field(default_factory=list)  # about Python functions, to be verified during a pass
    by_data: bool = False  # an owner map has an owner for each element: it is used for this graph only
    recomputed: list[int] = field(default_factory=list)  # probed nodes of checkpointed blocks: verified by weights
    probed: bool = False  # a node was probed
    exact: bool = False  # zeros of probed nodes have no owner
    contradicted: bool = False  # samples seem to be mixed, perhaps only because of the owners of zeros
    steps: list[object] = field(default_factory=list)  # dimension of the samples before and after each operation

    @property
    def derivation(self) -> int:
        """Hash of how the samples were followed, which may depend on sizes: as many tokens as samples by coincidence
        could be taken for them.
        """
        return hash(tuple(self.steps))


def owners(graph: Graph, probes: bool = True, exact: bool = False) -> Ownership:
    """Return the ownership of all gradients that belong to single samples. With probes=False no node is called, and
    nothing is said about the operands of nodes that would be. With exact=True no owner is assumed for zeros of probed
    nodes.
    """
    ownership = Ownership({(0, graph.root.slot): Regular(graph.samples, 1)}, exact=exact)
    owner_maps = ownership.owner_maps
    conflicts: set[EdgeKey] = set()
    reach = graph.reach
    side = {*views_of_leaves(graph), *graph.structure.leaves}
    for at in reach.nodes:
        if at in side:
            continue
        children = reach.operands[at]
        arriving = {
            slot: owner_map for slot in reach.slots[at] if (owner_map := owner_maps.get((at, slot))) is not None
        }
        if len(arriving) < len(reach.slots[at]):
            # Samples are mixed in a part of what arrives, so they may be in all operands.
            for child in children:
                if child is not None:
                    conflicts.add(child)
                    owner_maps.pop(child, None)
            continue
        operand_maps = _move_through(graph, at, arriving, children, side, ownership, probes)
        for child, owner_map in zip(children, operand_maps, strict=True):
            if child is None or child in conflicts:
                continue
            if child in owner_maps:
                merged = merge_owners(owner_maps[child], owner_map, graph.sizes.shapes[child])
                ownership.contradicted |= merged is None and owner_map is not None and ownership.probed
                owner_map = merged
            if owner_map is None:
                conflicts.add(child)
                owner_maps.pop(child, None)
            else:
                owner_maps[child] = owner_map
        if ownership.contradicted and not exact:
            return owners(graph, probes, exact=True)
    for leaf in side:
        for slot in reach.slots[leaf]:
            owner_maps.pop((leaf, slot), None)
    return ownership


def _move_through(
    graph: Graph,
    at: int,
    owner_maps: dict[int, OwnerMap],
    children: tuple[EdgeKey | None, ...],
    side: set[int],
    ownership: Ownership,
    probes: bool,
) -> list[OwnerMap | None]:
    """Owner map of the gradient of each operand of the node at position `at`, for gradients of its outputs with these
    owner maps; None if samples are mixed.
    """
    node = graph.nodes[at]
    is_function = graph.structure.records[at].kind is None
    if is_function and is_identity(node):
        passes_all = all(child is None or position in owner_maps for position, child in enumerate(children))
        if passes_all:
            return [owner_maps.get(position) for position in range(len(children))]
    if not is_function and all(
        isinstance(owner_map, Irregular) and not owner_map.owner.numel() for owner_map in owner_maps.values()
    ):
        return [
            single_owner(NO_OWNER, graph.edge(child), graph.samples) if child else None for child in children
        ]  # zeros
    soles = {sole_owner(owner_map) for owner_map in owner_maps.values()}
    sole = next(iter(soles)) if len(soles) == 1 else None
    copies = probes and graph.structure.operations[at] in COPYING
    if sole is not None and not copies:  # what is computed from the gradient of one sample belongs to it
        return [single_owner(sole, graph.edge(child), graph.samples) if child else None for child in children]
    answers: list[OwnerMap | SampleDim | None]
    if sole is not None:  # but not the elements that were not copied
        answers = [UNDECIDED] * len(children)
    else:
        answers, *more_answers = [
            _by_layout(graph, at, slot, owner_map, children, ownership) for slot, owner_map in owner_maps.items()
        ]
        for more in more_answers:
            for position, child in enumerate(children):
                shape = graph.sizes.shapes[child] if child else None
                answers[position] = _sum(answers[position], more[position], shape)
    operand_maps: list[OwnerMap | None] = []
    unknown: list[int] = []
    for position, answer in enumerate(answers):
        if isinstance(answer, SampleDim):
            child = children[position]
            if child is not None and child[0] not in side:
                unknown.append(position)
            answer = None
        operand_maps.append(answer)
    if unknown and probes:
        answers_of_node = None if ownership.exact else _claimed_before(graph, at, owner_maps, unknown)
        answers_of_node = answers_of_node or probe_node(graph, node, owner_maps, unknown, ownership.exact)
        ownership.contradicted |= ownership.probed and None in answers_of_node.values()
        for position, owner_map in answers_of_node.items():
            operand_maps[position] = owner_map
        _note(graph, at, owner_maps, answers_of_node, ownership)
    return operand_maps


def _claimed_before(
    graph: Graph, at: int, owner_maps: dict[int, OwnerMap], positions: list[int]
) -> dict[int, OwnerMap | None] | None:
    """What a kept plan for such graphs claims about these operands, if the claim holds here, too: verified with fewer
    calls of the node than a probe. Other claims of the plan may not hold, such as those about routed rows.
    """
    for plan in graph.sizes.plans.values():
        for claim in plan.claims:
            if claim.node == at and claim.outputs == owner_maps and list(claim.operands) == positions:
                return dict(claim.operands) if hold([claim], graph) else None
    return None


def _sum(
    first: OwnerMap | SampleDim | None, second: OwnerMap | SampleDim | None, shape: tuple[int, ...] | None
) -> OwnerMap | SampleDim | None:
    """Owner map of the sum of the gradients of an operand of this shape that come from two outputs."""
    if first == second:
        return first
    if shape is None or isinstance(first, SampleDim | None) or isinstance(second, SampleDim | None):
        return UNDECIDED
    return merge_owners(first, second, shape) or UNDECIDED


# Operations whose routing is fixed by numbers and shapes, which are equal in all graphs of a structure.
FIXED = {"Cat", "Flip", "Roll", "Select", "Slice", "Split", "SplitWithSizes", "Stack", "Unbind"}


def _note(
    graph: Graph, at: int, outputs: dict[int, OwnerMap], operands: dict[int, OwnerMap | None], ownership: Ownership
) -> None:
    """Note what a probe of a node has found, so that later graphs verify it."""
    ownership.probed = True
    owned = {position: owner_map for position, owner_map in operands.items() if owner_map is not None}
    if any(
        isinstance(owner_map, Irregular) and owner_map.place is None and owner_map.owner.numel()
        for owner_map in owned.values()
    ):
        ownership.by_data = True  # an owner for each element takes too much memory to be kept
    node = graph.nodes[at]
    if block_of(node) is not None:
        ownership.recomputed.append(at)  # each call would compute the block again
        ownership.by_data |= any(isinstance(owner_map, Irregular) for owner_map in owned.values())
    elif owned and graph.structure.operations[at] not in FIXED:
        claims = ownership.functions if is_python_function(node) else ownership.claims
        claims.append(Claim(at, outputs, owned))


def _by_layout(
    graph: Graph, at: int, slot: int, owner_map: OwnerMap, children: tuple[EdgeKey | None, ...], ownership: Ownership
) -> list[OwnerMap | SampleDim | None]:
    """Owner map of each operand as shapes and settings say, for one output; UNDECIDED where they say nothing. Notes the
    dimensions of the samples, and whether the number of entries per sample has changed. In exact ownership, nothing is
    said about the rows that a slice of the samples leaves out.
    """
    operation = graph.structure.operations[at]
    shapes = graph.sizes.shapes
    steps = ownership.steps
    if operation in VIEWS:
        if isinstance(owner_map, Regular):
            return [owner_map] * len(children)
        return [owner_map.view_as(shapes[child]) if child else None for child in children]
    shape = shapes[at, slot]
    place = locate(owner_map.inner, shape, graph.samples) if isinstance(owner_map, Regular) else owner_map.place
    mover = MOVERS.get(operation)
    if mover is None:
        return [UNDECIDED] * len(children)
    if place is None:
        return _by_several_dims(graph, at, owner_map, mover, shape, children, steps)
    places = mover(graph.nodes[at], place, shape, [shapes[child] if child else None for child in children])
    operand_maps: list[OwnerMap | SampleDim | None] = []
    steps.append(place.dim)
    for to, child in zip(places, children, strict=True):
        if to is None or child is None:
            operand_maps.append(None)
            steps.append(None)
        elif (
            ownership.exact
            and operation in COPYING
            and to is not UNDECIDED
            and shapes[child][to.dim] != shape[place.dim]
        ):
            steps.append(None)
            operand_maps.append(UNDECIDED)
        else:
            steps.append(to.dim if to.post == place.post else (to.dim,))
            operand_maps.append(
                UNDECIDED if to is UNDECIDED else owner_map_at(to, shapes[child], graph.samples) or UNDECIDED
            )
    return operand_maps


_ENTRIES = RowOwners(torch.empty(0, dtype=torch.long))  # any owners of the entries of a dimension


def _by_several_dims(
    graph: Graph,
    at: int,
    owner_map: OwnerMap,
    mover: Mover,
    shape: tuple[int, ...],
    children: tuple[EdgeKey | None, ...],
    steps: list[object],
) -> list[OwnerMap | SampleDim | None]:
    """As `_by_layout`, for owners that depend on several dimensions, such as rows and tokens of packed documents: each
    of these dimensions must be moved as a whole.
    """
    owner = distinct(owner_map.owner) if isinstance(owner_map, Irregular) else torch.empty(0)
    dims = [dim for dim in range(owner.dim()) if owner.shape[dim] > 1]
    if not owner.numel() or not dims:
        return [UNDECIDED] * len(children)
    shapes = [graph.sizes.shapes[child] if child else None for child in children]
    moved = [mover(graph.nodes[at], SampleDim(dim, _ENTRIES), shape, shapes) for dim in dims]
    operand_maps: list[OwnerMap | SampleDim | None] = []
    steps.append(tuple(dims))
    for places, child in zip(zip(*moved, strict=True), shapes, strict=True):
        # What mixes one of the dimensions may leave the samples apart, as attention with a mask does: it is probed.
        to = [-1 if place is None else place.dim for place in places]
        steps.append(tuple(to))
        if child is None:
            operand_maps.append(None)
        elif (
            min(to) < 0
            or len(set(to)) < len(to)
            or any(place is None or place.post is not _ENTRIES for place in places)
            or [child[d] for d in to] != [shape[d] for d in dims]
        ):
            operand_maps.append(UNDECIDED)
        else:
            rows = owner.squeeze([d for d in range(owner.dim()) if d not in dims])
            rows = rows.permute(sorted(range(len(to)), key=to.__getitem__))
            sizes = [child[d] if d in to else 1 for d in range(len(child))]
            operand_maps.append(Irregular(graph.samples, rows.reshape(sizes).expand(child)))
    return operand_maps


def is_identity(node: Node) -> bool:
    """True for the functions with which DDP, `fully_shard` and hooks of modules notice that a backward pass has left or
    entered a module.
    """
    forward = getattr(type(node), "_forward_cls", None)
    if forward is None:
        return False
    if forward in (ddp._DDPSink, BackwardHookFunction):
        return True
    return bool(forward.__module__.startswith("torch.distributed.fsdp."))


def views_of_leaves(graph: Graph) -> list[int]:
    """Positions of views and casts of parameters. They are on the side of the parameters, also if a single sample uses
    one.
    """
    side = set(graph.structure.leaves)
    views = []
    shapes = graph.sizes.shapes
    for at in reversed(graph.reach.nodes):
        operands = graph.reach.operands[at]
        if len(operands) == 1 and operands[0] and operands[0][0] in side and is_plain(graph, graph.nodes[at]):
            size = numel(shapes[operands[0]])
            if all(numel(shapes[at, used]) <= size for used in graph.reach.slots[at]):
                side.add(at)
                views.append(at)
    return views


def is_plain(graph: Graph, node: Node) -> bool:
    """True if a node has one operand and saves no tensors."""
    return len(graph.children[node]) == 1 and not saved_tensor_names(node)
