"""Sensitivity of chains: values, refusals, and by brute force for any gradients: zero, huge and non-finite ones."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from private_runs import RATE, plan
from torch import nn
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.errors import TransformError
from samplewise.transforms.chain import sensitivity

pytest.importorskip("dp_accounting")

RULE = "the sum of a chain has a bounded sensitivity only if"


def soft(losses):
    return torch.exp(-losses)


def unbounded(norms):
    return norms**2 + 3


def test_values():
    assert sw.chain(sw.clip(0.7)).sensitivity == 0.7
    assert sw.chain(sw.clip(0.7, mode="automatic")).sensitivity == 0.7
    assert sw.chain(soft, sw.clip(2)).sensitivity == 2
    assert sw.chain(sw.weight("w"), sw.clip(2)).sensitivity == 2
    assert sw.chain(sw.clip(5.0), sw.clip(0.5)).sensitivity == 0.5
    assert sw.chain(sw.normalize(3.0)).sensitivity == 3
    assert sw.chain(sw.clip(9.0), sw.group("user"), sw.clip(0.5)).sensitivity == 0.5
    assert sw.chain(sw.clip(0.7), sw.noise(1.0)).sensitivity == 0.7
    assert sensitivity(sw.chain(sw.clip(0.5, by="parameter")), parameters=9) == 1.5


REFUSED = {
    "nothing": ([], f"{RULE} its last transform before the sum is a clip of the norm; found none"),
    "weight": ([soft], rf"{RULE} its last transform.*; found weight\(soft\) at its end. Put sw.clip\(C\) last"),
    "weight after": ([sw.clip(1.0), soft], r"its last transform.*; found weight\(soft\) at its end"),
    "clip before group": ([sw.clip(1.0), sw.group("user")], "its last transform.*; found none"),
    "per count": (
        [sw.clip(1.0, per_count=True)],
        r"its last transform.*; found clip\(1.0, per_count=True\) at",
    ),
    "drop": ([sw.drop(quantile=0.5), sw.clip(1.0)], f"{RULE} the weight of a sample depends on this sample alone"),
    "drop after": ([sw.clip(1.0), sw.drop(quantile=0.5)], "depends on this sample alone; found drop"),
    "mean": ([sw.normalize("mean"), sw.clip(1.0)], "compares a sample with the others of its window"),
    "renormalize": ([sw.weight(soft, renormalize=True), sw.clip(1.0)], "divides by the weights of all samples"),
    "window": ([sw.weight(soft, window=True), sw.clip(1.0)], "compares a sample with the others of its window"),
    "align": ([sw.align(dict), sw.clip(1.0)], "a reference, which may depend on private samples"),
    "position": ([sw.weight(torch.ones(3)), sw.clip(1.0)], "depends on the positions of samples in the window"),
    "by parameter": ([sw.clip(0.5, by="parameter")], r"is 0.5 × √\(number of parameters\); found no number"),
}


@pytest.mark.parametrize(("transforms", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(transforms, message):
    with pytest.raises(TransformError, match=message):
        _ = sw.chain(*transforms).sensitivity


# --------------------------------------------------------------------------------------------------- brute force


class Given(nn.Module):
    """Model whose gradient for a sample is the sample: loss = ⟨p, x⟩, for two parameters."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.full((2,), 1e-3, dtype=torch.float64))
        self.b = nn.Parameter(torch.full((3,), 1e-3, dtype=torch.float64))

    def forward(self, x):
        return (x[:, :2] * self.a).sum(1) + (x[:, 2:] * self.b).sum(1)


def losses(model, batch):
    return model(batch[0])


BOUND = 0.8
CHAINS = {
    "flat": ({}, []),
    "automatic": ({"mode": "automatic"}, []),
    "by parameter": ({"by": "parameter"}, []),
    "automatic by parameter": ({"mode": "automatic", "by": "parameter"}, []),
    "weighted": ({}, [lambda losses: torch.exp(-losses)]),
    "weighted by parameter": ({"by": "parameter"}, [lambda norms: norms**2 + 3]),
}


