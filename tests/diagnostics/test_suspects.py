"""Scores compared with a plain loop; ranking; tables of visits."""

import copy
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from plain_loop import batches, loss_fn, make, rows
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import samplewise as sw
from samplewise.diagnostics.scores import SCORES, el2n, last_layer, margins
from samplewise.ledger.aggregate import ranks

ALL = tuple(SCORES)


def expected(model, x, y, rate=1.0):
    """Every score, computed with a plain loop."""
    full, last = rows(model, x, y), rows(model[2], model[:2](x).detach(), y)
    logits = model(x).detach()
    others = torch.stack([full[(y == y[i]) & (torch.arange(len(y)) != i)].sum(0) for i in range(len(y))])
    margin = [z[label] - max(v for c, v in enumerate(z) if c != label) for z, label in zip(logits, y, strict=True)]
    return {
        "loss": loss_fn(model, (x, y)).detach(),
        "margin": -torch.stack(margin),
        "el2n": (logits.softmax(1) - F.one_hot(y, 3)).norm(dim=1),
        "norm": full.norm(dim=1),
        "last_norm": last.norm(dim=1),
        "self_influence": rate * full.square().sum(1),
        "agreement": -F.cosine_similarity(full, others),
    }


def assert_scores(found, wanted):
    assert set(found.scores) == set(wanted)
    for name, values in wanted.items():
        torch.testing.assert_close(found.scores[name], values, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("microbatch", [None, 3])
def test_every_score_of_a_model(microbatch):
    model, x, y = make()
    found = sw.suspects(model, loss_fn, batches(x, y, 5), score="loss", also=ALL, microbatch=microbatch)
    assert_scores(found, expected(model, x, y))


def test_el2n_and_margin_by_hand():
    logits = torch.tensor([[math.log(2), math.log(1), math.log(1)], [0.0, 3.0, 1.0]])
    labels = torch.tensor([0, 2])
    assert el2n(logits[:1], labels[:1]).item() == pytest.approx(math.sqrt(0.5**2 + 0.25**2 + 0.25**2))
    assert margins(logits, labels).tolist() == pytest.approx([math.log(2), -2])


def test_over_checkpoints_the_margin_is_the_aum_and_self_influence_a_sum():
    model, x, y = make()
    before = copy.deepcopy(model.state_dict())
    models = [make(seed=seed)[0] for seed in (1, 2)]
    checkpoints = [(m.state_dict(), rate) for m, rate in zip(models, (0.1, 0.3), strict=True)]
    found = sw.suspects(model, loss_fn, batches(x, y, 5), also=ALL, checkpoints=checkpoints)
    first, second = (expected(m, x, y, rate) for m, (_, rate) in zip(models, checkpoints, strict=True))
    wanted = {name: (first[name] + second[name]) / (1 if name == "self_influence" else 2) for name in ALL}
    assert_scores(found, wanted)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_ranks_of_several_are_averaged():
    model, x, y = make()
    assert sw.suspects(model, loss_fn, [(x, y)]).score_names == ("margin",)
    found = sw.suspects(model, loss_fn, [(x, y)], score=["margin", "el2n"])
    assert found.score_names == ("margin", "el2n") == tuple(found.scores)
    places = zip(*(ranks(found.scores[name].tolist()) for name in found.score_names), strict=True)
    assert found.score.tolist() == pytest.approx([sum(both) / 2 for both in places])


def test_only_requested_scores_are_computed():
    """A regression has neither logits nor classes."""
    model = nn.Linear(3, 1)
    x = torch.randn(6, 3)
    found = sw.suspects(model, lambda m, b: (m(b["x"])[:, 0] - b["y"]) ** 2, [{"x": x, "y": x[:, 0]}], score="norm")
    assert list(found.scores) == ["norm"]


def test_runs_in_evaluation_mode_and_restores_the_mode():
    model, x, y = make()
    dropping = nn.Sequential(*model[:2], nn.Dropout(0.9), model[2])
    found = sw.suspects(dropping, loss_fn, [(x, y)], score=ALL)
    assert all(module.training for module in dropping)
    assert torch.equal(found.score, sw.suspects(model, loss_fn, [(x, y)], score=ALL).score)


def test_wrong_labels_come_first():
    torch.manual_seed(0)
    x = torch.cat([torch.randn(40, 2) + 3, torch.randn(40, 2) - 3])
    y = torch.arange(80) // 40
    wrong = [3, 17, 50]
    y[wrong] = 1 - y[wrong]
    model = nn.Linear(2, 2)
    step = sw.Step(model, sw.sgd(0.1), loss_fn)
    for _ in range(20):
        step((x, y))
    for score in (None, *ALL):
        assert sorted(sw.suspects(model, loss_fn, [(x, y)], score=score).top(3).tolist()) == wrong, score


def test_ids_labels_and_logits_as_keys_or_functions():
    model, x, y = make()
    whole = sw.suspects(model, loss_fn, [(x, y)], score="agreement", also=ALL)
    order = torch.randperm(12)
    batch = {"inputs": x[order], "label": y[order], "id": 100 + order}
    found = sw.suspects(
        model,
        lambda m, b: loss_fn(m, (b["inputs"], b["label"])),
        [batch],
        score="agreement",
        also=ALL,
        logits=lambda m, b: m(b["inputs"]),
        labels="label",
        ids=lambda b: b["id"],
    )
    assert found.top(12).tolist() == (100 + whole.top(12)).tolist()
    for name, scores in whole.scores.items():
        torch.testing.assert_close(found.scores[name], scores[order])


class Shuffled:
    """Loader that yields another order in each pass."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        order = torch.randperm(len(self.y))
        return iter(zip(self.x[order].split(5), self.y[order].split(5), order.split(5), strict=True))


def test_checkpoints_of_a_loader_that_shuffles_are_matched_by_id():
    model, x, y = make()
    checkpoints = [(make(seed=seed)[0].state_dict(), 0.1) for seed in (1, 2)]
    still = sw.suspects(model, loss_fn, batches(x, y, 5), score="loss", checkpoints=checkpoints)
    found = sw.suspects(model, loss_fn, Shuffled(x, y), score="loss", checkpoints=checkpoints, ids=2)
    torch.testing.assert_close(found.score[found.ids.argsort()], still.score)


def test_strings_as_ids():
    model, x, y = make()
    plain = sw.suspects(model, loss_fn, [(x, y)])
    named = [(x[:7], y[:7], [f"s{k}" for k in range(7)]), (x[7:], y[7:], tuple(f"s{k}" for k in range(7, 12)))]
    found = sw.suspects(model, loss_fn, named, ids=2)
    assert found.top(3) == [f"s{k}" for k in plain.top(3).tolist()]
    assert found.top(1)[0] in str(found)


def test_ids_and_labels_in_lists():
    model, x, y = make()
    found = sw.suspects(
        model, loss_fn, [(x, y, (10 + y).tolist(), list(range(5, 17)))], labels=lambda b: y.tolist(), ids=3
    )
    assert found.top(12).tolist() == (5 + sw.suspects(model, loss_fn, [(x, y)]).top(12)).tolist()


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (torch.rand(12), "float"),
        (torch.arange(5), "5 for 12"),
        (["a", 1] * 6, "int and str"),
        (torch.zeros(12, 1), "list"),
    ],
    ids=["floats", "few", "both", "matrix"],
)
def test_invalid_ids(ids, found):
    model, x, y = make()
    with pytest.raises(ValueError, match=rf"ids must be integers or strings, one per sample; found {found}"):
        sw.suspects(model, loss_fn, [(x, y, ids)], ids=2)


def test_ids_that_repeat_cannot_be_matched_in_another_order():
    model, x, y = make()
    checkpoints = [(make(seed=seed)[0].state_dict(), 0.1) for seed in (1, 2)]
    same = [(x, y, torch.zeros(12, dtype=torch.int64))]
    assert len(sw.suspects(model, loss_fn, same, score="loss", checkpoints=checkpoints, ids=2)) == 12  # by position

    with pytest.raises(ValueError, match="a unique id if the order changes between passes; found 6 ids of 12 samples"):
        sw.suspects(model, loss_fn, Shuffled(x, y), score="loss", checkpoints=checkpoints, ids=lambda b: b[2] // 2)


def test_agreement_of_a_class_of_one_and_of_a_zero_gradient_is_0():
    model, x, _ = make()
    found = sw.suspects(model, loss_fn, [(x[:3], torch.tensor([0, 0, 1]))], score="agreement")
    assert found.score[2] == 0

    def none_for_the_first(m, batch):
        return loss_fn(m, batch) * torch.tensor([0.0, 1.0, 1.0])

    found = sw.suspects(model, none_for_the_first, [(x[:3], torch.zeros(3, dtype=torch.int64))], score="agreement")
    assert found.score[0] == 0
    assert found.score[1].item() == pytest.approx(found.score[2].item()) != 0


def test_agreement_of_a_class_of_one_ignores_rounding():
    model, x, _ = make(n=30)
    batches_of_one = [(x[i : i + 3].float(), torch.tensor([0, 0, 1])) for i in range(27)]
    for batch in batches_of_one:
        assert sw.suspects(model.float(), loss_fn, [batch], score="agreement").score[2] == 0


def test_the_last_layer_is_the_module_of_the_last_parameter():
    assert last_layer(["a.weight", "head.weight", "head.bias"]) == ["head.weight", "head.bias"]
    assert last_layer(["weight", "bias"]) == ["weight", "bias"]


def test_equal_values_share_a_rank():
    assert ranks([5.0, 1.0, 5.0, 0.0, 9.0]) == [0.625, 0.25, 0.625, 0, 1]
    assert ranks([3.0]) == [0]
    assert ranks([2.0, math.nan, 1.0]) == [1, 0.5, 0]


def test_printed_table():
    model, x, y = make()
    lines = str(sw.suspects(model, loss_fn, [(x, y)])).splitlines()
    assert lines[0] == "most suspicious of 12 samples, by margin"
    assert lines[1].split() == ["sample", "margin"]
    assert len(lines) == 13


@pytest.mark.parametrize("more", [{"also": ["norm"]}, {"loss_fn": loss_fn}, {"ids": 0}, {"checkpoints": []}])
def test_a_table_with_arguments_of_a_model(more):
    with pytest.raises(TypeError, match="takes no other argument than score=; found arguments for a model, but dict"):
        sw.suspects(VISITS, **more)


def test_representation():
    found = sw.suspects({"id": range(7), "loss": [3.0, 1.0, 2.0, 7.0, 5.0, 4.0, 6.0]})
    assert repr(found) == str(found)
    assert "tensor" not in repr(found)
    found = sw.suspects({"id": ["a", "b"], "loss": [1.0, 2.0], "norm": [1.0, 2.0]}, score=["loss", "norm"])
    assert repr(found).splitlines()[0] == "most suspicious of 2 samples, by loss and norm"


def test_a_notebook_shows_an_html_table():
    found = sw.suspects({"id": ["a&b", "<script>"], "loss": [1.0, 2.0]})
    assert found._repr_html_() == (
        "<p>most suspicious of 2 samples, by loss</p><table><thead><tr><th>sample</th><th>loss</th></tr></thead><tbody>"
        "<tr><td>&lt;script&gt;</td><td>2</td></tr><tr><td>a&amp;b</td><td>1</td></tr></tbody></table>"
    )


def test_data_frame(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    found = sw.suspects({"id": ["a", "b", "c"], "loss": [1.0, 2.0, 4.0], "norm": [6.0, 5.0, 7.0]}, score="norm")
    expected = {"id": ["c", "a", "b"], "score": [7.0, 6.0, 5.0], "loss": [4.0, 1.0, 2.0], "norm": [7.0, 6.0, 5.0]}
    frame = found.to_pandas()
    assert {name: frame[name] for name in expected} == expected
    assert list(frame)[:2] == ["id", "score"]
    assert sw.suspects({"id": [5, 8], "loss": [1.0, 2.0]}).to_pandas()["id"] == [8, 5]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas: pip install pandas"):
        found.to_pandas()


# ------------------------------------------------------------------------------------------------------------ visits

VISITS = {
    "id": [7, 3, 7, 3, 9],
    "epoch": [0, 0, 1, 1, 0],
    "loss": [1.0, 0.5, 3.0, 0.5, 1.0],
    "norm": [1.0, 2.0, 3.0, 2.0, 1.0],
    "margin": [-1.0, 2.0, -3.0, 4.0, 5.0],
}


def test_visits_are_averaged_by_sample():
    found = sw.suspects(VISITS)
    assert found.ids.tolist() == [7, 3, 9]
    assert {name: scores.tolist() for name, scores in found.scores.items()} == {
        "loss": [2, 0.5, 1],
        "norm": [2, 2, 1],
        "margin": [2, -3, -5],
        "self_influence": [5, 4, 1],
    }
    assert found.score_names == ("margin",)
    assert found.top(2).tolist() == [7, 3]


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ("loss norm", ("loss",)),
        ("norm margin", ("margin",)),
        ("loss", ("loss",)),
        ("norm", ("norm",)),
        ("margin loss", ("margin",)),
    ],
)
def test_default_score_of_a_table(columns, names):
    assert sw.suspects({name: VISITS[name] for name in ("id", *columns.split())}).score_names == names


def test_a_self_influence_column_replaces_the_squared_norm():
    found = sw.suspects({"id": [1, 2], "norm": [1.0, 2.0], "self_influence": [2.0, 1.0]})
    assert found.scores["self_influence"].tolist() == [2.0, 1.0]


def test_losses_and_norms_of_a_table_are_divided_by_counts():
    table = {"id": [0, 1, 1, 2], "loss": [9.0, 4.0, 6.0, 0.0], "norm": [3.0, 2.0, 4.0, 0.0]}
    found = sw.suspects({**table, "count": [9.0, 2.0, 2.0, 0.0]})
    assert found.ids.tolist() == [0, 1] and found.unknown == [2]  # nothing is known of a sample without elements
    assert {name: scores.tolist() for name, scores in found.scores.items()} == {
        "loss": [1.0, 2.5],
        "norm": [1 / 3, 1.5],
        "self_influence": [1 / 9, 2.5],
    }
    with pytest.raises(ValueError, match="the column 'count' must hold numbers; found string"):
        sw.suspects({**table, "count": list("abcd")})


def test_losses_of_a_model_are_divided_by_counts():
    model, x, y = make()
    counts = torch.arange(len(y)) % 4
    by_count = sw.suspects(model, lambda m, b: (loss_fn(m, b), counts), [(x, y)], score="loss", also=["norm"])
    plain = sw.suspects(model, loss_fn, [(x, y)], score="loss", also=["norm"])
    for name in ("loss", "norm"):
        assert torch.allclose(by_count.scores[name], plain.scores[name] / counts.clamp(min=1))


def test_samples_without_a_finite_score_are_listed():
    found = sw.suspects({"id": ["a", "b", "b", "c"], "loss": [math.nan, math.inf, 2.0, -math.inf]})
    assert (found.ids, found.unknown) == (["b"], ["a", "c"])
    assert "most suspicious of 1 sample, by loss; 2 more have no finite score" in str(found)
    assert sw.suspects(VISITS).unknown == []


def test_visits_that_are_not_finite_are_left_out():
    found = sw.suspects({"id": ["a", "b", "a", "c"], "loss": [1.0, 2.0, math.inf, math.nan], "norm": [math.nan] * 4})
    assert (found.ids, found.score.tolist(), found.score_names) == (["a", "b"], [1, 2], ("loss",))
    assert found.top(1) == ["b"]
    assert str(found).splitlines()[3].split() == ["b", "2"]


def test_a_missing_score_gets_the_middle_rank():
    table = {"id": [0, 1, 2], "loss": [1.0, 2.0, 3.0], "norm": [math.nan, 1.0, 2.0]}
    found = sw.suspects(table, score=["loss", "norm"])
    assert found.score.tolist() == [0.25, 0.25, 1]
    table = {"id": [0, 1], "loss": [1.0, 2.0], "norm": [math.nan, 1.0]}
    assert sw.suspects(table, score="norm").top(2).tolist() == [1, 0]


def test_suspects_of_a_ledger(tmp_path):
    model, x, y = make()
    ledger = sw.Ledger(tmp_path)
    batches = [{"x": x, "y": y, "id": torch.arange(len(y))}, {"x": x * math.nan, "y": y, "id": torch.arange(len(y))}]
    step = sw.Step(model, sw.sgd(0.1), lambda m, b: loss_fn(m, (b["x"], b["y"])), on_nonfinite="skip", recheck=False)
    ledger.listen(step)
    losses = [(update.losses, ledger.add(update))[0] for update in step.over(batches)]
    ledger.flush()
    found = sw.suspects(sw.read_ledger(tmp_path), score="loss")
    assert torch.equal(sw.suspects(tmp_path, score="loss").score, found.score)
    assert found.ids.tolist() == list(range(len(y)))
    torch.testing.assert_close(found.score, losses[0].float().double())  # the second visits are NaN


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"loss": [1.0]},
            "and one of loss, norm, margin, el2n, self_influence; found loss. sw.Ledger() records such",
        ),
        ({"id": [1]}, "must have the column id and one of loss, norm, margin, el2n, self_influence; found id"),
        ({"id": [1, 2], "loss": [1.0]}, "equal lengths, one row per visit; found lengths {'id': 2, 'loss': 1}"),
        ({"id": [], "loss": []}, "at least one row, one per visit; found none"),
        ({"id": [1], "loss": [math.nan]}, "must have a finite score of at least one sample; found none"),
        ({"id": [1, None], "loss": [1.0, 2.0]}, "every visit must have an id; found 1 of 2 visits without an id"),
        ({"id": [1], "loss": ["high"]}, "the column 'loss' must hold numbers; found string"),
    ],
)
def test_invalid_tables(table, message):
    with pytest.raises(ValueError) as error:
        sw.suspects(table)
    assert message in str(error.value)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_loader_that_shuffles_needs_ids(by_batch):
    model, x, y = make()
    data = TensorDataset(x, y)
    sampler = BatchSampler(RandomSampler(data), 5, drop_last=False)
    loader = DataLoader(data, batch_sampler=sampler) if by_batch else DataLoader(data, batch_size=5, shuffle=True)
    with pytest.raises(ValueError, match=r"must keep the order of its dataset; found one that shuffles. Pass ids="):
        sw.suspects(model, loss_fn, loader)


def test_checkpoints_must_be_copies():
    model, x, y = make()
    with pytest.raises(ValueError, match="must be copies of the parameters; found the model's own tensors in check"):
        sw.suspects(model, loss_fn, [(x, y)], checkpoints=[(model.state_dict(), 0.1)])
    with pytest.raises(ValueError, match="must hold at least one"):
        sw.suspects(model, loss_fn, [(x, y)], checkpoints=[])


def test_bad_arguments():
    model, x, y = make()
    with pytest.raises(ValueError, match=r"a score must be one of loss, margin, .*; found 'aum'"):
        sw.suspects(model, loss_fn, [(x, y)], score="aum")
    with pytest.raises(
        ValueError, match=r"one of loss, .*; found 'agreement'\. A table has .* return losses, {'margin'"
    ):
        sw.suspects(VISITS, score="agreement")
    with pytest.raises(ValueError, match=r"found 'self-influence'\. Did you mean 'self_influence'\?"):
        sw.suspects(VISITS, score="self-influence")
    with pytest.raises(TypeError, match="a model, a loss function and a loader, or a table of visits; found a model"):
        sw.suspects(model)
    with pytest.raises(ValueError, match="iterated more than once; found an iterator"):
        sw.suspects(model, loss_fn, iter([(x, y)]), score="agreement")
    with pytest.raises(ValueError, match=r"logits must have shape \(12, classes\).*found \(12,\)"):
        sw.suspects(model, loss_fn, [(x, y)], logits=lambda m, b: m(b[0])[:, 0])
    with pytest.raises(ValueError, match=r"labels must be integers, .*\(12,\); found torch.float64 of shape \(12,"):
        sw.suspects(model, loss_fn, [(x, y)], labels=0)
    with pytest.raises(ValueError, match="the loader must yield at least one batch; found none"):
        sw.suspects(model, loss_fn, [])
    with pytest.raises(
        ValueError, match=r"labels must be class indices, 0 to 2 for 3 logits; found -100\. Remove such samples, or"
    ):
        sw.suspects(model, lambda m, b: loss_fn(m, (b[0], y)), [(x, torch.where(y == 0, -100, y))])
    with pytest.raises(TypeError, match=r"or a table of visits: .* found dict: "):
        sw.suspects({"id": [2**64], "loss": [1.0]})


class Output:
    """Output of a model of transformers."""

    def __init__(self, logits):
        self.logits = logits


@pytest.mark.parametrize("output", [lambda logits: logits, Output, lambda logits: {"logits": logits}])
def test_batches_that_are_dicts(output):
    """The logits are the output of the model in the loss function; the labels have a name."""
    model, x, y = make()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, inputs):
            return output(self.net(inputs))

    def loss_of_dict(m, b):
        outputs = m(b["x"])
        logits = outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", outputs)
        return F.cross_entropy(logits, b["labels"], reduction="none")

    loader = [{"x": x[part], "labels": y[part]} for part in (slice(0, 5), slice(5, 12))]
    found = sw.suspects(Model(), loss_of_dict, loader, score="margin", also=ALL)
    assert_scores(found, expected(model, x, y))


def test_batches_without_labels_or_logits():
    model, x, y = make()
    with pytest.raises(sw.BatchError, match=r"needs the target of .*; found a dict with the keys 'x', 'c'\. Pass"):
        sw.suspects(model, lambda m, b: loss_fn(m, (b["x"], b["c"])), [{"x": x, "c": y}])
    with pytest.raises(sw.LossesError, match=r"must call model.*, since its outputs are the logits; .* pass logits="):
        sw.suspects(model, lambda m, b: loss_fn(m[:], (b["x"], b["y"])), [{"x": x, "y": y}])


def test_a_loader_whose_samples_change_between_passes():
    model, x, y = make()
    rounds = iter([0, 12])

    class Other:
        def __iter__(self):
            return iter([(x, y, torch.arange(12) + next(rounds))])

    checkpoints = [(make(seed=seed)[0].state_dict(), 0.1) for seed in (1, 2)]
    with pytest.raises(ValueError, match="every pass over the loader must yield the same samples; found other ids"):
        sw.suspects(model, loss_fn, Other(), score="loss", checkpoints=checkpoints, ids=2)


def test_checkpoints_of_a_run(tmp_path):
    model, x, y = make()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    save = sw.callbacks.ModelCheckpoint(every="1up")
    sw.Trainer(step, tmp_path / "run", [save], progress=False).fit(loader, updates=2)
    paths = sorted((tmp_path / "run/checkpoints").iterdir())
    assert len(paths) == 2
    pairs = [(sw.load_checkpoint(path)["model"], 0.1) for path in paths]
    wanted = sw.suspects(model, loss_fn, loader, also=ALL, checkpoints=pairs)
    for run in (tmp_path / "run", str(tmp_path / "run"), paths):
        found = sw.suspects(model, loss_fn, loader, also=ALL, checkpoints=run)
        assert_scores(found, wanted.scores)
