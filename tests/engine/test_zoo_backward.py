"""`sw.backward` on the zoo: ordinary gradients bit for bit, norms and clipped sums as from rows of the Jacobian."""

import pytest
import torch
from zoo import INDEPENDENT

import samplewise as sw

C = 0.3


@pytest.mark.sweep(1 / 16)
@pytest.mark.filterwarnings("ignore:modules are in eval mode")  # by intention
@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "outputs"])
@pytest.mark.parametrize("case", INDEPENDENT, ids=lambda case: case.name)
def test_backward(case, scalar):
    model, inputs = case.build()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def forward():
        losses = case.losses(model, inputs)
        return (losses.sum(), losses) if scalar else (losses, None)

    def grads():
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return found

    forward()[0].sum().backward()
    expected = grads()
    loss, outputs = forward()
    recorded = sw.backward(loss, model, outputs)
    found = grads()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name].to_dense(), gradient.to_dense()), name
    g = sw.gradients(case.losses(model, inputs), model, strategy="reference")
    torch.testing.assert_close(recorded.norms, g.norms(), rtol=1e-9, atol=1e-12)
    weights = (C / g.norms()).clamp(max=1)
    loss, outputs = forward()
    sw.backward(loss, model, outputs, [sw.clip(C)])
    found = grads()
    for name, total in g.sum(weights).items():
        if name in found:
            torch.testing.assert_close(found[name].to_dense(), total, rtol=1e-9, atol=1e-11)
