"""Gradients are summed over ranks in buckets during the last backward pass of a window."""

import contextlib
import copy
import threading
import warnings
from unittest import mock

import pytest
import torch
from spread_models import SAMPLES, assert_same, loss_fn, net, own_batches, run, wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise.parallel import collectives
from samplewise.parallel.overlap import Overlap

OTHER = "DistributedError: rank 1 of 2 failed: {} This rank stopped because of it. See the traceback of rank 1."


@contextlib.contextmanager
def small_buckets():
    """A bucket for each tensor of more than one number; records the names of the started buckets' parameters, and
    whether they were started during the pass.
    """
    started = []
    during = threading.local()
    ready, start = Overlap.ready, Overlap._start_next

    def noted_ready(self, p):
        with collectives_done(self):
            during.now = True
            ready(self, p)
            during.now = False

    def noted_start(self):
        started.append((tuple(self._left[0][0].shape), getattr(during, "now", False)))
        start(self)

    with (
        mock.patch.object(collectives, "BUCKET", 8),
        mock.patch.object(Overlap, "ready", noted_ready),
        mock.patch.object(Overlap, "_start_next", noted_start),
    ):
        yield started


@contextlib.contextmanager
def collectives_done(overlap):
    """Wait for the answer of the other ranks, so that buckets are started in the pass however slow those are."""
    if overlap._question is not None:
        overlap._question.message.started.work.wait()
    yield


def overlapped(options):
    with small_buckets() as started:
        found = run(**options)
    return found, started


BACKWARDS = [(3,), (3, 7), (7,), (7,), (7,), (7, 5)]  # parameters of `net()`, the last one first


@pytest.mark.parametrize("transforms", ["plain", "clip"])
@pytest.mark.parametrize("how", ["ddp", "plain"])
def test_buckets_start_during_the_last_pass(two, transforms, how):
    options = dict(transforms=transforms, how=how, samples=8, batch=4, microbatch=2, epochs=1)
    alone = run(**{**options, "batch": SAMPLES})
    for found, started in two.run(overlapped, options):
        assert_same(alone, found)
        assert [shape for shape, _ in started] == BACKWARDS * 2  # the first update finds out which are needed
        assert all(during for _, during in started[:6])
        # the last window has one sample, of rank 0, and the loaders have ended: nothing is left to be overlapped
        assert not any(during for _, during in started[6:])


WINDOWS = [
    dict(transforms="clip by parameter", samples=None, batch=2),
    dict(transforms="clip", samples=5, batch=1, tail="carry"),
    dict(transforms="plain", samples=7, batch=3, tail="drop"),
    dict(transforms="plain", samples=1, batch=2),
    dict(transforms="align", samples=6, batch=4, microbatch=1),
    dict(transforms="clip and noise", samples=6, batch=2, losses="counted", max_grad_norm=0.1),
    dict(transforms="weight", samples=6, batch=4, microbatch="auto"),
    dict(transforms="drop a quantile", samples=6, batch=4),
]


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("options", WINDOWS, ids=str)
def test_windows_are_those_of_one_process(three, options):
    """Also with ranks that have no samples in a window, and with ranks that get more because another one has none."""
    alone = run(**{**options, "batch": SAMPLES if options["samples"] else options["batch"] * 3})
    for found, _ in three.run(overlapped, options):
        assert_same(alone, found)


# ---------------------------------------------------------------------------------------------------- odd gradients


