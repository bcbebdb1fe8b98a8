"""microbatch="auto": what does not fit is halved and tried again, and nobody can tell from the result."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from unrestored import Unrestored

import samplewise as sw

# Bounds are small here so that every sample is clipped.
pytestmark = pytest.mark.filterwarnings("ignore:every weight of the first update")

N = 16
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(N) % 3


class Counting(nn.Module):
    """A buffer that changes with every pass, on which the result depends."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.passes += 1
        return x / self.passes


class Heavy(torch.autograd.Function):
    """Does nothing, but its backward pass has no room for more than `limit` samples."""

    limit = N

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if len(g) > Heavy.limit:
            raise torch.OutOfMemoryError("CUDA out of memory in backward")
        return g


class HeavyBackward(nn.Module):
    def forward(self, x):
        return Heavy.apply(x)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def net_with_traces():
    """Random numbers and a buffer are used up by a forward pass, and the last layer's gradient is there when the
    backward pass fails."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), Counting(), nn.Dropout(), HeavyBackward(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def losses_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def cannot_allocate():
    torch.empty(1 << 60, dtype=torch.uint8)  # the CPU allocator's own error, a RuntimeError


def memory_error():
    raise MemoryError


def limited(limit, tries=None, fail=out_of_memory):
    """A loss that has no room for more than `limit` samples; it finds out when all is computed."""

    def loss_fn(model, batch):
        if tries is not None:
            tries.append(len(batch[0]))
        losses = losses_of(model, batch)
        if len(losses) > limit:
            fail()
        return losses

    return loss_fn


def make_step(model, loss_fn, **options):
    return sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_fn, **options)


def textbook(*updates):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for window in updates:
        optimizer.zero_grad()
        losses_of(model, (X[window], Y[window])).mean().backward()
        optimizer.step()
    return model


def rows(start, stop):
    return X[start:stop], Y[start:stop]


def assert_same(found, expected, tolerance=1e-10):
    found, expected = parameters_to_vector(found.parameters()), parameters_to_vector(expected.parameters())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def size_found(step):
    return step.state_dict()["microbatch"]


@pytest.mark.parametrize("fail", [out_of_memory, cannot_allocate, memory_error])
def test_halves_and_remembers(fail):
    tries, model = Unrestored(), net()
    step = make_step(model, limited(2, tries, fail), samples=8, microbatch="auto", recheck=False)
    step.run([rows(0, 16)])
    assert tries.take() == [8, 4, *[2] * 4, *[2] * 4]
    assert size_found(step) == 2
    assert step.counters.microbatches == 8
    assert step.counters.samples == 16
    assert_same(model, textbook(range(8), range(8, 16)))


def test_what_fits_is_taken_whole():
    tries, model = [], net()
    step = make_step(model, limited(16, tries), samples=8, microbatch="auto", recheck=False)
    step.run([rows(0, 16)])
    assert tries == [8, 8]
    assert size_found(step) is None
    assert_same(model, textbook(range(8), range(8, 16)))


@pytest.mark.parametrize("batch", [3, 7, 16])
@pytest.mark.parametrize("samples", [None, 5, 10])
@pytest.mark.parametrize("limit", [1, 3])
def test_any_sizes(batch, samples, limit):
    tries, model = [], net()
    step = make_step(model, limited(limit, tries), samples=samples, microbatch="auto", recheck=False)
    step.run([rows(k, min(k + batch, N)) for k in range(0, N, batch)])
    size = samples or batch
    assert_same(model, textbook(*(range(k, min(k + size, N)) for k in range(0, N, size))))
    assert size_found(step) in range(1, limit + 1) if min(size, batch) > limit else size_found(step) is None


@pytest.mark.parametrize("transforms", [(), sw.clip(0.1), sw.drop(largest=2)], ids=["plain", "clip", "drop"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_leaves_no_trace(where, transforms, monkeypatch):
    """Bit for bit what the size that was found gives from the start: parameters, buffers and random numbers."""
    monkeypatch.setattr(Heavy, "limit", 2 if where == "backward" else N)
    loss_fn = limited(2 if where == "forward" else N)

    def trained(microbatch):
        model = net_with_traces()
        step = make_step(model, loss_fn, samples=8, microbatch=microbatch, transforms=transforms)
        torch.manual_seed(1)
        updates = list(step.over([rows(0, 8), rows(8, 16)]))
        return step, torch.cat([update.losses for update in updates]), torch.get_rng_state()

    step, losses, state = trained("auto")
    expected, expected_losses, expected_state = trained(2)
    assert size_found(step) == 2
    assert torch.equal(losses, expected_losses)
    assert_same(step.model, expected.model, tolerance=0)
    assert step.model[1].passes == expected.model[1].passes == 8
    assert torch.equal(state, expected_state)
    assert step.counters == expected.counters


@pytest.mark.filterwarnings("ignore:modules are in eval mode:samplewise.TrainingWarning")
def test_batch_norm_in_eval_mode():
    model, twin = (nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    model[0].eval(), twin[0].eval()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    make_step(model, limited(3), samples=8, microbatch="auto").run([rows(0, 8)])
    make_step(twin, losses_of, samples=8).run([rows(0, 8)])
    assert_same(model, twin)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("transforms", [(), sw.drop(largest=0, smallest=1)], ids=["plain", "drop"])
def test_gradients_of_earlier_batches_stay(transforms):
    """The second batch of the window has the large sample."""

    def loss_fn(model, batch):
        losses = losses_of(model, batch)
        if len(losses) > 2 and bool((batch[0] == X[5]).all(1).any()):
            losses.sum().backward()  # into .grad, as far as it gets
            out_of_memory()
        return losses

    model, twin = net(), net()
    step = make_step(model, loss_fn, samples=12, microbatch="auto", transforms=transforms, recheck=False)
    step.run([rows(0, 4), rows(4, 8), rows(8, 12)])
    make_step(twin, losses_of, samples=12, transforms=transforms).run([rows(0, 12)])
    assert size_found(step) == 2
    assert_same(model, twin)


def test_one_sample_that_does_not_fit():
    model = net()
    step = make_step(model, limited(0), samples=8, microbatch="auto")
    message = r"one sample.* must fit into memory.*Tried to allocate 2\.00 GiB.*larger bud"
    with pytest.raises(MemoryError, match=message):
        step.run([rows(0, 8)])
    assert_same(model, net(), tolerance=0)
    assert all(p.grad is None for p in model.parameters())
    assert step.counters.samples == step.counters.updates == 0


def test_a_batch_that_cannot_be_cut_and_does_not_fit():
    class Whole:
        pair = rows(0, 8)

    model = net()
    step = make_step(model, lambda model, batch: limited(4)(model, batch.pair), microbatch="auto")
    with pytest.raises(MemoryError):
        step.run([Whole()])
    assert_same(model, net(), tolerance=0)


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), ValueError("no"), KeyError("x")])
def test_other_errors_are_no_lack_of_memory(error):
    def fail():
        raise error

    tries = []
    step = make_step(net(), limited(4, tries, fail), microbatch="auto", recheck=False)
    with pytest.raises(type(error)):
        step.run([rows(0, 8)])
    assert tries == [8]


@pytest.mark.parametrize("microbatch", [None, 8])
def test_without_auto_there_is_no_second_try(microbatch):
    tries, model = [], net()
    step = make_step(model, limited(4, tries), microbatch=microbatch, recheck=False)
    with pytest.raises(torch.OutOfMemoryError):
        step.run([rows(0, 8)])
    assert tries == [8]
    assert_same(model, net(), tolerance=0)


# --- a budget ---------------------------------------------------------------------------------------------------------


def wide_net():
    """Activations of 512 bytes a sample, which outweigh all else."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3)).double()


