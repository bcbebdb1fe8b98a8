"""`Upload` on two ranks: rank 0 sends the files of all; a run continues from the store with another number of ranks."""

import json
import warnings

import torch
from test_loop_trainer import loader, log, trainer

import samplewise as sw
from samplewise.parallel import collectives


class Breaks:
    """The store cannot be written to: its directory becomes a file."""

    def __init__(self, store):
        self.store = store

    def on_update(self, update):
        if update.index == 2 and collectives.rank() == 0:
            self.store.rename(self.store.with_name("moved"))
            self.store.write_text("in the way")


def trained(run, store, updates, breaks=False):
    callbacks = [sw.callbacks.ModelCheckpoint(every="2up"), *([Breaks(store)] if breaks else [])]
    callbacks += [sw.callbacks.Upload(f"file://{store}")] if store else []
    made = trainer(run, callbacks, dropout=0.3, log_every="1up", exists="resume")
    made.fit(loader(), updates=updates)
    return torch.nn.utils.parameters_to_vector(made.model.parameters()).tolist()


def test_a_run_of_two_ranks_continues_elsewhere(two, tmp_path):
    store = tmp_path / "store"
    expected = two.run(trained, tmp_path / "whole", None, 7)
    two.run(trained, tmp_path / "first", store, 4)
    assert two.run(trained, tmp_path / "second", store, 7) == expected
    assert log(tmp_path / "second") == log(tmp_path / "whole")
    newest = store / "checkpoints" / "update-000000007.ckpt"
    assert sorted(path.name for path in newest.iterdir()) == [
        *("model.safetensors", "rank-0.safetensors", "rank-1.safetensors", "state.json"),
    ]
    trained(tmp_path / "alone", store, 9)
    copy = sw.download_run(f"file://{store}", tmp_path / "copy")
    assert sw.load_checkpoint(copy)["trainer"]["epoch"] == 2 and json.loads((copy / "run.json").read_text())


def without_warnings(*arguments):
    with warnings.catch_warnings(action="ignore"):
        trained(*arguments)


def test_all_ranks_raise_if_the_last_upload_fails(two, tmp_path):
    """The one of the checkpoint before it is a warning."""
    first, second = two.errors(without_warnings, tmp_path / "run", tmp_path / "store", 4, True)
    message = "UploadFailed: the store of a run must be writable; found "
    assert first.startswith(message)
    assert second.startswith("DistributedError: rank 0 of 2 failed: " + message)
    assert (tmp_path / "run" / "checkpoints" / "update-000000004.ckpt").exists()
