"""The noise scale: unbiased, by enumeration of all batches."""

import itertools
import json
import math
import re

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
    assert found.signal_to_noise == found.signal / found.trace


def test_without_signal_or_noise():
    assert Noise(1.0, 0.0).scale == math.inf
    assert Noise(-1.0, 0.0).scale == -math.inf
    assert math.isnan(Noise(0.0, 0.0).scale)
    model, x, y = make()
    same = sw.noise_scale(gradients(model, x[:1].expand(4, -1), y[:1].expand(4)))
    assert same.trace == pytest.approx(0, abs=1e-12 * same.signal)


def test_almost_equal_gradients_have_no_negative_variance():
    """The rounding of float32 norms exceeds the variance: it is reported as zero, and never as less."""
    zeros = 0
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Linear(5, 3)
        x = torch.randn(1, 5).expand(8, 5) + 1e-9 * torch.randn(8, 5)
        losses = nn.functional.cross_entropy(model(x), torch.zeros(8, dtype=torch.long), reduction="none")
        noise = sw.noise_scale(sw.gradients(losses, model))
        assert 0 <= noise.trace < 1e-5 and 0 <= noise.scale < 1e-5 and noise.signal > 0.1
        zeros += noise.trace == 0
    assert 0 < zeros < 20
    assert sw.NoiseScale().add(torch.full((4,), 0.5), 0.5 + 1e-9) == Noise(trace=0.0, signal=(0.5 + 1e-9) ** 2)


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
    assert sw.diagnostics.signal_to_noise(g) == pytest.approx(expected, rel=1e-9)
    layers = {}
    for layer in ("0", "2"):
        pairs = [parts[f"{layer}.{kind}"] for kind in ("weight", "bias")]
        layers[layer] = sum(s for s, _ in pairs) / sum(t for _, t in pairs)
    assert sw.diagnostics.signal_to_noise(g, by="layer") == pytest.approx(layers, rel=1e-9)


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
    trainer = sw.Trainer(step, tmp_path, [watched := sw.NoiseScale()], progress=False, device="cpu", log_every="1up")
    trainer.fit([(x, y)], epochs=1)
    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    noise = [line for line in lines if line["kind"] == "noise"]
    assert [(line["update"], line["batch"]) for line in noise] == [(1, 6), (2, 6)]
    last = watched.value
    assert (noise[-1]["trace"], noise[-1]["signal"], noise[-1]["scale"]) == (last.trace, last.signal, last.scale)
    again = sw.NoiseScale()
    again.load_state_dict(watched.state_dict())
    assert again.state_dict() == watched.state_dict()


def fit(model, batch, loss_fn, transforms=(), **options):
    """A NoiseScale after one epoch with a learning rate of 0, in updates of six samples."""
    watched = sw.NoiseScale(decay=0.5)
    step = sw.Step(model, sw.sgd(0.0), loss_fn, samples=6, transforms=transforms, **options)
    sw.Trainer(step, callbacks=[watched], progress=False, device="cpu").fit([batch], epochs=1)
    return watched


def test_clipped_updates_are_measured_by_their_clipped_gradients():
    """The estimate of the gradients that the update averages, c·g, from the rows of a plain loop."""
    model, x, y = make()
    true = rows(model, x, y)
    bound = true.norm(dim=1).median().item()
    clipped = true * (bound / true.norm(dim=1)).clamp(max=1)[:, None]
    expected = sw.NoiseScale(decay=0.5)
    for part in clipped.split(6):
        expected.add(part.norm(dim=1), part.mean(0).norm())
    found = fit(model, (x, y), loss_fn, [sw.clip(bound)], max_grad_norm=1e-3).value
    assert (found.trace, found.signal) == pytest.approx((expected.value.trace, expected.value.signal), rel=1e-9)
    plain = fit(model, (x, y), loss_fn).value
    assert abs(found.trace / plain.trace - 1) > 0.1  # another quantity than that of the gradients before clipping


def test_updates_with_counts_are_measured_by_the_losses_as_returned():
    """The update is Σ g / Σ counts; the estimate is that of the gradients g themselves."""
    model, x, y = make()
    counts = torch.arange(1.0, 13.0, dtype=torch.float64)
    expected = sw.NoiseScale(decay=0.5)
    for part in rows(model, x, y).split(6):
        expected.add(part.norm(dim=1), part.mean(0).norm())
    found = fit(model, (x, y, counts), lambda model, batch: (loss_fn(model, batch[:2]), batch[2])).value
    assert (found.trace, found.signal) == pytest.approx((expected.value.trace, expected.value.signal), rel=1e-9)


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (sw.noise(0.1), "adds to the sum of the gradients"),
        (sw.drop(largest=1), "depends on the other samples of the window"),
        (sw.normalize("mean"), "depends on the other samples of the window"),
        (sw.weight(torch.ones(6)), "depends on the position in the window"),
        (sw.weight(lambda losses: losses, renormalize=True), "changes the denominator"),
        (sw.clip(1.0, by="parameter"), "weighs each parameter by itself"),
        (sw.group(1), "sums samples of a group"),
    ],
    ids=["noise", "drop", "normalize", "tensor", "renormalize", "by parameter", "group"],
)
def test_other_transforms_are_refused_before_the_first_update(transform, reason):
    model, x, y = make()
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    step = sw.Step(model, sw.sgd(0.1), loss_fn, samples=6, transforms=[transform])
    trainer = sw.Trainer(step, callbacks=[sw.NoiseScale()], progress=False, device="cpu")
    message = rf"the noise scale needs updates that .*; found {re.escape(str(transform))}, which {reason}. Remove"
    with pytest.raises(ValueError, match=message):
        trainer.fit([(x, y)], epochs=1)
    assert step.counters.updates == 0
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)


def test_updates_with_a_weight_for_each_parameter_are_refused():
    model, x, y = make()
    step = sw.Step(model, sw.sgd(0.1), loss_fn, record=("norms",), transforms=[sw.clip(1.0, by="parameter")])
    (update,) = step((x, y))
    with pytest.raises(ValueError, match="one weight per sample; found one for each parameter"):
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
        sw.diagnostics.signal_to_noise(gradients(model, x, y), by="module")


@pytest.mark.parametrize("question", [sw.noise_scale, sw.diagnostics.signal_to_noise, sw.similarity])
def test_losses_in_place_of_gradients(question):
    message = r"g must be the result of sw\.gradients; found Tensor\. Pass sw\.gradients\(losses, model\)\."
    with pytest.raises(TypeError, match=message):
        question(torch.ones(3))


def test_representation():
    noise = Noise(trace=200.0, signal=0.25)
    assert repr(noise) == "Noise(scale=800, trace=200, signal=0.25)"
    assert "<tr><td>800</td><td>200</td><td>0.25</td></tr>" in noise._repr_html_()
    running = sw.NoiseScale()
    assert repr(running) == "NoiseScale(decay=0.99)"
    running.add(torch.ones(3), 0.5)
    assert repr(running) == f"NoiseScale(decay=0.99, {running.value!r})"
