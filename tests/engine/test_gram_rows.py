"""`g.gram` with rows, and by parameter."""

import pytest
import torch
from plain_loop import loss_fn, make

import samplewise as sw


def test_rows_and_parameters():
    model, x, y = make()
    g = sw.gradients(loss_fn(model, (x, y)), model)
    other = sw.gradients(loss_fn(model, (x[:4] + 1, y[:4])), model)
    wanted = g.gram(other)
    torch.testing.assert_close(g.gram(other.full()), wanted)
    for each in (other, other.full()):
        parts = g.gram(each, by="parameter")
        assert list(parts) == g.names
        for name, part in parts.items():
            torch.testing.assert_close(part, g[name].flatten(1) @ other[name].flatten(1).T)
    torch.testing.assert_close(sum(g.gram(by="parameter").values()), g.gram())


def test_parameters_that_the_losses_do_not_reach():
    model, x, y = make()
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(3).double()))
    g = sw.gradients(loss_fn(model, (x, y)), model)
    assert g.gram(by="parameter")["unused"].shape == (12, 12) and not g.gram(by="parameter")["unused"].any()
    assert g.gram(g[0:5], by="parameter")["unused"].shape == (12, 5)


def test_bad_rows():
    model, x, y = make()
    g = sw.gradients(loss_fn(model, (x, y)), model)
    rows = g.full()
    with pytest.raises(
        sw.ParameterError, match=r"rows\['2.bias'\] must be a tensor .* here \(12, 3\); found shape \(5, 3\)"
    ):
        g.gram({**rows, "2.bias": rows["2.bias"][:5]})
    with pytest.raises(sw.ParameterError, match=r"no entry for '2.bias'"):
        g.gram({name: each for name, each in rows.items() if name != "2.bias"})
    with pytest.raises(ValueError, match="by must be None or 'parameter'; found 'layer'"):
        g.gram(by="layer")
    with pytest.raises(sw.ParameterError, match="gram needs another Gradients"):
        g.gram(rows["2.bias"])