def sum_of(rows, options, transforms, users=None, microbatch=None):
    """Σ of clipped contributions without noise, from an update with a sample rate of 1; and the sensitivity."""
    grouped = {} if users is None else {"users": users}
    privacy = plan(sample_rate=1.0, updates=1, clip=BOUND, divide_by=1.0, **grouped, **options)
    model = Given()
    loader = privacy.loader(TensorDataset(torch.tensor(rows, dtype=torch.float64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = sw.Step(model, optimizer, losses, privacy=privacy, transforms=transforms, microbatch=microbatch)
    step.config.policy._noise_std = lambda: 0.0
    before = torch.cat([p.detach().clone() for p in model.parameters()])
    for _ in step.over(loader):
        pass
    return before - torch.cat([p.detach() for p in model.parameters()]), step.config.policy.sensitivity


NUMBERS = st.one_of(
    st.floats(-10, 10),
    st.sampled_from([0.0, 1e-300, 1e150, -1e200, 1e308, -1.7e308, math.nan, math.inf, -math.inf]),
)
ROWS = st.lists(st.lists(NUMBERS, min_size=5, max_size=5), min_size=2, max_size=5)


def assert_bounded(rows, left_out, options, transforms, users=None, microbatch=None):
    """Leaving out the rows changes the sum by at most the sensitivity."""
    kept = [k for k in range(len(rows)) if k not in left_out]
    with_all, bound = sum_of(rows, options, transforms, users, microbatch)
    assert with_all.isfinite().all()
    without, _ = sum_of([rows[k] for k in kept], options, transforms, users and [users[k] for k in kept], microbatch)
    assert (with_all - without).norm() <= bound * (1 + 1e-9)
    assert bound == pytest.approx(BOUND * (math.sqrt(2) if "by" in options else 1))


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize(("options", "transforms"), CHAINS.values(), ids=CHAINS)
@given(rows=ROWS, microbatch=st.sampled_from([None, 1, 2]))
@example(rows=[[0.0] * 5, [1e308] * 5, [1.0] * 5], microbatch=None)
@example(rows=[[1e200] * 5, [-1e200] * 5, [3.0] * 5], microbatch=2)
@example(rows=[[math.nan] * 5, [math.inf] * 5, [9.0, 0.0, 0.0, 0.0, 0.0]], microbatch=None)
@example(rows=[[1e200, 1e200, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 5.0, 5.0]], microbatch=1)
def test_leaving_out_a_sample(options, transforms, rows, microbatch):
    assert_bounded(rows, {0}, options, transforms, microbatch=microbatch)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("options", [{}, {"mode": "automatic"}, {"by": "parameter"}], ids=str)
@given(rows=ROWS, microbatch=st.sampled_from([None, 1, 2]))
@example(rows=[[1e308] * 5, [1e308] * 5, [1e308] * 5, [2.0] * 5], microbatch=None)
@example(rows=[[1e308] * 5, [1e308] * 5, [1e308] * 5, [2.0] * 5], microbatch=2)
@example(rows=[[math.nan] * 5, [2.0] * 5, [1.0] * 5], microbatch=2)
def test_leaving_out_a_user(options, rows, microbatch):
    users = [k % 2 for k in range(len(rows))]
    left_out = {k for k, user in enumerate(users) if user == 0}
    assert_bounded(rows, left_out, options, [], users, microbatch)


def test_one_sample_with_a_large_gradient_reaches_the_bound():
    """The bound is not larger than it must be."""
    rows = [[0.1] * 5, [7.0] * 5]
    for options, transforms in CHAINS.values():
        with_all, bound = sum_of(rows, options, transforms)
        without, _ = sum_of(rows[:1], options, transforms)
        assert (with_all - without).norm() > 0.9 * bound
    assert RATE < 1
