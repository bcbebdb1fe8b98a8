"""Rows of the ledger, compared with a plain loop."""

import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

N = 22
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3


def losses_of(model, batch):
    x, y, _ = batch
    return F.cross_entropy(model(x), y, reduction="none")


def with_margin(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], reduction="none"), {"margin": logits.amax(1)}


def model_():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def step_(loss=losses_of, **options):
    return sw.Step(model_(), sw.sgd(0.3), loss, **{"recheck": False, **options})


def loader(batch_size=8, **options):
    return DataLoader(sw.Indexed(TensorDataset(X, Y)), batch_size=batch_size, **options)


def recorded(path, step, batches, epochs=2, **options):
    ledger = sw.Ledger(path, **options)
    ledger.listen(step)
    for _ in range(epochs):
        for update in step.over(batches):
            ledger.add(update)
    return ledger.read().to_pydict()


class Named(torch.utils.data.Dataset):
    """(x, y, file name), or (x, y, name of the class)."""

    def __init__(self, name=lambda i: f"images/{i}.png"):
        self.name = name

    def __len__(self):
        return N

    def __getitem__(self, i):
        return X[i], Y[i], self.name(i)


@pytest.mark.parametrize("loss", [losses_of, nn.CrossEntropyLoss()])
def test_names_in_a_batch_are_the_ids(tmp_path, loss):
    found = recorded(tmp_path / "names", step_(loss), DataLoader(Named(), batch_size=8), epochs=1)
    expected = recorded(tmp_path / "numbers", step_(loss), loader(), epochs=1)
    assert found["id"] == [f"images/{i}.png" for i in expected["id"]]
    assert found["loss"] == expected["loss"]
    assert found["norm"] == expected["norm"]


