"""Parameters of which `make test` runs a part and `make test-all` runs all."""

import pytest


def daily(values, chosen):
    """Values for pytest.mark.parametrize; those that are not among `chosen` get the marker `slow`."""
    return [pytest.param(value, marks=() if value in chosen else pytest.mark.slow) for value in values]


def every(step, values, start=0):
    """Values for pytest.mark.parametrize; each `step`-th one from `start` on is daily, the others are `slow`.

    Sweeps over the same models use different starts, so that each model is daily in some of them.
    """
    values = list(values)
    return [pytest.param(value, marks=() if k % step == start else pytest.mark.slow) for k, value in enumerate(values)]


def in_turn(values, others):
    """Pairs for pytest.mark.parametrize of two arguments; each value is daily with one of `others`, in turn."""
    return [
        pytest.param(value, other, marks=() if k % len(others) == j else pytest.mark.slow)
        for k, value in enumerate(values)
        for j, other in enumerate(others)
    ]
