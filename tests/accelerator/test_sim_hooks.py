"""Random hooks and Functions that are not linear, on the simulated accelerator with rounding noise."""

import pytest
import sim_device as sim
from nonlinear_hooks import assert_right_or_refused

MANY = 4  # cases of one test


@pytest.mark.sweep(1 / 100)
@pytest.mark.filterwarnings("ignore::samplewise.errors.SamplesMayInteractWarning")  # of shuffled samples that are mixed
@pytest.mark.parametrize("first", range(1000, 1400, MANY))
def test_right_or_refused(first):
    with sim.rounding_noise(2):
        for seed in range(first, first + MANY):
            assert_right_or_refused(seed, "sim:0")