class Odd(nn.Module):
    """Parameters that samples of one rank do not reach, sparse gradients, a parameter that is used by two reentrant
    checkpoints, and one that is never used.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(6, 5, sparse=True)
        self.shared = nn.Linear(5, 5)
        self.often = nn.Linear(5, 3)
        self.seldom = nn.Linear(5, 3)
        self.never = nn.Linear(5, 3)
        self.double()

    def forward(self, batch):
        x = batch[0] + self.table(batch[2] % 6)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        odd = (batch[2] % 2)[:, None].bool()
        out = self.often(x)
        return torch.where(odd, self.seldom(x), out) if odd.any() else out


def odd_losses(model, batch):
    return nn.functional.cross_entropy(model(batch), batch[1], reduction="none")


def odd_gradients(small):
    """On two ranks, rank 1 has the odd samples. Parameter groups are frozen and used again between epochs."""
    model, parallel = wrapped(Odd(), "plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sw.Step(model, optimizer, odd_losses, 8, parallel=parallel, recheck=False)
    kinds = []
    with small_buckets() if small else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `never` is reported
        for trained in (True, False, True):
            model.often.requires_grad_(trained)
            for _ in step.over(own_batches(4)):
                kinds.append([None if p.grad is None else str(p.grad.layout) for p in model.parameters()])
    return torch.cat([p.detach().flatten() for p in model.parameters()]), kinds


def test_gradients_that_fit_no_bucket_are_summed_afterwards(two):
    alone, kinds = odd_gradients(False)
    assert None in kinds[0] and "torch.sparse_coo" in kinds[0]
    for parameters, found in two.run(odd_gradients, True):
        torch.testing.assert_close(parameters, alone, rtol=1e-10, atol=1e-12)
        assert found == kinds


# ------------------------------------------------------------------------------------------------- errors and NaN


def broken(where):
    """Rank 1 fails in its third window, of samples 8 to 11."""
    model, parallel = wrapped(net(), "plain")
    here = collectives.rank() == 1

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("sample 11 is odd")

    def losses(model, batch):
        if here and 11 in batch[2].tolist():
            if where == "backward":
                return loss_fn(nn.Sequential(model[:2], Through(Fails), model[2:]), batch)
            if where == "forward":
                raise ValueError("sample 11 is odd")
        return loss_fn(model, batch)

    def batches():
        for batch in own_batches(2):
            if here and where == "loader" and 11 in batch[2].tolist():
                raise ValueError("sample 11 is odd")
            yield batch

    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), losses, 4, parallel=parallel, recheck=False)
    with small_buckets() as started:
        try:
            for _ in step.over(batches()):
                before = copy.deepcopy(model.state_dict())
        finally:
            collectives.barrier()  # the ranks are still in step
            assert not step._has_pending_samples
            assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
            assert len(started) == (6 if where == "loader" else 12)
            step.run(own_batches(2)[:2])  # the next windows are exchanged as usual
            assert len(started) == (18 if where == "loader" else 24)


class Through(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


@pytest.mark.parametrize("where", ["loader", "forward", "backward"])
def test_an_error_in_the_last_pass_of_one_rank_ends_all(two, where):
    assert two.errors(broken, where) == [
        OTHER.format("ValueError: sample 11 is odd."),
        "ValueError: sample 11 is odd",
    ]


def skipping(transforms, microbatch, where):
    """The loss of sample 9, or only its gradient, is NaN."""
    model, parallel = wrapped(net(), "plain")

    def losses(model, batch):
        found = loss_fn(model, batch)
        if where == "loss":
            return torch.where(batch[2] == 9, torch.nan, found)
        return found + torch.where(batch[2] == 9, 0 * found, 1.0).sqrt()

    step = sw.Step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        losses,
        6,
        microbatch=microbatch,
        transforms=[sw.clip(0.5)] if transforms else (),
        on_nonfinite="skip",
        parallel=parallel,
        recheck=False,
    )
    with small_buckets():
        updates = [
            (u.samples, torch.nan if u.skipped else u.loss, u.grad_norm, u.skipped)
            for u in step.over(own_batches(SAMPLES))
        ]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), updates, copy.copy(step.counters), True


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("microbatch", [None, 1])
@pytest.mark.parametrize("transforms", [False, True])
def test_one_ranks_nan_skips_the_update_on_all(two, transforms, microbatch, where):
    """Known before the last pass (microbatch=1), in it, or only from its gradients."""
    alone = skipping(transforms, microbatch, where)
    assert alone[2].skipped == 1
    for found in two.run(skipping, transforms, microbatch, where):
        assert_same(alone, found)