def test_other_ids_come_before_names(tmp_path):
    def losses(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    found = recorded(tmp_path, step_(losses), DataLoader(sw.Indexed(Named()), batch_size=8), epochs=1)
    assert found["id"] == list(range(N))


def test_names_that_are_no_ids(tmp_path):
    data = DataLoader(Named(lambda i: f"class {Y[i]}"), batch_size=8)
    with pytest.raises(
        sw.BatchError, match=r"must differ to be used as ids; found 'class 0' for several samples\. Wrap"
    ):
        recorded(tmp_path, step_(nn.CrossEntropyLoss()), data)
    two = [(X, Y, [f"{i}.png" for i in range(N)], [f"{i}.txt" for i in range(N)])]
    with pytest.raises(sw.BatchError, match=r"the batch must hold 'id'; found a tuple of 4 entries\. Wrap"):
        recorded(tmp_path, step_(nn.CrossEntropyLoss()), two)


def by_hand(samples, coefficient=lambda norm: 1.0, epochs=2):
    """Expected rows: one sample at a time, with plain autograd."""
    model, rows, update = model_(), [], 0
    for epoch in range(epochs):
        for start in range(0, N, samples):
            window, total = range(start, min(start + samples, N)), [torch.zeros_like(p) for p in model.parameters()]
            for i in window:
                loss = F.cross_entropy(model(X[i : i + 1]), Y[i : i + 1])
                gradient = torch.autograd.grad(loss, list(model.parameters()))
                norm = float(torch.cat([g.flatten() for g in gradient]).norm())
                weight = coefficient(norm)
                total = [t + weight * g for t, g in zip(total, gradient, strict=True)]
                rows.append((i, epoch, update, loss.item(), norm, weight))
            with torch.no_grad():
                for p, g in zip(model.parameters(), total, strict=True):
                    p -= 0.3 * g / len(window)
            update += 1
    return dict(
        zip(("id", "epoch", "update", "loss", "norm", "weight"), map(list, zip(*rows, strict=True)), strict=True)
    )


def assert_same(found, expected):
    for name, values in expected.items():
        exact = isinstance(values[0], (int, str))
        assert found[name] == (values if exact else pytest.approx(values, rel=2e-4, abs=1e-6, nan_ok=True)), name


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("microbatch", [None, 3, "auto"])
@pytest.mark.parametrize("batch_size", [4, 8, N])
@pytest.mark.parametrize("samples", [1, 5, 10])
def test_windows_across_batches(tmp_path, samples, batch_size, microbatch):
    found = recorded(tmp_path, step_(samples=samples, microbatch=microbatch), loader(batch_size))
    assert_same(found, by_hand(samples))


def test_weights_of_transforms(tmp_path):
    found = recorded(tmp_path, step_(samples=5, transforms=[sw.clip(0.5)]), loader())
    assert_same(found, by_hand(5, lambda norm: min(1.0, 0.5 / norm)))


def test_a_transform_that_sees_the_window(tmp_path):
    def large(losses):
        return (losses > losses.median()).float()

    step = step_(samples=5, transforms=[sw.weight(large, window=True)])
    found = recorded(tmp_path, step, loader(), epochs=1)
    assert found["id"] == list(range(N))
    losses, weights = torch.tensor(found["loss"]), torch.tensor(found["weight"])
    for start in range(0, N, 5):
        assert torch.equal(weights[start : start + 5], large(losses[start : start + 5]))


def test_grouped_samples_are_recorded_in_the_order_of_the_batch(tmp_path):
    step = step_(with_margin, samples=10, transforms=[sw.group(1), sw.clip(1.0)])
    found = recorded(tmp_path, step, loader(4), epochs=1)
    plain = recorded(tmp_path / "plain", step_(with_margin, samples=10), loader(4), epochs=1)
    first = {name: values[:10] for name, values in plain.items() if name != "weight"}
    assert_same({name: values[:10] for name, values in found.items()}, first)


def test_weights_of_some_updates_only(tmp_path):
    """One block of rows has updates with and without weights."""
    step, weights = step_(samples=5), []
    ledger = sw.Ledger(tmp_path)
    ledger.listen(step)
    for number, update in enumerate(step.over(loader())):
        ledger.add(update)
        weights += update.weights.tolist()
        step.transforms = [sw.clip(0.9)] if number == 1 else []
    assert ledger.read().to_pydict()["weight"] == weights
    assert len(set(weights)) > 2 and weights.count(1.0) >= 12


def test_a_weight_for_each_parameter_has_its_own_column(tmp_path):
    step = step_(samples=5, transforms=[sw.clip(0.1, by="parameter")])
    ledger, weights = sw.Ledger(tmp_path), []
    ledger.listen(step)
    for update in step.over(loader()):
        ledger.add(update)
        weights.append(update.weights["0.bias"])
    found = ledger.read().to_pydict()
    assert found["weight/0.bias"] == torch.cat(weights).tolist()
    assert len([name for name in found if name.startswith("weight/")]) == 4
    assert all(value != value for value in found["weight"])


def test_columns_of_the_loss_and_of_the_batch(tmp_path):
    found = recorded(tmp_path, step_(with_margin, samples=5, microbatch=2), loader(), epochs=1, columns={"label": 1})
    assert found["label"] == Y.tolist()
    with torch.no_grad():
        assert found["margin"][:5] == pytest.approx(model_()(X[:5]).amax(1).tolist(), abs=1e-6)


def test_columns_of_the_loss_beside_counts(tmp_path):
    def loss(model, batch):
        losses, columns = with_margin(model, batch)
        return losses, torch.full_like(losses, 2.0), columns

    found = recorded(tmp_path, step_(loss, samples=5), loader(), epochs=1)
    assert list(found)[5:] == ["weight", "count", "margin"] and found["count"] == [2.0] * N
    with torch.no_grad():
        assert found["margin"][:5] == pytest.approx(model_()(X[:5]).amax(1).tolist(), abs=1e-6)


def with_counts(counts):
    """Loss function with the counts of the samples by id."""

    def loss(model, batch):
        return losses_of(model, batch), counts[batch[2]]

    return loss


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_counts_are_recorded_if_one_of_them_is_not_1(tmp_path, compile):
    counts = torch.arange(1, N + 1)
    found = recorded(tmp_path / "varying", step_(with_counts(counts), samples=5, compile=compile), loader())
    assert found["count"] == counts.tolist() * 2
    ones = recorded(tmp_path / "ones", step_(with_counts(torch.ones(N)), samples=5), loader())
    assert "count" not in ones
    assert step_()(next(iter(loader())))[0].counts.tolist() == [1.0] * 8


def test_counts_of_a_part_in_which_all_are_1_are_read_as_1(tmp_path):
    counts = torch.where(torch.arange(N) < 20, 1.0, 3.0)
    found = recorded(tmp_path, step_(with_counts(counts), samples=5), loader(), epochs=1, rows_per_file=5)
    assert found["count"] == counts.tolist()
    assert "count" not in pq.read_table(tmp_path / "samples" / "part-000000.parquet").column_names


# --- columns of a criterion -------------------------------------------------------------------------------------------


def predicted_by_hand(samples, labels=Y, epochs=2):
    """Expected labels, predictions and margins: one forward pass per sample, with plain SGD on CrossEntropyLoss."""
    model, rows = model_().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for start in [s for _ in range(epochs) for s in range(0, N, samples)]:
        x, y = X[start : start + samples].double(), labels[start : start + samples]
        for logits, label in zip(model(x).tolist(), y.tolist(), strict=True):
            others = [value for k, value in enumerate(logits) if k != label]
            total = sum(map(np.exp, logits))
            shares = [np.exp(value) / total for value in logits]
            error = np.linalg.norm([share - (k == label) for k, share in enumerate(shares)])
            scores = (logits[label] - max(others), shares[label], error) if label >= 0 else 3 * (np.nan,)
            rows.append((label, logits.index(max(logits)), *scores))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return dict(zip(PREDICTIONS, map(list, zip(*rows, strict=True)), strict=True))


PREDICTIONS = ["label", "prediction", "margin", "confidence", "el2n"]
PROBABILITIES = {f"probability/{k}" for k in range(3)}


def assert_predicted(found, expected, tolerance=1e-9):
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, tolerance, tolerance, err_msg=name)


