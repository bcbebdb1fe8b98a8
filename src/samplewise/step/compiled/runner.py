"""Compiled updates of one process: decide when to compile, run programs, and fall back to uncompiled updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch

from samplewise.core.batches import length
from samplewise.core.text import plural
from samplewise.step.batch_columns import BatchColumns, record_columns
from samplewise.step.compiled.microbatch_runner import MicrobatchRunner
from samplewise.step.compiled.program import Program
from samplewise.step.compiled.program_cache import ProgramCache
from samplewise.step.compiled.replay import CHUNK
from samplewise.step.config import StepConfig
from samplewise.step.eager import EagerRunner
from samplewise.step.update import Outcome, Update
from samplewise.step.window import BatchCursor, Window
from samplewise.transforms.stats import SampleStats

AUTO_AFTER = 1000  # one-sample updates before "auto" compiles: training is then likely to last
PART_AFTER = 3  # microbatches of one size before the gradients of further ones are compiled: many sizes occur once


class CompiledWindow(NamedTuple):
    """One or several updates that compiled code has made."""

    stats: SampleStats
    samples: int
    updates: int
    norm: float  # gradient norm of the last update
    rates: list[Any]
    seconds: float
    columns: list[BatchColumns]


class CompiledRunner:
    """Updates made by compiled code where possible, and by `eager` otherwise. If a window consists of several
    microbatches, or noise is added to the sum, the gradients of each microbatch are compiled: see `parts`.
    """

    def __init__(self, eager: EagerRunner):
        builder = eager.builder
        self.eager = eager
        self.builder = builder
        self.evaluator = builder.evaluator
        self.applier = eager.applier
        self.programs = ProgramCache(eager, whole=True)
        self.parts = MicrobatchRunner(eager)
        self.builder.compiled_sums = self._add_part
        self._seen: dict[str, int] = {}  # number of microbatches by size
        self._era = 0  # of `_rates`
        self._rates = self.applier.rates()
        self._compiled = False  # whether an update was compiled

    @property
    def config(self) -> StepConfig:
        """Settings of the next window."""
        return self.builder.config

    # --- updates ---------------------------------------------------------------------------------------------------

    def fill(self, cursor: BatchCursor, blocks: bool) -> Iterator[Window | CompiledWindow]:
        builder = self.builder
        builder.ranks.check_group()
        builder.cursor = cursor
        while builder.cursor is not None:
            if not builder.window.open and self._due(cursor):
                made = builder.counters.updates
                yield from self._compiled_windows(cursor, blocks)
                if builder.counters.updates > made:
                    continue  # the guards of the program may have failed: it is compiled again
            window = builder.next_window()
            if window is not None:
                yield window

    def apply(self, window: Window | CompiledWindow) -> Update:
        if isinstance(window, Window):
            return self.eager.apply(window)
        counters = self.builder.counters
        outcome = Outcome(False, window.rates, lambda: torch.tensor(window.norm, dtype=torch.float64))
        update = Update(
            counters.updates, window.samples, outcome, [window.stats], window.columns, updates=window.updates
        )
        update.phases = {"compiled": window.seconds}
        counters.updates += window.updates
        counters.microbatches += window.updates
        counters.samples += window.samples
        return update

    @property
    def status(self) -> str:
        both = (self.programs, self.parts.programs)
        gave_up = [programs.gave_up for programs in both if programs.gave_up is not None]
        if gave_up:
            return gave_up[0]
        if self._compiled or self.parts.compiled:
            return "compiled"
        slower = [reason for programs in both for reason in programs.slower.values()]
        if slower:
            return slower[0]
        if self.config.compile == "auto" and self.builder.config.samples != 1:
            return "compile='auto' compiles only steps with samples=1"
        return f"not compiled yet, after {plural(self.builder.counters.updates, 'update')}"

    def _due(self, cursor: BatchCursor) -> bool:
        """True if the next update should be compiled as a whole.

        The first update never is: it is checked for mistakes and creates the optimizer state. With "auto": only
        one-sample updates, after AUTO_AFTER of them.
        """
        if self.programs.gave_up is not None:
            return False
        updates = self.builder.counters.updates
        if self.config.compile == "auto":
            return updates >= AUTO_AFTER and self.builder.config.samples == 1
        return updates >= 1 and not self._in_parts(self.builder.config.samples or cursor.left)

    def _in_parts(self, size: int) -> bool:
        """Test whether the settings prevent that one program makes an update of `size` samples."""
        chain = self.config.transforms
        misfit = any(t.positions not in (None, size) for t in chain.samples.transforms)  # an error of `_finish`
        return bool(chain.on_sum) or 0 < (self.builder.size.size or 0) < size or misfit

    def _add_part(self, microbatch: Any) -> SampleStats | None:
        """As `MicrobatchRunner.add`, for microbatches that are not a whole window, after PART_AFTER of their size."""
        window = self.builder.window
        if self.programs.gave_up is not None or window.config.transforms.samples.uses_positions:
            return None
        size = length(microbatch) or 0
        wanted = window.config.samples or size + (0 if self.builder.cursor is None else self.builder.cursor.left)
        whole = not window.samples and size == wanted and not self._in_parts(size)
        if whole or self.config.compile is not True or self.builder.counters.updates == 0:
            return None
        seen = self._seen.get(str(size), 0)
        if seen < PART_AFTER:
            self._seen[str(size)] = seen + 1
            return None
        return self.parts.add(microbatch)

    @contextmanager
    def slow_compile_notice(self, notify: Callable[[str], None]) -> Iterator[None]:
        with self.programs.slow_compile_notice(notify), self.parts.slow_compile_notice(notify):
            yield

    def state_dict(self) -> dict[str, Any]:
        parts = {**self.parts.programs.state_dict(), "seen": dict(self._seen)}
        return {**self.programs.state_dict(), "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.programs.load_state_dict(state)
        parts = state.get("parts") or self.eager.state_dict()
        self.parts.programs.load_state_dict(parts)
        self._seen = dict(parts.get("seen", {}))
        self.parts.compiled = False
        self._compiled = False

    def rank_state(self) -> dict[str, Any]:
        """Nothing: there is one process."""
        return {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Updates of one process do not continue those of a rank."""

    # --- running compiled code -------------------------------------------------------------------------------------

    def _compiled_windows(self, cursor: BatchCursor, blocks: bool) -> Iterator[CompiledWindow]:
        """Make as many updates as possible with compiled code; with `blocks`, several in one window."""
        builder = self.builder
        self.evaluator.trained.refresh()
        self.evaluator.trained.clear()
        for window in self._blocks(cursor) if blocks else self._one_by_one(cursor):
            self._compiled = True
            if cursor.empty:
                builder.cursor = None
            yield window
            if builder.cursor is not cursor or builder.window.open:
                return

    def _one_by_one(self, cursor: BatchCursor) -> Iterator[CompiledWindow]:
        """Run compiled updates one by one, until the batch is used up or the next update must be uncompiled."""
        builder = self.builder
        config = builder.config
        norms = builder.record_norms
        size = config.samples or cursor.left
        last = (cursor.rows or 0) - size
        program = self.programs.get(cursor, size)
        while program is not None and cursor.consumed <= last and not (config.recheck and self._recheck_due()):
            window = self._run(program, cursor)
            if window is None:
                return
            yield window
            if builder.config is not config or builder.record_norms != norms or not self.programs.guards_hold():
                return

    def _blocks(self, cursor: BatchCursor) -> Iterator[CompiledWindow]:
        """Run compiled updates in blocks of up to CHUNK; the caller runs no code between the updates of a block."""
        size = self.builder.config.samples or cursor.left
        end = cursor.rows or 0
        program = self.programs.get(cursor, size)
        scheduler = self.applier.scheduler
        several = program is not None and program.can_make_many and scheduler is None and not self.config.recheck
        may_change = scheduler is not None or (program is not None and program.update.buckets is None)
        while program is not None and cursor.consumed + size <= end and not self._recheck_due():
            wanted = min((end - cursor.consumed) // size, CHUNK) if several else 1
            window = self._run_many(program, cursor, wanted) if wanted > 1 else self._run(program, cursor)
            if window is None:
                return
            yield window
            if window.updates < wanted or (may_change and not self.programs.guards_hold()):
                return

    def _recheck_due(self) -> bool:
        """True if the next update is rechecked, which compiled code cannot do."""
        return bool(self.config.recheck) and self.builder.recheck.due(self.builder.counters.updates)

    def _run(self, program: Program, cursor: BatchCursor) -> CompiledWindow | None:
        started = perf_counter()
        era = self.programs.era
        if era != self._era:
            self._era = era
            self._rates = self.applier.rates()
        if program.copies:
            program.copy_again()
        start = cursor.consumed
        results = program(start, era)
        if results is None:
            return None
        if program.update.buckets is None:
            program.write_gradients(results)
            self.applier.optimizer.step()
        rates = self._rates
        if self.applier.scheduler is not None:
            self.applier.scheduler.step()
        cursor.skip(program.update.samples)
        stats = program.stats(results)
        columns = self._columns(cursor, start) if self.builder.columns else []
        return CompiledWindow(stats, program.count, 1, program.norm(), rates, perf_counter() - started, columns)

    def _run_many(self, program: Program, cursor: BatchCursor, updates: int) -> CompiledWindow | None:
        started = perf_counter()
        rates = self.applier.rates()
        start = cursor.consumed
        made, results = program.many(start, updates)
        if not made:
            return None
        cursor.skip(made * program.update.samples)
        samples = program.count * made
        stats = program.stats(results)
        columns = self._columns(cursor, start) if self.builder.columns else []
        return CompiledWindow(stats, samples, made, program.norm(), rates, perf_counter() - started, columns)

    def _columns(self, cursor: BatchCursor, start: int) -> list[BatchColumns]:
        """Batch columns of the rows consumed since row `start`."""
        builder = self.builder
        rows = slice(start, cursor.consumed)
        return [record_columns(cursor.batch, builder.columns, builder.counters.epochs, rows)]
