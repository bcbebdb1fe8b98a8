"""`Trainer`: the loop and what hangs on it."""

import copy
import io
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from notices import wait_for_notices
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.core import text as progress
from samplewise.loop.callbacks import EarlyStopping, LRMonitor, MaxTime, ModelCheckpoint
from samplewise.loop.checkpoint.io import read
from samplewise.loop.evaluation import accuracy
from samplewise.loop.meters import make_display
from samplewise.step.compiled import CannotCompile, program_cache

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30) % 3


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def loader(batch_size=7, shuffle=False):
    return DataLoader(TensorDataset(X, Y), batch_size=batch_size, shuffle=shuffle)


def make(run=None, callbacks=(), samples=10, progress=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_fn, samples=samples)
    return sw.Trainer(step, run, callbacks, progress=progress, device="cpu", **options)


def parameters(trainer):
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_it_is_the_explicit_loop():
    trainer, other = make(), make()
    assert trainer.fit(loader(), epochs=3).reason == "3 epochs are done"
    for _ in range(3):
        for _ in other.step.over(loader()):
            pass
    assert torch.equal(parameters(trainer), parameters(other))
    assert trainer.step.counters == other.step.counters


@pytest.mark.parametrize(("given", "updates"), [(dict(updates=5), 5), (dict(epochs=2), 6)])
def test_durations(given, updates):
    trainer = make()
    trainer.fit(loader(), **given)
    assert trainer.step.counters.updates == updates


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one of epochs= and updates= must be given; found neither"),
        (dict(epochs=1, updates=1), "found both"),
        (dict(epochs="5up"), r"epochs must be a positive whole number; found '5up'\. Pass epochs=10 or updates=500\."),
        (dict(epochs=0), "epochs must be a positive whole number; found 0"),
        (dict(updates=2.5), r"updates must be a positive whole number; found 2\.5"),
    ],
)
def test_bad_durations(given, message):
    with pytest.raises(ValueError, match=message):
        make().fit(loader(), **given)


def test_the_order_follows_from_the_seed():
    first, second, third = make(seed=1), make(seed=1), make(seed=2)
    for trainer in (first, second, third):
        torch.manual_seed(hash(trainer))  # of no concern
        trainer.fit(loader(shuffle=True), epochs=2)
    assert torch.equal(parameters(first), parameters(second))
    assert not torch.equal(parameters(first), parameters(third))


# ------------------------------------------------------------- looking


def test_evaluate_is_a_mean_over_samples():
    trainer = make(metrics={"accuracy": accuracy, "loss again": lambda out, batch: F.cross_entropy(out, batch[1])})
    found = trainer.evaluate(loader(batch_size=8))  # the last batch has six
    outputs = trainer.model(X)
    assert found["loss"] == pytest.approx(F.cross_entropy(outputs, Y).item(), rel=1e-5)
    assert found["loss again"] == pytest.approx(found["loss"], rel=1e-5)
    assert found["accuracy"] == pytest.approx((outputs.argmax(1) == Y).float().mean().item())


def test_metrics_of_others():
    theirs = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")
    found = make(metrics={"ours": accuracy, "theirs": theirs}).evaluate(loader())
    assert found["ours"] == pytest.approx(found["theirs"])


def test_what_is_no_metric():
    with pytest.raises(
        TypeError, match=r"metric 'a' must be a function .* or have update, compute and reset; found int"
    ):
        make(metrics={"a": 3})


def test_evaluation_keeps_modes_gradients_and_random_numbers():
    trainer = make()
    trainer.model[1].eval()
    state = torch.get_rng_state()
    trainer.evaluate(loader())
    assert [m.training for m in trainer.model.modules()] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_predict():
    trainer = make()
    torch.testing.assert_close(trainer.predict(loader()), trainer.model(X))
    torch.testing.assert_close(trainer.predict(X.split(4)), trainer.model(X))


# ------------------------------------------------------------- callbacks


