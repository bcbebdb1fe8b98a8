"""The demo, as `make demo` and as `samplewise demo`."""

import re
import sys

import forks
import pytest
from recipes import command

from samplewise.cli import demo

MAKE, COMMAND = ["samplewise.cli.demo"], ["samplewise.cli.main", "demo"]


def test_two_epochs_of_the_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "EPOCHS", 2)
    result = command("demo")
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"^ +\d+ +\d+% +\d+% +\d+% +10%$", result.stdout, re.MULTILINE)) == 3
    assert (tmp_path / "runs" / "demo" / "report.html").exists()
    assert "Ledger: 2,874 visits with the columns id, epoch, update, loss, norm, " in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("module", [MAKE, COMMAND], ids=["make", "command"])
def test_demo(tmp_path, module):
    run = forks.run(
        [sys.executable, "-W", "error", "-m", *module], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    found = [int(share) for share in re.findall(r"^ +\d+ +(\d+)% +\d+% +\d+% +10%$", run.stdout, re.MULTILINE)]
    assert len(found) == 3
    assert min(found) > 80  # percent of the suspects have a wrong label; 10 by chance
    assert (tmp_path / "runs" / "demo" / "report.html").exists()
    assert "runs/demo/report.html" in run.stdout
    columns = "id, epoch, update, loss, norm, weight, label, prediction, margin, confidence, el2n"
    assert f"Ledger: 17,244 visits with the columns {columns}. The last three:" in run.stdout
    assert re.search(r"noise scale at the end: [\d,]+ samples; the batch size is 64\.", run.stdout)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = command("demo")
    assert result.stderr == "samplewise: the demo needs scikit-learn: pip install 'samplewise[demo]'\n"
    assert result.exit_code == 1
