"""samplewise bench on the simulated accelerator: host waits, memory, TF32 and mixed precision."""

import json
from dataclasses import replace

import pytest
import sim_device as sim
import torch
from common import DEVICE
from torch import nn
from typer.testing import CliRunner

import samplewise as sw
from samplewise.bench import bench, measure
from samplewise.bench.networks import Work, classification
from samplewise.bench.report import tables
from samplewise.cli.main import app
from samplewise.core.memory import allow_tf32, peak_bytes
from samplewise.diagnostics import profile
from samplewise.loop.meters import peak_memory
from samplewise.testing import CASES
from samplewise.testing.runner import REFUSED, RIGHT, TF32, run_case


@pytest.fixture
def device():
    return torch.device(DEVICE)


def tiny(scale):
    images = torch.randn(4, 2, 6, 6)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    return Work(model, (images, torch.arange(4) % 3), classification)


@pytest.fixture
def quick(monkeypatch):
    """One case of the zoo and one network, with the precisions of a new GPU."""
    monkeypatch.setattr(profile, "MIN_ROUNDS", 1)
    monkeypatch.setattr(bench, "QUICK_CASES", 1)
    monkeypatch.setattr(bench, "has_tf32", lambda device: True)
    monkeypatch.setattr(bench, "NETWORKS", {"tiny": tiny})
    monkeypatch.setattr(bench, "small_vit", tiny)
    monkeypatch.setattr(bench, "vit_s", tiny)


def test_a_report_of_an_accelerator(tmp_path, quick):
    file = tmp_path / "sim.json"
    result = CliRunner().invoke(app, ["bench", "--device", "sim:0", "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    environment = report["environment"]
    assert (environment["device"], environment["name"]) == ("sim", "simulated accelerator")
    assert environment["memory_bytes"] == 2**34 and environment["driver"] is None
    assert [zoo["precision"] for zoo in report["zoo"]] == ["float64", "float32", "TF32", "bfloat16, autocast"]
    assert [n["precision"] for n in report["networks"]] == ["float32", "TF32", "bfloat16, mixed"]
    waits = {update["update"]: update["waits"] for update in report["transforms"]["updates"]}
    assert waits["plain"] == waits["none"] == waits["sw.weight(f)"] == 0
    for group in (report["transforms"], *report["networks"]):
        plain = group["updates"][0]["peak_bytes"]
        assert plain > 0 and all(update["peak_bytes"] >= 0.5 * plain for update in group["updates"])
    cells = tables(report)[1].rows[0]
    assert cells[:2] == ["plain", ""] and cells[-1] == "1.00"


def test_the_waits_of_a_report_are_those_of_the_device(device):
    """The loss function reads a value; nothing else in a clipped update waits."""

    def reading(model, batch):
        values = classification(model, batch)
        assert values.detach().sum().item() > 0
        return values

    work = replace(bench.seeded_work(tiny, "quick").to(device), loss_fn=reading)
    updates = measure.make_updates(work, {"clip": {"transforms": [sw.clip(1.0)]}}, device, measure.FLOAT32)
    for update in updates.values():
        for _ in range(measure.WARM_UP):
            update()
    with sim.counted_waits() as counted:
        updates["clip"]()
    assert sum(counted.values()) == 1
    assert [measure.count_waits(update, device) for update in updates.values()] == [1, 1]
    assert torch.sim.get_sync_debug_mode() == "default"


def test_the_sync_debug_mode_is_restored_after_an_error(device):
    def update():
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        measure.count_waits(update, device)
    assert torch.sim.get_sync_debug_mode() == "default"


def test_float16_of_older_gpus(device):
    """The losses of the comparison are scaled: gradients of float16 vanish otherwise."""
    work = bench.seeded_work(tiny, "quick").to(device)
    error, norms = measure.error_of_norms(work, device, measure.FLOAT16)
    assert error < measure.FLOAT16.tolerance
    reference = measure.error_of_norms(work, device, measure.FLOAT32)[1]
    torch.testing.assert_close(norms.cpu().float(), reference.cpu(), rtol=1e-2, atol=0)


def test_a_batch_that_does_not_fit_is_halved(monkeypatch, device):
    make_updates = measure.make_updates

    def with_little_memory(work, *arguments):
        if len(work.batch[0]) > 2:
            raise torch.OutOfMemoryError("sim out of memory")
        return make_updates(work, *arguments)

    monkeypatch.setattr(bench, "make_updates", with_little_memory)
    work = bench.seeded_work(tiny, "quick").to(device)
    assert len(work.batch[0]) == 4
    smaller, error, _ = bench.fit_to_memory(work, device, measure.FLOAT32)
    assert len(smaller.batch[0]) == 2 and error < 1e-4
    monkeypatch.setattr(bench, "COMPARED", 3)
    with pytest.raises(torch.OutOfMemoryError):
        bench.fit_to_memory(work, device, measure.FLOAT32)


def test_a_device_without_float64_is_compared_in_float32(monkeypatch, quick, device):
    monkeypatch.setattr(bench, "has_tf32", lambda device: False)
    monkeypatch.setattr(bench, "has_float64", lambda device: False)
    assert list(bench.zoo_precisions(device)) == ["float32", "bfloat16, autocast"]
    result = bench.measure_transforms("quick", device, lambda parts: None)
    assert result["dtype"] == "float32" and all(exact["right"] for exact in result["exact"])


# ------------------------------------------------------------------------------------------------ memory statistics


def test_peak_memory_is_that_of_the_allocator(device):
    kept = torch.zeros(1000, device=DEVICE)

    def update():
        first = torch.zeros(1000, device=DEVICE) + 1
        del first
        torch.zeros(500, device=DEVICE)

    assert peak_bytes(update, device) == 2 * 4000  # zeros, and its sum with 1
    assert kept.sum().item() == 0


def test_the_trainer_reads_the_peak_of_the_device(device):
    torch.sim.reset_peak_memory_stats()
    torch.zeros(1000, device=DEVICE)
    assert peak_memory(device) == 4000


# --------------------------------------------------------------------------------------------------------------- TF32


def test_tf32_rounds_the_factors_of_products():
    x = torch.full((2, 2), 1 + 2**-11 + 2**-12).to(DEVICE)
    with allow_tf32(True):
        assert torch.equal((x @ torch.eye(2).to(DEVICE)).cpu(), torch.full((2, 2), 1 + 2**-10))
        assert torch.equal((x + 0).cpu(), sim.raw(x))
    with allow_tf32(False):
        assert torch.equal((x @ torch.eye(2).to(DEVICE)).cpu(), sim.raw(x))


@pytest.mark.sweep(1 / 15)
@pytest.mark.parametrize("name", CASES)
def test_gradients_with_tf32_are_right(name, device):
    """Rounded factors change no owner, and no gradient by more than the tolerance."""
    with sim.rounding_noise(2):
        result = run_case(CASES[name], TF32, device)
    assert result.outcome == (REFUSED if CASES[name].interacts else RIGHT), result.reason
