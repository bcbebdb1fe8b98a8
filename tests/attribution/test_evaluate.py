"""Subsets, retraining, linear datamodeling score, removal and baselines against plain computations."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import samplewise as sw
from samplewise.attribution import evaluate, margin
from samplewise.attribution.evaluate import lds, removal, retrain, subsets
from samplewise.attribution.evaluate.lds import spearman
from samplewise.errors import StoreError


def data(n=40, classes=3):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, classes, generator=generator, dtype=torch.float64)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x @ weights).argmax(1))


def queries():
    return [data(46)[40:43], data(46)[43:46]]


def make_step():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss())


def make_step_with_dropout():
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Linear(6, 3)).double()
    return sw.Step(model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss())


def make_clipped_step():
    step = make_step()
    return sw.Step(step.model, step.optimizer, nn.CrossEntropyLoss(), transforms=[sw.clip(0.5)])


class Words(Dataset):
    """Samples that are not tensors."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return "ab"[i % 2] * (i + 1)


# --- subsets and lds -------------------------------------------------------------------------------------------------


def test_subsets():
    found = subsets(11, 4, fraction=0.3, seed=5)
    assert found.shape == (4, 3) and found.dtype == torch.int64
    assert all(len(row.unique()) == 3 and row.max() < 11 and (row.diff() > 0).all() for row in found)
    assert torch.equal(found, subsets(11, 4, fraction=0.3, seed=5))
    assert not torch.equal(found, subsets(11, 4, fraction=0.3, seed=6))
    with pytest.raises(ValueError, match="fraction must be between 0 and 1"):
        subsets(10, 3, fraction=1.0)
    with pytest.raises(ValueError, match="count must be an integer, 1 or more; found 0"):
        subsets(10, 0)


def test_rank_correlation_with_ties():
    a = torch.tensor([[1.0, 2, 2, 5, 0], [3, 3, 3, 3, 3]])
    b = torch.tensor([[2.0, 1, 4, 4, 4], [1, 2, 3, 4, 5]])
    ranks_a, ranks_b = torch.tensor([1, 2.5, 2.5, 4, 0]), torch.tensor([1.0, 0, 3, 3, 3])
    wanted = torch.corrcoef(torch.stack([ranks_a, ranks_b]))[0, 1]
    torch.testing.assert_close(spearman(a, b), torch.tensor([wanted, 0.0]).double(), rtol=1e-6, atol=1e-7)


def by_hand(scores, sets, outcomes):
    """Rank correlation of each query by sorting, for values without ties."""
    found = []
    for q in range(len(scores)):
        predicted = torch.stack([scores[q][s].sum() for s in sets])
        ranks = [v.argsort().argsort().double() for v in (predicted, outcomes[:, q])]
        found.append(torch.corrcoef(torch.stack(ranks))[0, 1])
    return torch.stack(found)


def test_lds():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(7, 20, generator=generator)
    sets = subsets(20, 12)
    outcomes = torch.stack([scores[:, s].sum(1) for s in sets]) + torch.randn(12, 7, generator=generator)
    found = lds(scores, sets, outcomes)
    wanted = by_hand(scores, sets, outcomes)
    torch.testing.assert_close(found.per_query, wanted, rtol=1e-12, atol=1e-12)
    assert found.mean == pytest.approx(float(wanted.mean()))
    assert 0.02 < found.standard_error < 0.2
    assert found.ceiling is None and found.subsets == 12
    assert abs(found.baselines["random"].mean) < 0.4
    torch.testing.assert_close(lds(scores, list(sets), outcomes).per_query, wanted)


def test_the_standard_error_is_the_spread_over_new_subsets_and_queries():
    generator = torch.Generator().manual_seed(1)

    def draw():
        scores = torch.randn(30, 20, generator=generator)
        sets = subsets(20, 40, seed=int(torch.randint(1000, (1,), generator=generator)))
        shared = torch.randn(40, 1, generator=generator)  # queries of one model are not independent
        noise = 2 * torch.randn(40, 30, generator=generator) + 2 * shared
        return lds(scores, sets, torch.stack([scores[:, s].sum(1) for s in sets]) + noise, bootstraps=20)

    drawn = [draw() for _ in range(20)]
    spread = torch.tensor([each.mean for each in drawn]).std()
    claimed = torch.tensor([each.standard_error for each in drawn]).mean()
    assert 0.5 < float(claimed / spread) < 2


