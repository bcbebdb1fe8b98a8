"""Projections on disk: rows, search, interrupted and invalid stores."""

import json
import os
import sys

import forks
import pytest
import torch
from plain_loop import batches, loss_fn, make

import samplewise as sw

HALF = 2**-10  # of the largest entry of a row: twice the rounding error of float16


def filled(path, n=20, dim=16, size=6):
    model, x, y = make(n=n)
    store = sw.ProjectedStore(path, dim)
    store.fill(model, loss_fn, batches(x, y, size))
    return store, model, x, y, sw.gradients(loss_fn(model, (x, y)), model).project(dim).float()


def assert_close(found, wanted):
    assert found.shape == wanted.shape
    assert ((found - wanted).abs() <= HALF * wanted.abs().amax(1, keepdim=True)).all()


def test_stored_rows(tmp_path):
    store, _, _, _, wanted = filled(tmp_path / "store")
    assert len(store) == 20
    assert_close(store.rows(), wanted)
    assert_close(store.rows(3, 5), wanted[3:5])
    assert store.rows(5, 5).shape == (0, 16)
    again = sw.ProjectedStore(tmp_path / "store", 16)
    assert torch.equal(again.rows(), store.rows())
    assert (tmp_path / "store" / "model-0000" / "rows.f16").stat().st_size == 20 * 16 * 2


@pytest.mark.parametrize("length", [1e-30, 1.0, 1e30])
def test_norms_beyond_the_range_of_float16(tmp_path, length):
    rows = torch.randn(4, 8) * length
    store = sw.ProjectedStore(tmp_path, 8)
    store.add(rows)
    assert_close(store.rows(), rows)


def test_a_row_of_zeros(tmp_path):
    store = sw.ProjectedStore(tmp_path, 8)
    store.add(torch.zeros(2, 8))
    assert not store.rows().any()


@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_search_is_exact(tmp_path, chunk):
    store, model, x, y, _ = filled(tmp_path)
    queries = sw.gradients(loss_fn(model, (x[:3] + 0.1, y[:3])), model)
    products = queries.project(16).float() @ store.rows().T
    values, places = store.search(queries, k=5, chunk=chunk)
    wanted = products.topk(5)
    torch.testing.assert_close(values, wanted.values)
    assert torch.equal(places, wanted.indices)
    assert store.search(queries, k=100)[1].shape == (3, 20)


def test_the_earlier_of_equal_products_comes_first(tmp_path):
    store = sw.ProjectedStore(tmp_path, 2)
    store.add(torch.tensor([[1.0, 0.0]]).expand(9, 2))
    assert store.search(torch.ones(1, 2), k=4, chunk=2)[1].tolist() == [[0, 1, 2, 3]]


def test_an_empty_store_finds_nothing(tmp_path):
    store = sw.ProjectedStore(tmp_path, 4)
    assert store.rows().shape == (0, 4)
    assert store.search(torch.ones(2, 4))[0].shape == (2, 0)


def test_appending(tmp_path):
    store, model, x, y, wanted = filled(tmp_path)
    sw.ProjectedStore(tmp_path, 16).add(sw.gradients(loss_fn(model, (x[:2], y[:2])), model))
    assert_close(sw.ProjectedStore(tmp_path, 16).rows(), torch.cat([wanted, wanted[:2]]))
    assert len(store) == 20  # the store that was opened first


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("taken", [0, 4, 7, 12, 19])
def test_an_interrupted_fill_can_be_continued(tmp_path, taken):
    """The missing samples are added, also with another batch size."""
    model, x, y = make(n=20)
    store = sw.ProjectedStore(tmp_path, 16)
    if taken:
        store.fill(model, loss_fn, [(x[:taken], y[:taken])])
    seen = []

    def counting(model, batch):
        seen.append(len(batch[0]))
        return loss_fn(model, batch)

    again = sw.ProjectedStore(tmp_path, 16)
    again.fill(model, counting, batches(x, y, 6))
    assert sum(seen) == 20 - taken + (taken > 0)  # the first sample is computed again, and compared
    assert_close(again.rows(), sw.gradients(loss_fn(model, (x, y)), model).project(16).float())
    seen.clear()
    again.fill(model, counting, batches(x, y, 6))
    assert seen == [1]


