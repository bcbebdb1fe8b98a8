"""The setting of the C library's allocator."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from samplewise.core.memory import keep_freed_memory
print(keep_freed_memory())

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    return sum(float(torch.ones(2**20)[0]) for _ in [torch.ones(2**20) for _ in range(20)])

step()
counts = []
for _ in range(3):  # the operating system may take pages away in between
    before = faults()
    step()
    counts.append(faults() - before)
print(min(counts))
"""


def run(**settings):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**clean, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
def test_freed_memory_is_kept():
    kept, faults = run()
    assert kept == "True"
    assert faults < 2000  # 80 MB are 20,000 pages


CHOICES = [{"MALLOC_TRIM_THRESHOLD_": "100000"}, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}]


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("setting", CHOICES)
def test_a_choice_of_the_user_is_left_alone(setting):
    kept, _ = run(**setting)
    assert kept == "False"
