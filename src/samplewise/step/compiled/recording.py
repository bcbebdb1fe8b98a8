"""The kernels of one call, played again: as long as every tensor stays where it is, nothing else need be done.

The compiler's own wrapper is Python: it makes tensors for what is in between, and takes the address of each, for every
update anew. A small update takes longer there than in its kernels. So one call is recorded, with its kernels and their
addresses, and a loop in C makes as many updates as there are rows.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samplewise.step.compiled import inductor
from samplewise.step.compiled.cells import cells

CHUNK = 256  # updates that are made without a look at the world

Call = tuple[Any, tuple[Tensor, ...]]  # a kernel and what it was called with


class Recording:
    """Of a call `run(inputs)` that reads rows of the batch, its last inputs, from the row that is in `cells`."""

    def __init__(
        self, calls: Sequence[Call], results: Sequence[Tensor], small: Sequence[Tensor], batch: Sequence[Tensor]
    ):
        """`small`: first row, flag and numbers, which the loop writes and reads."""
        self._calls, self._results, self._small = calls, results, small  # kept: their addresses are in the job
        self._drive = inductor.load_c(_source([len(given) for _, given in calls])).drive
        self._drive.restype = ctypes.c_int64
        self._drive.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
        self._arguments = [(ctypes.c_void_p * len(given))(*(t.data_ptr() for t in given)) for _, given in calls]
        self._holes = [
            (self._arguments[c], k, b)
            for c, (_, given) in enumerate(calls)
            for k, tensor in enumerate(given)
            for b, wanted in enumerate(batch)
            if tensor is wanted
        ]
        self.table = torch.zeros(CHUNK, small[2].numel(), dtype=torch.float64)  # the numbers of the updates to come
        self.numbers = cells(self.table)
        self._columns: list[Tensor] = []
        self._job = self._make_job()

    def _make_job(self) -> Any:
        start, flag, numbers = self._small
        count = len(self._results)
        self._sizes = (ctypes.c_int64 * count)(*(t.nbytes for t in self._results))
        self._found = (ctypes.c_void_p * count)(*(t.data_ptr() for t in self._results))
        self._kept = (ctypes.c_void_p * count)()
        self._kernels = (ctypes.c_void_p * len(self._calls))(
            *(inductor.address_of(kernel) for kernel, _ in self._calls)
        )
        self._given = (ctypes.c_void_p * len(self._calls))(*map(ctypes.addressof, self._arguments))
        job = Job()
        job.start, job.flag, job.numbers = start.data_ptr(), flag.data_ptr(), numbers.data_ptr()
        job.table, job.width, job.results = self.table.data_ptr(), numbers.numel(), count
        for name in ("sizes", "found", "kept", "kernels", "given"):
            setattr(job, name, ctypes.addressof(getattr(self, f"_{name}")))
        self._address = ctypes.addressof(job)
        return job

    def feed(self, batch: Sequence[Tensor]) -> None:
        for arguments, k, b in self._holes:
            arguments[k] = batch[b].data_ptr()

    def fresh_columns(self) -> list[Tensor]:
        """Where the results of the next updates go, one row each."""
        self._columns = [torch.empty(CHUNK, *t.shape, dtype=t.dtype) for t in self._results]
        self._kept[:] = [column.data_ptr() for column in self._columns]
        return self._columns

    def __call__(self, start: int, step: int, updates: int, row: int) -> int:
        """Makes updates from row `start` of the batch on, every `step` rows; results go from `row` of the columns on.
        Returns how many were made before one was not finite or had an index out of range.
        """
        return self._drive(self._address, start, step, updates, row)


class Job(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("start", "flag", "numbers", "table")),
        *((name, ctypes.c_int64) for name in ("width", "results")),
        *((name, ctypes.c_void_p) for name in ("sizes", "found", "kept", "kernels", "given")),
    ]


def record(
    run: inductor.Compiled, bound: Sequence[Tensor], batch: Sequence[Tensor]
) -> tuple[list[Call], Sequence[Tensor]] | None:
    """The kernels that `run` calls, and its results; None if it does anything else."""
    module = sys.modules.get(type(getattr(run, "__self__", None)).__module__)
    kernels = {name: kernel for name, kernel in vars(module).items() if inductor.is_kernel(kernel)} if module else {}
    calls: list[Call] = []
    with _replaced(module, {name: _noting(kernel, calls) for name, kernel in kernels.items()}), Nothing() as others:
        results = run([*bound, *batch])
    given = [thing for _, things in calls for thing in things]
    fit = calls and not others.seen and all(isinstance(thing, Tensor) for thing in given)
    return (calls, results) if fit and _can_be_fed(given, results, batch) else None


def _can_be_fed(given: Sequence[Tensor], results: Sequence[Tensor], batch: Sequence[Tensor]) -> bool:
    """Whether another batch can take the place of this one: what lies in its memory is the batch itself. And whether
    results can be copied as they are.
    """
    memory, known = {t.untyped_storage().data_ptr() for t in batch}, {id(t) for t in batch}
    strays = [t for t in given if id(t) not in known] + list(results)
    fed = not any(t.untyped_storage().data_ptr() in memory for t in strays)
    return fed and all(t.is_contiguous() for t in results)


def _noting(kernel: Any, calls: list[Call]) -> Callable[..., None]:
    def called(*given: Tensor) -> None:
        calls.append((kernel, given))
        kernel(*given)

    return called


@contextmanager
def _replaced(module: Any, others: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in others}
    try:
        for name, other in others.items():
            setattr(module, name, other)
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


class Nothing(TorchDispatchMode):
    """Sees operations that are no kernels of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


def _source(arities: Sequence[int]) -> str:
    """A loop over updates that calls kernels of so many arguments, one after the other."""
    calls = []
    for k, arity in enumerate(arities):
        types, values = ", ".join(["void*"] * arity), ", ".join(f"given[{k}][{a}]" for a in range(arity))
        calls.append(f"((void (*)({types}))job->kernels[{k}])({values});")
    return SOURCE.replace("CALLS", "\n            ".join(calls))


SOURCE = r"""
#include <stdint.h>
#include <string.h>

struct Job {
    int64_t* start; double* flag; double* numbers; const double* table;
    int64_t width, results;
    const int64_t* sizes; const char** found; char** kept; void** kernels; void*** given;
};

static bool finite(const double* number) {  // by its bits: the compiler may be told that all numbers are
    uint64_t bits;
    memcpy(&bits, number, 8);
    return ((bits >> 52) & 0x7ff) != 0x7ff;
}

extern "C" int64_t drive(Job* job, int64_t start, int64_t step, int64_t updates, int64_t row) {
    void*** given = job->given;
    for (int64_t u = 0; u < updates; u++) {
        *job->start = start + u * step;
        memcpy(job->numbers, job->table + u * job->width, job->width * 8);
        try {
            CALLS
        } catch (...) {  // an index out of range: nothing has been written yet
            return u;
        }
        if (!finite(job->flag)) return u;
        for (int64_t r = 0; r < job->results; r++)
            memcpy(job->kept[r] + (row + u) * job->sizes[r], job->found[r], job->sizes[r]);
    }
    return updates;
}
"""
