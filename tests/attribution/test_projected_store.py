"""Projections on disk: rows, search, interrupted and invalid stores."""

import contextlib
import json
import os
import shutil
import sys

import forks
import pytest
import torch
from plain_loop import batches, loss_fn, make

import samplewise as sw

HALF = 2**-10  # of the largest entry of a row: twice the rounding error of float16


def filled(path, n=20, dim=16, size=6):
    model, x, y = make(n=n)
    store = sw.attribution.ProjectedStore(path, dim)
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
    again = sw.attribution.ProjectedStore(tmp_path / "store", 16)
    assert torch.equal(again.rows(), store.rows())
    assert (tmp_path / "store" / "model-0000" / "rows-00000.f16").stat().st_size == 20 * 16 * 2


@pytest.mark.parametrize("length", [1e-30, 1.0, 1e30])
def test_norms_beyond_the_range_of_float16(tmp_path, length):
    rows = torch.randn(4, 8) * length
    store = sw.attribution.ProjectedStore(tmp_path, 8)
    store.add(rows)
    assert_close(store.rows(), rows)


def test_a_row_of_zeros(tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path, 8)
    store.add(torch.zeros(2, 8))
    assert not store.rows().any()


@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_search_is_exact(tmp_path, chunk):
    store, model, x, y, _ = filled(tmp_path)
    queries = sw.gradients(loss_fn(model, (x[:3] + 0.1, y[:3])), model)
    products = queries.project(16).float() @ store.rows().T
    values, places = store.search(queries, k=5, chunk_size=chunk)
    wanted = products.topk(5)
    torch.testing.assert_close(values, wanted.values)
    assert torch.equal(places, wanted.indices)
    assert store.search(queries, k=100)[1].shape == (3, 20)


def test_the_earlier_of_equal_products_comes_first(tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path, 2)
    store.add(torch.tensor([[1.0, 0.0]]).expand(9, 2))
    assert store.search(torch.ones(1, 2), k=4, chunk_size=2)[1].tolist() == [[0, 1, 2, 3]]


def test_an_empty_store_finds_nothing(tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path, 4)
    assert store.rows().shape == (0, 4)
    assert store.search(torch.ones(2, 4))[0].shape == (2, 0)