@pytest.mark.parametrize("transforms", [(), sw.clip(1.0), sw.drop(largest=2)], ids=["plain", "clip", "drop"])
def test_a_budget_changes_nothing_but_the_size(transforms):
    expected, sizes = wide_net(), []
    make_step(expected, losses_of, transforms=transforms).run([rows(0, 16)])
    for memory in (10**9, 8000, 5000, 3500):
        model = wide_net()
        step = make_step(model, losses_of, samples=16, microbatch=sw.auto(memory), transforms=transforms)
        step.run([rows(0, 16)])
        assert_same(model, expected)
        sizes.append(size_found(step) or 16)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16
    assert sizes[-1] <= 4 < sizes[1]


def test_a_budget_too_small_for_one_sample():
    step = make_step(net(), losses_of, microbatch=sw.auto(8))
    with pytest.raises(MemoryError, match="the budget is 8 bytes"):
        step.run([rows(0, 8)])


def test_a_budget_is_for_activations_and_not_for_weights():
    """The weights of the middle layer, 720 kB, are there anyway; the activations of a sample take 5 kB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)).double()
    step = make_step(model, losses_of, samples=16, microbatch=sw.auto(50_000))
    step.run([rows(0, 16)])
    assert size_found(step) in (4, 8)


def test_a_budget_counts_a_piece_of_a_batch_and_not_the_batch():
    """A linear layer keeps its input: 16 kB a sample, of a batch that has 1 MB."""
    model = nn.Linear(2000, 3).double()
    step = make_step(model, losses_of, samples=64, microbatch=sw.auto(400_000))
    step.run([(torch.randn(64, 2000).double(), torch.arange(64) % 3)])
    assert size_found(step) in (None, 16)  # None if the batch, which is there anyway, is not counted at all
