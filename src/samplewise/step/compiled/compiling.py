"""When an update is compiled, when its code may be used, and what becomes of it otherwise.

An update is compiled for the structure and shape of its samples. Before its code is used for the first time, the update
is made both ways and compared. Whenever it cannot be used, the step goes on uncompiled, and says so once if it was told
to compile.
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

from samplewise.batches import cut, leaves
from samplewise.errors import TrainingWarning
from samplewise.patience import telling
from samplewise.step.compiled.cohorts import Cohorts
from samplewise.step.compiled.formulas import formula_of
from samplewise.step.compiled.guards import Guards
from samplewise.step.compiled.problems import CannotCompile
from samplewise.step.compiled.program import Program
from samplewise.step.compiled.recording import CHUNK
from samplewise.step.compiled.rows import has_rows, signature
from samplewise.step.compiled.tracing import Tensors, trace_backward
from samplewise.step.compiled.trial import agrees
from samplewise.step.compiled.whole import Whole
from samplewise.step.evaluation import Evaluation
from samplewise.step.finish import Finish
from samplewise.step.microbatch import Microbatch
from samplewise.step.parts import Part
from samplewise.step.slices import Slices
from samplewise.step.summing import Weighted
from samplewise.transforms.chain import Chain

AUTO_AFTER = 1000  # updates of one sample: by then it will go on for a while
SHAPES = 4  # of samples that are compiled
CHANGES = 8  # of the model or the optimizer after which it is compiled again


Made = tuple[Part, int, int, float, list[Any], float]
"""Updates that have been made: what is known of their samples, how many those are, how many updates, the norm of the
last one's gradient, learning rates, seconds.
"""


class Compiling:
    """`due` tells whether compiled updates are wanted by now; `updates` makes them, as long as it can."""

    def __init__(
        self,
        mode: bool | str,
        evaluation: Evaluation,
        finish: Finish,
        microbatch: Microbatch,
        chain: Chain,
        record: set[str],
        pause: Callable[[], bool],
        pauses: bool,
    ):
        """`pause`: whether the next update is to be made uncompiled; `pauses`: whether one ever is."""
        if mode not in (True, False, "auto"):
            raise ValueError(f"compile must be True, False or 'auto'; found {mode!r}.")
        self.mode, self.evaluation, self.finish, self.microbatch = mode, evaluation, finish, microbatch
        self.chain, self.record, self.pause, self.pauses = chain, record, pause, pauses
        self.tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        self._given_up: str | None = None
        self._known: list[str] = []  # shapes of samples
        self._guards: Guards | None = None
        self._programs: dict[Any, Program | None] = {}
        self._changes, self._full = 0, False
        self._era, self._rates = 0, finish.rates()  # of the optimizer's numbers

    def due(self, updates: int, samples: int | None) -> bool:
        """After the first update, which is looked at for mistakes and gives the optimizer its state."""
        if self._given_up is not None or not self.mode:
            return False
        return updates >= (1 if self.mode is True else AUTO_AFTER) and (self.mode is True or samples == 1)

    def state_dict(self) -> dict[str, Any]:
        return {"known": list(self._known), "given_up": self._given_up}

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles for itself: code is bound to tensors."""
        return {**vars(self), "_programs": {}, "_guards": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known, self._given_up = list(state["known"]), state["given_up"]
        self._programs, self._guards = {}, None

    # --- making updates --------------------------------------------------------------------------------------------

    def updates(self, rest: Slices, samples: int | None) -> Iterator[Made]:
        """One after the other, until the batch is used up or the next one must be made uncompiled."""
        size, end, records = samples or rest.left, rest.rows or 0, len(self.record)
        program = self._program_for(rest, size)
        while program is not None and rest.taken + size <= end and not (self.pauses and self.pause()):
            made = self._make(program, rest)
            if made is None:
                return
            yield made
            if not self._hold() or len(self.record) != records:
                return

    def blocks(self, rest: Slices, samples: int | None) -> Iterator[Made]:
        """The same for whoever does not look in between."""
        size, end = samples or rest.left, rest.rows or 0
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

    def _make(self, program: Program, rest: Slices) -> Made | None:
        started = perf_counter()
        if self._guards is None or self._guards.renumbered():
            self._era, self._rates = self._era + 1, self.finish.rates()
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

    def _make_many(self, program: Program, rest: Slices, updates: int) -> Made | None:
        started, rates = perf_counter(), self.finish.rates()
        made, results = program.many(rest.taken, updates)
        if not made:
            return None
        rest.skip(made * program.whole.samples)
        return program.part(results), program.count * made, made, program.norm(), rates, perf_counter() - started

    def _hold(self) -> bool:
        if self._guards is not None and self._guards.hold():
            return True
        self._programs, self._guards, self._changes = {}, None, self._changes + 1
        if self._changes > CHANGES:
            self._give_up(f"the model or the optimizer has been changed {self._changes} times")
        return False

    # --- compiling -------------------------------------------------------------------------------------------------

    def _program_for(self, rest: Slices, size: int) -> Program | None:
        """None if this is to be made uncompiled."""
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
        except Exception as problem:  # of tracing or compiling: nothing has been changed
            self._give_up(_in_short(problem))
            return None
        return program if program is not None and program.tried else None

    def _admitted(self, shape: str) -> bool:
        if shape in self._known:
            return True
        if len(self._known) == SHAPES:
            if not self._full:
                self._say(f"samples of more than {SHAPES} shapes stay uncompiled: found another one")
            self._full = True
            return False
        self._known.append(shape)
        return True

    def _compiled(self, rest: Slices, size: int, record: frozenset[str]) -> Program:
        self._check_settings(size)
        example = cut(rest.batch, rest.taken, rest.taken + size, rest.rows)
        self.evaluation.trained.clear()
        with telling(self.tell, f"compiling an update of {size} sample{'s' * (size > 1)} ..."), _quietly():
            guards, tensors, whole = self._traced(rest, size, example, record)
            program = Program(whole, tensors, example)
        guards.bind(list(tensors.trained.values()), program.tensors, program.counters, program.shape)
        self._guards, self._era, self._rates = guards, self._era + 1, self.finish.rates()
        return program

    def _agrees(self, program: Program, rest: Slices, size: int, record: frozenset[str]) -> bool:
        """False as long as it is not known."""
        example = cut(rest.batch, rest.taken, rest.taken + size, rest.rows)
        same = agrees(program, self.evaluation, self.finish, self.chain, record, example, rest.taken)
        if same is False:
            raise CannotCompile("compiled and uncompiled update differ")
        return same is True

    def _traced(self, rest: Slices, size: int, example: Any, record: frozenset[str]) -> tuple[Guards, Tensors, Whole]:
        evaluation, optimizer = self.evaluation, self.finish.optimizer
        functions = [evaluation.loss_fn, *(t.answer for t in self.chain.samples.transforms)]
        guards, tensors = Guards(evaluation.modules, functions, optimizer), Tensors.of(evaluation)
        with guards.undisturbed():
            backward = trace_backward(evaluation, Weighted(evaluation, self.chain, "norms" in record), tensors, example)
        formula = formula_of(optimizer)
        names = {id(p): name for name, p in tensors.trained.items() if name in backward.reached}
        cohorts = None if formula is None else Cohorts(formula, optimizer, names)
        chosen = [has_rows(leaf, rest.rows) for leaf in leaves(rest.batch) if isinstance(leaf, Tensor)]
        return guards, tensors, Whole(backward, cohorts, size, chosen, self.finish.max_grad_norm, self.finish.checks)

    def _check_settings(self, size: int) -> None:
        """What is known to be impossible, or not to pay."""
        modules = [m for root in self.evaluation.modules for m in root.modules()]
        reasons = {
            "the parameters are not in main memory": self.evaluation.trained.device.type != "cpu",
            "there is a loss scale": self.evaluation.precision.scales,
            "a window is computed in microbatches": self.microbatch.automatic or (self.microbatch.size or size) < size,
            "transforms group samples, look at references or add noise": bool(
                self.chain.grouping or self.chain.samples.references or self.chain.on_sum
            ),
            "recurrent layers are no faster compiled": any(isinstance(m, nn.RNNBase) for m in modules),
            "the model has been compiled by torch.compile": any(hasattr(m, "_orig_mod") for m in modules),
        }
        for reason, holds in reasons.items():
            if holds:
                raise CannotCompile(reason)

    # --- saying things ---------------------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        self._given_up, self._programs, self._guards = reason, {}, None
        self._say(f"updates stay uncompiled: {reason}")

    def _say(self, what: str) -> None:
        if self.mode is True:
            warnings.warn(
                f"{what}. Training goes on, with the same numbers and at the usual speed.", TrainingWarning, 2
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Tracer and compiler warn of themselves, and the model has been heard uncompiled."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def _in_short(problem: Exception) -> str:
    if isinstance(problem, CannotCompile):
        return str(problem)
    said = str(problem).strip().partition("\n")[0][:200] or "no reason given"
    return f"{type(problem).__name__}: {said}".rstrip(".")
