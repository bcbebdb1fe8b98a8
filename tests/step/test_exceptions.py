"""Whatever raises, wherever: parameters, optimizer and buffers are as before the window, and the step goes on."""

import copy
import re
from dataclasses import asdict, replace
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor, nn

import samplewise as sw

# Bounds are small here so that every sample is clipped.
pytestmark = pytest.mark.filterwarnings("ignore:every weight of the first update")

SAMPLES, MICROBATCH, BATCH = 8, 3, 5  # windows are made of pieces of 3, 2 and 3, or of 2, 3, 2 and 1


class Model(nn.Module):
    """With a running mean, as BatchNorm has, that samples do not interact through."""

    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.calls = self.calls + 1  # another tensor each time
        return self.f(x)


class Boom(Exception):
    pass


class Fuse:
    """Raises at the n-th touch after it was lit, once."""

    def __init__(self):
        self.queue = SimpleQueue()  # a number would be restored between two passes

    def light(self, touches, error=Boom):
        for _ in range(touches):
            self.queue.put(None)
        self.queue.put(error)

    def touch(self):
        error = None if self.queue.empty() else self.queue.get()
        if error is not None:
            raise error("boom")


class Backwards(torch.autograd.Function):
    """Nothing, until the backward pass comes to it."""

    @staticmethod
    def forward(ctx, x, fuse):
        ctx.fuse = fuse
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.fuse.touch()
        return gradient, None


def losses_of(model, batch, fuse, where):
    x, y = batch
    h = model(x)
    if where == "loss":
        fuse.touch()  # buffers have moved on already
    if where == "backward":
        first, tanh, last = model.f
        h = last(Backwards.apply(tanh(first(x)), fuse))  # the last layer has its gradient by then
    return (h.squeeze(1) - y).square()


class Training:
    """A step and all that it may change; the fuse sits somewhere in it."""

    def __init__(self, transforms=(), where="loss", **options):
        torch.manual_seed(0)
        self.fuse, self.model = Fuse(), Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        options = dict(samples=SAMPLES, microbatch=MICROBATCH, recheck=False, scheduler=self.scheduler) | options
        if callable(transforms):
            transforms = transforms(self)
        self.step = sw.Step(
            self.model,
            self.optimizer,
            lambda model, batch: losses_of(model, batch, self.fuse, where),
            transforms=transforms,
            **options,
        )

    def state(self):
        parts = self.model, self.optimizer, self.scheduler
        return copy.deepcopy([*(part.state_dict() for part in parts), asdict(self.step.counters)])


def same(found, expected):
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def batches(total=16, size=BATCH):
    """So many samples, in batches of five and a rest."""
    x, y = torch.randn(total, 6), torch.randn(total)
    return list(zip(x.split(size), y.split(size), strict=True))


def over(step, data):
    return list(step.over(data))


def by_hand(step, data):
    updates = [update for batch in data for update in step(batch)]
    last = step.flush()
    return updates + [last] * (last is not None)


def accumulated(step, data):
    """One window of it all."""
    for batch in data:
        step.accumulate(batch)
    return [step.apply()]


DRIVERS = {"over": over, "run": lambda step, data: step.run(data), "by hand": by_hand, "accumulated": accumulated}
drivers = pytest.mark.parametrize("drive", DRIVERS.values(), ids=DRIVERS)


def assert_as_before(training, before):
    *state, counters = training.state()
    *state_before, counters_before = before
    assert same(state, state_before)
    assert counters == counters_before
    assert all(p.grad is None for p in training.model.parameters())  # nobody is to step with half a sum
    assert training.step.flush() is None  # no window is open
    with pytest.raises(sw.BatchError, match="found none accumulated"):
        training.step.apply()


def check(make, drive=over, touches=0, error=Boom):
    """A good window, one that fails, and a good one: as if the second had not been."""
    first, broken, last = (batches(SAMPLES) for _ in range(3))
    training, twin = make(), make()
    drive(training.step, first)
    before = training.state()
    training.fuse.light(touches, error)
    with pytest.raises(error, match="boom"):
        drive(training.step, broken)
    assert training.fuse.queue.empty()
    assert_as_before(training, before)
    drive(training.step, last)
    for data in (first, last):
        drive(twin.step, data)
    (*found, counters), (*expected, _) = training.state(), twin.state()
    assert same(found, expected)
    assert (counters["samples"], counters["updates"]) == (2 * SAMPLES, 2)


# ------------------------------------------------------------- in the loss function


CHAINS = {
    "plain": (),
    "noise": [sw.noise(0.0)],
    "clip": [sw.clip(0.1)],
    "window": [sw.normalize("mean")],
    "group": [sw.group(lambda batch: (batch[1] > 0).tolist()), sw.clip(0.1)],
}
chains = pytest.mark.parametrize("transforms", CHAINS.values(), ids=CHAINS)


