"""Values that compiled updates read through torch, samplewise or C, changed between updates: as uncompiled."""

import collections
import ctypes
import logging
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from test_compiled import any_backend, losses_of
from test_compiled_reads import assert_same, scaled
from torch import nn

import samplewise as sw
from samplewise.errors import TrainingWarning
from samplewise.testing import cases

READ = r"reads the value of a tensor"
CALL = "which can change with every call"
STATE = "whose state cannot be compared"


def number(value):
    return torch.tensor(value, dtype=torch.float64)


# ------------------------------------------------------------- tensors in the place of numbers


def of_tensor(read, value=1.0):
    """Case of a loss function that reads a tensor, which is filled with other values."""

    def make():
        tensor = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        return scaled(lambda: read(tensor)), lambda v: tensor.fill_(v)

    return make, READ


def eight():
    return torch.arange(1, 9).double()


AS_NUMBERS = {
    "end of a slice": of_tensor(lambda k: eight()[:k].sum(), 1),
    "index": of_tensor(lambda k: eight()[k], 1),
    "size": of_tensor(lambda k: torch.ones(k, dtype=torch.float64).sum(), 1),
    "arange": of_tensor(lambda k: len(torch.arange(k)), 1),
    "expand": of_tensor(lambda k: number([1.0]).expand(k).sum(), 2),
    "view": of_tensor(lambda k: eight().view(k, -1)[0].sum(), 2),
    "roll": of_tensor(lambda k: eight().roll(k)[0], 1),
    "narrow": of_tensor(lambda k: eight().narrow(0, k, 2).sum(), 1),
    "top-k": of_tensor(lambda k: eight().topk(k).values.sum(), 1),
    "range": of_tensor(lambda k: sum(1 for _ in range(k)), 1),
    "fill": of_tensor(lambda k: torch.full((), k, dtype=torch.float64)),
    "list": of_tensor(lambda k: torch.tensor([k, k]).sum()),
    "nested list": of_tensor(lambda k: torch.as_tensor([[k], [k]]).sum()),
    "new": of_tensor(lambda k: k.new([k, k]).sum()),
    "alpha": of_tensor(lambda k: torch.add(number(1.0), number(3.0), alpha=k)),
    "value": of_tensor(lambda k: torch.addcmul(number(1.0), number(3.0), number(2.0), value=k)),
    "slope": of_tensor(lambda k: -F.leaky_relu(number(-1.0), k)),
    "delta": of_tensor(lambda k: F.huber_loss(number(2.0), number(0.0), delta=k)),
    "smoothing": of_tensor(lambda k: F.cross_entropy(number([[0.0, 1.0]]), torch.tensor([1]), label_smoothing=k / 10)),
    "epsilon": of_tensor(lambda k: F.layer_norm(number([0.0, 1.0, 2.0]), (3,), eps=k)[2]),
    "text": of_tensor(lambda k: float(str(k).split("(")[1].split(",")[0])),
}


def split():
    ends = torch.tensor([1, 3])
    return scaled(lambda: torch.tensor_split(eight(), ends)[0].sum()), lambda v: ends.fill_(int(v))


@pytest.mark.sweep(1 / 5)
@any_backend
@pytest.mark.parametrize("name", [*AS_NUMBERS])
def test_tensors_in_the_place_of_numbers(name):
    assert_same(*AS_NUMBERS[name])


@any_backend
def test_tensors_that_stay_tensors():
    """These are read in each update."""
    reads = {
        "lerp": lambda k: torch.lerp(number(1.0), number(3.0), k),
        "clamp": lambda k: number(5.0).clamp(max=k),
        "masked": lambda k: number(0.0).masked_fill(torch.tensor(True), k),
        "copy": torch.as_tensor,
        "power": lambda k: number(1.5) ** k,
    }
    assert_same(split, READ)
    for read in reads.values():
        assert_same(of_tensor(read)[0], None)


@pytest.mark.usefixtures("interpreted")
def test_values_that_the_engine_reads():
    """The reason is that of the tracer: neither the model nor the loss function reads a value."""
    case = cases.CASES["custom_function_that_is_a_layer"]
    model, inputs = case.build(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    step = sw.Step(model, optimizer, lambda m, x: case.loss(m(*x)), compile=True, transforms=[sw.clip(1.0)])
    step(inputs)
    with pytest.warns(TrainingWarning, match="data-dependent"):
        step(inputs)
    assert READ not in step.compiled


# ------------------------------------------------------------- objects and settings of torch


def schedule():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 + epoch)
    return scaled(lambda: scheduler.get_last_lr()[0]), lambda v: (optimizer.step(), scheduler.step())


def distribution():
    normal = torch.distributions.Normal(number(1.0), number(1.0))
    return scaled(lambda: normal.mean), lambda v: setattr(normal, "loc", number(v))


def length_of_a_loader():
    rows = [0]
    loader = torch.utils.data.DataLoader(rows)
    return scaled(lambda: float(len(loader))), lambda v: rows.append(0)


def rows_of_a_subset():
    subset = torch.utils.data.Subset(torch.utils.data.TensorDataset(eight()), [0])
    return scaled(lambda: subset[0][0]), lambda v: subset.indices.__setitem__(0, int(v))


def loss_scale():
    scaler = torch.amp.GradScaler("cpu")
    return scaled(lambda: scaler.get_growth_factor()), lambda v: scaler.set_growth_factor(v + 1)


