"""Run the tests of this directory in a process of their own, in which the simulated accelerator is registered.

Registration changes a process for good (see sim_device.py), so the other tests of a worker must not see it. At the
first test of this directory, a second pytest runs all of them that were selected and returns their reports. To debug
a test, run it in that process directly: SAMPLEWISE_SIM=1 pytest tests/accelerator/...
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

HERE = Path(__file__).parent
INSIDE = os.environ.get("SAMPLEWISE_SIM") == "1"
REPORTS = "SAMPLEWISE_SIM_REPORTS"  # file to which the inner process writes its reports

if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    collect_ignore_glob = ["test_*.py"]  # torch < 2.10 has no backends in Python
elif INSIDE:
    import sim_device

    from samplewise.loop.checkpoint import encoding

    sim_device.register()
    encoding.TENSOR_TYPES += (sim_device.SimTensor,)  # tensors of a GPU have no class of their own


@pytest.fixture
def waits():
    """Function that returns the host waits since the last call: Counter of (kind, place)."""

    def since_last_call():
        found = dict(sim_device.WAITS)
        sim_device.WAITS.clear()
        return found

    since_last_call()
    return since_last_call


# ------------------------------------------------------------------------------------------------------ outer process

_reports = {}  # node id -> reports of the inner process


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Outside: report the results of the inner process instead of running the test."""
    if INSIDE or HERE not in item.path.parents:
        return None
    if not _reports:
        _run_inside(item.session)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports[item.nodeid]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_inside(session):
    """Run the selected tests of this directory in a new process and read their reports."""
    config = session.config
    selected = [item.nodeid for item in session.items if HERE in item.path.parents]
    file = config._tmp_path_factory.mktemp("accelerator") / "reports"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:xdist", "-p", "no:cacheprovider", *selected]
    environment = {**os.environ, "SAMPLEWISE_SIM": "1", REPORTS: str(file)}
    done = subprocess.run(command, env=environment, cwd=config.rootpath, capture_output=True, text=True)
    for line in file.read_text().splitlines() if file.exists() else ():
        report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        _reports.setdefault(report.nodeid, []).append(report)
    missing = [nodeid for nodeid in selected if nodeid not in _reports]
    if missing:
        pytest.exit(f"the process of the simulated accelerator stopped at {missing[0]}:\n{done.stdout}\n{done.stderr}")


# ------------------------------------------------------------------------------------------------------ inner process


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Inside: append a report to the file of the outer process."""
    if INSIDE and REPORTS in os.environ:
        data = _config.hook.pytest_report_to_serializable(config=_config, report=report)
        with Path(os.environ[REPORTS]).open("a") as file:
            file.write(json.dumps(data, default=str) + "\n")


def pytest_configure(config):
    global _config
    _config = config
