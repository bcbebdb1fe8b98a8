"""Results have the same bits whatever has happened in the process before: otherwise a resumed run would round
differently.
"""

import sys
from pathlib import Path

import forks
import pytest
from history import PASTS

SCRIPT = Path(__file__).with_name("history.py")


def hashes(*past):
    done = forks.run([sys.executable, "-W", "ignore", str(SCRIPT), *past], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


@pytest.fixture(scope="module")
def of_a_new_process():
    return hashes()


def test_results_do_not_depend_on_the_past(of_a_new_process):
    assert len(of_a_new_process) == 28
    assert hashes(*(past.__name__ for past in PASTS)) == of_a_new_process


@pytest.mark.slow
@pytest.mark.parametrize("past", [past.__name__ for past in PASTS])
def test_results_do_not_depend_on_one_event(past, of_a_new_process):
    assert hashes(past) == of_a_new_process
