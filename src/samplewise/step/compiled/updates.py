"""Compiled updates: decide when to compile, run the compiled code, and fall back to uncompiled updates.

An update is compiled for the structure and shape of its samples. Before the compiled code is used for the first time,
one update is computed compiled and uncompiled, and the results are compared. When the code cannot be used, the step
continues uncompiled; with compile=True it warns once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.core.batches import cut, leaves
from samplewise.core.slow_notice import notify_if_slow
from samplewise.core.text import plural
from samplewise.errors import TrainingWarning
from samplewise.step.accumulate import WeightedAccumulator
from samplewise.step.batch_columns import BatchColumns, record_columns
from samplewise.step.compiled import inductor
from samplewise.step.compiled.batch_signature import has_rows, signature
from samplewise.step.compiled.errors import CannotCompile
from samplewise.step.compiled.guards import Guards
from samplewise.step.compiled.kernel_replay import CHUNK
from samplewise.step.compiled.optim_buckets import OptimBuckets
from samplewise.step.compiled.optim_formulas import formula_of
from samplewise.step.compiled.program import Program
from samplewise.step.compiled.tracing import Tensors, trace_backward
from samplewise.step.compiled.update_fn import CompiledUpdate
from samplewise.step.compiled.verify import agrees
from samplewise.step.config import StepConfig
from samplewise.step.eager import EagerUpdates
from samplewise.step.update import Outcome, Update
from samplewise.step.window import BatchCursor, Window
from samplewise.transforms.stats import SampleStats

AUTO_AFTER = 1000  # one-sample updates before "auto" compiles: training is then likely to last
SHAPES = 4  # maximum number of sample shapes that are compiled
CHANGES = 8  # maximum number of recompilations after changes of the model or the optimizer


class CompiledWindow(NamedTuple):
    """One or several updates that compiled code has made."""

    stats: SampleStats
    samples: int
    updates: int
    norm: float  # gradient norm of the last update
    rates: list[Any]
    seconds: float
    columns: list[BatchColumns]


class CompiledUpdates:
    """Updates made by compiled code where possible, and by `eager` otherwise."""

    def __init__(self, eager: EagerUpdates):
        builder = eager.builder
        self.eager = eager
        self.builder = builder
        self.evaluator = builder.evaluator
        self.applier = eager.applier
        self.notify: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        self._gave_up: str | None = None  # why nothing is compiled any more
        self._known: list[str] = []  # sample shapes admitted for compilation
        self._guards: Guards | None = None
        self._programs: dict[Any, Program | None] = {}
        self._changes = 0
        self._full = False
        self._settings = self._compiled_settings()  # at the last call of _settings_hold
        self._era = 0  # incremented when the optimizer's hyperparameters change
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
            if not builder.window.open and self._due():
                yield from self._compiled_windows(cursor, blocks)
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
        if self._gave_up is not None:
            return self._gave_up
        if self._compiled:
            return "compiled"
        if self.config.compile == "auto" and self.builder.config.samples != 1:
            return "compile='auto' compiles only steps with samples=1"
        return f"not compiled yet, after {plural(self.builder.counters.updates, 'update')}"

    def _due(self) -> bool:
        """True if the next update should be compiled.

        The first update never is: it is checked for mistakes and creates the optimizer state. With "auto": only
        one-sample updates, after AUTO_AFTER of them.
        """
        if self._gave_up is not None:
            return False
        updates = self.builder.counters.updates
        if self.config.compile == "auto":
            return updates >= AUTO_AFTER and self.builder.config.samples == 1
        return updates >= 1

    @contextmanager
    def slow_compile_notice(self, notify: Callable[[str], None]) -> Iterator[None]:
        before = self.notify
        self.notify = notify
        try:
            yield
        finally:
            self.notify = before

    def state_dict(self) -> dict[str, Any]:
        return {"known": list(self._known), "given_up": self._gave_up}

    def __getstate__(self) -> dict[str, Any]:
        """State without compiled code, which is bound to tensors; a copy compiles again."""
        return {**vars(self), "_programs": {}, "_guards": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = list(state["known"])
        self._gave_up = state["given_up"]
        self._programs = {}
        self._guards = None
        self._compiled = False

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
        size = self.builder.config.samples or cursor.left
        end = cursor.rows or 0
        record_norms = self.builder.record_norms
        config = self.config
        program = self._program_for(cursor, size)
        while program is not None and cursor.consumed + size <= end and not self._audit_due():
            window = self._run(program, cursor)
            if window is None:
                return
            yield window
            if self.config is not config or self.builder.record_norms != record_norms or not self._guards_hold():
                return

    def _blocks(self, cursor: BatchCursor) -> Iterator[CompiledWindow]:
        """Run compiled updates in blocks of up to CHUNK; the caller runs no code between the updates of a block."""
        size = self.builder.config.samples or cursor.left
        end = cursor.rows or 0
        program = self._program_for(cursor, size)
        scheduler = self.applier.scheduler
        several = program is not None and program.can_make_many and scheduler is None and not self.config.audit
        while program is not None and cursor.consumed + size <= end and not self._audit_due():
            wanted = min((end - cursor.consumed) // size, CHUNK) if several else 1
            window = self._run_many(program, cursor, wanted) if wanted > 1 else self._run(program, cursor)
            if window is None:
                return
            yield window
            if window.updates < wanted or (scheduler is not None and not self._guards_hold()):
                return

    def _audit_due(self) -> bool:
        """True if the next update is audited, which compiled code cannot do."""
        return bool(self.config.audit) and self.builder.audit.due(self.builder.counters.updates)

    def _run(self, program: Program, cursor: BatchCursor) -> CompiledWindow | None:
        started = perf_counter()
        if self._guards is None or self._guards.hyperparameters_changed():
            self._era += 1
            self._rates = self.applier.rates()
        if program.copies:
            program.copy_again()
        start = cursor.consumed
        results = program(start, self._era)
        if results is None:
            return None
        if program.update.buckets is None:
            program.write_gradients(results)
            self.applier.optimizer.step()
        if self.applier.scheduler is not None:
            self.applier.scheduler.step()
        cursor.skip(program.update.samples)
        stats = program.stats(results)
        rates = self._rates
        seconds = perf_counter() - started
        return CompiledWindow(stats, program.count, 1, program.norm(), rates, seconds, self._columns(cursor, start))

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
        seconds = perf_counter() - started
        return CompiledWindow(stats, samples, made, program.norm(), rates, seconds, self._columns(cursor, start))

    def _columns(self, cursor: BatchCursor, start: int) -> list[BatchColumns]:
        """Batch columns of the rows consumed since row `start`."""
        builder = self.builder
        if not builder.columns:
            return []
        rows = slice(start, cursor.consumed)
        return [record_columns(cursor.batch, builder.columns, builder.counters.epochs, rows)]

    def _compiled_settings(self) -> tuple[Any, ...]:
        """Settings that are part of the compiled code."""
        config = self.config
        return config.transforms, config.max_grad_norm, config.microbatch

    def _settings_hold(self) -> bool:
        """Test whether the settings are those of the last call; otherwise discard compiled code. The next update is
        then uncompiled, because the first one of new transforms is checked for mistakes.
        """
        settings = self._compiled_settings()
        if settings[0] is self._settings[0] and settings[1:] == self._settings[1:]:
            return True
        self._settings = settings
        return self._discard()

    def _guards_hold(self) -> bool:
        """Test the guards; discard all compiled code if something has changed."""
        if self._guards is not None and self._guards.hold():
            return True
        return self._discard()

    def _discard(self) -> bool:
        """Discard all compiled code; returns False."""
        self._programs = {}
        self._guards = None
        self._changes += 1
        if self._changes > CHANGES:
            self._give_up(f"the model, the optimizer or the settings have changed {self._changes} times")
        return False

    # --- compiling -------------------------------------------------------------------------------------------------

    def _program_for(self, cursor: BatchCursor, size: int) -> Program | None:
        """Return the verified program for the next update, compiling it if needed; None: run uncompiled."""
        if not 0 < size <= cursor.left:
            return None
        record_norms = self.builder.record_norms
        self.evaluator.predictions = predictions = self.builder.predictions
        try:
            shape = signature(cursor.batch, cursor.rows), size
            key = *shape, record_norms, predictions
            if not self._settings_hold() or (self._programs and not self._guards_hold()):
                return None
            if key not in self._programs:
                self._programs[key] = self._compile(cursor, size, record_norms) if self._admitted(repr(shape)) else None
            program = self._programs[key]
            if program is not None:
                program.feed(cursor.batch)
                program.verified = program.verified or self._agrees(program, cursor, size)
        except Exception as problem:  # raised by tracing or compiling; nothing has been changed
            self._give_up(_first_line(problem))
            return None
        return program if program is not None and program.verified else None

    def _admitted(self, shape: str) -> bool:
        """Test whether this sample shape is compiled: at most SHAPES different ones are."""
        if shape in self._known:
            return True
        if len(self._known) == SHAPES:
            if not self._full:
                self._warn(f"at most {SHAPES} sample shapes are compiled; found another shape, which stays uncompiled")
            self._full = True
            return False
        self._known.append(shape)
        return True

    def _compile(self, cursor: BatchCursor, size: int, record_norms: bool) -> Program:
        self._check_settings(size)
        example = cut(cursor.batch, cursor.consumed, cursor.consumed + size, cursor.rows)
        self.evaluator.trained.clear()
        with notify_if_slow(self.notify, f"compiling an update of {plural(size, 'sample')} ..."), _quietly():
            guards, tensors, update = self._traced(cursor, size, example, record_norms)
            program = Program(update, tensors, example)
        guards.bind(list(tensors.trained.values()), program.tensors, program.counters, program.shape)
        self._guards = guards
        self._era += 1
        self._rates = self.applier.rates()
        return program

    def _why_different(self) -> str:
        if self.config.precision is None or inductor.emulates_casts():
            return "compiled and uncompiled update differ"
        return (
            f"compiled code of torch {torch.__version__} rounds to bfloat16 at other places than uncompiled code; a "
            "newer torch version can compile updates in mixed precision"
        )

    def _agrees(self, program: Program, cursor: BatchCursor, size: int) -> bool:
        """Verify the program on the next update. False: not decided, for example because the update is not finite."""
        example = cut(cursor.batch, cursor.consumed, cursor.consumed + size, cursor.rows)
        accumulator = self.builder.make_accumulator()
        same = agrees(program, accumulator, self.evaluator, self.applier, self.config, example, cursor.consumed)
        if same is False:
            raise CannotCompile(self._why_different())
        return same is True

    def _traced(
        self, cursor: BatchCursor, size: int, example: Any, record_norms: bool
    ) -> tuple[Guards, Tensors, CompiledUpdate]:
        evaluator = self.evaluator
        optimizer = self.applier.optimizer
        chain = self.config.transforms
        functions = [evaluator.loss_fn, *(t.answer for t in chain.samples.transforms)]
        guards = Guards(evaluator.modules, functions, optimizer)
        tensors = Tensors.of(evaluator)
        accumulator = WeightedAccumulator(evaluator, chain, record_norms, self.builder.ranks, self.builder.size)
        with guards.restored_after_tracing():
            backward = trace_backward(accumulator, tensors, example)
        formula = formula_of(optimizer)
        names = {id(p): name for name, p in tensors.trained.items() if name in backward.reached}
        update = CompiledUpdate(
            backward=backward,
            buckets=None if formula is None else OptimBuckets(formula, optimizer, names),
            samples=size,
            chosen=[has_rows(leaf, cursor.rows) for leaf in leaves(cursor.batch) if isinstance(leaf, Tensor)],
            max_grad_norm=self.config.max_grad_norm,
            checks=self.config.checks_finite,
        )
        return guards, tensors, update

    def _check_settings(self, size: int) -> None:
        """Raise CannotCompile for settings that are not supported or not faster when compiled."""
        modules = [m for root in self.evaluator.modules for m in root.modules()]
        chain = self.config.transforms
        microbatch = self.builder.size
        reasons = {
            "the parameters are not in CPU memory": self.evaluator.trained.device.type != "cpu",
            "there is a loss scale": self.evaluator.precision.scales,
            "a window is computed in microbatches": microbatch.automatic or (microbatch.size or size) < size,
            "transforms group samples, use references or add noise": bool(
                chain.grouping or chain.samples.references or chain.on_sum
            ),
            "recurrent layers are no faster compiled": any(isinstance(m, nn.RNNBase) for m in modules),
            "the model was compiled with torch.compile": any(hasattr(m, "_orig_mod") for m in modules),
        }
        for reason, holds in reasons.items():
            if holds:
                raise CannotCompile(reason)

    # --- warnings --------------------------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        self._gave_up = reason
        self._programs = {}
        self._guards = None
        self._warn(f"updates stay uncompiled: {reason}")

    def _warn(self, what: str) -> None:
        if self.config.compile is True:
            warnings.warn(
                f"{what}. Training continues; uncompiled updates give the same results, without the speedup.",
                TrainingWarning,
                2,
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Ignore warnings of tracer and compiler; warnings of the model were shown in uncompiled updates."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def _first_line(problem: Exception) -> str:
    if isinstance(problem, CannotCompile):
        return str(problem)
    message = str(problem).strip().partition("\n")[0][:200].rstrip(".") or "no reason given"
    if isinstance(problem, ImportError):
        return f"torch {torch.__version__} lacks an interface that compiled updates need ({message})"
    return f"{type(problem).__name__}: {message}"
