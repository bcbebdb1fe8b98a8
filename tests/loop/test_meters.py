"""Where the time went, how much memory it took, and how large each layer's gradient is; what a run was made with."""

import json
from importlib.metadata import version

import pytest
import torch
from small import X, Y, loader, log, make
from torch import nn

import samplewise as sw
from samplewise.loop.callbacks import _by_layer
from samplewise.loop.data.loader import ResumableLoader
from samplewise.loop.meters import PhaseTimer, UpdateSums, loading_notice
from samplewise.report.run_log import read_run


def test_phases_of_an_update_are_its_seconds():
    model = nn.Linear(X.shape[1], 3)
    step = sw.Step(model, sw.sgd(0.1), nn.CrossEntropyLoss(), samples=6, microbatch=4, transforms=[sw.clip(1.0)])
    for update in step.over([(X[:10].float(), Y[:10])]):
        assert list(update.phases) == ["forward", "gradients", "optimizer"]
        assert all(seconds > 0 for seconds in update.phases.values())
        assert update.seconds == sum(update.phases.values())


def test_a_window_that_was_given_up_costs_the_next_one_nothing(monkeypatch):
    from samplewise.step import apply, forward, window_builder

    ticks = iter(range(1000))
    for module in (forward, window_builder, apply):
        monkeypatch.setattr(module, "perf_counter", lambda: next(ticks))
    training = sw.Step(nn.Linear(X.shape[1], 3), sw.sgd(0.1), nn.CrossEntropyLoss(), recheck=False)
    good, bad = (X[:4].float(), Y[:4]), (X[:4].float() * torch.nan, Y[:4])
    (first,) = training(good)
    with pytest.raises(sw.NonFiniteLossError):
        training(bad)
    (second,) = training(good)
    assert first.phases["forward"] == second.phases["forward"] == 1
    assert second.phases == first.phases


def test_the_log_tells_where_the_time_went(tmp_path):
    make(tmp_path, log_every="2up").fit(loader(), validate=loader(), epochs=2)
    lines = [line for line in log(tmp_path, times=True) if line["kind"] == "train"]
    for line in lines:
        assert list(line["phases"]) == ["data", "forward", "gradients", "optimizer", "rest"]
        assert all(seconds >= 0 for seconds in line["phases"].values())
        assert sum(line["phases"][name] for name in ("forward", "gradients", "optimizer")) == pytest.approx(
            line["seconds"]
        )
        assert line["memory"] > 1e6


