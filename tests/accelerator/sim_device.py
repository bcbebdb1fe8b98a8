"""Simulated accelerator: a device "sim" in Python, for tests of device placement, host waits, random numbers and noise.

Its tensors hold CPU data, so that every op of torch runs and gives the CPU's numbers. Otherwise it behaves like a GPU:

    placement       CPU tensors among device tensors are an error, except scalars and indices
    backward        autograd runs on a thread of the device
    host waits      each wait of the host for the device is recorded in `WAITS`, with the line that caused it
    copies          a copy to the CPU with non_blocking=True holds wrong values until the host waits for the device
    sync debug mode warns of host waits, as torch.cuda.set_sync_debug_mode("warn") does
    memory          peak of the bytes of tensors, from `reset_peak_memory_stats` until it is read
    random numbers  come from the generator of the device, `torch.sim.default_generators[0]`
    autocast        casts the ops that a GPU casts, in both directions
    rounding        `rounding_noise` adds errors to sums, because their order is not fixed on a GPU
    TF32            products of float32 have factors with 10 bits if torch.backends.cuda.matmul allows it

`register` changes the whole process, for good: autograd starts the threads of all devices at the first backward pass,
torch asks the device in `torch.manual_seed`, and a process with such threads cannot be forked before a backward pass.
Hence these tests run in a process of their own: see conftest.py.
"""

import sys
import threading
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
NAME = "sim"

# ------------------------------------------------------------------------------------------------------- host waits

WAITS = Counter()  # (kind of wait, file:line function of the library, or "caller") -> number
THREADS = set()  # names of the threads that ran ops of the device


def waited(kind):
    """Record a wait of the host. The device has then done all its work, including the copies to the CPU."""
    WAITS[kind, _place()] += 1
    if _sync_debug_mode[0] == "warn" and kind != "synchronize":  # CUDA does not warn of waits that are asked for
        warnings.warn("called a synchronizing sim operation", stacklevel=2)
    _finish_copies()


_sync_debug_mode = ["default"]


@contextmanager
def counted_waits():
    """Yield a Counter that has the waits of the block after its end: (kind, place) -> number."""
    before = Counter(WAITS)
    found = Counter()
    yield found
    found.update(WAITS - before)


def _place():
    """Innermost line of the library, or the function of the caller: "engine/ownership/probe.py:76 _probe_with"."""
    frame = sys._getframe(2)
    while frame is not None:
        _, library, file = frame.f_code.co_filename.rpartition("/samplewise/")
        if library:
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "caller"


# Ops whose result has a size that depends on data, or that read a flag: the host waits for it.
READS = {
    "aten::_local_scalar_dense": "item",
    "aten::equal": "equal",
    "aten::is_nonzero": "bool",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::bincount": "bincount",
    "aten::_unique": "unique",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::unique_dim_consecutive": "unique",
    "aten::_linalg_check_errors": "linalg",
    "aten::histc": "histc",
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}

PACKING = "aten::_pack_padded_sequence"
TAKE_CPU_TENSORS = {*INDEXING, PACKING, f"{PACKING}_backward", "aten::_pad_packed_sequence"}  # indices, lengths


def _note_waits(name, args, kwargs):
    if name in READS:
        waited(READS[name])
    elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        waited("repeat_interleave")
    elif name in INDEXING:
        indices = [i for i in args[1] if i is not None]
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
            waited("index by a mask")
        elif not all(map(on_device, indices)):
            waited("copy to the device")


# ------------------------------------------------------------------------------------------------------------ copies

_copies = []  # (CPU tensor, its values): asynchronous copies that have not arrived


def _start_copy(target, values):
    """Fill the CPU tensor with wrong values; the right ones arrive with the next wait of the host."""
    with torch.no_grad():
        if target.is_floating_point() or target.is_complex():
            target.fill_(float("nan"))
        elif target.dtype is torch.bool:
            target.copy_(~values)
        else:
            target.fill_(torch.iinfo(target.dtype).max)
    _copies.append((target, values))


