"""Settings of all tests: one thread per worker, a fixed seed, no network, one compilation per graph."""

import gc
import hashlib
import math
import multiprocessing
import os
import subprocess
from collections import defaultdict
from pathlib import Path

# Two workers with two threads each would fight over two cores. Set before torch is imported;
# the subprocesses that run the examples inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# The Hugging Face models are built from tiny configs: nothing may be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

import samplewise

# Ranks, and from Python 3.14 on workers of a DataLoader, are forks of a server process, which imports these once.
SERVER_IMPORTS = ["torch._dynamo", "torch.distributed.fsdp", "torchmetrics", "torchdata.stateful_dataloader"]
if hasattr(os, "fork"):
    multiprocessing.set_forkserver_preload([*SERVER_IMPORTS, "hypothesis", "pytest", "samplewise.loop.trainer"])

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


@pytest.fixture(scope="session", autouse=True)
def _each_graph_is_compiled_once():
    """Share the compiled code of equal graphs among the tests of a worker. Tracing and guards are not shared."""
    from samplewise.step.compiled import inductor

    compile_graph, compiled = inductor.compile_graph, {}

    def shared(graph, inputs, threads):
        if any(node.op == "get_attr" for node in graph.graph.nodes):  # constants are not part of the key
            return compile_graph(graph, inputs, threads)
        layouts = tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs)
        key = graph.code, layouts, threads, torch.get_default_dtype()
        if key not in compiled:
            compiled[key] = compile_graph(graph, inputs, threads)
        return compiled[key]

    inductor.compile_graph = shared
    yield
    inductor.compile_graph = compile_graph


@pytest.fixture(autouse=True)
def _compiled_code_is_used(monkeypatch):
    """Use compiled updates whatever their speed, so that no test depends on time; the measurements have
    tests in test_profitability.py.
    """
    from samplewise.step.compiled import program_cache

    monkeypatch.setattr(program_cache, "refuse_library_bound", lambda *_: None)
    monkeypatch.setattr(program_cache, "refuse_slower", lambda *_: None)


@pytest.fixture
def interpreted(monkeypatch):
    """Run traced updates node by node: Inductor takes seconds."""
    from samplewise.step.compiled import inductor

    monkeypatch.setattr(inductor, "compile_graph", lambda graph, inputs, threads: lambda flat: graph(*flat))


@pytest.fixture(params=["interpreted", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request):
    """Code of a traced update: the graph run node by node, or compiled by Inductor, which takes seconds.

    For tests of tracing, guards and warnings, which are the same for both. Tests without this fixture use Inductor.
    """
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    return request.param


# ------------------------------------------------------------------------------------------- distribution over workers

# Tests of these files share what is expensive to set up: teams of ranks, a process with a simulated device, compiled
# graphs, imports of the examples. Each group runs in one worker. The groups run first, because they take longest: at
# the end no worker is idle for long.
GROUPS = {
    "tests/parallel/": "ranks",
    "tests/accelerator/": "accelerator",
    "tests/step/test_compiled": "compiled",
    "tests/loop/test_compiled": "compiled",
    "tests/test_docs.py": "documents",
}


def _group(nodeid):
    """The group of a test; other tests are grouped by file, so that module fixtures are made once."""
    return next((group for start, group in GROUPS.items() if nodeid.startswith(start)), nodeid.partition("::")[0])


class ByGroup(LoadScopeScheduling):
    def _split_scope(self, nodeid):
        return _group(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False  # keep the order of pytest_collection_modifyitems
    return ByGroup(config, log)


# ---------------------------------------------------------------------------------------------------- shares of sweeps


def _tree():
    """Name of the committed files: it changes with every change, and is the same in a squashed or rebased commit."""
    command = ["git", "rev-parse", "HEAD^{tree}"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # an sdist
        return samplewise.__version__


def _mark_sweeps(items):
    """Mark as slow all but a share of the cases of each test with the marker `sweep(share)`.

    A hash of the case and of the committed files chooses, so that the next commit runs others, and at least one runs.
    """
    sweeps, tree = defaultdict(list), _tree()
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        (share,) = cases[0].get_closest_marker("sweep").args
        cases.sort(key=lambda case: hashlib.sha256((case.nodeid + tree).encode()).digest())
        for case in cases[math.ceil(share * len(cases)) :]:
            case.add_marker("slow")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    _mark_sweeps(items)
    items.sort(key=lambda item: _group(item.nodeid) not in GROUPS.values())


def pytest_collection_finish():
    """Leave the tests and modules, about a million objects, out of garbage collections: each would take a second."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen_objects():
    """The same for what earlier tests have left behind, such as compiled functions."""
    gc.freeze()


# --------------------------------------------------------------------------------------------------------- summary


def pytest_terminal_summary(terminalreporter):
    """List the zoo cases that PyTorch cannot run on this machine, with PyTorch's reason."""
    passed = terminalreporter.stats.get("passed", [])
    not_run = [(report.nodeid, why) for report in passed for name, why in report.user_properties if name == "not run"]
    if not_run:
        terminalreporter.section("not run: PyTorch has no kernel on this machine")
        for nodeid, why in not_run:
            terminalreporter.write_line(f"{nodeid}: {why}")
