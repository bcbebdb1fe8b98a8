"""`sw.check`: agreement, refusals and notes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.check import ParameterCheck
from samplewise.testing.case import noise


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def classifier(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 3)), (noise(5, 6).float(), torch.arange(5) % 3)


def test_a_healthy_model():
    model, batch = classifier(nn.Tanh())
    found = sw.check(model, loss_fn, batch)
    assert found.ok
    assert [line.parameter for line in found.lines] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert "5 samples: ok" in str(found)
    assert "3 samples recomputed alone" in str(found)
    assert repr(found) == str(found)
    assert found._repr_html_().count("<tr>") == 5


def test_batch_norm_is_reported_as_refused():
    model, batch = classifier(nn.BatchNorm1d(8))
    found = sw.check(model, loss_fn, batch)
    assert not found.ok
    assert found.interacts
    assert "module '1'" in str(found)


def test_hidden_interaction_is_found_by_recomputing_alone():
    """The batch mean is detached, so only recomputing a sample alone shows the interaction."""
    model, batch = classifier(nn.Tanh())
    found = sw.check(model, lambda m, b: loss_fn(m, (b[0] - b[0].mean(0), b[1])), batch)
    assert not found.ok
    assert "alone: samples interact" in str(found)


def test_random_losses_are_reported():
    model, batch = classifier(nn.Dropout())
    found = sw.check(model, loss_fn, batch)
    assert found.ok
    assert "losses are random" in str(found)


def test_unused_and_frozen_parameters_are_named():
    model, batch = classifier(nn.Tanh())
    model.extra = nn.Linear(2, 2)
    model[0].bias.requires_grad_(False)
    model.forward = lambda x: nn.functional.linear(torch.tanh(model[0](x)), model[2].weight, model[2].bias)
    report = sw.check(
        nn.ModuleList([model[0], model[2], model.extra]), lambda m, b: loss_fn(lambda x: m[1](m[0](x).tanh()), b), batch
    )
    assert report.ok
    assert "do not depend on these parameters: 2.weight, 2.bias" in str(report)
    assert "frozen parameters were not compared: 0.bias" in str(report)


def test_a_wrong_rule_is_reported(monkeypatch):
    from samplewise.engine.rules import RULES, Rule
    from samplewise.engine.rules.rule_input import summed

    monkeypatch.setitem(RULES, ("Addmm", 0), Rule(lambda use: summed(use, 1.001 * use.gradient)))
    model, batch = classifier(nn.Tanh())
    found = sw.check(model, loss_fn, batch)
    assert not found.ok
    assert [line.parameter for line in found.lines if not line.ok] == ["0.bias", "2.bias"]
    assert "WRONG" in str(found)


def test_swapped_arguments():
    model, batch = classifier(nn.Tanh())
    with pytest.raises(TypeError, match=r"found the function loss_fn .*Write sw\.check\(model, loss_fn, batch\)"):
        sw.check(loss_fn, model, batch)
    with pytest.raises(TypeError, match=r"found a DataLoader\. Pass next\(iter\(loader\)\)"):
        sw.check(model, loss_fn, DataLoader(TensorDataset(*batch)))


def test_a_gradient_that_consists_of_rounding_errors_is_right():
    """The softmax of attention does not depend on the bias of the keys."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.keys = nn.Linear(4, 4)
            self.values = nn.Linear(4, 3)

        def forward(self, x):
            weights = (x @ self.keys(x).mT).softmax(-1)
            return (weights @ self.values(x)).mean(1)

    result = sw.check(Attention(), nn.CrossEntropyLoss(), (torch.randn(5, 6, 4), torch.arange(5) % 3))
    norms = {line.parameter: line.norm for line in result.lines}
    assert 0 < norms["keys.bias"] < 1e-15
    assert result.ok, str(result)


class Cast(nn.Module):
    """Casts its weight to float32 before it is used, as layers of Keras do."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 40)

    def forward(self, x):
        return F.linear(x.float(), self.f.weight.float(), self.f.bias.float()).double()


def test_rounding_of_a_model_that_casts_its_parameters_is_not_an_error():
    torch.manual_seed(0)
    found = sw.check(Cast(), lambda model, batch: model(batch).square().sum((1, 2)), torch.randn(8, 5, 6))
    assert any(error > 1e-9 for line in found.lines for error in line.errors.values())
    assert found.ok
    assert "uses f.weight, f.bias in lower precision than float64: errors up to 6e-06 are ok" in str(found)
    wrong = ParameterCheck("w", (1,), 1.0, {"rows": 1e-5}, found.lines[0].tolerance)
    assert not wrong.ok


def test_something_else_than_one_batch():
    model = nn.Linear(6, 3)
    with pytest.raises(
        TypeError, match=r"batch must be one batch; found a list with one batch\. Pass the batch itself"
    ):
        sw.check(model, nn.MSELoss(), [(torch.ones(2, 6), torch.ones(2, 3))])
    with pytest.raises(AttributeError) as caught:
        sw.check(model, lambda model, batch: model(batch.float()), torch.ones(2, 6).numpy())
    assert caught.value.__notes__ == [
        "samplewise: the batch holds ndarray in place of tensors. Use a DataLoader, which converts arrays, or "
        "torch.as_tensor(array)."
    ]
