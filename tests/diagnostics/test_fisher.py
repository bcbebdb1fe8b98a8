"""The diagonal Fisher matrix against the loop of one sample at a time."""

import pytest
import torch
from plain_loop import batches, loss_fn, make, rows
from torch import nn

import samplewise as sw


@pytest.mark.parametrize("microbatch", [None, 2, "auto"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_mean_of_squares(microbatch, dtype, tolerance):
    model, x, y = make(n=11)
    expected = rows(model, x, y).square().mean(0)
    found = sw.fisher(model.to(dtype), loss_fn, batches(x.to(dtype), y, 4), microbatch=microbatch)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert {f.dtype for f in found.values()} == {dtype}
    flat = torch.cat([f.flatten() for f in found.values()]).double()
    torch.testing.assert_close(flat, expected, rtol=tolerance, atol=tolerance * expected.max().item())


def test_runs_in_evaluation_mode_and_restores_the_mode():
    model, x, y = make()
    dropping = nn.Sequential(*model, nn.Dropout(0.9))
    dropping[1].eval()  # stays in evaluation mode
    found = sw.fisher(dropping, loss_fn, [(x, y)])
    assert [m.training for m in dropping] == [True, False, True, True]
    for name, value in sw.fisher(model, loss_fn, [(x, y)]).items():
        torch.testing.assert_close(found[name], value)


def test_frozen_parameters_are_left_out():
    model, x, y = make()
    model[0].requires_grad_(False)
    assert list(sw.fisher(model, loss_fn, [(x, y)])) == ["2.weight", "2.bias"]


def test_an_empty_loader():
    model, _, _ = make()
    with pytest.raises(ValueError, match="the loader must yield at least one batch; found none"):
        sw.fisher(model, loss_fn, [])
