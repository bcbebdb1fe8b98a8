"""Norms of per-sample gradients, also of gradients whose squares are too small for their dtype.

On the CPU, norms are square roots of summed squares, and those that are too small are computed again from scaled rows.
On an accelerator, which norms are too small is not known without a host sync: all of them come from scaled factors.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from samplewise.engine.checks import are_ordinary_norms, faint_limit, finite_numbers
from samplewise.engine.grads import by_rows
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.by_rows import root
from samplewise.engine.pending_checks import PendingChecks, read_at_once
from samplewise.engine.strategies import QuantityEvaluator
from samplewise.engine.totals import total_of, zeros


class Norms:
    """Norms of the per-sample gradients of one graph, each computed once. To be used inside `evaluator.context`."""

    def __init__(self, evaluator: QuantityEvaluator, checks: PendingChecks):
        self._evaluator = evaluator
        self._graph = evaluator.graph
        self._checks = checks
        self._squared: dict[str, Tensor] | None = None
        self._scaled: dict[str, Tensor] | None = None
        self.are_known = False  # on the CPU: all norms are finite, and so are their squares

    def of_samples(self) -> Tensor:
        """Norms over all parameters, (B,)."""
        if not read_at_once(self._graph.losses):
            return self._from_scaled_parts()
        norms = root(total_of(self._graph, self._squares()))
        if not are_ordinary_norms(norms):
            norms = self._with_faint_norms({"": finite_numbers(norms, "norm")})[""]
        self.are_known = True
        return norms

    def by_parameter(self) -> dict[str, Tensor]:
        """Parameter name -> norms (B,)."""
        on_host = read_at_once(self._graph.losses)
        parts = {name: root(s) for name, s in self._squares().items()} if on_host else self._scaled_parts()
        norms = {name: parts[name] if name in parts else zeros(self._graph) for name in self._graph.wanted}
        return self._with_faint_norms(norms) if on_host else norms

    def _squares(self) -> dict[str, Tensor]:
        if self._squared is None:
            self._squared = self._evaluator.evaluate(lambda form, _: form.squared_norms())
        return self._squared

    def _with_faint_norms(self, norms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Recompute norms whose squares are too small for their dtype. The name "" means all parameters together."""
        faint = {name: n.detach() < faint_limit(n.dtype) for name, n in norms.items() if not are_ordinary_norms(n)}
        faint = {name: mask for name, mask in faint.items() if mask.any()}
        if not faint:
            return norms
        samples = torch.stack(list(faint.values())).any(0).nonzero().flatten()
        parts = self._evaluator.evaluate(lambda form, _: form.faint_norms(samples))
        for name, mask in faint.items():
            if name == "":
                exact: Tensor | None = by_rows.scaled_norms(torch.stack(list(parts.values()), 1))
            else:
                exact = parts.get(name)
            if exact is not None:
                before = norms[name]
                replaced = torch.where(mask[samples], exact.to(before.dtype), before[samples])
                norms[name] = before.index_copy(0, samples, replaced)
        return norms

    # --- without a host sync -----------------------------------------------------------------------------------------

    def _from_scaled_parts(self) -> Tensor:
        parts = self._scaled_parts()
        norms = zeros(self._graph)
        if parts:
            dtype = reduce(torch.promote_types, (part.dtype for part in parts.values()), norms.dtype)
            columns = [parts[name].to(dtype) for name in self._graph.wanted if name in parts]
            norms = by_rows.scaled_norms(torch.stack(columns, 1))
        self._checks.add(finite_numbers, norms, "norm")
        return norms

    def _scaled_parts(self) -> dict[str, Tensor]:
        if self._scaled is None:
            self._scaled = self._with_cancelled_norms()
        return self._scaled

    def _with_cancelled_norms(self) -> dict[str, Tensor]:
        """Norms of each parameter. Those that are NaN because a sum of pairs cancels are computed from rows: one host
        sync, if there are parameters with such sums.
        """
        may_cancel: set[str] = set()

        def quantity(form: PerSampleGrad, name: str) -> Tensor:
            if form.may_cancel:
                may_cancel.add(name)
            return form.scaled_norms()

        norms: dict[str, Tensor] = self._evaluator.evaluate(quantity)
        if not may_cancel:
            return norms
        unknown = torch.stack([norms[name].isnan() for name in sorted(may_cancel)]).any(0)
        samples = unknown.nonzero().flatten()
        if len(samples):
            exact = self._evaluator.evaluate(
                lambda form, name: by_rows.faint_norms(form, samples) if name in may_cancel else None
            )
            for name in may_cancel:
                norms[name] = norms[name].index_copy(0, samples, exact[name].to(norms[name].dtype))
        return norms