@pytest.mark.sweep(1 / 4)
@drivers
@chains
@pytest.mark.parametrize("piece", [0, 1, 2])
def test_in_a_piece_of_the_window(drive, transforms, piece):
    check(lambda: Training(transforms), drive, piece)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, MemoryError])
@pytest.mark.parametrize("transforms", [(), CHAINS["clip"], CHAINS["window"]], ids=["plain", "clip", "window"])
@pytest.mark.parametrize("drive", [by_hand, accumulated])
def test_of_every_kind(error, transforms, drive):
    check(lambda: Training(transforms), drive, 1, error)


@pytest.mark.sweep(1 / 3)
@drivers
@chains
@pytest.mark.parametrize("piece", [0, 2])
def test_in_the_backward_pass(drive, transforms, piece):
    check(lambda: Training(transforms, where="backward"), drive, piece)


def test_an_interrupted_backward_pass():
    check(lambda: Training(where="backward"), by_hand, 1, KeyboardInterrupt)


@pytest.mark.parametrize("passes", [3, 4, 5])
def test_in_the_second_pass_over_a_window(passes):
    """Transforms of a window compute it twice: the numbers of three pieces, then their sum."""
    check(lambda: Training(CHAINS["window"]), over, passes)


def test_in_the_very_first_window():
    training, twin = Training(), Training()
    before, data = training.state(), batches(SAMPLES)
    training.fuse.light(1)
    with pytest.raises(Boom):
        over(training.step, data)
    assert_as_before(training, before)
    for each in (training, twin):
        over(each.step, data)
    assert same(training.state()[:3], twin.state()[:3])


