"""Samples that interact are refused with a word on what and where; allowed, their rows are exact."""

import pytest
import torch
from zoo import INTERACTING

import samplewise as sw
from samplewise.testing.compare import QUANTITIES, assert_agrees, other_losses, probe_for
from samplewise.testing.oracle import rows_of, wanted

each = pytest.mark.parametrize("case", INTERACTING, ids=lambda case: case.name)


@pytest.mark.sweep(1 / 3)
@each
@pytest.mark.parametrize("strategy", [None, "twice", "full"])
@pytest.mark.parametrize("ask", ["norms", "sum", "full"])
def test_refused(case, strategy, ask):
    model, inputs = case.build()
    with pytest.raises(sw.SamplesInteractError, match="interacting"):
        getattr(sw.gradients(case.losses(model, inputs), model, strategy=strategy), ask)()


@pytest.mark.sweep(1 / 3)
@each
@pytest.mark.parametrize("B", [2, 64])
def test_refused_at_other_sizes(case, B):
    model, inputs = case.build(B)
    with pytest.raises(sw.SamplesInteractError):
        sw.gradients(case.losses(model, inputs), model).norms()


@each
def test_refused_in_float32(case):
    """Where PyTorch takes other kernels: an LSTM is one operation, which keeps to itself that it mixes steps."""
    model, inputs = case.build(dtype=torch.float32)
    with pytest.raises(sw.SamplesInteractError, match="interacting"):
        sw.gradients(case.losses(model, inputs), model).norms()


@pytest.mark.sweep(1 / 6)
@each
@pytest.mark.parametrize("strategy", [None, "twice", "full", "reference"])
def test_rows_are_exact_when_allowed(case, strategy):
    model, inputs = case.build()
    losses = case.losses(model, inputs)
    rows, probe = rows_of(losses, wanted(model)), probe_for(wanted(model), len(losses))
    other = rows_of(other_losses(losses), wanted(model))
    theirs = sw.gradients(other_losses(losses), model, interacting="allow", strategy=strategy)
    g = sw.gradients(case.losses(model, inputs), model, interacting="allow", strategy=strategy)
    assert_agrees(g, rows, probe, QUANTITIES, other=(theirs, other))


@each
def test_refused_again_after_it_was_allowed(case):
    """What was allowed once must not be remembered as harmless."""
    model, inputs = case.build()
    sw.gradients(case.losses(model, inputs), model, interacting="allow").norms()
    with pytest.raises(sw.SamplesInteractError):
        sw.gradients(case.losses(model, inputs), model).norms()
