"""`Trainer` on two and three ranks: what one process would do, to rounding; one log; all leave together."""

import json
import math
import signal
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import single_process
from spread_models import flat
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import samplewise as sw
from samplewise.loop.callbacks import EarlyStopping, ModelCheckpoint
from samplewise.loop.checkpoint.directory import Checkpoints
from samplewise.loop.checkpoint.io import read
from samplewise.loop.events import EVENTS
from samplewise.loop.loggers import CSV
from samplewise.parallel import collectives

SAMPLES = 23


def data(samples=SAMPLES):
    own = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(samples, 5, generator=own, dtype=torch.float64), torch.randint(0, 3, (samples,), generator=own)
    )


def loader(samples=SAMPLES, **options):
    return DataLoader(data(samples), **{"batch_size": 4, "shuffle": True, **options})


def trainer(
    run=None, callbacks=(), *, samples=6, lr=0.3, transforms=(), seed=1, dropout=0.0, parallel="ddp", **options
):
    torch.manual_seed(7 + collectives.rank())  # the ranks' models are made equal by the step
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples, transforms=transforms, parallel=parallel)
    return sw.Trainer(step, run, callbacks, progress=False, device="cpu", seed=seed, **options)


def accuracy(outputs, batch):
    return outputs.argmax(1) == batch[1]


def parameters(trainer):
    return flat(trainer.model)


def log(run):
    """Without times."""
    lines = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
    without = ("seconds", "samples_per_second", "compute_samples_per_second", "phases", "memory")
    return [{name: value for name, value in line.items() if name not in without} for line in lines]


def close(found, expected):
    """The same things, and numbers to rounding."""
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-6)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found == expected


# ------------------------------------------------------------------------------------------------------ what one would


class Largest:
    """A metric that knows nothing of ranks."""

    def __init__(self):
        self.reset()

    def update(self, outputs, target):
        self.found = max(self.found, float(outputs.max()))
        self.batches.append(len(target))

    def compute(self):
        return {"value": self.found, "samples": sum(self.batches)}

    def reset(self):
        self.found, self.batches = -math.inf, []


def fitted(run, samples=6, **options):
    import torchmetrics

    metrics = {
        "accuracy": accuracy,
        "largest": Largest(),
        "torchmetrics": torchmetrics.Accuracy(task="multiclass", num_classes=3),
    }
    made = trainer(run, [CSV()], samples=samples, metrics=metrics, log_every="2up", **options)
    reason = made.fit(loader(), validate=loader(11, batch_size=3), epochs=3).reason
    return parameters(made), reason, made.evaluate(loader(7)), made.step.counters


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    return run, fitted(run)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("team", ["two", "three"])
def test_ranks_do_what_one_process_does(team, request, alone, tmp_path):
    run, (expected, reason, metrics, counters) = alone
    found = request.getfixturevalue(team).run(fitted, tmp_path / "run")
    for parameters, *rest in found:
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(parameters, found[0][0])
        assert rest[0] == reason and close(rest[1], metrics)
        assert (rest[2].updates, rest[2].samples, rest[2].epochs) == (counters.updates, counters.samples, 3)
    assert close(log(tmp_path / "run"), log(run))
    there = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert there == sorted(path.name for path in run.iterdir())
    assert len((tmp_path / "run" / "train.csv").read_text().splitlines()) == len(
        (run / "train.csv").read_text().splitlines()
    )


def few(samples):
    import torchmetrics

    metrics = {"auroc": torchmetrics.AUROC(task="multiclass", num_classes=3), "mine": Largest(), "accuracy": accuracy}
    return trainer(metrics=metrics if samples > 1 else dict(list(metrics.items())[1:])).evaluate(loader(samples))


def test_validation_with_hardly_a_sample_for_each_rank(two):
    for samples in (1, 9):
        assert close(two.run(few, samples), [few(samples)] * 2)


def too_few():
    import torchmetrics

    trainer(metrics={"auroc": torchmetrics.AUROC(task="multiclass", num_classes=3)}).evaluate(loader(1))


def test_torchmetrics_needs_a_batch_on_every_rank(two):
    message = (
        "BatchError: every rank must have at least one batch for metric 'auroc', since torchmetrics cannot "
        "synchronize a metric without data; found 1 of 2 ranks without a batch. Use more samples, or a function "
        "(outputs, batch)."
    )
    assert two.errors(too_few) == [message] * 2


