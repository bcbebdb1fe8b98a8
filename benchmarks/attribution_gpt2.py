"""EK-FAC of GPT-2 small (random weights): CPU seconds and memory of the fit, `save` and `load`.

    python benchmarks/attribution_gpt2.py [samples] [labels] [layers]

Samples have 64 tokens. CPU time on one thread, because it does not depend on other processes. Peaks are those of the
resident memory of the process, sampled every 20 ms, above the memory before the stage.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import transformers

import samplewise as sw
from samplewise.attribution import EKFAC
from samplewise.integrations.transformers_losses import ModelLoss

TOKENS = 64


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


@contextlib.contextmanager
def measured(stage):
    done = threading.Event()
    sizes = [resident()]

    def sample():
        while not done.wait(0.02):
            sizes.append(resident())

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.process_time()
    yield
    seconds = time.process_time() - start
    done.set()
    thread.join()
    print(f"{stage:20} {seconds:6.1f} s, peak {max(sizes) - sizes[0]:.2f} GB above {sizes[0]:.2f} GB", flush=True)


def timed(totals, name, function):
    def run(*args, **kwargs):
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            totals[name] = totals.get(name, 0) + time.process_time() - start

    return run


def main(samples=8, labels="expected", layers=12):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=int(layers))
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, config.vocab_size, (int(samples), TOKENS))
    loader = [{"input_ids": ids, "labels": ids}]
    totals = {}
    torch.linalg.eigh = timed(totals, "eigendecompositions", torch.linalg.eigh)
    with measured("fit"):
        curvature = sw.ekfac(model, ModelLoss(), loader, labels=labels, microbatch=None)
    for name, seconds in totals.items():
        print(f"  {name:18} {seconds:6.1f} s")
    print(curvature)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "curvature.safetensors"
        with measured("save"):
            curvature.save(path)
        print(f"file: {path.stat().st_size / 1e9:.2f} GB")
        del curvature
        with measured("load"):
            EKFAC.load(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