def test_events_come_in_the_order_of_the_loop():
    said = []

    class Teller:
        def on_fit_start(self):
            said.append("start")

        def on_epoch_start(self, epoch):
            said.append(f"epoch {epoch}")

        def on_update(self, update, model, step):
            said.append(f"update {update.index}")

        def on_epoch_end(self, epoch, metrics, trainer):
            said.append(f"end {epoch} {sorted(metrics)}")

        def on_fit_end(self, reason):
            said.append(reason)

    make(callbacks=[Teller()]).fit(loader(), validate=loader(), epochs=1)
    metrics = "['loss', 'train_loss']"
    assert said == ["start", "epoch 0", "update 0", "update 1", "update 2", f"end 0 {metrics}", "1 epoch is done"]


class Misspelt:
    def on_updates(self, update):
        pass


class Asking:
    def on_update(self, batch):
        pass


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Misspelt(), "Misspelt.on_updates must be one of the events on_fit_start, .*; found no such event"),
        (Asking(), "arguments of Asking.on_update must be among update, trainer, step, model; found 'batch'"),
        (object(), "a callback must have a method named after an event"),
        (EarlyStopping, "a callback must be an object; found the class EarlyStopping"),
    ],
)
def test_what_is_no_callback(callback, message):
    with pytest.raises(TypeError, match=message):
        make(callbacks=[callback])


def test_early_stopping():
    trainer = make(callbacks=[EarlyStopping("loss", patience=2, mode="max")])  # the loss falls
    assert trainer.fit(loader(), epochs=50).reason == "loss has not improved for 2 epochs"
    assert trainer.step.counters.epochs == 3


def test_a_metric_that_is_not_there():
    with pytest.raises(ValueError, match=r"^monitor must be one of loss, train_loss; found 'f1'"):
        make(callbacks=[EarlyStopping("f1")]).fit(loader(), epochs=1)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: EarlyStopping(patience=0), "patience must be a positive number of epochs; found 0"),
        (lambda: EarlyStopping(mode="low"), "mode must be 'min' or 'max'; found 'low'"),
        (lambda: ModelCheckpoint(best=-1), "best must be the number of models to keep, an int of 0 or more; found -1"),
        (
            lambda: LRMonitor(every="0up"),
            r"every must be a duration such as '50up' \(updates\) or '1ep' \(epochs\) or '1000samples'; found",
        ),
        (lambda: make(log_every=0), r"log_every must be a duration .*; found 0\.$"),
        (lambda: make(log_every="1ep"), r"log_every must be a duration .*; found '1ep'\.$"),
        (
            lambda: ModelCheckpoint(every=2.5),
            r"'50up' \(updates\) or '1ep' .*; found 2\.5\.$",
        ),
        (lambda: ModelCheckpoint(every=True), r"found True\.$"),
        (lambda: ModelCheckpoint(every="2 ep"), r"found '2 ep'\.$"),
    ],
)
def test_options_that_make_no_sense(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()


class Half:
    def on_update(self): ...
    def state_dict(self): ...


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: sw.Trainer(nn.Linear(2, 2)), r"step must be a samplewise Step; found Linear\. Use sw\.Step"),
        (lambda: make(callbacks=EarlyStopping()), "callbacks must be a list of objects; found EarlyStopping"),
        (lambda: make(metrics=[accuracy]), "metrics must be a dict of names and metrics; found list"),
        (lambda: make(callbacks=[Half()]), "must have both state_dict and load_state_dict, or neither; found Half"),
    ],
)
def test_what_a_trainer_is_made_of(make_it, message):
    with pytest.raises(TypeError, match=message):
        make_it()