def divided_before(run):
    """By torch's sampler, which repeats a sample where shares would not be equal."""
    made = trainer(run, samples=None)
    sampler = DistributedSampler(data(), collectives.size(), collectives.rank(), shuffle=False)
    made.fit(sw.already_sharded(DataLoader(data(), batch_size=4, sampler=sampler)), epochs=1)
    return made.step.counters.samples, made.step.counters.updates, parameters(made)


def test_what_is_divided_already_is_taken_as_it_is(two, tmp_path):
    (samples, updates, found), (_, _, other) = two.run(divided_before, tmp_path / "run")
    assert (samples, updates) == (SAMPLES + 1, 3)
    assert torch.equal(found, other)


class Stream(IterableDataset):
    """Nobody knows how long it is."""

    def __iter__(self):
        return iter(data())


def streamed():
    made = trainer()
    made.fit(DataLoader(Stream(), batch_size=4), validate=DataLoader(Stream(), batch_size=3), epochs=2)
    return parameters(made)


def test_streams_without_a_length(two):
    expected = streamed()
    for found in two.run(streamed):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def all_at_one_rank():
    """What is divided before may leave a rank with nothing."""
    made = trainer()
    own = sw.already_sharded(loader(batch_size=SAMPLES, shuffle=False) if collectives.rank() == 0 else [])
    made.fit(own, validate=own, epochs=2)
    return parameters(made)


def test_a_rank_that_was_given_no_samples(two):
    expected = all_at_one_rank()
    for found in two.run(all_at_one_rank):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def rehearsed(run, samples):
    made = trainer(run, samples=samples)
    reason = made.fit(loader(), validate=loader(11), epochs=9, fast_dev_run=True).reason
    return reason, made.step.counters.updates, made.step.counters.samples


@pytest.mark.parametrize(("samples", "used"), [(None, 8), (1, 1), (6, 6), (13, 13), (50, SAMPLES)])
def test_a_rehearsal_is_the_first_update_of_all_ranks(samples, used, two, tmp_path):
    assert two.run(rehearsed, tmp_path / "run", samples) == [("fast_dev_run is done", 1, used)] * 2
    assert not (tmp_path / "run").exists()


def rehearsed_at_one_rank():
    made = trainer(samples=6)
    own = sw.already_sharded(loader() if collectives.rank() == 0 else [])
    made.fit(own, validate=own, epochs=1, fast_dev_run=True)
    return made.step.counters.updates, made.step.counters.samples


def test_a_rehearsal_with_samples_on_one_rank(two):
    assert two.run(rehearsed_at_one_rank) == [(1, 3)] * 2


def started_again(run):
    made = trainer(run, exists="new")
    result = made.fit(loader(), validate=loader(11, batch_size=3), updates=2)
    assert trainer(made.run, exists="resume").fit(loader(), updates=3).updates == 3
    trainer(made.run, exists="overwrite").fit(loader(), updates=1)
    return made.run, dict(result.metrics), parameters(made)


def test_ranks_agree_on_a_new_directory_and_on_the_last_validation(two, tmp_path):
    expected = started_again(tmp_path / "run")[1:]
    for name in ("run-2", "run-3"):
        for directory, *rest in two.run(started_again, tmp_path / "run"):
            assert directory == tmp_path / name
            torch.testing.assert_close(rest, list(expected), rtol=1e-10, atol=1e-12)
        assert [(line["kind"], line["update"]) for line in log(tmp_path / name)] == [("train", 1), ("end", 1)]


def overfitted(batch_size):
    made = trainer()
    made.fit(loader(batch_size=batch_size), epochs=3, overfit_batches=2)
    return parameters(made)


