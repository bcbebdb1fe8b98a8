"""Attribution on several ranks gives the scores of one process."""

import os

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


def trak(path=None, size=3):
    _, x, y = make(n=17)
    models = [make(seed=seed)[0] for seed in range(2)]
    return sw.trak(
        models, sw.attribution.margin, batches(x, y, size), batches(x[:5] + 0.3, y[:5], 2), 8, directory=path
    )


def selected(path):
    model, x, y = make(n=17)
    store = sw.attribution.ProjectedStore(path, 8)
    store.fill(model, loss_fn, batches(x, y, 3))
    store = sw.attribution.ProjectedStore(path, 8)  # every rank can read what rank 0 wrote
    queries = store.project(model, loss_fn, batches(x[:5] + 0.3, y[:5], 2))
    return sw.attribution.select(store, queries, 4, damping=0.1), store.rows()


def filled_with_bad_labels(path):
    model, x, y = make(n=8)
    y[6] = 100  # in the batch of rank 1
    sw.attribution.ProjectedStore(path, 8).fill(model, loss_fn, batches(x, y, 4))


def filled_on_a_full_disk(path):
    model, x, y = make(n=8)
    store = sw.attribution.ProjectedStore(path, 8)
    store.fill(model, loss_fn, [])

    class Filled(list):
        def __iter__(self):
            if torch.distributed.get_rank() == 0:
                (store.directory / "model-0000" / "rows-00000.f16").mkdir(exist_ok=True)  # cannot be opened for writing
            return super().__iter__()

    store.fill(model, loss_fn, Filled(batches(x, y, 4)))


def of_a_store_of_one_rank(path):
    model, x, y = make(n=17)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=False)
    sw.attribution.ProjectedStore(path, 8).fill(model, loss_fn, DataLoader(data, 4, sampler=sampler))


def test_trak(two, three, tmp_path):
    wanted = trak()
    for team in (two, three):
        for path in (None, str(tmp_path / str(team is two))):
            for found in team.run(trak, path):
                torch.testing.assert_close(found, wanted)
    for found in two.run(trak, str(tmp_path / "True"), 5):  # complete: nothing is computed again
        torch.testing.assert_close(found, wanted)


def test_store_and_selection(two, tmp_path):
    samples, rows = selected(tmp_path / "one")
    for found, own in two.run(selected, str(tmp_path / "two")):
        assert torch.equal(found, samples) and torch.equal(own, rows)


def filled(path):
    model, x, y = make(n=8)
    sw.attribution.ProjectedStore(path, 8).fill(model, loss_fn, batches(x, y, 4))
    return len(sw.attribution.ProjectedStore(path, 8))


def test_a_store_that_is_in_use_is_refused_on_all_ranks(two, tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path, 8)
    with store._lock:
        messages = two.errors(filled, str(tmp_path))
    assert all(f"in use by process {os.getpid()} on host" in message for message in messages)
    assert messages[0].startswith("StoreError: ") and messages[1].startswith("DistributedError: ")
    assert two.run(filled, str(tmp_path)) == [8, 8]
    assert not list(tmp_path.glob("*store.lock*"))


def test_an_error_of_one_rank_while_a_store_is_filled(two, tmp_path):
    first, second = two.errors(filled_with_bad_labels, str(tmp_path / "labels"))
    assert "rank 1 of 2 failed" in first and "IndexError" in second
    first, second = two.errors(filled_on_a_full_disk, str(tmp_path / "full"))
    assert "IsADirectoryError" in first and "rank 0 of 2 failed" in second
    for message in two.errors(of_a_store_of_one_rank, str(tmp_path / "sampler")):
        assert "a loader of all samples" in message and "Remove the sampler" in message


def ekfac(size=3):
    model, x, y = make(n=17)
    model.append(torch.nn.LayerNorm(3).double())
    curvature = sw.ekfac(model, loss_fn, batches(x, y, size))
    return repr(curvature), curvature.solve(sw.gradients(loss_fn(model, (x, y)), model).full(), 0.01)


def exact(size=3):
    model, x, y = make(n=17)
    return sw.attribution.hessian(model, loss_fn, batches(x, y, size)).matrix


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
