"""Dry runs of an update, which is computed uncompiled or by a program, and undone; by them a program is verified, and
used only if it is faster than uncompiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samplewise.core.state import snapshot
from samplewise.errors import SamplewiseError
from samplewise.step.accumulate import Accumulator
from samplewise.step.apply import UpdateApplier
from samplewise.step.compiled import DoesNotPay, Undecided
from samplewise.step.compiled.calls import Calls
from samplewise.step.compiled.decompositions import is_library_call
from samplewise.step.compiled.program import Program
from samplewise.step.config import StepConfig
from samplewise.step.forward import LossEvaluator
from samplewise.step.window import Window

DRY_RUN = -2  # version of no hyperparameters: a program writes its scalars before a dry run and after it


class DryRun:
    """The update of one microbatch, any number of times from the same state. `whole_update`: with the division of the
    gradient sums and, if `formula`, with the optimizer's step; otherwise the gradient sums only.

    `undo` restores parameters, optimizer state, buffers and RNG.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        evaluator: LossEvaluator,
        applier: UpdateApplier,
        config: StepConfig,
        microbatch: Any,
        *,
        whole_update: bool,
        formula: bool,
    ):
        self.accumulator = accumulator
        self.evaluator = evaluator
        self.applier = applier
        self.config = config
        self.microbatch = microbatch
        self.whole_update = whole_update
        self.steps = whole_update and formula
        state: list[Tensor] = []
        self._keys: dict[Any, set[Any]] = {}  # keys of the optimizer state by parameter
        for parameter, entries in getattr(applier.optimizer, "state", {}).items():
            state += [t for t in entries.values() if isinstance(t, Tensor)]
            self._keys[parameter] = set(entries)
        self._touched = [*evaluator.trained.named.values(), *state]
        self._before = [t.detach().clone() for t in self._touched]
        self._restore_model = snapshot(*evaluator.modules)

    def without_grads(self) -> AbstractContextManager[None]:
        """Context manager: `.grad` is None inside and is restored on exit."""
        return self.evaluator.trained.without_grads()

    def uncompiled(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Compute the update uncompiled; return the losses, and what it has changed or its gradients."""
        trained = self.evaluator.trained
        trained.clear()
        self.accumulator.begin()
        with torch.enable_grad():
            parts = self.accumulator.add([self.microbatch], 0)
        if self.whole_update:
            self.applier.prepare(Window(self.config, parts=parts, samples=len(parts[0])))
        if self.steps:
            self.applier.optimizer.step()
        return parts[0].losses, self._touched if self.steps else trained.gradients()

    def compiled(self, program: Program, start: int) -> tuple[Tensor, Sequence[Tensor]] | None:
        """Compute the update from row `start` by a program; None if it is not finite."""
        results = program(start, hyperparameter_version=DRY_RUN)
        if results is None:
            return None
        values = self._touched if self.steps else list(program.gradients(results).values())
        return program.stats(results).losses, values

    @torch.no_grad()
    def undo(self) -> None:
        self._restore_model()
        for tensor, then in zip(self._touched, self._before, strict=True):
            tensor.copy_(then)
        state = getattr(self.applier.optimizer, "state", {})
        for parameter in [*state]:  # a parameter that was added since the last update gets its state in this one
            for key in [key for key in state[parameter] if key not in self._keys.get(parameter, ())]:
                del state[parameter][key]
            if parameter not in self._keys:
                del state[parameter]
        self.evaluator.trained.clear()

    def origin(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Values before the update of what it has changed; zeros for gradients."""
        return self._before if self.steps else [torch.zeros_like(t) for t in values]

    @torch.no_grad()
    def run(self, update: Callable[[], Any]) -> Any:
        """Return update(), and undo it."""
        try:
            return update()
        finally:
            self.undo()


# --- verification -----------------------------------------------------------------------------------------------------

# An optimizer can scale a gradient that consists of rounding errors up to a full step, so single parameters may differ;
# with a wrong graph all parameters differ.
APART = 0.1  # allowed difference, relative to the norm of the update
LOSSES = 1e-3  # allowed difference of losses, absolute and relative


@torch.no_grad()
def agrees(program: Program, dry_run: DryRun, start: int) -> bool | None:
    """Test whether the update from row `start` is equal compiled and uncompiled; None if it is not finite."""

    def copy(results: tuple[Tensor, Sequence[Tensor]] | None) -> tuple[Tensor, list[Tensor]] | None:
        """Losses and copies of the tensors that `undo` restores."""
        return None if results is None else (results[0], [t.clone() for t in results[1]])

    try:
        expected = dry_run.run(lambda: copy(dry_run.uncompiled()))
        dry_run.run(program.record)
        results = dry_run.run(lambda: copy(dry_run.compiled(program, start)))
    except SamplewiseError:
        return None
    if results is None:
        return None
    same_losses = torch.allclose(results[0], expected[0], rtol=LOSSES, atol=LOSSES)
    size = _distance(expected[1], dry_run.origin(expected[1]))
    return same_losses and _distance(results[1], expected[1]) <= APART * size + 1e-12


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Euclidean norm of the difference of two lists of tensors."""
    total = 0.0
    for x, y in zip(a, b, strict=True):
        wide = torch.complex128 if x.is_complex() else torch.float64
        total += float((x - y).to(wide).abs().square().sum())
    return total**0.5


# --- profitability ----------------------------------------------------------------------------------------------------

# Compiling took 20 to 45 ms per operation, and replaces all but library calls. Both limits were chosen by looking at a
# few networks: a ResNet and a ViT of reduced depth, which spend more than half of their time in library calls, were
# 20 % slower to 5 % faster when compiled; small networks below that were twice as fast or more.
MANY = 500  # operations from which an update is compiled only if library calls take less than LIBRARY of its time
LIBRARY = 0.5
ROUNDS = 3  # pairs of updates that are timed, and as many as MOST if the result is close
MOST = 9
CLOSE = 0.3  # relative difference up to which a result is close
GAIN = 0.03  # relative gain from which compiled updates are used: smaller ones are within the noise


class LibraryCalls(TorchDispatchMode):
    """Number of dispatched `operations`, and seconds spent in those for which compiled code calls a library, too."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.seconds = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        kwargs = kwargs or {}
        if not is_library_call(function, args):
            return function(*args, **kwargs)
        started = perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds += perf_counter() - started


def count_operations(dry_run: DryRun, calls: Calls) -> int:
    """Number of operations of an uncompiled update, whose `calls` are recorded.

    Autograd records some operations differently while operations are intercepted, as in tracing: `reshape` as a view.
    The engine verifies the structure of a graph with passes once, which it could not do in tracing; it does so here.
    """

    def run() -> None:
        with calls:
            dry_run.uncompiled()

    library_calls = LibraryCalls()
    try:
        _intercept(dry_run, library_calls, run)
    except SamplewiseError as error:
        raise Undecided("this update is not finite") from error
    return library_calls.operations


def refuse_library_bound(dry_run: DryRun, operations: int) -> None:
    """Raise DoesNotPay before anything is compiled, if that would take long and library calls take most of the time of
    an update.
    """
    if operations < MANY:
        return
    calls = LibraryCalls()
    try:
        total = _intercept(dry_run, calls, lambda: seconds(dry_run.uncompiled))
    except SamplewiseError:
        return  # this update is not finite
    share = calls.seconds / total
    if share >= LIBRARY:
        raise DoesNotPay(
            f"library calls, such as matrix products, take {share:.0%} of the time of an uncompiled update, and "
            "compiling would not make them faster"
        )


def _intercept(dry_run: DryRun, calls: LibraryCalls, run: Callable[[], Any]) -> Any:
    """Return run() while `calls` intercepts operations, and undo the update that it computes."""

    def update() -> Any:
        with calls:
            return run()

    with dry_run.without_grads():
        return dry_run.run(update)


def refuse_slower(program: Program, dry_run: DryRun, start: int) -> None:
    """Raise DoesNotPay if the program is not faster than uncompiled updates."""
    times: list[tuple[float, float]] = []

    def gain() -> float:
        return 1 - median(compiled / uncompiled for compiled, uncompiled in times)

    with dry_run.without_grads():
        while len(times) < ROUNDS or (abs(gain()) < CLOSE and len(times) < MOST):
            uncompiled = dry_run.run(lambda: seconds(dry_run.uncompiled))
            compiled = dry_run.run(lambda: seconds(lambda: dry_run.compiled(program, start)))
            times.append((compiled, uncompiled))
    if gain() < GAIN:
        compiled, uncompiled = (median(values) for values in zip(*times, strict=True))
        raise DoesNotPay(
            f"compiled updates are not faster; they take {1e3 * compiled:.3g} ms, uncompiled ones "
            f"{1e3 * uncompiled:.3g} ms"
        )


def seconds(run: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    started = perf_counter()
    run()
    return perf_counter() - started
