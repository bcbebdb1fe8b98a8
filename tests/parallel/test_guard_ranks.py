"""sw.guard on several ranks: every rank records the norms of all samples of an update."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.parallel import collectives

SAMPLES = 60


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    x[7, 1] = torch.nan
    y[40] = 1e6
    return x, y


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 1)).double()


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]).squeeze(1), batch[1], reduction="none")


def trained(run, updates, samples=12, microbatch=None):
    x, y = data()
    model = net()
    transforms = [sw.guard(clip=0.8, window="12up")]
    step = sw.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.01),
        loss_fn,
        samples,
        transforms=transforms,
        microbatch=microbatch,
        parallel="ddp",
    )
    callbacks = [sw.callbacks.Quarantine(), sw.callbacks.ModelCheckpoint("4up")]
    trainer = sw.Trainer(step, run, callbacks, progress=False, device="cpu", seed=1)
    trainer.fit(DataLoader(sw.Indexed(TensorDataset(x, y)), batch_size=4, shuffle=True), updates=updates, resume=True)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return weights, step.transforms.state_dict(), step.counters.skipped


def quarantine(run):
    found = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    return sorted((line["update"], line["id"], line["reason"]) for line in found)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("microbatch", [None, 2])
def test_two_ranks_are_one_process(two, tmp_path, microbatch):
    weights, state, _ = trained(tmp_path / "one", 30)
    for other, state_of_rank, skipped in two.run(trained, tmp_path / "two", 30, 12, microbatch):
        assert torch.allclose(other, weights, rtol=1e-9)
        assert state_of_rank == state
        assert skipped == 0
    assert quarantine(tmp_path / "two") == quarantine(tmp_path / "one")
    assert {id for _, id, _ in quarantine(tmp_path / "two")} == {7, 40}


def test_resumed_ranks_continue_bit_by_bit(two, tmp_path):
    whole = two.run(trained, tmp_path / "whole", 30)
    two.run(trained, tmp_path / "parts", 17)
    for (weights, state, _), (other, other_state, _) in zip(
        whole, two.run(trained, tmp_path / "parts", 30), strict=True
    ):
        assert torch.equal(weights, other)
        assert state == other_state
    assert (tmp_path / "parts" / "quarantine.jsonl").read_bytes() == (
        tmp_path / "whole" / "quarantine.jsonl"
    ).read_bytes()


def nothing_left(on_nonfinite, both):
    model = net()
    step = sw.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.01),
        loss_fn,
        transforms=[sw.guard()],
        parallel="ddp",
        on_nonfinite=on_nonfinite,
        recheck=False,
    )
    x, y = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    if both or collectives.rank():
        x = x * torch.nan
    (update,) = step((x, y))
    return update.skipped, update.samples, int(update.dropped.sum())


def test_a_rank_without_finite_samples(two):
    assert two.run(nothing_left, "raise", False) == [(False, 8, 0), (False, 8, 4)]
    assert two.run(nothing_left, "skip", True) == [(True, 8, 4)] * 2
    for error in two.errors(nothing_left, "raise", True):
        assert "losses must be finite; found nan at sample 0 of the window" in error


def backward(passes):
    model = DistributedDataParallel(net())
    guard = sw.guard(clip=0.7)
    torch.manual_seed(collectives.rank())
    weights = []
    for _ in range(passes):
        x, y = torch.randn(16, 5, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
        result = sw.backward(loss_fn(model, (x, y)), model, transforms=guard, denominator=16)
        weights.append(result.weights)
    return guard.state.state_dict(), sum(int((w < 1).sum()) for w in weights)


def test_sw_backward_gathers_the_norms_of_all_ranks(two):
    (state, clipped), (other, _) = two.run(backward, 8)
    assert state == other
    assert sum(n for _, n in state["norms"]["current"]) + len(state["norms"]["before"]) == 8 * 32
    assert clipped > 0
