"""Attribution on several ranks gives the scores of one process."""

import torch
from plain_loop import batches, loss_fn, make
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samplewise as sw


def influence(size=3):
    model, x, y = make(n=17)
    return sw.influence(model, loss_fn, batches(x, y, size), batches(x[:5] + 0.3, y[:5], 3))


def of_a_loader_of_one_rank():
    model, x, y = make(n=17)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=False)
    return sw.influence(model, loss_fn, DataLoader(data, 4, sampler=sampler), [(x, y)])


def of_bad_labels():
    model, x, y = make(n=8)
    y[6] = 100  # in the batch of rank 1
    return sw.influence(model, loss_fn, batches(x, y, 4), [(x[:2], y[:2])])


def test_influence(two, three):
    for size in (3, 17):  # one batch for all ranks
        for team in (two, three):
            for found in team.run(influence, size):
                assert torch.equal(found, influence(size))


def test_a_loader_must_have_all_samples(two):
    for message in two.errors(of_a_loader_of_one_rank):
        assert "a loader of all samples" in message and "Remove the sampler" in message


def test_an_error_of_one_rank_is_raised_on_all(two):
    first, second = two.errors(of_bad_labels)
    assert "rank 1 of 2 failed" in first and "IndexError" in second


def ekfac(size=3):
    model, x, y = make(n=17)
    model.append(torch.nn.LayerNorm(3).double())
    curvature = sw.ekfac(model, loss_fn, batches(x, y, size))
    return repr(curvature), curvature.solve(sw.gradients(loss_fn(model, (x, y)), model).full(), 0.01)


def exact(size=3):
    model, x, y = make(n=17)
    return sw.hessian(model, loss_fn, batches(x, y, size)).matrix


def with_curvature():
    model, x, y = make(n=17)
    train = batches(x, y, 4)
    curvature = sw.ekfac(model, loss_fn, train)
    return sw.influence(model, loss_fn, train, [(x[:5], y[:5])], curvature=curvature, cosine=True)


def of_a_shuffling_loader():
    model, x, y = make(n=17)
    return sw.ekfac(model, loss_fn, DataLoader(TensorDataset(x, y), 4, shuffle=True))


def curvature_of_bad_labels():
    model, x, y = make(n=8)
    y[6] = 100  # in the batch of rank 1
    return sw.ekfac(model, loss_fn, batches(x, y, 4))


def test_curvature_is_summed_over_ranks(two, three):
    for size in (3, 17):  # one batch for all ranks
        text, wanted = ekfac(size)
        for team in (two, three):
            for found_text, found in team.run(ekfac, size):
                assert found_text == text
                for name, each in wanted.items():
                    torch.testing.assert_close(found[name], each)
            for found in team.run(exact, size):
                torch.testing.assert_close(found, exact(size))


def test_influence_with_curvature(two):
    for found in two.run(with_curvature):
        torch.testing.assert_close(found, with_curvature())


def test_a_loader_for_curvature_must_keep_its_order(two):
    for message in two.errors(of_a_shuffling_loader):
        assert "found one that shuffles. Use shuffle=False, so that all ranks have the same batches" in message


def test_an_error_in_the_fit_is_raised_on_all(two):
    first, second = two.errors(curvature_of_bad_labels)
    assert "rank 1 of 2 failed" in first and "IndexError" in second
