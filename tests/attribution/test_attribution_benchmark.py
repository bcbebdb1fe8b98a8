"""The benchmark of docs/attribution-measurements.md in small: all methods, and a second call from the files."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import attribution
    import attribution_tasks

    yield attribution, attribution_tasks
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


def test_table(benchmark_modules, tmp_path):
    attribution, tasks = benchmark_modules
    task = replace(tasks.TASKS["transformer"].small(), samples=60, queries=6, subsets=4, models=2, epochs=2)
    first = attribution.table(attribution.Study(task, tmp_path), threads=1)
    names = [row[0] for row in first.rows]
    assert names[:4] == ["method", "random", "neighbors, features", "loss"]
    assert {"gradient dot", "TracIn, 5 checkpoints", "EK-FAC", "TRAK-1", "TRAK-2", "ceiling"} <= set(names)
    assert all(-1 <= float(row[1]) <= 1 for row in first.rows[1:])
    second = attribution.table(attribution.Study(task, tmp_path), threads=1)
    assert second == first  # also the seconds: nothing was computed again
