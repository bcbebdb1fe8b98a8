"""What every test may rely on: one thread a worker, a fixed seed, no network."""

import os

# Two workers with two threads each would fight over two cores. Set before torch is imported;
# the subprocesses that run the examples inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# The Hugging Face models are built from tiny configs: nothing may be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

# A test that failed must fail again, so the daily run draws the same examples each time;
# `make test-all` looks for new ones. No deadline: the first example pays for torch's warm-up.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=30, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=300)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _same_start():
    """Same random numbers whichever tests ran before; the global dtype is put back."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)


def pytest_terminal_summary(terminalreporter):
    """List the zoo cases that PyTorch cannot run on this machine, with PyTorch's reason."""
    passed = terminalreporter.stats.get("passed", [])
    not_run = [(report.nodeid, why) for report in passed for name, why in report.user_properties if name == "not run"]
    if not_run:
        terminalreporter.section("not run: PyTorch has no kernel on this machine")
        for nodeid, why in not_run:
            terminalreporter.write_line(f"{nodeid}: {why}")
