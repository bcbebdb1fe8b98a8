"""Runners, which make the updates of a step: uncompiled, with compiled gradients, or by compiled code as a whole.

Compiled gradients: the forward pass, per-sample quantities, weights and the weighted sum of a microbatch are compiled.
The sum over microbatches and ranks, noise and the optimizer are not, so that ranks may differ in what they compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

from torch import Tensor

from samplewise.core.batches import length
from samplewise.core.text import plural
from samplewise.engine.backward import accumulate_grad
from samplewise.step.apply import UpdateApplier
from samplewise.step.compiled.program import Program
from samplewise.step.compiled.program_cache import ProgramCache
from samplewise.step.compiled.replay import CHUNK
from samplewise.step.config import StepConfig
from samplewise.step.update import Outcome, Update
from samplewise.step.window import BatchColumns, BatchCursor, record_columns
from samplewise.step.window_builder import WindowBuilder
from samplewise.transforms.stats import SampleStats


class EagerRunner:
    """Uncompiled updates: fill a window, then apply it.

    status: state of compilation: "compiled", or the reason why updates are not compiled
    """

    def __init__(self, builder: WindowBuilder, applier: UpdateApplier, status: str):
        self.builder = builder
        self.applier = applier
        self.status = status

    def run(self, cursor: BatchCursor, blocks: bool) -> Iterator[Update]:
        """Make the updates that the samples of a batch complete, and yield each one before the next one is begun;
        remaining samples stay in the open window. `blocks`: the caller does not look at single updates, so that one
        `Update` may stand for several.
        """
        return map(self.applier.apply, self.builder.fill(cursor))

    def slow_compile_notice(self, notify: Callable[[str], None]) -> AbstractContextManager[None]:
        """Context manager that passes notices about slow compilation to `notify(line)`."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """State of compilation."""
        return {
            "known": [],
            "given_up": None,
            "slower": {},
            "tried": [],
            "failed": [],
            "changes": 0,
            "values": {},
            "settings": "",
            "parts": {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the state; uncompiled updates use none of it."""
        if not {"known", "given_up"} <= state.keys() <= self.state_dict().keys():
            raise ValueError(
                f"the compilation state of a step must have the keys {', '.join(self.state_dict())}; found "
                f"{', '.join(map(str, state)) or 'none'}. Load what step.state_dict() returned."
            )

    def rank_state(self) -> dict[str, Any]:
        """State of compilation in which ranks may differ."""
        return {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Uncompiled updates use none of it."""


class MicrobatchRunner:
    """Updates made by `eager`, with gradients from compiled code where possible."""

    def __init__(self, eager: EagerRunner):
        self.eager = eager
        self.builder = eager.builder
        self.run = eager.run
        self.cache = ProgramCache(eager.builder, eager.applier, whole_update=False)
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


AUTO_AFTER = 1000  # one-sample updates before "auto" compiles: training is then likely to last
SIZE_AFTER = 3  # microbatches of one size before the gradients of further ones are compiled: many sizes occur once


class CompiledRunner:
    """Updates made by compiled code where possible, and by `eager` otherwise. If a window consists of several
    microbatches, or noise is added to the sum, `microbatch_runner` compiles the gradients of each microbatch.
    """

    def __init__(self, eager: EagerRunner):
        builder = eager.builder
        self.eager = eager
        self.builder = builder
        self.evaluator = builder.evaluator
        self.applier = eager.applier
        self.cache = ProgramCache(eager.builder, eager.applier, whole_update=True)
        self.microbatch_runner = MicrobatchRunner(eager)
        self.builder.compiled_sums = self._add_microbatch
        self._sizes: dict[str, int] = {}  # number of microbatches by size
        self._rates = self.applier.rates()
        self._rates_version = 0  # of the hyperparameters to which `_rates` belong
        self._compiled = False  # whether an update was compiled

    @property
    def config(self) -> StepConfig:
        """Settings of the next window."""
        return self.builder.config

    # --- updates ---------------------------------------------------------------------------------------------------

    def run(self, cursor: BatchCursor, blocks: bool) -> Iterator[Update]:
        builder = self.builder
        builder.ranks.check_group()
        builder.cursor = cursor
        while builder.cursor is not None:
            if not builder.window.open and self._due(cursor):
                before = builder.counters.updates
                yield from self._compiled_updates(cursor, blocks)
                if builder.counters.updates > before:
                    continue  # the guards of the program may have failed: it is compiled again
            window = builder.next_window()
            if window is not None:
                yield self.applier.apply(window)

    @property
    def status(self) -> str:
        caches = (self.cache, self.microbatch_runner.cache)
        gave_up = [cache.gave_up for cache in caches if cache.gave_up is not None]
        if gave_up:
            return gave_up[0]
        if self._compiled or self.microbatch_runner.compiled:
            return "compiled"
        slower = [reason for cache in caches for reason in cache.slower.values()]
        if slower:
            return slower[0]
        if self.config.compile == "auto" and self.builder.samples != 1:
            return "compile='auto' compiles only steps with samples=1"
        return f"not compiled yet, after {plural(self.builder.counters.updates, 'update')}"

    def _due(self, cursor: BatchCursor) -> bool:
        """True if the next update should be compiled as a whole.

        The first update never is: it is checked for mistakes and creates the optimizer state. With "auto": only
        one-sample updates, after AUTO_AFTER of them.
        """
        if self.cache.gave_up is not None:
            return False
        updates = self.builder.counters.updates
        if self.config.compile == "auto":
            return updates >= AUTO_AFTER and self.builder.samples == 1
        return updates >= 1 and not self._in_microbatches(self.builder.samples or cursor.left)

    def _in_microbatches(self, size: int) -> bool:
        """Test whether the settings prevent that one program makes an update of `size` samples."""
        chain = self.config.transforms
        misfit = any(t.positions not in (None, size) for t in chain.samples.transforms)  # an error of `_finish`
        return bool(chain.on_sum) or 0 < (self.builder.size.size or 0) < size or misfit

    def _add_microbatch(self, microbatch: Any) -> SampleStats | None:
        """As `MicrobatchRunner.add`, for microbatches that are not a whole window, after SIZE_AFTER of their size."""
        window = self.builder.window
        if self.cache.gave_up is not None or window.config.transforms.samples.uses_positions:
            return None
        size = length(microbatch) or 0
        samples = self.builder.samples or size + (0 if self.builder.cursor is None else self.builder.cursor.left)
        is_window = not window.samples and size == samples and not self._in_microbatches(size)
        if is_window or self.config.compile is not True or self.builder.counters.updates == 0:
            return None
        count = self._sizes.get(str(size), 0)
        if count < SIZE_AFTER:
            self._sizes[str(size)] = count + 1
            return None
        return self.microbatch_runner.add(microbatch)

    @contextmanager
    def slow_compile_notice(self, notify: Callable[[str], None]) -> Iterator[None]:
        with self.cache.slow_compile_notice(notify), self.microbatch_runner.slow_compile_notice(notify):
            yield

    def state_dict(self) -> dict[str, Any]:
        parts = {**self.microbatch_runner.cache.state_dict(), "seen": dict(self._sizes)}
        return {**self.cache.state_dict(), "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cache.load_state_dict(state)
        parts = state.get("parts") or self.eager.state_dict()
        self.microbatch_runner.cache.load_state_dict(parts)
        self._sizes = dict(parts.get("seen", {}))
        self.microbatch_runner.compiled = False
        self._compiled = False

    def rank_state(self) -> dict[str, Any]:
        """Nothing: there is one process."""
        return {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Updates of one process do not continue those of a rank."""

    # --- running compiled code -------------------------------------------------------------------------------------

    def _compiled_updates(self, cursor: BatchCursor, blocks: bool) -> Iterator[Update]:
        """Make updates with compiled code, until the batch is used up or the next update must be uncompiled. `blocks`:
        up to CHUNK updates at once, between which the caller runs no code.
        """
        builder = self.builder
        config = builder.config
        norms = builder.record_norms
        scheduler = self.applier.scheduler
        self.evaluator.trained.refresh()
        self.evaluator.trained.clear()
        samples = builder.samples
        size = samples or cursor.left
        end = cursor.rows or 0
        program = self.cache.get(cursor, size)
        if program is None:
            return
        is_fixed = builder.sizes.is_fixed
        several = blocks and program.can_make_many and scheduler is None and not config.recheck and is_fixed
        may_change = not blocks or scheduler is not None or program.update.buckets is None
        while cursor.consumed + size <= end and not (config.recheck and builder.recheck.due(builder.counters.updates)):
            limit = min((end - cursor.consumed) // size, CHUNK) if several else 1
            update = self._run(program, cursor, limit)
            if update is None:
                return
            self._compiled = True
            if cursor.empty:
                builder.cursor = None
            yield update
            if update._updates < limit or builder.cursor is not cursor or builder.window.open:
                return
            if builder.config is not config or builder.record_norms != norms:
                return
            if not is_fixed and builder.samples != samples:
                return
            if may_change and not self.cache.guards_hold():
                return

    def _run(self, program: Program, cursor: BatchCursor, limit: int) -> Update | None:
        """Make up to `limit` updates, up to the first one that is not finite, and return them as one; None if there are
        none, in which case nothing has changed.
        """
        started = perf_counter()
        builder = self.builder
        counters = builder.counters
        version = self.cache.hyperparameter_version
        if version != self._rates_version:
            self._rates_version = version
            self._rates = self.applier.rates()
        if program.copies:
            program.copy_again()
        start = cursor.consumed
        results: Sequence[Tensor] | None
        if limit > 1:
            updates, results = program.many(start, limit, version)
        else:
            updates, results = 1, program(start, version)
        if results is None or updates == 0:
            return None
        if program.update.buckets is None:
            program.write_gradients(results)
            self.applier.optimizer.step()
        scheduler = self.applier.scheduler
        if scheduler is not None:
            self.applier.step_scheduler()
        cursor.skip(updates * program.update.samples)
        columns: Sequence[BatchColumns] = ()
        if builder.columns:
            rows = slice(start, cursor.consumed)
            columns = [record_columns(cursor.batch, builder.columns, counters.epochs, rows)]
        samples = program.count * updates
        norm = program.norm()
        outcome = Outcome(False, self._rates, lambda: norm)
        update = Update(counters.updates, samples, outcome, [program.stats(results)], columns, updates=updates)
        update.phases["compiled"] = perf_counter() - started
        counters.updates += updates
        counters.microbatches += updates
        counters.samples += samples
        if scheduler is not None or not builder.sizes.is_fixed:  # calls that do nothing take as long as a small update
            self.applier.finish(update)
        return update


Runner = EagerRunner | MicrobatchRunner | CompiledRunner  # makes the updates of a step from batches
