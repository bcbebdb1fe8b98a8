"""Replay of the kernels of a compiled update from a loop in C.

Inductor's wrapper is Python code: for every call it allocates intermediate tensors and reads the address of each. A
small update takes longer there than in its kernels. One call is therefore recorded, with its kernels and library calls
and the addresses of their arguments, and a loop in C runs the following updates. This is valid while all tensors keep
their addresses.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samplewise.step.compiled import inductor
from samplewise.step.compiled.inductor import Kernel, replaced
from samplewise.step.compiled.optim import raw_view

CHUNK = 256  # maximum number of updates in one call, without checking guards in between
LARGE = 2**24  # bytes of intermediate tensors, which are not reused within an update, up to which it is recorded

Call: TypeAlias = "tuple[Kernel | LibraryCall, tuple[Tensor, ...]]"  # a kernel or library call and its arguments


class KernelReplay:
    """Recorded call `run(inputs)`; the last inputs are the batch, which is read from the row stored in a cell."""

    def __init__(
        self,
        calls: Sequence[Call],
        results: Sequence[Tensor],
        small: Sequence[Tensor],
        batch: Sequence[Tensor],
        *,
        samples: int,
        ages: bool,
    ):
        """`small`: tensors for first row, flag and scalars, which the loop writes and reads. `samples`: of an update.
        `ages`: each update has scalars of its own.
        """
        # The job holds addresses of these tensors and kernels, so they are kept alive here.
        self._calls = calls
        self._results = results
        self._small = small
        # C++ source of the loop over updates.
        lines = []
        for k, (kind, tensors) in enumerate(calls):
            function, values = f"job->kernels[{k}]", [f"arguments[{k}][{a}]" for a in range(len(tensors))]
            if isinstance(kind, LibraryCall):
                lines.append(f"if ({kind.source(function, values)}) return u;")
            else:
                lines.append(f"((void (*)({', '.join(['void*'] * len(tensors))})){function})({', '.join(values)});")
        self._drive = inductor.load_c(SOURCE.replace("CALLS", "\n            ".join(lines))).drive
        self._drive.restype = ctypes.c_int64
        self._drive.argtypes = [ctypes.c_void_p]  # only one, because converting each takes longer than a small update
        self._handles = Handles()
        # Arguments of a call: handles for a library call, addresses for a kernel.
        self._blocks = [
            (ctypes.c_void_p * len(tensors))(
                *(self._handles.of(tensors) if isinstance(kind, LibraryCall) else [t.data_ptr() for t in tensors])
            )
            for kind, tensors in calls
        ]
        self._holes = []  # arguments that are tensors of the batch
        for block, (_, tensors) in zip(self._blocks, calls, strict=True):
            for k, tensor in enumerate(tensors):
                self._holes += [(block, k, b) for b, data in enumerate(batch) if tensor is data]
        self._table = torch.zeros(CHUNK if ages else 1, small[2].numel(), dtype=torch.float64)
        self.numbers = raw_view(self._table)  # scalars of the next updates
        self._columns: list[Tensor] = []
        self._start = raw_view(small[0])
        self._job = self._make_job(samples, ages)

    def _make_job(self, samples: int, ages: bool) -> Any:
        start, flag, numbers = self._small
        count = len(self._results)
        self._sizes = (ctypes.c_int64 * count)(*(t.nbytes for t in self._results))
        self._sources = (ctypes.c_void_p * count)(*(t.data_ptr() for t in self._results))
        self._targets = (ctypes.c_void_p * count)()
        self._kernels = (ctypes.c_void_p * len(self._calls))(*(kind.address for kind, _ in self._calls))
        self._arguments = (ctypes.c_void_p * len(self._calls))(*map(ctypes.addressof, self._blocks))
        job = Job()
        job.start = start.data_ptr()
        job.flag = flag.data_ptr()
        job.numbers = numbers.data_ptr()
        job.table = self._table.data_ptr()
        job.width = numbers.numel()
        job.stride = numbers.numel() if ages else 0
        job.samples = samples
        job.results = count
        for name in ("sizes", "sources", "targets", "kernels", "arguments"):
            setattr(job, name, ctypes.addressof(getattr(self, f"_{name}")))
        self._address = ctypes.addressof(job)
        return job

    def feed(self, batch: Sequence[Tensor]) -> None:
        """Replace the addresses of the batch in the recorded arguments."""
        for block, k, b in self._holes:
            block[k] = batch[b].data_ptr()

    def fresh_columns(self) -> list[Tensor]:
        """Allocate tensors (CHUNK, ...) for the results of the next updates, one row per update."""
        self._columns = [torch.empty(CHUNK, *t.shape, dtype=t.dtype) for t in self._results]
        self._targets[:] = [column.data_ptr() for column in self._columns]
        self._job.row = 0
        return self._columns

    def __call__(self, start: int, updates: int) -> int:
        """Run updates of the samples from row `start` of the batch on; their results are the next rows of the columns.

        Returns the number of updates run before one was not finite or had an index out of range.
        """
        self._start[0] = start
        self._job.updates = updates
        return self._drive(self._address)


class Job(ctypes.Structure):
    """Arguments of the C loop; same fields as `struct Job` in SOURCE."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("start", "flag", "numbers", "table")),
        *((name, ctypes.c_int64) for name in ("width", "stride", "samples", "updates", "row", "results")),
        *((name, ctypes.c_void_p) for name in ("sizes", "sources", "targets", "kernels", "arguments")),
    ]


