"""Accelerator and memory of this process: devices, TF32, copies between host and device, stored values of tensors,
bytes saved for backward, peak memory, out-of-memory errors, and the C library's allocator.

Devices are reached through torch's device modules (torch.cuda, torch.xpu, torch.mps, …). No function but `device_name`
initializes a device.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def accelerator() -> torch.device | None:
    """Return the accelerator of this machine, without an index; None if there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def device_function(device: torch.device, name: str) -> Any:
    """Return a function of the device's module, such as torch.cuda.mem_get_info; None if it has no such function."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)


def device_name(device: torch.device) -> str:
    """Return the device with the name of its model, as in "cuda:0: NVIDIA A100", if torch knows it."""
    name = device_function(device, "get_device_name")
    return str(device) if name is None else f"{device}: {name(device)}"


def has_float64(device: torch.device) -> bool:
    """True if the device has float64; MPS has not."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def has_tf32(device: torch.device) -> bool:
    """True for NVIDIA GPUs that can compute products of float32 numbers with a mantissa of 10 bits."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Let float32 products use TF32, or not, inside the block. PyTorch uses it in convolutions by default."""
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    places: tuple[Any, ...] = ()  # the same settings, and finer ones, since torch 2.9
    if hasattr(torch.backends.cudnn, "conv"):
        places = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    precisions = [place.fp32_precision for place in places]
    with warnings.catch_warnings(action="ignore"):  # some versions warn of the older settings
        try:
            flags = [backend.allow_tf32 for backend in backends]
        except RuntimeError:  # the caller has used the newer settings, which cannot be mixed with the older ones
            flags = []
        for backend, _ in zip(backends, flags, strict=False):
            backend.allow_tf32 = allowed
        for place in () if flags else places:
            place.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore"):
            for backend, flag in zip(backends, flags, strict=False):
                backend.allow_tf32 = flag
        for place, precision in zip(places, precisions, strict=True):
            place.fp32_precision = precision


def processor_name() -> str:
    """Return the model of the processor. On Linux, platform.processor() is often empty."""
    with suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


class DeviceGenerator:
    """Default random generator of an accelerator, with those methods of torch.Generator that save and restore it."""

    def __init__(self, device: torch.device):
        self.device = device

    def get_state(self) -> Tensor:
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def set_state(self, state: Tensor) -> None:
        torch.get_device_module(self.device).set_rng_state(state, self.device)


def device_generators() -> list[DeviceGenerator]:
    """Return the generators of all devices of the accelerator; none before its first use in this process."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    if hasattr(module, "is_initialized"):
        in_use = module.is_initialized()
    else:  # torch.mps
        in_use = module.is_available() and not module._is_in_bad_fork()
    return [DeviceGenerator(torch.device(kind.type, index)) for index in range(module.device_count() if in_use else 0)]


def seed_devices(seed: int) -> None:
    """Seed the generators of the accelerator; does nothing before its first use in this process."""
    generators = device_generators()
    if generators:
        module = torch.get_device_module(generators[0].device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


def empty_cache() -> None:
    """Return the memory that the accelerator's allocator holds without using it."""
    device = accelerator()
    release = None if device is None else device_function(device, "empty_cache")
    if release is not None:
        release()


# --- copies between host and device ----------------------------------------------------------------------------------


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device. A copy from the CPU does not wait for work queued on the device: torch copies
    pageable memory before it returns. MPS has no such copies.
    """
    from_host = tensor.device.type == "cpu" and device.type not in ("cpu", "mps")
    return tensor.to(device, non_blocking=from_host)


class HostCopy:
    """Copies of tensors on the host, started now and complete when they are read.

    The host waits in `read` only for work that the device has not done yet. A device without events is read with an
    ordinary copy, in which the host waits for all queued work.
    """

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]):
        self._event: Any = None
        self._tensors = list(tensors)
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        if len(devices) != 1:
            return
        device = next(iter(devices))
        module: Any = getattr(torch, device.type, None)  # such as torch.cuda; None for example for "xla"
        if not hasattr(module, "Event"):
            return
        self._event = module.Event()
        # torch copies to pinned memory, which does not block the host.
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        # Recorded on the stream of the copies: the current one of this device.
        if hasattr(module, "current_stream"):
            self._event.record(module.current_stream(device))
        else:
            self._event.record()

    def __reduce__(self) -> tuple[type[HostCopy], tuple[list[Tensor]]]:
        """Copies and pickles have the values: events cannot be copied."""
        return HostCopy, (self.read(),)

    def read(self) -> list[Tensor]:
        """The tensors on the CPU."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        self._event = None
        self._tensors = [tensor.cpu() for tensor in self._tensors]
        return self._tensors


# --- stored values ---------------------------------------------------------------------------------------------------


def is_plain(tensor: Tensor) -> bool:
    """True for a strided tensor, False for a sparse or nested one: torch has few operations for these."""
    return tensor.layout is torch.strided and not tensor.is_nested


def stored_values(tensor: Tensor) -> Tensor:
    """Strided tensor with the elements that a sparse or nested tensor stores; a strided tensor itself."""
    if is_plain(tensor):
        return tensor
    return tensor.detach()._values() if tensor.layout is torch.sparse_coo else tensor.detach().values()


