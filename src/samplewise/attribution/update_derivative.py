"""Derivative of one recorded update: gradients with respect to the state after it become gradients with respect to the
state before it and to the weights of its samples.

    G = Σ w c(θ) g(θ) / Σ counts            w: weights of the samples, all 1; c: coefficients of the transforms
    (θ', s') = formula(θ, s, G)             the optimizer's, after max_grad_norm

A vector-Jacobian product of this function is a second backward pass through the losses. Coefficients of transforms that
read norms, such as clip, are differentiated through the norms of the per-sample gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from samplewise.attribution.replay import Microbatch, TrainingState, UpdateRecord
from samplewise.core.memory import is_out_of_memory
from samplewise.engine.gradients import gradients_of
from samplewise.errors import CheckpointError
from samplewise.step.compiled.optim import Formula
from samplewise.step.step import Step
from samplewise.transforms.stats import PerSample, SampleStats

ELEMENTS = 2**26  # of the gradients of queries that are computed in one pass
ROOTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")  # states of which an optimizer takes the root
SMALLEST_NORM = 1e-15  # in place of a norm of 0, of which clip would compute inf · 0

Key = str | tuple[str, str]  # a parameter, or a state of the optimizer
Adjoint = dict[Key, Tensor]  # gradient of each query with respect to a state, (queries, *shape)


class UpdateDerivative:
    """Derivative of the updates of a step."""

    def __init__(self, step: Step, formula: Formula):
        self._step = step
        self._formula = formula
        self._evaluator = step._evaluator
        self._batched = True  # until an operation has no batching rule

    def __call__(self, record: UpdateRecord, adjoint: Adjoint) -> tuple[Adjoint, list[Tensor]]:
        """Gradients with respect to the state before the update, and for each microbatch those with respect to the
        weights of its samples, (queries, B). adjoint: with respect to the state after it. The random state changes.
        """
        trained = self._evaluator.trained.named
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(record.before.parameters[name])
        # Fused attention has no second derivative.
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            weights, gradients = self._gradient(record.microbatches)
            states = {key: value.clone().requires_grad_() for key, value in record.before.optimizer.items()}
            new = self._new_state(record.before, gradients, states)
            self._check(record, new)
            old: dict[Key, Tensor] = {key: trained[key] if isinstance(key, str) else states[key] for key in new}
            columns = self._products(new, [*old.values(), *weights], adjoint)
        before = {**adjoint, **dict(zip(old, columns, strict=False))}
        return before, columns[len(old) :]

    def _gradient(self, microbatches: Sequence[Microbatch]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Weights of the samples of each microbatch, and the gradient of the update, attached to weights and
        parameters; without the parameters that the losses do not reach.
        """
        config = self._step.config
        sums: dict[str, Tensor] = {}
        weights = []
        total: Tensor | float = 0.0
        for microbatch in microbatches:
            microbatch.random.restore()
            losses, counts = self._evaluator.losses(microbatch.batch)
            counts = torch.ones_like(losses) if counts is None else counts
            positions = microbatch.start + torch.arange(len(losses))
            stats = SampleStats(losses, counts, batch=microbatch.batch, positions=positions)
            weights.append(torch.ones_like(losses, requires_grad=True))
            for name, part in self._weighted_sum(stats, weights[-1]).items():
                sums[name] = sums[name] + part if name in sums else part
            total = total + self._denominator
        divisor = config.constant_divisor or total
        gradients = {name: part / divisor for name, part in sums.items()}
        if config.max_grad_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
            factor = (config.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            gradients = {name: g * factor for name, g in gradients.items()}
        return weights, gradients

    def _weighted_sum(self, stats: SampleStats, weights: Tensor) -> dict[str, Tensor]:
        """Σ w c g of a microbatch, by name of the parameter."""
        trained = self._evaluator.trained.trainable()
        losses = stats.losses
        stage = self._step.config.transforms.samples
        g = None
        if stage.measures:
            interacting = self._evaluator.interacting
            g = gradients_of(losses, trained, self._evaluator.modules, create_graph=True, interacting=interacting)
            norms = g.norms(by="parameter" if stage.by_parameter else None)
            stats = replace(stats, raw_norms=_each(norms, lambda n: torch.where(n > 0, n, SMALLEST_NORM)))
        for transform in stage.transforms:
            coefficients = transform.coefficients(stats)  # not transform(stats), which detaches them
            coefficients = _each(coefficients, lambda c: c if c.is_floating_point() else c.to(losses.dtype))
            stats = stats.scaled(coefficients, transform.renormalizes)
        self._denominator = stats.denominators.sum()
        c = stats.coefficients
        if isinstance(c, dict):
            assert g is not None
            return g.sum({name: weights * values for name, values in c.items()})
        # A vector-Jacobian product is linear in its cotangent, through which it can be differentiated as well.
        cotangent = weights if c is None else weights * c
        parts = torch.autograd.grad(losses, list(trained.values()), cotangent, create_graph=True, allow_unused=True)
        return {name: part for name, part in zip(trained, parts, strict=True) if part is not None}

    def _new_state(
        self, before: TrainingState, gradients: Mapping[str, Tensor], states: Mapping[tuple[str, str], Tensor]
    ) -> dict[Key, Tensor]:
        """Parameters and states after the update; without those that it does not change."""
        trained = self._evaluator.trained.named
        new: dict[Key, Tensor] = {}
        for group, counts in before.groups:
            for name, steps in counts.items():
                if name not in gradients:
                    continue
                # The first update of SGD sets the momentum to the gradient, without dampening.
                settings = {**group, "dampening": 0.0} if not steps and "dampening" in group else group
                old = {key: states[name, key] for key in self._formula.states(settings)}
                for key in ROOTS:  # the root has no derivative at 0, where the gradient was 0 in all updates
                    if key in old:
                        old[key] = old[key] + torch.finfo(old[key].dtype).tiny
                numbers = self._formula.numbers(settings, steps + 1)
                new[name], after = self._formula.apply(settings, trained[name], gradients[name], old, numbers)
                new.update({(name, key): value for key, value in after.items()})
        return new

    def _check(self, record: UpdateRecord, new: Mapping[Key, Tensor]) -> None:
        """Raise CheckpointError unless the update is the recorded one, up to rounding."""
        before = record.before.parameters
        after = list(record.after.parameters.values())
        repeated = [new.get(name, before[name]).detach() for name in before]
        off = _norm(torch._foreach_sub(repeated, after))
        moved = _norm(torch._foreach_sub(after, list(before.values())))
        eps = torch.finfo(after[0].dtype).eps
        if not off <= eps**0.25 * moved + 8 * eps * _norm(after):
            raise CheckpointError(
                f"update {record.number} must be repeated from its batch and random state as the step has made it; "
                f"found parameters that differ by {off:.2g}, of a change of {moved:.2g}. Look for a loss "
                "function or model that keeps state between calls, hooks that change gradients, and random numbers "
                "that are not drawn from the global generators."
            )

    def _products(self, new: Mapping[Key, Tensor], inputs: Sequence[Tensor], adjoint: Adjoint) -> list[Tensor]:
        """Vector-Jacobian products (queries, *shape) of the new state with respect to each input."""
        cotangents = [adjoint[key] for key in new]
        queries = len(cotangents[0])
        size = max(1, min(queries, ELEMENTS // sum(value.numel() for value in new.values()))) if self._batched else 1
        parts: list[Any] = []
        start = 0
        while start < queries:
            rows = [c[start] if size == 1 else c[start : start + size] for c in cotangents]
            try:
                part = torch.autograd.grad(
                    list(new.values()),
                    inputs,
                    rows,
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=size > 1,
                )
            except (RuntimeError, NotImplementedError) as error:
                if size == 1:
                    raise
                self._batched = self._batched and is_out_of_memory(error)
                size = max(1, size // 2) if self._batched else 1
                continue
            parts.append([p if p is None or size > 1 else p[None] for p in part])
            start += size
        return [
            torch.zeros(queries, *i.shape, dtype=i.dtype, device=i.device) if column[0] is None else torch.cat(column)
            for i, column in zip(inputs, zip(*parts, strict=True), strict=True)
        ]


def _norm(tensors: Any) -> float:
    return torch.stack(list(torch._foreach_norm(tensors))).norm().item()


def _each(values: PerSample, change: Any) -> Any:
    return change(values) if isinstance(values, Tensor) else {name: change(value) for name, value in values.items()}