class NanNow:
    """Spoils the second update."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += torch.is_grad_enabled() and model.training
        return loss_fn(model, batch) * (float("nan") if self.calls == 2 else 1.0)


def test_nan_is_shown_as_nan_and_skipped_updates_are_counted(tmp_path, capsys):
    model = nn.Linear(6, 3)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), NanNow(), on_nonfinite="skip", recheck=False)
    trainer = sw.Trainer(step, tmp_path, [LRMonitor(every="1up")], log_every="1up", device="cpu")
    trainer.fit(loader(), validate=[(X * float("nan"), Y)], epochs=1)
    lines = log(tmp_path)
    assert [line["update"] for line in lines if line["kind"] == "lr"] == [1, 2, 3, 4]
    assert sum(line["skipped"] for line in lines if line["kind"] == "train") == 1
    assert '"loss": NaN' in (tmp_path / "log.jsonl").read_text()
    assert "loss NaN" in capsys.readouterr().err


def test_tensors_and_numpy_in_the_log(tmp_path):
    class Writer:
        def on_fit_start(self, trainer):
            trainer.write("mine", a=torch.tensor(1.5), b=torch.arange(2), c=torch.ones(1).numpy()[0])

    make(tmp_path, [Writer()]).fit(loader(), epochs=1)
    assert log(tmp_path)[0] == {"kind": "mine", "a": 1.5, "b": [0, 1], "c": 1.0}


def test_a_bar_that_fits_into_eighty_columns(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    bar = make_display(total=1000, done=0)
    bar.epoch(1, {"train_loss": 1.0, "loss": math.nan, "accuracy": 0.9333})
    bar.line("compiling an update ...")
    bar.update(2, 500, "loss 0.8799  1234 samples/s")
    bar.close()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).strip().splitlines()[-1]
    assert re.search(r"epoch 2 .* 500/1000 .* loss 0\.8799  12\d\d samples/s  accuracy 0\.9333", last)
    assert "epoch 1  train_loss 1  loss NaN  accuracy 0.9333" in screen.getvalue()
    assert "compiling an update ..." in screen.getvalue()


def test_max_time():
    assert make(callbacks=[MaxTime(0.0)]).fit(loader(), epochs=9).reason == "time limit of 0.0 s reached"


# ------------------------------------------------------------- files


def test_the_log(tmp_path):
    trainer = make(tmp_path / "run", [LRMonitor(every="4up")], log_every="2up")
    trainer.fit(loader(), validate=loader(), epochs=2)
    lines = log(tmp_path / "run")
    kinds = "train layers train epoch validation train layers lr train layers epoch validation end"
    assert [line["kind"] for line in lines] == kinds.split()
    lines = [line for line in lines if line["kind"] != "layers"]
    other, losses = make(), []
    for _ in range(2):
        losses += [update.loss for update in other.step.over(loader())]
    assert lines[0]["loss"] == pytest.approx((losses[0] + losses[1]) / 2, rel=1e-6)
    assert lines[1]["loss"] == pytest.approx(losses[2], rel=1e-6)
    assert lines[2]["loss"] == pytest.approx(sum(losses[:3]) / 3, rel=1e-6)
    assert lines[0]["update"] == 2 and lines[0]["samples"] == 20 and lines[0]["lr"] == 0.1


LOADERS = {
    "shuffled": lambda: loader(shuffle=True),
    "a list": lambda: list(zip(X.split(7), Y.split(7), strict=True)),
}


@pytest.mark.sweep(1 / 15)
@pytest.mark.parametrize("data", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("samples", [10, None, 30])
@pytest.mark.parametrize("where", [1, 2, 3, 4, 5])  # inside the first and the second epoch
def test_resume(tmp_path, where, samples, data):
    """Broken off in the middle of an epoch, at its end, or in the next."""
    whole = make(tmp_path / "whole", log_every="2up", samples=samples)
    whole.fit(data(), validate=loader(), epochs=6)
    first = make(tmp_path / "run", [ModelCheckpoint(every="1up")], log_every="2up", samples=samples)
    first.fit(data(), validate=loader(), updates=where)
    second = make(tmp_path / "run", log_every="2up", samples=samples)
    second.fit(data(), validate=loader(), epochs=6, resume=True)
    assert torch.equal(parameters(second), parameters(whole))
    assert second.step.counters == whole.step.counters


def test_a_directory_that_has_a_run_already(tmp_path):
    make(tmp_path).fit(loader(), epochs=1)
    with pytest.raises(sw.CheckpointError, match=r"found checkpoints in .* exists='resume'\) to continue"):
        make(tmp_path).fit(loader(), epochs=1)


def test_another_seed(tmp_path):
    make(tmp_path).fit(loader(), epochs=1)
    with pytest.raises(sw.CheckpointError, match="resumed with the seed it was saved with, 0; found 1"):
        make(tmp_path, seed=1).fit(loader(), epochs=2, resume=True)


def test_the_best_models_are_kept(tmp_path):
    checkpoint = ModelCheckpoint(best=2, monitor="loss")
    trainer = make(tmp_path, [checkpoint])
    trainer.fit(loader(), validate=loader(), epochs=4)
    best = read(checkpoint.best_models[0])["model"]
    assert all(torch.equal(best[name], value) for name, value in trainer.model.state_dict().items())
    resumed = ModelCheckpoint(best=2, monitor="loss")
    make(tmp_path, [resumed]).fit(loader(), validate=loader(), epochs=4, resume=True)
    assert resumed.best_models == checkpoint.best_models
    assert sorted(path.name for path in tmp_path.glob("best-*")) == [
        "best-loss-000000009.ckpt",
        "best-loss-000000012.ckpt",
    ]


def test_the_step_is_left_as_it_is_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make().fit(loader(), epochs=1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(sw.CheckpointError, match="a checkpoint needs a run directory"):
        make().save()


def test_lines_where_there_is_no_terminal(capsys):
    trainer = make(log_every="2up", progress=True)
    trainer.fit(loader(), validate=loader(), epochs=1)
    said = capsys.readouterr().err
    assert "epoch 1  update 2  loss" in said
    assert "epoch 1  train_loss" in said


@pytest.mark.parametrize("shown", [True, False])
def test_what_takes_long_is_told_among_the_lines(shown, capsys, monkeypatch):
    """As compiling does; here it fails after a while. By a trainer that is silent, it is not told."""

    def slowly(*_):
        wait_for_notices()
        raise CannotCompile("it was too slow")

    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(program_cache, "trace_backward", slowly)
    model = nn.Linear(6, 3)
    step = sw.Step(model, sw.sgd(0.1), loss_fn, samples=10, compile=True)
    trainer = sw.Trainer(step, progress=shown, device="cpu", log_every="1up")
    printed = step._runner.cache.notify
    with pytest.warns(sw.TrainingWarning, match="updates stay uncompiled: it was too slow"):
        trainer.fit(loader(10), epochs=1)
    said = capsys.readouterr().err
    assert [line.partition("  loss")[0] for line in said.splitlines()[:-1]] == shown * [
        "epoch 1  update 1",
        "compiling an update of 10 samples ...",
        "epoch 1  update 2",
        "epoch 1  update 3",
    ]
    assert step._runner.cache.notify is printed  # whoever goes on without the trainer


def test_copies_of_a_step_do_not_matter():
    """A deep copy of the model is not the one that is trained."""
    trainer = make()
    twin = copy.deepcopy(trainer.model)
    trainer.fit(loader(), epochs=1)
    assert not torch.equal(parameters(trainer), nn.utils.parameters_to_vector(twin.parameters()))


def test_resume_where_rows_hold_several_samples(tmp_path):
    def pairs(model, batch):
        return loss_fn(model, batch).repeat_interleave(2)

    def train(run, updates):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), pairs)
        trainer = sw.Trainer(step, run, [ModelCheckpoint(every="1up")], progress=False, device="cpu")
        trainer.fit(loader(shuffle=True), updates=updates, resume=True)
        return trainer

    whole = train(tmp_path / "whole", 12)
    for updates in (2, 5, 7, 12):
        last = train(tmp_path / "run", updates)
    assert torch.equal(parameters(last), parameters(whole))


# ------------------------------------------------------------- rehearsals


class Seen:
    """How many samples each update had, and their losses; and every line's kind."""

    def __init__(self):
        self.samples, self.kinds, self.losses = [], [], []

    def on_update(self, update):
        self.samples.append(update.samples)
        self.losses.append(update.losses)

    def on_log(self, kind):
        self.kinds.append(kind)


