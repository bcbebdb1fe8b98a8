"""Random numbers on an accelerator: drawn from its generator; its state is saved, restored, seeded and resumed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.core.state import RandomState, RngStream, fork_rng, reseed, seed_everything, snapshot

DEVICE = "sim"


def drawn():
    return torch.randn(4, device=DEVICE).tolist()


def model_and_batch():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).to(DEVICE)
    return model, (torch.randn(6, 5).to(DEVICE), torch.randint(3, (6,)).to(DEVICE))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("save", [lambda: snapshot(nn.Linear(1, 1)), lambda: RandomState().restore])
def test_snapshots_restore_the_generator_of_the_device(save):
    restore = save()
    first = drawn()
    restore()
    assert drawn() == first


def test_a_state_dict_contains_the_generator_of_the_device():
    state = RandomState().state_dict()
    first = drawn()
    RandomState.from_state_dict(state).restore()
    assert drawn() == first


def test_a_state_of_another_accelerator_is_left_out():
    state = RandomState().state_dict()
    state["devices"] = {"cuda": [torch.zeros(16, dtype=torch.uint8)]}
    before = torch.sim.get_rng_state()
    RandomState.from_state_dict(state).restore()
    assert torch.equal(torch.sim.get_rng_state(), before)


@pytest.mark.parametrize("seed", [seed_everything, reseed])
def test_seeds_reach_the_device(seed):
    seed(7)
    first = drawn()
    seed(7)
    assert drawn() == first


def test_forks_and_streams_leave_the_device_as_it_was():
    before = torch.sim.get_rng_state()
    with fork_rng(3):
        inside = drawn()
    with RngStream(3):
        assert drawn() == inside
    assert torch.equal(torch.sim.get_rng_state(), before)


def test_noise_draws_from_the_device():
    model, batch = model_and_batch()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), losses, transforms=[sw.noise(1.0)])
    on_cpu, on_device = torch.get_rng_state(), torch.sim.get_rng_state()
    step(batch)
    assert torch.equal(torch.get_rng_state(), on_cpu) and not torch.equal(torch.sim.get_rng_state(), on_device)


def test_noise_takes_a_generator_of_the_device_and_refuses_one_of_the_cpu():
    model, batch = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.tolist() for p in model.parameters()]
    step = sw.Step(model, optimizer, losses, transforms=[sw.noise(1.0, generator=torch.Generator())])
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"):
        step(batch)
    assert [p.tolist() for p in model.parameters()] == before
    ends = []
    for _ in range(2):
        generator = torch.sim.Generator().manual_seed(5)
        total = [torch.zeros(3, device=DEVICE)]
        sw.noise(1.0, generator=generator).apply_(total)
        ends.append(total[0].tolist())
    assert ends[0] == ends[1]


def test_an_automatic_microbatch_size_draws_the_same_numbers_after_an_attempt_that_was_too_large():
    ends = []
    microbatch = sw.auto(memory=500)
    for _ in range(2):
        torch.manual_seed(0)
        model, batch = model_and_batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = sw.Step(model, optimizer, losses, transforms=[sw.clip(1.0)], microbatch=microbatch)
        step(batch)
        ends.append([torch.sim.get_rng_state().tolist(), *(p.tolist() for p in model.parameters())])
        microbatch = step.state_dict()["microbatch"]
    assert microbatch < 6 and ends[0] == ends[1]


@pytest.mark.parametrize("function", [lambda m, b: sw.check(m, losses, b), lambda m, b: sw.scan(m, losses, [b])])
def test_diagnostics_do_not_change_the_random_state_of_the_device(function):
    model, batch = model_and_batch()
    before = torch.sim.get_rng_state()
    function(model, batch)
    assert torch.equal(torch.sim.get_rng_state(), before)
