"""Approximate search with FAISS: recall, files, refusals."""

import json
import sys

import pytest
import torch

import samplewise as sw
from samplewise.core.directory_lock import DirectoryLock


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss", reason="needs faiss-cpu")


def clustered_store(path, n=2000, dim=16, models=1, dtype="float32"):
    """Rows around 40 centers, as gradients of a classifier are."""
    generator = torch.Generator().manual_seed(0)
    store = sw.attribution.ProjectedStore(path, dim, dtype=dtype)
    label = torch.randint(40, (n,), generator=generator)
    for number in range(models):
        centers = torch.randn(40, dim, generator=generator)
        store.add(centers[label] + 0.3 * torch.randn(n, dim, generator=generator), model_number=number)
    return store


def queries_of(store, n=30):
    generator = torch.Generator().manual_seed(1)
    return [
        store.rows(50, 50 + n, model_number=k) + 0.1 * torch.randn(n, store.dim, generator=generator)
        for k in range(store.models)
    ]


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("options", [{}, {"cosine": True}, {"damping": 0.1}, {"cosine": True, "damping": 0.1}])
@pytest.mark.parametrize(("models", "dtype"), [(1, "float32"), (2, "float16"), (1, "int8")])
def test_search_of_all_lists_is_exact(faiss, tmp_path, models, dtype, options):
    """With all lists probed, the scores are those of the exact search up to the precision of the entries."""
    store = clustered_store(tmp_path / "store", 400, models=models, dtype=dtype)
    index = sw.attribution.FaissIndex(store, tmp_path / "index", probes=100, factory="IVF6,Flat", **options)
    assert index.recall == 1
    queries = queries_of(store)
    values, samples = index.search(queries, 7)
    wanted = store.search(queries, 7, **options)
    torch.testing.assert_close(values, wanted[0], rtol=1e-4, atol=1e-6 * float(wanted[0].abs().max()))
    assert torch.equal(samples, wanted[1]) and index.recall_of(queries, 7) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_recall(faiss, tmp_path, dtype):
    """The recall is the share of the exact top 10 found by the index, by hand."""
    store = clustered_store(tmp_path / "store", dtype=dtype)
    index = sw.attribution.FaissIndex(store, tmp_path / "index", probes=1)
    rows = torch.randperm(2000, generator=torch.Generator().manual_seed(0))[:100].tolist()
    queries = store.rows()[rows]
    exact = (queries.double() @ store.rows().double().T).sort(dim=1, descending=True, stable=True).indices[:, :11]
    shares = []
    for row, *lists in zip(rows, exact.tolist(), index.search(queries, 11)[1].tolist(), strict=True):
        wanted, found = ([sample for sample in samples if sample != row][:10] for samples in lists)
        shares.append(len(set(wanted) & set(found)) / 10)
    assert index.recall == pytest.approx(sum(shares) / 100, abs=0.01)
    more = sw.attribution.FaissIndex(store, tmp_path / "more", probes=8)
    assert 0 < index.recall < more.recall <= 1
    assert repr(more) == f"FaissIndex(2000 samples, {more.factory!r}, probes=8, recall={more.recall:.3f})"
    assert more.factory == {"float32": "IVF31,Flat", "float16": "IVF31,SQfp16", "int8": "IVF31,SQ8"}[dtype]


def test_an_index_is_opened_again(faiss, tmp_path, monkeypatch):
    store = clustered_store(tmp_path / "store")
    first = sw.attribution.FaissIndex(store, tmp_path / "index", cosine=True)
    monkeypatch.setattr(sw.attribution.FaissIndex, "_build", lambda self: 1 / 0)
    again = sw.attribution.FaissIndex(store, tmp_path / "index", cosine=True)
    assert again.recall == first.recall
    for found, wanted in zip(again.search(queries_of(store)), first.search(queries_of(store)), strict=True):
        assert torch.equal(found, wanted)
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["index.faiss", "index.json"]


def test_fewer_rows_in_a_list_than_wanted(faiss, tmp_path):
    store = clustered_store(tmp_path / "store", 400)
    index = sw.attribution.FaissIndex(store, tmp_path / "index", factory="IVF6,Flat", probes=1)
    values, samples = index.search(queries_of(store), 400)
    absent = samples < 0
    assert absent.any() and (samples[absent] == -1).all() and (values[absent] == -torch.inf).all()
    assert values[~absent].isfinite().all()