def gradient():
    p = nn.Parameter(number([1.0]))
    p.grad = number([1.0])
    return scaled(lambda: p.grad[0]), lambda v: setattr(p, "grad", number([v]))


def transposed_in_place():
    square = torch.arange(4).view(2, 2).double()
    return scaled(lambda: square[0, 1] + 1), lambda v: square.t_()


def number_of_a_class():
    nn.Linear.reads_scale = 1.0
    return lambda model, batch: losses_of(model, batch) * nn.Linear.reads_scale, change_class


def change_class(value):
    nn.Linear.reads_scale = value


def number_of_torch():
    torch.reads_scale = 1.0
    return scaled(lambda: torch.reads_scale), lambda v: setattr(torch, "reads_scale", v)


def threads():
    torch.set_num_threads(1)
    return scaled(lambda: torch.get_num_threads()), lambda v: torch.set_num_threads(int(v) // 2)


def determinism():
    torch.use_deterministic_algorithms(False)
    return (
        scaled(lambda: 1.0 + torch.are_deterministic_algorithms_enabled()),
        lambda v: torch.use_deterministic_algorithms(v == 2),
    )


def precision_of_products():
    torch.set_float32_matmul_precision("highest")
    kinds = {2.0: "high", 4.0: "medium"}
    return (
        scaled(lambda: {"highest": 1.0, "high": 2.0, "medium": 3.0}[torch.get_float32_matmul_precision()]),
        lambda v: torch.set_float32_matmul_precision(kinds[v]),
    )


def flag_of_a_backend():
    torch.backends.cudnn.benchmark = False
    return (
        scaled(lambda: 1.0 + torch.backends.cudnn.benchmark),
        lambda v: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    )


def seed():
    torch.manual_seed(3)
    return scaled(lambda: float(torch.initial_seed() % 7)), lambda v: torch.manual_seed(int(v))


# ------------------------------------------------------------- containers, builtins, C


def order_of_a_dict():
    values = collections.OrderedDict(a=1.0, b=2.0)
    return scaled(lambda: next(iter(values.values()))), lambda v: values.move_to_end(next(iter(values)))


def builtin():
    __builtins__["READS_SCALE"] = 1.0
    return scaled(lambda: READS_SCALE), lambda v: __builtins__.update(READS_SCALE=v)  # noqa: F821


def pointer():
    value = ctypes.c_double(1.0)
    place = ctypes.pointer(value)
    return scaled(lambda: place.contents.value), lambda v: setattr(value, "value", v)


def address():
    value = ctypes.c_double(1.0)
    place = ctypes.addressof(value)
    return scaled(lambda: ctypes.c_double.from_address(place).value), lambda v: setattr(value, "value", v)


def handler():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    actions = {2.0: signal.SIG_IGN, 4.0: signal.SIG_DFL}
    return (
        scaled(lambda: 2.0 if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN else 1.0),
        lambda v: signal.signal(signal.SIGTERM, actions[v]),
    )


CASES = {
    pointer: STATE,
    **dict.fromkeys([address, handler], CALL),
    **dict.fromkeys(
        [
            schedule, distribution, length_of_a_loader, rows_of_a_subset, loss_scale, gradient, transposed_in_place,
            number_of_a_class, number_of_torch, threads, determinism, precision_of_products, flag_of_a_backend, seed,
            order_of_a_dict, builtin,
        ],
        None,
    ),
}  # fmt: skip


@pytest.fixture
def settings():
    """Restores the settings that cases change."""
    count = torch.get_num_threads()
    handled = signal.getsignal(signal.SIGTERM)
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(count)
    signal.signal(signal.SIGTERM, handled)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(False)
    for owner, name in ((nn.Linear, "reads_scale"), (torch, "reads_scale")):
        vars(owner).get(name) is None or delattr(owner, name)
    __builtins__.pop("READS_SCALE", None)


@pytest.mark.sweep(1 / 6)
@any_backend
@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_value_that_is_read_through_torch_or_c_changes(make):
    assert_same(make, CASES[make])


@any_backend
def test_a_logger_whose_messages_are_not_shown():
    """The stream of its handler is written only; models of transformers have such a logger."""
    log = logging.Logger("quiet", logging.ERROR)
    log.addHandler(logging.StreamHandler(sys.__stderr__))

    def make():
        scale = {"scale": 1.0}

        def read():
            log.info("scale %s", scale)
            return scale["scale"]

        return scaled(read), lambda v: scale.update(scale=v)

    assert_same(make, None)


@any_backend
@pytest.mark.parametrize("read", [lambda s: s.counters.updates, lambda s: s._started_updates, lambda s: s.samples])
def test_a_loss_function_that_reads_its_own_step(read):
    def after(compile):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        own = []
        step = sw.Step(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, x: model(x).square().sum(1) / (1 + read(own[0])),
            samples=1,
            compile=compile,
            recheck=False,
        )
        own.append(step)
        step.run([torch.randn(12, 3, generator=torch.Generator().manual_seed(1)).double()])
        return model.weight.detach()

    with pytest.warns(TrainingWarning, match="updates stay uncompiled"):
        compiled = after(True)
    torch.testing.assert_close(compiled, after(False), rtol=1e-12, atol=1e-12)
