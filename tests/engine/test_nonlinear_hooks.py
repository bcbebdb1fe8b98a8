"""Random hooks and Functions that are not linear: rows are those of the loop, or an error says why not."""

import pytest
from nonlinear_hooks import assert_right_or_refused

from samplewise.engine import hook_checks
from samplewise.engine.ownership import probe, verify, weighted_passes

SEEDS = 600
MANY = 20  # cases of one test


@pytest.mark.sweep(1 / 20)
@pytest.mark.filterwarnings("ignore::samplewise.errors.SamplesMayInteractWarning")  # of shuffled samples that are mixed
@pytest.mark.parametrize("first", range(0, SEEDS, MANY))
@pytest.mark.parametrize("deterministic", [True, False])
def test_right_or_refused(first, deterministic, monkeypatch):
    if not deterministic:
        for module in (hook_checks, weighted_passes, probe, verify):
            monkeypatch.setattr(module, "is_deterministic", lambda graph: False)
    for seed in range(first, first + MANY):
        assert_right_or_refused(seed)