def criterion_step(criterion=None, **options):
    model = model_().double()
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    return sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.3), criterion, **options)


def double_loader(batch_size=8, labels=Y):
    return DataLoader(sw.Indexed(TensorDataset(X.double(), labels)), batch_size=batch_size)


@pytest.mark.parametrize(("samples", "microbatch"), [(5, 2), (5, None), (30, 4)])
def test_a_criterion_gives_predictions(tmp_path, samples, microbatch):
    found = recorded(tmp_path, criterion_step(samples=samples, microbatch=microbatch), double_loader())
    assert list(found) == ["id", "epoch", "update", "loss", "norm", "weight", *PREDICTIONS]
    assert_predicted(found, predicted_by_hand(samples))
    assert all(type(value) is int for value in found["prediction"])


def test_a_criterion_makes_no_second_forward_pass(tmp_path):
    step, calls = criterion_step(samples=11, recheck=False), []
    step.model.register_forward_hook(lambda *_: calls.append(1))
    recorded(tmp_path, step, double_loader(11), epochs=1)
    assert len(calls) == 2


def test_an_ignored_label_has_no_margin(tmp_path):
    labels = torch.where(torch.arange(N) % 5 == 0, -100, Y)
    found = recorded(tmp_path, criterion_step(samples=11), double_loader(11, labels))
    assert_predicted(found, predicted_by_hand(11, labels))
    for name in ("margin", "confidence", "el2n"):
        assert np.isnan(found[name][:N]).tolist() == (labels == -100).tolist()


def test_probabilities_of_all_classes(tmp_path):
    found = recorded(tmp_path, criterion_step(samples=11), double_loader(11), epochs=1, probabilities=True)
    shares = np.array([found[f"probability/{k}"] for k in range(3)]).T
    logits = criterion_step().model(X[:11].double()).detach()
    assert list(found)[-3:] == ["probability/0", "probability/1", "probability/2"]
    np.testing.assert_allclose(shares[:11], logits.softmax(1).numpy(), rtol=1e-12)
    np.testing.assert_allclose(shares[np.arange(N), found["label"]], found["confidence"], rtol=1e-12)


