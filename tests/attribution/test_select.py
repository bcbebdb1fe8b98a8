"""Selection of training data against scores by hand."""

import pytest
import torch
from plain_loop import batches, loss_fn, make, rows
from projection_matrix import projection

import samplewise as sw


def filled(path, n=30, dim=16):
    model, x, y = make(n=n)
    store = sw.attribution.ProjectedStore(path, dim, dtype="float32")
    store.fill(model, loss_fn, batches(x, y, 7))
    return store, model, x, y


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("cosine", [True, False])
def test_selected_samples(tmp_path, cosine, reduce):
    store, model, x, y = filled(tmp_path)
    queries = store.project(model, loss_fn, batches(x[:4] + 0.2, y[:4], 3))
    true = rows(model, x, y) @ projection(model, 16)
    target = rows(model, x[:4] + 0.2, y[:4]) @ projection(model, 16)
    if cosine:
        true, target = (each / each.norm(dim=1, keepdim=True) for each in (true, target))
    products = target @ true.T
    wanted = (products.mean(0) if reduce == "mean" else products.amax(0)).topk(9).indices
    assert torch.equal(sw.attribution.select(store, queries, 9, reduce=reduce, cosine=cosine), wanted)


def test_damping(tmp_path):
    store, *_ = filled(tmp_path)
    queries = store.rows(0, 3) + store.rows(5, 8)
    wanted = store.scores(queries, damping=0.1, cosine=True).amax(0).topk(5).indices
    assert torch.equal(sw.attribution.select(store, queries, 5, damping=0.1), wanted)


def test_ties_are_broken_by_the_order_of_samples(tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path, 2)
    store.add(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(6, 1))
    assert sw.attribution.select(store, torch.tensor([[1.0, 0.0]]), 4).tolist() == [0, 2, 4, 6]
    assert sw.attribution.select(store, torch.tensor([[1.0, 1.0]]), 5).tolist() == [0, 1, 2, 3, 4]


def test_refusals(tmp_path):
    store, *_ = filled(tmp_path, n=6)
    queries = store.rows(0, 2)
    for k in (0, 7, 2.0):
        with pytest.raises(ValueError, match=rf"k must be an integer in 1\.\.6, the number of samples .* found {k}"):
            sw.attribution.select(store, queries, k)
    with pytest.raises(ValueError, match="reduce must be 'mean' or 'max'; found 'sum'"):
        sw.attribution.select(store, queries, 2, reduce="sum")
    with pytest.raises(ValueError, match="queries must be at least one sample; found none"):
        sw.attribution.select(store, queries[:0], 2)
