"""The zoo is what it says it is. Nothing here needs the engine."""

import pytest
import torch
from zoo import CASES, INDEPENDENT, INTERACTING

from samplewise.testing.case import DEFAULT_B
from samplewise.testing.oracle import rows_of, wanted

each = pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)


def test_there_are_many_animals():
    assert len(INDEPENDENT) >= 110
    assert len(INTERACTING) >= 10


@pytest.mark.slow
@each
def test_losses_are_one_number_per_sample_and_the_same_each_time(case):
    first, second = (case.losses(*case.build()) for _ in range(2))
    assert first.shape == (DEFAULT_B,)
    assert first.dtype == torch.float64
    assert first.requires_grad
    assert torch.equal(first, second)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_what_a_model_makes_is_made_where_its_inputs_are(case):
    """Another default device stands for an accelerator: whatever is made without a device would land there."""
    model, inputs = case.build()
    with torch.device("meta"):
        losses = case.losses(model, inputs)
    assert torch.equal(losses, case.losses(*case.build()))


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in INDEPENDENT if c.traits.rows], ids=lambda case: case.name)
def test_a_sample_alone_has_the_same_loss(case):
    model, inputs = case.build()
    alone = [case.losses(model, tuple(x[i : i + 1] for x in inputs)) for i in range(DEFAULT_B)]
    torch.testing.assert_close(torch.cat(alone), case.losses(model, inputs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", INTERACTING, ids=lambda case: case.name)
def test_samples_that_interact_have_another_loss_in_other_company(case):
    model, inputs = case.build()
    pair = case.losses(model, tuple(x[-2:] for x in inputs))
    assert not torch.allclose(pair, case.losses(model, inputs)[-2:], rtol=1e-6)


def test_rows_add_up_to_the_ordinary_gradient():
    case = CASES["causal_language_model_with_tied_head"]
    model, inputs = case.build()
    rows = rows_of(case.losses(model, inputs), wanted(model))
    case.losses(model, inputs).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(rows[name].sum(0), p.grad, rtol=1e-12, atol=1e-14)