def test_the_ceiling_is_the_score_of_a_perfect_prediction():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 50, generator=generator)
    sets = subsets(50, 100)
    exact = torch.stack([scores[:, s].sum(1) for s in sets])
    noisy = exact + exact.std(0) * torch.randn(2, 100, 200, generator=generator)
    found = lds(scores, sets, noisy, bootstraps=2)
    assert found.agreement == pytest.approx(0.48, abs=0.03)
    assert found.mean == pytest.approx(found.ceiling, abs=0.03)


def test_lds_is_printed_beside_baselines_and_saved(tmp_path):
    scores, sets, outcomes = torch.randn(4, 10), subsets(10, 5), torch.randn(2, 5, 4)
    found = lds(scores, sets, outcomes, baselines={"loss": torch.rand(4, 10)})
    assert "ceiling" in str(found) and "random" in str(found) and "loss" in str(found)
    assert repr(found) == str(found)
    assert re.match(r"LDS over 5 subsets and 4 queries, ceiling 0.\d{3}\n", repr(found))
    assert found._repr_html_().count("<tr>") == 4
    found.save(tmp_path / "lds.json")
    saved = json.loads((tmp_path / "lds.json").read_text())
    assert saved["mean"] == found.mean and saved["ceiling"] == found.ceiling
    assert saved["baselines"] == {name: each.mean for name, each in found.baselines.items()}


class DataFrame:
    """What the library calls of pandas.DataFrame."""

    def __init__(self, columns):
        self.columns = columns

    def rename_axis(self, index):
        self.index_name = index
        return self


def test_tables_of_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=DataFrame))
    loss = torch.rand(4, 10)
    found = lds(torch.randn(4, 10), subsets(10, 5), torch.randn(5, 4), baselines={"loss": loss})
    table = found.to_pandas()
    assert table.index_name == "query" and list(table.columns) == ["these scores", "random", "loss"]
    assert table.columns["these scores"] == found.per_query.tolist()
    assert table.columns["loss"] == found.baselines["loss"].per_query.tolist()
    per_query = {"these scores": torch.tensor([1.0, 2.0]), "random": torch.tensor([0.5, 0.0])}
    errors = {"these scores": 0.5, "random": 0.25}
    removed = evaluate.Removal(3, {"these scores": 1.5, "random": 0.25}, errors, per_query)
    assert removed.to_pandas().columns == {"these scores": [1.0, 2.0], "random": [0.5, 0.0]}
    assert repr(removed).splitlines()[0] == "decrease of the output without 3 training samples, 2 queries"
    assert repr(removed).splitlines()[-1].split() == ["random", "0.250", "0.250"]
    assert "<td>random</td><td>0.250</td>" in removed._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas: pip install pandas"):
        found.to_pandas()


def test_bad_arguments_of_lds():
    sets, outcomes = subsets(10, 5), torch.randn(5, 4)
    shape = r"must have shape \(queries, training samples\) = \(4, 10"
    for wrong in ((3, 10), (4, 6), (4,), (4, 10, 1)):
        with pytest.raises(ValueError, match=rf"scores {shape} or more\); found {re.escape(str(wrong))}\.$"):
            lds(torch.randn(wrong), sets, outcomes)
    with pytest.raises(ValueError, match=rf"scores {shape} or more\); found \(10, 4\). Transpose them: scores.T"):
        lds(torch.randn(10, 4), sets, outcomes)
    with pytest.raises(ValueError, match=rf"scores {shape} or more\); found list"):
        lds([1.0], sets, outcomes)
    with pytest.raises(ValueError, match=rf"baselines\['loss'\] {shape}\); found \(10, 4\). Transpose them: base"):
        lds(torch.randn(4, 10), sets, outcomes, baselines={"loss": torch.randn(10, 4)})
    with pytest.raises(ValueError, match=r"indices of the 10 training samples that have scores; found -1 to 3"):
        lds(torch.randn(4, 10), [torch.tensor([-1, 3])] * 5, outcomes)
    with pytest.raises(ValueError, match="a row for each of the 5 subsets; found 6"):
        lds(torch.randn(4, 10), sets, torch.randn(6, 4))
    with pytest.raises(ValueError, match="outcomes must be finite"):
        lds(torch.randn(4, 10), sets, outcomes / 0)
    with pytest.raises(ValueError, match="scores must be finite"):
        lds(torch.full((4, 10), torch.nan), sets, outcomes)
    with pytest.raises(ValueError, match="each training sample once; found a repeated index"):
        lds(torch.randn(4, 10), [torch.tensor([1, 1])] * 5, outcomes)
    with pytest.raises(ValueError, match="at least 3 subsets; found 2"):
        lds(torch.randn(4, 10), sets[:2], outcomes[:2])
    with pytest.raises(ValueError, match=r"or \(repeats, count, queries\); found \(5,\)"):
        lds(torch.randn(4, 10), sets, outcomes[:, 0])


