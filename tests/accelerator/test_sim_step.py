"""Step on the simulated accelerator: the same weights as on the CPU, with every transform and kind of window."""

from contextlib import nullcontext

import pytest
import sim_device as sim
import torch
from common import DEVICE, X, Y, assert_same_on_both, batches, losses, network, weights
from torch import nn

import samplewise as sw
from samplewise.bench.networks import resnet18_model
from samplewise.core.memory import allow_tf32
from samplewise.step import recheck

TABLE = torch.linspace(0.1, 1, 12, dtype=torch.float64)


def reference(device):
    model = network(device)
    return sw.gradients(losses(model, batches(device)[0]), model).mean()


TRANSFORMS = {
    "none": lambda device: [],
    "clip": lambda device: [sw.clip(0.5)],
    "clip by parameter": lambda device: [sw.clip(0.5, by="parameter")],
    "automatic clip": lambda device: [sw.clip(0.5, mode="automatic")],
    "normalize": lambda device: [sw.normalize("mean")],
    "weight by a function": lambda device: [sw.weight(lambda losses: losses.clamp(max=1))],
    "weight by a table": lambda device: [sw.weight(TABLE, index=2)],
    "weight of a window": lambda device: [sw.weight(lambda norms: norms / norms.sum(), window=True, renormalize=True)],
    "drop": lambda device: [sw.drop(2)],
    "drop by loss": lambda device: [sw.drop(quantile=0.8, score="losses")],
    "align": lambda device: [sw.align(reference(device))],
    "align with a function": lambda device: [sw.align(lambda: reference(device), kind="dot")],
    "group": lambda device: [sw.group(1), sw.clip(0.5)],
    "chain": lambda device: [sw.clip(0.5), sw.drop(1)],
}


def trained(device, transforms=(), optimizer=torch.optim.AdamW, run=sw.Step.run, **settings):
    model = network(device)
    step = sw.Step(model, optimizer(model.parameters(), lr=0.01), losses, transforms=transforms, **settings)
    run(step, batches(device))
    return weights(model)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_windows_and_microbatches(name):
    assert_same_on_both(lambda device: trained(device, TRANSFORMS[name](device), samples=8, microbatch=4))


SETTINGS = {
    "automatic microbatches": dict(microbatch="auto"),
    "small memory": dict(microbatch=sw.auto(memory=900)),
    "skip": dict(on_nonfinite="skip"),
    "recheck": dict(recheck=1),
    "record": dict(record="norms"),
    "clipped sum": dict(max_grad_norm=0.1),
    "carry": dict(samples=8, tail="carry"),
    "drop the tail": dict(samples=8, tail="drop"),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    assert_same_on_both(lambda device: trained(device, [sw.clip(0.5)], **SETTINGS[name]))


def test_accumulate_and_apply():
    def run(step, batches):
        step.accumulate(batches[0])
        step.accumulate(batches[1])
        step.apply()

    assert_same_on_both(lambda device: trained(device, [sw.clip(0.5)], run=run))


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_fused_optimizers(kind):
    def fused(parameters, lr):
        return kind(parameters, lr=lr, fused=True)

    assert_same_on_both(lambda device: trained(device, [sw.clip(0.5)], fused))


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision(precision):
    def run(device):
        model = network(device).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.Step(model, optimizer, losses, transforms=[sw.clip(0.5)], precision=precision)
        step.run([(x.float(), y) for x, y, _ in batches(device)])
        return weights(model), step.state_dict()["precision"]

    assert_same_on_both(run, 1e-2)


def test_the_loss_scale_is_halved_after_an_overflow_on_the_device():
    model = nn.Linear(5, 1, bias=False).to(DEVICE)
    before = weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = sw.Step(model, optimizer, lambda m, b: 1e4 * m(b).squeeze(1), precision="16-mixed")
    scale = step.state_dict()["precision"]["scale"]
    step(X[:4].float().to(DEVICE))
    assert step.state_dict()["precision"]["scale"] == scale / 2
    assert torch.equal(weights(model)[0], before[0])


def test_updates_on_an_accelerator_are_not_compiled_and_the_reason_is_given():
    model = network(DEVICE)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), losses, compile=True)
    with pytest.warns(sw.TrainingWarning, match="updates stay uncompiled: the batch is on sim:0"):
        step.run(batches(DEVICE))
    assert step.compiled == "the batch is on sim:0; updates are compiled for the CPU only"
    plain = trained(DEVICE, optimizer=torch.optim.SGD)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), plain, strict=True))


def test_a_batch_on_the_cpu_is_refused_by_torch_and_changes_nothing():
    model = network(DEVICE)
    before = weights(model)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), losses, transforms=[sw.clip(0.5)])
    with pytest.raises(RuntimeError, match="two devices, sim:0 and cpu"):
        step((X[:4], Y[:4]))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    step.run(batches(DEVICE))


def test_rounding_of_tf32_is_no_interaction_of_samples(monkeypatch):
    """Sums in another order change some roundings. PyTorch uses TF32 for convolutions unless told otherwise."""
    torch.manual_seed(0)
    model = resnet18_model(width=32).to(DEVICE)
    batch = torch.randn(4, 3, 16, 16).to(DEVICE), torch.arange(4).to(DEVICE)

    def update():
        step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), losses, transforms=[sw.clip(100.0)])
        return step(batch)[0]

    with allow_tf32(True):
        assert not update().skipped
        assert torch.backends.cudnn.allow_tf32
        monkeypatch.setattr(recheck, "allow_tf32", nullcontext)
        with pytest.raises(sw.SamplesInteractError, match="differs by"):
            update()


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_rounding_of_half_precision_is_no_interaction_of_samples(precision):
    """Sums in another order change some roundings, and through them the gradients of a ResNet by up to a tenth."""
    torch.manual_seed(0)
    model = resnet18_model(width=32).to(DEVICE)
    batch = torch.randn(4, 3, 8, 8).to(DEVICE), torch.arange(4).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = sw.Step(model, optimizer, losses, transforms=[sw.clip(100.0)], precision=precision)
    with sim.rounding_noise(2):
        step(batch)
    assert step.counters.updates + step.counters.skipped == 1
