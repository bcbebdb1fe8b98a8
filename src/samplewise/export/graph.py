"""One update as a functional graph: state, batch and learning rate → losses, norms, weights, and the new state.

The forward pass, the backward pass and the transforms come from the trace that compiled updates use; the optimizer's
formula is the same, too. Nothing in the graph needs autograd or Python. An update with a non-finite loss or gradient
leaves the state as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from samplewise.core.batches import leaves, map_leaves
from samplewise.core.state import eval_mode
from samplewise.step.accumulate import PlainAccumulator, WeightedAccumulator
from samplewise.step.compiled import CannotCompile, inductor
from samplewise.step.compiled.calls import Calls, ValueReads
from samplewise.step.compiled.optim import Formula, OptimBuckets
from samplewise.step.compiled.tracing import Backward, Tensors, trace_backward
from samplewise.step.compiled.verify import DryRun, count_operations
from samplewise.step.step import Step
from samplewise.transforms.stats import SampleStats

OUTPUTS = ("loss", "norm", "weight")
Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Method:
    """Functional graph (state, constants, inputs) → outputs; `update` returns the new state after its outputs.

    inputs: examples by name.
    """

    graph: fx.GraphModule
    inputs: dict[str, Tensor]
    outputs: list[str]

    def __call__(self, state: Sequence[Tensor], constants: Sequence[Tensor], *inputs: Tensor) -> list[Tensor]:
        run: Any = fx.Interpreter(self.graph).run
        return list(run(*state, *constants, *inputs))


@dataclass(frozen=True)
class UpdateProgram:
    """Methods of an exported update, and the tensors that they read.

    state: parameters by their names, "optimizer.exp_avg.0.weight", ..., and step counts "optimizer.step", ...
    constants: parameters that are not trained, and buffers.
    """

    state: dict[str, Tensor]
    constants: dict[str, Tensor]
    update: Method
    predict: Method | None


def trace_program(
    step: Step,
    formula: Formula,
    example: Any,
    forward: Forward | None,
    decompositions: inductor.Decompositions,
) -> UpdateProgram:
    """Trace one update of `step`, and its prediction `forward`, for batches like `example`."""
    evaluator = step._evaluator
    optimizer = step._applier.optimizer
    evaluator.trained.refresh()
    tensors = Tensors.of(evaluator)
    accumulator = step._windows.make_accumulator()
    assert isinstance(accumulator, (PlainAccumulator, WeightedAccumulator))
    # The engine verifies structures of graphs with passes that cannot be traced; it does so here.
    dry_run = DryRun(accumulator, evaluator, step._applier, step.config, example, whole_update=True, formula=True)
    count_operations(dry_run, Calls())
    with evaluator.trained.without_grads(), ValueReads(), torch.enable_grad():
        backward = trace_backward(accumulator, tensors, example, step.config.constant_divisor, decompositions)
    if backward.draws:
        raise CannotCompile("the model draws random numbers, as in dropout")
    if backward.moving:
        raise CannotCompile("the model changes its buffers in the forward pass, as BatchNorm does in training mode")
    names = {id(p): name for name, p in tensors.trained.items() if name in backward.reached}
    buckets = OptimBuckets(formula, _with_state(formula, optimizer, names), names)
    update = FunctionalUpdate(backward, buckets, step.config.max_grad_norm, step.config.checks_finite)

    state = {name: p.detach().clone() for name, p in tensors.trained.items()}
    state |= {f"optimizer.{key}.{name}": t.detach().clone() for (name, key), t in buckets.states.items()}
    counts = [torch.tensor(count) for count in buckets.steps] if formula.ages else []
    state |= {f"optimizer.step.{k}": count for k, count in enumerate(counts)}
    constants = _constants(tensors)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    batch = inputs_of(example)
    inputs = {**batch, "lr": torch.tensor(rates[0] if len(rates) == 1 else rates)}

    def flat(*values: Tensor) -> list[Tensor]:
        sizes = len(tensors.trained), len(buckets.states), len(counts), len(constants), len(batch)
        places = iter(values)
        trained, states, steps, untrained, rows = ([next(places) for _ in range(size)] for size in sizes)
        return update(trained, states, steps, untrained, rows, next(places))

    graph = inductor.trace_functional(flat, [*state.values(), *constants.values(), *inputs.values()], decompositions)
    return UpdateProgram(
        state=state,
        constants=constants,
        update=Method(graph, inputs, list(OUTPUTS)),
        predict=None if forward is None else _trace_predict(step, forward, tensors, state, example, decompositions),
    )


def _trace_predict(
    step: Step,
    forward: Forward,
    tensors: Tensors,
    state: dict[str, Tensor],
    example: Any,
    decompositions: inductor.Decompositions,
) -> Method:
    """Trace the prediction in eval mode. Its inputs are those tensors of the batch that it reads."""
    batch = inputs_of(example)
    constants = _constants(tensors)
    outputs = 0

    def flat(*values: Tensor) -> list[Tensor]:
        nonlocal outputs
        places = iter(values)
        current = [next(places) for _ in state]
        untrained = [next(places) for _ in constants]
        rows = map_leaves(example, lambda leaf: next(places) if isinstance(leaf, Tensor) else leaf)
        with ExitStack() as stack:
            tensors.replace(stack, current[: len(tensors.trained)], untrained)
            result = forward(step.model, rows)
        results = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        outputs = len(results)
        return results

    with torch.no_grad(), eval_mode(*step._evaluator.modules), ValueReads():
        graph = inductor.trace_functional(flat, [*state.values(), *constants.values(), *batch.values()], decompositions)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for name, node in list(zip(batch, placeholders[-len(batch) :], strict=True)):
        if not node.users:
            graph.graph.erase_node(node)
            del batch[name]
    graph.recompile()
    return Method(graph, batch, ["output"] if outputs == 1 else [f"output_{k}" for k in range(outputs)])


@dataclass
class FunctionalUpdate:
    """The sequence of one update, as a function of tensors; `trace_update` makes a graph of it."""

    backward: Backward
    buckets: OptimBuckets
    max_grad_norm: float | None
    checks: bool

    def __call__(
        self,
        trained: list[Tensor],
        states: list[Tensor],
        counts: list[Tensor],
        untrained: list[Tensor],
        inputs: list[Tensor],
        lr: Tensor,
    ) -> list[Tensor]:
        parameters = dict(zip(self.backward.trained, trained, strict=True))
        old_states = dict(zip(self.buckets.states, states, strict=True))
        run: Any = fx.Interpreter(self.backward.graph).run
        results = run(*trained, *untrained, *inputs, *self.backward.constants)
        stats = self.backward.stats(results)
        gradients = self.backward.gradients(results)

        norm = norms_of(stats)
        if norm is None or self.max_grad_norm is not None:
            total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
            norm = total.reshape(1) if norm is None else norm
        if self.max_grad_norm is not None:  # as in torch.nn.utils.clip_grad_norm_
            scale = (self.max_grad_norm / (total + 1e-6)).clamp(max=1)
            gradients = {name: g * scale for name, g in gradients.items()}

        fit = self._fit(stats, norm) if self.checks else None
        if fit is not None:
            gradients = {name: torch.where(fit, g, 0.0) for name, g in gradients.items()}
        scalars = self.buckets.tensor_scalars(lr, counts, fit)
        new, new_states = self.buckets.apply(parameters, gradients, old_states, scalars)
        new_counts = [count + (1.0 if fit is None else fit.to(count.dtype)) for count in counts]
        return [stats.losses, norm, weights_of(stats), *new.values(), *new_states.values(), *new_counts]

    def _fit(self, stats: SampleStats, norm: Tensor) -> Tensor:
        """True (0-d) if losses, counts and norms are finite, counts are not negative, and their sum is positive."""
        numbers = [stats.losses, norm]
        if stats.counts is None:
            return (torch.cat(numbers) * 0).sum() == 0
        finite = (torch.cat([*numbers, stats.counts]) * 0).sum() == 0
        return finite & (stats.counts.min() >= 0) & (stats.counts.sum() > 0)


def norms_of(stats: SampleStats) -> Tensor | None:
    """Norms of the samples' gradients (n,); None if no transform needs them."""
    norms = stats.raw_norms
    return torch.linalg.vector_norm(torch.stack(list(norms.values())), dim=0) if isinstance(norms, dict) else norms


