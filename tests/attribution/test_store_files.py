"""Files of a store: shards, int8 rows, norms, format 2, and a process that is killed while it fills."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch
from plain_loop import batches, loss_fn, make

import samplewise as sw
from samplewise.attribution import projected_features, store_files

DTYPES = ["float32", "float16", "int8"]


def random_rows(n=50, dim=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-5, 5, (n, 1), generator=generator)
    return torch.randn(n, dim, generator=generator) * sizes


def random_queries(n, dim=12):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(7))


def open_store(path, dtype="float32", dim=12):
    return sw.attribution.ProjectedStore(path, dim, dtype=dtype)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(store_files, "SHARD_BYTES", 7 * 12 * 4)  # 7 rows of 12 float32


# --- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_over_several_shards(tmp_path, small_shards, dtype):
    rows = random_rows()
    store = open_store(tmp_path / "sharded", dtype)
    for part in rows.split([1, 6, 7, 20, 3, 13]):
        store.add(part)
    size = {"float32": 7, "float16": 14, "int8": 28}[dtype]
    shards = sorted((tmp_path / "sharded" / "model-0000").glob("rows-*"))
    assert [path.name[:10] for path in shards] == [f"rows-{k:05d}" for k in range(-(-50 // size))]
    assert {path.stat().st_size for path in shards[:-1]} == {7 * 12 * 4}
    again = open_store(tmp_path / "sharded", dtype)
    store_files.SHARD_BYTES = 2**30  # restored by the fixture
    whole = open_store(tmp_path / "whole", dtype)
    whole.add(rows)
    for start, stop in ((0, 50), (5, 9), (7, 14), (13, 36), (49, 50), (14, 14)):
        assert torch.equal(again.rows(start, stop), whole.rows(start, stop))
    queries = random_queries(4)
    for options in ({}, {"cosine": True}, {"damping": 0.1}):
        for chunk_size in (1, 5, 7, 4096):
            found = again.search(queries, 9, chunk_size=chunk_size, **options)
            wanted = whole.search(queries, 9, **options)
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-6 * float(wanted[0].abs().max()))
            assert torch.equal(found[1], wanted[1])


def test_a_missing_or_truncated_shard(tmp_path, small_shards):
    open_store(tmp_path).add(random_rows(16))
    path = tmp_path / "model-0000" / "rows-00001.f32"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(sw.StoreError, match=r"rows-00001\.f32 must have 336 bytes for 7 samples; found 335"):
        open_store(tmp_path)
    path.unlink()
    with pytest.raises(sw.StoreError, match=r"rows-00001\.f32 must have 336 bytes for 7 samples; found 0"):
        open_store(tmp_path)
    path.write_bytes(content)
    norms = tmp_path / "model-0000" / "norms.f32"
    norms.write_bytes(norms.read_bytes()[:-4])
    with pytest.raises(sw.StoreError, match=r"norms\.f32 must have 64 bytes for 16 samples; found 60"):
        open_store(tmp_path)


@pytest.mark.parametrize("shard_rows", [0, -3, "7", None, 2.0])
def test_an_invalid_size_of_shards(tmp_path, shard_rows):
    open_store(tmp_path).add(random_rows())
    index = tmp_path / "store.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "shard_rows": shard_rows}))
    with pytest.raises(sw.StoreError, match=r"store\.json must be a valid index of a store; found other content"):
        open_store(tmp_path)


def test_shards_left_by_a_crash_are_overwritten(tmp_path, small_shards):
    store = open_store(tmp_path)
    store.add(random_rows(5))
    for number in range(3):
        with open(tmp_path / "model-0000" / f"rows-{number:05d}.f32", "ab") as file:
            file.write(b"\xff" * 400)
    rows = random_rows(20, seed=1)
    open_store(tmp_path).add(rows)
    again = open_store(tmp_path)
    torch.testing.assert_close(again.rows(), torch.cat([random_rows(5), rows]), rtol=1e-6, atol=0)


# --- int8 and norms --------------------------------------------------------------------------------------------------


def test_int8_rows_are_within_half_a_step(tmp_path):
    """Entries differ by at most scale / 2, so inner products by at most scale / 2 times the sum of |q|."""
    rows = random_rows(400, dim=64)
    rows[0] = 0
    rows[1] = torch.linspace(0, 3e-43, 64)  # subnormal
    rows[2] = 1e36 * torch.linspace(-1, 1, 64)
    store = open_store(tmp_path, "int8", dim=64)
    store.add(rows)
    assert (tmp_path / "model-0000" / "rows-00000.i8").stat().st_size == 400 * 64
    step = rows.double().abs().amax(1, keepdim=True) / 127
    step = step.clamp_min(torch.finfo(torch.float32).tiny) * (1 + 1e-5)  # rounding of scales to float32
    error = (store.rows().double() - rows.double()).abs()
    assert (error <= step / 2).all()
    assert (error > step / 4).any()  # the bound is not far from what happens
    queries = random_queries(5, 64)
    stored = queries.double() @ store.rows().double().T
    assert ((stored - queries.double() @ rows.double().T).abs() <= step.T / 2 * queries.abs().sum(1)[:, None]).all()
    tolerance = 1e-5 * queries.norm(dim=1, keepdim=True) * store.rows().double().norm(dim=1)
    assert ((store.scores(queries) - stored).abs() <= tolerance + 1e-38)[:, 3:].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("damping", [None, 0.1])
def test_cosines_of_stored_rows(tmp_path, dtype, damping):
    """The stored norms are those of the stored rows, not of the rows before they were rounded."""
    store = open_store(tmp_path, dtype)
    store.add(random_rows().clamp(-10, 10))
    queries = random_queries(5)
    x, q = store.rows().double(), queries.double()
    kernel = torch.eye(12, dtype=torch.float64)
    if damping is not None:
        kernel = torch.linalg.inv(x.T @ x + damping * (x.T @ x).trace() / 12 * kernel)
    of_rows, of_queries = (((vectors @ kernel) * vectors).sum(1).sqrt() for vectors in (x, q))
    wanted = q @ kernel @ x.T / of_queries[:, None] / of_rows
    assert (store.scores(queries, cosine=True, damping=damping) - wanted).abs().max() < 1e-6


def test_rows_of_subnormal_numbers(tmp_path):
    """Rows whose largest entry is subnormal keep their sign and size up to the smallest normal number."""
    rows = torch.full((1, 12), 266e-45)
    for dtype in DTYPES:
        store = open_store(tmp_path / dtype, dtype)
        store.add(rows)
        assert (store.rows() - rows).abs().max() <= torch.finfo(torch.float32).tiny / 2


# --- format 2 --------------------------------------------------------------------------------------------------------


def as_format_2(path, suffix):
    """Give a store the files that samplewise 0.3 wrote: one file of rows, and no norms."""
    for model in path.glob("model-*"):
        (model / "norms.f32").unlink()
        (model / f"rows-00000.{suffix}").rename(model / f"rows.{suffix}")
    index = json.loads((path / "store.json").read_text())
    del index["shard_rows"]
    (path / "store.json").write_text(json.dumps({**index, "format": 2}))


@pytest.mark.parametrize(("dtype", "suffix"), [("float32", "f32"), ("float16", "f16")])
def test_a_store_of_format_2(tmp_path, dtype, suffix):
    rows, more = random_rows().split([40, 10])
    new = open_store(tmp_path / "new", dtype)
    old = open_store(tmp_path / "old", dtype)
    for store in (new, old):
        store.add(rows)
        store.add(rows, model_number=1)
    as_format_2(tmp_path / "old", suffix)
    for store in (new, open_store(tmp_path / "old", dtype)):
        store.add(more)
        store.add(more, model_number=1)
        store.add(torch.cat([rows, more]), model_number=2)
    old = open_store(tmp_path / "old", dtype)
    assert {path.name for path in (tmp_path / "old" / "model-0002").iterdir()} == {
        "model.json",
        f"rows.{suffix}",
        "scales.f32",
    }
    assert torch.equal(old.rows(), new.rows())
    queries = [random_queries(3) for _ in range(3)]
    for options in ({}, {"cosine": True}, {"cosine": True, "damping": 0.1}):
        torch.testing.assert_close(old.scores(queries, **options), new.scores(queries, **options))
    with pytest.raises(sw.StoreError, match=f"must have dtype='int8', as requested; found dtype='{dtype}'"):
        open_store(tmp_path / "old", "int8")


# --- a killed process ------------------------------------------------------------------------------------------------

FILL = """
import sys
sys.path.insert(0, {tests!r})
from plain_loop import batches, loss_fn, make
import samplewise as sw
from samplewise.attribution import projected_features, store_files