def test_own_columns_take_the_place_of_those_of_the_criterion(tmp_path):
    found = recorded(tmp_path, criterion_step(), double_loader(), epochs=1, columns={"prediction": "id", "label": 1})
    assert found["prediction"] == found["id"]
    assert_predicted(found, {"label": Y.tolist(), "margin": predicted_by_hand(8, epochs=1)["margin"]})


@pytest.mark.parametrize(
    ("criterion", "shape", "target"),
    [
        (nn.CrossEntropyLoss(), (6,), torch.rand(N, 6)),
        (nn.CrossEntropyLoss(), (3, 2), Y[:, None].expand(N, 2)),
        (nn.MSELoss(), (6,), torch.rand(N, 6)),
    ],
    ids=["probabilities", "several labels", "regression"],
)
def test_no_predictions_without_one_class_index_per_sample(tmp_path, criterion, shape, target):
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, shape))
    step = sw.Step(model, sw.sgd(0.1), criterion, recheck=False)
    data = DataLoader(sw.Indexed(TensorDataset(X, target)), batch_size=11)
    assert not {"label", "prediction", "margin"} & set(recorded(tmp_path, step, data, epochs=1))


def test_updates_have_no_predictions_unless_they_are_required():
    (update,) = criterion_step()(next(iter(double_loader())))
    assert update.columns == {}
    names = "label, prediction, margin, confidence, el2n, probability"
    with pytest.raises(ValueError, match=rf"names among {names}; found \['logits'\]"):
        criterion_step().require(predictions=["logits"])


def test_predictions_begin_with_the_next_window():
    step = criterion_step(samples=12)
    batches = iter(double_loader(4))
    assert step(next(batches)) == []
    step.require(predictions=["margin"])
    assert step(next(batches)) == []
    (update,) = step(next(batches))
    assert update.columns == {}
    step.accumulate(next(batches))
    assert list(step.apply().columns) == ["margin"]


@pytest.mark.parametrize(("required", "columns"), [("margin", {"margin"}), ("probability", PROBABILITIES)])
def test_a_window_that_is_resumed_keeps_its_columns(required, columns):
    step = criterion_step(samples=12)
    step.require(predictions=[required])
    first, second = list(double_loader(6))[:2]
    step(first)
    resumed = criterion_step(samples=12)
    resumed.model.load_state_dict(step.model.state_dict())
    resumed.load_state_dict(step.state_dict())
    expected, found = step(second)[0].columns, resumed(second)[0].columns
    assert found.keys() == expected.keys() == columns
    assert all(torch.equal(found[name], expected[name]) for name in columns)


@pytest.mark.parametrize(
    ("samples", "backend"), [pytest.param(1, "inductor", marks=pytest.mark.slow), (4, "interpreted")]
)
def test_compiled_updates_of_a_criterion_have_predictions(tmp_path, samples, backend, request):
    if backend == "interpreted":
        request.getfixturevalue("interpreted")
    step = criterion_step(samples=samples, compile=True, recheck=False)
    found = recorded(tmp_path, step, double_loader(N - 2), epochs=2)
    assert step.compiled == "compiled"
    assert_predicted(found, predicted_by_hand(samples), 1e-7)


def test_compiled_updates_record_the_columns_of_the_loss(tmp_path):
    step = step_(with_margin, samples=1, compile=True)
    with pytest.warns(sw.TrainingWarning, match="returns columns in addition to losses cannot be compiled"):
        found = recorded(tmp_path, step, loader())
    assert len(found["margin"]) == 2 * N and not any(value != value for value in found["margin"])


@pytest.mark.slow
def test_compiled_updates(tmp_path):
    step = step_(samples=1, compile=True)
    found = recorded(tmp_path, step, loader())
    assert step.compiled == "compiled"
    assert_same(found, by_hand(1))


def test_strings_as_ids(tmp_path):
    texts = [{"x": X[i], "y": Y[i], "name": f"image-{i}.png"} for i in range(N)]

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    found = recorded(tmp_path, step_(loss, samples=5), DataLoader(texts, batch_size=8), id="name")
    assert found["id"] == [f"image-{i}.png" for i in range(N)] * 2


