"""Parameters of which `make test` runs a part and `make test-all` runs all."""

import pytest


def daily(values, chosen):
    """Values for pytest.mark.parametrize; those that are not among `chosen` get the marker `slow`."""
    return [pytest.param(value, marks=() if value in chosen else pytest.mark.slow) for value in values]
