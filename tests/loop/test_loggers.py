"""Loggers: TensorBoard, CSV, W&B and MLflow, also after a resume."""

import csv
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint
from samplewise.loop.loggers import CSV, MLflow, TensorBoard, WandB

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30) % 3
LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=10)  # three updates an epoch
TIMES = ("seconds", "samples_per_second", "compute_samples_per_second", "phases", "memory")


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(run, callbacks, **options):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    return sw.Trainer(step, run, callbacks, progress=False, device="cpu", log_every="1up", **options)


def fit(run, callbacks, resume=False, **duration):
    trainer = make(run, callbacks)
    trainer.fit(LOADER, validate=LOADER, resume=resume, **duration)
    return trainer


def rows(path):
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def scalars(directory):
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not any(time in tag for time in TIMES)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


class Crash(Exception):
    pass


class CrashAt:
    """Callback that raises after the validation at an update, before a checkpoint is saved."""

    def __init__(self, update, kind="validation"):
        self.update, self.kind = update, kind

    def on_log(self, kind, fields):
        if kind == self.kind and fields["update"] == self.update:
            raise Crash


def crashed(run, logger, every, crash):
    with pytest.raises(Crash):
        fit(run, [logger, ModelCheckpoint(every=every), crash], epochs=3)


# ------------------------------------------------------------- the event


def test_lines_are_logged_without_a_run_directory():
    logged = []

    class Teller:
        def on_log(self, kind, fields):
            logged.append((kind, fields["update"]))

    fit(None, [Teller()], epochs=1)
    assert logged == [("train", 1), ("train", 2), ("train", 3), ("epoch", 3), ("validation", 3), ("end", 3)]


def test_lines_are_flushed(tmp_path):
    lines = []

    class Reader:
        def on_log(self, trainer):
            lines.append(len((trainer.run / "log.jsonl").read_text().splitlines()))

    fit(tmp_path, [Reader()], epochs=1)
    assert lines == list(range(1, 10))


# ------------------------------------------------------------- CSV


def test_csv(tmp_path):
    trainer = fit(tmp_path, [CSV()], epochs=2)
    train, validation = rows(tmp_path / "train.csv"), rows(tmp_path / "validation.csv")
    assert [row["update"] for row in train] == list("123456")
    assert [row["update"] for row in validation] == ["3", "6"]
    assert float(validation[-1]["loss"]) == trainer.evaluate(LOADER)["loss"]
    assert train[0]["lr"] == "0.1"


def test_csv_in_another_directory_and_in_a_second_fit(tmp_path):
    trainer = make(None, [CSV(tmp_path / "there")])
    trainer.fit(LOADER, epochs=1)
    trainer.fit(LOADER, epochs=2)
    assert [row["update"] for row in rows(tmp_path / "there" / "train.csv")] == list("123456")


def test_columns_are_those_of_the_first_line(tmp_path):
    class Writer:
        def on_update(self, trainer, update):
            fields = [dict(update=1, a="x, y", b=[1, 2]), dict(update=2, c=1, b=math.nan), dict(a=3)][update.index]
            trainer.write("validation", **fields)

    make(None, [CSV(tmp_path), Writer()]).fit(LOADER, epochs=1)
    assert (tmp_path / "validation.csv").read_text() == 'update,a,b\n1,"x, y","[1, 2]"\n2,,NaN\n,3,\n'


# Saved by update, the checkpoint at update 3 or 6 is older than the validation there; saved by epoch, it is newer.
@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("every", ["1up", "2up", "1ep"])
@pytest.mark.parametrize("crash", [CrashAt(2, "train"), CrashAt(3), CrashAt(5, "train"), CrashAt(6)])
def test_files_of_a_resumed_run_equal_those_of_an_uninterrupted_run(tmp_path, every, crash):
    fit(tmp_path / "whole", [CSV(), TensorBoard()], epochs=3)
    for logger in (CSV, TensorBoard):
        crashed(tmp_path / logger.__name__, logger(), every, crash)
        for file in tmp_path.glob("TensorBoard/tensorboard/*"):  # their order is undefined
            file.rename(file.with_name("events.out.tfevents.0000000001"))
        fit(tmp_path / logger.__name__, [logger(), ModelCheckpoint(every)], resume=True, epochs=3)
    for name in ("train.csv", "validation.csv"):
        assert rows(tmp_path / "CSV" / name) == rows(tmp_path / "whole" / name)
    assert scalars(tmp_path / "TensorBoard" / "tensorboard") == scalars(tmp_path / "whole" / "tensorboard")