def test_equals_dattri():
    metric = pytest.importorskip("dattri.metric")
    generator = torch.Generator().manual_seed(0)
    scores, outcomes = torch.randn(6, 30, generator=generator), torch.randn(9, 6, generator=generator)
    sets = subsets(30, 9)
    wanted, _ = metric.lds(scores.T, (outcomes, sets))
    torch.testing.assert_close(lds(scores, sets, outcomes).per_query.float(), wanted, rtol=0, atol=1e-6)


# --- retraining ------------------------------------------------------------------------------------------------------


def plain_training(make, subset, seed, epochs, batch_size):
    """The same training in plain PyTorch; the orders are those of the library."""
    torch.manual_seed(seed)
    step = make()
    x, y = data().tensors
    for epoch in range(epochs):
        order = subset[torch.randperm(len(subset), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))]
        for part in order.split(batch_size):
            step.optimizer.zero_grad()
            F.cross_entropy(step.model(x[part]), y[part]).backward()
            step.optimizer.step()
    with torch.no_grad():
        step.model.eval()
        return torch.cat([margin(step.model, batch) for batch in queries()])


@pytest.mark.parametrize("make", [make_step, make_step_with_dropout])  # stacked, one after the other
def test_retrain(make, tmp_path):
    sets = subsets(40, 3)
    before = torch.get_rng_state()
    found = retrain(make, data(), sets, queries(), tmp_path, epochs=3, batch_size=8)
    assert torch.equal(torch.get_rng_state(), before)
    wanted = torch.stack([plain_training(make, s, k, 3, 8) for k, s in enumerate(sets)])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_stacked_training_is_the_training_of_each(tmp_path):
    sets = subsets(40, 5)
    stacked = retrain(make_step, data(), sets, queries(), tmp_path / "a", epochs=4, batch_size=7)
    ragged = [*sets, torch.arange(3)]  # subsets of different sizes are trained one after the other
    alone = retrain(make_step, data(), ragged, queries(), tmp_path / "b", epochs=4, batch_size=7)
    torch.testing.assert_close(stacked, alone[:5], rtol=1e-9, atol=1e-9)


def test_transforms_are_part_of_the_training(tmp_path):
    plain = retrain(make_step, data(), subsets(40, 2), queries(), tmp_path / "a", epochs=2)
    clipped = retrain(make_clipped_step, data(), subsets(40, 2), queries(), tmp_path / "b", epochs=2)
    assert (plain - clipped).abs().max() > 1e-3


def test_repeats_and_models(tmp_path):
    sets = subsets(40, 3)
    options = {"epochs": 2, "keep_models": True}
    found = retrain(make_step, data(), sets, queries(), tmp_path, repeats=2, **options)
    assert found.shape == (2, 3, 6) and not torch.equal(found[0], found[1])
    once = retrain(make_step, data(), sets, queries(), tmp_path, **options)
    assert torch.equal(once, found[0])
    for repeat in (0, 1):
        for model, outputs in zip(evaluate.models(make_step, tmp_path, repeat), found[repeat], strict=True):
            with torch.no_grad():
                assert torch.equal(torch.cat([margin(model, batch) for batch in queries()]), outputs)


