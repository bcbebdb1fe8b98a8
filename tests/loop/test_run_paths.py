"""Directories stay where they were when they were given, whatever becomes of the working directory."""

import os
from pathlib import Path

import pytest
import torch
from small import loader, log, make
from torch import nn

import samplewise as sw
from samplewise.integrations.loggers import CSV


class Elsewhere:
    """Changes the working directory in the first update."""

    def __init__(self, place):
        self.place = place

    def on_update(self):
        os.chdir(self.place)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    return there


def test_a_relative_run_and_another_working_directory(elsewhere):
    trainer = make("runs/first", [Elsewhere(elsewhere), sw.Ledger(id=1)])
    assert trainer.run == Path.cwd() / "runs" / "first"
    trainer.fit(loader(), epochs=2)
    here = elsewhere.parent / "here" / "runs" / "first"
    assert log(here)[-1]["reason"] == "2 epochs are done"
    assert len(list((here / "checkpoints").iterdir())) == 2 and len(sw.samples(here)) == 60
    assert list(elsewhere.iterdir()) == []


def test_the_working_directory_changes_between_construction_and_fit(elsewhere):
    trainer = make(Path("first"))
    os.chdir(elsewhere)
    trainer.fit(loader(), epochs=1)
    trainer.save_model("aside")
    here = elsewhere.parent / "here" / "first"
    assert {"log.jsonl", "run.json", "checkpoints", "aside.ckpt"} == {path.name for path in here.iterdir()}


def test_a_working_directory_that_is_removed(elsewhere):
    trainer = make(elsewhere.parent / "here" / "first")
    os.chdir(elsewhere)
    elsewhere.rmdir()
    assert trainer.fit(loader(), epochs=1) == "1 epoch is done"
    with pytest.raises(ValueError, match=r"must have a path that can be made absolute; found 'first': .*absolute path"):
        make("first")


def test_a_link_to_the_working_directory(elsewhere):
    link = elsewhere.parent / "link"
    link.symlink_to(elsewhere.parent / "here")
    os.chdir(link)
    trainer = make("first")
    link.unlink()
    trainer.fit(loader(), epochs=1)
    assert log(elsewhere.parent / "here" / "first")[-1]["kind"] == "end"


def test_the_home_directory(elsewhere, monkeypatch):
    monkeypatch.setenv("HOME", str(elsewhere))
    trainer = make("~/first")
    assert trainer.run == elsewhere / "first"
    assert make("~").run == elsewhere
    trainer.fit(loader(), epochs=1)
    assert not Path("~").exists()


def test_the_home_directory_of_nobody():
    with pytest.raises(ValueError, match=r"found '~nobody-of-this-name/first': .*Pass an absolute path"):
        make("~nobody-of-this-name/first")


def test_other_directories(elsewhere):
    ledger, csv, store = sw.Ledger("visits", id=1), CSV("tables"), sw.attribution.ProjectedStore("projections", 4)
    os.chdir(elsewhere)
    make(None, [ledger, csv]).fit(loader(), epochs=1)
    model = nn.Linear(6, 3)
    store.add(sw.gradients(model(torch.randn(5, 6)).sum(1), model))
    assert list(elsewhere.iterdir()) == []
    here = elsewhere.parent / "here"
    assert {path.name for path in here.iterdir()} == {"visits", "tables", "projections"}
    assert len(sw.samples(here / "visits")) == 30
