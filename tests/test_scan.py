"""`sw.scan`: results do not depend on the microbatch size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unrestored import Unrestored

import samplewise as sw
from samplewise.engine.graph.saved import HOOKS_ARE_VISIBLE
from samplewise.testing.case import noise


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture
def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.0), nn.Tanh(), nn.Linear(16, 3)).double()
    return model, noise(23, 6).double(), torch.arange(23) % 3


@pytest.mark.parametrize("microbatch", [None, 1, 4, 100, "auto"])
def test_every_sample_once_in_order(task, microbatch):
    model, x, y = task
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    found = [(batch[1], g.norms()) for batch, g in sw.scan(model, loss_fn, loader, microbatch=microbatch)]
    assert torch.equal(torch.cat([labels for labels, _ in found]), y)
    torch.testing.assert_close(torch.cat([n for _, n in found]), sw.gradients(loss_fn(model, (x, y)), model).norms())
    sizes = [len(n) for _, n in found]
    expected = {None: [10, 10, 3], 1: [1] * 23, 4: [4, 4, 2, 4, 4, 2, 3], 100: [10, 10, 3], "auto": [10, 10, 3]}
    assert sizes == expected[microbatch]


def test_auto_stays_within_its_memory(task):
    """Also without a number: the default is a quarter of the free memory."""
    model, x, y = task
    assert [len(g) for _, g in sw.scan(model, loss_fn, [(x, y)], microbatch=sw.auto())] == [23]
    sizes = [len(g) for _, g in sw.scan(model, loss_fn, [(x, y)], microbatch=sw.auto(memory=3000))]
    assert sum(sizes) == 23
    assert max(sizes) < 23


def test_a_forward_pass_that_did_not_fit_changes_nothing(task):
    _, x, y = task
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 16), nn.Dropout(), nn.Linear(16, 3)).double()
    tries = Unrestored()

    def counted(model, batch):
        tries.append(len(batch[0]))
        return loss_fn(model, batch)

    state = torch.get_rng_state()
    piece, _ = next(sw.scan(model, counted, [(x, y)], microbatch=sw.auto(5000)))
    assert len(tries) > 1
    assert model[0].num_batches_tracked == 1
    seen = torch.get_rng_state()
    torch.set_rng_state(state)
    loss_fn(model, piece)
    assert torch.equal(seen, torch.get_rng_state())


def test_auto_is_halved_when_the_device_runs_out_of_memory(task):
    """The size found in one batch is that of the next one; a sample alone is not tried again."""
    model, x, y = task
    room = [6]
    sizes = Unrestored()

    def loss_of_some(model, batch):
        sizes.append(len(batch[0]))
        if len(batch[0]) > room[0]:
            raise torch.OutOfMemoryError("no room")
        return loss_fn(model, batch)

    batches = [(x, y), (x[:9], y[:9])]
    found = [(len(g), g.norms()) for _, g in sw.scan(model, loss_of_some, batches, microbatch=sw.auto(2**30))]
    assert [size for size, _ in found] == [6, 6, 6, 5, 6, 3]
    expected = [sw.gradients(loss_fn(model, batch), model).norms() for batch in batches]
    torch.testing.assert_close(torch.cat([norms for _, norms in found]), torch.cat(expected))
    room[0] = 0
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        next(sw.scan(model, loss_of_some, batches, microbatch=sw.auto(2**30)))
    assert sizes.take()[-2:] == [2, 1]


def test_other_errors_are_not_retried(task):
    model, x, y = task
    calls = Unrestored()

    def failing(model, batch):
        calls.append(1)
        raise ArithmeticError("wrong")

    with pytest.raises(ArithmeticError, match="wrong"):
        next(sw.scan(model, failing, [(x, y)]))
    assert len(calls) == 1


def test_losses_with_counts(task):
    model, x, y = task
    ((_, g),) = sw.scan(model, lambda m, b: (loss_fn(m, b), torch.ones(len(b[0]))), [(x, y)])
    assert len(g) == 23


def test_bad_arguments(task):
    model, x, y = task
    with pytest.raises(
        ValueError, match=r"microbatch must be a positive integer, None, .auto. or sw\.auto\(memory\); found 0"
    ):
        next(sw.scan(model, loss_fn, [(x, y)], microbatch=0))
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        next(sw.scan(model, nn.TripletMarginLoss(), [(x, y)]))


def test_a_criterion(task):
    model, x, y = task
    ((_, g),) = sw.scan(model, nn.CrossEntropyLoss(), [(x, y)])
    torch.testing.assert_close(g.norms(), sw.gradients(loss_fn(model, (x, y)), model).norms())


def test_swapped_arguments_are_refused_before_the_first_batch(task):
    model, x, y = task
    with pytest.raises(TypeError, match=r"found the function loss_fn .*Write sw\.scan\(model, loss_fn, loader\)"):
        sw.scan(loss_fn, model, [(x, y)])
    with pytest.raises(TypeError, match=r"loss_fn must be a function .*; found list"):
        sw.scan(model, [(x, y)], loss_fn)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            (torch.ones(3, 6), torch.zeros(3)),
            r"found a tuple of 2 tensors with 3 rows each, which is one batch. Pass a",
        ),
        ((torch.ones(3, 6), torch.zeros(3, 6).long()), r"found a tuple of 2 tensors with 3 rows each, which is one b"),
        (torch.ones(3, 6), r"found a Tensor of shape \(3, 6\), whose rows are not batches"),
        (TensorDataset(torch.ones(3, 6)), r"found a TensorDataset, whose items are single samples\. Pass DataLoader"),
        (None, "a loader must be an iterable of batches; found a NoneType"),
    ],
    ids=["batch", "batch of one shape", "tensor", "dataset", "none"],
)
def test_something_that_yields_no_batches(task, loader, message):
    with pytest.raises(sw.BatchError, match=message):
        sw.scan(task[0], loss_fn, loader)


def test_a_loss_function_that_returns_nothing(task):
    model, x, y = task
    with pytest.raises(sw.LossesError, match=r"found NoneType\. Return the losses from the loss function"):
        next(sw.scan(model, lambda model, batch: None, [(x, y)]))


@pytest.mark.skipif(not HOOKS_ARE_VISIBLE, reason="torch does not show what hooks have saved")
@pytest.mark.parametrize("microbatch", [None, "auto"])
def test_slices_of_sample_data_interact(microbatch):
    """The hooks that measure memory keep the base of a slice, by which it is recognized as sample data."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 3

    def centered(model, batch):
        center = (batch[0][1:] @ model.weight.T).mean(0)  # five of six samples
        return F.cross_entropy(model(batch[0]) - center, batch[1], reduction="none")

    ((_, g),) = sw.scan(model, centered, [(x, y)], microbatch=microbatch)
    with pytest.raises(sw.SamplesInteractError, match=r"Mean .* mixes samples"):
        g.norms()


def test_batches_that_are_tensors_of_other_lengths():
    """Padded sequences: one row per sample, and as many columns as the longest one has."""
    model = nn.Embedding(9, 4)
    loader = (torch.ones(3, 5).long(), torch.ones(3, 7).long())
    found = [len(g) for _, g in sw.scan(model, lambda model, batch: model(batch).square().sum((1, 2)), loader)]
    assert found == [3, 3]
