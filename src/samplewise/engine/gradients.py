"""`sw.gradients`: per-sample gradients of a vector of losses, and quantities computed from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import index
from typing import Literal, overload

import torch
from torch import Tensor, nn

from samplewise.core.text import listed, plural, render
from samplewise.engine.arguments import (
    Parameters,
    WantedParameters,
    Weights,
    check_attached,
    check_direction,
    check_is_tensor,
    check_rows,
    wanted_parameters,
    weights_by_name,
)
from samplewise.engine.backward import accumulate_grad, notify_ready
from samplewise.engine.deferred_checks import (
    DeferredChecks,
    current_checks,
    finite_losses,
    finite_numbers,
    finite_tensors,
)
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.graph.graph import Graph
from samplewise.engine.graph.saved import free_saved, graph_alive
from samplewise.engine.outputs import (
    LossParts,
    Outputs,
    Samples,
    add_by_sample,
    check_owner,
    parts_of_loss,
    sample_count,
)
from samplewise.engine.plan import Quantity
from samplewise.engine.profile import Profile, profile
from samplewise.engine.projection import Method, Projection
from samplewise.engine.quantities import Norms, QuantityEvaluator, total_of, zeros
from samplewise.engine.strategies import Planner
from samplewise.errors import DistributedError, LossesError, ParameterError, SamplewiseError
from samplewise.parallel import collectives
from samplewise.parallel.ddp import refuse_replicas

STRATEGIES = ("fused", "twice", "full", "reference")


def gradients(
    losses: Tensor,
    parameters: Parameters,
    *,
    outputs: Outputs | None = None,
    samples: Samples | None = None,
    create_graph: bool = False,
    strategy: Literal["fused", "twice", "full", "reference"] | None = None,
    interacting: Literal["refuse", "allow"] = "refuse",
) -> Gradients:
    """Per-sample gradients: the gradient of each element of `losses` with respect to the parameters.

    `losses` is 1-D, one value per sample, attached to the autograd graph. `parameters` is a module, a dict of named
    tensors, or an iterable of tensors or of (name, tensor) pairs. Nothing is computed before the first call of a method
    such as `norms` or `sum`; the graph is not freed.

    outputs: needed if `losses` is a scalar: the tensor (B, ...) that it was computed from, such as the logits, or a
        list of tensors. Its rows are the samples. The gradient of a sample is then its part of the gradient of the
        loss, with all factors that the loss contains: of a mean over B samples, it is 1/B times the gradient of the
        sample's own loss, and so is its norm. The parts add up to the gradient of the loss.
    samples: sample that each row of `outputs` belongs to, a tensor of integers from 0 on, with any number of rows per
        sample: the two rows of a preference pair, the completions of a prompt, the boxes of an image. A shape with more
        dimensions gives single elements to samples, such as (1, T) the tokens of packed documents. For several outputs,
        a list. Rows with negative numbers, such as padding, must not enter the loss. Without `outputs`, the sample of
        each element of `losses`, which are added up for each sample; those with negative numbers are left out. On an
        accelerator, keep `samples` on the CPU: its largest number is read. Default: row i is sample i.
    create_graph: if True, the returned quantities can be differentiated. Fused attention kernels have no second
        derivative and are refused: compute the losses under torch.nn.attention.sdpa_kernel(SDPBackend.MATH). Default
        False.
    strategy: "fused" (default), "twice" (least memory), "full" (keeps all rows), "reference" (one backward pass per
        sample).
    interacting: "refuse" (default) raises SamplesInteractError if the loss of a sample depends on other samples;
        "allow" returns the rows of the Jacobian.
    """
    if strategy not in (None, *STRATEGIES):
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; found {strategy!r}.")
    check_interacting(interacting)
    if create_graph and strategy == "twice":
        raise ValueError(
            "create_graph=True needs a strategy that keeps gradients; found strategy='twice'. Use 'fused'."
        )
    check_is_tensor(losses, "sw.gradients(losses, model)")
    if create_graph and outputs is not None:
        raise ValueError(
            "create_graph=True needs losses (B,), because the derivative of a scalar loss at its outputs is held "
            "constant; found outputs. Pass the losses of the samples."
        )
    if outputs is None:
        losses = losses_by_sample(losses, samples)
    wanted = wanted_parameters(parameters)
    parts = None if outputs is None else parts_of_loss(losses, outputs, wanted.named, samples)
    return gradients_of_samples(losses, wanted, parts, samples, create_graph, strategy, interacting)


def check_interacting(interacting: str) -> None:
    """Raise ValueError for an invalid value of the argument."""
    if interacting not in ("refuse", "allow"):
        raise ValueError(f"interacting must be 'refuse' or 'allow'; found {interacting!r}.")


def losses_by_sample(losses: Tensor, samples: Samples | None) -> Tensor:
    """Losses (B,), the sums over the elements of `losses` of each sample; without `samples`, the losses as they are."""
    if samples is None:
        return losses
    if losses.dim() == 0:
        raise LossesError(
            "samples must be the sample of each row of outputs, or of each element of losses; found a scalar loss "
            "without outputs. Pass outputs=, the tensor that the loss was computed from."
        )
    check_owner(samples, losses, "losses")
    assert isinstance(samples, Tensor)
    elements = losses.reshape(samples.numel(), -1)
    return add_by_sample(elements.sum(1) if elements.shape[1] > 1 else losses, samples, sample_count([samples]))


def gradients_of_samples(
    losses: Tensor,
    wanted: WantedParameters,
    parts: LossParts | None,
    samples: Samples | None = None,
    create_graph: bool = False,
    strategy: str | None = None,
    interacting: str = "refuse",
) -> Gradients:
    """As `gradients`, with parameters that are resolved already, and losses (B,) or the `parts` of a scalar loss."""
    loss = losses
    if parts is not None:
        losses = parts.values
    elif isinstance(losses, Tensor) and losses.dim() == 0:
        raise LossesError(
            "losses must be 1-D, one value per sample; found a scalar. Compute them with reduction='none', without an "
            "average over the batch; or pass the tensor (B, ...) that the loss was computed from: "
            "sw.gradients(loss, model, outputs=logits)."
        )
    g = gradients_of(losses, wanted.named, wanted.modules, create_graph, strategy, interacting, wanted.sharded)
    if wanted.sharded and not collectives.requests.passes_may_differ:
        _check_equal_samples(len(g))
    if samples is not None:
        owners = [samples] if isinstance(samples, Tensor) else samples
        g._graph.row_counts.update(size for owner in owners for size in owner.shape if size > 1)
    g._by_user = True
    g._scalar_loss = None if parts is None else loss
    return g


def check_gradients(g: object) -> None:
    """Raise TypeError for losses, a model or another object in place of per-sample gradients."""
    if not isinstance(g, Gradients):
        raise TypeError(
            f"g must be the result of sw.gradients; found {type(g).__name__}. Pass sw.gradients(losses, model)."
        )


def _check_equal_samples(samples: int) -> None:
    """Raise DistributedError on all ranks if their numbers of samples differ. Collective."""
    counts = collectives.all_gather_object(samples)
    if len(set(counts)) > 1:  # the engine's passes, each of which gathers parameters, would differ in number
        raise DistributedError(
            "all ranks must have the same number of samples in sw.gradients and sw.backward of a model sharded with "
            f"fully_shard; found {min(counts)} to {max(counts)}. Use sw.Step, whose ranks may have different numbers, "
            "or cut the batches to one length."
        )


def gradients_of(
    losses: Tensor,
    wanted: Mapping[str, Tensor],
    modules: Iterable[nn.Module],
    create_graph: bool = False,
    strategy: str | None = None,
    interacting: str = "refuse",
    sharded: bool = False,
    checked: bool = False,
) -> Gradients:
    """Per-sample gradients of the `wanted` parameters; tensors of `modules` do not count as sample data. `sharded`: the
    parameters are whole parameters of a model sharded with `fully_shard`. `checked`: the losses are checked already.
    """
    outside = current_checks()
    checks = DeferredChecks() if outside is None else outside
    if not checked:
        check_attached(losses)
        checks.add(finite_losses, losses)
    graph = Graph(losses, dict(wanted))
    graph.sharded = sharded
    if graph.structure.functions or not graph.structure.leaves:
        graph.check_readable()
    if create_graph:
        graph.check_twice_differentiable()
    evaluator = QuantityEvaluator(Planner(graph, modules, interacting), strategy or "fused", create_graph)
    return Gradients(evaluator, checks, settles=outside is None)


# --- for the other packages: functions, because methods of Gradients would be public ---------------------------------


def structure_hash(g: Gradients) -> int:
    """Hash of the graph structure: equal for graphs of the same operations, connected in the same way."""
    return g._graph.structure.hash


def is_planned(g: Gradients) -> bool:
    """Look up the plan of such graphs; False if this graph must be analyzed, with possible errors and warnings."""
    return g._evaluator.find_plan()


def prepare(g: Gradients) -> Gradients:
    """Analyze the graph now, so that its errors are raised here and not by the first method call. Returns `g`."""
    g._evaluator.analyze()
    return g


def project(g: Gradients, projection: Projection, *, release: bool = False) -> Tensor:
    """Projection (B, dim) of each sample's gradient, as in `Gradients.project`. release: keep no gradients for later
    quantities, to save memory.
    """
    g._settle()
    device = g._graph.losses.device

    def quantity(grad: PerSampleGrad, name: str) -> Tensor:
        return projection.of_parameter(grad, name, device)

    with g._evaluator.context:
        by_name = dict(g._evaluator.release(quantity)) if release else g._evaluator.evaluate(quantity)
        ordered = {name: by_name[name] for name in g.names if name in by_name}  # not that of the backward pass
        return projection.total(ordered, zeros(g._graph, projection.dim))


Ready = Callable[[Tensor], None]


def accumulate(
    g: Gradients, weights: Weights | None, retain_graph: bool, ready: Ready | None = None, apart: bool = False
) -> None:
    """Accumulate the weighted sum into `.grad`, as in `Gradients.backward`. `ready` is called with each parameter as
    soon as its `.grad` is complete; if a later sum is not finite, the earlier ones are then in `.grad` already.
    `apart`: use `PerSampleGrad.summed_apart`, and dense sums also of sparse gradients.
    """
    g._evaluator.check_open()
    # A sum of gradients whose norms were finite, with weights of at most 1, is finite: no check of each sum.
    bounded = g._norms.bound_sums(weights)
    per_name = weights_by_name(weights, g.names, g._graph.losses, None if bounded else g._checks.add)
    ordinary = g._sharded if apart else g._evaluator.strategy == "twice" or g._needs_autograd()
    if ordinary and not isinstance(weights, Mapping):
        return g._ordinary_backward(per_name[g.names[0]], retain_graph, ready)

    sparse = [name for name, p in g._parameters.items() if p.layout is not torch.strided] if ordinary or apart else []
    if sparse:
        raise ParameterError(
            "weights must be a tensor with one number per sample if a parameter is sparse, because its gradient comes "
            f"from an ordinary backward pass; found a dict, and the sparse parameter {sparse[0]!r}. Use g.sum(weights)."
        )
    if g._sharded:  # each module is summed over ranks when the pass has left it
        with g._evaluator.context:
            for _ in g._evaluator.release(lambda grad, n: accumulate_grad(g._parameters[n], grad.sum(per_name[n]))):
                pass
        return None
    may_overflow: dict[str, Tensor] = {}

    def quantity(grad: PerSampleGrad, name: str) -> Tensor:
        total = grad.summed_apart(per_name[name]) if apart else grad.sum(per_name[name])
        if not (bounded and grad.is_bounded_by_norms):
            may_overflow[name] = total
        return total

    # Without `ready`, all sums are checked before the first one is added, so that an error leaves `.grad` unchanged.
    if ready is None:
        with g._evaluator.context:
            sums = dict(g._evaluator.release(quantity))
        if may_overflow:
            g._checks.add_tensors(finite_tensors, may_overflow)
        g._settle()
        for name, total in sums.items():
            accumulate_grad(g._parameters[name], total.detach() if total.requires_grad else total)
        return None
    with g._evaluator.context:
        for name, total in g._evaluator.release(quantity):
            g._checks.add_tensors(finite_tensors, may_overflow)
            may_overflow.clear()
            accumulate_grad(g._parameters[name], total)
            ready(g._parameters[name])
    g._settle()
    return None


def free_graph(g: Gradients, call: str) -> None:
    """Free the graph between the losses and the parameters of `g`, as a backward pass of torch does, and all gradients
    that are kept. Later questions raise GraphError, which names `call`, the function that has freed the graph.
    """
    message = f"{call}() has freed the graph: ask before it, or use {call}(retain_graph=True)."
    g._evaluator.close(message)
    graphs = [g._graph]
    if g._scalar_loss is not None:  # the graph of its parts does not contain what is above the outputs
        with torch.enable_grad():
            graphs.append(Graph(g._scalar_loss.view(1), g._parameters))
    for graph in graphs:
        free_saved([graph.nodes[at] for at in graph.reach.nodes], message)


def track_terms(g: Gradients) -> None:
    """Let `g.norms()` also compute what `with_larger_terms` needs, in the same backward pass."""
    g._norms.track_terms()


def with_larger_terms(g: Gradients, weights: Weights | None, limit: float) -> list[int]:
    """Samples whose weighted sum has terms (outer products of tokens, uses of a parameter) of norms above `limit`: they
    may cancel in the gradient of the sample, but their rounding errors stay in the sum. Needs `track_terms`.
    """
    weights = torch.ones_like(g._graph.losses) if weights is None else weights
    per_name = weights_by_name(weights, g.names, g._graph.losses, check=None)
    with g._evaluator.context:
        return g._norms.with_larger_terms({name: w for name, w in per_name.items() if w is not None}, limit)


def factored_grads(g: Gradients) -> dict[str, PerSampleGrad]:
    """Representations of the parameters that the losses depend on, by name, from a backward pass of their own: factors
    wherever the operation has them, also if rows are smaller. Not for a single sample, which has rows only.
    """
    g._settle()
    return g._evaluator.grads(factors=True)


def norms_during(g: Gradients, run: Callable[[], object]) -> None:
    """Call run(), an ordinary backward pass through the graph of `g` that does not free it, and compute the norms for
    `g.norms()` in the same pass, if possible.
    """
    g._evaluator.during(run, g.norms)


def require_linear(g: Gradients) -> None:
    """Raise GraphError unless a backward pass of weighted losses gives the weighted sum of the gradients of `g`."""
    g._evaluator.require_linear()


def plan_table(g: Gradients) -> str:
    """Table of the plan of `g`, one line per parameter."""
    rows = g._evaluator.explain()
    order = {name: number for number, name in enumerate(g.names)}
    rows.sort(key=lambda row: order[row.parameter])
    reached = {row.parameter for row in rows}
    missing = [name for name in g.names if name not in reached]
    cells = [(r.parameter, "x".join(map(str, r.shape)) or "1", r.operations, r.ownership, r.grad) for r in rows]
    cells += [
        (name, "x".join(map(str, g._parameters[name].shape)) or "1", "", "", "not reached: zeros") for name in missing
    ]
    return render(
        ("parameter", "shape", "used by", "ownership", "kept as"),
        cells,
        f"{plural(len(g), 'sample')}, strategy {g._evaluator.strategy}",
    )


def time_profile(g: Gradients, forward: Callable[[], object] | None = None) -> Profile | None:
    """Times of the stages of a step on the graph of `g`; `forward`: a function that repeats its forward pass."""
    return profile(g._evaluator, forward)


# --- Gradients -------------------------------------------------------------------------------------------------------


class Gradients:
    """Per-sample gradients of a batch, computed on demand. Made by `sw.gradients`; do not call the constructor.

    `len(g)` is the number of samples B. `g[3]` is the gradient of sample 3, a dict name -> tensor; `g["fc.weight"]` is
    the gradient of all samples for one parameter, (B, *shape).

    Non-finite losses, weights and results raise an error. On an accelerator, `norms` and `dot` return NaN instead, and
    the next call of any other method, such as `sum` or `backward`, makes all checks with one host sync.
    """

    def __init__(self, evaluator: QuantityEvaluator, checks: DeferredChecks, settles: bool):
        self._evaluator = evaluator
        self._checks = checks
        self._settles = settles  # False: the caller settles the checks
        self._graph = evaluator.graph
        self._parameters = evaluator.graph.wanted
        self._scalar_loss: Tensor | None = None  # the losses are parts of it, which have no meaning as values
        self._by_user = False  # True if created by the user: nothing sums the .grad written by `backward` over ranks
        self._sharded = evaluator.graph.sharded  # gradients are summed over ranks in an ordinary backward pass
        self._norms = Norms(evaluator, checks)

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order they were given."""
        return list(self._parameters)

    @property
    def losses(self) -> Tensor:
        """The losses (B,), detached from the graph."""
        if self._scalar_loss is not None:
            raise LossesError(
                "g.losses needs losses (B,); found a scalar loss with outputs, in which the losses of single samples "
                "are not known. Compute them with reduction='none'."
            )
        return self._graph.losses.detach()

    def __len__(self) -> int:
        return self._graph.samples

    # --- numbers per sample ----------------------------------------------------------------------------------------

    @overload
    def norms(self, *, by: None = None) -> Tensor: ...
    @overload
    def norms(self, *, by: Literal["parameter"]) -> dict[str, Tensor]: ...
    def norms(self, *, by: Literal["parameter"] | None = None) -> Tensor | dict[str, Tensor]:
        """L2 norm of each sample's gradient, (B,); with by="parameter" a dict name -> (B,).

        For a scalar loss with outputs=, the norm of the sample's part of its gradient: multiply by the number of
        samples (or tokens) that the loss is divided by to get the norm of the gradient of the sample's own loss.
        """
        _check_by(by)
        with self._evaluator.context:
            return self._norms.by_parameter() if by == "parameter" else self._norms.of_samples()

    @overload
    def dot(self, direction: Mapping[str, Tensor] | Gradients, *, by: None = None) -> Tensor: ...
    @overload
    def dot(self, direction: Mapping[str, Tensor] | Gradients, *, by: Literal["parameter"]) -> dict[str, Tensor]: ...
    def dot(
        self, direction: Mapping[str, Tensor] | Gradients, *, by: Literal["parameter"] | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Inner product of each sample's gradient with a direction (name -> tensor of the parameter's shape), (B,).

        The direction may be another `Gradients` of the same parameters with the same number of samples: the result is
        then the inner product of sample i here with sample i there, for example of two losses of the same batch.

        With by="parameter", a dict name -> (B,) with the contribution of each parameter.
        """
        _check_by(by)
        if isinstance(direction, Gradients):
            if len(direction) != len(self):
                raise ParameterError(
                    f"dot needs two Gradients with the same number of samples; found {len(self)} and {len(direction)}. "
                    "Use g.gram(other) for the inner products of all pairs of samples."
                )
            by_name = self._with_other(direction, "dot", lambda grad, other_grad: grad.paired_dot(other_grad))
        else:
            check_direction(direction, self._parameters)
            by_name = self._evaluate(lambda grad, name: grad.dot(direction[name]))
        with torch.enable_grad():  # the dots require a gradient only with create_graph
            total = total_of(self._graph, by_name)
        self._checks.add(finite_numbers, total, "dot product")
        if by is None:
            return total
        return {name: by_name[name] if name in by_name else zeros(self._graph) for name in self.names}

    def _with_other(
        self, other: Gradients, method: str, quantity: Callable[[PerSampleGrad, PerSampleGrad], Tensor]
    ) -> dict[str, Tensor]:
        """quantity(grad here, grad there) of each parameter that both losses depend on, by name."""
        if not isinstance(other, Gradients):
            raise ParameterError(
                f"{method} needs another Gradients, from sw.gradients(losses, model); found {type(other).__name__}."
            )
        shapes, other_shapes = ({n: tuple(p.shape) for n, p in g._parameters.items()} for g in (self, other))
        if shapes != other_shapes:
            raise ParameterError(
                f"{method} needs two Gradients of the same parameters; found different names or shapes. "
                "Pass the same model, or the same dict of tensors, to both calls of sw.gradients."
            )
        other_grads = other._evaluator.grads()
        grads = self._evaluator.grads()
        differentiable = self._evaluator.create_graph or other._evaluator.create_graph
        with self._evaluator.context, torch.set_grad_enabled(differentiable):
            return {name: quantity(grad, other_grads[name]) for name, grad in grads.items() if name in other_grads}

    @overload
    def gram(self, other: Gradients | Mapping[str, Tensor] | None = None, *, by: None = None) -> Tensor: ...
    @overload
    def gram(
        self, other: Gradients | Mapping[str, Tensor] | None = None, *, by: Literal["parameter"]
    ) -> dict[str, Tensor]: ...
    def gram(
        self, other: Gradients | Mapping[str, Tensor] | None = None, *, by: Literal["parameter"] | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Inner products of the gradients of all pairs of samples, (B, B); with other samples (B, B2).

        other: another `Gradients`, or rows like those of `full`, name -> (B2, *shape); default: these gradients

        With by="parameter", a dict name -> (B, B2) with the contribution of each parameter.
        """
        _check_by(by)
        self._settle()
        if other is None:
            columns = len(self)
            by_name = self._evaluate(lambda grad, _: grad.gram(grad))
        elif isinstance(other, Mapping):
            columns = check_rows(other, self._parameters)
            by_name = self._evaluate(lambda grad, name: grad.gram(DenseGrad(other[name])))
        else:
            by_name = self._with_other(other, "gram", lambda grad, other_grad: grad.gram(other_grad))
            columns = len(other)
            other._settle()
        if by is not None:
            return {name: by_name[name] if name in by_name else zeros(self._graph, columns) for name in self.names}
        with torch.enable_grad():  # they require a gradient only with create_graph
            return total_of(self._graph, by_name, columns)

    def project(self, dim: int, seed: int = 0, *, method: Method = "factored") -> Tensor:
        """Random projection of each sample's gradient, (B, dim). Preserves inner products in expectation.

        The same seed and method give the same map, whatever the batch.

        method: "factored" (default), whose dimensions share random signs, so that the gradient of a linear layer costs
            a fraction of its backward pass; or "dense", with signs of its own for each dimension, at several times the
            cost. Its error of the inner products of one linear layer is smaller: by 1.6 with dim 512, 2.4 with 4096
        """
        return project(self, Projection(dim, seed, method))

    # --- tensors like the parameters -------------------------------------------------------------------------------

    def sum(self, weights: Weights | None = None, *, all_reduce: bool = False) -> dict[str, Tensor]:
        """Weighted sum of per-sample gradients, name -> sum_i w_i g_i in the parameter's shape.

        weights: (B,), a number for all samples, or a dict name -> (B,) or number. Default: ones.
        all_reduce: if True, sum over the samples of all ranks; each rank must call it. Default False.

        Parameters that no loss depends on get zeros.
        """
        per_name = weights_by_name(weights, self.names, self._graph.losses, self._checks.add)
        sums = self._like_parameters(self._evaluate(lambda grad, name: grad.sum(per_name[name])))
        return self._all_reduce(sums) if all_reduce else sums

    def mean(self, *, all_reduce: bool = False) -> dict[str, Tensor]:
        """Mean of per-sample gradients, name -> sum_i g_i / B; with all_reduce=True, over the samples of all ranks."""
        sums = self.sum(all_reduce=all_reduce)
        samples = collectives.all_reduce_scalars(len(self))[0] if all_reduce else len(self)
        return {name: total / samples for name, total in sums.items()}

    def sum_of_squares(self) -> dict[str, Tensor]:
        """Sum of squared gradients, name -> sum_i g_i**2, element by element. `sw.fisher` is the mean over samples."""
        return self._like_parameters(self._evaluate(lambda grad, _: grad.sum_of_squares(None)))

    def variance(self) -> dict[str, Tensor]:
        """Unbiased variance over samples of each element, name -> sum_i (g_i - mean)**2 / (B - 1)."""
        if len(self) < 2:
            raise ParameterError("variance needs at least two samples; found one.")
        scale = 1 / (len(self) - 1)
        return self._like_parameters(
            self._evaluate(lambda grad, _: grad.sum_of_squares(grad.sum(None) / len(self)) * scale)
        )

    def backward(self, weights: Weights | None = None, retain_graph: bool = False) -> None:
        """Accumulate the weighted sum sum_i w_i g_i into `.grad`, as Tensor.backward does.

        weights: (B,), a number for all samples, or a dict name -> (B,) or number. Default: ones.
        retain_graph: if False (default), the graph is freed, as in torch, and with it all gradients that are kept:
            other quantities must be computed before. Norms that were computed before can still be read. If True, a
            later call of any method costs another backward pass.

        Parameters that no loss depends on are left unchanged. For a model sharded with `fully_shard` this is an
        ordinary backward pass, in which torch averages over the ranks.
        """
        if self._by_user:
            refuse_replicas(self._parameters.values())
        if self._sharded and self._by_user and isinstance(weights, Mapping):
            raise ParameterError(
                "weights must be a tensor with one number per sample for a sharded model, because its backward is an "
                "ordinary backward pass; found a dict. Use g.sum(weights) or sw.Step."
            )
        accumulate(self, weights, retain_graph)
        if not retain_graph:
            free_graph(self, "g.backward")

    # --- rows ------------------------------------------------------------------------------------------------------

    def full(self) -> dict[str, Tensor]:
        """Gradients of all samples, name -> (B, *shape). To save memory, use `chunks` for a few samples at a time.

        Rows may share memory with the gradients kept here: after an in-place change, other methods raise GraphError.
        """
        return self[0 : len(self)]

    def chunks(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Iterate over `full` in chunks of `size` samples; the last chunk may be smaller."""
        if type(size) is not int or size < 1:
            raise ValueError(f"size must be a positive integer; found {size!r}.")
        return (self[start : start + size] for start in range(0, len(self), size))

    @overload
    def __getitem__(self, key: str) -> Tensor: ...
    @overload
    def __getitem__(self, key: int | slice) -> dict[str, Tensor]: ...
    def __getitem__(self, key: str | int | slice) -> Tensor | dict[str, Tensor]:
        if isinstance(key, str):
            if key not in self._parameters:
                raise ParameterError(
                    f"the name must be that of a parameter, as in g.names; found {key!r}. "
                    f"The names are {listed(self.names)}."
                )
            return self._rows(key, 0, len(self))
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise ParameterError(f"slices of samples must have step 1; found {step}.")
            return {name: self._rows(name, start, max(start, stop)) for name in self.names}
        try:
            key = index(key)
        except TypeError:
            raise ParameterError(
                "the index must be a parameter's name, the number of a sample, or a slice of samples; found "
                f"{type(key).__name__}. For a list of samples, write g.full() and index each tensor."
            ) from None
        if not -len(self) <= key < len(self):
            raise IndexError(f"the sample index must be in 0..{len(self) - 1}; found {key}.")
        key %= len(self)
        return {name: self._rows(name, key, key + 1)[0] for name in self.names}

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        self._settle()
        p = self._parameters[name]
        with self._evaluator.context:
            grad = self._evaluator.grads().get(name)
            if grad is None or start == stop:
                return p.new_zeros(stop - start, *p.shape)
            self._evaluator.expose(name, grad)
            return grad.rows(start, stop).to(p.dtype)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[i] for i in range(len(self)))

    # --- the plan --------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Two tables: the plan, with the operations that use each parameter, the ownership of rows and the
        representation of gradients; and the times of the stages of a step, with the causes of slow ones.

        The times are measured by some more steps on this graph, in which hooks are called, too, also those on
        parameters. Sharded models have no table of times.
        """
        plan = plan_table(self)
        times = time_profile(self)
        return plan if times is None else f"{plan}\n\n{times}"

    def __repr__(self) -> str:
        size = f"{plural(len(self), 'sample')}, {plural(len(self.names), 'parameter')}"
        return f"Gradients({size}, strategy={self._evaluator.strategy!r})"

    # --- inside ----------------------------------------------------------------------------------------------------

    def _evaluate(self, quantity: Quantity) -> dict[str, Tensor]:
        with self._evaluator.context:
            return self._evaluator.evaluate(quantity)

    def _settle(self) -> None:
        """Make the checks that were left to this call. After an error, only the one of the losses is made again."""
        if self._settles:
            try:
                self._checks.settle()
            except SamplewiseError:
                self._checks.add(finite_losses, self._graph.losses)
                raise

    def _needs_autograd(self) -> bool:
        """True for hooks on parameters, sharded models, sparse parameters and sparse gradients: these need an ordinary
        backward pass.
        """
        for p in self._parameters.values():
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) or p.layout is not torch.strided:
                return True
        return self._sharded or self._graph.structure.sparse

    def _ordinary_backward(self, weights: Tensor | None, retain_graph: bool, ready: Ready | None) -> None:
        require_linear(self)  # raises the errors of the analysis, such as SamplesInteractError, too
        self._settle()
        losses = self._graph.losses
        seeds = torch.ones_like(losses) if weights is None else weights.detach().to(losses.dtype)
        rows = self._evaluator.take_rows()
        if self._needs_autograd():
            rows = {}
        reached = None
        if not self._sharded:
            reached = [self._parameters[name] for name in self._graph.leaves.values() if name not in rows]
        with graph_alive(), notify_ready(reached or (), ready):
            self._graph.check_losses_unchanged()
            if reached != []:
                torch.autograd.backward(losses, seeds, inputs=reached, retain_graph=retain_graph)
        with self._evaluator.context:
            for name, grad in rows.items():
                p = self._parameters[name]
                accumulate_grad(p, grad.sum(weights if weights is None else weights.detach()))
                if ready is not None:
                    ready(p)

    def _all_reduce(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._evaluator.create_graph and collectives.size() > 1:
            raise ParameterError(
                "all_reduce=True needs create_graph=False, because the sum over ranks is not differentiable; "
                "found create_graph=True. Leave out one of the two."
            )
        collectives.barrier()
        collectives.all_reduce_bucketed_(list(sums.values()))
        return sums

    def _like_parameters(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results in the dtype of the parameters, zeros for parameters that no loss depends on."""
        # Check results (name -> tensor), and what could not be checked earlier without a host sync.
        self._checks.add_tensors(finite_tensors, results)
        self._settle()
        complete = {}
        for name, p in self._parameters.items():
            if name in results:
                # Squares of complex gradients are real: they have the real counterpart of the parameter's dtype.
                is_real = p.is_complex() and not results[name].is_complex()
                complete[name] = results[name].to(p.real.dtype if is_real else p.dtype)
            else:
                complete[name] = torch.zeros_like(p)
        return complete


def _check_by(by: str | None) -> None:
    if by not in (None, "parameter"):
        raise ValueError(f"by must be None or 'parameter'; found {by!r}.")
