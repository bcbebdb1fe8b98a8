"""Scores of a store: cosine, damping, weights, layers and several models, against formulas in float64."""

import os

import pytest
import torch
from plain_loop import batches, loss_fn, make, rows
from projection_matrix import projection
from torch import nn

import samplewise as sw
from samplewise.attribution.scoring import updated_gram
from samplewise.attribution.store_files import Layout, RowsFile


def random_store(path, n=40, dim=12, models=1, weighted=False, dtype="float32"):
    """Rows and weights in float64, as they are stored."""
    generator = torch.Generator().manual_seed(0)
    store = sw.attribution.ProjectedStore(path, dim, dtype=dtype)
    for model in range(models):
        weights = torch.rand(n, generator=generator) if weighted else None
        store.add(torch.randn(n, dim, generator=generator), weights, model_number=model)
    queries = [torch.randn(5, dim, generator=generator) for _ in range(models)]
    return store, queries


def by_formula(store, queries, cosine=False, damping=None):
    total, weights = 0, 0
    for model, own in enumerate(queries):
        x = store.rows(model_number=model).double()
        q = own.double()
        kernel = torch.eye(store.dim, dtype=torch.float64)
        if damping is not None:
            gram = x.T @ x
            kernel = torch.linalg.inv(gram + damping * gram.trace() / store.dim * kernel)
        products = q @ kernel @ x.T
        if cosine:
            of_rows, of_queries = (((each @ kernel) * each).sum(1).sqrt() for each in (x, q))
            products = products / of_queries[:, None] / of_rows
        total = total + products / len(queries)
        weights = weights + store.weights(model_number=model).double() / len(queries)
    return total if cosine else total * weights


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("damping", [None, 0, 0.1, 10.0])
@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize(("models", "weighted"), [(1, False), (1, True), (3, True)])
def test_scores(tmp_path, models, weighted, cosine, damping):
    store, queries = random_store(tmp_path, models=models, weighted=weighted)
    wanted = by_formula(store, queries, cosine, damping).float()
    options = {"cosine": cosine, "damping": damping}
    close = {"rtol": 1e-4, "atol": 1e-6 * float(wanted.abs().max())}
    torch.testing.assert_close(store.scores(queries, **options), wanted, **close)
    values, samples = store.search(queries, 3, chunk_size=7, **options)
    torch.testing.assert_close(values, wanted.topk(3).values, **close)
    assert torch.equal(samples, wanted.topk(3).indices)
    torch.testing.assert_close(store.scores(queries, **options, path=tmp_path / "scores.npy"), wanted, **close)
    vectors = store.query_vectors(queries, **options)
    exported = load(store.export(tmp_path / "rows.npy", **options), 40, models * 12)
    torch.testing.assert_close(vectors @ exported.T, wanted, **close)


def load(path, rows, columns):
    """Matrix of a .npy file, read by NumPy."""
    numpy = pytest.importorskip("numpy")
    matrix = numpy.load(path)
    assert matrix.dtype == numpy.float32 and matrix.shape == (rows, columns)
    return torch.from_numpy(matrix)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("chunk_size", [1, 3, 64, 4096])