@pytest.mark.parametrize(("point", "call"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("replace", 1)])
def test_a_crash_in_the_middle_of_an_append(tmp_path, monkeypatch, point, call):
    """Earlier rows are kept and the next append is correct, wherever the write stops."""
    store, *_, wanted = filled(tmp_path)
    real, calls = getattr(os, point), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise Interrupted
        return real(*arguments)

    monkeypatch.setattr(os, point, failing)
    with pytest.raises(Interrupted):
        store.add(torch.randn(5, 16))
    monkeypatch.undo()
    again = sw.ProjectedStore(tmp_path, 16)
    assert_close(again.rows(), wanted)
    again.add(wanted[:2])
    assert_close(sw.ProjectedStore(tmp_path, 16).rows(), torch.cat([wanted, wanted[:2]]))
    assert (tmp_path / "model-0000" / "rows.f16").stat().st_size == 22 * 16 * 2


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes(tmp_path):
    script = f"""
import os, torch
import samplewise as sw
store = sw.ProjectedStore({str(tmp_path)!r}, 8)
for k in range(5):
    store.add(torch.full((3, 8), k + 1.0))
real = os.replace
os.replace = lambda *a: os._exit(9)
store.add(torch.full((3, 8), 99.0))
"""
    assert forks.run([sys.executable, "-c", script], timeout=600).returncode == 9
    store = sw.ProjectedStore(tmp_path, 8)
    assert store.rows()[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_another_size_or_seed(tmp_path):
    filled(tmp_path)
    with pytest.raises(sw.StoreError, match=r"must have dim=32, as requested; found dim=16. Open it with dim=16"):
        sw.ProjectedStore(tmp_path, 32)
    with pytest.raises(sw.StoreError, match=r"must have seed=1, as requested; found seed=0. Open it with seed=0"):
        sw.ProjectedStore(tmp_path, 16, seed=1)


@pytest.mark.parametrize("name", ["rows.f16", "scales.f32"])
def test_a_truncated_file(tmp_path, name):
    filled(tmp_path)
    path = tmp_path / "model-0000" / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(sw.StoreError, match=f"must have {size} bytes for 20 samples; found {size - 1}"):
        sw.ProjectedStore(tmp_path, 16)
    path.unlink()
    with pytest.raises(sw.StoreError, match=f"must have {size} bytes for 20 samples; found 0"):
        sw.ProjectedStore(tmp_path, 16)


INDEX = '{"count": COUNT, "model": "", "weighted": false, "scaling": "", "layers": LAYERS}'
NO_COUNTS = [INDEX.replace("COUNT", count) for count in ("-1", "NaN", "true", "1.0", "null", "9" * 5000)]
NO_LAYERS = [INDEX.replace("COUNT", "1").replace("LAYERS", layers) for layers in ("3", "[1]", '[["a", "b"]]')]
NO_JSON = ["", "{", "[]", "{}", "[" * 100_000]


@pytest.mark.parametrize("text", [*NO_JSON, *NO_COUNTS, *NO_LAYERS], ids=lambda text: text[:90])
def test_an_invalid_index_of_a_model(tmp_path, text):
    filled(tmp_path)
    (tmp_path / "model-0000" / "model.json").write_text(text.replace("LAYERS", "[]"))
    with pytest.raises(sw.StoreError, match=r"model\.json must be a valid index of a store; found other content"):
        sw.ProjectedStore(tmp_path, 16)


@pytest.mark.parametrize("text", [*NO_JSON, '{"format": 2, "dim": "16"}'], ids=lambda text: text[:70])
def test_an_invalid_index(tmp_path, text):
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(sw.StoreError, match="must be a valid index of a store; found other content"):
        sw.ProjectedStore(tmp_path, 16)


def test_another_format(tmp_path):
    filled(tmp_path)
    index = tmp_path / "store.json"
    for other in (1, 3):
        index.write_text(json.dumps({**json.loads(index.read_text()), "format": other}))
        with pytest.raises(sw.StoreError, match=f"must have format 2; found {other}. Use the version"):
            sw.ProjectedStore(tmp_path, 16)


def test_other_samples_than_those_of_the_store(tmp_path):
    store, model, x, y, _ = filled(tmp_path)
    with pytest.raises(sw.StoreError, match="needs the same samples, in the same order, and the same function; found"):
        store.fill(model, loss_fn, [(x.flip(0), y.flip(0))])
    assert len(store) == 20


def test_bad_arguments(tmp_path):
    store = sw.ProjectedStore(tmp_path, 4)
    with pytest.raises(ValueError, match="dim must be an integer, 1 or more; found 0"):
        sw.ProjectedStore(tmp_path, 0)
    with pytest.raises(ValueError, match=r"rows must have the store's shape \(B, 4\); found \(2, 5\)"):
        store.add(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"queries must have the store's shape \(B, 4\); found \(4,\)"):
        store.search(torch.zeros(4))
    for number in (torch.nan, 1e300):
        with pytest.raises(ValueError, match="rows must be finite in float32; found NaN or infinity"):
            store.add(torch.full((1, 4), number, dtype=torch.float64))
    store.add(torch.full((1, 4), 1e38))
    with pytest.raises(ValueError, match="queries must be finite in float32; found NaN or infinity"):
        store.search(torch.full((1, 4), torch.nan))
    with pytest.raises(ValueError, match=r"scores must be finite in float32; found .* Scale the queries"):
        store.search(torch.tensor([[1e38, -1e38, 0.0, 0.0]]))
    for options in ({"k": 0}, {"k": -1}, {"chunk": 0}, {"k": 2.0}):
        (name, found), *_ = options.items()
        with pytest.raises(ValueError, match=f"{name} must be an integer, 1 or more; found {found}"):
            store.search(torch.zeros(1, 4), **options)
    with pytest.raises(TypeError, match=r"rows must be Gradients or a real tensor \(B, 4\); found list"):
        store.add([[0.0] * 4])
    with pytest.raises(TypeError, match=r"rows must be Gradients or a real tensor \(B, 4\); found torch.complex64"):
        store.add(torch.zeros(1, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"seed must be an integer; found 1\.5"):
        sw.ProjectedStore(tmp_path, 4, seed=1.5)
    with pytest.raises(ValueError, match="dtype must be one of float16, float32; found 'int8'"):
        sw.ProjectedStore(tmp_path, 4, dtype="int8")