def test_overfitting_takes_the_first_batches_of_all(two):
    expected = overfitted(8)
    for found in two.run(overfitted, 4):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def wrapped(run, epochs):
    """A DistributedDataParallel of the user's."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    shared = nn.parallel.DistributedDataParallel(model) if collectives.size() > 1 else model
    made = sw.Trainer(
        sw.Step(shared, optimizer, nn.CrossEntropyLoss(), 6), run, progress=False, device="cpu", metrics={"a": accuracy}
    )
    made.fit(loader(), validate=loader(11), epochs=epochs, resume=True)
    return parameters(made), made.evaluate(loader(7)), made.predict(loader(7, shuffle=False))


def test_a_wrapper_of_the_users_is_trained_saved_and_looked_at_without(two, tmp_path):
    expected, metrics, outputs = wrapped(tmp_path / "alone", 2)
    two.run(wrapped, tmp_path / "two", 1)
    for found in (*two.run(wrapped, tmp_path / "two", 2), wrapped(tmp_path / "two", 2)):
        torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-12)
        assert close(found[1], metrics)
        torch.testing.assert_close(found[2], outputs, rtol=1e-10, atol=1e-12)


def joined_later(parallel):
    """As under torchrun, where it is the trainer that joins the ranks."""
    with single_process():
        model = nn.Linear(5, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), 6, parallel=parallel)
    made = sw.Trainer(step, progress=False, device="cpu")
    made.fit(loader(), updates=2)
    return parameters(made)


def test_a_step_that_was_made_before_its_ranks_were_joined(two):
    for parallel in (None, "ddp"):
        found, other = two.run(joined_later, parallel)
        assert torch.equal(found, other)
    message = (
        "DistributedError: the process group must exist before a step with parallel='fsdp' is created; found that it "
        "was initialized later. Initialize it before Step(...)."
    )
    assert two.errors(joined_later, "fsdp") == [message] * 2


# ------------------------------------------------------------------------------------------------------- going on


class Order:
    """Which samples went into each update on this rank."""

    def __init__(self):
        self.seen, self.updates = [], []

    def on_update(self, update):
        self.updates.append(self.seen)
        self.seen = []


def going_on(run, until, resume=True, dropout=0.0, parallel="ddp", best=0):
    """Trains until so many updates are made; says what the parameters are and which samples went into each update."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    order = Order()

    def loss_fn(model, batch):
        inputs, targets, ids = batch
        order.seen += ids.tolist() if model.training and torch.is_grad_enabled() else []
        return nn.functional.cross_entropy(model(inputs), targets, reduction="none")

    step = sw.Step(
        model, optimizer, loss_fn, 6, scheduler=scheduler, transforms=[sw.clip(1.0)], recheck=False, parallel=parallel
    )
    callbacks = [order, EarlyStopping("loss", patience=9), ModelCheckpoint(every="2up", best=best)]
    made = sw.Trainer(step, run, callbacks, progress=False, device="cpu", seed=1, log_every="2up")
    training, validation = (sw.Indexed(data(samples)) for samples in (SAMPLES, 11))
    training, validation = DataLoader(training, batch_size=4, shuffle=True), DataLoader(validation, batch_size=3)
    made.fit(training, validation, updates=until, resume=resume)
    return parameters(made), order.updates


def windows(found):
    """The samples of each update, of all ranks."""
    return [sorted(chain(*shares)) for shares in zip(*(updates for _, updates in found), strict=True)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    return run, going_on(run, 12)


# In the middle of an epoch of four updates, at its end, and in the next one.
@pytest.mark.slow
@pytest.mark.parametrize(
    "stop", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow), 6]
)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.slow), (2, 3)])
def test_resume_with_other_ranks(before, after, stop, two, three, undisturbed, tmp_path):
    run, (expected, updates) = undisturbed
    start = {1: lambda *given: [going_on(*given)], 2: lambda *given: two.run(going_on, *given)}
    start[3] = lambda *given: three.run(going_on, *given)
    begun = start[before](tmp_path / "run", stop)
    ended = start[after](tmp_path / "run", 12)
    for found, _ in ended:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert windows(begun) + windows(ended) == windows([(expected, updates)])
    assert close(log(tmp_path / "run"), log(run))


def test_ranks_and_one_process_take_turns(two, three, undisturbed, tmp_path):
    """Within an epoch, from batches of which a part is used."""
    expected, updates = undisturbed[1]
    found = [two.run(going_on, tmp_path / "run", 5)]
    found.append([going_on(tmp_path / "run", 6)])
    found.append(three.run(going_on, tmp_path / "run", 7))
    found.append([going_on(tmp_path / "run", 12)])
    torch.testing.assert_close(found[-1][0][0], expected, rtol=1e-9, atol=1e-11)
    assert [window for some in found for window in windows(some)] == windows([(expected, updates)])


def is_dtensor(*ends):
    made = trainer()
    for end in ends:
        made.fit(loader(), updates=end)
    return parameters(made)


def test_resume_in_the_middle_of_a_batch(two):
    expected = is_dtensor(9)
    for found in two.run(is_dtensor, 2, 3, 9):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def nothing():
    trainer().fit(loader(3, drop_last=True), epochs=1)