def test_rows_after_the_checkpoint_are_removed_on_resume(tmp_path):
    crashed(tmp_path, CSV(), "2up", CrashAt(3))
    assert len(rows(tmp_path / "validation.csv")) == 1
    with pytest.raises(Crash):
        fit(tmp_path, [CSV(), CrashAt(3, "train")], resume=True, epochs=3)
    assert not (tmp_path / "validation.csv").exists()
    assert [row["update"] for row in rows(tmp_path / "train.csv")] == ["1", "2", "3"]


# ------------------------------------------------------------- TensorBoard


def test_tensorboard(tmp_path):
    trainer = fit(tmp_path, [TensorBoard()], epochs=2)
    found = scalars(tmp_path / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in found["validation/loss"]] == [3, 6]
    assert found["validation/loss"][-1][1] == pytest.approx(trainer.evaluate(LOADER)["loss"])


class Strange:
    def on_fit_start(self, trainer):
        trainer.write("mine", update=0, loss=math.nan, rates=(0.1, 0.2), name="no number")


def test_nan_lists_and_strings_in_tensorboard(tmp_path):
    make(None, [TensorBoard(tmp_path), Strange()]).fit(LOADER, epochs=1)
    found = scalars(tmp_path)
    assert math.isnan(found["mine/loss"][0][1])
    assert found["mine/rates/1"] == [(0, pytest.approx(0.2))]
    assert "mine/name" not in found


# ------------------------------------------------------------- others, by fakes


class FakeRun:
    def __init__(self, name):
        self.id, self.lines, self.finished = name, [], False
        self.info = SimpleNamespace(run_id=name)

    def log(self, values, step):
        assert not self.finished
        self.lines.append((step, values))

    def finish(self, exit_code):
        self.finished, self.failed = True, exit_code != 0


@pytest.fixture
def started(monkeypatch):
    """Runs started through fake wandb and mlflow modules, with their arguments."""
    found = []

    def start(**arguments):
        found.append((arguments, FakeRun("abc")))
        return found[-1][1]

    wandb, mlflow = ModuleType("wandb"), ModuleType("mlflow")
    wandb.init = mlflow.start_run = start
    mlflow.log_metrics = lambda values, step: found[-1][1].log(values, step)
    mlflow.end_run = lambda status: found[-1][1].finish({"FINISHED": 0, "FAILED": 1}[status])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return found


@pytest.mark.parametrize(
    ("logger", "again"),
    [(WandB, {"id": "abc", "resume": "allow"}), (MLflow, {"run_id": "abc"})],
    ids=["WandB", "MLflow"],
)
def test_services(started, tmp_path, logger, again):
    fit(tmp_path, [logger(name="n"), Strange()], epochs=1)
    fit(tmp_path, [logger(name="n")], resume=True, epochs=2)
    (first, run), (second, resumed) = started
    assert first == {"name": "n"} and second == {"name": "n", **again}
    assert run.finished and resumed.finished
    assert [step for step, _ in run.lines] == [0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert [step for step, _ in resumed.lines] == [4, 4, 5, 5, 6, 6, 6, 6]
    assert set(run.lines[2][1]) == {"layers/norms/weight", "layers/norms/bias"}
    assert math.isnan(run.lines[0][1]["mine/loss"])
    assert {"validation/epoch", "validation/loss"} <= set(run.lines[-1][1])
    assert "validation/update" not in run.lines[-1][1]


@pytest.mark.parametrize("logger", [WandB, MLflow])
def test_a_fit_that_raises_is_finished_as_failed(started, logger):
    trainer = make(None, [logger(), CrashAt(2, "train")])
    with pytest.raises(Crash):
        trainer.fit(LOADER, epochs=1)
    assert [run.finished for _, run in started] == [True]
    trainer.fit(LOADER, epochs=1)
    assert [run.failed for _, run in started] == [True, False]


# ------------------------------------------------------------- what they need


@pytest.mark.parametrize(
    ("logger", "library"), [(TensorBoard, "tensorboard"), (WandB, "wandb"), (MLflow, "mlflow")], ids=lambda x: str(x)
)
def test_a_missing_library(monkeypatch, logger, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=f"^{logger.__name__} needs {library}: pip install {library}$"):
        logger()


@pytest.mark.parametrize("logger", [TensorBoard, CSV])
def test_no_directory(logger):
    with pytest.raises(ValueError, match=rf"{logger.__name__} needs a directory; found none. Use {logger.__name__}\('"):
        fit(None, [logger()], epochs=1)


def test_fast_dev_run_is_not_logged(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make("run", [CSV(), TensorBoard(), TensorBoard("there"), WandB(), MLflow()])
    trainer.fit(LOADER, validate=LOADER, epochs=1, fast_dev_run=True)
    assert list(tmp_path.iterdir()) == [] and started == []