@pytest.mark.parametrize("k", [1, 5, 63, 200, 300])
def test_top_k_by_blocks_equals_a_full_sort(tmp_path, k, chunk_size):
    """Small integers, so that many scores are equal: the order of equal scores is that of the samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (200, 3), generator=generator).float()
    queries = torch.randint(-2, 3, (6, 3), generator=generator).float()
    store = sw.attribution.ProjectedStore(tmp_path, 3, dtype="float32")
    store.add(x)
    wanted = (queries @ x.T).sort(dim=1, descending=True, stable=True)
    values, samples = store.search(queries, k, chunk_size=chunk_size)
    assert torch.equal(values, wanted.values[:, :k]) and torch.equal(samples, wanted.indices[:, :k])


def test_scores_of_some_models(tmp_path):
    store, queries = random_store(tmp_path, models=3, weighted=True)
    one = store.scores({1: queries[1]}, damping=0.1)
    x = store.rows(model_number=1).double()
    gram = x.T @ x
    inverse = torch.linalg.inv(gram + 0.1 * gram.trace() / 12 * torch.eye(12))
    wanted = queries[1].double() @ inverse @ x.T * store.weights(model_number=1)
    torch.testing.assert_close(one, wanted.float(), rtol=1e-4, atol=1e-7)


def test_gram_is_updated_as_rows_are_added(tmp_path):
    store, queries = random_store(tmp_path)
    file = RowsFile(tmp_path / "model-0000", Layout(12, "float32", 1000))
    x = store.rows().double()
    torch.testing.assert_close(updated_gram(file), x.T @ x)
    store.add(torch.randn(9, 12))
    x = store.rows().double()
    file.reload()
    torch.testing.assert_close(updated_gram(file), x.T @ x)
    read = []
    file.rows = lambda start, stop: read.append((start, stop))
    torch.testing.assert_close(updated_gram(file), x.T @ x)
    assert not read  # nothing to add
    assert store.scores(queries, damping=0.1).shape == (5, 49)


@pytest.mark.parametrize("damage", ["missing", "truncated", "later"])
def test_gram_is_computed_again_if_its_file_is_not_that_of_the_rows(tmp_path, damage):
    random_store(tmp_path)
    file = RowsFile(tmp_path / "model-0000", Layout(12, "float32", 1000))
    wanted = updated_gram(file)
    path = tmp_path / "model-0000" / "gram.f64"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        os.truncate(path, 100)
    else:
        content = bytearray(path.read_bytes())
        content[:8] = bytes(torch.tensor([99.0], dtype=torch.float64).numpy())
        path.write_bytes(content)
    torch.testing.assert_close(updated_gram(file), wanted)


def test_a_crash_while_the_gram_is_written(tmp_path, monkeypatch):
    store, queries = random_store(tmp_path)
    wanted = store.scores(queries, damping=0.1)
    store.add(torch.randn(3, 12))
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.scores(queries, damping=0.1)
    monkeypatch.undo()
    again = sw.attribution.ProjectedStore(tmp_path, 12, dtype="float32")
    torch.testing.assert_close(again.scores(queries, damping=0.1), by_formula(again, queries, damping=0.1).float())
    assert wanted.shape == (5, 40) and not list(tmp_path.rglob("*.partial"))


def test_rows_of_zeros(tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path, 4)
    store.add(torch.cat([torch.zeros(2, 4), torch.eye(4)]))
    scores = store.scores(torch.cat([torch.zeros(1, 4), torch.ones(1, 4)]), cosine=True, damping=0.1)
    assert not scores[0].any() and not scores[:, :2].any() and (scores[1, 2:] > 0).all()


def test_rows_beyond_the_range_of_squares(tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path, 2)
    store.add(torch.tensor([[1e30, 0.0], [0.0, 1e-30]]))
    torch.testing.assert_close(store.scores(torch.tensor([[1e25, 0.0]]), cosine=True), torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("damping", [None, 0.1])
def test_search_equals_that_of_faiss(tmp_path, damping):
    faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
    store, queries = random_store(tmp_path, n=200, models=2, weighted=True)
    vectors = store.query_vectors(queries, damping=damping).numpy()
    exported = load(store.export(tmp_path / "rows.npy", damping=damping), 200, 24).numpy()
    index = faiss.IndexFlatIP(24)
    index.add(exported)
    values, samples = store.search(queries, 10, damping=damping)
    found_values, found = index.search(vectors, 10)
    torch.testing.assert_close(torch.from_numpy(found_values), values, rtol=1e-4, atol=1e-5 * float(values.max()))
    assert torch.equal(torch.from_numpy(found), samples)


# --- layers ----------------------------------------------------------------------------------------------------------


def test_blocks_by_layer(tmp_path):
    """With many dimensions, the scores of a layer are the inner products of its gradients."""
    model, x, y = make(n=6)
    store = sw.attribution.ProjectedStore(tmp_path, 20_001, blocks="layer", dtype="float32")
    store.fill(model, loss_fn, batches(x, y, 4))
    assert store.layers == ["0", "2"]
    queries = store.project(model, loss_fn, [(x[:2], y[:2])])
    first = sum(p.numel() for p in model[0].parameters())
    true = rows(model, x, y)
    largest = float((true @ true.T).max())
    for layers, part in (
        (["0"], slice(0, first)),
        (["2"], slice(first, None)),
        (None, slice(None)),
        (["2", "0"], slice(None)),
    ):
        wanted = (true[:2, part] @ true[:, part].T).float()
        found = store.scores(queries, layers=layers)
        assert (found - wanted).abs().max() < 0.05 * largest
    total = store.scores(queries)
    torch.testing.assert_close(store.scores(queries, layers=["0"]) + store.scores(queries, layers=["2"]), total)
    again = sw.attribution.ProjectedStore(tmp_path, 20_001, blocks="layer", dtype="float32")
    g = sw.gradients(loss_fn(model, (x[:2], y[:2])), model)
    torch.testing.assert_close(
        again.scores(g, layers=["2"], cosine=True), store.scores(queries, layers=["2"], cosine=True)
    )
    with pytest.raises(
        ValueError, match=r"layers must be a list of layers of the store; found \['1'\]. Its .* are 0, 2"
    ):
        store.scores(queries, layers=["1"])
    with pytest.raises(ValueError, match="layers must be a list of layers of the store; found '0'"):
        store.scores(queries, layers="0")


def test_blocks_by_layer_with_damping(tmp_path):
    model, x, y = make(n=40)
    store = sw.attribution.ProjectedStore(tmp_path, 9, blocks="layer", dtype="float32")
    store.fill(model, loss_fn, batches(x, y, 9))
    own = store.rows()[:, 5:].double()  # of 9 dims, the first layer has 5
    gram = own.T @ own
    wanted = own[:3] @ torch.linalg.inv(gram + 0.1 * gram.trace() / 4 * torch.eye(4)) @ own.T
    found = store.scores(store.rows(0, 3), layers=["2"], damping=0.1)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-6)


def test_refusals_of_blocks(tmp_path):
    with pytest.raises(ValueError, match="blocks must be 'layer' or None; found 'rows'"):
        sw.attribution.ProjectedStore(tmp_path, 4, blocks="rows")
    store, queries = random_store(tmp_path / "plain")
    with pytest.raises(ValueError, match="Its layers are none, because the store has no blocks"):
        store.scores(queries, layers=["0"])
    model, x, y = make()
    small = sw.attribution.ProjectedStore(tmp_path / "small", 1, blocks="layer")
    with pytest.raises(ValueError, match="dim must be at least the number of layers, 2, with blocks='layer'; found 1"):
        small.fill(model, loss_fn, [(x, y)])
    assert small.models == 0
    with pytest.raises(
        sw.StoreError, match=r"must have blocks='layer', as requested; found blocks=None\. Open it with "
    ):
        sw.attribution.ProjectedStore(tmp_path / "plain", 12, dtype="float32", blocks="layer")


# --- refusals --------------------------------------------------------------------------------------------------------


def test_bad_queries(tmp_path):
    store, queries = random_store(tmp_path, models=2)
    with pytest.raises(ValueError, match=r"for each of the 2 models of the store; found 1. Pass a list with one for"):
        store.scores(queries[0])
    with pytest.raises(ValueError, match=r"queries must have keys in 0..1, at least one; found \[2\]"):
        store.scores({2: queries[0]})
    with pytest.raises(ValueError, match=r"queries must have keys in 0..1, at least one; found \[\]"):
        store.scores({})
    with pytest.raises(ValueError, match=r"the same samples for each model; found \[3, 5\] samples"):
        store.scores([queries[0], queries[1][:3]])
    with pytest.raises(ValueError, match="queries must be given for all 2 models; found 1"):
        store.query_vectors({0: queries[0]})
    for damping in (-0.1, torch.nan, torch.inf, "much"):
        with pytest.raises(ValueError, match="damping must be a multiple of the mean eigenvalue, 0 or more; found"):
            store.scores(queries, damping=damping)


def test_a_singular_gram(tmp_path):
    store, queries = random_store(tmp_path, n=5)
    with pytest.raises(sw.StoreError, match=r"found a singular matrix with 5 samples, 12 numbers each, and damping=0"):
        store.scores(queries, damping=0)
    assert store.scores(queries, damping=0.1).isfinite().all()


def test_other_numbers_of_samples(tmp_path):
    store, queries = random_store(tmp_path, models=2)
    store.add(torch.ones(1, 12), model_number=1)
    with pytest.raises(sw.StoreError, match=r"must have the same number of samples; found \[40, 41\]"):
        store.scores(queries)
    assert len(store) == 40 and store.scores({1: queries[1]}).shape == (5, 41)


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    store, queries = random_store(tmp_path / "store")
    target = tmp_path / "scores.npy"
    target.write_bytes(b"before")
    with pytest.raises(ValueError, match="scores must be finite in float32"):
        store.scores([queries[0] * 1e38], path=target)
    assert target.read_bytes() == b"before" and [p.name for p in tmp_path.iterdir() if p.is_file()] == ["scores.npy"]


# --- weights and scales ----------------------------------------------------------------------------------------------


def test_weights(tmp_path):
    model, x, y = make(n=10)
    store = sw.attribution.ProjectedStore(tmp_path, 8)
    store.fill(model, sw.attribution.margin, batches(x, y, 4), returns="outputs")
    wanted = torch.sigmoid(-sw.attribution.margin(model, (x, y)).detach())
    torch.testing.assert_close(store.weights(), wanted.float())
    g = sw.gradients(sw.attribution.margin(model, (x, y)), model)
    torch.testing.assert_close(store.rows(), g.project(8).float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("microbatch", ["auto", 3, sw.auto(memory=400)])
def test_weights_of_an_output_function(tmp_path, microbatch):
    model, x, y = make(n=10)
    store = sw.attribution.ProjectedStore(tmp_path, 8)

    def output_fn(model, batch):
        losses = loss_fn(model, batch)
        return -losses, torch.full_like(losses, 3)

    store.fill(model, output_fn, batches(x, y, 4), microbatch=microbatch, returns="outputs")
    assert store.weights().tolist() == [3.0] * 10
    g = sw.gradients(-loss_fn(model, (x, y)), model)
    torch.testing.assert_close(store.rows(), g.project(8).float(), rtol=1e-2, atol=1e-2)
    queries = store.project(model, output_fn, [(x[:2], y[:2])], microbatch=microbatch)
    torch.testing.assert_close(store.scores(queries), 3 * queries @ store.rows().T)
    with pytest.raises(ValueError, match="returns must be 'losses' or 'outputs'; found 'weights'"):
        store.fill(model, output_fn, batches(x, y, 4), returns="weights")


def test_weights_must_be_given_for_all_rows_or_none(tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path, 2)
    store.add(torch.ones(1, 2), torch.ones(1))
    with pytest.raises(sw.StoreError, match="rows of model 0 must be added with weights"):
        store.add(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"weights must be a tensor \(1,\), one per sample; found \(2,\)"):
        store.add(torch.ones(1, 2), torch.ones(2))
    with pytest.raises(ValueError, match="weights must be finite in float32; found NaN or infinity"):
        store.add(torch.ones(1, 2), torch.full((1,), torch.nan))
    store.add(torch.ones(1, 2), model_number=1)
    with pytest.raises(sw.StoreError, match="rows of model 1 must be added without weights"):
        store.add(torch.ones(1, 2), torch.ones(1), model_number=1)
    with pytest.raises(ValueError, match=r"model_number must be in 0\.\.2; found 3"):
        store.add(torch.ones(1, 2), model_number=3)


def stepped(optimizer, x, y, model, **options):
    optimizer = optimizer(model.parameters(), lr=1e-3, **options)
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model, (x, y)).mean().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.Adam, {"amsgrad": True, "betas": (0.8, 0.9), "eps": 1e-3})],
)
def test_gradients_scaled_by_adam(tmp_path, kind, options):
    """Rows are projections of the plain loop's gradients divided by Adam's denominator."""
    model, x, y = make(n=10)
    adam = stepped(kind, x, y, model, **options)
    denominators = []
    for p in model.parameters():
        state = adam.state[p]
        second = state["max_exp_avg_sq"] if options else state["exp_avg_sq"]
        denominators.append(((second / (1 - adam.defaults["betas"][1] ** 3)).sqrt() + adam.defaults["eps"]).flatten())
    store = sw.attribution.ProjectedStore(tmp_path, 8, dtype="float32")
    store.fill(model, loss_fn, batches(x, y, 4), second_moments=adam)
    scaled = rows(model, x, y) / torch.cat(denominators)
    wanted = (scaled @ projection(model, 8)).float()
    torch.testing.assert_close(store.rows(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    plain = store.project(model, loss_fn, [(x[:3], y[:3])])
    torch.testing.assert_close(plain, sw.gradients(loss_fn(model, (x[:3], y[:3])), model).project(8).float())
    with pytest.raises(sw.StoreError, match=r"has rows of the loss, scaled by Adam's second moments for this model"):
        store.fill(model, loss_fn, batches(x, y, 4))


def test_an_optimizer_without_second_moments(tmp_path):
    model, x, y = make()
    store = sw.attribution.ProjectedStore(tmp_path, 8)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())):
        with pytest.raises(
            ValueError, match=r"second_moments must be an optimizer with second moments .*; found none for '0.bias'"
        ):
            store.fill(model, loss_fn, [(x, y)], second_moments=optimizer)
    assert store.models == 0


# --- several models --------------------------------------------------------------------------------------------------


def test_several_models(tmp_path):
    _, x, y = make(n=10)
    models = [make(seed=seed)[0] for seed in range(3)]
    store = sw.attribution.ProjectedStore(tmp_path, 8, seed=4)
    assert [store.fill(model, loss_fn, batches(x, y, 4)) for model in models] == [0, 1, 2]
    again = sw.attribution.ProjectedStore(tmp_path, 8, seed=4)
    assert again.models == 3 and len(again) == 10
    assert repr(again).endswith("10 samples, 3 models, dim=8, seed=4, dtype='float16')")
    assert again.fill(models[1], loss_fn, batches(x, y, 4)) == 1  # nothing to do
    gradients = [sw.gradients(loss_fn(model, (x[:2], y[:2])), model) for model in models]
    for k, model in enumerate(models):
        wanted = sw.gradients(loss_fn(model, (x, y)), model).project(8, seed=4 + k).float()
        torch.testing.assert_close(again.rows(model_number=k), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))
    projected = [store.project(model, loss_fn, [(x[:2], y[:2])]) for model in models]
    torch.testing.assert_close(again.scores(gradients), again.scores(projected))


def test_queries_of_an_unknown_model(tmp_path):
    model, x, y = make()
    store = sw.attribution.ProjectedStore(tmp_path, 8)
    store.fill(model, loss_fn, [(x, y)])
    with pytest.raises(sw.StoreError, match=r"found parameters of none of its 1 model\. Load the parameters"):
        store.project(make(seed=1)[0], loss_fn, [(x, y)])
    with pytest.raises(sw.StoreError, match=r"has rows of the loss for this model. Pass the same returns and second_m"):
        store.fill(model, sw.attribution.margin, [(x, y)], returns="outputs")


def test_a_model_in_training_mode_stays_so(tmp_path):
    model = nn.Sequential(nn.Dropout(0.5), make()[0]).train()
    _, x, y = make()
    store = sw.attribution.ProjectedStore(tmp_path, 8)
    store.fill(model, loss_fn, [(x, y)])
    first = store.rows()
    assert model.training and model[0].training
    torch.testing.assert_close(store.project(model, loss_fn, [(x, y)]), first, rtol=1e-2, atol=1e-2)
