"""`Upload`: a run in an object store continues elsewhere, after a kill at any operation of the store, bit for bit."""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import forks
import fsspec
import pytest
import torch
import uploaded
from fsspec.implementations.memory import MemoryFileSystem
from small import X, Y, log, loss_fn, make, parameters
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.errors import CheckpointError, CheckpointWarning, PrivacyError

URL = "memory://bucket/runs/a"
UPDATES = 9


class Killed(BaseException):
    """The process ends here: what follows runs on another machine."""


class Objects(MemoryFileSystem):
    """Objects in memory. At operation number `stop`, counted from 1, `failure` is raised; also in all later ones."""

    cachable = False
    operations: ClassVar[list[str]] = []
    stop = 10**9
    failure: BaseException | None = None

    def _count(self, name):
        self.operations.append(name)
        random.random()  # as the libraries of stores do before they try again
        if self.failure is not None and len(self.operations) >= self.stop:
            raise self.failure

    def find(self, path, *args, **options):
        self._count(f"find {path}")
        return super().find(path, *args, **options)

    def _open(self, path, mode="rb", **options):
        self._count(f"{mode} {path}")
        return super()._open(path, mode, **options)

    def cat_file(self, path, *args, **options):
        self._count(f"cat {path}")
        return super().cat_file(path, *args, **options)

    def rm_file(self, path):
        self._count(f"rm {path}")
        return super().rm_file(path)


@pytest.fixture(autouse=True)
def objects():
    """An empty store."""
    fsspec.register_implementation("memory", Objects, clobber=True)
    fails()
    Objects.store.clear()
    Objects.pseudo_dirs[:] = [""]
    yield Objects
    fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)


def fails(stop=10**9, failure=None):
    Objects.operations, Objects.stop, Objects.failure = [], stop, failure


def noisy(model, batch):
    """It draws from Python's generator, as the libraries of stores do."""
    return loss_fn(model, batch) * random.uniform(0.9, 1.1)


def run(directory, updates=UPDATES, url=URL, exists="resume", every="2up", callbacks=()):
    checkpoint = sw.callbacks.ModelCheckpoint(every=every, best=1)
    uploads = [sw.callbacks.Upload(url)] if url else []
    callbacks = [sw.Ledger(), checkpoint, *callbacks, *uploads]
    random.seed(0)
    trainer = make(directory, callbacks, loss=noisy, log_every="1up", exists=exists)
    loader = DataLoader(sw.Indexed(TensorDataset(X, Y)), batch_size=7, shuffle=True)
    trainer.fit(loader, loader, updates=updates)
    return trainer


def end(trainer):
    """Everything that a run leaves behind, without times."""
    rows = sw.read_ledger(trainer.run).to_pylist()
    checkpoints = sorted(path.name for path in (trainer.run / "checkpoints").iterdir())
    return parameters(trainer).tolist(), log(trainer.run), repr(rows), checkpoints