# Batches have 7 of 30 samples: the first update needs a part of the first batch, the batch, two batches, or all.
@pytest.mark.parametrize("tail", ["update", "drop", "carry"])
@pytest.mark.parametrize(
    ("samples", "used", "given"),
    [(3, 3, dict(updates=1)), (7, 7, dict(epochs=9)), (10, 10, dict(epochs=9)), (None, 7, dict(updates=500))],
)
def test_a_fast_dev_run(tmp_path, monkeypatch, samples, used, given, tail):
    monkeypatch.chdir(tmp_path)
    seen, trained, validated = Seen(), [], []

    def batches(read):
        for batch in loader():
            read.append(batch)
            yield batch

    trainer = make("run", [seen, ModelCheckpoint(every="1up", best=1)], samples=samples)
    trainer.step.tail = tail
    result = trainer.fit(batches(trained), validate=batches(validated), **given, fast_dev_run=True)
    assert result.reason == "fast_dev_run is done"
    assert seen.samples == [used] and len(trained) == -(-used // 7) and len(validated) == 1
    assert (trainer.step.samples, trainer.step.tail) == (samples, tail)
    assert seen.kinds[-3:] == ["epoch", "validation", "end"]
    assert list(tmp_path.iterdir()) == []
    assert not trainer.fast_dev_run and not trainer.step._has_pending_samples


@pytest.mark.parametrize("samples", [3, 10, None])
def test_a_fast_dev_run_makes_the_first_update_of_the_training(samples):
    rehearsal, training = make(samples=samples), make(samples=samples)
    rehearsal.fit(loader(shuffle=True), epochs=1, fast_dev_run=True)
    training.fit(loader(shuffle=True), updates=1)
    assert torch.equal(parameters(rehearsal), parameters(training))


def test_a_fast_dev_run_with_fewer_samples_than_an_update_needs():
    trainer = make(samples=50)
    trainer.fit(loader(), epochs=1, fast_dev_run=True)
    assert trainer.step.counters.samples == 30
    for tail in ("drop", "carry"):
        trainer = make(samples=50)
        trainer.step.tail = tail
        message = f"found fewer than samples=50 samples in epoch 1, and tail='{tail}'"
        with pytest.raises(sw.BatchError, match=message):
            trainer.fit(loader(), epochs=1, fast_dev_run=True)


def test_a_fast_dev_run_with_batches_that_cannot_be_cut():
    """A batch of graphs: how many samples it has is known from the losses."""
    batches = [[{"x": x, "y": y, "graph": object()}] for x, y in zip(X.split(6), Y.split(6), strict=True)]

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]["x"]), batch[0]["y"], reduction="none")

    model = nn.Linear(6, 3)
    step = sw.Step(model, sw.sgd(0.1), loss, samples=12, tail="drop")
    sw.Trainer(step, progress=False, device="cpu").fit(batches, validate=batches, epochs=1, fast_dev_run=True)
    assert (step.counters.updates, step.counters.samples) == (1, 12)


