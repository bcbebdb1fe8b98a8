"""Exported updates: size of the file, memory, and time of an update in C++, beside a plain loop in Python.

    python benchmarks/export.py           # prints the table of docs/export.md
    python benchmarks/export.py --write   # replaces it there

One sample per update, gradients clipped to norm 1, one thread. The C++ program is compiled with the headers and
libraries of the installed executorch package, which contain its optimized kernels. Times are medians of 7 repetitions
of 1,000 updates of the file and 200 of the loop, one after the other.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import samplewise as sw

DOCS = Path(__file__).parents[1] / "docs" / "export.md"
REPETITIONS = 7


class Transformer(nn.Module):
    """One layer, width 32, 4 heads, 16 tokens, classification."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()),
        nn.Linear(16 * 49, 10),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "Linear 10-10": (lambda: nn.Linear(10, 10), lambda: torch.randn(1, 10)),
    "MLP 64-128-128-10": (mlp, lambda: torch.randn(1, 64)),
    "CNN 28×28": (cnn, lambda: torch.randn(1, 1, 28, 28)),
    "transformer 16×32": (Transformer, lambda: torch.randint(0, 64, (1, 16))),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}

RUNNER = r"""
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
using namespace executorch::extension;
using Clock = std::chrono::steady_clock;

int main(int, char** arguments) {
    Module program(arguments[1], Module::LoadMode::File, nullptr, nullptr, nullptr, true);
    if (program.load_method("update") != executorch::runtime::Error::Ok) return 1;
    auto meta = program.method_meta("update");
    std::vector<std::vector<char>> data;
    std::vector<TensorPtr> tensors;
    std::vector<executorch::runtime::EValue> inputs;
    for (size_t k = 0; k < meta->num_inputs(); k++) {
        auto info = *meta->input_tensor_meta(k);
        data.emplace_back(info.nbytes());
        if (info.scalar_type() == executorch::aten::ScalarType::Float)
            for (size_t i = 0; i < info.nbytes() / 4; i++)
                reinterpret_cast<float*>(data.back().data())[i] = 0.001f + (i % 7) * 0.01f;
        std::vector<executorch::aten::SizesType> sizes(info.sizes().begin(), info.sizes().end());
        tensors.push_back(from_blob(data.back().data(), sizes, info.scalar_type()));
        inputs.push_back(tensors.back());
    }
    auto started = Clock::now();
    for (int k = 0; k < 1000; k++)
        if (!program.execute("update", inputs).ok()) return 2;
    printf("%f\n", std::chrono::duration<double, std::micro>(Clock::now() - started).count() / 1000);
}
"""


def runner(directory: Path) -> Path:
    """Compile the C++ program."""
    package = Path(sysconfig.get_path("purelib")) / "executorch"
    (directory / "run.cpp").write_text(RUNNER)
    flags = [
        f"-I{package}/include",
        f"-I{package}/include/executorch/runtime/core/portable_type/c10",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        *(f"-L{package}/lib", f"-Wl,-rpath,{package}/lib", "-lexecutorch"),
        *("-Wl,--no-as-needed", "-lexecutorch_kernels_optimized", "-lexecutorch_threadpool"),
    ]
    command = ["g++", "-std=c++17", "-O2", "-w", str(directory / "run.cpp"), "-o", str(directory / "run"), *flags]
    subprocess.run(command, check=True)
    return directory / "run"


def microseconds_of_file(program: Path, path: Path) -> float:
    """Time of an update in the C++ program, on one core."""
    command = [str(program), str(path)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Time of an update in microseconds."""
    criterion = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for _ in range(200):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return (time.perf_counter() - started) / 200 * 1e6


def row(name: str, optimizer_name: str, program: Path, directory: Path) -> str:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    make_optimizer = OPTIMIZERS[optimizer_name]
    model = make()
    x, y = inputs(), torch.tensor([1])
    optimizer = make_optimizer(model.parameters())
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=1, transforms=[sw.clip(1.0)])
    path = directory / "update.pte"
    with contextlib.redirect_stdout(sys.stderr):
        summary = sw.export_update(step, path, (x, y))
    times: list[tuple[float, float]] = []
    for _ in range(REPETITIONS):
        times.append((microseconds_of_file(program, path), plain_loop(model, optimizer, x, y)))
    exported, loop = (statistics.median(values) for values in zip(*times, strict=True))
    size = sum(p.numel() for p in model.parameters())
    numbers = [f"{n:,}" for n in (size, summary.bytes, summary.mutable, summary.scratch or 0)]
    return f"| {name} | {optimizer_name} | {' | '.join(numbers)} | {exported:.0f} | {loop:.0f} |"


def main() -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the kernels of executorch would use several threads
    lines = [
        "| model | optimizer | parameters | file | state | intermediate results | update, µs | plain loop, µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        program = runner(directory)
        for name in MODELS:
            for optimizer in OPTIMIZERS:
                lines.append(row(name, optimizer, program, directory))
                print(lines[-1], flush=True)
    if "--write" in sys.argv:
        text = DOCS.read_text()
        table = "\n".join(lines)
        DOCS.write_text(
            re.sub(r"<!-- table -->.*<!-- end -->", f"<!-- table -->\n{table}\n<!-- end -->", text, flags=re.DOTALL)
        )


if __name__ == "__main__":
    main()