def files(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return end(run(tmp_path_factory.mktemp("whole") / "run", url=None))


# --- continuing elsewhere --------------------------------------------------------------------------------------------


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_continues_on_another_machine(kind, tmp_path, whole):
    url = URL if kind == "memory" else f"file://{tmp_path}/store/run"
    for machine, updates in enumerate([2, 5, UPDATES]):
        trainer = run(tmp_path / f"machine {machine}", updates, url)
        assert trainer.step.counters.updates == updates
    assert end(trainer) == whole
    # The copy has the files of the run and no others: removed checkpoints are removed in the store.
    assert files(sw.download_run(url, tmp_path / "copy")) == files(trainer.run)
    assert not [path for path in (tmp_path / "store").rglob("*") if ".partial" in path.name or path.name == "run.lock"]


@pytest.mark.sweep(1 / 120)
@pytest.mark.parametrize("local", ["lost", "kept"])
@pytest.mark.parametrize("stop", range(1, 121))
def test_killed_at_any_operation_of_the_store(stop, local, tmp_path, whole):
    fails(stop, Killed())
    place = tmp_path / "first"
    try:
        run(place, 4)
        place = tmp_path / "second"  # killed while the run is fetched, or later
        run(place)
    except Killed:
        assert len(Objects.operations) == stop
    else:
        assert stop > len(Objects.operations) > 80  # no operation is missing in the range
    fails()
    assert end(run(place if local == "kept" else tmp_path / "third")) == whole


def test_a_checkpoint_in_the_store_is_complete_or_has_no_state(tmp_path):
    """Its state.json comes last; that of a checkpoint that is saved again goes first."""

    class Again:
        saved = 0

        def on_update(self, trainer, update):
            if update.index == 1:
                trainer.save()

        def state_dict(self):
            self.saved += 1  # the second checkpoint is another one
            return {"saved": self.saved}

        def load_state_dict(self, state):
            pass

    run(tmp_path / "a", 2, callbacks=[Again()], every="1up")
    folder = "/bucket/runs/a/checkpoints/update-000000002.ckpt"
    mentioned = [line for line in Objects.operations if folder in line and line.split()[0] != "find"]
    state, model, rank = (f"{folder}/{name}" for name in ("state.json", "model.safetensors", "rank-0.safetensors"))
    written = [f"wb {model}", f"wb {rank}", f"wb {state}"]
    assert [line for line in mentioned if line.split()[0] != "cat"] == [
        *written,
        *2 * [f"rm {state}", f"rm {rank}", f"rm {model}", *written],
    ]


def test_the_newer_run_is_resumed(tmp_path, whole):
    """A machine continues a run that has been on another one since."""
    run(tmp_path / "first", 4)
    (tmp_path / "first" / "notes.txt").write_text("mine")
    run(tmp_path / "second", 6)
    fails()
    trainer = run(tmp_path / "first", 6)  # nothing is left to do: it is fetched
    assert trainer.step.counters.updates == 6 and any("rb" in line and ".ckpt" in line for line in Objects.operations)
    assert (tmp_path / "first" / "notes.txt").read_text() == "mine"
    fails()
    assert end(run(tmp_path / "first")) == whole
    assert not any("rb" in line and "model.safetensors" in line for line in Objects.operations)  # it was the newer one


def test_files_are_sent_once(tmp_path):
    run(tmp_path / "a")
    written = [line.removeprefix("wb /bucket/runs/a/") for line in Objects.operations if line.startswith("wb")]
    once = [name for name in written if ".ckpt" in name or name.startswith("samples/") or name == "run.json"]
    assert len(once) == len(set(once)) > 12
    assert written.count("log.jsonl") == len([name for name in once if "update-" in name and "state" in name]) + 1


# --- processes that are killed ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["file", "s3"])
def store(request, tmp_path_factory):
    """URL of a directory, or of a bucket of an S3 server on this machine, and the options to access it."""
    if request.param == "file":
        yield f"file://{tmp_path_factory.mktemp('store')}", {}
        return
    pytest.importorskip(
        "moto.server", reason="pip install 's3fs' 'moto[s3]' flask flask-cors to test with an S3 server"
    )
    s3fs = pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)])
    try:
        while True:
            assert server.poll() is None, "the S3 server must start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        options = {
            "key": "testing",
            "secret": "testing",
            "endpoint_url": f"http://127.0.0.1:{port}",
            "default_block_size": 5 * 2**20,  # the smallest part of a multipart upload
        }
        s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("bucket")
        yield "s3://bucket", options
    finally:
        server.kill()
        server.wait()


def started(directory, url="", options=None, stop=0):
    """Exit code of a run in a process of its own."""
    command = [uploaded.__file__, str(directory), url, json.dumps(options or {}), str(stop)]
    return forks.run([sys.executable, *command], timeout=600).returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert started(directory) == 0
    return ended(directory)


def ended(directory):
    rows = repr(sw.read_ledger(directory).to_pylist())
    return [p.tolist() for p in torch.load(directory / "parameters.pt")], log(directory), rows


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(1, 5, 6), (8, 9, 16), (23, 17)])  # before and in the first checkpoint, and later
def test_killed_in_the_middle_of_an_upload(stops, store, tmp_path, uninterrupted):
    url, options = f"{store[0]}/{'-'.join(map(str, stops))}", store[1]
    for machine, stop in enumerate(stops):
        assert started(tmp_path / f"machine {machine}", url, options, stop) == -signal.SIGKILL
    assert started(tmp_path / "last", url, options) == 0
    assert ended(tmp_path / "last") == uninterrupted
    copy = sw.download_run(url, tmp_path / "copy", **options)
    expected = files(tmp_path / "last")
    del expected["parameters.pt"]  # written after the last upload
    assert files(copy) == expected