def test_a_fast_dev_run_leaves_a_run_alone(tmp_path):
    make(tmp_path).fit(loader(), epochs=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    trainer = make(tmp_path)
    for resume in (False, True):
        trainer.fit(loader(), epochs=1, resume=resume, fast_dev_run=True)
    assert trainer.step.counters.updates == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_training_after_a_fast_dev_run(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(loader(), epochs=1, fast_dev_run=True)
    assert trainer.fit(loader(), epochs=2).reason == "2 epochs are done"  # the rehearsal counts as an epoch
    assert trainer.step.counters.updates == 4
    assert [line["update"] for line in log(tmp_path) if line["kind"] == "epoch"] == [4]


def test_a_fast_dev_run_starts_an_epoch():
    trainer = make()
    trainer.fit(loader(), updates=1)
    with pytest.raises(ValueError, match="a fast_dev_run must start at the beginning of an epoch"):
        trainer.fit(loader(), epochs=1, fast_dev_run=True)
    trainer.fit(loader(), epochs=1)
    trainer.fit(loader(), epochs=1, fast_dev_run=True)
    assert trainer.step.counters.updates == 4


def test_a_fast_dev_run_still_wants_a_duration():
    with pytest.raises(ValueError, match="one of epochs= and updates= must be given"):
        make().fit(loader(), fast_dev_run=True)


@pytest.mark.parametrize("batches", [loader(shuffle=True), list(loader())], ids=["loader", "list"])
def test_overfit(batches):
    """At a learning rate of zero the losses tell which samples they are."""

    def losses(epochs, overfit_batches=None):
        seen = Seen()
        trainer = make(None, [seen], samples=None)
        trainer.step.optimizer.param_groups[0]["lr"] = 0.0
        trainer.fit(batches, epochs=epochs, overfit_batches=overfit_batches)
        return seen.losses

    first = losses(1)[:2]
    found = losses(3, overfit_batches=2)
    assert len(found) == 6
    for update, same in zip(found, first * 3, strict=True):
        assert torch.equal(update, same)
    assert len(losses(1, overfit_batches=99)) == 5  # no more than there are


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("where", [1, 2, 3, 4])
def test_overfit_resumes(tmp_path, where):
    whole = make(samples=5)
    whole.fit(loader(shuffle=True), epochs=3, overfit_batches=2)  # fourteen samples an epoch
    first = make(tmp_path, [ModelCheckpoint(every="1up")], samples=5)
    first.fit(loader(shuffle=True), updates=where, overfit_batches=2)
    second = make(tmp_path, samples=5)
    second.fit(loader(shuffle=True), epochs=3, resume=True, overfit_batches=2)
    assert torch.equal(parameters(second), parameters(whole))
    assert second.step.counters == whole.step.counters


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(overfit_batches=0), "overfit_batches must be a positive number of batches; found 0"),
        (dict(overfit_batches=True), "overfit_batches must be a positive number of batches; found True"),
        (dict(overfit_batches=0.5), r"overfit_batches must be a positive number of batches; found 0\.5"),
        (dict(fast_dev_run=3), "fast_dev_run must be True or False; found 3"),
    ],
)
def test_bad_rehearsals(given, message):
    with pytest.raises(ValueError, match=message):
        make().fit(loader(), epochs=1, **given)