def _finish_copies(number=None):
    """Write the values of the oldest copies, all by default."""
    done = _copies[:number]
    del _copies[:number]
    for target, values in done:
        with torch.no_grad():
            target.copy_(values)


LAG = 20  # ops; the device has done all ops before the last ones in its queue
_queued = [0]  # number of ops that the device was given


class Event:
    """Event in the queue of the device, like torch.cuda.Event."""

    def __init__(self, *args, **kwargs):
        self._copies = None

    def record(self, stream=None):
        self._copies = [id(target) for target, _ in _copies]
        self._recorded = _queued[0]

    def query(self):
        """True if the device has passed the event: if LAG ops or more were queued after it."""
        if self._copies and _queued[0] >= self._recorded + LAG:
            self._arrive()
        return not self._copies

    def synchronize(self):
        if self._copies is not None:
            WAITS["event", _place()] += 1
            self._arrive()

    def _arrive(self):
        late = [k for k, (target, _) in enumerate(_copies) if id(target) in self._copies]
        _finish_copies(max(late) + 1 if late else 0)
        self._copies = []


# ----------------------------------------------------------------------------------------------------- random numbers


_generators = {}  # of the device, by address: ops receive another Python object. Kept, so that no address is used twice


class Generator(torch.Generator):
    """Random generator of the device: torch.Generator("sim") cannot be made in Python."""

    def __init__(self):
        _generators[self._cdata] = self

    def manual_seed(self, seed):
        super().manual_seed(seed)
        return self

    @property
    def device(self):
        return torch.device(NAME, 0)


_generator = Generator()


def _drawn(func, args, kwargs):
    """Run an op that draws random numbers, with the generator of the device."""
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]
    if any(g._cdata not in _generators for g in given):
        raise RuntimeError(f"Expected a 'sim' device type for generator but found 'cpu' in {func}")
    if given:
        return func(*args, **kwargs)
    outside = torch.default_generator.get_state()
    torch.default_generator.set_state(_generator.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        _generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(outside)


# ----------------------------------------------------------------------------------------------------- rounding noise

SUMS = {
    *("mm addmm bmm baddbmm addbmm addmv mv dot sum mean cumsum var var_mean std logsumexp linalg_vector_norm").split(),
    *("convolution convolution_backward index_add index_add_ scatter_add scatter_add_ index_put index_put_").split(),
    *("_index_put_impl_ embedding_dense_backward _embedding_bag _embedding_bag_dense_backward").split(),
    *("native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward").split(),
    *("native_batch_norm_backward _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data").split(),
    *("linear linear_backward avg_pool2d_backward _adaptive_avg_pool2d_backward upsample_bilinear2d_backward").split(),
    *("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward").split(),
}
_noise = 0.0  # relative error of each term of a sum, in units of the last place
_errors = torch.Generator().manual_seed(0)


@contextmanager
def rounding_noise(ulps):
    """Inside the block, the terms of each sum have random relative errors of up to `ulps` units in the last place.

    This bounds the errors that another order of the terms causes: it is larger where terms cancel.
    """
    global _noise
    _noise, before = ulps, _noise
    try:
        yield
    finally:
        _noise = before


def _perturbed(x):
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    real = x.dtype.to_real()
    size = _noise * torch.finfo(real).eps
    error = torch.rand(x.shape, generator=_errors, dtype=torch.float64).mul_(2 * size).sub_(size)
    return (x * (1 + error).to(real)).as_strided(x.shape, x.stride()) if x.is_contiguous() else x * (1 + error).to(real)


# --------------------------------------------------------------------------------------------------------------- TF32

# Op -> number of the first factor, and of factors.
PRODUCTS = {"mm": (0, 2), "bmm": (0, 2), "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2), "linear": (0, 2)}
PRODUCTS |= {"convolution": (0, 2), "convolution_backward": (0, 3), "linear_backward": (0, 3)}
PRODUCTS |= {"_scaled_dot_product_flash_attention_for_cpu": (0, 3)}
PRODUCTS |= {"_scaled_dot_product_flash_attention_for_cpu_backward": (0, 4)}


def _with_tf32(name, args):
    """Arguments of an op, with factors of 10 bits if it is a product."""
    if name not in PRODUCTS or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return args
    first, number = PRODUCTS[name]
    return (*args[:first], *map(_ten_bits, args[first : first + number]), *args[first + number :])


def _is_half(x):
    return isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16)


def _ten_bits(x):
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32:
        return x
    with torch.no_grad():
        bits = x.detach().contiguous().view(torch.int32)
        rounded = ((bits + (1 << 12)) & -(1 << 13)).view(torch.float32)
        return torch.where(x.isfinite(), rounded, x)


# ------------------------------------------------------------------------------------------------------------- memory

_storages = {}  # address -> (weak reference, bytes)
_memory = {"counts": False, "peak": 0}


def _allocated():
    """Bytes of the living storages that were made since counting began."""
    for place in [place for place, (storage, _) in _storages.items() if storage.expired()]:
        del _storages[place]
    return sum(size for _, size in _storages.values())


def _count_memory(storage):
    _storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
    _memory["peak"] = max(_memory["peak"], _allocated())


# ------------------------------------------------------------------------------------------------------------ tensors


class SimTensor(torch.Tensor):
    """Tensor on the device; `raw` is the CPU tensor with its values, which only tests may read without a wait."""

    @staticmethod
    def __new__(cls, raw):
        raw = raw.resolve_conj().resolve_neg()  # the flags of lazy conjugation and negation are not those of a wrapper
        layout = dict(strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype)
        tensor = cls._make_wrapper_subclass(cls, raw.size(), device=torch.device(NAME, 0), **layout)
        tensor.raw = raw
        if _memory["counts"]:
            _count_memory(raw.untyped_storage())
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.raw = value.raw

    def untyped_storage(self):
        return self.raw.untyped_storage()

    def tolist(self):
        waited("tolist")
        return self.raw.tolist()

    def new_tensor(self, data, dtype=None, device=None, requires_grad=False):
        tensor = torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)
        return tensor.requires_grad_(requires_grad)

    def __getitem__(self, index):
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index, value):
        super().__setitem__(_without_lists(index), value)

    def numpy(self, **kwargs):
        raise TypeError("can't convert sim:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor first.")

    def __array__(self, *args):
        return self.numpy()

    def __format__(self, spec):
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, **kwargs):
        return f"SimTensor({self.raw.detach()!r})"


