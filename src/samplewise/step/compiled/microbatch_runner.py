"""Compiled gradients: the forward pass, per-sample quantities, weights and the weighted sum of a microbatch are
compiled. The sum over microbatches and ranks, noise and the optimizer are not, so that ranks may differ in what they
compile.
"""

from __future__ import annotations

from typing import Any

from samplewise.core.text import plural
from samplewise.engine.backward import accumulate_grad
from samplewise.step.compiled.program_cache import ProgramCache
from samplewise.step.eager import EagerRunner
from samplewise.step.window import BatchCursor
from samplewise.transforms.stats import SampleStats


class MicrobatchRunner:
    """Updates made by `eager`, with gradients from compiled code where possible."""

    def __init__(self, eager: EagerRunner):
        self.eager = eager
        self.builder = eager.builder
        self.run = eager.run
        self.cache = ProgramCache(eager, whole=False)
        self.slow_compile_notice = self.cache.slow_compile_notice
        self.builder.compiled_sums = self.add
        self.compiled = False  # whether gradients were compiled

    @property
    def status(self) -> str:
        if self.cache.gave_up is not None:
            return self.cache.gave_up
        if self.builder.defers:
            return "transforms that need the whole window are compiled only in a single process"
        if self.compiled:
            return "compiled"
        if self.cache.slower:
            return next(iter(self.cache.slower.values()))
        return f"not compiled yet, after {plural(self.builder.counters.updates, 'update')}"

    def add(self, microbatch: Any) -> SampleStats | None:
        """Add the gradient sums of a microbatch to `.grad`, and return its per-sample results. None: nothing was done,
        and the microbatch must be computed uncompiled, as those of the first update, which is checked for mistakes.
        """
        if self.cache.gave_up is not None or self.builder.counters.updates == 0:
            return None
        evaluator = self.builder.evaluator
        ready = evaluator.ready
        evaluator.ready = None  # a program is verified in passes of its own
        try:
            cursor = BatchCursor(microbatch)
            program = self.cache.get(cursor, cursor.left)
        finally:
            evaluator.ready = ready
        results = None if program is None else program(0, hyperparameter_version=0)
        if program is None or results is None:
            return None
        for name, gradient in program.separate_gradients(results).items():
            accumulate_grad(evaluator.trained.named[name], gradient)
        self.compiled = True
        return program.stats(results)

    def state_dict(self) -> dict[str, Any]:
        """The state of uncompiled updates, which is equal on all ranks: see `rank_state`."""
        return self.eager.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.eager.load_state_dict(state)
        self.cache.load_state_dict(self.eager.state_dict())
        self.compiled = False

    def rank_state(self) -> dict[str, Any]:
        return self.cache.state_dict()

    def load_rank_state(self, state: dict[str, Any]) -> None:
        self.cache.load_state_dict(state)
