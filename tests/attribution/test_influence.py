"""Influence against explicit dot products of rows of the Jacobian."""

import copy

import pytest
import torch
from plain_loop import batches, loss_fn, make, rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw


@pytest.mark.parametrize("microbatch", [None, 2])
def test_dot_products_over_checkpoints(microbatch):
    model, x, y = make(n=12)
    queries = (x[:5] + 0.3, y[:5])
    before = copy.deepcopy(model.state_dict())
    others = [make(seed=seed)[0] for seed in (1, 2)]
    checkpoints = [(m.state_dict(), rate) for m, rate in zip(others, (0.1, 0.3), strict=True)]
    wanted = sum(rate * rows(m, x, y) @ rows(m, *queries).T for m, (_, rate) in zip(others, checkpoints, strict=True))
    found = sw.influence(
        model, loss_fn, batches(x, y, 5), batches(*queries, 3), checkpoints=checkpoints, microbatch=microbatch
    )
    assert found.shape == (12, 5)
    torch.testing.assert_close(found, wanted)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_default_is_the_current_parameters():
    model, x, y = make()
    full = rows(model, x, y)
    torch.testing.assert_close(sw.influence(model, loss_fn, [(x, y)], [(x[:4], y[:4])]), full @ full[:4].T)


def test_influence_predicts_the_effect_of_a_small_step():
    """A step on a training sample lowers the query's loss by lr times its influence, to first order."""
    model, x, y = make()
    query, rate = (x[:3] + 0.1, y[:3]), 1e-6
    found = sw.influence(model, loss_fn, [(x, y)], [query])
    for i in (0, 5, 11):
        moved = copy.deepcopy(model)
        sw.Step(moved, sw.sgd(rate), loss_fn)((x[i : i + 1], y[i : i + 1]))
        taken = (loss_fn(model, query) - loss_fn(moved, query)).detach() / rate
        torch.testing.assert_close(taken, found[i], rtol=1e-4, atol=1e-6)


def test_the_diagonal_is_self_influence():
    model, x, y = make()
    found = sw.influence(model, loss_fn, [(x, y)], [(x, y)])
    wanted = sw.suspects(model, loss_fn, [(x, y)], by="self_influence").score
    torch.testing.assert_close(found.diagonal(), wanted)


def test_runs_in_evaluation_mode_and_restores_the_mode():
    model, x, y = make()
    dropping = nn.Sequential(*model, nn.Dropout(0.9))
    found = sw.influence(dropping, loss_fn, [(x, y)], [(x, y)])
    assert dropping.training and dropping[3].training
    torch.testing.assert_close(found, sw.influence(model, loss_fn, [(x, y)], [(x, y)]))


def test_parameters_are_restored_after_an_error():
    model, x, y = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IndexError):
        sw.influence(model, loss_fn, [(x, y + 100)], [(x, y)], checkpoints=[(make(seed=1)[0].state_dict(), 1.0)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_bad_arguments():
    model, x, y = make()
    with pytest.raises(ValueError, match=r"train must be a loader or a list, .* found an iterator"):
        sw.influence(model, loss_fn, iter([(x, y)]), [(x, y)])
    with pytest.raises(ValueError, match="queries must yield at least one batch; found none"):
        sw.influence(model, loss_fn, [(x, y)], [])
    with pytest.raises(ValueError, match="train must yield at least one batch; found none"):
        sw.influence(model, loss_fn, [], [(x, y)])
    with pytest.raises(ValueError, match=r"found one that shuffles. Use shuffle=False"):
        sw.influence(model, loss_fn, DataLoader(TensorDataset(x, y), shuffle=True), [(x, y)])
