"""The benchmark of docs/attribution-measurements.md in small: all methods, and a second call from the files."""

import sys
from dataclasses import replace
from math import log
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


def test_tables(benchmark_modules, tmp_path, monkeypatch):
    attribution, tasks = benchmark_modules
    # Digits of scikit-learn: Fashion-MNIST is not on every machine.
    pictures = tasks.fashion_mnist
    monkeypatch.setattr(pictures, "PLACE", tmp_path / "missing")
    monkeypatch.setattr(pictures, "load", lambda part: pictures.load_or_digits(part)[:2])
    task = replace(tasks.TASKS["cnn"].small(), samples=60, queries=6, subsets=4, models=2, epochs=2)
    task = replace(task, refined_queries=4, metagradient_queries=2, removals=3)
    study = attribution.Study(task, tmp_path)
    halves, removals = attribution.tables(study, threads=1)
    names = [row[0] for row in halves.rows]
    assert names[:5] == ["method", "random", "neighbors, pixels", "neighbors, features", "loss"]
    others = {"EK-FAC, mean of 2 runs", "metagradient, mean of 2 runs", "EK-FAC, mean of 2 models", "TRAK-1", "TRAK-2"}
    assert {"gradient dot", "TracIn, 5 checkpoints", "EK-FAC", "EK-FAC + CG, damping of the run"} | others <= set(names)
    assert halves.rows[0][1:4] == ["LDS, 6 queries", "LDS, 4 queries", "LDS, 2 queries"]
    cells = {row[0]: row[1:4] for row in halves.rows[1:]}
    assert [bool(cell) for cell in cells["EK-FAC + CG"]] == [False, True, True]
    assert [bool(cell) for cell in cells["metagradient"]] == [False, False, True]
    assert all(-1 <= float(cell.split(" ± ")[0]) <= 1 for row in cells.values() for cell in row if cell)
    assert [row[0] for row in removals.rows] == names
    assert removals.rows[-1] == ["ceiling", "1.00", "1.00", "1.00"]  # so few updates are not chaotic
    first = study.scored("EK-FAC")
    again = attribution.Study(task, tmp_path).scored("EK-FAC")
    assert again.seconds == first.seconds  # nothing was computed again
    assert torch.equal(again.scores, first.scores)


def test_run_is_repeated_with_weights(benchmark_modules, tmp_path):
    attribution, tasks = benchmark_modules
    task = replace(tasks.TASKS["transformer"].small(), samples=60, queries=6, epochs=2)
    study = attribution.Study(task, tmp_path)
    trained = study.model().state_dict()
    repeated = study._repeat_run(torch.ones(60)).state_dict()
    torch.testing.assert_close(repeated, trained)
    halved = study._repeat_run(torch.full((60,), 0.5)).state_dict()
    assert not all(torch.allclose(halved[name], trained[name]) for name in trained)


def test_bm25(benchmark_modules):
    attribution, _ = benchmark_modules
    documents = torch.tensor([[0, 0, 1], [1, 2, 2], [1, 1, 1], [1, 0, 3]])  # words of each
    scores = attribution.bm25(documents, torch.tensor([[0, 3, 4], [1, 1, 4]]))
    frequencies = (documents[:, :, None] == torch.arange(4)).sum(1).float()
    # ln(1 + (documents without the word + 0.5) / (documents with it + 0.5))
    rarity = {0: log(1 + 2.5 / 2.5), 1: log(1 + 0.5 / 4.5), 3: log(1 + 3.5 / 1.5)}

    def term(word):
        return rarity[word] * 2.5 * frequencies[:, word] / (frequencies[:, word] + 1.5)

    torch.testing.assert_close(scores, torch.stack([term(0) + term(3), 2 * term(1)]))
