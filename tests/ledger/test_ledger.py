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
from samplewise.report.run_log import RunLog

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
    return sw.Step(model_(), sw.sgd(0.3), loss, **{"audit": False, **options})


def loader(batch_size=8, **options):
    return DataLoader(sw.Indexed(TensorDataset(X, Y)), batch_size=batch_size, **options)


def recorded(path, step, batches, epochs=2, **options):
    ledger = sw.Ledger(path, **options)
    ledger.listen(step)
    for _ in range(epochs):
        for update in step.over(batches):
            ledger.add(update)
    return ledger.samples().to_pydict()


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


def test_a_weight_for_each_parameter_has_its_own_column(tmp_path):
    step = step_(samples=5, transforms=[sw.clip(0.1, by="parameter")])
    ledger, weights = sw.Ledger(tmp_path), []
    ledger.listen(step)
    for update in step.over(loader()):
        ledger.add(update)
        weights.append(update.weights["0.bias"])
    found = ledger.samples().to_pydict()
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
    with torch.no_grad():
        assert found["margin"][:5] == pytest.approx(model_()(X[:5]).amax(1).tolist(), abs=1e-6)


def test_compiled_updates_record_the_columns_of_the_loss(tmp_path):
    step = step_(with_margin, samples=1, compile=True)
    with pytest.warns(sw.TrainingWarning, match="returns columns in addition to losses cannot be compiled"):
        found = recorded(tmp_path, step, loader())
    assert len(found["margin"]) == 2 * N and not any(value != value for value in found["margin"])


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
    assert ledger.samples()["epoch"].to_pylist() == [0] * 11 + [1] * 11


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
    found = recorded(tmp_path, step, loader(), epochs=1, every=every)["c"]
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
        recorded(tmp_path, step_(of_dicts), with_ids([[1, 2], ["a", "b"]]), epochs=1, every=every)


# ----------------------------------------------------------------------------------------------------------- on disk


def test_types_and_parts(tmp_path):
    recorded(tmp_path, step_(samples=5), loader(), every=12)
    types = {field.name: str(field.type) for field in sw.samples(tmp_path).schema}
    wanted = {"id": "int64", "epoch": "int32", "update": "int64", "loss": "float", "norm": "float", "weight": "float"}
    assert types == wanted
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == [f"part-{k:06d}.parquet" for k in range(len(names))] and len(names) == 4
    assert pq.read_table(tmp_path / "samples").num_rows == 2 * N  # any Parquet reader
    assert RunLog(tmp_path).samples().num_rows == 2 * N


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
        sw.samples(tmp_path)


def damage(path, how):
    content, losses = path.read_bytes(), pq.read_metadata(path).row_group(0).column(3)
    changed = bytearray(content)
    changed[losses.data_page_offset + losses.total_compressed_size - 5] ^= 1
    path.write_bytes({"cut": content[:-20], "empty": b"", "flipped": bytes(changed)}[how])


@pytest.mark.parametrize("how", ["cut", "empty", "flipped"])
def test_a_damaged_part_is_named_and_the_other_parts_are_read(tmp_path, how):
    recorded(tmp_path, step_(samples=5), loader(), every=12)
    damage(tmp_path / "samples" / "part-000001.parquet", how)
    with pytest.raises(sw.LedgerError, match=r"must be a complete Parquet file; found .*part-000001\.parquet") as error:
        sw.samples(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.warns(sw.LedgerWarning, match=r"part-000001\.parquet, .*The other parts are read\."):
        rest = sw.samples(tmp_path, damaged="skip")
    assert 0 < rest.num_rows < 2 * N


def test_a_missing_part_is_reported(tmp_path):
    recorded(tmp_path, step_(samples=5), loader(), every=12)
    (tmp_path / "samples" / "part-000001.parquet").unlink()
    with pytest.raises(sw.LedgerError, match=r"numbered without a gap; found no .*part-000001\.parquet"):
        sw.samples(tmp_path)


def test_another_version_is_reported(tmp_path):
    recorded(tmp_path, step_(samples=5), loader())
    path = tmp_path / "samples" / "part-000000.parquet"
    about = {"format": "samplewise ledger", "version": "7"}
    pq.write_table(pq.read_table(path).replace_schema_metadata(about), path)
    with pytest.raises(
        sw.LedgerError, match=r"samplewise ledger 1; found samplewise ledger 7 in .*the version of samplewise that"
    ):
        sw.samples(tmp_path)


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
    with pytest.raises(sw.BatchError, match="the batch must hold 'id'; found list"):
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
    with pytest.raises(ValueError, match="every must be a positive number of rows; found 0"):
        sw.Ledger(tmp_path, every=0)
    with pytest.raises(
        TypeError, match="columns must be a list of keys, or a dict of names and keys; found the string 'y'"
    ):
        sw.Ledger(tmp_path, columns="y")
    with pytest.raises(ValueError, match="damaged must be 'raise' or 'skip'; found 'warn'"):
        sw.samples(tmp_path, damaged="warn")


def test_a_directory_in_use(tmp_path):
    recorded(tmp_path, step_(samples=5), loader())
    with pytest.raises(sw.LedgerError, match=r"a directory without parts; found 1 parts in .*or choose another"):
        recorded(tmp_path, step_(samples=5), loader())


def test_no_directory():
    with pytest.raises(ValueError, match=r"Ledger needs a directory; found none"):
        recorded(None, step_(), loader())
