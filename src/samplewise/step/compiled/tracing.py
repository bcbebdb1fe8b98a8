"""Tracing of the forward and backward pass of one window to an fx graph.

Inputs are parameters, other tensors of the modules and the samples; outputs are per-sample results (losses, ...) and
the gradients of the update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from samplewise.core.batches import leaves, map_leaves
from samplewise.engine.gradients import Gradients, gradients_of, prepare
from samplewise.errors import SamplesMayInteractWarning
from samplewise.step.accumulate import EXACT, PlainAccumulator, WeightedAccumulator
from samplewise.step.compiled import CannotCompile, inductor
from samplewise.step.compiled.calls import NumberReads
from samplewise.step.compiled.decompositions import DECOMPOSITIONS
from samplewise.step.forward import LossEvaluator
from samplewise.transforms.stats import PerSample, SampleStats, denominator

VIEWS = {
    getattr(torch.ops.aten, name).default
    for name in ("alias", "permute", "t", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "detach")
} | {torch.ops.aten.transpose.int, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims}


@dataclass(frozen=True)
class Tensors:
    """Tensors of the modules: `trained` by name, `untrained` parameters and buffers, and (module, name, tensor) for
    every occurrence.
    """

    trained: dict[str, Tensor]
    untrained: list[Tensor]
    occurrences: list[tuple[nn.Module, str, Tensor]]

    @classmethod
    def of(cls, evaluator: LossEvaluator) -> Tensors:
        trained = evaluator.trained.trainable()
        occurrences = [
            (module, name, tensor)
            for module in evaluator.modules
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        ]
        if {id(p) for p in trained.values()} - {id(tensor) for _, _, tensor in occurrences}:
            raise CannotCompile("the optimizer has tensors that are not parameters of the model")
        ours = {id(p) for p in trained.values()}
        untrained = {id(tensor): tensor for _, _, tensor in occurrences if id(tensor) not in ours}
        return cls(trained, list(untrained.values()), occurrences)

    def replace(self, stack: ExitStack, trained: Sequence[Tensor], untrained: Sequence[Tensor]) -> None:
        """Replace all tensors in the modules until the stack is closed."""
        originals = [*self.trained.values(), *self.untrained]
        new = {id(a): b for a, b in zip(originals, [*trained, *untrained], strict=True)}
        for root in dict.fromkeys(module for module, _, _ in self.occurrences):
            here = {name: new[id(tensor)] for module, name, tensor in self.occurrences if module is root}
            stack.enter_context(inductor.parameters_replaced(root, here))

    def check_replaced(self, trained: Sequence[Tensor], untrained: Sequence[Tensor]) -> None:
        """Raise CannotCompile if a module has other tensors than these: the graph would not contain the change."""
        roots = dict.fromkeys(module for module, _, _ in self.occurrences)
        now = {id(t) for root in roots for t in (*root.parameters(), *root.buffers())}
        if now - {id(t) for t in (*trained, *untrained)}:
            raise CannotCompile("the model replaces a buffer in the forward pass, instead of changing it in place")


@dataclass
class Backward:
    """Traced graph and the meaning of its results.

    `reached`: names of the trained parameters that have a gradient. `moving`: indices of the untrained tensors that the
    graph changes. `factors`: for each gradient that is a column times a row, the indices of both among the results.
    """

    graph: fx.GraphModule
    trained: list[str]
    columns: list[str]  # fields of the per-sample results, which come first
    by_name: dict[str, list[str]]  # names of the entries of the fields that are dicts, which come next
    reached: list[str]
    constants: list[Tensor]  # the graph's last inputs
    samples: int  # number of losses
    draws: bool  # the graph draws random numbers
    moving: list[int] = field(default_factory=list)
    factors: dict[str, tuple[int, int]] = field(default_factory=dict)

    def stats(self, results: Sequence[Tensor]) -> SampleStats:
        """Per-sample results, which are the first results of the graph."""
        fields: dict[str, Any] = dict(zip(self.columns, results, strict=False))
        entries = iter(results[len(self.columns) :])
        for name, names in self.by_name.items():
            fields[name] = {entry: next(entries) for entry in names}
        return SampleStats(**fields)

    @property
    def first_gradient(self) -> int:
        """Index of the first gradient among the results."""
        return len(self.columns) + sum(map(len, self.by_name.values()))

    def gradients(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients of the update by parameter name."""
        return dict(zip(self.reached, results[self.first_gradient :], strict=False))