def test_waiting_for_data_is_apart_from_what_is_done_with_them(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("samplewise.loop.meters.perf_counter", lambda: now[0])
    monkeypatch.setattr("samplewise.loop.data.loader.perf_counter", lambda: now[0])

    def slow():
        for batch in range(3):
            now[0] += 2.0
            yield torch.tensor([batch])

    data, timer = ResumableLoader(slow(), seed=0), PhaseTimer()
    for _ in data.epoch(0):
        now[0] += 5.0
    assert timer.read(data.seconds_waited) == {"data": 6.0, "rest": 15.0}
    assert timer.read(data.seconds_waited) == {"data": 0.0, "rest": 0.0}


# ----------------------------------------------------------------------- samples per second


class Clock:
    """Time that passes only where a test lets it pass: `loading` seconds per batch, `computing` seconds per update."""

    def __init__(self, monkeypatch, loading, computing):
        self.now = 0.0
        self.loading = loading
        self.computing = computing
        for module in ("loop.meters", "loop.data.loader", "step.forward", "step.window_builder", "step.apply"):
            monkeypatch.setattr(f"samplewise.{module}.perf_counter", lambda: self.now)

    def batches(self, count):
        """A loader of batches of 10 samples."""

        class Loader:
            def __iter__(_):
                for _ in range(count):
                    self.now += self.loading
                    yield X[:10], Y[:10]

        return Loader()

    def loss_fn(self, model, batch):
        if model.training:
            self.now += self.computing
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Slow:
    """Callback that takes 100 s after each epoch, and 2 s after each update."""

    def __init__(self, clock):
        self.clock = clock

    def on_update(self):
        self.clock.now += 2.0

    def on_epoch_end(self):
        self.clock.now += 100.0


def speeds(run):
    return [
        (line["samples_per_second"], line["compute_samples_per_second"])
        for line in log(run, times=True)
        if line["kind"] == "train"
    ]


def notes(run):
    return [line["text"] for line in log(run) if line["kind"] == "note"]


def test_samples_per_second_include_loading(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch, loading=3.0, computing=1.0)
    make(tmp_path, loss=clock.loss_fn, log_every="2up", progress=True).fit(clock.batches(6), updates=6)
    assert speeds(tmp_path)[1:] == [(10 / 4.0, 10 / 1.0)] * 2  # in the first line, the recheck computes a batch again
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch 1  update ")]
    assert shown[1].endswith(f"{10 / 4.0:.0f} samples/s") and shown[2].endswith(f"{10 / 4.0:.0f} samples/s")


def test_samples_per_second_include_callbacks_but_not_validation(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, loading=3.0, computing=1.0)
    trainer = make(tmp_path, [Slow(clock)], loss=clock.loss_fn, log_every="2up")
    trainer.fit(clock.batches(4), validate=clock.batches(50), epochs=3)
    # The last callback of an epoch is not between two of its updates.
    assert speeds(tmp_path)[1:] == [(20 / 12, 10.0), (20 / 10, 10.0)] * 2 + [(20 / 12, 10.0)]


def test_samples_per_second_of_a_line_that_a_checkpoint_divides(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, loading=3.0, computing=1.0)
    make(tmp_path, loss=clock.loss_fn, log_every="4up").fit(clock.batches(8), updates=6)
    clock.now += 1000.0
    make(tmp_path, loss=clock.loss_fn, log_every="4up").fit(clock.batches(8), updates=8, resume=True)
    replayed = 6 * clock.loading  # this loader cannot start inside an epoch
    assert speeds(tmp_path)[-1] == (40 / (4 * 4.0 + replayed), 10.0)


def test_checkpoints_of_earlier_versions_have_no_wall_time():
    state = UpdateSums(samples=10, seconds=2.0).state_dict()
    del state["wall_seconds"]
    sums = UpdateSums()
    sums.load_state_dict(state)
    assert sums.wall_seconds == 2.0


def test_a_note_if_most_of_the_time_is_spent_waiting_for_the_loader(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch, loading=3.0, computing=1.0)
    make(tmp_path, loss=clock.loss_fn, log_every="2up", progress=True).fit(clock.batches(9), updates=9)
    (note,) = notes(tmp_path)
    # At the first line, after two updates and the recheck: the first batch, in which workers start, is not counted.
    assert note == (
        "Loading takes 60% of the time: 3.0 of 5.0 s were spent waiting for batches. Prepare batches in other "
        "processes, as a DataLoader with num_workers does; or keep prepared samples in memory or in a file."
    )
    assert note in capsys.readouterr().err.splitlines()
    assert note in read_run(tmp_path).warnings


@pytest.mark.parametrize(("loading", "computing"), [(0.9, 1.0), (0.2, 0.1)], ids=["less than half", "less than 2 s"])
def test_no_note_if_loading_takes_little_time(tmp_path, monkeypatch, loading, computing):
    clock = Clock(monkeypatch, loading, computing)
    make(tmp_path, loss=clock.loss_fn, log_every="2up").fit(clock.batches(9), updates=9)
    assert notes(tmp_path) == []


def test_the_note_names_the_workers_of_a_data_loader():
    assert loading_notice(loader(num_workers=2), 6.0, 8.0) == (
        "Loading takes 75% of the time: 6.0 of 8.0 s were spent waiting for batches. Use more workers, "
        "DataLoader(num_workers=4), and pin_memory=True with an accelerator; or keep prepared samples in memory or in "
        "a file."
    )


def test_norms_of_layers(tmp_path):
    trainer = make(tmp_path, log_every="2up")
    trainer.fit(loader(), updates=4)
    lines = [line for line in log(tmp_path) if line["kind"] == "layers"]
    assert [line["update"] for line in lines] == [2, 4]
    squares = {name: p.grad.norm().item() ** 2 for name, p in trainer.model.named_parameters()}
    for layer, norm in lines[-1]["norms"].items():
        own = sum(total for name, total in squares.items() if name.rpartition(".")[0] in (layer, ""))
        assert norm == pytest.approx(own**0.5, rel=1e-5)


def test_many_layers_are_put_together(monkeypatch):
    def by_layer(norms, most):
        monkeypatch.setattr("samplewise.loop.callbacks.MOST_LAYERS", most)
        return _by_layer(norms)

    norms = {f"blocks.{k}.{part}.weight": 1.0 for k in range(4) for part in "ab"} | {"scale": 2.0}
    assert len(by_layer(norms, most=9)) == 9
    assert by_layer(norms, most=8) == {**{f"blocks.{k}": pytest.approx(2**0.5) for k in range(4)}, "scale": 2.0}
    assert by_layer(norms, most=3) == {"blocks": pytest.approx(8**0.5), "scale": 2.0}
    assert len(by_layer({f"{k}.weight": 1.0 for k in range(9)}, most=3)) == 9  # they have nothing above them


def test_no_gradients_no_line(tmp_path):
    trainer = make(tmp_path, log_every="1up")
    trainer.fit(loader(), updates=1)
    trainer.step.optimizer.step = lambda: [setattr(p, "grad", None) for p in trainer.model.parameters()]
    trainer.fit(loader(), updates=2)
    assert [line["update"] for line in log(tmp_path) if line["kind"] == "layers"] == [1]


def test_the_log_says_once_why_there_are_no_norms_of_layers(tmp_path):
    trainer = make(tmp_path, log_every="1up")
    trainer.step.optimizer.step = lambda: [setattr(p, "grad", None) for p in trainer.model.parameters()]
    trainer.fit(loader(), updates=2)
    resumed = make(tmp_path, log_every="1up")
    resumed.step.optimizer.step = lambda: [setattr(p, "grad", None) for p in resumed.model.parameters()]
    resumed.fit(loader(), updates=4, resume=True)
    (note,) = [line for line in log(tmp_path) if line["kind"] == "note"]
    assert note["update"] == 1
    assert note["text"].startswith("Gradient norms of layers are not logged, because parameters have no .grad after")
    assert note["text"] in read_run(tmp_path).warnings


def test_what_a_run_was_made_with(tmp_path):
    make(tmp_path).fit(loader(), epochs=1)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["name"] == tmp_path.name
    assert about["torch"] == torch.__version__
    assert about["versions"]["torch"] == version("torch")  # may lack the name of the build, such as +cu128
    assert {"python", "samplewise"} < set(about["versions"]) and about["machine"]["threads"] == torch.get_num_threads()
    settings = about["settings"]
    assert settings["seed"] == 0 and settings["samples"] == 10 and settings["batch size"] == loader().batch_size
    assert settings["optimizer"].startswith("SGD(lr=0.1")
    assert settings["model"] and settings["loss"] and settings["tail"] == "update"
    assert "max_grad_norm" not in settings  # was not asked for


def test_sparse_gradients_have_norms(tmp_path):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).squeeze(1))
    sw.Trainer(step, tmp_path, progress=False, device="cpu", log_every="1up").fit([torch.tensor([1, 1, 4])], epochs=1)
    (line,) = [line for line in log(tmp_path) if line["kind"] == "layers"]
    assert line["norms"]["0"] == pytest.approx(model[0].weight.grad.to_dense().norm().item())