def _without_lists(index):
    """Index with tensors in place of lists, which torch cannot convert for a Python backend."""
    if isinstance(index, tuple):
        return tuple(torch.tensor(i, device=NAME) if isinstance(i, list) else i for i in index)
    return torch.tensor(index, device=NAME) if isinstance(index, list) else index


def on_device(x):
    return isinstance(x, SimTensor)


def raw(x):
    """CPU tensor with the values of a device tensor, without a recorded wait; other values unchanged."""
    return x.raw if on_device(x) else x


def run(func, args, kwargs):
    """Run an op of the device on the CPU data of its tensors."""
    THREADS.add(threading.current_thread().name)
    _queued[0] += 1
    name = func._schema.name
    if name == "aten::_to_copy":
        return _to_copy(func, *args, **kwargs)
    if name == "aten::copy_":
        return _copy(*args, **kwargs)
    _check_placement(name, args, kwargs)
    _note_waits(name, args, kwargs)
    kwargs = {key: CPU if key == "device" else value for key, value in kwargs.items()}
    own = {id(a.raw): a for a in tree_leaves((args, kwargs)) if on_device(a)}
    result = _computed(func, *tree_map(raw, (args, kwargs)))
    if name == PACKING:
        return SimTensor(result[0]), result[1]  # the lengths stay on the CPU
    return tree_map(lambda x: _on_device(x, own), result)


def _computed(func, args, kwargs):
    if func._schema.name in CELLS:
        return CELLS[func._schema.name](*args, **kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _drawn(func, args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    args = _with_tf32(name, args)
    if _noise and name in PRODUCTS and any(_is_half(a) for a in args):
        # GPUs add products of half precision in float32, and round the sum.
        dtype = next(a.dtype for a in args if _is_half(a))
        single = [_perturbed(a.float()) if _is_half(a) else a for a in args]
        return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) else x, func(*single, **kwargs))
    if _noise and name in SUMS:
        target = 1 if func._schema.is_mutable else 0
        args = (*args[:target], *tree_map(_perturbed, args[target:]))
    return func(*args, **kwargs)


