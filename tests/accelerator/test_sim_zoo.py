"""The zoo on the simulated accelerator, with exact sums and with rounding noise."""

from dataclasses import replace

import pytest
import sim_device as sim
import torch
from zoo import CASES

from samplewise.testing.compare import CORE, Tolerance
from samplewise.testing.runner import BF16, FP32, FP64, NOT_RUN, REFUSED, RIGHT, run_case

DEVICE = "sim:0"
# The simulated device has no sparse tensors.
NAMES = [name for name in CASES if not name.endswith("_with_sparse_gradients")]
# torch has no backward pass of huber_loss for two dtypes, and an error in a backward pass of a Python device ends the
# process.
ABORTS = {"huber_and_quantile"}
# Interacting samples whose rows are exact, but which are not refused under autocast: a cell computes with a cast copy
# of a slice of the batch, which is not recognized as data of the samples (docs/guarantees.md).
NOT_REFUSED = {"recurrent_net_run_along_the_batch"}
# Gradients in which all terms cancel consist of noise: the floor is relative to the largest gradient.
NOISY = {
    "fp64": replace(FP64, quantities=CORE, tolerance=Tolerance(1e-8, 1e-11)),
    "fp32": replace(FP32, quantities=CORE, tolerance=Tolerance(1e-4, 1e-5)),
}


def check(name, precision):
    case = CASES[name]
    result = run_case(case, precision, torch.device(DEVICE))
    assert result.outcome == (REFUSED if case.interacts else RIGHT), result.reason


@pytest.mark.sweep(1 / 138)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_right(name):
    check(name, FP64)


@pytest.mark.sweep(1 / 136)
@pytest.mark.parametrize("name", [n for n in NAMES if CASES[n].traits.autocast and n not in ABORTS])
def test_gradients_under_autocast_are_right(name):
    """Some kernels of the CPU, which compute for the simulated device, have no bfloat16."""
    case = replace(CASES[name], interacts=False) if name in NOT_REFUSED else CASES[name]
    assert run_case(case, BF16, torch.device(DEVICE)).outcome in (RIGHT, REFUSED, NOT_RUN)


@pytest.mark.sweep(1 / 275)
@pytest.mark.parametrize("precision", NOISY)
@pytest.mark.parametrize("name", NAMES)
def test_rounding_noise_changes_no_owner(name, precision):
    """Sums are not deterministic on a GPU: nothing is refused and no element gets another owner because of that."""
    if precision == "fp32" and not CASES[name].traits.float32:
        precision = "fp64"
    with sim.rounding_noise(2):
        check(name, NOISY[precision])
