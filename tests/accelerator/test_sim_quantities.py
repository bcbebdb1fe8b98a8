"""Quantities, diagnostics and attribution on the simulated accelerator: the numbers of the CPU, on the right device."""

from dataclasses import astuple

import pytest
import sim_device as sim
import torch
import torch.nn.functional as F
from common import DEVICE, X, Y, assert_same_on_both, batches, losses, network

import samplewise as sw


def gradients(device, rows=6, **settings):
    model = network(device)
    return sw.gradients(losses(model, batches(device, rows)[0]), model, **settings)


def input_gradients(device):
    x = X[:6].to(device).requires_grad_()
    return sw.input_gradients(losses(network(device), (x, Y[:6].to(device))), x)


def suspects(device):
    found = sw.suspects(network(device), losses, batches(device), ids=2, logits=lambda model, batch: model(batch[0]))
    return str(found)


QUANTITIES = {
    "norms": lambda device: gradients(device).norms(),
    "norms by parameter": lambda device: gradients(device).norms(by="parameter"),
    "gram": lambda device: gradients(device).gram(),
    "sum of squares": lambda device: gradients(device).sum_of_squares(),
    "variance": lambda device: gradients(device).variance(),
    "projection": lambda device: gradients(device).project(16),
    "dot": lambda device: gradients(device).dot(gradients(device).mean()),
    "weighted sum": lambda device: gradients(device).sum(torch.linspace(0, 1, 6).double().to(device)),
    "input gradients": input_gradients,
    "scan": lambda device: [(g.norms(), g.sum()) for _, g in sw.scan(network(device), losses, batches(device))],
    "suspects": suspects,
    "fisher": lambda device: sw.fisher(network(device), losses, batches(device)),
    "signal to noise": lambda device: sw.diagnostics.signal_to_noise(gradients(device)),
    "similarity": lambda device: sw.similarity(gradients(device)).matrix,
    "influence": lambda device: sw.influence(network(device), losses, batches(device), batches(device)[:1]),
    "noise scale": lambda device: [float(value) for value in astuple(sw.noise_scale(gradients(device)))],
}
ON_THE_CPU = ("suspects", "signal to noise", "influence", "noise scale")


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("name", QUANTITIES)
def test_quantities(name):
    assert_same_on_both(QUANTITIES[name])


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("strategy", ["twice", "full", "reference"])
def test_strategies(strategy):
    assert_same_on_both(lambda device: gradients(device, strategy=strategy).norms())


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("name", [name for name in QUANTITIES if name not in ON_THE_CPU])
def test_results_are_on_the_device(name):
    found = QUANTITIES[name](DEVICE)
    tensors = [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
    assert tensors and all(t.device.type == DEVICE for t in tensors)


def test_store_of_projections(tmp_path):
    def search(device):
        store = sw.attribution.ProjectedStore(tmp_path / device, dim=16)
        store.fill(network(device), losses, batches(device))
        return [t.cpu() for t in store.search(gradients(device), k=3)]

    assert_same_on_both(search, 1e-3)


def test_check():
    assert sw.check(network(DEVICE), losses, batches(DEVICE)[0]).ok


def test_weights_and_directions_on_another_device_are_refused():
    g = gradients(DEVICE)
    message = r"weights must be on the device of the losses, sim:0; found cpu. Move it with .to\(losses.device\)"
    with pytest.raises(sw.ParameterError, match=message):
        g.sum(torch.ones(6))
    direction = {name: t.cpu() for name, t in g.mean().items()}
    message = r"direction\['0.weight'\] must be on the device of the parameter, sim:0; found cpu. Move it with"
    with pytest.raises(sw.ParameterError, match=message):
        g.dot(direction)


def test_a_hook_that_mixes_samples_is_found_with_rounding_noise():
    """Division by a norm over the batch keeps zeros: only a pass with other weights shows it."""
    model = network(DEVICE)
    x = X[:6].to(DEVICE).requires_grad_()
    hidden = model[0](x)
    hidden.register_hook(lambda g: g / g.norm())
    own = F.cross_entropy(model[3](model[1](hidden)), Y[:6].to(DEVICE), reduction="none")
    with sim.rounding_noise(2), pytest.raises(sw.GraphError, match=r"the backward of .* is not linear"):
        sw.input_gradients(own, x)
