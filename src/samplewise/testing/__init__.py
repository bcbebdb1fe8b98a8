"""Conformance checks for custom rules and transforms, and the test models and oracle of the engine.

check_rule        compare a gradient rule with one backward pass per sample
check_transform   check the contract of transforms
CASES             name -> Case: small models, each with a feature that is hard to get right
run_case          compare the engine with the oracle on one case; returns a CaseResult
rows_of           the oracle: per-sample gradients with one autograd.grad call per sample, as ExpectedRows

The modules of `samplewise.testing.zoo` have the tolerances and quantities of the comparison.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samplewise.testing.rules import check_rule as check_rule
from samplewise.testing.transforms import check_transform as check_transform

if TYPE_CHECKING:
    from samplewise.testing.zoo import CASES as CASES
    from samplewise.testing.zoo import Case as Case
    from samplewise.testing.zoo import CaseResult as CaseResult
    from samplewise.testing.zoo import ExpectedRows as ExpectedRows
    from samplewise.testing.zoo import rows_of as rows_of
    from samplewise.testing.zoo import run_case as run_case

__all__ = ["CASES", "Case", "CaseResult", "ExpectedRows", "check_rule", "check_transform", "rows_of", "run_case"]


def __getattr__(name: str) -> Any:
    """Import the zoo on first use, because `import samplewise` imports this package."""
    if name in __all__:
        return getattr(import_module("samplewise.testing.zoo"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
