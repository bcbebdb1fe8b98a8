"""Comparison of the engine with plain autograd for one case, device and precision."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.engine.gradients import gradients
from samplewise.errors import SamplesInteractError
from samplewise.testing.zoo.case import Case
from samplewise.testing.zoo.compare import (
    CORE,
    EXACT,
    HALF,
    QUANTITIES,
    SINGLE,
    Disagreement,
    Tolerance,
    assert_agrees,
    other_losses,
    probe_for,
)
from samplewise.testing.zoo.oracle import ExpectedRows, rows_of, wanted

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ZooPrecision:
    """Precision of a comparison: dtype of the model, autocast dtype, quantities to compare, tolerance."""

    dtype: torch.dtype
    tolerance: Tolerance
    asked: tuple[str, ...]
    autocast: torch.dtype | None = None

    def running(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def against_double(self, device: torch.device) -> bool:
        """True if the reference rows are computed in float64: for float32 on the CPU.

        On other devices dropout draws other numbers, and under autocast the forward pass itself is less precise; there
        the rows are computed from the same graph.
        """
        return self.dtype == torch.float32 and self.autocast is None and device.type == "cpu"

    def describe(self, device: torch.device) -> str:
        """Description of the comparison for `samplewise doctor --zoo`."""
        if self.autocast is not None:
            held = "float32 under bf16 autocast"
        else:
            held = "float64" if self.dtype == torch.float64 else "float32"
            held += " without TF32" if held == "float32" and device.type == "cuda" else ""
        truth = "in float64" if self.against_double(device) else "in the same precision, on the same device"
        return (
            f"{held}.\nPer-sample gradients and derived quantities, compared with one backward pass per sample\n"
            f"{truth}. Tolerance: {self.tolerance.relative:.0e} of a parameter's largest value\n"
            f"plus {self.tolerance.floor:.0e} of the largest value of all parameters."
        )


FP64 = ZooPrecision(torch.float64, EXACT, tuple(QUANTITIES))
FP32 = ZooPrecision(torch.float32, SINGLE, tuple(name for name in QUANTITIES if name != "gram with another"))
BF16 = ZooPrecision(torch.float32, HALF, CORE, torch.bfloat16)
PRECISIONS = {"fp64": FP64, "fp32": FP32, "bf16": BF16}


@dataclass(frozen=True)
class Trial:
    """Prepared comparison: model, losses and reference rows, computed without the engine."""

    model: nn.Module
    losses: Callable[[], Tensor]  # builds a new graph with the same random numbers
    rows: ExpectedRows
    precision: ZooPrecision

    def compare(self, **how: Any) -> None:
        """Raise Disagreement if a quantity of gradients(losses, model, **how) differs from the rows."""
        theirs, other = None, None
        if "gram with another" in self.precision.asked:
            theirs = gradients(other_losses(self.losses()), self.model, **how)
            other = rows_of(other_losses(self.losses()), wanted(self.model))
        g, probe = gradients(self.losses(), self.model, **how), probe_for(wanted(self.model), len(self.rows))
        assert_agrees(g, self.rows, probe, self.precision.asked, self.precision.tolerance, (theirs, other))


def trial(case: Case, precision: ZooPrecision = FP64, device: torch.device = CPU) -> Trial:
    """Build the case and compute its reference rows with plain autograd."""
    model, inputs = case.build(dtype=precision.dtype, device=device)

    def losses() -> Tensor:
        with precision.running(device):
            return case.losses(model, inputs)

    if precision.against_double(device):
        double, same = case.build()
        rows = rows_of(case.losses(double, same), wanted(double))
    else:
        rows = rows_of(losses(), wanted(model))
    return Trial(model, losses, rows, precision)


# --- verdict ----------------------------------------------------------------------------------------------------------

RIGHT, REFUSED, WRONG, NOT_RUN = OUTCOMES = ("right", "refused", "wrong", "not run")


@dataclass(frozen=True)
class Verdict:
    """Outcome of one case, with the reason.

    right: all quantities agree. refused: samples interact, the engine raises SamplesInteractError, and agrees with
    interacting="allow". wrong: any other behaviour of the engine. not run: PyTorch itself fails on the case.
    """

    case: Case
    outcome: str
    why: str = ""


def judge(case: Case, precision: ZooPrecision = FP64, device: torch.device = CPU) -> Verdict:
    """Compare engine and oracle on one case; never raises."""
    with warnings.catch_warnings(), _without_tf32():
        warnings.simplefilter("ignore")  # for example warnings about missing kernels
        try:
            prepared = trial(case, precision, device)
        except Exception as error:
            return Verdict(case, NOT_RUN, _first_line(error))
        try:
            if case.interacts:
                _must_refuse(prepared)
                prepared.compare(interacting="allow")
                return Verdict(case, REFUSED)
            prepared.compare()
            return Verdict(case, RIGHT)
        except Exception as error:
            return Verdict(case, WRONG, _first_line(error))


def tally(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Number of verdicts by outcome."""
    found = Counter(verdict.outcome for verdict in verdicts)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def _must_refuse(prepared: Trial) -> None:
    try:
        gradients(prepared.losses(), prepared.model).norms()
    except SamplesInteractError:
        return
    raise Disagreement("samples interact, so SamplesInteractError must be raised; found a result")


def _first_line(error: Exception) -> str:
    said = str(error).strip().splitlines()
    kind = "" if isinstance(error, Disagreement) else type(error).__name__
    return ": ".join(filter(None, (kind, said[0] if said else "")))


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Disable TF32 in cuDNN, which has a 10-bit mantissa, inside the block."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