# --- a store that fails ----------------------------------------------------------------------------------------------


def test_training_goes_on_without_the_store(tmp_path, whole):
    """What is missing is sent with the next checkpoint; draws of the failing store do not change the training."""

    class Outage:
        def on_update(self, update):
            fails(1, ConnectionError("no route")) if 3 <= update.index < 7 else fails()

    with pytest.warns(CheckpointWarning) as warned:
        trainer = run(tmp_path / "a", callbacks=[Outage()])
    texts = [str(warning.message) for warning in warned]
    assert len(texts) == 2 and all(
        text.startswith(
            "the store of a run must be writable; found ConnectionError at memory://bucket/runs/a: no route."
        )
        and text.endswith("Training goes on; the next checkpoint is uploaded with all that is missing now.")
        for text in texts
    )
    assert end(trainer) == whole
    assert end(run(tmp_path / "b")) == whole


def test_the_last_upload_must_succeed(tmp_path, whole):
    class Outage:
        def on_update(self, update):
            if update.index == 8:
                fails(1, ConnectionError("no route"))

    message = (
        "must be writable; found ConnectionError .* network. .*/a is complete: the next fit.resume=True. uploads it."
    )
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match=message):
        run(tmp_path / "a", callbacks=[Outage()])
    fails()
    run(tmp_path / "a")  # the training has ended already: it is uploaded
    assert end(run(tmp_path / "b")) == whole


def test_a_store_that_cannot_be_reached_at_the_start(tmp_path):
    fails(1, PermissionError("403"))
    with pytest.raises(
        CheckpointError, match=r"must be accessible when fit starts; found PermissionError .*: 403. Check"
    ):
        run(tmp_path / "a")
    assert not (tmp_path / "a" / "checkpoints").exists() or not any((tmp_path / "a" / "checkpoints").iterdir())


def test_a_damaged_checkpoint_is_left_out(tmp_path, whole):
    run(tmp_path / "a", 6)
    newest = "/bucket/runs/a/checkpoints/update-000000006.ckpt/model.safetensors"
    content = bytearray(Objects.store[newest].getvalue())
    content[-1] ^= 1
    Objects().pipe_file(newest, bytes(content))
    with pytest.warns(CheckpointWarning, match=r"update-000000006.* It is left out."):
        trainer = run(tmp_path / "b")
    assert end(trainer) == whole


def test_no_readable_checkpoint(tmp_path):
    run(tmp_path / "a", 1)
    Objects().pipe_file("/bucket/runs/a/checkpoints/update-000000001.ckpt/state.json", b"{}")
    message = "must have a readable checkpoint; found none among 1 in memory://bucket/runs/a. Restore one"
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match=message):
        run(tmp_path / "b")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", ["error", "overwrite", "new"])
def test_a_new_run_needs_an_empty_store(exists, tmp_path):
    run(tmp_path / "a", 2)
    message = (
        "the store of a new run must be empty; found a run in memory://bucket/runs/a. Use Trainer.*exists='resume'"
    )
    directory = tmp_path / ("a" if exists == "overwrite" else "b")
    with pytest.raises(CheckpointError, match=message):
        run(directory, exists=exists)
    assert end(run(tmp_path / "a", 2))  # it was not touched


def test_a_local_run_in_the_way_leaves_the_store_empty(tmp_path):
    run(tmp_path / "a", 2, url=None)
    with pytest.raises(CheckpointError, match="a new run must have an unused directory"):
        run(tmp_path / "a", exists="error")
    assert not Objects.store
    run(tmp_path / "a", exists="overwrite")
    assert json.loads(Objects.store["/bucket/runs/a/upload.json"].getvalue())["format_version"] == 1


def test_other_files_in_the_store_are_not_touched(tmp_path):
    Objects().pipe_file("/bucket/runs/a/photo.jpg", b"1")
    with pytest.raises(CheckpointError, match=r"must be empty; found 1 file of another kind in .* Use another URL."):
        run(tmp_path / "a")
    assert list(Objects.store) == ["/bucket/runs/a/photo.jpg"]


