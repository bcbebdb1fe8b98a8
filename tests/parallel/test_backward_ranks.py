"""`sw.backward` on two ranks gives the gradients of one process, with all samples in one pass."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from spread_models import TRANSFORMS, data, net
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import samplewise as sw
from samplewise.parallel import collectives, ddp

SAMPLES = 16  # the ranks have equally many


class Skipping(nn.Module):
    """Model with a layer that the forward pass does not call."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.unused = nn.Linear(3, 3).double()

    def forward(self, x):
        return self.net(x)


def wrapped(how):
    model = Skipping() if how == "unused parameters" else net()
    if collectives.size() == 1:
        return model
    if how == "sharded":
        for module in (model[0], model[3], model):
            fully_shard(module)
        return model
    options = {"unused parameters": {"find_unused_parameters": True}, "static graph": {"static_graph": True}}
    return DistributedDataParallel(model, **options.get(how, {}))


def half(loss):
    """A framework that divides the loss, as for accumulation."""
    (loss / 2).backward()


def grads(how, scalar, transforms, passes=1, through=None):
    """Gradients by name, and the norms and weights of this rank, after passes over parts of the samples."""
    model = wrapped(how)
    transforms = TRANSFORMS[transforms](model)
    own = slice(collectives.rank(), SAMPLES, collectives.size())
    mine = []
    for k, (x, y) in enumerate(zip(*(part[own].chunk(passes) for part in data()[:2]), strict=True)):
        last = k == passes - 1
        wait = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else contextlib.nullcontext()
        with wait:
            z = model(x)
            if scalar:
                loss = F.cross_entropy(z, y, label_smoothing=0.1) / passes
                stats = sw.backward(loss, model, z, transforms, through, denominator=len(x) * passes)
            else:
                losses = F.cross_entropy(z, y, label_smoothing=0.1, reduction="none")
                stats = sw.backward(losses, model, None, transforms, through, denominator=len(x) * passes)
        mine.append((stats.norms, stats.weights))
    inside = getattr(model, "module", model)
    found = {n: None if p.grad is None else whole(p.grad).clone() for n, p in inside.named_parameters()}
    return found, *(torch.cat(values) for values in zip(*mine, strict=True))


def whole(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("transforms", ["plain", "clip"])
@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "outputs"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", ["ddp", "unused parameters", "sharded"])
def test_two_ranks_give_the_gradients_of_one(two, how, passes, scalar, transforms):
    expected, norms, weights = grads(how, scalar, transforms)
    for rank, (found, own_norms, own_weights) in enumerate(two.run(grads, how, scalar, transforms, passes)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(own_norms, norms[rank::2])
        torch.testing.assert_close(own_weights, weights[rank::2])


@pytest.mark.parametrize("how", ["ddp", "sharded"])
def test_the_factor_of_a_framework(two, how):
    expected, norms, _ = grads("ddp", True, "clip")
    for rank, (found, own_norms, _) in enumerate(two.run(grads, how, True, "clip", 2, half)):
        torch.testing.assert_close(found, {n: g / 2 for n, g in expected.items()}, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(own_norms, norms[rank::2])


def grads_of_pairs(how, transforms):
    """Gradients by name of a loss of pairs, rows i and i + 4, with a penalty on a weight beside the outputs."""
    model = wrapped(how)
    x = data()[0][:8].view(2, 4, -1)[:, collectives.rank() :: collectives.size()]
    z = model(x.flatten(0, 1))
    chosen, rejected = z.square().sum(1).chunk(2)
    loss = -F.logsigmoid(chosen - rejected).mean() + getattr(model, "module", model)[0].weight.square().sum()
    pairs = len(chosen)
    options = {"denominator": pairs, "samples": torch.arange(pairs).repeat(2), "rest": "plain"}
    stats = sw.backward(loss, model, z, TRANSFORMS[transforms](model), **options)
    inside = getattr(model, "module", model)
    return {n: whole(p.grad).clone() for n, p in inside.named_parameters()}, stats.norms


@pytest.mark.parametrize("transforms", ["plain", "clip"])
def test_pairs_with_a_penalty(two, transforms):
    expected, norms = grads_of_pairs("ddp", transforms)
    for rank, (found, own_norms) in enumerate(two.run(grads_of_pairs, "ddp", transforms)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(own_norms, norms[rank::2])


@pytest.mark.parametrize("how", ["ddp", "sharded"])
def test_a_coefficient_per_parameter_is_refused(two, how):
    found = two.errors(grads, how, True, "clip by parameter")
    assert found == [found[0]] * 2
    assert found[0].startswith(
        "TransformError: transforms must give one coefficient per sample for a DistributedDataParallel or a sharded "
        "model, whose gradients come from an ordinary backward pass; found one per parameter in"
    )
    assert found[0].endswith("Leave out by='parameter', or use sw.Step.")


def test_a_static_graph_is_refused(two):
    message = (
        "DistributedError: sw.backward needs a DistributedDataParallel without static_graph=True; found it, and the "
        "gradients would not be reliable. Leave out static_graph."
    )
    assert two.errors(grads, "static graph", True, "clip") == [message] * 2
    assert two.errors(grads, "static graph", False, "plain") == [message] * 2


def late_import(passed):
    """samplewise is imported after the process group and the wrapper were made."""
    model = DistributedDataParallel(net())
    ddp._wrappers.clear()
    ddp._knows_all_wrappers = False
    try:
        given = {"wrapper": model, "module": model.module, "tensors": list(model.parameters())}[passed]
        x, y, *_ = data()
        own = slice(collectives.rank(), SAMPLES, collectives.size())
        losses = F.cross_entropy(model(x[own]), y[own], reduction="none")
        sw.backward(losses, given, denominator=len(losses))
    finally:
        ddp._knows_all_wrappers = True
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("passed", ["wrapper", "module", "tensors"])
def test_a_wrapper_that_was_made_before_samplewise_was_imported(two, passed):
    model = net()
    x, y, *_ = data()
    F.cross_entropy(model(x[:SAMPLES]), y[:SAMPLES]).backward()
    for found in two.run(late_import, passed):
        torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-12, atol=1e-14)


def flattened():
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    sw.backward(model(data()[0]).square().mean(1), model)


def test_fully_sharded_data_parallel_is_refused(two):
    message = (
        "DistributedError: a sharded model must be sharded with fully_shard (FSDP2); found FullyShardedDataParallel, "
        "which flattens parameters. With Accelerate, set fsdp_version=2."
    )
    assert two.errors(flattened) == [message] * 2