def test_outputs_without_models_are_completed(tmp_path):
    sets = subsets(40, 2)
    first = retrain(make_step, data(), sets, queries(), tmp_path, epochs=1)
    with pytest.raises(FileNotFoundError, match=r"found outputs only. Call retrain with keep_models=True"):
        next(evaluate.models(make_step, tmp_path))
    second = retrain(make_step, data(), sets, queries(), tmp_path, epochs=1, keep_models=True)
    assert torch.equal(first, second) and len(list(evaluate.models(make_step, tmp_path))) == 2
    with pytest.raises(FileNotFoundError, match=r"found none. Call retrain with keep_models=True"):
        next(evaluate.models(make_step, tmp_path / "other"))


def test_a_second_call_trains_only_what_is_missing(tmp_path):
    sets = subsets(40, 3)
    first = retrain(make_step, data(), sets, queries(), tmp_path, epochs=2)
    (tmp_path / "00-0001.safetensors").unlink()
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    torch.testing.assert_close(retrain(make_step, data(), sets, queries(), tmp_path, epochs=2), first)
    assert all(file.stat().st_mtime_ns == written for file, written in times.items())
    assert (tmp_path / "00-0001.safetensors").exists()


KILLED = """
import sys
sys.path[:0] = {path!r}
from test_evaluate import *

def slow(model, batch):
    time.sleep(0.2)  # the parent process sees the first files and kills
    return margin(model, batch)

if __name__ == "__main__":
    torch.set_num_threads(1)
    retrain(make_step_with_dropout, data(), subsets(40, 6), queries(), sys.argv[1], epochs=2, output_fn=slow)
"""


def slow(model, batch):
    return margin(model, batch)


def test_a_killed_call_is_continued(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(path=[str(folder) for folder in Path(__file__).parents[:2]]))
    folder = tmp_path / "models"
    process = forks.Popen([sys.executable, str(script), str(folder)])
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.safetensors"))) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    times = {file: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}
    assert 2 <= len(times) < 6
    options = {"epochs": 2, "output_fn": slow}
    found = retrain(make_step_with_dropout, data(), subsets(40, 6), queries(), folder, **options)
    wanted = retrain(make_step_with_dropout, data(), subsets(40, 6), queries(), tmp_path / "new", **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert all(file.stat().st_mtime_ns == written for file, written in times.items())


def test_worker_processes(tmp_path):
    sets = subsets(40, 4)
    one = retrain(make_step, data(), sets, queries(), tmp_path / "one", epochs=2)
    two = retrain(make_step, data(), sets, queries(), tmp_path / "two", epochs=2, processes=2)
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="processes=2 needs make_step, dataset, queries and output_fn that can be pic"):
        retrain(lambda: make_step(), data(), sets, queries(), tmp_path / "three", epochs=2, processes=2)


def test_a_folder_belongs_to_its_settings(tmp_path):
    sets = subsets(40, 2)
    retrain(make_step, data(), sets, queries(), tmp_path, epochs=1)
    for change in ({"epochs": 2}, {"epochs": 1, "batch_size": 5}, {"epochs": 1, "seed": 1}):
        with pytest.raises(StoreError, match="must hold models of the same settings; found other"):
            retrain(make_step, data(), sets, queries(), tmp_path, **change)
    with pytest.raises(StoreError, match="found other subsets"):
        retrain(make_step, data(), sets[:1], queries(), tmp_path, epochs=1)
    with pytest.raises(StoreError, match="found other step"):
        retrain(make_step_with_dropout, data(), sets, queries(), tmp_path, epochs=1)
    with pytest.raises(StoreError, match="found other queries"):
        retrain(make_step, data(), sets, queries()[:1], tmp_path, epochs=1)
    x, y = data().tensors
    with pytest.raises(StoreError, match="found other dataset"):
        retrain(make_step, TensorDataset(x, (y + 1) % 3), sets, queries(), tmp_path, epochs=1)
    with pytest.raises(StoreError, match="found other content of queries"):
        retrain(make_step, data(), sets, [(x + 1, y) for x, y in queries()], tmp_path, epochs=1)


