"""`WeightedMean`: sums on the device, in the dtype that was asked for."""

import math

import pytest
import torch

from samplewise.core.means import WeightedMean
from samplewise.parallel import collectives


def test_the_mean_is_a_quotient_of_sums():
    mean = WeightedMean()
    mean.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    mean.add(torch.tensor([4.0]))
    mean.add_sum(5.0, 5)
    assert mean.value() == pytest.approx(12 / 10)
    assert mean.all_reduce(collectives).value() == mean.value()


def test_numbers_are_added_one_after_the_other():
    """Bit for bit: the sums of a resumed run begin in the middle."""
    totals, weights = [0.1, 1e16, -1e16, 0.7], [3, 1.0, 2, 0.3]
    together, single = WeightedMean(torch.float64, 0.3, 1.0), WeightedMean(torch.float64, 0.3, 1.0)
    together.add_numbers(totals, weights)
    for total, weight in zip(totals, weights, strict=True):
        single.add_sum(total, weight)
    assert (together.total, together.weight) == (single.total, single.weight)


def test_nothing_has_no_mean():
    assert math.isnan(WeightedMean().value())


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (None, torch.bfloat16, torch.float32),
        (None, torch.float32, torch.float32),
        (None, torch.float64, torch.float64),
        (torch.float64, torch.float16, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_dtypes(dtype, values, expected):
    mean = WeightedMean(dtype)
    for _ in range(2):
        mean.add(torch.ones(500, dtype=values), torch.ones(500, dtype=values))
    assert mean.total.dtype == mean.weight.dtype == expected
    assert mean.value() == 1.0 and float(mean.weight) == 1000


def test_values_of_any_shape():
    mean = WeightedMean(torch.float64)
    for k in range(3):
        mean.add_sum(torch.full((2, 2), float(k)), 2)
    assert torch.equal(mean.quotient(), torch.full((2, 2), 0.5, dtype=torch.float64))


def test_gradients_are_not_kept():
    mean = WeightedMean()
    mean.add(torch.ones(3, requires_grad=True))
    assert not mean.total.requires_grad
