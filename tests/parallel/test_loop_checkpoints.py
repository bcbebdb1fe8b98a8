"""A folder that several ranks write while the training goes on: whole, or passed over; read by any number of them."""

import contextlib
import re
import shutil
import threading
import time
import warnings
from itertools import pairwise

import pytest
import torch
from forging import BOMBS, nothing_unpickled, pickled
from safetensors.torch import load_file
from test_loop_trainer import going_on, loader, log, parameters, trainer

import samplewise as sw
from samplewise.errors import CheckpointError, CheckpointWarning, TrainingWarning
from samplewise.loop.callbacks import EarlyStopping, ModelCheckpoint, SetLR
from samplewise.loop.checkpoint import io
from samplewise.loop.checkpoint.directory import Checkpoints
from samplewise.parallel import collectives


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# ------------------------------------------------------------------------------------------- while the training goes on


class Releases:
    """Lets what is being saved go on after some update, and notes what was there before."""

    def __init__(self, run, after, gate):
        self.run, self.after, self.gate, self.there = run, after, gate, []

    def on_update(self, update):
        if update.index == self.after:
            while not names(self.run):  # it is made in the background
                time.sleep(0.01)
            self.there = names(self.run)
            self.gate.set()


def slowly(run):
    gate, write = threading.Event(), io.write_shard

    def held_up(*given):
        assert gate.wait(60)
        return write(*given)

    io.write_shard = held_up
    try:
        releases = Releases(run, 2, gate)
        made = trainer(run, [releases, ModelCheckpoint(every="2up")])
        made.fit(loader(), updates=4)
    finally:
        io.write_shard = write
    return releases.there


def test_training_continues_while_a_checkpoint_is_written(two, tmp_path):
    there = two.run(slowly, tmp_path / "run")
    assert there == [[".update-000000002.ckpt.partial"]] * 2  # after three updates it was still being written
    assert names(tmp_path / "run") == ["update-000000002.ckpt", "update-000000004.ckpt"]
    inside = {path.name for path in (tmp_path / "run" / "checkpoints" / "update-000000004.ckpt").iterdir()}
    assert inside == {"state.json", "model.safetensors", "rank-0.safetensors", "rank-1.safetensors"}


def as_it_was(run):
    """The parameters after two updates, and what is in the checkpoint of that moment."""
    kept = []

    class Keeps:
        def on_update(self, trainer, update):
            if update.index == 1:
                kept.append(parameters(trainer).clone())

    trainer(run, [Keeps(), ModelCheckpoint(every="2up")]).fit(loader(), updates=3)
    saved = io.read(run / "checkpoints" / "update-000000002.ckpt")["model"]
    return torch.equal(kept[0], torch.cat([tensor.flatten() for tensor in saved.values()]))


def test_what_is_saved_is_the_state_of_its_moment(two, tmp_path):
    assert two.run(as_it_was, tmp_path / "run") == [True, True]


def every_ten_samples(run, samples):
    """Numbers of samples at the updates after which a checkpoint is saved."""
    seen, saved = [0], []

    class Notes:
        def on_update(self, update):
            seen.append(seen[-1] + update.samples)

        def state_dict(self):
            saved.append(seen[-1])
            return {}

        def load_state_dict(self, state): ...

    trainer(run, [Notes(), ModelCheckpoint(every="10samples")], samples=samples, log_every="10samples").fit(
        loader(), epochs=2
    )
    return seen, saved[1:]  # the first one is a check


