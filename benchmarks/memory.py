"""Peak memory of one job in a fresh process: maximum resident size minus resident size before the job.

python memory.py WORKLOAD CONTENDER JOB THREADS prints bytes as JSON. Linux only.
"""

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace

import isolated

CALLS = 2  # including the first call, which must fit into memory, too


def measure(workload: str, contender: str, job: str, threads: int) -> int:
    """Peak memory in bytes, measured in a new process."""
    return int(isolated.call(__file__, workload, contender, job, threads))


def peak_of_job(workload: str, contender: str, job: str, threads: int) -> int:
    import torch
    from catalog import build
    from peers import CONTENDERS

    torch.set_num_threads(threads)
    work = build(workload)
    # A run with two samples loads the kernels and starts the threads without raising the measured peak.
    few = replace(work, inputs=work.inputs[:2], targets=work.targets[:2])
    getattr(CONTENDERS[contender](few), job)()
    return peak_above_start(getattr(CONTENDERS[contender](work), job))


def peak_above_start(call: Callable[[], object]) -> int:
    """Peak resident memory in bytes during calls, minus the resident memory before them."""
    import torch

    from samplewise.core.memory import peak_bytes

    def calls() -> None:
        for _ in range(CALLS):
            call()

    peak = peak_bytes(calls, torch.device("cpu"))
    assert peak is not None, "peak memory is measured on Linux only"
    return peak


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(peak_of_job(*sys.argv[1:4], threads=int(sys.argv[4]))))
