"""A ledger of several ranks: a file each, one table; other ranks go on with it."""

import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.errors import LedgerError, LedgerWarning
from samplewise.loop.callbacks import ModelCheckpoint

SAMPLES = 23
COLUMNS = ["id", "epoch", "update", "loss", "norm", "weight", "margin"]


def loss_fn(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], reduction="none"), {"margin": logits.amax(1)}


def recorded(run, until, samples=6, every=20):
    torch.manual_seed(7)
    own = torch.Generator().manual_seed(3)
    x, y = torch.randn(SAMPLES, 5, generator=own), torch.randint(0, 3, (SAMPLES,), generator=own)
    loader = DataLoader(sw.Indexed(TensorDataset(x, y)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sw.Step(model, optimizer, loss_fn, samples, transforms=[sw.clip(0.5)], parallel="ddp")
    callbacks = [sw.Ledger(rows_per_file=every), ModelCheckpoint(every="3up")]
    trainer = sw.Trainer(step, run, callbacks, progress=False, device="cpu", seed=1)
    trainer.fit(loader, updates=until, resume=True)


def table(run):
    """By update, and within one by sample."""
    rows = sw.read_ledger(run).select(COLUMNS).to_pylist()
    assert [row["update"] for row in rows] == sorted(row["update"] for row in rows)
    return sorted(rows, key=lambda row: (row["update"], row["id"]))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for row, right in zip(found, expected, strict=True):
        assert row == pytest.approx(right, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    recorded(run, 12)
    return table(run)


def parts(run):
    return sorted(path.name for path in (run / "samples").iterdir())


def test_each_rank_writes_what_it_has_seen(two, alone, tmp_path):
    two.run(recorded, tmp_path / "run", 12)
    assert_same(table(tmp_path / "run"), alone)
    names = parts(tmp_path / "run")
    assert names[:2] == ["part-000000-rank-0-of-2.parquet", "part-000000-rank-1-of-2.parquet"]
    assert (tmp_path / "run" / "previews.json").exists()

    gone = tmp_path / "run" / "samples" / names[1]
    gone.unlink()
    with pytest.raises(LedgerError, match=re.escape(f"must be numbered without a gap; found no {gone}.")):
        sw.read_ledger(tmp_path / "run")
    with pytest.warns(LedgerWarning, match="The other parts are read."):
        left = sw.read_ledger(tmp_path / "run", damaged="skip")
    assert 0 < left.num_rows < len(alone)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_ledger_continues_with_another_number_of_ranks(before, after, two, three, alone, tmp_path):
    start = {1: lambda _, *given: recorded(*given), 2: two.run, 3: three.run}
    start[before](recorded, tmp_path / "run", 5)
    stray = shutil.copy(*(tmp_path / "run" / "samples" / name for name in (parts(tmp_path / "run")[0], _newer(before))))
    start[after](recorded, tmp_path / "run", 12)
    assert_same(table(tmp_path / "run"), alone)
    assert stray.name not in parts(tmp_path / "run")


def _newer(size):
    """A part that no checkpoint knows of."""
    return "part-000009.parquet" if size == 1 else f"part-000009-rank-0-of-{size}.parquet"


def test_ranks_without_a_sample_in_an_update_or_in_a_part(three, tmp_path):
    recorded(tmp_path / "alone", 8, 2, 1)
    three.run(recorded, tmp_path / "run", 8, 2, 1)  # updates of two samples, and of three ranks
    assert_same(table(tmp_path / "run"), table(tmp_path / "alone"))
