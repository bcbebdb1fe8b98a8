"""Conformance checks for custom rules and transforms, and the test models and oracle of the engine.

check_rule        compare a gradient rule with one backward pass per sample
check_transform   check the contract of transforms
CASES             name -> Case: small models, each with a feature that is hard to get right; `samplewise doctor --zoo`
run_case          compare the engine with the oracle on one case; returns a CaseResult
rows_of           the oracle: per-sample gradients with one autograd.grad call per sample, as ExpectedRows

`samplewise.testing.compare` has the quantities of the comparison and their tolerances.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samplewise.testing.conformance import check_rule as check_rule
from samplewise.testing.conformance import check_transform as check_transform

if TYPE_CHECKING:
    from samplewise.testing.case import Case as Case
    from samplewise.testing.cases import CASES as CASES
    from samplewise.testing.oracle import ExpectedRows as ExpectedRows
    from samplewise.testing.oracle import rows_of as rows_of
    from samplewise.testing.runner import CaseResult as CaseResult
    from samplewise.testing.runner import run_case as run_case

__all__ = ["CASES", "Case", "CaseResult", "ExpectedRows", "check_rule", "check_transform", "rows_of", "run_case"]


_MODULES = {
    "CASES": "cases",
    "Case": "case",
    "CaseResult": "runner",
    "ExpectedRows": "oracle",
    "rows_of": "oracle",
    "run_case": "runner",
}


def __getattr__(name: str) -> Any:
    """Import the cases on first use, because `import samplewise` imports this package."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
