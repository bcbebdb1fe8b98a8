"""Profitability of compiled updates, which are used only if they are faster than uncompiled ones.

It is measured in dry runs, which have no effect on the training besides the decision.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from samplewise.errors import SamplewiseError
from samplewise.step.compiled import DoesNotPay, Undecided
from samplewise.step.compiled.calls import Calls
from samplewise.step.compiled.decompositions import is_library_call
from samplewise.step.compiled.dry_run import DryRun
from samplewise.step.compiled.program import Program

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
        _intercepted(dry_run, library_calls, run)
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
        taken = _intercepted(dry_run, calls, lambda: seconds(dry_run.uncompiled))
    except SamplewiseError:
        return  # this update is not finite
    share = calls.seconds / taken
    if share >= LIBRARY:
        raise DoesNotPay(
            f"library calls, such as matrix products, take {share:.0%} of the time of an uncompiled update, and "
            "compiling would not make them faster"
        )


def _intercepted(dry_run: DryRun, calls: LibraryCalls, run: Callable[[], Any]) -> Any:
    """Return run() while `calls` intercepts operations, and undo the update that it computes."""

    def update() -> Any:
        with calls:
            return run()

    with dry_run.without_grads():
        return dry_run.undone(update)


def refuse_slower(program: Program, dry_run: DryRun, start: int) -> None:
    """Raise DoesNotPay if the program is not faster than uncompiled updates."""
    times: list[tuple[float, float]] = []

    def gain() -> float:
        return 1 - median(compiled / uncompiled for compiled, uncompiled in times)

    with dry_run.without_grads():
        while len(times) < ROUNDS or (abs(gain()) < CLOSE and len(times) < MOST):
            uncompiled = dry_run.undone(lambda: seconds(dry_run.uncompiled))
            compiled = dry_run.undone(lambda: seconds(lambda: dry_run.compiled(program, start)))
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
