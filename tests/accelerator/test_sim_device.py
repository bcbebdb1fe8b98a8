"""The simulated accelerator itself: it must behave like a GPU in the ways that the other tests rely on."""

import pytest
import sim_device as sim
import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "sim"


def values(*shape):
    return torch.randn(*shape).to(DEVICE)


def test_numbers_are_those_of_the_cpu_and_backward_runs_on_a_thread_of_the_device():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(48, 2)).double()
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.to(DEVICE)
    sim.THREADS.clear()
    model(x.to(DEVICE)).square().sum().backward()
    assert all(p.device.type == DEVICE and p.grad.device.type == DEVICE for p in model.parameters())
    assert all(torch.equal(p.grad.cpu(), q) for p, q in zip(model.parameters(), expected, strict=True))
    assert len(sim.THREADS) == 2


def test_cpu_tensors_among_device_tensors_are_an_error_but_scalars_are_not():
    assert torch.equal((values(3) * 0 + torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        values(3) + torch.ones(3)


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to the device": lambda x: torch.ones(3).to(DEVICE),
    "tensor": lambda x: torch.tensor([1.0, 2.0], device=DEVICE),
    "mask": lambda x: x[x > 0],
    "list as an index": lambda x: x[[0, 2]],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "synchronize": lambda x: torch.accelerator.synchronize(),
}


@pytest.mark.parametrize("name", WAITING)
def test_waits_of_the_host_are_recorded(name, waits):
    x = values(3)
    waits()
    WAITING[name](x)
    assert sum(waits().values()) == 1


def test_other_work_is_not_a_wait(waits):
    x = values(4, 3)
    waits()
    y = torch.where(x > 0, x, torch.zeros_like(x)).sum() + torch.arange(3, device=DEVICE)
    y.add_(torch.full((), 1.0, device=DEVICE)).to("cpu", non_blocking=True)
    assert waits() == {} and y.shape == (3,)


def test_an_asynchronous_copy_holds_wrong_values_until_the_host_waits():
    x = values(3)
    copy = x.to("cpu", non_blocking=True)
    assert copy.isnan().all()
    torch.accelerator.synchronize()
    assert torch.equal(copy, sim.raw(x))
    target = torch.zeros(3, dtype=torch.long)
    target.copy_((x * 100).long(), non_blocking=True)
    event = torch.sim.Event()
    event.record()
    later = x.to("cpu", non_blocking=True)
    event.synchronize()
    assert torch.equal(target, (sim.raw(x) * 100).long()) and later.isnan().all()


def test_random_numbers_come_from_the_generator_of_the_device():
    before = torch.get_rng_state()
    torch.sim.manual_seed(3)
    x = torch.zeros(4, 5, device=DEVICE)
    drawn = [F.dropout(x + 1), torch.randn(3, device=DEVICE), torch.bernoulli(x + 0.5), torch.rand_like(x)]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(3)  # seeds all devices
    assert torch.equal(F.dropout(x + 1).cpu(), drawn[0].cpu())
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"):
        torch.randn(3, device=DEVICE, generator=torch.Generator())
    own = [torch.randn(3, device=DEVICE, generator=torch.sim.Generator().manual_seed(1)).cpu() for _ in range(2)]
    assert torch.equal(*own)


def test_autocast_casts_in_both_directions():
    x = values(4, 3)
    linear = nn.Linear(3, 2).to(DEVICE)
    with torch.autocast(DEVICE, torch.float16):
        y = linear(x)
        assert y.dtype is torch.float16 and y.softmax(1).dtype is torch.float32
    y.sum().backward()
    assert linear.weight.grad.dtype is torch.float32


def test_a_loss_scale_reaches_the_fused_optimizer_on_the_device():
    p = nn.Parameter(values(3))
    start = p.detach().cpu()
    optimizer = torch.optim.AdamW([p], fused=True)
    p.grad = torch.full_like(p, 4.0)
    optimizer.grad_scale = torch.full((), 2.0, device=DEVICE)
    optimizer.found_inf = torch.ones((), device=DEVICE)
    optimizer.step()
    assert torch.equal(p.detach().cpu(), start)
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    optimizer.step()
    assert not torch.equal(p.detach().cpu(), start)


def test_rounding_noise_changes_sums_by_a_few_units_in_the_last_place():
    x = values(50, 50).double()
    exact = (x @ x).cpu()
    with sim.rounding_noise(4):
        noisy = (x @ x).cpu()
        assert torch.equal((x * 2).cpu(), sim.raw(x) * 2)
    assert 0 < (noisy - exact).abs().max() < 1e-13


def test_availability_is_that_of_the_module(monkeypatch):
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == DEVICE
    monkeypatch.setattr(torch.sim, "present", False)
    assert not torch.accelerator.is_available()
