"""Conformance suites for code outside of the library: call `check_rule` in the test of a new rule, `check_transform` in
that of a new transform.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from samplewise.core.batches import cut, leaves, length
from samplewise.engine.arguments import wanted_parameters
from samplewise.engine.gradients import gradients
from samplewise.engine.grads.kernels import total
from samplewise.engine.rules import RULES, Rule, Use
from samplewise.engine.strategies import jacobian_rows
from samplewise.errors import TransformError
from samplewise.transforms.chain import Chain, as_transform
from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import Grouping, SampleTransform, SumTransform

Losses = Callable[[nn.Module], Tensor]

# --- rules ------------------------------------------------------------------------------------------------------------


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
        named = wanted_parameters(model).named
        rows = jacobian_rows(losses(model), named, create_graph=True)
        expected = _penalty_gradients(total(row.square().sum() for row in rows.values()), named)
        result = _penalty_gradients(gradients(losses(model), model, create_graph=True).norms().square().sum(), named)
        for name in named:
            quantity = f"gradient of the squared norms with respect to {name}"
            _close(result[name], expected[name], 100 * tolerance, quantity)


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


def _penalty_gradients(penalty: Tensor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients_of_penalty = torch.autograd.grad(penalty, list(named.values()), materialize_grads=True)
    return dict(zip(named, gradients_of_penalty, strict=True))


def _close(result: Tensor, expected: Tensor, tolerance: float, quantity: str) -> None:
    error = (result - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    assert error <= tolerance, f"{quantity}: off by {error:.1e} of the largest element, allowed {tolerance:.0e}"


# --- transforms -------------------------------------------------------------------------------------------------------


def check_transform(transform: Any, batch: Any = None) -> None:
    """Check that a transform satisfies the contract of transforms; raise TransformError with the difference if not.

    A transform of samples must

    - return one finite coefficient per sample, also for one sample and for zero gradients,
    - return the same coefficients for a subset of the samples, unless it has window=True,
    - not depend on the order of samples, unless it has `positions`,
    - return the same coefficients when it is called again, and not modify its input.

    A transform of the sum must change the sum in place and keep it finite. A grouping must return one key per sample,
    the same in any part of a batch.

    batch: needed only by transforms that read the batch.
    """
    if isinstance(transform, Chain):
        for part in transform.transforms:
            check_transform(part, batch)
        return None
    transform = as_transform(transform)
    if isinstance(transform, SumTransform):
        return _check_sum(transform)
    if (isinstance(transform, Grouping) or "batch" in transform.needs) and length(batch) is None:
        raise TransformError(
            f"{transform} reads the batch and needs one; found none. Call check_transform(transform, batch)."
        )
    if isinstance(transform, Grouping):
        return _check_keys(transform, batch)
    return _check_sample(transform, batch, length(batch) or transform.positions or 7)


def _check_sample(transform: SampleTransform, batch: Any, samples: int) -> None:
    stats = _random_stats(transform, batch, samples)
    original = _random_stats(transform, batch, samples)
    batch_copy = copy.deepcopy(batch)
    coefficients = transform(stats)
    _check_same(transform, transform(stats), coefficients, "when it is called again")
    unchanged = _equal(stats.losses, original.losses) and _equal(stats.denominators, original.denominators)
    for value, value_copy in zip(leaves(batch), leaves(batch_copy), strict=True):
        unchanged = unchanged and (not isinstance(value, Tensor) or torch.equal(value, value_copy))
    if not unchanged:
        raise TransformError(f"{transform} must not modify its input; found changed values. Copy before changing.")
    transform(replace(stats, raw_norms=_map_values(stats.raw_norms, torch.zeros_like)))
    transform(stats.take([0]))
    order = [*range(1, samples), 0]
    if transform.positions is None:
        expected = _map_values(coefficients, lambda values: values[order])
        _check_same(transform, transform(stats.take(order)), expected, "for any order of samples")
    if not transform.window:
        half = list(range(samples // 2, samples))
        expected = _map_values(coefficients, lambda values: values[half])
        _check_same(transform, transform(stats.take(half)), expected, "for a subset of the samples")


def _check_sum(transform: SumTransform) -> None:
    sums = [torch.ones(3, 2), torch.ones(4, dtype=torch.float64)]
    original = list(sums)
    act: Any = transform.apply_
    in_place = act(sums) is None and len(sums) == 2 and all(a is b for a, b in zip(sums, original, strict=True))
    if not in_place or not all(tensor.isfinite().all() for tensor in sums):
        raise TransformError(f"{transform} must change the sums in place and keep them finite; found that it does not.")


def _check_keys(transform: Grouping, batch: Any) -> None:
    keys = transform.keys(batch)
    total = length(batch)
    if len(keys) != total:
        raise TransformError(f"{transform} must return one key per sample; found {len(keys)} for {total} samples.")
    if transform.keys(cut(batch, 1, total)) != keys[1:]:
        raise TransformError(
            f"{transform} must return the same key for a sample in any part of a batch; found different keys."
        )


def _random_stats(transform: SampleTransform, batch: Any, samples: int) -> SampleStats:
    """Random per-sample values between 0 and 3, restricted to what the transform declares in `needs`."""
    generator = torch.Generator().manual_seed(0)

    def random_values() -> Tensor:
        return torch.rand(samples, generator=generator, dtype=torch.float64) * 3

    def per_sample() -> PerSample:
        return {name: random_values() for name in ("weight", "bias")} if transform.by_parameter else random_values()

    norms = per_sample() if "norms" in transform.needs else None
    references = [] if transform.reference is None else [transform.reference]
    return SampleStats(
        losses=random_values(),
        counts=torch.ones(samples, dtype=torch.float64),
        batch=batch if "batch" in transform.needs else None,
        positions=torch.arange(samples),
        raw_norms=norms,
        raw_dots={r: per_sample() for r in references},
    )


def _map_values(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if values is None:
        return None
    if isinstance(values, Tensor):
        return change(values)
    return {name: change(v) for name, v in values.items()}


def _check_same(transform: SampleTransform, coefficients: PerSample, expected: PerSample, when: str) -> None:
    if not _equal(coefficients, expected):
        raise TransformError(
            f"{transform} must return the same coefficients {when}; found {coefficients} instead of {expected}."
        )


def _equal(values: PerSample, expected: PerSample) -> bool:
    if isinstance(values, dict) and isinstance(expected, dict):
        return values.keys() == expected.keys() and all(_equal(values[name], expected[name]) for name in values)
    return isinstance(values, Tensor) and isinstance(expected, Tensor) and torch.allclose(values, expected, rtol=1e-9)
