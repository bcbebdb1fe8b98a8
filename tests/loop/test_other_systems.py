"""A training on a system that has neither /proc nor the module `resource` nor SIGCHLD, as macOS and Windows."""

import signal
import sys
from pathlib import Path

import pytest
import torch
from small import loader, make

from samplewise.core import files
from samplewise.loop.meters import peak_memory


@pytest.fixture
def bare(monkeypatch):
    """Hide what only Linux and other POSIX systems have."""
    read_text = Path.read_text

    def without_proc(path, *args, **options):
        if path.parts[:2] == ("/", "proc"):
            raise FileNotFoundError(path)
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", without_proc)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delattr(signal, "SIGCHLD", raising=False)
    monkeypatch.setattr(files, "sync_directory", lambda path: None)


def test_train_stop_and_resume(tmp_path, bare):
    class Terminate:
        def on_update(self):
            signal.raise_signal(signal.SIGTERM)

    assert make(tmp_path, [Terminate()]).fit(loader(), epochs=2).signal == "SIGTERM"
    assert not (tmp_path / "run.lock").exists()
    stopped_and_resumed = make(tmp_path)
    stopped_and_resumed.fit(loader(), epochs=2, resume=True)
    whole = make()
    whole.fit(loader(), epochs=2)
    for found, expected in zip(stopped_and_resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_peak_memory_is_unknown(bare):
    assert peak_memory(torch.device("cpu")) is None