def nothing_for_anybody():
    trainer().fit(sw.already_sharded(loader(3, drop_last=True)), epochs=1)


@pytest.mark.parametrize("fit", [nothing, nothing_for_anybody])
def test_a_loader_that_is_empty_on_all_ranks(two, fit):
    message = "BatchError: an epoch must have at least one batch; found none in epoch 1. Check the loader: a generator"
    assert all(error.startswith(message) for error in two.errors(fit))


def fully_sharded(run, until):
    found, updates = going_on(run, until, parallel="fsdp", best=1)
    return found, updates


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_what_ranks_share_is_saved_and_resumed(before, after, two, three, undisturbed, tmp_path):
    expected, updates = undisturbed[1]
    start = {1: lambda _, *given: [going_on(*given)], 2: two.run, 3: three.run}
    begun = start[before](fully_sharded, tmp_path / "run", 6)
    ended = start[after](fully_sharded, tmp_path / "run", 12)
    state, path = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert path.name == "update-000000012.ckpt"
    found = torch.cat([tensor.flatten() for tensor in state["model"].values()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert windows(begun) + windows(ended) == windows([(expected, updates)])
    [best] = (tmp_path / "run").glob("best-*.ckpt")
    assert sum(tensor.numel() for tensor in read(best)["model"].values()) == len(expected)


def test_resume_with_the_same_number_of_ranks_is_bit_identical(two, tmp_path):
    whole = two.run(going_on, tmp_path / "whole", 12, True, 0.3)
    for stop in (3, 7):
        two.run(going_on, tmp_path / "parts", stop, True, 0.3)
    parts = two.run(going_on, tmp_path / "parts", 12, True, 0.3)
    assert all(torch.equal(found, expected) for (found, _), (expected, _) in zip(parts, whole, strict=True))
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    assert not torch.equal(whole[0][0], going_on(tmp_path / "alone", 12, True, 0.3)[0])  # dropout was there


# ---------------------------------------------------------------------------------------------- leaving, and failing


class Asks:
    """One rank wants to stop after an update."""

    def __init__(self, rank, update, how):
        self.rank, self.update, self.how = rank, update, how

    def on_update(self, trainer, update):
        if collectives.rank() == self.rank and update.index == self.update:
            self.how(trainer)


def asked(trainer):
    trainer.stop("rank 1 has seen enough")


def signaled(trainer):
    signal.raise_signal(signal.SIGTERM)


def stopped(run, how):
    made = trainer(run, [Asks(1, 5, how), ModelCheckpoint(every="100up")])
    reason = made.fit(loader(), epochs=5).reason
    return reason, made.step.counters.updates, parameters(made)


@pytest.mark.parametrize(("how", "reason"), [(asked, "rank 1 has seen enough"), (signaled, "stopped by SIGTERM")])
def test_all_ranks_stop_after_the_same_update_and_can_resume(how, reason, two, tmp_path):
    found = two.run(stopped, tmp_path / "run", how)
    assert [(why, updates) for why, updates, _ in found] == [(reason, 6)] * 2
    assert torch.equal(found[0][2], found[1][2])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["update-000000006.ckpt"]
    assert log(tmp_path / "run")[-1] == {"kind": "end", "update": 6, "reason": reason}


class Killed(Dataset):
    """Rank 1 is asked to leave when it asks for one of the samples; and its loader's workers with it, as happens to a
    group of processes.
    """

    def __init__(self, samples, number):
        self.data, self.number, self.killed = data(samples), number, False

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        if i == self.number and collectives.rank() == 1:
            self.killed = True
            signal.raise_signal(signal.SIGTERM)
        if self.killed:
            raise RuntimeError("DataLoader worker exited unexpectedly")
        return self.data[i]


def left_in_a_window(run, training=None, validation=None, tail="update"):
    made = trainer(run, [ModelCheckpoint(every="100up")], dropout=0.3)
    made.step.tail = tail
    training = DataLoader(Killed(SAMPLES, training), batch_size=4, shuffle=True)
    validation = DataLoader(Killed(11, validation), batch_size=4)
    reason = made.fit(training, validation, epochs=3, resume=True).reason
    return reason, made.step.counters.updates, made.step.counters.samples, parameters(made)


# In the first window, in the middle, at the beginning of the second epoch; and in validation.
@pytest.mark.slow
@pytest.mark.parametrize(("samples", "updates"), [((5,), 0), ((2,), None), ((4,), 4), ((None, 9), 4)])
def test_a_rank_whose_loader_was_killed_along_with_it(samples, updates, two, tmp_path):
    """Nobody can end the window: all give it up, save, and come back to its first sample."""
    [(reason, made, used)] = {told[:3] for told in two.run(left_in_a_window, tmp_path / "run", *samples)}
    assert reason == "stopped by SIGTERM" and used == min(6 * made, SAMPLES)
    assert made == updates or (updates is None and 0 < made < 4)
    resumed, whole = two.run(left_in_a_window, tmp_path / "run"), two.run(left_in_a_window, tmp_path / "whole")
    assert [told[:3] for told in resumed] == [("3 epochs are done", 12, 3 * SAMPLES)] * 2
    assert all(torch.equal(one[3], other[3]) for one, other in zip(resumed, whole, strict=True))
    assert log(tmp_path / "run")[-3:] == log(tmp_path / "whole")[-3:]


def test_a_window_with_samples_of_the_epoch_before_is_not_given_up(two, tmp_path):
    other, own = two.errors(left_in_a_window, tmp_path / "run", 2, None, "carry")
    assert own.startswith(
        "LoaderKilled: the loader of a rank must work until all ranks stop; found that it failed after SIGTERM with "
    )
    assert "rank 1 of 2 failed: LoaderKilled: " in other


class StopsItself:
    def __iter__(self):
        yield from loader()
        raise sw.LoaderStopped


def stopped_by_its_loader():
    trainer().fit(StopsItself(), epochs=1)


def test_a_loader_must_not_stop_one_rank(two):
    message = "DistributedError: with several ranks a loader must not raise LoaderStopped, since all ranks stop after"
    assert all(message in error for error in two.errors(stopped_by_its_loader))


def patient(run):
    """A validation loss that does not become better."""
    made = trainer(run, [EarlyStopping("loss", patience=2)], lr=0.0)
    return made.fit(loader(), validate=loader(11), epochs=9).reason, made.step.counters.epochs


def test_early_stopping_is_decided_alike(two, tmp_path):
    assert two.run(patient, tmp_path / "run") == [("loss has not improved for 2 epochs", 3)] * 2


class Fails:
    def __init__(self, event):
        self.event = event
        setattr(self, event, self._fail)

    def _fail(self):
        if collectives.rank() == 1:
            raise RuntimeError(f"out of memory in {self.event}")


class BadSample(Dataset):
    """Number 9 cannot be read."""

    def __init__(self):
        self.data = data()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        if i == 9:
            raise OSError("sample 9 cannot be read")
        return self.data[i]


def failing(run, where):
    callbacks = [Fails(where)] if where.startswith("on_") else []
    made = trainer(run, callbacks, metrics={"broken": broken} if where in ("validation", "evaluate") else None)
    if where == "trainer":
        made = trainer(log_every=("1up", "0up")[collectives.rank()])
    if where == "arguments":
        made.fit(loader(), epochs=(1, "one")[collectives.rank()])
    if where == "evaluate":
        made.evaluate(loader())
    if where == "data":
        made.fit(DataLoader(BadSample(), batch_size=4), epochs=1)
    if where == "NaN":
        x, y = data().tensors
        x[9] = torch.nan
        made.fit(DataLoader(TensorDataset(x, y), batch_size=4), epochs=1)
    made.fit(loader(), validate=loader(11), epochs=2)


def broken(outputs, batch):
    if collectives.rank() == 1:
        raise ValueError("a metric fails")
    return torch.ones(len(outputs))


FAILURES = {
    "trainer": "ValueError: log_every must be a duration such as '50up' (updates) or '1000samples'; found '0up'",
    "arguments": "ValueError: epochs must be a positive whole number; found 'one'",
    "data": "OSError: sample 9 cannot be read",
    "validation": "ValueError: a metric fails",
    "evaluate": "ValueError: a metric fails",
    "NaN": "NonFiniteLossError: losses must be finite; ",
    **{event: f"RuntimeError: out of memory in {event}" for event in EVENTS if event not in ("on_error",)},
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("where", FAILURES)
def test_an_error_of_one_rank_ends_all_with_its_message(where, two, tmp_path):
    other, own = two.errors(failing, tmp_path / "run", where)
    assert own.startswith(FAILURES[where])
    assert other.startswith("DistributedError: rank 1 of 2 failed: ")
    assert FAILURES[where] in other
    assert two.run(dist.get_world_size) == [2, 2]  # they are still in step