def _on_device(x, own):
    """Device tensor for a result: the argument itself if an in-place op returns it."""
    if not isinstance(x, torch.Tensor):
        return x
    if id(x) not in own:
        return SimTensor(x)
    tensor = own[id(x)]
    if tensor.shape != x.shape or tensor.stride() != x.stride():
        tensor.data = SimTensor(x)  # ops such as transpose_ change the shape in place
    return tensor


def _check_placement(name, args, kwargs):
    for x in tree_leaves((args[:1] if name in TAKE_CPU_TENSORS else args, kwargs)):
        if isinstance(x, torch.Tensor) and not on_device(x) and x.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu! "
                f"({name}, CPU tensor of shape {tuple(x.shape)})"
            )


def _to_copy(func, source, *, device=None, non_blocking=False, **kwargs):
    to_device = torch.device(device or source.device).type == NAME
    values = func(raw(source), **kwargs)
    if on_device(source) and to_device:
        return SimTensor(values)
    if to_device:
        _note_copy("copy to the device", non_blocking)
        return SimTensor(values)
    if not non_blocking:
        waited("copy to the CPU")
        return values
    target = torch.empty_like(values)
    _start_copy(target, values)
    return target


def _copy(target, source, non_blocking=False):
    if on_device(target) and not on_device(source) and source.dim() > 0:
        _note_copy("copy to the device", non_blocking)
    if on_device(source) and not on_device(target):
        if non_blocking:
            _start_copy(target, raw(source).to(target.dtype).expand_as(target).clone())
            return target
        waited("copy to the CPU")
    raw(target).copy_(raw(source))
    return target


def _note_copy(kind, non_blocking):
    """A blocking copy to the device waits as well: torch synchronizes the stream after a copy from pageable memory."""
    if not non_blocking:
        waited(kind)


# ---------------------------------------------------------------------------------------------------- recurrent cells
# torch has these kernels for accelerators only. `workspace` is what the backward kernel needs.


def _lstm_cell(gates, hidden, cx, bias=None, hidden_bias=None):
    for part in (hidden, bias, hidden_bias):
        gates = gates if part is None else gates + part
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    c = hy * o * (1 - cy.tanh().square()) + (0 if grad_cy is None else grad_cy)
    gates = [c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), hy * cy.tanh() * o * (1 - o)]
    grad = torch.cat(gates, 1)
    return grad, c * f, grad.sum(0) if has_bias else None


def _gru_cell(gates, hidden, hx, bias=None, hidden_bias=None):
    gates = gates if bias is None else gates + bias
    hidden = hidden if hidden_bias is None else hidden + hidden_bias
    (r, z, n), (hidden_r, hidden_z, hidden_n) = gates.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (r + hidden_r).sigmoid(), (z + hidden_z).sigmoid()
    n = (n + r * hidden_n).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_n], 1)