@pytest.mark.parametrize("samples", [6, None])
def test_intervals_in_samples_are_those_of_all_ranks(two, tmp_path, samples):
    (seen, saved), other = two.run(every_ten_samples, tmp_path / "run", samples)
    assert (seen, saved) == other and seen[-1] == 46
    ends = [now for before, now in pairwise(seen) if now // 10 > before // 10]
    assert saved == [*ends, 46]  # the last one at the end of fit
    lines = [line["samples"] for line in log(tmp_path / "run") if line["kind"] == "train"]
    assert lines == sorted({*ends, 23, 46})


# ---------------------------------------------------------------------------------------------------------- failures


def failing(run, where):
    def fail(*given):
        raise OSError("no space left")

    name, rank = {"shard": ("write_shard", 1), "state": ("write_state", 0)}[where]
    original = getattr(io, name)
    if collectives.rank() == rank:
        setattr(io, name, fail)
    try:
        trainer(run, [ModelCheckpoint(every="2up")]).fit(loader(), updates=4)
    finally:
        setattr(io, name, original)


@pytest.mark.parametrize("where", ["shard", "state"])
def test_failed_checkpoint_raises_on_all_ranks(where, two, tmp_path):
    rank = 1 if where == "shard" else 0
    message = (
        f"CheckpointError: a checkpoint could not be written to {tmp_path}/run/checkpoints/update-000000002.ckpt: "
        f"OSError on rank {rank}: no space left. Free disk space or fix the permissions, then save again. An existing "
        "checkpoint at this path is unchanged."
    )
    assert two.errors(failing, tmp_path / "run", where) == [message] * 2
    assert not any(name.endswith(".ckpt") for name in names(tmp_path / "run"))
    two.run(going_on, tmp_path / "run", 2)  # what is left of it is in nobody's way
    assert names(tmp_path / "run") == ["update-000000002.ckpt"]


class Odd(torch.optim.SGD):
    """Has another state on each rank."""

    def state_dict(self):
        return {**super().state_dict(), "rank": collectives.rank()}


def odd(run):
    made = trainer(run)
    made.step.optimizer.__class__ = Odd
    made.fit(loader(), updates=1)


def test_states_that_differ_are_not_saved_as_one(two, tmp_path):
    for error in two.errors(odd, tmp_path / "run"):
        assert error.startswith(
            "CheckpointError: model, optimizer and loss must have state dicts of the same structure on all ranks, "
            "since each rank saves a part; found that they differ. Construct them identically on every rank."
        )


@pytest.mark.parametrize("file", ["model.safetensors", "rank-0.safetensors", "rank-1.safetensors", "state.json"])
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
    with pytest.warns(CheckpointWarning, match="Trying the previous checkpoint."):
        state, path = Checkpoints(tmp_path / "checkpoints").latest()
    assert path.name == "update-000000002.ckpt" and state["step"]["counters"]["updates"] == 2


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    run = tmp_path_factory.mktemp("saved") / "run"
    two.run(going_on, run, 4)
    return run / "checkpoints"


def test_each_tensor_is_written_by_one_rank(saved):
    files = [load_file(saved / "update-000000004.ckpt" / f"rank-{rank}.safetensors") for rank in range(2)]
    shared = [{name for name in tensors if name.startswith("optimizer.")} for tensors in files]
    assert shared[0] and shared[1] and not shared[0] & shared[1]
    assert not any(name.startswith("model.") for tensors in files for name in tensors)
    for rank, tensors in enumerate(files):
        assert {name.split(".")[1] for name in tensors if name.startswith("per_rank.")} == {str(rank)}


def test_other_tools_read_the_model_of_two_ranks(saved):
    newest = saved / "update-000000004.ckpt"
    stored = load_file(newest / "model.safetensors")
    assert set(stored) == set(trainer().model.state_dict())
    assert all(torch.equal(stored[name], value) for name, value in sw.load_checkpoint(newest)["model"].items())


def sharded(run):
    trainer(run, parallel="fsdp").fit(loader(), updates=2)


def test_a_sharded_model_is_in_the_files_of_the_ranks(two, tmp_path):
    """Each rank writes its part of it; it is put together when it is loaded."""
    two.run(sharded, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "update-000000002.ckpt"
    assert sorted(path.name for path in newest.iterdir()) == ["rank-0.safetensors", "rank-1.safetensors", "state.json"]
    parts = [load_file(newest / f"rank-{rank}.safetensors") for rank in range(2)]
    model = sw.load_checkpoint(newest)["model"]
    for name, value in model.items():
        assert torch.equal(torch.cat([part[f"model.{name}"] for part in parts if f"model.{name}" in part]), value)
    trainer().model.load_state_dict(model)


# ------------------------------------------------------------------------------------------------- nothing is unpickled


def copied(saved, run):
    shutil.copytree(saved, run / "checkpoints")
    return run / "checkpoints" / "update-000000004.ckpt"


def test_one_process_reads_what_two_ranks_wrote_without_a_pickle(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    newest = copied(saved, tmp_path / "run")
    (newest / ".metadata").write_bytes(pickled())
    with nothing_unpickled():
        state = io.read(newest)
    assert state["step"]["counters"]["updates"] == 4 and not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-1.safetensors", "state.json"])
def test_a_pickle_in_place_of_a_file_of_two_ranks(saved, tmp_path, monkeypatch, name, bomb):
    monkeypatch.chdir(tmp_path)
    newest = copied(saved, tmp_path / "run")
    (newest / name).write_bytes(BOMBS[bomb]())
    message = f"{newest / name} must be a checkpoint file written by samplewise; found "
    with nothing_unpickled(), pytest.raises(CheckpointError, match=f"^{message}"):
        io.read(newest)
    assert not (tmp_path / "exploded").exists()


def passing_over(run):
    """Resumes, and returns what was said about checkpoints."""
    with contextlib.chdir(run.parent), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        going_on(run, 6)
    return [str(warning.message) for warning in caught if warning.category is CheckpointWarning]


def test_two_ranks_pass_over_a_pickle(two, saved, tmp_path):
    copied(saved, tmp_path / "run")
    forged = tmp_path / "run" / "checkpoints" / "update-000000099.ckpt"
    forged.mkdir()
    for name in (".metadata", "__0_0.distcp", "rest.ckpt"):
        (forged / name).write_bytes(pickled())
    for messages in two.run(passing_over, tmp_path / "run"):
        assert len(messages) == 1 and "must have format version 6; found 1, which this version of" in messages[0]
    assert "update-000000006.ckpt" in names(tmp_path / "run") and not (tmp_path / "exploded").exists()


CHAINS = {"plain": (), "clip": [sw.clip(0.5)], "drop": [sw.drop(largest=1)]}


def carrying(run, ends, transforms="plain", every="1ep", **options):
    """Trains until the end of each of some epochs, with new objects for each."""
    for end in ends:
        callbacks = [ModelCheckpoint(every=every)]
        made = trainer(run, callbacks, transforms=CHAINS[transforms], dropout=0.3, **options)
        made.step.tail = "carry"
        reason = made.fit(loader(), epochs=end, resume=True).reason
    return parameters(made), reason, made.step.counters


CARRIED = [dict(parallel=how, transforms=some) for how in ("ddp", "fsdp") for some in ("plain", "clip")]


@pytest.mark.slow
@pytest.mark.parametrize("options", [*CARRIED, dict(samples=22), dict(samples=50)], ids=str)
def test_a_window_that_ranks_have_begun_is_ended_by_as_many(options, two, tmp_path):
    """To the last bit. It may have samples of one rank only, and be open for several epochs."""
    whole = two.run(_carrying, tmp_path / "whole", [4], options)
    parts = two.run(_carrying, tmp_path / "parts", [1, 2, 3, 4], options)
    for found, expected in zip(parts, whole, strict=True):
        assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:]


def _carrying(run, ends, options):
    return carrying(run, ends, **options)


def test_a_window_that_ranks_have_begun_is_not_ended_by_others(two, three, tmp_path):
    two.run(carrying, tmp_path / "run", [1])
    message = (
        "CheckpointError: a checkpoint with an open window of 2 ranks must be resumed with the same number of ranks; "
        "found {}. Resume with 2 ranks. To change the number of ranks, save inside epochs: "
        "ModelCheckpoint(every='100up')."
    )
    assert three.errors(carrying, tmp_path / "run", [2]) == [message.format(3)] * 3
    with pytest.raises(
        CheckpointError, match="an open window of 2 ranks must be resumed with the same number of ranks; found 1"
    ):
        carrying(tmp_path / "run", [2])


def test_samples_that_wait_are_not_saved(two, tmp_path):
    message = (
        "CheckpointError: an open window can be saved only as accumulated sums; found samples that are kept until the "
        "window is full, because a transform needs all samples at once. Use tail='update' or tail='drop', or save "
        "inside epochs: ModelCheckpoint(every='100up')."
    )
    options = dict(transforms="drop")
    assert two.errors(_carrying, tmp_path / "epochs", [1], options) == [message] * 2
    two.run(_carrying, tmp_path / "updates", [1], {**options, "every": "2up"})
    assert names(tmp_path / "updates") == ["update-000000002.ckpt"]


def test_a_window_that_one_process_has_begun_is_ended_by_it(two, tmp_path):
    made = trainer(tmp_path / "run", [ModelCheckpoint(every="1ep")])
    made.step.tail = "carry"
    made.fit(loader(), epochs=1)
    message = (
        "CheckpointError: a checkpoint with an open window of one process must be resumed with one process; found 2 "
        "ranks. Resume with one process until the next checkpoint."
    )
    assert two.errors(resuming, tmp_path / "run") == [message] * 2


def resuming(run):
    trainer(run).fit(loader(), epochs=2, resume=True)


def elsewhere(run):
    trainer(run / str(collectives.rank())).fit(loader(), updates=1)


def test_ranks_that_do_not_share_a_disk(two, tmp_path):
    for error in two.errors(elsewhere, tmp_path):
        assert error == (
            "CheckpointError: all ranks must see the same run directory; found that rank 0 does not see "
            f"rank-1.safetensors in {tmp_path}/0/checkpoints. Use a directory on a shared file system."
        )


def resuming_elsewhere(run):
    trainer(run / str(collectives.rank())).fit(loader(), updates=2, resume=True)


def test_ranks_that_see_other_checkpoints(two, tmp_path):
    trainer(tmp_path / "0").fit(loader(), updates=1)
    error, *_ = two.errors(resuming_elsewhere, tmp_path)
    message = (
        "CheckpointError: all ranks must see the same run directory; found that they see different checkpoints in "
    )
    assert error.startswith(message) and error.endswith(". Use a directory on a shared file system.")


def test_loader_that_cannot_be_resumed_raises_on_all_ranks(two, tmp_path):
    two.run(going_on, tmp_path / "run", 2)
    message = re.escape("CheckpointError: a run must be resumed with the optimizer it was saved with, AdamW; found SGD")
    assert all(re.match(message, error) for error in two.errors(resuming, tmp_path / "run"))
    with pytest.raises(CheckpointError, match="the optimizer it was saved with"):
        resuming(tmp_path / "run")


# ------------------------------------------------------------------------------------------------ settings and the base


def with_settings(run, end, **options):
    """Resumes, and returns what was said, and the learning rate afterwards."""
    made = trainer(run, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.fit(loader(), epochs=end, resume=True)
    said = [str(warning.message) for warning in caught if warning.category is TrainingWarning]
    return said, made.step.optimizer.param_groups[0]["lr"]


def with_other_settings(run):
    with_settings(run, 1)
    return with_settings(run, 2, lr=0.1, samples=8)


def with_another_rate(run):
    return with_settings(run, 3, samples=8, callbacks=[SetLR(0.2)])


def test_other_settings_are_named_by_the_first_rank(two, tmp_path):
    (said, lr), (nothing, other) = two.run(with_other_settings, tmp_path / "run")
    assert nothing == [] and lr == other == 0.3
    assert "learning rate: the checkpoint's 0.3 is kept, the script has 0.1; samples: 8 from now on, the run" in said[0]
    assert [line["text"] for line in log(tmp_path / "run") if line["kind"] == "note"] == said
    assert two.run(with_another_rate, tmp_path / "run") == [([], 0.2)] * 2
    note = log(tmp_path / "run")[-4]["text"]
    assert "learning rate: 0.2 from now on, set by a callback; the checkpoint has 0.3." in note


def stopping(run):
    made = trainer(run, [EarlyStopping(patience=1, min_delta=100.0)])
    return made.fit(loader(), epochs=9, resume=True).reason, made.step.counters.epochs


def test_a_stopped_run_stays_stopped(two, tmp_path):
    for _ in range(2):
        assert two.run(stopping, tmp_path / "run") == [("loss has not improved for 1 epoch", 2)] * 2
    assert stopping(tmp_path / "run") == ("loss has not improved for 1 epoch", 2)


def partly_frozen(run, parallel, end, seed=0):
    """Trains a model whose first layer is frozen, and returns all of its parameters."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8).requires_grad_(False), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    step = sw.Step(model, optimizer, torch.nn.CrossEntropyLoss(), 6, parallel=parallel)
    made = sw.Trainer(step, run, progress=False, device="cpu", save="trained")
    made.fit(loader(), epochs=end, resume=True)
    return parameters(made)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_frozen_parameters_are_left_out(two, tmp_path, parallel):
    whole = two.run(partly_frozen, tmp_path / "whole", parallel, 2)
    two.run(partly_frozen, tmp_path / "run", parallel, 1)
    parts = two.run(partly_frozen, tmp_path / "run", parallel, 2)
    assert all(map(torch.equal, whole, parts))
    state = sw.load_checkpoint(tmp_path / "run")
    assert set(state["frozen"]) == {"0.weight", "0.bias"} and set(state["model"]) == {"2.weight", "2.bias"}
    for error in two.errors(partly_frozen, tmp_path / "run", parallel, 3, 1):
        assert error.startswith(
            "CheckpointError: a checkpoint without frozen parameters (save='trained') must be resumed"
        )
    torch.testing.assert_close(partly_frozen(tmp_path / "run", None, 2), whole[0])  # as one process
