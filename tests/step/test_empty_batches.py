"""The error of an empty batch says which batch it is, and the window before it is given up."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.errors import BatchError

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


def batch(samples):
    return X[:samples], Y[:samples]


def loss_fn(model, batch):
    x, y = batch.values() if isinstance(batch, dict) else batch
    return F.cross_entropy(model(x), y, reduction="none")


def make(loss=loss_fn, **options):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    return sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **options)


def message(number=None, epoch=0):
    where = "" if number is None else f", batch {number} of epoch {epoch}, both counted from 0"
    return (
        f"a batch must have at least one sample; found an empty batch{where}. Check what the dataset, sampler or "
        "collate_fn returns there, or leave the batch out."
    )


OPTIONS = [
    {},
    {"samples": 4},
    {"samples": 6},
    {"samples": 1},
    {"microbatch": 2},
    {"transforms": [sw.clip(1.0)]},
    {"samples": 6, "transforms": [sw.clip(1.0)]},
    {"samples": 100, "transforms": [sw.clip(1.0)]},
    {"record": ["norms"]},
    {"microbatch": "auto"},
    {"samples": 6, "tail": "carry"},
]


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_which_batch(options, place):
    sizes = [4, 4, 4, 4]
    sizes[place] = 0
    step = make(**options)
    with pytest.raises(BatchError) as found:
        list(step.over(batch(size) for size in sizes))
    assert str(found.value) == message(place)
    used = step.counters.updates * (options.get("samples") or 4)
    assert step.counters.samples == used and not step._has_pending_samples  # the open window was given up
    assert len(list(step.over([batch(8)] * 20))) > 0


def test_in_a_later_epoch():
    step = make()
    step.run([batch(4)] * 3)
    with pytest.raises(BatchError) as found:
        step.run([batch(4), batch(4), batch(0)])
    assert str(found.value) == message(2, epoch=1)


@pytest.mark.parametrize("empty", [{"x": X[:0], "y": Y[:0]}, [X[:0], Y[:0]], (X[:0], Y[:0])], ids=["dict", "list", ""])
def test_batches_of_other_structure(empty):
    with pytest.raises(BatchError) as found:
        make().run([batch(4), empty])
    assert str(found.value) == message(1)


def test_a_loss_function_that_fails_at_an_empty_batch():
    """Its error does not say which batch it was; it is kept as the cause."""

    def loss(model, batch):
        assert len(batch[0]), "nothing there"
        return loss_fn(model, batch)

    with pytest.raises(BatchError) as found:
        make(loss).run([batch(4), batch(0)])
    assert str(found.value) == message(1) and str(found.value.__cause__).startswith("nothing there")


def test_by_hand():
    step = make()
    for call in (step, step.accumulate):
        with pytest.raises(BatchError) as found:
            call(batch(0))
        assert str(found.value) == message()
        assert not step._has_pending_samples
    step(batch(4))
    assert step.counters.updates == 1


def test_accumulated_samples_are_given_up():
    step = make()
    step.accumulate(batch(4))
    with pytest.raises(BatchError):
        step.accumulate(batch(0))
    assert not step._has_pending_samples and step.counters.samples == 0


@pytest.mark.parametrize("resumed", [False, True])
def test_in_a_trainer(tmp_path, resumed):
    """The number counts from the beginning of the epoch, also if the run was resumed in it."""

    def trainer():
        return sw.Trainer(make(), tmp_path, progress=False, device="cpu")

    data = [batch(4)] * 5 + [batch(0)] + [batch(4)]
    if resumed:
        trainer().fit(data, updates=3)
    made = trainer()
    with pytest.raises(BatchError) as found:
        made.fit(data, epochs=1, resume=True)
    assert str(found.value) == message(5)
    assert made.step.counters.updates == 5


def test_losses_of_nothing_are_another_mistake():
    with pytest.raises(sw.LossesError, match="losses must contain at least one sample"):
        make(lambda model, batch: loss_fn(model, batch)[:0]).run([batch(4)])