def record(
    run: inductor.Compiled, bound: Sequence[Tensor], batch: Sequence[Tensor]
) -> tuple[list[Call], Sequence[Tensor]] | None:
    """Run once and return the calls and the results; None if `run` does anything besides calling kernels and matrix
    products of libraries, or has large intermediate tensors.
    """
    module = inductor.wrapper_module(run)
    kernels = {name: kernel for name, kernel in vars(module).items() if isinstance(kernel, Kernel)} if module else {}
    calls: list[Call] = []
    recorders = {name: _recorder(kernel, calls) for name, kernel in kernels.items()}
    with replaced(module, recorders), CallRecorder(calls) as recorder:
        results = run([*bound, *batch])
    arguments = [argument for _, tensors in calls for argument in tensors]
    if not calls or recorder.other_operations or not all(isinstance(argument, Tensor) for argument in arguments):
        return None
    inputs = {t.untyped_storage().data_ptr() for t in (*bound, *batch)}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in arguments}
    intermediate = sum(size for address, size in sizes.items() if address not in inputs)
    return (calls, results) if intermediate <= LARGE and _can_be_fed(calls, results, batch) else None


def _can_be_fed(calls: Sequence[Call], results: Sequence[Tensor], batch: Sequence[Tensor]) -> bool:
    """Test whether the recorded batch can be replaced and results can be copied.

    Arguments and results must not be views of the batch's memory, library calls must not read the batch, and results
    must be contiguous.
    """
    memory = {t.untyped_storage().data_ptr() for t in batch}
    ids = {id(t) for t in batch}
    strays = [t for kind, tensors in calls for t in tensors if isinstance(kind, LibraryCall) or id(t) not in ids]
    fed = not any(t.untyped_storage().data_ptr() in memory for t in (*strays, *results))
    return fed and all(t.is_contiguous() for t in results)


def _recorder(kernel: Kernel, calls: list[Call]) -> Callable[..., None]:
    """Function that calls the kernel and adds the call to `calls`."""

    def call(*tensors: Tensor) -> None:
        calls.append((kernel, tensors))
        kernel(*tensors)

    return call


class CallRecorder(TorchDispatchMode):
    """Add matrix products to `calls`, and count other dispatched operations, which a recording cannot contain."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls
        self.other_operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = as_library_call(function, args, kwargs)
        if call is None:
            self.other_operations += 1
        else:
            self.calls.append(call)
        return function(*args, **kwargs)


SOURCE = r"""
#include <stdint.h>
#include <string.h>

struct Job {
    int64_t* start; double* flag; double* numbers; const double* table;
    int64_t width, stride, samples, updates, row, results;
    const int64_t* sizes; const char** sources; char** targets; void** kernels; void*** arguments;
};

static bool finite(const double* number) {  // by its bits: the compiler may be told that all numbers are
    uint64_t bits;
    memcpy(&bits, number, 8);
    return ((bits >> 52) & 0x7ff) != 0x7ff;
}

extern "C" int64_t drive(Job* job) {
    void*** arguments = job->arguments;
    for (int64_t u = 0; u < job->updates; u++, job->row++, *job->start += job->samples) {
        memcpy(job->numbers, job->table + u * job->stride, job->width * 8);
        try {
            CALLS
        } catch (...) {  // an index out of range: nothing has been written yet
            return u;
        }
        if (!finite(job->flag)) return u;
        for (int64_t r = 0; r < job->results; r++)
            memcpy(job->targets[r] + job->row * job->sizes[r], job->sources[r], job->sizes[r]);
    }
    return job->updates;
}
"""


# --- library calls ----------------------------------------------------------------------------------------------------

# Matrix products are called through the C interface of libtorch, whose functions take handles, which are pointers to
# at::Tensor objects, and return zero on success.
aten = torch.ops.aten
SYMBOLS = {
    aten.mm.out: "aoti_torch_cpu_mm_out",
    aten.bmm.out: "aoti_torch_cpu_bmm_out",
    aten.addmm.out: "aoti_torch_cpu_addmm_out",
    aten.baddbmm.out: "aoti_torch_cpu_baddbmm_out",
}
DELETE = "aoti_torch_delete_tensor_object"


@dataclass(frozen=True)
class LibraryCall:
    """C function of a matrix product; `numbers` are its last arguments, beta and alpha."""

    symbol: str
    numbers: tuple[float, ...]

    def source(self, function: str, tensors: Sequence[str]) -> str:
        """C expression of the call, which is true if it fails."""
        types = ["void*"] * len(tensors) + ["double"] * len(self.numbers)
        values = [*tensors, *map(repr, self.numbers)]
        return f"((int32_t (*)({', '.join(types)})){function})({', '.join(values)})"

    @property
    def address(self) -> int:
        address = inductor.libtorch_function(self.symbol)
        assert address is not None
        return address


def as_library_call(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[LibraryCall, tuple[Tensor, ...]] | None:
    """Return the C function of a dispatched operation and its tensors; None if there is none."""
    symbol = SYMBOLS.get(function)
    if symbol is None or None in map(inductor.libtorch_function, (symbol, DELETE)):
        return None
    weighed = function in (aten.addmm.out, aten.baddbmm.out)
    numbers = (float(kwargs.get("beta", 1)), float(kwargs.get("alpha", 1))) if weighed else ()
    return LibraryCall(symbol, numbers), (kwargs["out"], *args)


class Handles:
    """Handles of tensors, deleted together with this object."""

    def __init__(self) -> None:
        self._handles: list[int] = []
        delete = inductor.libtorch_function(DELETE)
        if delete is not None:  # otherwise `as_library_call` finds none
            weakref.finalize(self, inductor.delete_tensor_handles, delete, self._handles)

    def of(self, tensors: Sequence[Tensor]) -> list[int]:
        handles = inductor.tensor_handles(tensors)
        self._handles += handles
        return handles