def weights_of(stats: SampleStats) -> Tensor:
    """Weights of the samples (n,), or (n, parameters) if they differ by parameter."""
    if stats.coefficients is None:
        return torch.ones_like(stats.losses)
    if isinstance(stats.coefficients, dict):
        return torch.stack(list(stats.coefficients.values()), 1)
    return stats.coefficients


def _with_state(formula: Formula, optimizer: Any, names: dict[int, str]) -> Any:
    """Parameter groups and state of the optimizer; before its first update, the state is zeros."""
    state: dict[Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if id(p) in names):
            present = getattr(optimizer, "state", {}).get(p, {})
            zeros = {key: torch.zeros_like(p) for key in formula.states(group)}
            state[p] = {**zeros, **{key: value for key, value in present.items() if value is not None}}
            if formula.ages:
                state[p].setdefault("step", torch.tensor(0.0))
    return SimpleNamespace(param_groups=optimizer.param_groups, state=state)


def _constants(tensors: Tensors) -> dict[str, Tensor]:
    """Tensors of the model that are not trained, by names that are unique."""
    names: dict[int, str] = {}
    for _, name, tensor in tensors.occurrences:
        names.setdefault(id(tensor), name)
    return {f"{names[id(t)]}.{k}": t.detach().clone() for k, t in enumerate(tensors.untrained)}


def inputs_of(example: Any) -> dict[str, Tensor]:
    """Tensors of a batch by name: keys of a dict, x and y for a pair, otherwise input_0, ..."""
    tensors = [leaf.detach().contiguous() for leaf in leaves(example) if isinstance(leaf, Tensor)]
    names = [f"input_{k}" for k in range(len(tensors))]
    if isinstance(example, Mapping) and all(isinstance(value, Tensor) for value in example.values()):
        names = [str(key) for key in example]
    elif len(tensors) == 2:
        names = ["x", "y"]
    return dict(zip(names, tensors, strict=True))


# --- facts about a program --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors in memory; scratch: of intermediate results, None if they are allocated at run time."""

    constant: int
    mutable: int
    scratch: int | None


def register_buffers(module: nn.Module, prefix: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Register tensors as buffers prefix_0, prefix_1, ...; their own names may contain dots. Returns these names."""
    names = [f"{prefix}_{k}" for k in range(len(tensors))]
    for name, tensor in zip(names, tensors.values(), strict=True):
        module.register_buffer(name, tensor)
    return names


def metadata(program: UpdateProgram) -> str:
    """Names that a file stores, as JSON."""
    return json.dumps(
        {
            "state": list(program.state),
            "inputs": list(program.update.inputs),
            "predict": None if program.predict is None else list(program.predict.inputs),
            "lr": program.update.inputs["lr"].tolist(),
        }
    )