def _gru_cell_backward(grad, workspace, has_bias):
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_z = grad * (hx - n) * z * (1 - z)
    grad_r = grad_n * hidden_n * r * (1 - r)
    gates, hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (gates.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return gates, hidden, grad * z, *biases


CELLS = {
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
}

# ----------------------------------------------------------------------------------------------------- device module


class SimModule:
    """The module `torch.sim`, with the functions of `torch.cuda` that torch and libraries call for any device."""

    Event = Event
    Generator = Generator
    default_generators = (_generator,)
    free_bytes = 2**34  # of mem_get_info
    _initialized = True  # torch.utils.checkpoint saves the random state of initialized devices only

    def __init__(self):
        self.present = False  # tests that need no device must not see one

    def is_available(self):
        return self.present

    is_initialized = is_available

    def device_count(self):
        return int(self.present)

    def current_device(self):
        return 0

    def set_device(self, device):
        pass

    @contextmanager
    def device(self, index):
        yield

    def synchronize(self, device=None):
        waited("synchronize")

    def get_device_name(self, device=None):
        return "simulated accelerator"

    def mem_get_info(self, device=None):
        return self.free_bytes, 2**34

    def empty_cache(self):
        pass

    def reset_peak_memory_stats(self, device=None):
        _memory["counts"] = True
        _memory["peak"] = _allocated()

    def memory_allocated(self, device=None):
        return _allocated()

    def max_memory_allocated(self, device=None):
        _memory["counts"] = False  # counting is slow
        return _memory["peak"]

    def set_sync_debug_mode(self, mode):
        _sync_debug_mode[0] = mode

    def get_sync_debug_mode(self):
        return _sync_debug_mode[0]

    def _is_in_bad_fork(self):
        return False

    def manual_seed(self, seed):
        _generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device=None):
        return _generator.get_state()

    def set_rng_state(self, state, device=None):
        _generator.set_state(state)

    def get_rng_state_all(self):
        return [_generator.get_state()]

    def set_rng_state_all(self, states):
        _generator.set_state(states[0])

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


# ----------------------------------------------------------------------------------------------------------- autocast

# As for CUDA (torch/amp documentation): these run in the dtype of autocast, those in float32.
LOW = "mm addmm bmm baddbmm linear matmul conv1d conv2d conv3d _convolution conv_transpose2d.input".split()
LOW += ["scaled_dot_product_attention", "addbmm", "addmv", "mv"]
FULL = (
    "softmax.int log_softmax.int nll_loss cross_entropy_loss mse_loss layer_norm group_norm exp log pow.Tensor_Scalar"
)
FULL += " sum sum.dim_IntList cumsum prod norm.Scalar binary_cross_entropy_with_logits smooth_l1_loss l1_loss cosh sinh"


def _cast_to(dtype):
    def cast(x):
        return x.to(dtype) if on_device(x) and x.is_floating_point() and x.dtype is not torch.float64 else x

    return cast


def _register_autocast(library):
    for names, dtype in ((LOW, None), (FULL.split(), torch.float32)):
        for name in names:
            library.impl(name, partial(_autocast, _op(name), dtype), "AutocastPrivateUse1")


def _autocast(op, dtype, *args, **kwargs):
    cast = _cast_to(dtype or torch.get_autocast_dtype(NAME))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return op(*tree_map(cast, args), **tree_map(cast, kwargs))


# ------------------------------------------------------------------------------------------------------- registration

# torch makes these by resizing an empty tensor, which a tensor of a Python backend cannot do.
FACTORIES = "arange arange.start arange.start_step linspace logspace eye eye.m randperm randperm.generator".split()
FACTORIES += ["tril_indices", "triu_indices"]
_libraries = []  # an op library is unregistered when it is freed


def register():
    """Make the device known to torch in this process, and present."""
    backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=SimModule())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        aten.impl(name, partial(_made, _op(name)), "PrivateUse1")
    _register_autocast(aten)
    _libraries.extend([fallback, aten])
    torch.tensor = _made_by(torch.tensor)
    torch.as_tensor = _made_by(torch.as_tensor)
    torch.accelerator.synchronize = torch.sim.synchronize
    torch.utils._foreach_utils._foreach_supported_types.append(SimTensor)  # the default of optimizers on a GPU
    torch.sim.present = True


def _op(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _made(op, *args, **kwargs):
    return run(op, args, kwargs)


def _made_by(make):
    """torch.tensor or torch.as_tensor, which cannot make tensors of a Python backend."""

    def made(data, dtype=None, device=None, **kwargs):
        if on_device(data) and (device is None or torch.device(device).type == NAME):
            return data.to(dtype) if make.__name__ == "as_tensor" else data.detach().clone()
        if device is None or torch.device(device).type != NAME:
            return make(data, dtype=dtype, device=device, **kwargs)
        gradient = kwargs.pop("requires_grad", False)
        return make(data, dtype=dtype).to(device).requires_grad_(gradient)

    return made