def trace_backward(
    accumulator: PlainAccumulator | WeightedAccumulator,
    tensors: Tensors,
    microbatch: Any,
    divisor: float | None,
    decompositions: inductor.Decompositions | None = None,
) -> Backward:
    """Trace the accumulation of one window; `microbatch` is an example of its samples. divisor: of the gradient
    sums; None: the denominator of the window. decompositions: None: those of compiled updates. The accumulator is not
    used afterwards.
    """
    evaluator = accumulator.evaluator
    layout: dict[str, Any] = {}

    def run(*flat: Tensor) -> list[Tensor]:
        inputs = iter(flat)
        trained = {name: next(inputs).detach().requires_grad_() for name in tensors.trained}
        untrained = [next(inputs) for _ in tensors.untrained]
        example = map_leaves(microbatch, lambda leaf: next(inputs) if isinstance(leaf, Tensor) else leaf)
        with ExitStack() as stack:
            tensors.replace(stack, list(trained.values()), untrained)
            accumulator.evaluator = traced = TracedEvaluator(evaluator, trained)
            with NumberReads():  # above the mode of the tracer, which would answer the loss function with a constant
                (stats,) = accumulator.add([example], 0)
            gradients = traced.gradient_sum(denominator([stats]) if divisor is None else divisor)
            tensors.check_replaced(list(trained.values()), untrained)
        fields = {name: values for name in RESULTS if (values := getattr(stats, name)) is not None}
        dicts = {name: values for name, values in fields.items() if isinstance(values, dict)}
        columns = {name: values for name, values in fields.items() if name not in dicts}
        by_name = {name: list(values) for name, values in dicts.items()}
        layout.update(columns=list(columns), by_name=by_name, reached=list(gradients), samples=len(stats))
        return [*columns.values(), *(t for values in dicts.values() for t in values.values()), *gradients.values()]

    # contiguous, as in compiled calls
    data = [leaf.contiguous() for leaf in leaves(microbatch) if isinstance(leaf, Tensor)]
    examples = [t.detach() for t in (*tensors.trained.values(), *tensors.untrained, *data)]
    graph = inductor.trace(run, examples, decompositions or inductor.compiler_decompositions(DECOMPOSITIONS))
    backward = Backward(
        graph,
        list(tensors.trained),
        layout["columns"],
        layout["by_name"],
        layout["reached"],
        _lift_constants(graph),
        layout["samples"],
        any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes),
    )
    first = len(tensors.trained)
    backward.moving = [k - first for k in sorted(_changed_inputs(graph))]
    if any(not 0 <= k < len(tensors.untrained) for k in backward.moving):
        raise CannotCompile("the model changes its parameters or its data in place")
    _find_factors(backward)
    return backward


RESULTS = ("losses", "counts", "raw_norms", "coefficients", "shares", "columns")  # fields of SampleStats, in order


class TracedEvaluator(LossEvaluator):
    """Evaluator in tracing: the model has the tensors `inputs` instead of its parameters, and the weighted sum of
    gradients is returned by `gradient_sum` instead of being added to `.grad`.
    """

    def __init__(self, evaluator: LossEvaluator, inputs: dict[str, Tensor]):
        vars(self).update(vars(evaluator))
        self.inputs = inputs
        self.gradient_sum: Callable[[Tensor | float], dict[str, Tensor]]  # Σ w × gradient, divided by a number

    def losses(self, microbatch: Any) -> tuple[Tensor, Tensor | None]:
        losses, counts = super().losses(microbatch)
        if losses.dtype not in EXACT:
            raise CannotCompile(f"losses are {losses.dtype}")
        reached = torch.autograd.grad(losses.sum(), list(self.inputs.values()), retain_graph=True, allow_unused=True)
        self._reached = {name: p for (name, p), g in zip(self.inputs.items(), reached, strict=True) if g is not None}
        return losses, counts

    def gradients(self, losses: Tensor, microbatch: Any = None, checked: bool = False) -> Gradients:
        """As in an uncompiled step, without further passes: if samples may interact, nothing is compiled."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", SamplesMayInteractWarning)
            return prepare(gradients_of(losses, self.inputs, self.modules, interacting=self.interacting))

    def add_sum(self, losses: Tensor, weights: Tensor | None = None) -> None:
        numerators = torch.ones_like(losses) if weights is None else weights

        def gradient_sum(divisor: Tensor | float) -> dict[str, Tensor]:
            # Weights are divided, which are fewer than elements of gradients.
            weights = (numerators / divisor).to(losses.dtype)
            gradients = torch.autograd.grad(losses, list(self._reached.values()), weights, retain_graph=True)
            return dict(zip(self._reached, gradients, strict=True))

        self.gradient_sum = gradient_sum

    def add_weighted(self, g: Gradients, weights: PerSample | None) -> None:
        sums = g.sum(weights)
        self.gradient_sum = lambda divisor: {name: sums[name] / divisor for name in self._reached}


# --- reading the graph ------------------------------------------------------------------------------------------------


def _lift_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Turn constant tensors of the graph into inputs, so that later changes of their values take effect."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    constants: list[Tensor] = []
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        tensor = getattr(graph, str(node.target))
        if not isinstance(tensor, Tensor):
            raise CannotCompile("the graph has an object that is neither a tensor nor a number")
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"constant_{len(constants)}")
        last.meta["val"] = tensor
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
        constants.append(tensor)
    graph.recompile()
    return constants


def _changed_inputs(graph: fx.GraphModule) -> set[int]:
    """Indices of the inputs that the graph changes in place, also through a view or alias."""
    inputs = {node: k for k, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    changes = set()
    for node in graph.graph.nodes:
        for origin in _written_arguments(node):
            while origin.op == "call_function" and _is_alias(origin) and isinstance(origin.args[0], fx.Node):
                origin = origin.args[0]
            if origin in inputs:
                changes.add(inputs[origin])
    return changes


def _written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Arguments that the operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    for k, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, fx.Node):
                yield value


def _is_alias(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _find_factors(backward: Backward) -> None:
    """Append column and row of each gradient that is a column times a row to the results."""
    (output,) = (node for node in backward.graph.graph.nodes if node.op == "output")
    results = list(output.args[0])
    for k, name in enumerate(backward.reached, backward.first_gradient):
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
    column, row = node.args
    if not (isinstance(column, fx.Node) and isinstance(row, fx.Node)):
        return None
    a, b = column.meta["val"].shape, row.meta["val"].shape
    return (column, row) if len(a) == len(b) == 2 and a[1] == b[0] == 1 else None
