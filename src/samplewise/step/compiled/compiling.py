"""Decides when updates are compiled, runs compiled updates, and falls back to uncompiled ones.

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
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import cut, leaves
from samplewise.core.slow_notice import telling
from samplewise.errors import TrainingWarning
from samplewise.step.accumulate import WeightedAccumulator
from samplewise.step.apply import UpdateApplier
from samplewise.step.batch_cursor import BatchCursor
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
from samplewise.step.forward import LossEvaluator
from samplewise.step.microbatch import Microbatch
from samplewise.step.microbatch_stats import MicrobatchStats
from samplewise.transforms.chain import Chain

AUTO_AFTER = 1000  # one-sample updates before "auto" compiles: training is then likely to last
SHAPES = 4  # maximum number of sample shapes that are compiled
CHANGES = 8  # maximum number of recompilations after changes of the model or the optimizer


Made = tuple[MicrobatchStats, int, int, float, list[Any], float]
"""Result of one or several updates: (per-sample results, number of samples, number of updates, gradient norm of the
last update, learning rates, seconds).
"""


class Compiling:
    """Compiled updates of a step: `due` tests whether to compile; `updates` and `blocks` run compiled updates."""

    def __init__(
        self,
        mode: bool | str,
        evaluation: LossEvaluator,
        finish: UpdateApplier,
        microbatch: Microbatch,
        chain: Chain,
        record: set[str],
        pause: Callable[[], bool],
        pauses: bool,
    ):
        """`pause()` is True if the next update must be uncompiled; `pauses` is True if that can happen at all."""
        if mode not in (True, False, "auto"):
            raise ValueError(f"compile must be True, False or 'auto'; found {mode!r}.")
        self.mode = mode
        self.evaluation = evaluation
        self.finish = finish
        self.microbatch = microbatch
        self.chain = chain
        self.record = record
        self.pause = pause
        self.pauses = pauses
        self.tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        self._given_up: str | None = None
        self._known: list[str] = []  # sample shapes admitted for compilation
        self._guards: Guards | None = None
        self._programs: dict[Any, Program | None] = {}
        self._changes = 0
        self._full = False
        self._era = 0  # incremented when the optimizer's hyperparameters change
        self._rates = finish.rates()

    def due(self, updates: int, samples: int | None) -> bool:
        """Test whether the next update should be compiled.

        The first update never is: it is checked for mistakes and creates the optimizer state. With "auto": only
        one-sample updates, after AUTO_AFTER of them.
        """
        if self._given_up is not None or not self.mode:
            return False
        return updates >= (1 if self.mode is True else AUTO_AFTER) and (self.mode is True or samples == 1)

    def state_dict(self) -> dict[str, Any]:
        return {"known": list(self._known), "given_up": self._given_up}

    def __getstate__(self) -> dict[str, Any]:
        """State without compiled code, which is bound to tensors; a copy compiles again."""
        return {**vars(self), "_programs": {}, "_guards": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = list(state["known"])
        self._given_up = state["given_up"]
        self._programs = {}
        self._guards = None

    # --- running updates -------------------------------------------------------------------------------------------

    def updates(self, rest: BatchCursor, samples: int | None) -> Iterator[Made]:
        """Run compiled updates one by one, until the batch is used up or the next update must be uncompiled."""
        size = samples or rest.left
        end = rest.rows or 0
        records = len(self.record)
        program = self._program_for(rest, size)
        while program is not None and rest.taken + size <= end and not (self.pauses and self.pause()):
            made = self._make(program, rest)
            if made is None:
                return
            yield made
            if not self._hold() or len(self.record) != records:
                return

    def blocks(self, rest: BatchCursor, samples: int | None) -> Iterator[Made]:
        """Run compiled updates in blocks of up to CHUNK; the caller runs no code between the updates of a block."""
        size = samples or rest.left
        end = rest.rows or 0
        program = self._program_for(rest, size)
        several = program is not None and program.can_make_many and self.finish.scheduler is None
        while program is not None and rest.taken + size <= end and not self.pause():
            wanted = min((end - rest.taken) // size, CHUNK) if several and not self.pauses else 1
            made = self._make_many(program, rest, wanted) if wanted > 1 else self._make(program, rest)
            if made is None:
                return
            yield made
            if made[2] < wanted or (self.finish.scheduler is not None and not self._hold()):
                return

    def _make(self, program: Program, rest: BatchCursor) -> Made | None:
        started = perf_counter()
        if self._guards is None or self._guards.renumbered():
            self._era += 1
            self._rates = self.finish.rates()
        if program.copies:
            program.copy_again()
        results = program(rest.taken, self._era)
        if results is None:
            return None
        if program.whole.cohorts is None:
            program.hand_over(results)
            self.finish.optimizer.step()
        if self.finish.scheduler is not None:
            self.finish.scheduler.step()
        rest.skip(program.whole.samples)
        return program.part(results), program.count, 1, program.norm(), self._rates, perf_counter() - started

    def _make_many(self, program: Program, rest: BatchCursor, updates: int) -> Made | None:
        started = perf_counter()
        rates = self.finish.rates()
        made, results = program.many(rest.taken, updates)
        if not made:
            return None
        rest.skip(made * program.whole.samples)
        return program.part(results), program.count * made, made, program.norm(), rates, perf_counter() - started

    def _hold(self) -> bool:
        """Test the guards; discard all compiled code if something has changed."""
        if self._guards is not None and self._guards.hold():
            return True
        self._programs = {}
        self._guards = None
        self._changes += 1
        if self._changes > CHANGES:
            self._give_up(f"the model or the optimizer has changed {self._changes} times")
        return False

    # --- compiling -------------------------------------------------------------------------------------------------

    def _program_for(self, rest: BatchCursor, size: int) -> Program | None:
        """Return the verified program for the next update, compiling it if needed; None: run uncompiled."""
        if not 0 < size <= rest.left:
            return None
        record = frozenset(self.record)
        try:
            shape = signature(rest.batch, rest.rows), size
            key = *shape, record
            if self._programs and not self._hold():
                return None
            if key not in self._programs:
                self._programs[key] = self._compiled(rest, size, record) if self._admitted(repr(shape)) else None
            program = self._programs[key]
            if program is not None:
                program.feed(rest.batch)
                program.tried = program.tried or self._agrees(program, rest, size, record)
        except Exception as problem:  # raised by tracing or compiling; nothing has been changed
            self._give_up(_in_short(problem))
            return None
        return program if program is not None and program.tried else None

    def _admitted(self, shape: str) -> bool:
        """Test whether this sample shape is compiled: at most SHAPES different ones are."""
        if shape in self._known:
            return True
        if len(self._known) == SHAPES:
            if not self._full:
                self._say(f"at most {SHAPES} sample shapes are compiled; found another shape, which stays uncompiled")
            self._full = True
            return False
        self._known.append(shape)
        return True

    def _compiled(self, rest: BatchCursor, size: int, record: frozenset[str]) -> Program:
        self._check_settings(size)
        example = cut(rest.batch, rest.taken, rest.taken + size, rest.rows)
        self.evaluation.trained.clear()
        with telling(self.tell, f"compiling an update of {size} sample{'s' * (size > 1)} ..."), _quietly():
            guards, tensors, whole = self._traced(rest, size, example, record)
            program = Program(whole, tensors, example)
        guards.bind(list(tensors.trained.values()), program.tensors, program.counters, program.shape)
        self._guards = guards
        self._era += 1
        self._rates = self.finish.rates()
        return program

    def _agrees(self, program: Program, rest: BatchCursor, size: int, record: frozenset[str]) -> bool:
        """Verify the program on the next update. False: not decided, for example because the update is not finite."""
        example = cut(rest.batch, rest.taken, rest.taken + size, rest.rows)
        same = agrees(program, self.evaluation, self.finish, self.chain, record, example, rest.taken)
        if same is False:
            raise CannotCompile("compiled and uncompiled update differ")
        return same is True

    def _traced(
        self, rest: BatchCursor, size: int, example: Any, record: frozenset[str]
    ) -> tuple[Guards, Tensors, CompiledUpdate]:
        evaluation = self.evaluation
        optimizer = self.finish.optimizer
        functions = [evaluation.loss_fn, *(t.answer for t in self.chain.samples.transforms)]
        guards = Guards(evaluation.modules, functions, optimizer)
        tensors = Tensors.of(evaluation)
        with guards.undisturbed():
            backward = trace_backward(
                evaluation, WeightedAccumulator(evaluation, self.chain, "norms" in record), tensors, example
            )
        formula = formula_of(optimizer)
        names = {id(p): name for name, p in tensors.trained.items() if name in backward.reached}
        cohorts = None if formula is None else OptimBuckets(formula, optimizer, names)
        chosen = [has_rows(leaf, rest.rows) for leaf in leaves(rest.batch) if isinstance(leaf, Tensor)]
        return (
            guards,
            tensors,
            CompiledUpdate(backward, cohorts, size, chosen, self.finish.max_grad_norm, self.finish.checks),
        )

    def _check_settings(self, size: int) -> None:
        """Raise CannotCompile for settings that are not supported or not faster when compiled."""
        modules = [m for root in self.evaluation.modules for m in root.modules()]
        reasons = {
            "the parameters are not in CPU memory": self.evaluation.trained.device.type != "cpu",
            "there is a loss scale": self.evaluation.precision.scales,
            "a window is computed in microbatches": self.microbatch.automatic or (self.microbatch.size or size) < size,
            "transforms group samples, use references or add noise": bool(
                self.chain.grouping or self.chain.samples.references or self.chain.on_sum
            ),
            "recurrent layers are no faster compiled": any(isinstance(m, nn.RNNBase) for m in modules),
            "the model was compiled with torch.compile": any(hasattr(m, "_orig_mod") for m in modules),
        }
        for reason, holds in reasons.items():
            if holds:
                raise CannotCompile(reason)

    # --- warnings --------------------------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        self._programs = {}
        self._guards = None
        self._say(f"updates stay uncompiled: {reason}")

    def _say(self, what: str) -> None:
        if self.mode is True:
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


def _in_short(problem: Exception) -> str:
    if isinstance(problem, CannotCompile):
        return str(problem)
    said = str(problem).strip().partition("\n")[0][:200] or "no reason given"
    return f"{type(problem).__name__}: {said}".rstrip(".")
