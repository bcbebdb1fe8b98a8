"""Tracing of the forward and backward pass of one window to an fx graph.

Inputs are parameters, other tensors of the modules and the samples; outputs are per-sample results (losses, ...) and
the gradients of the update.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from samplewise.core.batches import leaves, map_leaves
from samplewise.engine.checks import check_attached
from samplewise.engine.gradients import gradients_of
from samplewise.errors import SamplesMayInteractWarning
from samplewise.step.accumulate import PerSampleAccumulator, as_part, counts_of
from samplewise.step.compiled import inductor
from samplewise.step.compiled.decompositions import DECOMPOSITIONS
from samplewise.step.compiled.errors import CannotCompile
from samplewise.step.forward import LossEvaluator
from samplewise.step.microbatch_stats import MicrobatchStats, total
from samplewise.transforms.stats import Numbers

VIEWS = {
    getattr(torch.ops.aten, name).default
    for name in ("alias", "permute", "t", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "detach")
} | {torch.ops.aten.transpose.int, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims}


@dataclass(frozen=True)
class Tensors:
    """Tensors of the modules: `trained` by name, the `others`, and (module, name, tensor) for every occurrence."""

    trained: dict[str, Tensor]
    others: list[Tensor]
    places: list[tuple[nn.Module, str, Tensor]]

    @classmethod
    def of(cls, evaluation: LossEvaluator) -> Tensors:
        trained = evaluation.trained.wanted()
        places = [
            (module, name, tensor)
            for module in evaluation.modules
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        ]
        if {id(p) for p in trained.values()} - {id(tensor) for _, _, tensor in places}:
            raise CannotCompile("the optimizer has tensors that are not parameters of the model")
        ours = {id(p) for p in trained.values()}
        others = {id(tensor): tensor for _, _, tensor in places if id(tensor) not in ours}
        return cls(trained, list(others.values()), places)

    def replaced(self, stack: ExitStack, trained: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Replace all tensors in the modules until the stack is closed."""
        originals = [*self.trained.values(), *self.others]
        new = {id(a): b for a, b in zip(originals, [*trained, *others], strict=True)}
        for root in dict.fromkeys(module for module, _, _ in self.places):
            here = {name: new[id(tensor)] for module, name, tensor in self.places if module is root}
            stack.enter_context(inductor.parameters_replaced(root, here))


