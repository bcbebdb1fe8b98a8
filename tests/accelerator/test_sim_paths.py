"""Code paths of accelerators that no other test here takes: scalers, memory errors, devices without events.

docs/accelerators.md lists all paths with their tests; the last test here compares the list with the tests that exist.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import DEVICE, X, Y, batches, losses, network, weights

import samplewise as sw
from samplewise.cli.arguments import device_named
from samplewise.core.memory import HostCopy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "accelerators.md").read_text(encoding="utf-8")
LIST = PAGE.partition("## Code paths")[2].partition("\n##")[0]


@pytest.mark.parametrize("bound", [0.5, None], ids=["clipped", "recorded"])
def test_a_gradient_scaler_of_torch(bound):
    """sw.backward clips unscaled gradients; an overflow halves the scale and changes nothing."""
    transforms = [] if bound is None else [sw.clip(bound)]
    x, y = X[:6].float().to(DEVICE), Y[:6].to(DEVICE)
    model = network(DEVICE).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    g = sw.gradients(losses(model, (x, y)), model)
    expected = g.sum(((bound or torch.inf) / g.norms()).clamp(max=1) / 6)
    z = model(x)
    stats = sw.backward(F.cross_entropy(z, y), model, z, transforms, scaler, denominator=6)
    torch.testing.assert_close(stats.norms, g.norms())
    scaler.unscale_(optimizer)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.cpu(), expected[name].cpu())
    scaler.step(optimizer)
    scaler.update()
    before = weights(model)
    optimizer.zero_grad()
    z = model(x)
    sw.backward(F.cross_entropy(z, y) * 1e38, model, z, transforms, scaler, denominator=6)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


def test_a_device_without_events_is_read_with_a_blocking_copy(monkeypatch, waits):
    x = X[:3].to(DEVICE)
    monkeypatch.delattr(type(torch.sim), "Event")
    waits()
    (copied,) = HostCopy([x]).read()
    assert torch.equal(copied, X[:3])
    assert [kind for kind, _ in waits()] == ["copy to the CPU"]


def test_out_of_memory_halves_an_automatic_microbatch(monkeypatch):
    """The cache of the allocator is emptied before the next attempt."""
    emptied = []
    monkeypatch.setattr(type(torch.sim), "empty_cache", lambda self: emptied.append(True), raising=True)

    def loss_fn(model, batch):
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("sim out of memory. Tried to allocate 2 GiB")
        return losses(model, batch)

    ends = []
    for function, microbatch in ((loss_fn, "auto"), (losses, 3)):
        model = network(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.Step(model, optimizer, function, transforms=[sw.clip(0.5)], microbatch=microbatch)
        step.run(batches(DEVICE))
        ends.append(weights(model))
    assert emptied
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_device_with_an_index_becomes_the_current_one(monkeypatch):
    """torch.accelerator.synchronize and other functions refer to it."""
    chosen = []
    monkeypatch.setattr(type(torch.sim), "set_device", lambda self, device: chosen.append(device))
    assert device_named("sim:0") == torch.device("sim:0")
    assert device_named("cpu") == torch.device("cpu")
    assert chosen == [torch.device("sim:0")]


def test_every_test_in_the_list_of_code_paths_exists():
    named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", LIST)
    assert len(named) > 20
    for file, name in named:
        text = (ROOT / "tests" / "accelerator" / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"tests/accelerator/{file}.py has no {name}"


def test_each_path_in_the_list_has_a_test_or_says_that_it_has_none():
    rows = [line.split(" | ") for line in LIST.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    assert [row[0] for row in rows if not re.search(r"::test_|\*\*none\*\*", row[-1])] == []