def test_carried_over_samples_keep_their_epoch(tmp_path):
    found = recorded(tmp_path, step_(samples=10, tail="carry"), loader())
    assert found["id"] == [*range(N), *range(18)]
    assert found["epoch"] == [0] * N + [1] * 18
    assert found["update"] == [k // 10 for k in range(40)]


@pytest.mark.parametrize("samples", [5, None])
def test_skipped_updates_have_no_weight(tmp_path, samples):
    def loss(model, batch):
        return losses_of(model, batch) * torch.where(batch[2] == 9, torch.nan, 1.0)

    found = recorded(tmp_path, step_(loss, samples=samples, microbatch=2, on_nonfinite="skip"), loader(5), epochs=1)
    assert found["id"] == list(range(N))
    assert found["weight"] == [float(not 5 <= i < 10) for i in range(N)]
    assert found["update"] == [i // 5 - (i >= 10) for i in range(N)]
    for name in ("loss", "norm"):  # sample 9 is alone in its microbatch
        assert [i for i in range(N) if found[name][i] != found[name][i]] == [9]


def test_the_epoch_can_be_passed(tmp_path):
    step, ledger = step_(), sw.Ledger(tmp_path)
    ledger.listen(step)
    for epoch, batch in enumerate(loader(11)):
        for update in step(batch):
            ledger.add(update, epoch=epoch)
    assert ledger.read()["epoch"].to_pylist() == [0] * 11 + [1] * 11


def test_norms_false_does_not_compute_norms(tmp_path):
    step = step_(samples=5)
    found = recorded(tmp_path, step, loader(), norms=False)
    assert all(value != value for value in found["norm"]) and not step._windows.record_norms


def with_column(*kinds):
    """Loss function whose column c comes from each function in turn; None: no column in that call."""
    turns = iter(kinds)

    def loss_fn(model, batch):
        losses, make = losses_of(model, batch), next(turns)
        return (losses, {"c": make(len(losses))}) if make else losses

    return loss_fn


LARGE = 2**24 + 1  # not representable in float32
KINDS = {
    "whole": lambda n: torch.full((n,), LARGE),
    "float": lambda n: torch.full((n,), 0.5),
    "double": lambda n: torch.full((n,), 1e300, dtype=torch.float64),
    "bool": lambda n: torch.ones(n, dtype=torch.bool),
    "none": None,
}
VALUES = {"whole": LARGE, "float": 0.5, "double": 1e300, "bool": 1, "none": None}


@pytest.mark.parametrize("every", [8, 10, 1000], ids=lambda n: f"{n} rows a part")
@pytest.mark.parametrize(
    "kinds",
    [
        ("whole", "whole", "float"),
        ("float", "whole", "bool"),
        ("bool", "float", "double"),
        ("whole", "none", "whole"),
        ("none", "none", "whole"),
        ("double", "double", "double"),
    ],
    ids=" ".join,
)
def test_a_column_may_change_its_type(tmp_path, kinds, every):
    step = step_(with_column(*(KINDS[kind] for kind in kinds)))
    found = recorded(tmp_path, step, loader(), epochs=1, rows_per_file=every)["c"]
    expected = [VALUES[kind] for kind, n in zip(kinds, (8, 8, 6), strict=True) for _ in range(n)]
    assert [None if v != v else v for v in found] == expected


def test_an_integer_that_float64_cannot_represent(tmp_path):
    step = step_(with_column(KINDS["bool"], lambda n: torch.full((n,), 2**53 + 1), None))
    with pytest.raises(sw.LedgerError, match=r"the column 'c' must hold integers .* as large as 2\*\*53; found floats"):
        recorded(tmp_path, step, loader(), epochs=1)


def with_ids(ids):
    return [{"x": X[k : k + len(part)], "y": Y[k : k + len(part)], "id": part} for k, part in enumerate(ids)]


def of_dicts(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


@pytest.mark.parametrize(
    "ids",
    [[np.int64(5), np.uint8(6)], torch.tensor([5, 6], dtype=torch.uint16), [5, 6]],
    ids=["NumPy", "uint16", "list"],
)
def test_integers_of_any_type_as_ids(tmp_path, ids):
    assert recorded(tmp_path, step_(of_dicts), with_ids([ids]), epochs=1)["id"] == [5, 6]


@pytest.mark.parametrize("every", [1, 1000])
def test_ids_of_two_types(tmp_path, every):
    with pytest.raises(
        sw.LedgerError, match=r"the column 'id' must have one type in all batches; found .*int64 .*string"
    ):
        recorded(tmp_path, step_(of_dicts), with_ids([[1, 2], ["a", "b"]]), epochs=1, rows_per_file=every)


# ----------------------------------------------------------------------------------------------------------- on disk


def test_types_and_parts(tmp_path):
    recorded(tmp_path, step_(samples=5), loader(), rows_per_file=12)
    types = {field.name: str(field.type) for field in sw.read_ledger(tmp_path).schema}
    wanted = {"id": "int64", "epoch": "int32", "update": "int64", "loss": "float", "norm": "float", "weight": "float"}
    assert types == wanted
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == [f"part-{k:06d}.parquet" for k in range(len(names))] and len(names) == 4
    assert pq.read_table(tmp_path / "samples").num_rows == 2 * N  # any Parquet reader
    assert sw.read_ledger(tmp_path).num_rows == 2 * N


def test_a_million_visits_are_small(tmp_path):
    """Measured on 100,000 visits with random numbers, which compress worst."""
    model = nn.Linear(1, 1)
    step = sw.Step(model, sw.sgd(0.0), lambda m, b: m(b["x"])[:, 0].exp(), record=["norms"], transforms=[sw.clip(1.0)])
    ledger = sw.Ledger(tmp_path)
    ledger.listen(step)
    for _ in range(10):
        order = torch.randperm(60_000)[:10_000]
        (update,) = step({"x": torch.randn(10_000, 1), "id": order})
        ledger.add(update)
    ledger.flush()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 4_000_000


def test_no_ledger(tmp_path):
    with pytest.raises(sw.LedgerError, match=r"a run must have a ledger, .* found none in .*Train with callbacks="):
        sw.read_ledger(tmp_path)


def damage(path, how):
    content, losses = path.read_bytes(), pq.read_metadata(path).row_group(0).column(3)
    changed = bytearray(content)
    changed[losses.data_page_offset + losses.total_compressed_size - 5] ^= 1
    path.write_bytes({"cut": content[:-20], "empty": b"", "flipped": bytes(changed)}[how])


@pytest.mark.parametrize("how", ["cut", "empty", "flipped"])
def test_a_damaged_part_is_named_and_the_other_parts_are_read(tmp_path, how):
    recorded(tmp_path, step_(samples=5), loader(), rows_per_file=12)
    damage(tmp_path / "samples" / "part-000001.parquet", how)
    with pytest.raises(sw.LedgerError, match=r"must be a complete Parquet file; found .*part-000001\.parquet") as error:
        sw.read_ledger(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.warns(sw.LedgerWarning, match=r"part-000001\.parquet, .*The other parts are read\."):
        rest = sw.read_ledger(tmp_path, damaged="skip")
    assert 0 < rest.num_rows < 2 * N


def test_a_missing_part_is_reported(tmp_path):
    recorded(tmp_path, step_(samples=5), loader(), rows_per_file=12)
    (tmp_path / "samples" / "part-000001.parquet").unlink()
    with pytest.raises(sw.LedgerError, match=r"numbered without a gap; found no .*part-000001\.parquet"):
        sw.read_ledger(tmp_path)


def test_another_version_is_reported(tmp_path):
    recorded(tmp_path, step_(samples=5), loader())
    path = tmp_path / "samples" / "part-000000.parquet"
    about = {"format": "samplewise ledger", "version": "7"}
    pq.write_table(pq.read_table(path).replace_schema_metadata(about), path)
    with pytest.raises(
        sw.LedgerError, match=r"samplewise ledger 1; found samplewise ledger 7 in .*the version of samplewise that"
    ):
        sw.read_ledger(tmp_path)


def test_pyarrow_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"the ledger needs pyarrow: pip install 'samplewise\[ledger\]'"):
        sw.Ledger(tmp_path)


# ---------------------------------------------------------------------------------------------------------- mistakes


def test_an_update_without_ids_is_refused(tmp_path):
    ledger = sw.Ledger(tmp_path)
    (update,) = step_()(next(iter(loader())))
    with pytest.raises(sw.LedgerError, match=r"found an update without some of them\. Call ledger\.listen\(step\)"):
        ledger.add(update)


def test_listen_in_the_middle_of_a_window(tmp_path):
    ledger, step = sw.Ledger(tmp_path), step_(samples=10)
    assert step(next(iter(loader(8)))) == []
    ledger.listen(step)
    (update,) = step(next(iter(loader(2))))
    with pytest.raises(
        sw.LedgerError, match="must have the ids of all its samples to be recorded; found an update without some"
    ):
        ledger.add(update)


def test_a_batch_without_ids(tmp_path):
    with pytest.raises(
        sw.BatchError, match=r"must hold 'id'; found a list of 2 entries\. Wrap the dataset, .*sw.Indexed"
    ):
        recorded(tmp_path, step_(nn.CrossEntropyLoss()), DataLoader(TensorDataset(X, Y), batch_size=4))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.rand(N), r"the column 'id' must hold integers or strings; found torch.float32"),
        (
            torch.zeros(N, 2),
            r"ids must be a tensor \(B,\) or a list, one per sample; found a tensor of shape \(22, 2\)",
        ),
        (torch.arange(3), r"one id for each loss; found 3 ids for 22 losses\. Pass the key of the ids"),
        ([2**63] * N, r"the column 'id' must hold integers from -2\*\*63 to 2\*\*63 - 1; found 9223372036854775808"),
        ([1, "a"] * 11, r"the column 'id' must hold integers or strings; found int and str"),
        ([b"a"] * N, r"the column 'id' must hold integers or strings; found bytes"),
    ],
    ids=["floats", "matrix", "too few", "too large", "both", "bytes"],
)
def test_invalid_ids(tmp_path, ids, message):
    step = step_(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"))
    with pytest.raises(sw.LedgerError, match=message):
        recorded(tmp_path, step, [{"x": X, "y": Y, "id": ids}])


@pytest.mark.parametrize("columns", [{"loss": 1}, {"epoch": 1}])
def test_reserved_column_names_are_refused(tmp_path, columns):
    with pytest.raises(sw.LedgerError, match=r"a column must not have the name of a standard column"):
        recorded(tmp_path, step_(), loader(), columns=columns)


@pytest.mark.parametrize(
    ("column", "found"), [(torch.zeros(3), r"shape \(3,\)"), (1.0, "float")], ids=["short", "number"]
)
def test_an_invalid_column(column, found):
    step = step_(lambda model, batch: (losses_of(model, batch), {"margin": column}))
    with pytest.raises(sw.LossesError, match=rf"a tensor like the losses, \(8,\), .* found {found} for 'margin'"):
        step(next(iter(loader())))


def test_invalid_options(tmp_path):
    with pytest.raises(ValueError, match="rows_per_file must be a positive whole number; found 0"):
        sw.Ledger(tmp_path, rows_per_file=0)
    with pytest.raises(
        TypeError, match="columns must be a list of keys, or a dict of names and keys; found the string 'y'"
    ):
        sw.Ledger(tmp_path, columns="y")
    with pytest.raises(ValueError, match="damaged must be 'raise' or 'skip'; found 'warn'"):
        sw.read_ledger(tmp_path, damaged="warn")
    for show in (True, ["a text"]):
        with pytest.raises(
            TypeError, match=r"show must be a function of the id, None or False; found (True|\['a text'\])"
        ):
            sw.Ledger(tmp_path, show=show)


def test_arguments_of_another_type(tmp_path):
    ledger = sw.Ledger(tmp_path)
    with pytest.raises(TypeError, match=r"listen needs the sw.Step of the training; found Sequential\. Pass the step"):
        ledger.listen(model_())
    with pytest.raises(TypeError, match=r"add needs an update; found list\. Pass what the step yields: for update in"):
        ledger.add([X, Y])


def test_a_column_of_the_batch_has_one_value_per_sample(tmp_path):
    with pytest.raises(
        sw.LedgerError, match=r"'pixels' must have one number or string per sample, \(8,\); found shape \(8, 4\)"
    ):
        recorded(tmp_path, step_(), loader(), columns={"pixels": 0})
    step = step_(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"], reduction="none"))
    batch = {"x": X, "y": Y, "id": torch.arange(N), "names": ["a", "b"]}
    with pytest.raises(
        sw.LedgerError, match=r"'names' must have one .* \(22,\); found 2 values\. Leave it out of columns="
    ):
        recorded(tmp_path, step, [batch], columns=["names"])


def test_a_column_that_the_batch_lacks(tmp_path):
    with pytest.raises(sw.BatchError, match="the batch must hold 'y'; found the entries 'item0', 'item1', 'id'"):
        recorded(tmp_path, step_(), loader(), columns=["y"])


def test_the_folder_of_the_parts_is_not_the_run(tmp_path):
    recorded(tmp_path, step_(), loader(), epochs=1)
    with pytest.raises(sw.LedgerError, match=rf"found none in .*samples\. Pass the run directory, {tmp_path}\."):
        sw.read_ledger(tmp_path / "samples")


def test_a_directory_in_use(tmp_path):
    recorded(tmp_path, step_(samples=5), loader())
    with pytest.raises(sw.LedgerError, match=r"a run directory without parts; found 1 part in .*or choose another"):
        recorded(tmp_path, step_(samples=5), loader())


def test_no_directory():
    with pytest.raises(ValueError, match=r"a ledger must have a run directory; found none\. Pass it to the ledger"):
        recorded(None, step_(), loader())


def test_a_loop_without_a_step_records_the_rows_of_a_step(tmp_path):
    expected = recorded(tmp_path / "step", step_(samples=8, microbatch=4, transforms=[sw.clip(0.5)]), loader(4))
    model = model_()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    ledger = sw.Ledger(tmp_path / "loop")
    updates = 0
    for epoch in range(2):
        batches = list(loader(4))
        for k in range(0, len(batches), 2):
            window = batches[k : k + 2]
            samples = sum(len(batch[0]) for batch in window)
            for batch in window:
                logits = model(batch[0])
                losses = F.cross_entropy(logits, batch[1], reduction="none")
                loss = losses.sum() / samples
                stats = sw.backward(loss, model, logits, [sw.clip(0.5)], denominator=samples, losses=losses)
                ledger.record(stats, batch, update=updates, epoch=epoch)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    found = ledger.read().to_pydict()
    assert list(found) == ["id", "epoch", "update", "loss", "norm", "weight"]
    for name, values in found.items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected[name]))


def test_rows_of_a_skipped_update_without_a_step(tmp_path):
    model = model_()
    batch = next(iter(loader(4)))
    ledger = sw.Ledger(tmp_path, columns={"target": 1})
    stats = sw.backward(F.cross_entropy(model(batch[0]), batch[1], reduction="none"), model)
    ledger.record(stats, batch, update=0, skipped=True)
    found = ledger.read().to_pydict()
    assert found["weight"] == [0] * 4
    assert found["target"] == batch[1].tolist()
    assert found["epoch"] == [0] * 4
    with pytest.raises(TypeError, match=r"record needs the results of sw.backward; found Tensor"):
        ledger.record(stats.norms, batch, update=1)
    with pytest.raises(sw.BatchError):
        ledger.record(stats, {"x": batch[0]}, update=1)
    for wrong in ({"update": "1"}, {"update": 1.5}, {"update": -1}, {"update": None}, {"update": 1, "epoch": "x"}):
        with pytest.raises(ValueError, match=r"(update|epoch) must be an integer, counted from 0; found"):
            ledger.record(stats, batch, **wrong)
    ledger.record(stats, batch, update=1)
    assert ledger.read()["update"].to_pylist() == [0] * 4 + [1] * 4
