"""Strategy "reference": one backward pass per sample. Slow and simple; the tests compare everything with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from samplewise.engine.backward import backward_to_leaves
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.graph.graph import Graph
from samplewise.engine.ownership.weighted_passes import Tolerance, largest
from samplewise.engine.plan import ExplainRow, Quantity


def jacobian_rows(losses: Tensor, parameters: Mapping[str, Tensor], create_graph: bool = False) -> dict[str, Tensor]:
    """Jacobian of the losses, name -> (b, *shape): row i is the gradient of losses[i]."""
    unit = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    rows = [gradient_of(losses, parameters, weights, create_graph) for weights in unit]
    return {name: torch.stack([row[name] for row in rows]) for name in parameters}


def gradient_of(
    losses: Tensor, parameters: Mapping[str, Tensor], weights: Tensor, create_graph: bool = False
) -> dict[str, Tensor]:
    """Dense gradient of the weighted sum of the losses (b,), name -> shape; zeros for parameters without gradient."""
    gradients = torch.autograd.grad(
        losses, list(parameters.values()), weights, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    of_all = {}
    for (name, p), g in zip(parameters.items(), gradients, strict=True):
        dense = torch.zeros_like(p) if g is None else g
        of_all[name] = dense if dense.layout is torch.strided else dense.to_dense()
    return of_all


class LoopStrategy:
    """Strategy "reference": rows from one backward pass per sample."""

    def __init__(self, graph: Graph, create_graph: bool):
        self.graph = graph
        reached = {name: graph.wanted[name] for name in graph.leaves.values()}
        self.rows = jacobian_rows(graph.losses, reached, create_graph)

    def adds_up(self) -> bool:
        """True if the rows add up to the gradient of the summed losses."""
        sums: dict[str, Tensor] = {}
        backward_to_leaves(self.graph, self.rows, torch.ones_like(self.graph.losses), sums.__setitem__)
        limit = Tolerance(self.graph).of(largest(rows.detach() for rows in self.rows.values()))
        return all(
            bool(((rows.detach().sum(0) - sums[name]).abs() <= limit).all())
            for name, rows in self.rows.items()
            if name in sums
        )

    def evaluate(self, quantity: Quantity) -> dict[str, Any]:
        return {name: quantity(DenseGrad(rows), name) for name, rows in self.rows.items()}

    def release(self, quantity: Quantity) -> Iterator[tuple[str, Any]]:
        yield from self.evaluate(quantity).items()

    def explain(self) -> list[ExplainRow]:
        return [
            ExplainRow(name, tuple(rows.shape[1:]), "", "one backward per sample", "dense")
            for name, rows in self.rows.items()
        ]
