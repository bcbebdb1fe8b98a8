"""Conformance suite for rules: call `check_rule` in the test of a new rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from samplewise.engine.arguments import wanted_parameters
from samplewise.engine.gradients import gradients
from samplewise.engine.grads.base import total
from samplewise.engine.rules import RULES, Rule, Use
from samplewise.engine.strategies import jacobian_rows

Losses = Callable[[nn.Module], Tensor]


def check_rule(
    key: tuple[str, int], model: nn.Module, losses: Losses, tolerance: float = 1e-9, second_order: bool = True
) -> None:
    """Check the rule for `key` (operation, operand position); raise AssertionError if the rule is unused or wrong.

    `losses(model)` returns losses (B,) whose graph uses the operand. Each quantity is compared with one backward pass
    per sample: with the rule, without it, and with the samples in a shuffled order (rows then have irregular owners).
    With second_order=True (default), the gradient of a penalty on the norms under create_graph is compared, too.
    `tolerance` is relative to the largest element, and 100 times larger for second order.
    """
    shuffle = torch.randperm(len(losses(model)), generator=torch.Generator().manual_seed(0))
    with _record_results(key) as results:
        _compare(model, losses, tolerance)
    assert results, f"the losses must use the operand of the rule for {key}; found that the rule was not called"
    supported = any(result is not None for result in results)
    assert supported, f"the rule for {key} must return a result; found None for every use"
    _compare(model, lambda m: losses(m)[shuffle], tolerance)
    with mock.patch.dict(RULES):
        del RULES[key]
        _compare(model, losses, tolerance)
    if second_order:
        _compare_second_order(model, losses, tolerance)


@contextmanager
def _record_results(key: tuple[str, int]) -> Iterator[list[object]]:
    """Yield a list to which each return value of the rule is appended."""
    results: list[object] = []
    rule = RULES[key]

    def recording_rule(use: Use) -> object:
        results.append(rule.grad(use))
        return results[-1]

    with mock.patch.dict(RULES, {key: Rule(recording_rule, rule.reads)}):  # type: ignore[arg-type]
        yield results


def _compare(model: nn.Module, losses: Losses, tolerance: float) -> None:
    named = wanted_parameters(model).named
    rows = jacobian_rows(losses(model), named)
    flat = torch.cat([row.flatten(1) if row.dim() > 1 else row[:, None] for row in rows.values()], 1)
    weights = torch.linspace(-0.5, 1.5, len(flat), dtype=flat.dtype)
    direction = {name: torch.cos(p.detach() * 3) for name, p in named.items()}
    flat_direction = torch.cat([d.flatten() for d in direction.values()])
    g = gradients(losses(model), model)
    _close(g.norms(), flat.norm(dim=1), tolerance, "norms")
    _close(g.dot(direction), flat @ flat_direction, tolerance, "dot")
    _close(g.gram(), flat @ flat.T, tolerance, "gram")
    full = g.full()
    summed = g.sum(weights)
    sum_of_squares = g.sum_of_squares()
    variance = g.variance()
    for name, row in rows.items():
        _close(full[name], row, tolerance, f"rows of {name}")
        _close(summed[name], torch.tensordot(weights, row, 1), tolerance, f"sum of {name}")
        _close(sum_of_squares[name], row.square().sum(0), tolerance, f"sum of squares of {name}")
        _close(variance[name], row.var(0), tolerance, f"variance of {name}")
    _close(g.project(7), gradients(losses(model), model, strategy="reference").project(7), tolerance, "projection")


def _compare_second_order(model: nn.Module, losses: Losses, tolerance: float) -> None:
    named = wanted_parameters(model).named
    rows = jacobian_rows(losses(model), named, create_graph=True)
    expected = _penalty_gradients(total(row.square().sum() for row in rows.values()), named)
    result = _penalty_gradients(gradients(losses(model), model, create_graph=True).norms().square().sum(), named)
    for name in named:
        quantity = f"gradient of the squared norms with respect to {name}"
        _close(result[name], expected[name], 100 * tolerance, quantity)


def _penalty_gradients(penalty: Tensor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients_of_penalty = torch.autograd.grad(penalty, list(named.values()), materialize_grads=True)
    return dict(zip(named, gradients_of_penalty, strict=True))


def _close(result: Tensor, expected: Tensor, tolerance: float, quantity: str) -> None:
    error = (result - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    assert error <= tolerance, f"{quantity}: off by {error:.1e} of the largest element, allowed {tolerance:.0e}"
