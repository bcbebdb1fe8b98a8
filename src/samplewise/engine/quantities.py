"""Norms of per-sample gradients over all parameters, also of gradients whose squares are too small for their dtype;
random projections; sums of per-sample values.

On the CPU, norms are square roots of summed squares, and those that are too small are computed again from scaled rows.
On an accelerator, which norms are too small is not known without a host sync: all of them come from scaled factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce

import torch
from torch import Tensor

from samplewise.engine.arguments import wide_dtype
from samplewise.engine.deferred_checks import (
    DeferredChecks,
    are_at_most_one,
    are_ordinary_norms,
    finite_numbers,
    read_at_once,
    underflow_limit,
)
from samplewise.engine.grads.base import PerSampleGrad, project_rows
from samplewise.engine.grads.dense import PackedGrad
from samplewise.engine.grads.kernels import random_signs, root, scaled_norms
from samplewise.engine.graph.graph import Graph
from samplewise.engine.strategies import QuantityEvaluator


class Norms:
    """Norms of the per-sample gradients of one graph, each computed once. To be used inside `evaluator.context`."""

    def __init__(self, evaluator: QuantityEvaluator, checks: DeferredChecks):
        self._evaluator = evaluator
        self._graph = evaluator.graph
        self._checks = checks
        self._by_name: dict[str, Tensor] | None = None  # see `_norms_by_name`
        self._ordinary = False  # True if the norms of samples are known, and neither too small nor too large
        self._joint: set[str] = set()  # parameters of a pack that have the norms of the pack
        self._scaled_by_name: dict[str, Tensor] | None = None
        self._terms: dict[str, Tensor] | None = None  # see `track_terms`

    def track_terms(self) -> None:
        """Also compute `term_norms` of each parameter, in the pass that computes the norms."""
        self._terms = {}
        self._graph.tracks_terms = True

    def of_samples(self) -> Tensor:
        """Norms over all parameters, (B,)."""
        if not read_at_once(self._graph.losses):
            return self._of_samples_without_sync()
        norms = self._total(self._norms_by_name(joint=True))
        self._ordinary = are_ordinary_norms(norms)
        if self._ordinary:
            return norms
        return self._with_underflowed_norms({"": finite_numbers(norms, "norm")})[""]

    def by_parameter(self) -> dict[str, Tensor]:
        """Parameter name -> norms (B,)."""
        on_host = read_at_once(self._graph.losses)
        by_name = self._norms_by_name(joint=False) if on_host else self._scaled_norms_by_name()
        if on_host and self._evaluator.create_graph:
            by_name = {name: root(squares) for name, squares in by_name.items()}
        # Copies: the caller may change the result, and the norms are returned again.
        norms = {name: by_name[name].clone() if name in by_name else zeros(self._graph) for name in self._graph.wanted}
        return self._with_underflowed_norms(norms) if on_host else norms

    def bound_sums(self, weights: object) -> bool:
        """True if a sum with these weights (B,) must be finite, because the norms are and no weight exceeds 1."""
        if not self._ordinary or not isinstance(weights, Tensor) or weights.dim() != 1:
            return False
        return weights.is_floating_point() and len(weights) > 0 and are_at_most_one(weights)

    def with_larger_terms(self, weights: Mapping[str, Tensor], limit: float) -> list[int]:
        """Samples whose terms, times their weights, have norms above `limit`. Needs `track_terms`. One host sync."""
        terms = [norms * weights[name].abs() for name, norms in (self._terms or {}).items()]
        if not terms:
            return []
        sizes = torch.linalg.vector_norm(torch.stack(terms, 1), dim=1)
        return (~(sizes <= limit)).nonzero().flatten().tolist()  # also NaN, from factors whose squares overflow

    def _norms_by_name(self, joint: bool) -> dict[str, Tensor]:
        """Norms (B,) of each parameter; with create_graph their squares, which are differentiable where they are zero.
        joint: the parameters of a pack may have the norms of the pack instead, as one tensor.
        """
        if self._by_name is None or (self._joint and not joint):
            earlier: dict[str, Tensor] = {}  # norms that need not be computed again
            if self._by_name is not None:
                earlier = {name: norms for name, norms in self._by_name.items() if name not in self._joint}
            self._joint.clear()
            self._by_name = self._evaluator.evaluate(partial(self._norms_of, joint, earlier))
        return self._by_name

    def _norms_of(self, joint: bool, earlier: dict[str, Tensor], grad: PerSampleGrad, name: str) -> Tensor:
        if self._terms is not None and (terms := grad.term_norms()) is not None:
            self._terms[name] = terms
        if self._evaluator.create_graph:
            return grad.squared_norms()
        if joint and isinstance(grad, PackedGrad):
            self._joint.add(name)
            return grad.pack.norms
        return earlier[name] if name in earlier else grad.norms()

    def _total(self, by_name: dict[str, Tensor]) -> Tensor:
        """Norms (B,) over all parameters, in their order, not that of the backward pass, to be bit-reproducible."""
        if self._evaluator.create_graph:
            return root(total_of(self._graph, by_name))
        # By id: the parameters of a pack have one tensor, which counts once.
        columns = {id(by_name[name]): by_name[name] for name in self._graph.wanted if name in by_name}
        norms = torch.linalg.vector_norm(torch.stack(list(columns.values()), 1), dim=1)
        dtype = torch.promote_types(norms.dtype, wide_dtype(self._graph.losses.dtype))
        return norms if norms.dtype is dtype else norms.to(dtype)

    def _with_underflowed_norms(self, norms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Recompute norms whose squares are too small for their dtype. The name "" means all parameters together."""
        masks = {name: n.detach() < underflow_limit(n.dtype) for name, n in norms.items() if not are_ordinary_norms(n)}
        masks = {name: mask for name, mask in masks.items() if mask.any()}
        if not masks:
            return norms
        samples = torch.stack(list(masks.values())).any(0).nonzero().flatten()
        by_name = self._evaluator.evaluate(lambda grad, _: grad.underflowed_norms(samples))
        for name, mask in masks.items():
            if name == "":
                exact: Tensor | None = scaled_norms(torch.stack(list(by_name.values()), 1))
            else:
                exact = by_name.get(name)
            if exact is not None:
                before = norms[name]
                after = torch.where(mask[samples], exact.to(before.dtype), before[samples])
                norms[name] = before.index_copy(0, samples, after)
        return norms

    # --- without a host sync -----------------------------------------------------------------------------------------

    def _of_samples_without_sync(self) -> Tensor:
        by_name = self._scaled_norms_by_name()
        norms = zeros(self._graph)
        if by_name:
            dtype = reduce(torch.promote_types, (n.dtype for n in by_name.values()), norms.dtype)
            columns = [by_name[name].to(dtype) for name in self._graph.wanted if name in by_name]
            norms = scaled_norms(torch.stack(columns, 1))
        self._checks.add(finite_numbers, norms, "norm")
        return norms

    def _scaled_norms_by_name(self) -> dict[str, Tensor]:
        """Norms of each parameter. Those that are NaN because a sum of pairs cancels are computed from rows: one host
        sync, if there are parameters with such sums.
        """
        if self._scaled_by_name is not None:
            return self._scaled_by_name
        may_cancel: set[str] = set()

        def quantity(grad: PerSampleGrad, name: str) -> Tensor:
            if self._terms is not None and (terms := grad.term_norms()) is not None:
                self._terms[name] = terms
            if grad.may_cancel:
                may_cancel.add(name)
            return grad.scaled_norms()

        norms: dict[str, Tensor] = self._evaluator.evaluate(quantity)
        if may_cancel:
            samples = torch.stack([norms[name].isnan() for name in sorted(may_cancel)]).any(0).nonzero().flatten()
            if len(samples):
                exact = self._evaluator.evaluate(
                    lambda grad, name: PerSampleGrad.underflowed_norms(grad, samples) if name in may_cancel else None
                )
                for name in may_cancel:
                    norms[name] = norms[name].index_copy(0, samples, exact[name].to(norms[name].dtype))
        self._scaled_by_name = norms
        return norms


