"""A folder that several ranks write while the training goes on: whole, or passed over; read by any number of them."""

import re
import threading

import pytest
import torch
from test_loop_trainer import going_on, loader, parameters, trainer
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver

from samplewise import ranks
from samplewise.errors import CheckpointError, CheckpointWarning
from samplewise.loop import store
from samplewise.loop.callbacks import ModelCheckpoint


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# ------------------------------------------------------------------------------------------- while the training goes on


class Releases:
    """Lets what is being saved go on after some update, and notes what was there before."""

    def __init__(self, run, after, gate):
        self.run, self.after, self.gate, self.there = run, after, gate, []

    def on_update(self, update):
        if update.index == self.after:
            self.there = names(self.run)
            self.gate.set()


def slowly(run):
    gate, save = threading.Event(), state_dict_saver.save

    def held_up(*given, **more):
        assert gate.wait(60)
        return save(*given, **more)

    state_dict_saver.save = held_up
    try:
        releases = Releases(run, 2, gate)
        made = trainer(run, [releases, ModelCheckpoint(every="2up")])
        made.fit(loader(), updates=4)
    finally:
        state_dict_saver.save = save
    return releases.there


def test_training_goes_on_while_a_checkpoint_is_written(two, tmp_path):
    there = two.run(slowly, tmp_path / "run")
    assert there == [[".update-000000002.ckpt.partial"]] * 2  # after three updates it was still being written
    assert names(tmp_path / "run") == ["update-000000002.ckpt", "update-000000004.ckpt"]
    inside = {path.name for path in (tmp_path / "run" / "checkpoints" / "update-000000004.ckpt").iterdir()}
    assert inside == {".metadata", "__0_0.distcp", "__1_0.distcp", "rest.ckpt"}


def as_it_was(run):
    """The parameters after two updates, and what is in the checkpoint of that moment."""
    kept = []

    class Keeps:
        def on_update(self, trainer, update):
            if update.index == 1:
                kept.append(parameters(trainer).clone())

    trainer(run, [Keeps(), ModelCheckpoint(every="2up")]).fit(loader(), updates=3)
    saved = store.read(run / "checkpoints" / "update-000000002.ckpt")["model"]
    return torch.equal(kept[0], torch.cat([tensor.flatten() for tensor in saved.values()]))


def test_what_is_saved_is_the_state_of_its_moment(two, tmp_path):
    assert two.run(as_it_was, tmp_path / "run") == [True, True]


# ---------------------------------------------------------------------------------------------------------- failures


def failing(run, where):
    def fail(*given, **more):
        raise OSError("no space left")

    place, name, rank = {"data": (FileSystemWriter, "write_data", 1), "rest": (store, "write", 0)}[where]
    original = getattr(place, name)
    if ranks.rank() == rank:
        setattr(place, name, fail)
    try:
        trainer(run, [ModelCheckpoint(every="2up")]).fit(loader(), updates=4)
    finally:
        setattr(place, name, original)


@pytest.mark.parametrize("where", ["data", "rest"])
def test_a_checkpoint_that_cannot_be_written_is_told_of_on_all_ranks(where, two, tmp_path):
    for message in two.errors(failing, tmp_path / "run", where):
        assert message.startswith("CheckpointError: a checkpoint must be written by all ranks, which failed: ")
        assert "no space left" in message
        assert message.endswith("see to the permissions, and resume: the checkpoints before it are whole.")
    assert not any(name.endswith(".ckpt") for name in names(tmp_path / "run"))
    two.run(going_on, tmp_path / "run", 2)  # what is left of it is in nobody's way
    assert names(tmp_path / "run") == ["update-000000002.ckpt"]


class Odd(torch.optim.SGD):
    """Has another state on each rank."""

    def state_dict(self):
        return {**super().state_dict(), "rank": ranks.rank()}


def odd(run):
    made = trainer(run)
    made.step.optimizer.__class__ = Odd
    made.fit(loader(), updates=1)


def test_states_that_differ_are_not_saved_as_one(two, tmp_path):
    for error in two.errors(odd, tmp_path / "run"):
        assert error.startswith(
            "CheckpointError: model, optimizer and loss must have states of the same form on all ranks, of which each "
            "saves a part; found that they differ. Make them alike on every rank;"
        )


@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata", "rest.ckpt"])
@pytest.mark.parametrize("harm", ["changed", "cut", "gone"])
def test_a_damaged_folder_is_passed_over(file, harm, saved, tmp_path):
    newest = tmp_path / "checkpoints" / "update-000000004.ckpt"
    for path in saved.iterdir():
        (tmp_path / "checkpoints" / path.name).mkdir(parents=True)
        for each in path.iterdir():
            (tmp_path / "checkpoints" / path.name / each.name).write_bytes(each.read_bytes())
    content = (newest / file).read_bytes()
    middle = len(content) // 2
    if harm == "gone":
        (newest / file).unlink()
    else:
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        (newest / file).write_bytes(changed if harm == "changed" else content[:middle])
    with pytest.warns(CheckpointWarning, match="Going on to the checkpoint before it."):
        state, path = store.Checkpoints(tmp_path / "checkpoints").latest()
    assert path.name == "update-000000002.ckpt" and state["step"]["counters"]["updates"] == 2


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    run = tmp_path_factory.mktemp("saved") / "run"
    two.run(going_on, run, 4)
    return run / "checkpoints"


def carrying(run, every):
    made = trainer(run, [ModelCheckpoint(every=every)])
    made.step.tail = "carry"
    return made.fit(loader(), epochs=1), made.step.counters.updates


def test_a_window_that_ranks_have_begun_is_not_saved(two, tmp_path):
    message = (
        "CheckpointError: an open window must be saved as sums; found one that 2 ranks have begun. Use tail='update' "
        "or 'drop', or save in the middle of epochs: every='100up'."
    )
    assert two.errors(carrying, tmp_path / "epochs", "1ep") == [message] * 2
    assert two.run(carrying, tmp_path / "updates", "2up") == [("1 epoch is done", 3)] * 2
    assert names(tmp_path / "updates") == ["update-000000002.ckpt"]


def test_a_window_that_one_process_has_begun_is_ended_by_it(two, tmp_path):
    made = trainer(tmp_path / "run", [ModelCheckpoint(every="1ep")])
    made.step.tail = "carry"
    made.fit(loader(), epochs=1)
    message = (
        "CheckpointError: a window that one process has begun must be ended by it; found 2 ranks, and a checkpoint in "
        "the middle of one. Resume with one process until the next checkpoint."
    )
    assert two.errors(resuming, tmp_path / "run") == [message] * 2


def resuming(run):
    trainer(run).fit(loader(), epochs=2, resume=True)


def elsewhere(run):
    trainer(run / str(ranks.rank())).fit(loader(), updates=1)
    trainer(run / str(ranks.rank())).fit(loader(), updates=2, resume=True)


def test_ranks_that_do_not_share_a_disk(two, tmp_path):
    error, *_ = two.errors(elsewhere, tmp_path)
    message = "CheckpointError: a run must have a directory that all ranks see; found that they see other files in "
    assert error.startswith(message) and error.endswith(". Use one on a disk that they share.")


def test_one_that_cannot_be_resumed_says_so_everywhere(two, tmp_path):
    two.run(going_on, tmp_path / "run", 2)
    message = re.escape("CheckpointError: a run must be resumed with the optimizer it was saved with, AdamW; found SGD")
    assert all(re.match(message, error) for error in two.errors(resuming, tmp_path / "run"))
    with pytest.raises(CheckpointError, match="the optimizer it was saved with"):
        resuming(tmp_path / "run")