@pytest.mark.parametrize("name", ["fast_dev_run", "overfit_batches", "sharded", "timeout"])
def test_arguments_that_belong_elsewhere(name):
    with pytest.raises(TypeError, match=rf"Trainer\.__init__\(\) got an unexpected keyword argument '{name}'"):
        make(**{name: 1})


def test_sharded_loaders_in_one_process():
    """The mark changes nothing."""
    marked, plain = make(), make()
    marked.fit(sw.already_sharded(loader(shuffle=True)), validate=sw.already_sharded(loader()), epochs=2)
    plain.fit(loader(shuffle=True), validate=loader(), epochs=2)
    assert torch.equal(parameters(marked), parameters(plain))
    batches = [(X, Y)]
    assert marked.evaluate(sw.already_sharded(batches)) == marked.evaluate(batches)
    assert torch.equal(marked.predict(sw.already_sharded(batches)), marked.predict(batches))
    assert (
        sw.already_sharded(sw.already_sharded(batches)).loader is batches
        and list(sw.already_sharded(batches)) == batches
    )


class ZMQInteractiveShell:
    """Name of the class of the shell in a Jupyter kernel."""


class Shell(ZMQInteractiveShell):
    """That of Colab."""


def fit_in(shell, monkeypatch, capsys, **options):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    make(progress=True, metrics={"accuracy": accuracy}, log_every="2up").fit(loader(), loader(), **options)
    return capsys.readouterr()


@pytest.mark.parametrize("shell", [ZMQInteractiveShell(), Shell()])
def test_a_notebook_shows_a_line_per_epoch_on_stdout(shell, monkeypatch, capsys):
    shown = fit_in(shell, monkeypatch, capsys, updates=5)
    assert shown.err == ""
    states = [line.split("\r") for line in shown.out.removesuffix("\n").split("\n")]
    assert [[re.sub(r"[\d.]+", "#", state.rstrip()) for state in line] for line in states] == [
        ["epoch #  update #  loss #  # samples/s"] * 2 + ["epoch #  train_loss #  loss #  accuracy #"],
        ["epoch #  update #  loss #  # samples/s", "validation after update #  loss #  accuracy #"],
        ["epoch #  update #  loss #  # samples/s"],  # the updates after the last log line
    ]
    assert [line[0].split()[:4] for line in states] == [
        ["epoch", "1", "update", "2"],
        ["epoch", "2", "update", "4"],
        ["epoch", "2", "update", "5"],
    ]
    for before, after in ((line[k], line[k + 1]) for line in states for k in range(len(line) - 1)):
        assert len(after) >= len(before.rstrip())  # nothing of the line before is left
    assert shown.out.endswith("\n")


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_ipython_in_a_terminal_is_no_notebook(shell, monkeypatch, capsys):
    shown = fit_in(shell, monkeypatch, capsys, epochs=1)
    assert shown.out == "" and shown.err.count("\n") == 3