# --- bytes saved for backward, and their budget ----------------------------------------------------------------------


class OverBudget(Exception):
    """The tensors saved for backward exceed the memory budget."""


class SavedBytes:
    """Counter of bytes saved for backward: `now` is the current number, `most` the peak.

    Parameters and buffers are not counted. Several views of the same memory are counted once.
    """

    def __init__(self, modules: Iterable[nn.Module], budget: float = math.inf):
        self.now = 0
        self.most = 0
        self._budget = budget
        tensors = (t for m in modules for t in (*m.parameters(), *m.buffers()))
        self._parameters = {stored_values(t).untyped_storage().data_ptr() for t in tensors}
        self._places: dict[tuple[int, int], tuple[int, int]] = {}  # -> number of saved views, bytes of the largest

    def hold(self, x: Tensor) -> HeldTensor:
        values = stored_values(x)
        storage = values.untyped_storage()
        if storage.data_ptr() in self._parameters:
            return HeldTensor(x)
        # A view of a whole dataset counts only the bytes that it covers.
        size = min(storage.nbytes(), values.numel() * values.element_size())
        place = storage.data_ptr(), int(values.storage_offset())
        holders, largest = self._places.get(place, (0, 0))
        self._places[place] = holders + 1, max(largest, size)
        self.now += max(0, size - largest)
        self.most = max(self.most, self.now)
        if self.now > self._budget:
            raise OverBudget
        return HeldTensor(x, partial(self._release, place))

    def _release(self, place: tuple[int, int]) -> None:
        holders, largest = self._places.pop(place)
        if holders > 1:
            self._places[place] = holders - 1, largest
        else:
            self.now -= largest


class HeldTensor:
    """Saved tensor that calls `release` when the graph frees it.

    A tensor with gradient is stored detached: an operation that saves its own output would otherwise form a reference
    cycle and never be freed. Autograd attaches the tensor again on unpacking. Other tensors are stored as they are,
    since a view that is unpacked has lost its base.
    """

    def __init__(self, tensor: Tensor, release: Callable[[], None] = lambda: None):
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        self._release = release

    def free(self) -> None:
        """Drop the tensor: unpacking it is an error from now on."""
        del self.tensor

    def __del__(self) -> None:
        self._release()


@contextmanager
def count_saved_bytes(*modules: nn.Module, budget: float = math.inf) -> Iterator[SavedBytes]:
    """Count the bytes saved for backward inside the block, until they are freed; raise OverBudget when they are more
    than `budget`. Parameters and buffers of the modules are not counted.

    Activations in checkpointed blocks are not counted, because they are recomputed and not saved.
    """
    saved = SavedBytes(modules, budget)
    with torch.autograd.graph.saved_tensors_hooks(saved.hold, lambda held: held.tensor):
        yield saved


def is_out_of_memory(error: BaseException) -> bool:
    """Test for OverBudget, an accelerator's out-of-memory error, or the RuntimeError of the CPU allocator."""
    return isinstance(error, (OverBudget, torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def free_memory(model: nn.Module) -> int:
    """Free memory in bytes on the device of the model's first parameter."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    memory_info = device_function(device, "mem_get_info")
    if memory_info is not None:
        return memory_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --- peak memory -----------------------------------------------------------------------------------------------------


def has_peak_counter(device: torch.device) -> bool:
    """True if the allocator of the device records its peak."""
    return device_function(device, "reset_peak_memory_stats") is not None


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of a call in bytes, beyond what was allocated before it; None if it cannot be measured.

    On an accelerator from the counters of its allocator. On the CPU, resident memory of the process: Linux only, and
    too coarse for calls that need only a few megabytes.
    """
    if has_peak_counter(device):
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        call()
        return module.max_memory_allocated(device) - before
    if device.type != "cpu" or not _forget_resident_peak():
        return None
    before = _resident_bytes("VmRSS")
    call()
    return max(0, _resident_bytes("VmHWM") - before)


def _forget_resident_peak() -> bool:
    """Return free memory to the system, which would hide the memory of a call, and reset the peak of resident memory.
    False if the system cannot do this.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError, TypeError):  # no glibc, or not Linux
        return False
    return True


def _resident_bytes(field: str) -> int:
    """VmRSS (current) or VmHWM (peak). Not getrusage's ru_maxrss, which inherits the parent's peak through exec."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


# --- allocator of the C library --------------------------------------------------------------------------------------

# Per-sample gradients keep gradients until the norms of all layers are known, and free them together. By default glibc
# returns such a block at the end of the heap to the operating system at once, and the next step pays for new pages: 5
# to 15 % of its time.

# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

_NEVER = 2**31 - 1  # bytes at the end of the heap before they are returned to the operating system
_LARGEST = 2**25  # bytes; larger tensors are returned as soon as they are freed. glibc accepts no larger value.


@cache
def keep_freed_memory() -> bool:
    """Keep freed memory of this process, once. False if it is left to the allocator: without glibc, or if the user has
    set the allocator with MALLOC_... or GLIBC_TUNABLES in the environment.
    """
    is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if is_set or platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LARGEST))