class Augmented(Dataset):
    """Samples with noise that differs at each access."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        x, y = data()[i]
        return x + 0.01 * torch.randn(5, dtype=torch.float64), y


def test_augmented_data_can_be_continued(tmp_path):
    sets = subsets(40, 2)
    first = retrain(make_step_with_dropout, Augmented(), sets, queries(), tmp_path, epochs=1)
    assert torch.equal(retrain(make_step_with_dropout, Augmented(), sets, queries(), tmp_path, epochs=1), first)


def test_a_damaged_file_is_named(tmp_path):
    sets = subsets(40, 2)
    retrain(make_step, data(), sets, queries(), tmp_path, epochs=1)
    (tmp_path / "00-0001.safetensors").write_bytes(b"other content")
    with pytest.raises(StoreError, match=r"00-0001.safetensors must be a file of tensors; found .* Remove the file"):
        retrain(make_step, data(), sets, queries(), tmp_path, epochs=1)


def test_samples_that_are_not_tensors(tmp_path):
    def step():
        model = nn.Linear(1, 1).double()

        def loss_fn(model, words):
            lengths = torch.tensor([[len(word)] for word in words], dtype=torch.float64)
            return (model(lengths)[:, 0] - 1).square()

        return sw.Step(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss_fn)

    def output(model, words):
        return model(torch.tensor([[len(word)] for word in words], dtype=torch.float64))[:, 0]

    loader = DataLoader(Words(), batch_size=5)
    found = retrain(step, Words(), subsets(12, 2), loader, tmp_path, epochs=1, output_fn=output)
    assert found.shape == (2, 12)


def test_bad_arguments_of_retrain(tmp_path):
    sets = subsets(40, 2)
    with pytest.raises(ValueError, match="epochs must be an integer, 1 or more; found 0"):
        retrain(make_step, data(), sets, queries(), tmp_path, epochs=0)
    with pytest.raises(ValueError, match="indices below 40, the size of the dataset; found 44"):
        retrain(make_step, data(), [torch.tensor([44])], queries(), tmp_path, epochs=1)
    with pytest.raises(TypeError, match="dataset must be a map-style dataset, with a length and an index; found"):
        retrain(make_step, iter([]), sets, queries(), tmp_path, epochs=1)
    with pytest.raises(ValueError, match="at least one subset; found none"):
        retrain(make_step, data(), [], queries(), tmp_path, epochs=1)
    with pytest.raises(TypeError, match=r"make_step\(\) must return a sw.Step with a new model; found Sequential"):
        retrain(lambda: make_step().model, data(), sets, queries(), tmp_path, epochs=1)
    shared, generator = make_step(), torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="a new model in each call; found the same parameters in two calls"):
        retrain(lambda: shared, data(), sets, queries(), tmp_path, epochs=1)

    def unseeded():
        step = make_step()
        step.model[0].weight.data.normal_(generator=generator)
        return step

    with pytest.raises(ValueError, match="the same parameters for the same random state of torch; found different"):
        retrain(unseeded, data(), sets, queries(), tmp_path, epochs=1)
    with pytest.raises(ValueError, match="queries must be a loader or a list"):
        retrain(make_step, data(), sets, iter(queries()), tmp_path, epochs=1)
    with pytest.raises(ValueError, match="queries must yield at least one batch"):
        retrain(make_step, data(), sets, [], tmp_path, epochs=1)
    assert not list(tmp_path.iterdir())


# --- removal and baselines -------------------------------------------------------------------------------------------


def test_removal(tmp_path):
    """Without the samples of its class, a query is classified worse; without samples of other classes, hardly."""
    training, asked = data(60), [data(66)[60:66]]
    same_class = (asked[0][1][:, None] == training.tensors[1]).double()
    count = int(same_class.sum(1).min())
    options = {"epochs": 20, "batch_size": 16}
    baselines = {"other classes": 1 - same_class}
    found = removal(same_class, count, make_step, training, asked, tmp_path, baselines=baselines, **options)
    assert found.decrease["these scores"] > found.decrease["random"] + 1
    assert found.decrease["these scores"] > found.decrease["other classes"] + 1
    assert "removed by" in str(found) and found.per_query["random"].shape == (6,)
    assert repr(found).startswith(f"decrease of the output without {count} training samples, 6 queries")
    whole = retrain(make_step, training, [torch.arange(60)], asked, tmp_path / "w", **options)[0]
    kept = [row.argsort(descending=True, stable=True)[count:].sort().values for row in same_class]
    without = retrain(make_step, training, kept, asked, tmp_path / "x", **options)
    torch.testing.assert_close(found.per_query["these scores"], whole - without.diagonal())


def test_bad_arguments_of_removal(tmp_path):
    with pytest.raises(
        ValueError, match="k must be an integer from 1 to 39, fewer than the training samples; found 40"
    ):
        removal(torch.rand(6, 40), 40, make_step, data(), queries(), tmp_path, epochs=1)
    shape = r"must have shape \(queries, training samples\) = \(6, 40\)"
    for wrong in ((6, 30), (5, 40)):
        with pytest.raises(ValueError, match=rf"scores {shape}; found {re.escape(str(wrong))}\.$"):
            removal(torch.rand(wrong), 3, make_step, data(), queries(), tmp_path, epochs=1)
    with pytest.raises(ValueError, match=rf"scores {shape}; found \(40, 6\). Transpose them: scores.T"):
        removal(torch.rand(40, 6), 3, make_step, data(), queries(), tmp_path, epochs=1)
    named = {"loss": torch.rand(40, 6)}
    with pytest.raises(ValueError, match=rf"baselines\['loss'\] {shape}; found \(40, 6\). Transpose them"):
        removal(torch.rand(6, 40), 3, make_step, data(), queries(), tmp_path, baselines=named, epochs=1)
    assert not list(tmp_path.iterdir())  # nothing was trained


def test_baselines():
    model, training = make_step().model, data()
    x, y = training.tensors
    (qx, qy) = (torch.cat(parts) for parts in zip(*queries(), strict=True))
    found = evaluate.baselines(model, nn.CrossEntropyLoss(), DataLoader(training, 7), queries())
    same = qy[:, None] == y
    cosine = F.cosine_similarity(qx[:, None], x[None], dim=2)
    torch.testing.assert_close(found["neighbors, pixels"], cosine * same)
    features, theirs = model[:2](qx), model[:2](x)
    wanted = F.cosine_similarity(features[:, None], theirs[None], dim=2).detach() * same
    torch.testing.assert_close(found["neighbors, features"], wanted)
    losses = F.cross_entropy(model(x), y, reduction="none").detach()
    torch.testing.assert_close(found["loss"], losses.expand(6, -1))
    assert model.training and not model[2]._forward_pre_hooks


class TokenClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, input_ids):
        return self.out(self.embedding(input_ids)).mean(1)


def test_baselines_of_tokens():
    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")

    torch.manual_seed(0)
    model = TokenClassifier()
    batch = {"input_ids": torch.randint(9, (5, 6)), "labels": torch.arange(5) % 3}
    found = evaluate.baselines(model, loss_fn, [batch], [batch])
    assert list(found) == ["neighbors, features", "loss"]
    pooled = model.embedding(batch["input_ids"]).mean(1).detach()
    same = batch["labels"][:, None] == batch["labels"]
    wanted = F.cosine_similarity(pooled[:, None], pooled[None], dim=2) * same
    torch.testing.assert_close(found["neighbors, features"], wanted.double())
    with pytest.raises(ValueError, match=r"batches must be \(x, labels\), or dicts with labels; found Tensor"):
        evaluate.baselines(model, loss_fn, [batch["input_ids"]], [batch])


def test_baselines_of_regression():
    def loss_fn(model, batch):
        return (model(batch[0])[:, 0] - batch[1]).square()

    model, (x, _) = make_step().model, data().tensors
    found = evaluate.baselines(model, loss_fn, [(x, x[:, 0])], [(x[:4], x[:4, 0])])
    torch.testing.assert_close(found["neighbors, pixels"], F.cosine_similarity(x[:4, None], x[None], dim=2))


# --- output functions ------------------------------------------------------------------------------------------------


def test_margin():
    model, (x, y) = make_step().model, data().tensors
    p = model(x).softmax(1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(margin(model, (x, y)), (p / (1 - p)).log())
    with pytest.raises(sw.LossesError, match=r"margin needs logits \(B, classes\) and labels \(B,\)"):
        margin(model, (x, x))
    with pytest.raises(sw.LossesError, match=r"margin needs batches \(x, labels\), or dicts with labels; found Tensor"):
        margin(model, x)
