"""The noise scale: unbiased, by enumeration of all batches."""

import itertools
import json
import math

import pytest
import torch
from plain_loop import loss_fn, make, rows
from torch import nn

import samplewise as sw
from samplewise.diagnostics import Noise


def gradients(model, x, y):
    return sw.gradients(loss_fn(model, (x, y)), model)


def mean_over(all_batches, model, x, y):
    found = [sw.noise_scale(gradients(model, x[list(b)], y[list(b)])) for b in all_batches]
    return sum(f.trace for f in found) / len(found), sum(f.signal for f in found) / len(found)


@pytest.mark.parametrize("size", [2, 3])
def test_unbiased_for_samples_drawn_with_replacement(size):
    """Over all n**B batches the estimates average to the variance and squared length of the whole, exactly."""
    model, x, y = make(n=5)
    true = rows(model, x, y)
    trace, signal = mean_over(itertools.product(range(5), repeat=size), model, x, y)
    assert trace == pytest.approx((true - true.mean(0)).square().sum(1).mean().item(), rel=1e-12)
    assert signal == pytest.approx(true.mean(0).square().sum().item(), rel=1e-9)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_estimates_do_not_depend_on_the_batch_size(size):
    """Over all C(n, B) batches without replacement: the estimates do not depend on the batch size."""
    model, x, y = make(n=7)
    whole = sw.noise_scale(gradients(model, x, y))
    trace, signal = mean_over(itertools.combinations(range(7), size), model, x, y)
    assert trace == pytest.approx(rows(model, x, y).var(0).sum().item(), rel=1e-12)
    assert (trace, signal) == pytest.approx((whole.trace, whole.signal), rel=1e-9)


def test_scale_and_ratio_are_inverse():
    found = sw.noise_scale(gradients(*make()))
    assert found.scale == found.trace / found.signal
    assert found.ratio == found.signal / found.trace


def test_without_signal_or_noise():
    assert Noise(1.0, 0.0).scale == math.inf
    assert Noise(-1.0, 0.0).scale == -math.inf
    assert math.isnan(Noise(0.0, 0.0).scale)
    model, x, y = make()
    same = sw.noise_scale(gradients(model, x[:1].expand(4, -1), y[:1].expand(4)))
    assert same.trace == pytest.approx(0, abs=1e-12 * same.signal)


def test_the_estimate_of_the_signal_may_be_negative():
    """Two samples with opposite gradients."""
    model = nn.Linear(1, 1, bias=False)
    found = sw.noise_scale(sw.gradients(model(torch.tensor([[1.0], [-1.0]]))[:, 0], model))
    assert (found.trace, found.signal, found.scale) == pytest.approx((2, -1, -2))


def test_signal_to_noise_by_parameter_and_layer():
    model, x, y = make()
    g = gradients(model, x, y)
    parts = {}
    for name, full in g.full().items():
        flat = full.flatten(1)
        trace = flat.var(0).sum().item()
        parts[name] = (flat.mean(0).square().sum().item() - trace / len(y), trace)
    expected = {name: signal / trace for name, (signal, trace) in parts.items()}
    assert sw.signal_to_noise(g) == pytest.approx(expected, rel=1e-9)
    layers = {}
    for layer in ("0", "2"):
        pairs = [parts[f"{layer}.{kind}"] for kind in ("weight", "bias")]
        layers[layer] = sum(s for s, _ in pairs) / sum(t for _, t in pairs)
    assert sw.signal_to_noise(g, by="layer") == pytest.approx(layers, rel=1e-9)


def test_a_running_estimate_averages_before_it_divides():
    model, x, y = make()
    parts = [gradients(model, x[s], y[s]) for s in (slice(0, 4), slice(4, 8), slice(8, 12))]
    running = sw.NoiseScale(decay=0.5)
    for g in parts:
        last = running.add(g)
    each, weights = [sw.noise_scale(g) for g in parts], (1 / 7, 2 / 7, 4 / 7)
    trace, signal = (sum(w * getattr(e, k) for w, e in zip(weights, each, strict=True)) for k in ("trace", "signal"))
    assert (last.trace, last.signal) == pytest.approx((trace, signal), rel=1e-12)
    assert running.value == last


def test_norms_and_the_norm_of_the_mean_are_enough():
    g = gradients(*make())
    length = torch.cat([m.flatten() for m in g.mean().values()]).norm()
    assert sw.NoiseScale().add(g.norms(), length).scale == pytest.approx(sw.noise_scale(g).scale, rel=1e-9)


def test_state_dict():
    model, x, y = make()
    first, second = sw.NoiseScale(), sw.NoiseScale()
    first.add(gradients(model, x[:6], y[:6]))
    second.load_state_dict(first.state_dict())
    g = gradients(model, x[6:], y[6:])
    assert first.add(g) == second.add(g)


def test_as_a_callback():
    """Estimates of the trainer's updates equal those of their gradients; updates of one sample are ignored."""
    model, x, y = make(n=13)
    expected, watched = sw.NoiseScale(), sw.NoiseScale()
    for rows_ in (slice(0, 4), slice(4, 8), slice(8, 12)):
        expected.add(gradients(model, x[rows_], y[rows_]))
    sizes = []

    class Sizes:
        def on_update(self, update):
            sizes.append(update.samples)

    step = sw.Step(model, sw.sgd(0.0), loss_fn, samples=4, record=("norms",))
    sw.Trainer(step, callbacks=[watched, Sizes()], progress=False, device="cpu").fit([(x, y)], epochs=1)
    assert sizes == [4, 4, 4, 1]
    assert watched.value.scale == pytest.approx(expected.value.scale, rel=1e-9)


def test_a_callback_writes_to_the_log(tmp_path):
    model, x, y = make()
    step = sw.Step(model, sw.sgd(0.1), loss_fn, samples=6)  # record is empty
    trainer = sw.Trainer(step, tmp_path, [watched := sw.NoiseScale()], progress=False, device="cpu", log_every=1)
    trainer.fit([(x, y)], epochs=1)
    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    noise = [line for line in lines if line["kind"] == "noise"]
    assert [(line["update"], line["batch"]) for line in noise] == [(1, 6), (2, 6)]
    last = watched.value
    assert (noise[-1]["trace"], noise[-1]["signal"], noise[-1]["scale"]) == (last.trace, last.signal, last.scale)
    again = sw.NoiseScale()
    again.load_state_dict(watched.state_dict())
    assert again.state_dict() == watched.state_dict()


def test_weighted_updates_are_refused():
    model, x, y = make()
    step = sw.Step(model, sw.sgd(0.1), loss_fn, record=("norms",), transforms=[sw.clip(1e-3)])
    (update,) = step((x, y))
    with pytest.raises(ValueError, match="needs updates that are the plain mean of their samples; found weights or"):
        sw.NoiseScale().on_update(update)


def test_bad_arguments():
    model, x, y = make()
    with pytest.raises(ValueError, match="noise scale of a batch needs at least two samples; found one"):
        sw.noise_scale(gradients(model, x[:1], y[:1]))
    with pytest.raises(ValueError, match=r"decay must lie in \[0, 1\); found 1"):
        sw.NoiseScale(decay=1)
    with pytest.raises(ValueError, match="needs at least one batch of two or more samples; found none"):
        _ = sw.NoiseScale().value
    with pytest.raises(TypeError, match="norms and the norm of the mean gradient; found norms alone"):
        sw.NoiseScale().add(torch.ones(3))
    with pytest.raises(ValueError, match="by must be 'parameter' or 'layer'; found 'module'"):
        sw.signal_to_noise(gradients(model, x, y), by="module")