def test_run_directory_and_store_have_the_same_run(tmp_path):
    run(tmp_path / "a", 4)
    run(tmp_path / "b", 2, url=None)
    with pytest.raises(CheckpointError, match=r"must have the same run; found different ones in .*b and memory://"):
        run(tmp_path / "b")


def test_one_process_writes_to_a_store(tmp_path):
    class Other:
        def on_update(self, update):
            if update.index == 4:
                run(tmp_path / "b", 6)

    with pytest.raises(CheckpointError, match="by one process at a time; found that another one has started to write"):
        run(tmp_path / "a", callbacks=[Other()])
    assert run(tmp_path / "c", 6).step.counters.updates == 6  # that of the other one


def test_version_of_the_store(tmp_path):
    run(tmp_path / "a", 2)
    Objects().pipe_file("/bucket/runs/a/upload.json", b'{"format_version": 2}')
    message = "upload.json in memory://bucket/runs/a must have format version 1; found 2, .* newer"
    with pytest.raises(CheckpointError, match=message):
        run(tmp_path / "a")


def test_a_private_run_is_refused(tmp_path):
    privacy = sw.Privacy(
        noise_multiplier=1.0, delta=1e-3, updates=2, sample_rate=0.25, clip=sw.clip(0.5), accountant="rdp"
    )
    model = torch.nn.Linear(6, 3)
    step = sw.Step(model, sw.sgd(0.1), torch.nn.CrossEntropyLoss(), privacy=privacy)
    trainer = sw.Trainer(step, tmp_path / "a", [sw.callbacks.Upload(URL)], progress=False, device="cpu")
    with pytest.raises(PrivacyError, match="Upload must not be used with privacy=, because updates after the last"):
        trainer.fit(privacy.loader(TensorDataset(X, Y)))
    assert not Objects.store


def test_arguments(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"url must be a URL such as 's3://bucket/runs/name'; found 'runs/a'."):
        sw.callbacks.Upload("runs/a")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"s3://b/a needs a package .*: pip install 'samplewise\[remote\]' for s3://"):
        sw.callbacks.Upload("s3://b/a")
    with pytest.raises(ValueError, match="to one store at most; found 2 Upload callbacks"):
        make(tmp_path / "a", [sw.callbacks.Upload(URL), sw.callbacks.Upload(URL)])
    with pytest.raises(CheckpointError, match="Upload needs a run directory; found none"):
        make(None, [sw.callbacks.Upload(URL)]).fit([(X, Y)], epochs=1)
    make(tmp_path / "a", [sw.callbacks.Upload(URL)]).fit([(X, Y)], epochs=1, fast_dev_run=True)
    assert not Objects.store and not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "read",
    [
        sw.load_checkpoint,
        sw.read_ledger,
        sw.dynamics,
        lambda path: sw.load_checkpoint(Path(path)),
        lambda path: make(path),
        lambda path: sw.Ledger(path),
    ],
)
def test_a_url_is_not_a_local_path(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "must be that of a local file or directory; found the URL 's3:/.*b/a'. .* sw.download_run"
    with pytest.raises(ValueError, match=message):
        read("s3://b/a")
    assert not any(tmp_path.iterdir())


def test_download(tmp_path):
    first = run(tmp_path / "a", 4)
    copy = sw.download_run(URL, tmp_path / "copy")
    assert copy == tmp_path / "copy" and sw.read_ledger(copy).equals(sw.read_ledger(first.run))
    assert torch.equal(sw.load_checkpoint(copy)["model"]["0.weight"], first.model[0].weight)
    with pytest.raises(CheckpointError, match=r"must be downloaded to an empty directory; found .*copy. Choose"):
        sw.download_run(URL, copy)
    with pytest.raises(CheckpointError, match=r"has uploaded; found no upload.json in memory://bucket/nothing. Check"):
        sw.download_run("memory://bucket/nothing", tmp_path / "other")


def test_names_in_the_store_lead_nowhere_else(tmp_path):
    run(tmp_path / "a", 2)
    for name in ("../evil", "a/../../evil", ".hidden", "a//evil"):
        Objects.store[f"/bucket/runs/a/{name}"] = Objects.store["/bucket/runs/a/run.json"]
    expected = files(tmp_path / "a")
    assert files(sw.download_run(URL, tmp_path / "deep" / "copy")) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "deep"]
