"""`run_case`: compare the engine with plain autograd on one case, device and precision."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.memory import allow_tf32
from samplewise.engine.gradients import gradients
from samplewise.errors import SamplesInteractError
from samplewise.testing.case import Case
from samplewise.testing.compare import (
    CORE,
    EXACT,
    HALF,
    QUANTITIES,
    SINGLE,
    TENSOR_FLOAT,
    Disagreement,
    Tolerance,
    assert_agrees,
    other_losses,
    probe_for,
)
from samplewise.testing.oracle import ExpectedRows, rows_of, wanted

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ZooPrecision:
    """Precision of a comparison: dtype of the model, autocast dtype, quantities to compare, tolerance.

    tf32: products of float32 numbers may be computed with a mantissa of 10 bits; only NVIDIA GPUs do that.
    """

    dtype: torch.dtype
    tolerance: Tolerance
    quantities: tuple[str, ...]
    autocast: torch.dtype | None = None
    tf32: bool = False

    def autocast_context(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def reference_in_float64(self, device: torch.device) -> bool:
        """True if the reference rows are computed in float64: for float32 on the CPU.

        On other devices dropout draws other numbers, and under autocast the forward pass itself is less precise; there
        the rows are computed from the same graph.
        """
        return self.dtype == torch.float32 and self.autocast is None and device.type == "cpu"

    def describe(self, device: torch.device) -> str:
        """Description of the comparison for `samplewise doctor --zoo`."""
        if self.autocast is not None:
            precision = "float32 under bf16 autocast"
        else:
            precision = "float64" if self.dtype == torch.float64 else "float32"
            precision += " without TF32" if precision == "float32" and device.type == "cuda" else ""
        reference = "in float64" if self.reference_in_float64(device) else "in the same precision, on the same device"
        return (
            f"{precision}.\nPer-sample gradients and derived quantities, compared with one backward pass per sample\n"
            f"{reference}. Tolerance: {self.tolerance.relative:.0e} of a parameter's largest value\n"
            f"plus {self.tolerance.floor:.0e} of the largest value of all parameters."
        )


FP64 = ZooPrecision(torch.float64, EXACT, tuple(QUANTITIES))
FP32 = ZooPrecision(torch.float32, SINGLE, tuple(name for name in QUANTITIES if name != "gram with another"))
TF32 = ZooPrecision(torch.float32, TENSOR_FLOAT, CORE, tf32=True)
BF16 = ZooPrecision(torch.float32, HALF, CORE, torch.bfloat16)
PRECISIONS = {"fp64": FP64, "fp32": FP32, "bf16": BF16}


@dataclass(frozen=True)
class CaseComparison:
    """Prepared comparison: model, losses and reference rows, computed without the engine."""

    model: nn.Module
    losses: Callable[[], Tensor]  # builds a new graph with the same random numbers
    rows: ExpectedRows
    precision: ZooPrecision

    def compare(self, **options: Any) -> None:
        """Raise Disagreement if a quantity of gradients(losses, model, **options) differs from the rows."""
        other_gradients = None
        other_rows = None
        if "gram with another" in self.precision.quantities:
            other_gradients = gradients(other_losses(self.losses()), self.model, **options)
            other_rows = rows_of(other_losses(self.losses()), wanted(self.model))
        g = gradients(self.losses(), self.model, **options)
        probe = probe_for(wanted(self.model), len(self.rows))
        assert_agrees(
            g, self.rows, probe, self.precision.quantities, self.precision.tolerance, (other_gradients, other_rows)
        )


def prepare_comparison(case: Case, precision: ZooPrecision = FP64, device: torch.device = CPU) -> CaseComparison:
    """Build the case and compute its reference rows with plain autograd."""
    model, inputs = case.build(dtype=precision.dtype, device=device)

    def losses() -> Tensor:
        with precision.autocast_context(device):
            return case.losses(model, inputs)

    if precision.reference_in_float64(device):
        double_model, double_inputs = case.build()
        rows = rows_of(case.losses(double_model, double_inputs), wanted(double_model))
    else:
        rows = rows_of(losses(), wanted(model))
    return CaseComparison(model, losses, rows, precision)


# --- result -----------------------------------------------------------------------------------------------------------

RIGHT, REFUSED, WRONG, NOT_RUN = OUTCOMES = ("right", "refused", "wrong", "not run")


@dataclass(frozen=True)
class CaseResult:
    """Outcome of one case, with the reason.

    right: all quantities agree. refused: samples interact, the engine raises SamplesInteractError, and agrees with
    interacting="allow". wrong: any other behavior of the engine. not run: PyTorch itself fails on the case.
    """

    case: Case
    outcome: str
    reason: str = ""


def run_case(case: Case, precision: ZooPrecision = FP64, device: torch.device = CPU) -> CaseResult:
    """Compare engine and oracle on one case; never raises."""
    with warnings.catch_warnings(action="ignore"), allow_tf32(precision.tf32):  # missing kernels, for example
        try:
            prepared = prepare_comparison(case, precision, device)
        except Exception as error:
            return CaseResult(case, NOT_RUN, _first_line(error))
        try:
            if case.interacts:
                _must_refuse(prepared)
                prepared.compare(interacting="allow")
                return CaseResult(case, REFUSED)
            prepared.compare()
            return CaseResult(case, RIGHT)
        except Exception as error:
            return CaseResult(case, WRONG, _first_line(error))


def count_outcomes(results: Iterable[CaseResult]) -> dict[str, int]:
    """Number of verdicts by outcome."""
    counts = Counter(result.outcome for result in results)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def _must_refuse(prepared: CaseComparison) -> None:
    try:
        gradients(prepared.losses(), prepared.model).norms()
    except SamplesInteractError:
        return
    raise Disagreement("samples interact, so SamplesInteractError must be raised; found a result")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    error_name = "" if isinstance(error, Disagreement) else type(error).__name__
    return ": ".join(filter(None, (error_name, lines[0] if lines else "")))


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread; for models this small, synchronizing threads takes longer than computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
