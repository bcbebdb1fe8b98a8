"""Cache of compiled programs: compile them for the structure and shape of their samples, guard and verify them.

Before a program is used for the first time, its results and its speed are compared with those of uncompiled code. When
a program cannot be made, the step continues uncompiled; with compile=True it warns once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from samplewise.core import observation
from samplewise.core.batches import cut
from samplewise.core.closure_state import CallSnapshot
from samplewise.core.reachable import Reachable
from samplewise.core.text import notify_if_slow, plural
from samplewise.errors import SamplewiseError, TrainingWarning
from samplewise.step.accumulate import PlainAccumulator, WeightedAccumulator
from samplewise.step.apply import UpdateApplier
from samplewise.step.compiled import CannotCompile, DoesNotPay, Undecided, inductor
from samplewise.step.compiled.calls import Calls, ValueReads, description
from samplewise.step.compiled.guards import Guards, describe, has_hooks, hooks_in
from samplewise.step.compiled.optim import OptimBuckets, formula_of
from samplewise.step.compiled.program import Program, has_rows, signature, tensors_in
from samplewise.step.compiled.tracing import Tensors, trace_backward
from samplewise.step.compiled.update_fn import CompiledUpdate
from samplewise.step.compiled.verify import DryRun, agrees, count_operations, refuse_library_bound, refuse_slower
from samplewise.step.config import StepConfig
from samplewise.step.group_means import GroupCounts
from samplewise.step.window import BatchCursor
from samplewise.step.window_builder import WindowBuilder

SHAPES = 4  # maximum number of sample shapes that are compiled
CHANGES = 8  # maximum number of recompilations after changes of the model or the optimizer


class ProgramCache:
    """Compiled programs by the signature of their samples. `whole_update`: a program makes a whole update; otherwise it
    computes the gradient sums of a microbatch. `gave_up`: why nothing is compiled any more; `shapes`: sample shapes
    admitted for compilation; `slower`: those among them that stay uncompiled, because compiled updates are not faster,
    with the reason.
    """

    def __init__(self, builder: WindowBuilder, applier: UpdateApplier, whole_update: bool):
        self.builder = builder
        self.evaluator = builder.evaluator
        self.applier = applier
        self.whole_update = whole_update
        self.notify: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        self.gave_up: str | None = None
        self.shapes: list[str] = []
        self.slower: dict[str, str] = {}
        self._tried: set[str] = set()  # shapes whose programs are faster
        self._failed: set[str] = set()  # those among them that could not be compiled again, after a change
        self.programs: dict[Any, Program | None] = {}
        self._guards: Guards | None = None
        self._changes = 0
        self._values: dict[str, int] = {}  # checksums of guarded values, by shape, since the last change
        self._full = False
        self._settings: tuple[Any, ...] = self._compiled_settings()  # at the last call of _settings_hold
        self._description = describe(self._settings)

    @property
    def config(self) -> StepConfig:
        """Settings of the next window, or of the one whose gradients are computed."""
        return self.builder.config if self.whole_update else self.builder.window.config

    @contextmanager
    def slow_compile_notice(self, notify: Callable[[str], None]) -> Iterator[None]:
        before = self.notify
        self.notify = notify
        try:
            yield
        finally:
            self.notify = before

    def state_dict(self) -> dict[str, Any]:
        return {
            "known": list(self.shapes),
            "given_up": self.gave_up,
            "slower": dict(self.slower),
            "tried": sorted(self._tried),
            "failed": sorted(self._failed),
            "changes": self._changes,
            "values": dict(self._values),
            "settings": self._description,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Discard all programs, and restore what is known about shapes and settings, so that the same updates are
        compiled as without the interruption.
        """
        self.shapes = list(state["known"])
        self.gave_up = state["given_up"]
        self.slower = dict(state.get("slower", {}))
        self._tried = set(state.get("tried", self.shapes))
        self._failed = set(state.get("failed", ()))
        self._changes = state.get("changes", 0)
        self._values = dict(state.get("values", {}))
        self._settings = ()
        self._description = state.get("settings") or describe(self._compiled_settings())
        self.programs = {}
        self._guards = None

    def __getstate__(self) -> dict[str, Any]:
        """State without compiled code, which is bound to tensors; a copy compiles again."""
        return {**vars(self), "programs": {}, "_guards": None}

    # --- guards ----------------------------------------------------------------------------------------------------

    @property
    def hyperparameter_version(self) -> int:
        """Identifies the hyperparameters of the optimizer at the last call of `guards_hold` or `get`."""
        return 0 if self._guards is None else self._guards.hyperparameter_version

    def _compiled_settings(self) -> tuple[Any, ...]:
        """Settings that are part of the compiled code."""
        config = self.config
        return config.transforms, config.max_grad_norm, config.microbatch, config.aggregate

    def _settings_hold(self) -> bool:
        """Test whether the settings are those of the last call; otherwise discard compiled code. The next update is
        then uncompiled, because the first one of new transforms is checked for mistakes. Equal settings in new objects
        are compiled again, as after a resume.
        """
        settings = self._compiled_settings()
        before = self._settings
        if before and settings[0] is before[0] and settings[1:] == before[1:]:
            return True
        self._settings = settings
        description = self._description
        self._description = describe(settings)
        self.programs = {}
        self._guards = None
        return self._description == description or self._discard()

    def guards_hold(self) -> bool:
        """Test the guards; discard all compiled code if something has changed."""
        if self._guards is not None and self._guards.hold():
            return True
        return self._discard()

    def _discard(self) -> bool:
        """Discard all compiled code; returns False."""
        self.programs = {}
        self._guards = None
        self._values = {}
        self._changes += 1
        if self._changes > CHANGES:
            self._give_up(f"the model, the optimizer or the settings have changed {self._changes} times")
        return False

    # --- compiling -------------------------------------------------------------------------------------------------

    def get(self, cursor: BatchCursor, size: int) -> Program | None:
        """Return the verified program for the next `size` samples, compiling it if needed; None: run uncompiled."""
        if not 0 < size <= cursor.left or observation.observers:  # an audit has hooks, and sees uncompiled updates
            return None
        self.evaluator.predictions = predictions = self.builder.predictions
        shape = ""
        try:
            rows = signature(cursor.batch, cursor.rows)
            shape = repr((rows, size))
            key = rows, size, self.builder.record_norms, predictions
            if not self._settings_hold():
                return None
            if self._guards is not None and not self.guards_hold() and self.gave_up is not None:
                return None  # otherwise it is compiled again, at once, as after a resume
            if key not in self.programs:
                self.programs[key] = self._compile(cursor, size, shape)
            program = self.programs[key]
            if program is not None:
                program.feed(cursor.batch)
                program.verified = program.verified or self._accepts(program, cursor, size, shape)
        except Undecided:
            return None
        except DoesNotPay as reason:
            self.programs[key] = None
            self.slower[shape] = str(reason)
            self.notify(f"updates of {plural(size, 'sample')} stay uncompiled: {reason}")
            return None
        except Exception as problem:  # raised by tracing or compiling; nothing has been changed
            # Give up, unless this shape was compiled before: then a change is the reason, and may be incomplete. The
            # next update is uncompiled, and raises errors of the change or completes it. If the shape fails again, give
            # up.
            if shape in self._tried and shape not in self._failed:
                self._failed.add(shape)
                if self._guards is None and self._values:  # the change happened at a resume, and was not counted
                    self._discard()
            else:
                self._give_up(_first_line(problem))
            return None
        return program if program is not None and program.verified else None

    def _admits(self, shape: str) -> bool:
        """Test whether this sample shape is compiled: at most SHAPES different ones are, without those that are not
        faster when compiled.
        """
        if shape in self.shapes:
            return shape not in self.slower
        if len(self.shapes) == SHAPES:
            if not self._full:
                self._warn(f"at most {SHAPES} sample shapes are compiled; found another shape, which stays uncompiled")
            self._full = True
            return False
        self.shapes.append(shape)
        return True

    def _compile(self, cursor: BatchCursor, size: int, shape: str) -> Program | None:
        if not self._admits(shape):
            return None
        self._check_settings()
        example = cut(cursor.batch, cursor.consumed, cursor.consumed + size, cursor.rows)
        chain = self.config.transforms
        functions = [self.evaluator.loss_fn, *(t.coefficients for t in chain.samples.transforms)]
        before = CallSnapshot(functions, self.evaluator.modules, [example])
        if before.iterators:
            raise CannotCompile(f"the model or the loss function can read {description(before.iterators[0])}")
        try:
            self._call_once(example, before)
            return self._compile_repeated_call(cursor, size, shape, example, functions)
        except Exception:
            before.restore()
            raise

    def _call_once(self, example: Any, before: CallSnapshot) -> None:
        """Compute the update and undo it, except for what the model and the loss function do only in their first call
        with such samples: imports, caches, attributes. A resumed run, whose process has not called them yet, then
        compiles the same code as an uninterrupted one.
        """
        dry_run = self._dry_run(example)
        try:
            with dry_run.without_grads(), _quietly():
                inductor.load_compiler()
                dry_run.run(dry_run.uncompiled)
        except SamplewiseError as error:
            raise Undecided("this update is not finite") from error
        before.restore_values()
        if self._guards is not None and not self._guards.hold():
            self.programs = {}  # other programs were compiled without what this call has made
            self._values = {}

    def _compile_repeated_call(
        self, cursor: BatchCursor, size: int, shape: str, example: Any, functions: Sequence[Any]
    ) -> Program:
        """Compile the update as it is after `_call_once`. It must not change variables any more."""
        state = CallSnapshot(functions, self.evaluator.modules, [example])
        calls = Calls(Reachable([cached.__wrapped__ for cached in state.caches]).codes)
        try:
            with _quietly():
                dry_run = self._dry_run(example)
                operations = count_operations(dry_run, calls)
                if shape not in self._tried:
                    refuse_library_bound(dry_run, operations)
        finally:
            state.restore()
        guards = Guards(self.evaluator.modules, functions, self.applier.optimizer, calls)
        if self._values.get(shape, guards.checksum) != guards.checksum:  # a change at a resume, which no guard has seen
            self._discard()
            if self.gave_up is not None:
                raise Undecided("too many changes")
        self._values[shape] = guards.checksum
        notice = f"compiling an update of {plural(size, 'sample')} ..."
        with self.evaluator.trained.without_grads(), notify_if_slow(self.notify, notice), _quietly():
            try:
                with guards.unchanged():
                    tensors, update = self._trace(cursor, size, example)
            finally:
                state.restore()
            program = Program(update, tensors, example)
        guards.bind(list(tensors.trained.values()), program.tensors, program.counters, program.optimizer_settings)
        self._guards = guards
        return program

    def _dry_run(self, example: Any) -> DryRun:
        return DryRun(
            self.builder.make_accumulator(),
            self.evaluator,
            self.applier,
            self.config,
            example,
            whole_update=self.whole_update,
            formula=formula_of(self.applier.optimizer) is not None,
        )

    def _accepts(self, program: Program, cursor: BatchCursor, size: int, shape: str) -> bool:
        """Verify the program on the next update, and that it is faster. False: not decided, for example because the
        update is not finite.
        """
        start = cursor.consumed
        dry_run = self._dry_run(cut(cursor.batch, start, start + size, cursor.rows))
        with dry_run.without_grads():
            agreement = agrees(program, dry_run, start)
        if agreement is None:
            return False
        if not agreement and (self.config.precision is None or inductor.emulates_casts()):
            raise CannotCompile("compiled and uncompiled update differ")
        if not agreement:
            raise CannotCompile(
                f"compiled code of torch {torch.__version__} rounds to bfloat16 at other places than uncompiled code; "
                "a newer torch version can compile updates in mixed precision"
            )
        if shape not in self._tried:
            refuse_slower(program, dry_run, start)
            self._tried.add(shape)
        self._failed.discard(shape)
        return True

    def _trace(self, cursor: BatchCursor, size: int, example: Any) -> tuple[Tensors, CompiledUpdate]:
        evaluator = self.evaluator
        optimizer = self.applier.optimizer
        tensors = Tensors.of(evaluator)
        accumulator = self.builder.make_accumulator()
        assert isinstance(accumulator, (PlainAccumulator, WeightedAccumulator))
        divisor = self.config.constant_divisor if self.whole_update else 1.0
        with ValueReads():
            backward = trace_backward(accumulator, tensors, example, divisor)
        formula = formula_of(optimizer) if self.whole_update else None
        names = {id(p): name for name, p in tensors.trained.items() if name in backward.reached}
        update = CompiledUpdate(
            backward=backward,
            buckets=None if formula is None else OptimBuckets(formula, optimizer, names),
            samples=size,
            has_rows=[has_rows(tensor, cursor.rows) for tensor in tensors_in(cursor.batch)],
            max_grad_norm=self.config.max_grad_norm if self.whole_update else None,
            checks=self.config.checks_finite,
        )
        return tensors, update

    def _check_settings(self) -> None:
        """Raise CannotCompile for settings that are not supported or not faster when compiled."""
        modules = [m for root in self.evaluator.modules for m in root.modules()]
        chain = self.config.transforms
        reasons = {
            "the parameters are not in CPU memory": self.evaluator.trained.device.type != "cpu",
            "transforms have a state, which changes with every update": bool(chain.states),
            "there is a loss scale": self.evaluator.precision.scales,
            "the size of microbatches is automatic": self.builder.size.automatic,
            "transforms group samples, use references or add noise": bool(
                chain.grouping or chain.samples.references or (chain.on_sum and self.whole_update)
            ),
            "updates are means over groups": isinstance(self.evaluator.means, GroupCounts),
            "recurrent layers are no faster compiled": any(isinstance(m, nn.RNNBase) for m in modules),
            "modules have hooks": any(hooks_in(modules)),
            "parameters have hooks": any(map(has_hooks, self.evaluator.trained.named.values())),
            "the model was compiled with torch.compile": any(hasattr(m, "_orig_mod") for m in modules),
        }
        for reason, holds in reasons.items():
            if holds:
                raise CannotCompile(reason)

    # --- reasons to stay uncompiled --------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        self.gave_up = reason
        self.programs = {}
        self._guards = None
        self._warn(f"updates stay uncompiled: {reason}")

    def _warn(self, problem: str) -> None:
        if self.config.compile is True:
            warnings.warn(
                f"{problem}. Training continues; uncompiled updates give the same results, without the speedup.",
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
