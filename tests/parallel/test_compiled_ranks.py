"""Several ranks with compiled gradients make the updates of one process; exchange and optimizer are uncompiled."""

import contextlib
import copy
import warnings
from unittest import mock

import pytest
import torch
from spread_models import (
    SAMPLES,
    TRANSFORMS,
    assert_same,
    counted,
    data,
    flat,
    in_places,
    loss_fn,
    net,
    own_batches,
    run,
    wrapped,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint
from samplewise.parallel import collectives
from samplewise.step.compiled import inductor, program_cache


@contextlib.contextmanager
def interpreted(calls=None):
    """Run traced gradients node by node, whatever their speed: Inductor takes seconds. `calls` gets one entry for each
    run.
    """

    def compile_graph(graph, inputs, threads):
        def call(flat):
            if calls is not None:
                calls.append(len(flat))
            return graph(*flat)

        return call

    at_any_speed = mock.patch.multiple(program_cache, refuse_library_bound=mock.DEFAULT, refuse_slower=mock.DEFAULT)
    with mock.patch.object(inductor, "compile_graph", compile_graph), at_any_speed:
        yield


def updates_of(step, model, batch, parts=None):
    updates = [
        (u.samples, torch.nan if u.skipped else u.loss, u.grad_norm, u.skipped)
        for u in step.over(own_batches(batch, parts))
    ]
    parameters = flat(model)
    return parameters, updates, copy.copy(step.counters), not step._has_pending_samples


def compiled(transforms, how, batch, losses="loss_fn", bucket=collectives.BUCKET, **options):
    model, parallel = wrapped(net(), how)
    inside = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    fn = {"loss_fn": loss_fn, "counted": counted}[losses]
    made = TRANSFORMS[transforms](inside)
    step = sw.Step(model, optimizer, fn, transforms=made, parallel=parallel, recheck=False, compile=True, **options)
    calls = []
    with interpreted(calls), mock.patch.object(collectives, "BUCKET", bucket):
        rows = in_places(batch, **options)[1] if transforms == "weight by place" else SAMPLES
        found = updates_of(step, inside, batch, [part[:rows] for part in data()])
    return found, step.compiled, len(calls)


def compiled_with(options):
    return compiled(**options)


COMPILED = [
    dict(transforms="plain", how="ddp", samples=6, batch=3),
    dict(transforms="plain", how="plain", samples=None, batch=3, losses="counted", bucket=8),
    dict(transforms="clip", how="ddp", samples=6, batch=4, microbatch=2, max_grad_norm=0.1),
    dict(transforms="clip by parameter", how="plain", samples=6, batch=3, bucket=8),
    dict(transforms="clip and noise", how="plain", samples=6, batch=3, tail="carry"),
    dict(transforms="weight", how="plain", samples=1, batch=2),
]


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_gradients_are_compiled(two, options):
    """Also of windows in which a rank has no samples, or microbatches of several sizes."""
    plain = {name: value for name, value in options.items() if name != "bucket"}
    alone = run(**{**plain, "epochs": 1, "batch": SAMPLES if plain["samples"] else 2 * plain["batch"]})
    for found, status, calls in two.run(compiled_with, options):
        assert_same(alone, found)
        assert status == "compiled"
        assert calls >= 3  # one of them to verify the program


@pytest.mark.parametrize(
    ("transforms", "how", "reason"),
    [
        ("drop a quantile", "plain", "transforms that need the whole window are compiled only in a single process"),
        ("weight by place", "plain", "transforms that need the whole window are compiled only in a single process"),
        ("clip", "fsdp", "updates of sharded models are not compiled"),
    ],
)
def test_the_status_says_what_is_not_compiled(two, transforms, how, reason):
    options = dict(transforms=transforms, how=how, samples=6)
    alone = run(**options, epochs=1, batch=SAMPLES)
    for found, status, calls in two.run(compiled_with, {**options, "batch": 3}):
        assert_same(alone, found)
        assert status == reason and calls == 0


def automatic():
    model, parallel = wrapped(net(), "plain")
    return sw.Step(model, sw.sgd(0.1), loss_fn, parallel=parallel, compile="auto").compiled


def test_auto_compiles_in_a_single_process_only(two):
    assert two.run(automatic) == ["compile='auto' compiles only in a single process"] * 2


class Shifted(nn.Module):
    """Gradients of both shifts are one tensor in a traced graph, and that of `factor` is a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.second = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.factor = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("fixed", torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    def forward(self, x):
        return x[:, :3] + self.first + self.second + self.factor * self.fixed


def shifted():
    model, parallel = wrapped(Shifted(), "plain")
    step = sw.Step(model, sw.sgd(0.1), lambda m, b: m(b[0]).sum(1), 2, parallel=parallel, recheck=False, compile=True)
    with interpreted():
        found = updates_of(step, model, 1)
    return found, step.compiled, model.fixed.tolist()


def test_gradients_that_share_memory_are_separated(two):
    alone, *_ = shifted()
    for found, status, fixed in two.run(shifted):
        assert_same(alone, found)
        assert status == "compiled" and fixed == [1.0, 2.0, 3.0]


def unequal():
    """Rank 1 cannot compile; sample 9 of rank 1 is NaN; the loss function changes."""
    model, parallel = wrapped(net(), "plain")
    factor = [1.0]

    def losses(model, batch):
        return torch.where(batch[2] == 9, torch.nan, loss_fn(model, batch)) * factor[0]

    if collectives.rank() == 1:
        model[0].register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sw.Step(
        model, optimizer, losses, 4, microbatch=1, parallel=parallel, recheck=False, compile=True, on_nonfinite="skip"
    )
    with interpreted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = updates_of(step, model, 4)
        factor[0] = 0.5
        second = updates_of(step, model, 4)
    return first, second, step.compiled, step.state_dict()


def test_ranks_may_differ_in_what_they_compile(two):
    alone = unequal()
    assert alone[0][2].skipped == 1
    ranks = two.run(unequal)
    for first, second, _, state in ranks:
        assert_same(alone[0], first)
        assert_same(alone[1], second)
        assert not any(state["compiling"].values())  # equal on all ranks
    assert [found[2] for found in ranks] == ["compiled", "modules have hooks"]


class PassingHook:
    """A hook on the model of rank 1, while updates could be compiled for the first time."""

    def on_update(self, trainer, update):
        if collectives.rank() == 1 and update.index == 0:
            self.handle = trainer.model[0].register_forward_hook(lambda *_: None)
        elif collectives.rank() == 1 and update.index == 1:
            self.handle.remove()


def trained(run, *updates):
    """Parameters and status after a run that is resumed in a new step after each of these numbers of updates."""
    for number in updates:
        model, parallel = wrapped(net(), "plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = sw.Step(model, optimizer, loss_fn, 4, parallel=parallel, recheck=False, compile=True)
        trainer = sw.Trainer(step, run, [PassingHook(), ModelCheckpoint(every="1up")], progress=False, device="cpu")
        with interpreted(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(DataLoader(TensorDataset(*data()), batch_size=2), updates=number, resume=True)
    return flat(model), step.compiled


def test_resumed_ranks_compile_what_they_have_compiled_before(two, tmp_path):
    whole = two.run(trained, tmp_path / "whole", 6)
    assert [status for _, status in whole] == ["compiled", "modules have hooks"]
    resumed = two.run(trained, tmp_path / "resumed", 3, 6)
    for (parameters, status), (expected, expected_status) in zip(resumed, whole, strict=True):
        assert status == expected_status
        assert torch.equal(parameters, expected)