@dataclass
class Backward:
    """Traced graph and the meaning of its results.

    `reached`: names of the trained parameters that have a gradient. `moving`: indices of the other tensors that the
    graph changes. `factors`: for each gradient that is a column times a row, the indices of both among the results.
    """

    graph: fx.GraphModule
    trained: list[str]
    columns: list[str]  # fields of the per-sample results, which come first
    weights_by_name: list[str]  # empty unless the coefficients are a dict
    reached: list[str]
    constants: list[Tensor]  # the graph's last inputs
    samples: int  # number of losses
    draws: bool  # the graph draws random numbers
    moving: list[int] = field(default_factory=list)
    factors: dict[str, tuple[int, int]] = field(default_factory=dict)

    def part(self, results: Sequence[Tensor]) -> MicrobatchStats:
        """Per-sample results, which are the first results of the graph."""
        known: dict[str, Any] = dict(zip(self.columns, results, strict=False))
        if self.weights_by_name:
            start = len(self.columns)
            known["weights"] = dict(zip(self.weights_by_name, results[start:], strict=False))
        return MicrobatchStats(**known)

    @property
    def known(self) -> int:
        """Number of results before the gradients."""
        return len(self.columns) + len(self.weights_by_name)

    def gradients(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients of the update by parameter name."""
        return dict(zip(self.reached, results[self.known :], strict=False))


def trace_backward(evaluation: LossEvaluator, summing: PerSampleAccumulator, tensors: Tensors, piece: Any) -> Backward:
    """Trace forward and backward pass of one window; `piece` is an example of its samples."""
    said: dict[str, Any] = {}

    def run(*flat: Tensor) -> list[Tensor]:
        inputs = iter(flat)
        wanted = {name: next(inputs).detach().requires_grad_() for name in tensors.trained}
        others = [next(inputs) for _ in tensors.others]
        example = map_leaves(piece, lambda leaf: next(inputs) if isinstance(leaf, Tensor) else leaf)
        with ExitStack() as stack:
            tensors.replaced(stack, list(wanted.values()), others)
            part, gradients = _computed(evaluation, summing, wanted, example)
        columns = {name: column for name in MicrobatchStats.__slots__ if (column := getattr(part, name)) is not None}
        weights = columns.pop("weights") if isinstance(part.weights, dict) else {}
        said.update(columns=list(columns), weights=list(weights), reached=list(gradients), samples=len(part))
        return [*columns.values(), *weights.values(), *gradients.values()]

    data = [leaf.contiguous() for leaf in leaves(piece) if isinstance(leaf, Tensor)]  # contiguous, as in compiled calls
    examples = [t.detach() for t in (*tensors.trained.values(), *tensors.others, *data)]
    graph = inductor.trace(run, examples, DECOMPOSITIONS)
    found = Backward(
        graph,
        list(tensors.trained),
        said["columns"],
        said["weights"],
        said["reached"],
        _lifted(graph),
        said["samples"],
        any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes),
    )
    first = len(tensors.trained)
    found.moving = [k - first for k in sorted(_changed(graph))]
    if any(not 0 <= k < len(tensors.others) for k in found.moving):
        raise CannotCompile("the model changes its parameters or its data in place")
    _find_factors(found)
    return found


def _computed(
    evaluation: LossEvaluator, summing: PerSampleAccumulator, wanted: dict[str, Tensor], piece: Any
) -> tuple[MicrobatchStats, dict[str, Tensor]]:
    """Compute the per-sample results of a window and the gradients of its update, by parameter name."""
    losses, counts = evaluation.losses(piece)
    check_attached(losses)
    if losses.dtype not in (torch.float32, torch.float64):
        raise CannotCompile(f"losses are {losses.dtype}")
    reached = _reached(losses, wanted)
    if not (summing.chain.weighs or summing.record_norms):
        part = MicrobatchStats(losses.detach(), counts)
        return part, _weighted(losses, reached, torch.ones_like(losses) / total([part]))
    numbers = Numbers(losses.detach(), counts_of(losses, counts), piece, torch.arange(len(losses)))
    g = None
    if summing.chain.samples.measures or summing.record_norms:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SamplesMayInteractWarning)
            g = gradients_of(losses, wanted, evaluation.modules).prepare()
        numbers = summing.measured(g, numbers, summing.chain.samples, summing.record_norms)
    (numbers,) = summing.chain.samples.weigh([numbers])
    part = as_part(numbers)
    if g is None and not isinstance(numbers.coefficients, dict):
        return part, _weighted(losses, reached, numbers.weights / total([part]))
    g = gradients_of(losses, wanted, evaluation.modules) if g is None else g
    sums = g.sum(numbers.coefficients)
    return part, {name: sums[name] / total([part]) for name in reached}


def _reached(losses: Tensor, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters on which the losses depend."""
    found = torch.autograd.grad(losses.sum(), list(wanted.values()), retain_graph=True, allow_unused=True)
    return {name: p for (name, p), g in zip(wanted.items(), found, strict=True) if g is not None}


def _weighted(losses: Tensor, reached: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(losses, list(reached.values()), weights.to(losses.dtype), retain_graph=True)
    return dict(zip(reached, found, strict=True))


# --- reading the graph ------------------------------------------------------------------------------------------------


def _lifted(graph: fx.GraphModule) -> list[Tensor]:
    """Turn constant tensors of the graph into inputs, so that later changes of their values take effect."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    found: list[Tensor] = []
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        tensor = getattr(graph, str(node.target))
        if not isinstance(tensor, Tensor):
            raise CannotCompile("the graph has an object that is neither a tensor nor a number")
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"constant_{len(found)}")
        last.meta["val"] = tensor
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
        found.append(tensor)
    graph.recompile()
    return found


def _changed(graph: fx.GraphModule) -> set[int]:
    """Indices of the inputs that the graph changes in place."""
    inputs = {node: k for k, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    found = set()
    for node in graph.graph.nodes:
        origins = [_origin(argument) for argument in _written(node)]
        found |= {inputs[origin] for origin in origins if origin in inputs}
    return found


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Arguments that the operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    for k, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(given, fx.Node):
                yield given


def _origin(node: fx.Node) -> fx.Node:
    """Return the node of which this node is a view or alias, or the node itself."""
    while node.op == "call_function" and _aliases(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _aliases(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _find_factors(backward: Backward) -> None:
    """Append column and row of each gradient that is a column times a row to the results."""
    (output,) = (node for node in backward.graph.graph.nodes if node.op == "output")
    results = list(output.args[0])
    for k, name in enumerate(backward.reached, backward.known):
        pair = _column_and_row(results[k])
        if pair is not None:
            backward.factors[name] = (len(results), len(results) + 1)
            results += pair
    output.args = (tuple(results),)
    backward.graph.recompile()


def _column_and_row(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    while node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node.target is not torch.ops.aten.mul.Tensor:
        return None
    left, right = node.args
    if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
        return None
    a, b = left.meta["val"].shape, right.meta["val"].shape
    return (left, right) if len(a) == len(b) == 2 and a[1] == b[0] == 1 else None