def test_another_store_or_other_arguments(faiss, tmp_path):
    store = clustered_store(tmp_path / "store", 400)
    sw.attribution.FaissIndex(store, tmp_path / "index")
    for options, message in {
        (
            ("cosine", True),
        ): r"must have cosine=True, as the arguments and the store; found cosine=False\. Pass the sam",
        (("probes", 3),): "must have probes=3, .* found probes=None",
        (("damping", 0.1),): r"must have damping=0\.1",
    }.items():
        with pytest.raises(sw.StoreError, match=message):
            sw.attribution.FaissIndex(store, tmp_path / "index", **dict(options))
    store.add(torch.ones(1, 16))
    with pytest.raises(sw.StoreError, match=r"must have samples=401, .* found samples=400"):
        sw.attribution.FaissIndex(store, tmp_path / "index", factory="IVF6,Flat")
    other = sw.attribution.ProjectedStore(tmp_path / "other", 16, dtype="float32")
    other.add(torch.randn(400, 16))
    with pytest.raises(sw.StoreError, match="must have rows='"):
        sw.attribution.FaissIndex(other, tmp_path / "index")


def test_damaged_files(faiss, tmp_path):
    store = clustered_store(tmp_path / "store", 400)
    sw.attribution.FaissIndex(store, tmp_path / "index")
    path = tmp_path / "index" / "index.faiss"
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"rows"):
        path.write_bytes(damaged)
        with pytest.raises(
            sw.StoreError, match=r"index\.faiss must be an index of FAISS; found .*Remove its directory"
        ):
            sw.attribution.FaissIndex(store, tmp_path / "index")
    faiss.write_index(faiss.IndexFlatIP(16), str(path))
    with pytest.raises(sw.StoreError, match=r"index\.faiss must have 400 samples; found 0"):
        sw.attribution.FaissIndex(store, tmp_path / "index")
    path.unlink()
    with pytest.raises(sw.StoreError, match=r"index\.faiss must be an index of FAISS; found .*No such file"):
        sw.attribution.FaissIndex(store, tmp_path / "index")
    index = tmp_path / "index" / "index.json"
    for text in ("[]", '{"format": 2}'):
        index.write_text(text)
        with pytest.raises(sw.StoreError, match="must have format=1, as the arguments"):
            sw.attribution.FaissIndex(store, tmp_path / "index")
    index.write_text("{")
    with pytest.raises(sw.StoreError, match=r"index\.json must be readable JSON; found .*Remove its directory"):
        sw.attribution.FaissIndex(store, tmp_path / "index")


def test_refusals(faiss, tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path / "store", 16, dtype="float32")
    with pytest.raises(sw.StoreError, match=r"at least 2 samples; found 0\. Fill the store first"):
        sw.attribution.FaissIndex(store, tmp_path / "index")
    store = clustered_store(tmp_path / "store", 400)
    with pytest.raises(ValueError, match=r"probes must be an integer, 1 or more; found 0"):
        sw.attribution.FaissIndex(store, tmp_path / "index", probes=0)
    with pytest.raises(ValueError, match=r"factory must be a description for faiss\.index_factory; found 'IVX9'"):
        sw.attribution.FaissIndex(store, tmp_path / "index", factory="IVX9")
    with pytest.raises(ValueError, match=r"probes needs an index with lists, .* found factory='Flat'\. Leave it out"):
        sw.attribution.FaissIndex(store, tmp_path / "index", factory="Flat", probes=2)
    assert sw.attribution.FaissIndex(store, tmp_path / "flat", factory="Flat").recall == 1
    with (
        DirectoryLock(tmp_path / "index", "index.lock", place="index", user="writer", remedy="", error=sw.StoreError),
        pytest.raises(
            sw.StoreError, match=r"a FAISS index must be used by one writer at a time; .* this process, process"
        ),
    ):
        sw.attribution.FaissIndex(store, tmp_path / "index")
    index = sw.attribution.FaissIndex(store, tmp_path / "index")
    with pytest.raises(ValueError, match=r"k must be an integer, 1 or more; found 0"):
        index.search(queries_of(store), 0)
    with pytest.raises(ValueError, match=r"queries must be at least one sample; found none"):
        index.recall_of(torch.zeros(0, 16))
    assert json.loads((tmp_path / "index" / "index.json").read_text())["recall"] == index.recall


def test_faiss_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    store = clustered_store(tmp_path / "store", 100)
    with pytest.raises(ImportError, match=r"FaissIndex needs faiss: pip install 'samplewise\[faiss\]'"):
        sw.attribution.FaissIndex(store, tmp_path / "index")
    assert not (tmp_path / "index").exists()
