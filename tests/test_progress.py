"""Progress of long computations: lines elsewhere than in a terminal, one display at a time."""

import sys

import pytest

from samplewise.core import text as progress


@pytest.fixture
def talkative(monkeypatch):
    monkeypatch.setattr(progress, "QUIET", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)


def test_lines(talkative, capsys):
    assert list(progress.with_progress([3, 4], "batches")) == [3, 4]
    assert capsys.readouterr().err == "batches: 1 of 2\nbatches: 2 of 2\n"


def test_an_unknown_total(talkative, capsys):
    assert list(progress.with_progress(iter([3]), "batches")) == [3]
    assert capsys.readouterr().err == "batches: 1\n"


def test_only_the_outermost_is_shown(talkative, capsys):
    for _ in progress.with_progress([1], "outer"):
        assert list(progress.with_progress([1, 2], "inner")) == [1, 2]
    list(progress.with_progress([1], "next"))
    assert capsys.readouterr().err == "outer: 1 of 1\nnext: 1 of 1\n"


def test_an_abandoned_pass_is_not_shown_any_more(talkative, capsys):
    for _ in progress.with_progress([1, 2], "left"):
        break
    with pytest.raises(ValueError, match="why"), progress.progress(1, "failed"):
        raise ValueError("why")
    list(progress.with_progress([1], "next"))
    assert capsys.readouterr().err == "next: 1 of 1\n"


def test_nothing_in_the_first_seconds(capsys):
    list(progress.with_progress([1, 2], "batches"))
    assert capsys.readouterr().err == ""


def test_a_bar_in_a_terminal(talkative, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress(2, "batches") as advance:
        advance(1)
        with progress.progress(5, "inner") as inner:  # a second bar would be an error of rich
            inner(1)
    assert "batches: 1" not in capsys.readouterr().err


def test_a_terminal_without_rich(talkative, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(progress.with_progress([3], "batches")) == [3]
    assert capsys.readouterr().err == "batches: 1 of 1\n"