store_files.SHARD_BYTES = 7 * 16  # 7 rows of 16 int8
projected_features.SECONDS_PER_WRITE = 0.0  # after each batch
model, x, y = make(n=60)

class Loader:
    def __iter__(self):
        for number, batch in enumerate(batches(x, y, 3)):
            if number == {stop}:
                print("waiting", flush=True)
                sys.stdin.read()
            yield batch

sw.attribution.ProjectedStore({path!r}, 16, dtype="int8").fill(model, loss_fn, Loader())
"""


@pytest.mark.parametrize("stops", [(8,), pytest.param((4, 11, 17), marks=pytest.mark.slow)])
def test_a_fill_that_is_killed(tmp_path, stops):
    """Every sample has its row once, whatever the process was doing; its lock is no obstacle."""
    path = tmp_path / "store"
    model, x, y = make(n=60)
    for stop in stops:
        script = FILL.format(tests=str(Path(__file__).parents[1]), stop=stop, path=str(path))
        process = forks.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "waiting\n"
        store = open_store(path, "int8", dim=16)
        assert 0 < len(store) <= 3 * stop
        with pytest.raises(sw.StoreError, match=f"is in use by process {process.pid} on host '.*', since"):
            store.fill(model, loss_fn, batches(x, y, 5))
        with pytest.raises(sw.StoreError, match=f"is in use by process {process.pid} on host"):
            store.add(torch.ones(1, 16))
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=600) == -signal.SIGKILL
        process.stdin.close()
        process.stdout.close()
        # As if it had been killed in an append: rows that model.json does not count, the last of them incomplete.
        with open(path / "model-0000" / f"rows-{len(store) // 7:05d}.i8", "ab") as file:
            file.write(b"\x7f" * 25)
    store = open_store(path, "int8", dim=16)
    store.fill(model, loss_fn, batches(x, y, 5))
    whole = open_store(tmp_path / "whole", "int8", dim=16)
    whole.fill(model, loss_fn, batches(x, y, 60))
    assert len(store) == 60 and len(list((path / "model-0000").glob("rows-*"))) == 9
    wanted = whole.rows()
    assert ((store.rows() - wanted).abs() <= 1.01 * wanted.abs().amax(1, keepdim=True) / 127).all()
    assert not list(path.glob("*store.lock*"))


def test_memory_of_a_fill(tmp_path, monkeypatch):
    """At most the elements of one write are collected before they are on disk."""
    monkeypatch.setattr(projected_features, "ELEMENTS_PER_WRITE", 4 * 16)
    monkeypatch.setattr(projected_features, "SECONDS_PER_WRITE", 1e9)
    model, x, y = make(n=20)
    counts = []
    append = store_files.RowsFile.append
    monkeypatch.setattr(
        store_files.RowsFile, "append", lambda file, rows, *rest: counts.append(len(rows)) or append(file, rows, *rest)
    )
    open_store(tmp_path, dim=16).fill(model, loss_fn, batches(x, y, 3))
    assert counts == [6, 6, 6, 2]