def test_in_the_first_look():
    """It is the update's turn to raise; an interrupt is nobody's to swallow."""
    training = Training(recheck=None)
    before = training.state()
    training.fuse.light(0, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        over(training.step, batches(SAMPLES))
    assert_as_before(training, before)
    assert training.model.training


def test_in_several_windows_one_after_the_other():
    training, twin = Training(), Training()
    data = batches(SAMPLES)
    for touches in (0, 2, 1):
        training.fuse.light(touches)
        with pytest.raises(Boom):
            over(training.step, data)
    for each in (training, twin):
        over(each.step, data)
    assert same(training.state()[:3], twin.state()[:3])


def test_as_many_as_fit_of_one_window():
    """Found while trying sizes: what is no lack of memory is passed on."""
    check(lambda: Training(microbatch="auto"), over, 1)


def test_the_step_that_ends_inside_a_batch():
    """Two updates come out of one batch; the second fails."""
    training, twin = Training(), Training()
    x, y = torch.randn(16, 6), torch.randn(16)
    training.fuse.light(4)  # the first window has three pieces
    updates = training.step.over([(x, y)])
    next(updates)
    before = training.state()
    with pytest.raises(Boom):
        next(updates)
    assert_as_before(training, before)
    assert over(training.step, []) == []  # what was left of the batch is not taken up
    over(twin.step, [(x[:8], y[:8])])
    assert same(training.state()[:3], twin.state()[:3])


# ------------------------------------------------------------- in what the user gave besides


def touching(training, value):
    training.fuse.touch()
    return value


PLACES = {
    "weight": lambda training: [sw.weight(lambda losses: touching(training, torch.ones_like(losses)))],
    "weight of the window": lambda training: [
        sw.weight(lambda losses: touching(training, torch.ones_like(losses)), window=True)
    ],
    "plain function": lambda training: [lambda norms: touching(training, 1 / (1 + norms))],
    "after another": lambda training: [sw.clip(0.1), lambda norms: touching(training, 1 / (1 + norms))],
    "group key": lambda training: [
        sw.group(lambda batch: touching(training, (batch[1] > 0).tolist())),
        sw.clip(0.1),
    ],
    "after grouping": lambda training: [
        sw.group(lambda batch: (batch[1] > 0).tolist()),
        lambda norms: touching(training, 1 / (1 + norms)),
    ],
    "reference": lambda training: [
        sw.align(
            lambda: touching(training, {name: torch.ones_like(p) for name, p in training.model.named_parameters()})
        )
    ],
    "reference of the window": lambda training: [
        sw.align(lambda: touching(training, {n: torch.ones_like(p) for n, p in training.model.named_parameters()})),
        sw.normalize("mean"),
    ],
}


@pytest.mark.sweep(1 / 3)
@drivers
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_in_a_transform(drive, place):
    check(lambda: Training(place, where="nowhere"), drive)


@pytest.mark.parametrize("place", ["weight", "plain function", "after another"])
@pytest.mark.parametrize("piece", [1, 2])
def test_in_a_transform_in_the_middle_of_the_window(place, piece):
    check(lambda: Training(PLACES[place], where="nowhere"), over, piece)


@drivers
def test_a_transform_that_answers_with_nonsense(drive):
    answers = {"right": True}

    def weigh(losses):
        return torch.ones_like(losses) if answers["right"] else torch.ones(len(losses) + 1)

    training = Training([weigh])
    drive(training.step, batches(SAMPLES))
    before = training.state()
    answers["right"] = False
    with pytest.raises(sw.TransformError, match="one coefficient per sample"):
        drive(training.step, batches(SAMPLES))
    assert_as_before(training, before)


def test_an_optimizer_that_raises_before_it_does_anything():
    def make():
        training = Training(where="nowhere")
        training.optimizer.register_step_pre_hook(lambda *_: training.fuse.touch())
        return training

    check(make)


def test_noise_that_raises():
    """On the sum, when everything else is done."""

    def make():
        training = Training([sw.noise(0.0)], where="nowhere")
        (noise,) = training.step.transforms.on_sum
        training.step.transforms = [replace(noise, apply_=lambda sums: training.fuse.touch())]
        return training

    check(make)


# ------------------------------------------------------------- in the user's own loop


def test_a_loop_that_raises_by_itself_keeps_what_was_not_used():
    """Not the step's affair: the update is made, and the samples left over wait."""
    training, twin = Training(), Training()
    data = batches(16)

    def loop():
        for _ in training.step.over(data[:2]):  # ten samples: one update, and two are left
            raise Boom

    with pytest.raises(Boom):
        loop()
    over(training.step, data[2:])
    over(twin.step, data)
    assert same(training.state()[:3], twin.state()[:3])


def test_accumulated_windows_are_given_up_as_a_whole():
    """What was accumulated before the failing batch is gone as well."""
    training, twin = Training(), Training()
    first, second, third = batches(15)
    training.step.accumulate(first)
    training.fuse.light(1)
    with pytest.raises(Boom):
        training.step.accumulate(second)
    for each in (training, twin):
        each.step.accumulate(third)
        assert each.step.apply().samples == 5
    assert same(training.state()[:3], twin.state()[:3])


def test_a_loader_that_fails_in_the_middle_of_a_window():
    model = nn.Linear(6, 1)
    before = model.weight.detach().clone()
    step = sw.Step(model, sw.sgd(0.1), lambda m, b: m(b).square()[:, 0], samples=8)

    def loader():
        yield torch.ones(5, 6)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        step.run(loader())
    assert step.flush() is None
    assert step.counters.samples == 0
    assert torch.equal(model.weight, before)


# ------------------------------------------------------------- mistakes in batches, named in notes


def squares(model, batch):
    inputs, targets = batch
    return (model(inputs).squeeze(-1) - targets).square()


ROWS, TARGETS = torch.randn(5, 3), torch.randn(5)
SINGLE = r"entries of shape \(\d,\) and \(\), which look like a single sample.* \(x\[None\], y\[None\]\)"
ARRAYS = r"samplewise: the batch holds ndarray in place of tensors\. Use a DataLoader"
DTYPES = r"samplewise: the batch holds torch.float64, the parameters are torch.float32\. .* x\.to\(torch.float32\)"


@pytest.mark.parametrize("loss_fn", [squares, nn.MSELoss()], ids=["function", "criterion"])
@pytest.mark.parametrize(
    ("batch", "note"),
    [
        ((ROWS[0], TARGETS[0]), SINGLE),
        ((ROWS[0], 1.0), SINGLE),
        ((ROWS.numpy(), TARGETS.numpy()), ARRAYS),
        ((ROWS.double(), TARGETS[:, None]), DTYPES),
    ],
    ids=["single", "number", "arrays", "double"],
)
def test_an_error_names_a_mistake_in_the_batch(batch, note, loss_fn):
    model = nn.Linear(3, 1)
    for run in (sw.Step(model, sw.sgd(0.1), loss_fn, samples=1).run, lambda b: list(sw.scan(model, loss_fn, b))):
        with pytest.raises((RuntimeError, TypeError, AttributeError, sw.BatchError)) as caught:
            run([batch])
        assert re.search(note, "".join([str(caught.value), *getattr(caught.value, "__notes__", [])]))


def test_an_error_of_an_ordinary_batch_has_no_note():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        sw.Step(nn.Linear(4, 1), sw.sgd(0.1), squares).run([(ROWS, TARGETS)])
    assert not hasattr(caught.value, "__notes__")


def test_a_second_loss_is_not_taken_for_counts():
    def two(model, batch):
        losses = squares(model, batch)
        return losses, losses.sqrt()

    with pytest.raises(
        sw.LossesError, match=r"counts, the second result .* For two losses of a sample, return their sum"
    ):
        sw.Step(nn.Linear(3, 1), sw.sgd(0.1), two).run([(ROWS, TARGETS)])


def test_a_list_of_losses_is_explained():
    with pytest.raises(sw.LossesError, match=r"found list\. .* or add up several losses of each sample"):
        sw.Step(nn.Linear(3, 1), sw.sgd(0.1), lambda m, b: [squares(m, b), squares(m, b)]).run([(ROWS, TARGETS)])
