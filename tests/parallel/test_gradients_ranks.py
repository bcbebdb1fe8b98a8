"""`sw.gradients` on several ranks speaks of this rank's samples, unless asked for the sums of all."""

import pytest
import torch
from spread_models import data, loss_fn, net, own_batches
from torch.nn.parallel import DistributedDataParallel

import samplewise as sw
from samplewise.parallel import collectives


def asked(wrap):
    model = DistributedDataParallel(net()) if wrap else net()
    mine = own_batches(17)[0]
    g = sw.gradients(loss_fn(model, mine), model)
    total = g.sum(all_reduce=True)
    with pytest.raises(sw.ParameterError, match="the sum over ranks is not differentiable; found create_graph=True"):
        sw.gradients(loss_fn(model, mine), model, create_graph=True).sum(all_reduce=True)
    return g.names, g.norms(), g.sum(), total, g.mean(all_reduce=True)


@pytest.mark.parametrize("wrap", [False, True])
def test_sums_of_all_ranks_and_local_numbers(three, wrap):
    model = net()
    g = sw.gradients(loss_fn(model, data()), model)
    for rank, (names, norms, own, total, mean) in enumerate(three.run(asked, wrap)):
        mine = torch.zeros(17, dtype=torch.float64)
        mine[rank::3] = 1
        assert names == g.names
        torch.testing.assert_close(norms, g.norms()[rank::3])
        torch.testing.assert_close(own, g.sum(mine))
        torch.testing.assert_close(total, g.sum())
        torch.testing.assert_close(mean, g.mean())


def test_one_process_is_all_there_are():
    model = net()
    g = sw.gradients(loss_fn(model, data()), model)
    torch.testing.assert_close(g.sum(all_reduce=True), g.sum())
    torch.testing.assert_close(g.mean(all_reduce=True), g.mean())


def backward(what):
    """A wrapper that was there before anybody asked, one that came later, and what is no concern of any."""
    if what == "later":
        other = net()
        sw.gradients(loss_fn(other, data()), other).backward()
    wrapper = DistributedDataParallel(net())
    model = {"wrapper": wrapper, "inside": wrapper.module, "later": wrapper.module, "other": net()}[what]
    given = model if what != "inside" else dict(model.named_parameters())
    g = sw.gradients(loss_fn(model, own_batches(17)[0]), given)
    g.norms()
    g.backward()
    return (
        model[0].bias.grad.norm().item()
        - sw.gradients(loss_fn(model, own_batches(17)[0]), model).sum()["0.bias"].norm().item()
    )


@pytest.mark.parametrize("what", ["wrapper", "inside", "later"])
def test_backward_past_a_reducer_is_refused(two, what):
    message = (
        "DistributedError: gradients of a DistributedDataParallel must be summed over ranks; found g.backward(), "
        "which bypasses its reducer. Use sw.backward, sw.Step, or p.grad = g.sum(all_reduce=True)[name] / number of "
        "samples."
    )
    assert two.errors(backward, what) == [message] * 2


def test_backward_of_an_unwrapped_model_is_local(two):
    assert two.run(backward, "other") == [0.0, 0.0]


def names():
    model = DistributedDataParallel(net())
    return collectives.all_gather_object(sw.gradients(loss_fn(model, data()), model).names)


def test_names_are_the_models(two):
    assert two.run(names)[0] == [[name for name, _ in net().named_parameters()]] * 2