def test_appending(tmp_path):
    store, model, x, y, wanted = filled(tmp_path)
    sw.attribution.ProjectedStore(tmp_path, 16).add(sw.gradients(loss_fn(model, (x[:2], y[:2])), model))
    assert_close(sw.attribution.ProjectedStore(tmp_path, 16).rows(), torch.cat([wanted, wanted[:2]]))
    assert len(store) == 20  # the store that was opened first


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("taken", [0, 4, 7, 12, 19])
def test_an_interrupted_fill_can_be_continued(tmp_path, taken):
    """The missing samples are added, also with another batch size."""
    model, x, y = make(n=20)
    store = sw.attribution.ProjectedStore(tmp_path, 16)
    if taken:
        store.fill(model, loss_fn, [(x[:taken], y[:taken])])
    seen = []

    def counting(model, batch):
        seen.append(len(batch[0]))
        return loss_fn(model, batch)

    again = sw.attribution.ProjectedStore(tmp_path, 16)
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
    again = sw.attribution.ProjectedStore(tmp_path, 16)
    assert_close(again.rows(), wanted)
    again.add(wanted[:2])
    assert_close(sw.attribution.ProjectedStore(tmp_path, 16).rows(), torch.cat([wanted, wanted[:2]]))
    assert (tmp_path / "model-0000" / "rows-00000.f16").stat().st_size == 22 * 16 * 2


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes(tmp_path):
    script = f"""
import os, torch
import samplewise as sw
store = sw.attribution.ProjectedStore({str(tmp_path)!r}, 8)
for k in range(5):
    store.add(torch.full((3, 8), k + 1.0))
real = os.replace
os.replace = lambda *a: os._exit(9)
store.add(torch.full((3, 8), 99.0))
"""
    assert forks.run([sys.executable, "-c", script], timeout=600).returncode == 9
    store = sw.attribution.ProjectedStore(tmp_path, 8)
    assert store.rows()[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_another_size_or_seed(tmp_path):
    filled(tmp_path)
    with pytest.raises(sw.StoreError, match=r"must have dim=32, as requested; found dim=16. Open it with dim=16"):
        sw.attribution.ProjectedStore(tmp_path, 32)
    with pytest.raises(sw.StoreError, match=r"must have seed=1, as requested; found seed=0. Open it with seed=0"):
        sw.attribution.ProjectedStore(tmp_path, 16, seed=1)


@pytest.mark.parametrize("of_older_version", [False, True])
def test_rows_of_another_projection(tmp_path, of_older_version):
    model, x, y = make(n=6)
    dense = {"projection": "dense", "dtype": "float32"}
    store = sw.attribution.ProjectedStore(tmp_path, 16, **dense)
    store.fill(model, loss_fn, batches(x, y, 3))
    if of_older_version:  # samplewise 0.3 had dense projections, and wrote no name
        path = tmp_path / "store.json"
        settings = json.loads(path.read_text())
        assert settings.pop("projection") == "dense"
        path.write_text(json.dumps(settings))
    message = (
        r"must have projection='factored', as requested; found projection='dense'. Open it with projection='dense'"
    )
    with pytest.raises(sw.StoreError, match=message):
        sw.attribution.ProjectedStore(tmp_path, 16, dtype="float32")
    with pytest.raises(sw.StoreError, match=message):
        sw.trak(model, sw.attribution.margin, batches(x, y, 3), batches(x, y, 3), 16, directory=tmp_path)
    again = sw.attribution.ProjectedStore(tmp_path, 16, **dense)
    assert_close(again.rows(), sw.gradients(loss_fn(model, (x, y)), model).project(16, method="dense").float())
    with pytest.raises(ValueError, match=r"projection must be 'factored' or 'dense'; found 'sparse'\."):
        sw.attribution.ProjectedStore(tmp_path / "new", 16, projection="sparse")


@pytest.mark.parametrize("name", ["rows-00000.f16", "scales.f32"])
def test_a_truncated_file(tmp_path, name):
    filled(tmp_path)
    path = tmp_path / "model-0000" / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(sw.StoreError, match=f"must have {size} bytes for 20 samples; found {size - 1}"):
        sw.attribution.ProjectedStore(tmp_path, 16)
    path.unlink()
    with pytest.raises(sw.StoreError, match=f"must have {size} bytes for 20 samples; found 0"):
        sw.attribution.ProjectedStore(tmp_path, 16)


INDEX = '{"count": COUNT, "model": "", "weighted": false, "scaling": "", "layers": LAYERS}'
NO_COUNTS = [INDEX.replace("COUNT", count) for count in ("-1", "NaN", "true", "1.0", "null", "9" * 5000)]
NO_LAYERS = [INDEX.replace("COUNT", "1").replace("LAYERS", layers) for layers in ("3", "[1]", '[["a", "b"]]')]
NO_JSON = ["", "{", "[]", "{}", "[" * 100_000]


@pytest.mark.parametrize("text", [*NO_JSON, *NO_COUNTS, *NO_LAYERS], ids=lambda text: text[:90])
def test_an_invalid_index_of_a_model(tmp_path, text):
    filled(tmp_path)
    (tmp_path / "model-0000" / "model.json").write_text(text.replace("LAYERS", "[]"))
    with pytest.raises(sw.StoreError, match=r"model\.json must be a valid index of a store; found other content"):
        sw.attribution.ProjectedStore(tmp_path, 16)


@pytest.mark.parametrize("text", [*NO_JSON, '{"format": 2, "dim": "16"}'], ids=lambda text: text[:70])
def test_an_invalid_index(tmp_path, text):
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(sw.StoreError, match="must be a valid index of a store; found other content"):
        sw.attribution.ProjectedStore(tmp_path, 16)


NO_BLOCKS = ['[["a", 8]]', '[["a", 8], ["a", 8]]', '[["a", 16.0]]', '[["a", -1], ["b", 17]]', "[[1, 16]]", "[[[], 16]]"]


@pytest.mark.parametrize("layers", NO_BLOCKS)
def test_an_index_with_forged_layers(tmp_path, layers):
    filled(tmp_path)
    (tmp_path / "model-0000" / "model.json").write_text(INDEX.replace("COUNT", "1").replace("LAYERS", layers))
    with pytest.raises(sw.StoreError, match=r"model\.json must be a valid index of a store; found other content"):
        sw.attribution.ProjectedStore(tmp_path, 16)


def as_file(path):
    shutil.rmtree(path)
    path.write_text("rows")


def as_directory(path):
    path.unlink()
    path.mkdir()


def as_link_to_nothing(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to("nowhere")


def renamed(path):
    path.rename(path.with_name("model-0001"))


DAMAGES = {
    "model-0000 is a file": (
        as_file,
        "model-0000",
        "in the directory model-0000; found model-0000, which is no direct",
    ),
    "model-0000 is a broken link": (as_link_to_nothing, "model-0000", "found model-0000, which is no directory"),
    "model-0000 is missing": (renamed, "model-0000", "rows of model 0 in the directory model-0000; found model-0001"),
    "no model.json": (os.unlink, "model-0000/model.json", r"model\.json must be a valid index of a store"),
    "model.json is a directory": (as_directory, "model-0000/model.json", r"model\.json must be a valid index"),
    "model.json is binary": (lambda path: path.write_bytes(b"\xff\xfe{}"), "model-0000/model.json", "valid index"),
    "rows are a directory": (
        as_directory,
        "model-0000/rows-00000.f16",
        "must have 640 bytes for 20 samples; found a direct",
    ),
    "rows are a broken link": (
        as_link_to_nothing,
        "model-0000/rows-00000.f16",
        "must have 640 bytes for 20 samples; found 0",
    ),
    "scales are a directory": (as_directory, "model-0000/scales.f32", "must have 80 bytes for 20 samples; found a dir"),
    "no store.json": (os.unlink, "store.json", r"must have a store\.json; found rows of models without it"),
    "store.json is a directory": (as_directory, "store.json", r"store\.json must be a valid index of a store"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_store(tmp_path, name):
    damage, place, message = DAMAGES[name]
    store, model, x, y, _ = filled(tmp_path)
    damage(tmp_path / place)
    with pytest.raises(sw.StoreError, match=message):
        sw.attribution.ProjectedStore(tmp_path, 16)
    for write in (lambda: store.add(torch.ones(1, 16)), lambda: store.fill(model, loss_fn, batches(x, y, 6))):
        if name != "no store.json":
            with pytest.raises(sw.StoreError, match=message):
                write()
        assert not list(tmp_path.glob("*store.lock*"))


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "store").write_text("x")
    with pytest.raises(sw.StoreError, match=r"must be a directory that can be written to; found: .*store"):
        sw.attribution.ProjectedStore(tmp_path / "store", 4)


def test_a_model_whose_process_was_killed_before_its_first_row(tmp_path):
    *_, wanted = filled(tmp_path)
    folder = tmp_path / "model-0001"
    folder.mkdir()
    for name in (".model.json.partial", None):
        again = sw.attribution.ProjectedStore(tmp_path, 16)
        assert again.models == 1
        if name is not None:
            (folder / name).write_text("{")
    again.add(wanted, model_number=1)
    assert sw.attribution.ProjectedStore(tmp_path, 16).models == 2


@pytest.mark.parametrize("content", ["nan", "fraction", "directory", "cut off", "more rows"])
def test_a_damaged_gram_matrix_is_computed_again(tmp_path, content):
    store, *_, wanted = filled(tmp_path)
    expected = store.search(wanted[:2], damping=0.1)
    path = tmp_path / "model-0000" / "gram.f64"
    saved = torch.from_file(str(path), shared=True, size=16 * 16 + 1, dtype=torch.float64)
    if content == "directory":
        as_directory(path)
    elif content == "cut off":
        os.truncate(path, 100)
    elif content == "nan":
        saved[5] = torch.nan
    else:
        saved[0] = 2.5 if content == "fraction" else 21
    for found, wanted_result in zip(store.search(wanted[:2], damping=0.1), expected, strict=True):
        assert torch.equal(found, wanted_result)


# ----------------------------------------------------------------------------------------------------------- writers

IN_USE = "a store must be used by one writer at a time; found that .* is in use by "
CHANGED = "samples must be added to the store in .* by one writer; found that another one has changed it since it was "


def test_two_writers_in_turn(tmp_path):
    """Each has opened the store when it was empty: the second one would write over the rows of the first."""
    stores = [sw.attribution.ProjectedStore(tmp_path, 4) for _ in range(2)]
    stores[0].add(torch.ones(3, 4))
    with pytest.raises(sw.StoreError, match=f"{CHANGED}opened here: it has 3 rows in place of 0. Nothing was added"):
        stores[1].add(torch.zeros(5, 4))
    assert torch.equal(sw.attribution.ProjectedStore(tmp_path, 4).rows(), torch.ones(3, 4))
    again = sw.attribution.ProjectedStore(tmp_path, 4)
    again.add(torch.zeros(5, 4))
    with pytest.raises(sw.StoreError, match=f"{CHANGED}opened here: it has 8 rows in place of 3"):
        stores[0].add(torch.ones(1, 4))
    assert len(sw.attribution.ProjectedStore(tmp_path, 4)) == 8


def test_a_second_writer_of_another_model(tmp_path):
    stores = [sw.attribution.ProjectedStore(tmp_path, 4) for _ in range(2)]
    for store in stores:
        with contextlib.suppress(sw.StoreError):
            store.add(torch.ones(3, 4))
    with pytest.raises(sw.StoreError, match=CHANGED):
        stores[1].add(torch.ones(3, 4), model_number=0)
    stores[0].add(torch.ones(2, 4), model_number=1)
    assert [len(file) for file in sw.attribution.ProjectedStore(tmp_path, 4)._files] == [3, 2]


class During:
    """Batches of which the second one is made while another writer tries to write."""

    def __init__(self, data, attempt):
        self.data = data
        self.attempt = attempt

    def __iter__(self):
        yield self.data[0]
        self.attempt()
        yield from self.data[1:]


@pytest.mark.parametrize("kind", ["add", "fill", "create"])
def test_a_second_writer_during_fill(tmp_path, kind):
    model, x, y = make(n=20)
    store = sw.attribution.ProjectedStore(tmp_path, 16)
    other = sw.attribution.ProjectedStore(tmp_path, 16)
    messages = []

    def attempt():
        if kind == "create":
            (tmp_path / "store.json").rename(tmp_path / "aside")
        write = {
            "add": lambda: other.add(torch.ones(1, 16)),
            "fill": lambda: other.fill(model, loss_fn, batches(x, y, 6)),
            "create": lambda: sw.attribution.ProjectedStore(tmp_path, 16),
        }[kind]
        with pytest.raises(sw.StoreError, match=IN_USE) as refused:
            write()
        if kind == "create":
            (tmp_path / "aside").rename(tmp_path / "store.json")
        messages.append(str(refused.value))

    store.fill(model, loss_fn, During(batches(x, y, 6), attempt))
    assert len(messages) == 1 and f"this process, process {os.getpid()} on host" in messages[0]
    assert messages[0].endswith("Wait until that writer has ended or stop it, or choose another directory.")
    wanted = sw.gradients(loss_fn(model, (x, y)), model).project(16).float()
    assert_close(sw.attribution.ProjectedStore(tmp_path, 16).rows(), wanted)
    assert other.fill(model, loss_fn, batches(x, y, 6)) == 0 and len(other) == 20  # it reads what was written
    assert not list(tmp_path.glob("*store.lock*"))


def test_a_lost_lock_ends_fill_before_it_writes(tmp_path):
    model, x, y = make(n=20)
    store = sw.attribution.ProjectedStore(tmp_path, 16)
    data = During(batches(x, y, 6), lambda: (tmp_path / "store.lock").unlink())
    with pytest.raises(sw.StoreError, match=r"a writer must hold the lock of its store .* then open the store again\."):
        store.fill(model, loss_fn, data)
    assert len(sw.attribution.ProjectedStore(tmp_path, 16)) == 0


def test_processes_that_write_at_once(tmp_path):
    """Every row of a process that reports success is in the store."""
    sw.attribution.ProjectedStore(tmp_path / "store", 4)
    script = """
import sys, torch
import samplewise as sw
number, path = float(sys.argv[1]), sys.argv[2]
added = 0
for _ in range(5):
    try:
        sw.attribution.ProjectedStore(path, 4).add(torch.full((2, 4), number))
        added += 1
    except sw.StoreError as why:
        assert "one writer" in str(why), why
open(f"{path}-{number:g}", "w").write(str(added))
"""
    commands = [[sys.executable, "-c", script, str(number), str(tmp_path / "store")] for number in (1, 2)]
    processes = [forks.Popen(command) for command in commands]
    assert [process.wait(timeout=600) for process in processes] == [0, 0]
    rows = sw.attribution.ProjectedStore(tmp_path / "store", 4).rows()
    added = {number: int((tmp_path / f"store-{number}").read_text()) for number in (1, 2)}
    assert {number: int((rows[:, 0] == number).sum()) for number in added} == {n: 2 * k for n, k in added.items()}
    assert len(rows) == 2 * sum(added.values()) > 0


def test_the_lock_of_a_killed_writer_is_no_obstacle(tmp_path):
    script = f"""
import os, torch
import samplewise as sw
store = sw.attribution.ProjectedStore({str(tmp_path)!r}, 8)
store.add(torch.ones(3, 8))
store._lock.acquire()
os._exit(9)
"""
    assert forks.run([sys.executable, "-c", script], timeout=600).returncode == 9
    assert (tmp_path / "store.lock").exists()
    store = sw.attribution.ProjectedStore(tmp_path, 8)
    store.add(torch.ones(1, 8))
    assert len(store) == 4 and not list(tmp_path.glob("*store.lock*"))


def test_another_format(tmp_path):
    filled(tmp_path)
    index = tmp_path / "store.json"
    for other in (1, 4):
        index.write_text(json.dumps({**json.loads(index.read_text()), "format": other}))
        with pytest.raises(sw.StoreError, match=f"must have format 3; found {other}. Use the version"):
            sw.attribution.ProjectedStore(tmp_path, 16)


def test_other_samples_than_those_of_the_store(tmp_path):
    store, model, x, y, _ = filled(tmp_path)
    with pytest.raises(sw.StoreError, match="needs the same samples, in the same order, and the same function; found"):
        store.fill(model, loss_fn, [(x.flip(0), y.flip(0))])
    assert len(store) == 20


def test_bad_arguments(tmp_path):
    store = sw.attribution.ProjectedStore(tmp_path, 4)
    with pytest.raises(ValueError, match="dim must be an integer, 1 or more; found 0"):
        sw.attribution.ProjectedStore(tmp_path, 0)
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
        store.search(torch.tensor([[1e38, 1e38, 0.0, 0.0]]))
    for options in ({"k": 0}, {"k": -1}, {"chunk_size": 0}, {"k": 2.0}):
        (name, found), *_ = options.items()
        with pytest.raises(ValueError, match=f"{name} must be an integer, 1 or more; found {found}"):
            store.search(torch.zeros(1, 4), **options)
    with pytest.raises(TypeError, match=r"rows must be Gradients or a real tensor \(B, 4\); found list"):
        store.add([[0.0] * 4])
    with pytest.raises(TypeError, match=r"rows must be Gradients or a real tensor \(B, 4\); found torch.complex64"):
        store.add(torch.zeros(1, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"seed must be an integer; found 1\.5"):
        sw.attribution.ProjectedStore(tmp_path, 4, seed=1.5)
    with pytest.raises(ValueError, match="dtype must be one of float16, float32, int8; found 'int4'"):
        sw.attribution.ProjectedStore(tmp_path, 4, dtype="int4")
