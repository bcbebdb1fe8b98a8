"""Peak memory of one job in a fresh process: maximum resident size minus resident size before the job.

python memory.py WORKLOAD CONTENDER JOB THREADS prints bytes as JSON. Linux only.
"""

import ctypes
import gc
import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

CALLS = 2  # including the first call, which must fit into memory, too


def measure(workload: str, contender: str, job: str, threads: int) -> int:
    """Peak memory in bytes, measured in a new process."""
    command = [sys.executable, __file__, workload, contender, job, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    return int(json.loads(done.stdout))


def peak_above_start(workload: str, contender: str, job: str, threads: int) -> int:
    import torch
    from catalogue import build
    from peers import CONTENDERS

    torch.set_num_threads(threads)
    work = build(workload)
    # A run with two samples loads the kernels and starts the threads without raising the measured peak.
    few = replace(work, inputs=work.inputs[:2], targets=work.targets[:2])
    getattr(CONTENDERS[contender](few), job)()
    call = getattr(CONTENDERS[contender](work), job)
    release_free_memory()
    start = resident("VmRSS")
    forget_peak()
    for _ in range(CALLS):
        call()
    return resident("VmHWM") - start


def release_free_memory() -> None:
    """Return free memory to the system; free but resident memory would hide the memory of the job."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> int:
    """VmRSS (current) or VmHWM (peak). Not getrusage's ru_maxrss, which inherits the parent's peak through exec."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(peak_above_start(*sys.argv[1:4], threads=int(sys.argv[4]))))
