"""Everyday situations, cold and warm: exact in every step, with data, shapes and hooks that change in between."""

import pytest
import torch
from by_loop import rows_by_loop
from everyday_zoo import SITUATIONS, Sizes, build
from torch.nn.modules.module import _global_forward_hooks

import samplewise as sw
from samplewise.testing.case import default_dtype

SMALL = Sizes(samples=4, tokens=8, width=6, heads=1, hidden=10, vocabulary=11, classes=3)
EQUAL = Sizes(samples=8, tokens=8, width=8, heads=2, hidden=8, vocabulary=8, classes=8)
STEPS = (0, 0, 0, 1, 2, 3, 0)  # the same data, then other data, then the first data again


@pytest.fixture(autouse=True)
def _double():
    with default_dtype(torch.float64):
        yield
    _global_forward_hooks.clear()  # the situation with such a hook may not be collected before the next test


def assert_step_as_loop(model, step, **options):
    """Rows, norms and a weighted `backward`, each from a graph of its own, as in a training step."""
    batch = model.prepare(step)
    with model.around():
        losses = model(*batch)
        rows = rows_by_loop(losses, {name: p for name, p in model.named_parameters() if p.requires_grad})
        full = sw.gradients(losses, model, **options).full()
        g = sw.gradients(model(*batch), model, **options)
        norms = g.norms()
        weights = (norms.median() / norms).clamp(max=1)
        g.backward(weights)
    expected = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-12)
    for name, row in rows.items():
        torch.testing.assert_close(full[name], row, rtol=1e-9, atol=1e-11)
        total = torch.tensordot(weights, row, dims=1)
        found = model.get_parameter(name).grad
        torch.testing.assert_close(total if found is None else found, total, rtol=1e-9, atol=1e-11)
        assert found is not None or not total.any(), name
    model.zero_grad()


@pytest.mark.sweep(1 / 8)
@pytest.mark.parametrize("sizes", [SMALL, EQUAL], ids=["small", "equal sizes"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_each_step_is_exact(name, sizes):
    model = build(name, sizes)
    for step in STEPS:
        assert_step_as_loop(model, step)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["twice", "full"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_each_step_is_exact_with_other_strategies(name, strategy):
    model = build(name, SMALL)
    for step in STEPS:
        assert_step_as_loop(model, step, strategy=strategy)


def test_situations_take_turns():
    """Steps of one situation follow steps of another, with structures that are equal or nearly so."""
    models = [
        build(name, SMALL) for name in ("baseline", "reading_hook", "changing_clamp", "last_token", "random_shapes")
    ]
    for step in range(4):
        for model in models:
            assert_step_as_loop(model, step)


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_loss_of_a_sample_does_not_depend_on_the_others(name):
    """Otherwise a situation would measure a refusal."""
    model = build(name, SMALL)
    batch = model.prepare(0)
    with model.around():
        losses = model(*batch)
        single = torch.cat([model(*sample) for sample in zip(*(t.split(1) for t in batch), strict=True)])
    torch.testing.assert_close(single, losses)
