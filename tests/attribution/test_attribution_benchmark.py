"""The benchmark of docs/attribution-measurements.md in small: all methods, and a second call from the files."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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


def test_tables(benchmark_modules, tmp_path):
    attribution, tasks = benchmark_modules
    task = replace(tasks.TASKS["transformer"].small(), samples=60, queries=6, subsets=4, models=2, epochs=2)
    task = replace(task, refined_queries=4, metagradient_queries=2, removals=3)
    halves, removals = attribution.tables(attribution.Study(task, tmp_path), threads=1)
    names = [row[0] for row in halves.rows]
    assert names[:4] == ["method", "random", "neighbors, features", "loss"]
    others = {"EK-FAC, mean of 2 models", "TRAK-1", "TRAK-2", "ceiling"}
    assert {"gradient dot", "TracIn, 5 checkpoints", "EK-FAC"} | others <= set(names)
    assert halves.rows[0][1:4] == ["LDS, 6 queries", "LDS, 4 queries", "LDS, 2 queries"]
    cells = {row[0]: row[1:4] for row in halves.rows[1:]}
    assert [bool(cell) for cell in cells["EK-FAC + CG"]] == [False, True, True]
    assert [bool(cell) for cell in cells["metagradient"]] == [False, False, True]
    assert all(-1 <= float(cell.split(" ± ")[0]) <= 1 for row in cells.values() for cell in row if cell)
    assert [row[0] for row in removals.rows] == names[:-1]
    again = attribution.tables(attribution.Study(task, tmp_path), threads=1)
    assert again == [halves, removals]  # also the seconds: nothing was computed again


def test_run_is_repeated_with_weights(benchmark_modules, tmp_path):
    attribution, tasks = benchmark_modules
    task = replace(tasks.TASKS["transformer"].small(), samples=60, queries=6, epochs=2)
    study = attribution.Study(task, tmp_path)
    trained = study.model().state_dict()
    repeated = study._repeat_run(torch.ones(60)).state_dict()
    torch.testing.assert_close(repeated, trained)
    halved = study._repeat_run(torch.full((60,), 0.5)).state_dict()
    assert not all(torch.allclose(halved[name], trained[name]) for name in trained)