class Projection:
    """Projection of gradients to `dim` numbers, from a seed. Random signs are kept for the next batch.

    Each parameter, viewed as a matrix G, contributes u^T G v to each dimension of its block, with random signs u and v.

    blocks: name of each parameter -> slice of the dimensions that it contributes to; None: all
    scale: name of each parameter -> tensor of its shape, by which gradients are multiplied first; None: ones
    """

    def __init__(
        self,
        dim: int,
        seed: int = 0,
        *,
        blocks: Mapping[str, slice] | None = None,
        scale: Mapping[str, Tensor] | None = None,
    ):
        if type(dim) is not int or dim < 1:
            raise ValueError(f"dim must be a positive integer; found {dim!r}.")
        self.dim = dim
        self.seed = seed
        self.scale = scale
        self._blocks = blocks
        self._normalization = torch.ones(dim, dtype=torch.float64)  # 1 / sqrt(size of the block) of each dimension
        for block in [slice(0, dim)] if blocks is None else blocks.values():
            self._normalization[block] = len(range(*block.indices(dim))) ** -0.5
        self._signs: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def of_parameter(self, grad: PerSampleGrad, name: str, device: torch.device) -> Tensor:
        """Contribution of a parameter to the dimensions of its block, (b, size of the block), without normalization."""
        if (name, device) not in self._signs:
            size = len(range(*self._block(name).indices(self.dim)))
            self._signs[name, device] = random_signs(name, grad.shape, size, self.seed, device)
        left, right = self._signs[name, device]
        if self.scale is None:
            return grad.project(left, right)
        return project_rows(grad, left, right, self.scale[name].to(device))

    def total(self, by_name: Mapping[str, Tensor], zeros: Tensor) -> Tensor:
        """Sum (b, dim) of the contributions of the parameters, in the order of `by_name`, added to zeros (b, dim)."""
        for contribution in by_name.values():  # complex parameters have complex projections
            zeros = zeros.to(torch.promote_types(zeros.dtype, contribution.dtype))
        for name, contribution in by_name.items():
            zeros[:, self._block(name)] += contribution
        return zeros * self._normalization.to(zeros)

    def _block(self, name: str) -> slice:
        return slice(0, self.dim) if self._blocks is None else self._blocks[name]


def zeros(graph: Graph, *more: int) -> Tensor:
    """Zeros (B, *more) for sums of values like the losses."""
    losses = graph.losses
    return torch.zeros(graph.samples, *more, dtype=wide_dtype(losses.dtype), device=losses.device)


def total_of(graph: Graph, by_name: Mapping[str, Tensor], *more: int) -> Tensor:
    """Sum (B, *more) over the parameters, in their order, not that of the backward pass, to be bit-reproducible."""
    result = zeros(graph, *more)
    for name in graph.wanted:
        if name in by_name:
            result = result + by_name[name]
    return result
