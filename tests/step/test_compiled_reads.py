"""Values that a loss function or a model reads from anywhere, changed between updates: compiled as uncompiled."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import datetime
import enum
import functools
import gc
import importlib
import io
import itertools
import os
import platform
import random
import re
import sys
import threading
import time
import types
import typing
import warnings
import weakref

import numpy as np
import pytest
import torch
from test_compiled import OPTIMIZERS, any_backend, data, losses_of, tiny
from torch import nn

import samplewise as sw
from samplewise.core.reachable import Reachable
from samplewise.errors import TrainingWarning
from samplewise.step.compiled import CannotCompile
from samplewise.step.compiled.calls import Calls

SCALE = 1.0
SETTINGS = types.ModuleType("reads_settings")
LIMITS = {"inner": [1.0, {"scale": 1.0}]}
ORIGIN = contextvars.ContextVar("ORIGIN", default=1.0)
LOCAL = threading.local()


def scaled(read):
    """Loss function that multiplies by what `read` returns."""

    def loss_fn(model, batch):
        return losses_of(model, batch) * read()

    return loss_fn


# Each case makes a loss function and a function that changes what it reads.


def tensor_float():
    t = torch.tensor(1.0)
    return scaled(lambda: float(t)), t.fill_


def tensor_item():
    t = torch.tensor([1.0, 1.0])
    return scaled(lambda: t[1].item()), t.fill_


def tensor_list():
    t = torch.tensor([1.0, 1.0])
    return scaled(lambda: t.tolist()[0]), t.fill_


def tensor_as_array():
    t = torch.ones(3, dtype=torch.float64)
    return scaled(lambda: float(np.asarray(t).sum() / 3)), t.fill_


def tensor_compared():
    t = torch.ones(2)
    return scaled(lambda: 1.0 if torch.equal(t, torch.ones(2)) else 3.0), t.fill_


def tensor_branch():
    t = torch.tensor(1.0)
    return scaled(lambda: 1.0 if t < 1.5 else 3.0), t.fill_


def tensor_in_place():
    t = torch.tensor(1.0, dtype=torch.float64)
    return scaled(lambda: t), t.fill_


def numpy_array():
    values = np.ones(3)
    return scaled(lambda: float(values[1])), lambda v: values.__setitem__(1, v)


def numpy_as_tensor():
    values = np.ones(3)
    return scaled(lambda: torch.tensor(values).sum()), lambda v: values.__setitem__(1, v)


def numpy_shared():
    values = np.ones(3)
    return scaled(lambda: torch.from_numpy(values).sum()), lambda v: values.__setitem__(1, v)


def numpy_strided():
    values = np.ones((3, 4))
    view = values[:, ::2]
    return scaled(lambda: float(view.mean())), values.fill


def large_numpy_array():
    values = np.ones(5000)
    return scaled(lambda: float(values.mean())), values.fill


def numpy_objects():
    values = np.array([1.0, "x"], dtype=object)
    return scaled(lambda: values[0]), lambda v: values.__setitem__(0, v)


def byte_array():
    values = bytearray(b"\x01\x01")
    return scaled(lambda: float(values[0])), lambda v: values.__setitem__(0, int(v))


def standard_array():
    values = array.array("d", [1.0])
    return scaled(lambda: values[0]), lambda v: values.__setitem__(0, v)


def c_double():
    value = ctypes.c_double(1.0)
    return scaled(lambda: value.value), lambda v: setattr(value, "value", v)


def partial_dict():
    options = {"scale": 1.0}

    def loss_fn(model, batch, options):
        return losses_of(model, batch) * options["scale"]

    return functools.partial(loss_fn, options=options), lambda v: options.update(scale=v)


def partial_positional():
    options = [1.0]

    def loss_fn(options, model, batch):
        return losses_of(model, batch) * options[0]

    return functools.partial(functools.partial(loss_fn, options)), lambda v: options.__setitem__(0, v)


def default_argument():
    def loss_fn(model, batch, options={"scale": 1.0}):  # noqa: B006
        return losses_of(model, batch) * options["scale"]

    return loss_fn, lambda v: loss_fn.__defaults__[0].update(scale=v)


def default_replaced():
    def loss_fn(model, batch, scale=1.0):
        return losses_of(model, batch) * scale

    return loss_fn, lambda v: setattr(loss_fn, "__defaults__", (v,))


def keyword_default():
    def loss_fn(model, batch, *, scale=1.0):
        return losses_of(model, batch) * scale

    return loss_fn, lambda v: loss_fn.__kwdefaults__.update(scale=v)


def keyword_defaults_replaced():
    def loss_fn(model, batch, *, scale=1.0):
        return losses_of(model, batch) * scale

    return loss_fn, lambda v: setattr(loss_fn, "__kwdefaults__", {"scale": v})


def code_replaced():
    def loss_fn(model, batch):
        return losses_of(model, batch)

    def other(model, batch):
        return losses_of(model, batch) * 3.0

    return loss_fn, lambda v: setattr(loss_fn, "__code__", other.__code__)


def function_attribute():
    def loss_fn(model, batch):
        return losses_of(model, batch) * loss_fn.scale

    loss_fn.scale = 1.0
    return loss_fn, lambda v: setattr(loss_fn, "scale", v)


class Weighted:
    rate = 1.0
    table: dict[str, float] = {}  # noqa: RUF012

    def __init__(self):
        self.scale = 1.0
        self.nested = types.SimpleNamespace(options={"list": [1.0]})

    @property
    def factor(self):
        return self.scale

    @functools.cached_property
    def cached(self):
        return self.scale

    def method(self, model, batch):
        return losses_of(model, batch) * self.factor

    def deep(self, model, batch):
        return losses_of(model, batch) * self.nested.options["list"][0]

    def of_class(self, model, batch):
        return losses_of(model, batch) * self.rate

    def by_name(self, model, batch):
        return losses_of(model, batch) * getattr(self, "sca" + "le")

    def absent(self, model, batch):
        return losses_of(model, batch) * getattr(self, "later", 1.0)

    def by_dict(self, model, batch):
        return losses_of(model, batch) * vars(self)["scale"]

    def once(self, model, batch):
        return losses_of(model, batch) * self.cached

    def __call__(self, model, batch):
        return losses_of(model, batch) * self.scale


def bound_method():
    owner = Weighted()
    return owner.method, lambda v: setattr(owner, "scale", v)


def callable_object():
    owner = Weighted()
    return owner, lambda v: setattr(owner, "scale", v)


def deep_attribute():
    owner = Weighted()
    return owner.deep, lambda v: owner.nested.options["list"].__setitem__(0, v)


def class_attribute():
    kind = type("OwnWeighted", (Weighted,), {})
    return kind().of_class, lambda v: setattr(kind, "rate", v)


def class_attribute_hidden():
    owner = Weighted()
    return owner.of_class, lambda v: setattr(owner, "rate", v)


def attribute_by_name():
    owner = Weighted()
    return owner.by_name, lambda v: setattr(owner, "scale", v)


def attribute_by_dict():
    owner = Weighted()
    return owner.by_dict, lambda v: setattr(owner, "scale", v)


def new_attribute():
    owner = Weighted()
    return owner.absent, lambda v: setattr(owner, "later", v)


def cached_property():
    owner = Weighted()
    return owner.once, lambda v: setattr(owner, "cached", v)


def method_of_object_in_closure():
    owner = Weighted()
    return (lambda model, batch: owner.method(model, batch)), lambda v: setattr(owner, "scale", v)


def environment():
    os.environ["READS_SCALE"] = "1.0"
    return scaled(lambda: float(os.environ["READS_SCALE"])), lambda v: os.environ.update(READS_SCALE=str(v))


def environment_function():
    os.environ["READS_SCALE"] = "1.0"
    return scaled(lambda: float(os.getenv("READS_SCALE", "1"))), lambda v: os.environ.update(READS_SCALE=str(v))


def module_variable():
    SETTINGS.scale = 1.0
    return scaled(lambda: SETTINGS.scale), lambda v: setattr(SETTINGS, "scale", v)


def nested_in_module():
    SETTINGS.options = {"a": [1.0]}
    return scaled(lambda: SETTINGS.options["a"][0]), lambda v: SETTINGS.options["a"].__setitem__(0, v)


def object_in_module():
    SETTINGS.owner = Weighted()
    return scaled(lambda: SETTINGS.owner.scale), lambda v: setattr(SETTINGS.owner, "scale", v)


def imported_in_the_function():
    import string

    string.reads_scale = 1.0

    def read():
        import string

        return string.reads_scale

    return scaled(read), lambda v: setattr(string, "reads_scale", v)


def global_by_function():
    def change(value):
        global SCALE
        SCALE = value

    change(1.0)
    return scaled(lambda: SCALE), change


def global_nested():
    LIMITS["inner"][1]["scale"] = 1.0
    return scaled(lambda: LIMITS["inner"][1]["scale"]), lambda v: LIMITS["inner"][1].update(scale=v)


@dataclasses.dataclass
class Options:
    scales: dict


def dataclass():
    options = Options({"list": [1.0]})
    return scaled(lambda: options.scales["list"][0]), lambda v: options.scales["list"].__setitem__(0, v)


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 1.0


def slots():
    options = Slotted()
    return scaled(lambda: options.scale), lambda v: setattr(options, "scale", v)


def queue():
    values = collections.deque([1.0])
    return scaled(lambda: values[-1]), values.append


def empty_list():
    values = []
    return scaled(lambda: sum(values, 1.0)), values.append


def empty_dict():
    values = {}
    return scaled(lambda: values.get("scale", 1.0)), lambda v: values.update(scale=v)


def long_list():
    values = [1.0] * 500
    return scaled(lambda: values[321]), lambda v: values.__setitem__(321, v)


def long_dict():
    values = dict.fromkeys(range(300), 1.0)
    return scaled(lambda: values[123]), lambda v: values.update({123: v})


def huge_dict():
    values = dict.fromkeys(range(20_000), 1.0)
    return scaled(lambda: values[123]), lambda v: values.update({123: v})


def read_only_view():
    values = {"scale": 1.0}
    view = types.MappingProxyType(values)
    return scaled(lambda: view["scale"]), lambda v: values.update(scale=v)


class Mode(enum.Enum):
    PLAIN = 1.0
    LOUD = 3.0


def enumeration():
    box = [Mode.PLAIN]
    return scaled(lambda: box[0].value), lambda v: box.__setitem__(0, Mode.LOUD)


def weak_reference():
    owner = Weighted()
    reference = weakref.ref(owner)

    def change(v):
        owner.scale = v

    return scaled(lambda: reference().scale), change


def weak_proxy():
    owner = Weighted()
    proxy = weakref.proxy(owner)

    def change(v):
        owner.scale = v

    return scaled(lambda: proxy.scale), change


def context_variable():
    ORIGIN.set(1.0)
    return scaled(lambda: ORIGIN.get()), lambda v: ORIGIN.set(v)


def thread_local():
    LOCAL.scale = 1.0
    return scaled(lambda: LOCAL.scale), lambda v: setattr(LOCAL, "scale", v)


def cached_function():
    box = [1.0]

    @functools.lru_cache
    def read():
        return box[0]

    def change(v):
        box[0] = v
        read.cache_clear()

    return scaled(read), change


def lambda_in_lambda():
    box = [1.0]
    return scaled(lambda: (lambda: (lambda: box[0])())()), lambda v: box.__setitem__(0, v)


def decorated():
    box = {"scale": 1.0}

    def doubled(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args) * box["scale"]

        return wrapper

    return doubled(lambda model, batch: losses_of(model, batch)), lambda v: box.update(scale=v)


def decorated_by_torch():
    box = {"scale": 1.0}

    @torch.enable_grad()
    def loss_fn(model, batch):
        return losses_of(model, batch) * box["scale"]

    return loss_fn, lambda v: box.update(scale=v)


def chain_of_functions():
    box = [1.0]

    def one():
        return two()

    def two():
        return three()

    def three():
        return four()

    def four():
        return five()

    def five():
        return box[0]

    return scaled(one), lambda v: box.__setitem__(0, v)


def function_in_a_dict():
    box = [1.0]
    functions = {"read": lambda: box[0]}
    return scaled(lambda: functions["read"]()), lambda v: box.__setitem__(0, v)


def made_by_the_loss_function():
    class Reader:
        scale = 1.0

        def read(self):
            return self.scale

    return scaled(lambda: Reader().read()), lambda v: setattr(Reader, "scale", v)


def static_and_class_methods():
    class Reader:
        scale = 1.0

        @classmethod
        def read(cls):
            return cls.scale * cls.one()

        @staticmethod
        def one():
            return 1.0

    return scaled(Reader.read), lambda v: setattr(Reader, "scale", v)


class Descriptor:
    def __init__(self):
        self.value = 1.0

    def __get__(self, instance, owner):
        return self.value


def descriptor():
    described = Descriptor()
    kind = type("Described", (), {"scale": described})
    owner = kind()
    return scaled(lambda: owner.scale), lambda v: setattr(described, "value", v)


def attribute_function():
    class Lazy:
        def __init__(self):
            self.values = {"scale": 1.0}

        def __getattr__(self, name):
            return self.values[name]

    lazy = Lazy()
    return scaled(lambda: lazy.scale), lambda v: lazy.values.update(scale=v)


def user_dict():
    values = collections.UserDict(scale=1.0)
    return scaled(lambda: values["scale"]), lambda v: values.update(scale=v)


def generator():
    values = (1.0 + k / 100 for k in itertools.count())
    return scaled(lambda: next(values)), lambda v: None


def counting():
    values = itertools.count(1)
    return scaled(lambda: 1 / next(values)), lambda v: None


def iterator_of_a_list():
    values = iter([1.0 + k / 50 for k in range(1000)])
    return scaled(lambda: next(values)), lambda v: None


def iterator_attribute():
    owner = Weighted()
    owner.scales = itertools.cycle([1.0, 0.5, 0.25])
    return scaled(lambda: next(owner.scales)), lambda v: None


def iterator_method():
    take = iter([1.0 + k / 50 for k in range(1000)]).__next__
    return scaled(lambda: take()), lambda v: None


def iterator_default():
    def loss_fn(model, batch, values=itertools.cycle([1.0, 0.5, 0.25])):  # noqa: B008
        return losses_of(model, batch) * next(values)

    loss_fn.__defaults__ = (itertools.cycle([1.0, 0.5, 0.25]),)
    return loss_fn, lambda v: None


def iterator_class():
    class Steps:
        def __init__(self):
            self.k = 0

        def __next__(self):
            self.k += 1
            return 1 / self.k

    steps = Steps()
    return scaled(lambda: next(steps)), lambda v: None


def counter():
    k = 0

    def loss_fn(model, batch):
        nonlocal k
        k += 1
        return losses_of(model, batch) / k

    return loss_fn, lambda v: None


def file():
    stream = io.StringIO("".join(f"{1 + k / 50}\n" for k in range(1000)))
    return scaled(lambda: float(stream.readline())), lambda v: None


def file_by_name(folder):
    path = folder / "scale"
    path.write_text("1.0")
    return scaled(lambda: float(path.read_text())), lambda v: path.write_text(str(v))


def clock():
    start = time.monotonic()
    box = [1.0]
    return scaled(lambda: box[0] if time.monotonic() >= start else 0.0), lambda v: box.__setitem__(0, v)


def calendar():
    return scaled(lambda: 1.0 if datetime.datetime.now().year > 2000 else 0.0), lambda v: None


def python_random():
    return scaled(random.random), lambda v: None


def own_python_random():
    draw = random.Random(0)
    return scaled(lambda: draw.uniform(0.5, 1.5)), lambda v: None


def numpy_random():
    np.random.seed(0)
    return scaled(np.random.rand), lambda v: None


def own_numpy_random():
    draw = np.random.default_rng(0)
    return scaled(lambda: draw.random()), lambda v: None


def old_numpy_random():
    draw = np.random.RandomState(0)
    return scaled(lambda: draw.rand()), lambda v: None


def own_torch_random():
    draw = torch.Generator().manual_seed(0)
    return scaled(lambda: torch.rand((), generator=draw)), lambda v: None


def by_globals():
    def change(value):
        global SCALE
        SCALE = value

    change(1.0)
    return scaled(lambda: globals()["SCALE"]), change


def by_eval():
    box = [1.0]
    return scaled(lambda: eval("box[0]", {"box": box})), lambda v: box.__setitem__(0, v)


def class_replaced():
    class Loud(Weighted):
        rate = 3.0

    owner = Weighted()
    return owner.of_class, lambda v: setattr(owner, "__class__", Loud)


def method_replaced():
    kind = type("OwnWeighted", (Weighted,), {})
    owner = kind()
    return owner, lambda v: setattr(kind, "__call__", lambda self, model, batch: losses_of(model, batch) * v)


def method_of_an_object_without_attributes():
    class Reader:
        def read(self):
            return 1.0

    reader = Reader()
    return scaled(lambda: reader.read()), lambda v: setattr(reader, "read", lambda: v)


def asked_for_an_attribute():
    class Flags:
        pass

    flags = Flags()
    return scaled(lambda: 3.0 if hasattr(flags, "loud") else 1.0), lambda v: setattr(flags, "loud", True)


def new_global():
    globals().pop("LATER", None)

    def read():
        try:
            return LATER
        except NameError:
            return 1.0

    return scaled(read), lambda v: globals().update(LATER=v)


def new_attribute_of_a_module():
    module = types.ModuleType("reads_later")
    return scaled(lambda: getattr(module, "scale", 1.0)), lambda v: setattr(module, "scale", v)


def module_by_name():
    module = sys.modules["reads_by_name"] = types.ModuleType("reads_by_name")
    module.scale = 1.0
    return scaled(lambda: sys.modules["reads_by_name"].scale), lambda v: setattr(module, "scale", v)


def module_imported_by_name():
    module = sys.modules["reads_by_name"] = types.ModuleType("reads_by_name")
    module.scale = 1.0
    return scaled(lambda: importlib.import_module("reads_by_name").scale), lambda v: setattr(module, "scale", v)


def variable_assigned_later():
    def change(value):
        nonlocal scale
        scale = value

    def read():
        try:
            return scale
        except NameError:
            return 1.0

    if False:
        scale = 0.0
    return scaled(read), change


def shape_of_a_tensor():
    t = torch.ones(1)
    return scaled(lambda: float(t.shape[0])), lambda v: setattr(t, "data", torch.ones(3))


def tensor_requires_gradients():
    t = torch.ones(1)
    return scaled(lambda: 3.0 if t.requires_grad else 1.0), lambda v: t.requires_grad_()


def attribute_of_a_tensor():
    t = torch.ones(1)
    t.scale = 1.0
    return scaled(lambda: t.scale), lambda v: setattr(t, "scale", v)


def attribute_of_a_parameter():
    p = nn.Parameter(torch.ones(1))
    p.scale = 1.0
    return scaled(lambda: p.scale), lambda v: setattr(p, "scale", v)


def learning_rate_of_an_optimizer():
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    return scaled(lambda: optimizer.param_groups[0]["lr"]), lambda v: optimizer.param_groups[0].update(lr=v)


def attribute_of_a_string():
    name = type("Name", (str,), {})("x")
    name.scale = 1.0
    return scaled(lambda: name.scale), lambda v: setattr(name, "scale", v)


def arguments_of_an_exception():
    error = ValueError(1.0)
    return scaled(lambda: error.args[0]), lambda v: setattr(error, "args", (v,))


def seed_of_a_generator():
    draw = torch.Generator().manual_seed(1)
    return scaled(lambda: float(draw.initial_seed())), lambda v: draw.manual_seed(int(v) + 1)


def lock():
    flag = threading.Lock()
    return scaled(lambda: 3.0 if flag.locked() else 1.0), lambda v: flag.acquire(blocking=False)


def items_of_a_dict():
    values = {"scale": 1.0}
    items = values.items()
    return scaled(lambda: dict(items)["scale"]), lambda v: values.update(scale=v)


def teacher():
    torch.manual_seed(7)
    other = nn.Linear(5, 3).double()
    other.scale = 1.0

    def loss_fn(model, batch):
        return losses_of(model, batch) * other.scale + (model(batch[0]) - other(batch[0]).detach()).square().sum(1)

    return loss_fn, lambda v: setattr(other, "scale", v)


def generic_function():
    box = [1.0]

    @functools.singledispatch
    def read(value):
        return 1.0

    @read.register
    def _(value: int):
        return box[0]

    return scaled(lambda: read(1)), lambda v: box.__setitem__(0, v)


def context_manager():
    box = [1.0]

    @contextlib.contextmanager
    def opened():
        yield box[0]

    def read():
        with opened() as value:
            return value

    return scaled(read), lambda v: box.__setitem__(0, v)


def metaclass():
    class Meta(type):
        @property
        def scale(cls):
            return cls.value

    class Reader(metaclass=Meta):
        value = 1.0

    return scaled(lambda: Reader.scale), lambda v: setattr(Reader, "value", v)


READ = r"reads the value of a tensor"
STATE = r"whose state cannot be compared"
CASES = {
    **dict.fromkeys([tensor_float, tensor_item, tensor_list], READ),
    **dict.fromkeys([tensor_as_array, tensor_compared, tensor_branch], "uncompiled: "),
    **dict.fromkeys([numpy_objects, large_numpy_array, huge_dict], "too large to be compared|" + STATE),
    **dict.fromkeys([generator, counting, iterator_of_a_list, iterator_attribute, iterator_method], STATE),
    **dict.fromkeys([iterator_default, file, items_of_a_dict], STATE),
    **dict.fromkeys([iterator_class, counter], "changes its own attributes"),
    **dict.fromkeys([clock, calendar, lock, by_globals, by_eval], "which can change with every call"),
    **dict.fromkeys([python_random, own_python_random, numpy_random, own_numpy_random], "draws random numbers"),
    **dict.fromkeys([old_numpy_random], "draws random numbers"),
    own_torch_random: "",
    **dict.fromkeys(
        [
            tensor_in_place, numpy_array, numpy_as_tensor, numpy_shared, numpy_strided, byte_array, standard_array,
            c_double, partial_dict, partial_positional, default_argument, default_replaced, keyword_default,
            keyword_defaults_replaced, code_replaced, function_attribute, bound_method, callable_object, deep_attribute,
            class_attribute, class_attribute_hidden, attribute_by_name, attribute_by_dict, new_attribute,
            cached_property, method_of_object_in_closure, environment, environment_function, module_variable,
            nested_in_module, object_in_module, imported_in_the_function, global_by_function, global_nested, dataclass,
            slots, queue, empty_list, empty_dict, long_list, long_dict, read_only_view, enumeration, weak_reference,
            weak_proxy, context_variable, thread_local, cached_function, lambda_in_lambda, decorated,
            decorated_by_torch, chain_of_functions, function_in_a_dict, made_by_the_loss_function,
            static_and_class_methods, descriptor, attribute_function, user_dict,
            class_replaced, method_replaced, method_of_an_object_without_attributes, asked_for_an_attribute,
            new_global, new_attribute_of_a_module, module_by_name, module_imported_by_name,
            variable_assigned_later, shape_of_a_tensor, tensor_requires_gradients, attribute_of_a_tensor,
            attribute_of_a_parameter, learning_rate_of_an_optimizer, attribute_of_a_string,
            arguments_of_an_exception, seed_of_a_generator, teacher, generic_function, context_manager,
            metaclass,
        ],
        None,
    ),
}  # fmt: skip


def trained(make, compile):
    """Parameters after 24 updates with two changes of what the loss function reads, and the warnings."""
    torch.manual_seed(3)
    random.seed(3)
    loss_fn, change = make()
    model = tiny()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = sw.Step(model, optimizer, loss_fn, samples=1, compile=compile, recheck=False)
        for k, _ in enumerate(step.over([data(24)])):
            if k in (8, 16):
                change(k / 4)
    problems = [str(w.message) for w in caught if issubclass(w.category, TrainingWarning)]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), problems, step.compiled


def assert_same(make, reason):
    expected, problems, _ = trained(make, compile=False)
    assert not problems
    found, problems, status = trained(make, compile=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if reason is None:
        assert (problems, status) == ([], "compiled")
    else:
        assert len(problems) == 1
        assert re.search(reason, problems[0]), problems[0]


@pytest.mark.sweep(1 / 32)
@any_backend
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_value_that_the_loss_function_reads_changes(make):
    assert_same(make, CASES[make])


@any_backend
def test_a_file_that_the_loss_function_reads_changes(tmp_path):
    assert_same(lambda: file_by_name(tmp_path), "which can change with every call")


class Scaled(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer = tiny()
        self.read = read

    def forward(self, x):
        return self.layer(x) * self.read(self)


def of_model(read, change):
    """The model reads a value in its forward pass."""

    def make():
        model = Scaled(read)
        model.scale = 1.0
        model.options = Options({"list": [1.0]})
        model.temperature = torch.tensor(1.0, dtype=torch.float64)
        model.array = np.ones(2)
        return model, change

    return make


IN_MODELS = {
    "scalar": (lambda m: m.scale, lambda m, v: setattr(m, "scale", v), None),
    "nested": (lambda m: m.options.scales["list"][0], lambda m, v: m.options.scales["list"].__setitem__(0, v), None),
    "mode": (lambda m: 1.0 if m.training else 2.0, lambda m, v: m.train(not m.training), None),
    "array": (lambda m: float(m.array[0]), lambda m, v: m.array.fill(v), None),
    "tensor": (lambda m: m.temperature, lambda m, v: m.temperature.fill_(v), None),
    "number of a tensor": (lambda m: m.temperature.item(), lambda m, v: m.temperature.fill_(v), READ),
    "function": (lambda m: 1.0, lambda m, v: setattr(m, "read", lambda m: v), None),
}


@pytest.mark.sweep(1 / 3)
@any_backend
@pytest.mark.parametrize("name", IN_MODELS)
def test_a_value_that_the_model_reads_changes(name):
    read, change, reason = IN_MODELS[name]
    results = []
    for compile in (False, True):
        model, _ = of_model(read, change)()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = sw.Step(
                model, OPTIMIZERS["sgd"](model.parameters()), losses_of, samples=1, compile=compile, recheck=False
            )
            for k, _ in enumerate(step.over([data(24)])):
                if k in (8, 16):
                    change(model, k / 4)
        results.append((torch.cat([p.detach().flatten() for p in model.parameters()]), len(caught), step.compiled))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-12, atol=1e-12)
    assert results[1][1:] == (0, "compiled") if reason is None else reason in results[1][2]


def test_callbacks_of_the_garbage_collector_are_not_calls_of_the_update():
    def measure(phase, info):
        time.perf_counter()

    gc.callbacks.append(measure)
    try:
        with Calls() as calls:
            lists = [[] for _ in range(2 * gc.get_threshold()[0])]  # more objects than start a collection
    finally:
        gc.callbacks.remove(measure)
    assert lists and not any(code.co_name == "measure" for code in calls.modules)
    assert gc.isenabled()


def test_calls_of_torch_in_the_standard_library_are_not_calls_of_the_update():
    """Torch asks for the system when it is used for the first time in a process: a resumed run must compile, too."""

    def first_use_in(module):
        namespace = {"__name__": module, "os": os, "platform": platform}
        exec("def first_use(): return platform.os.getcwd() and os.path.realpath('.')", namespace)
        with Calls() as calls:
            namespace["first_use"]()
        return calls

    first_use_in("torch.somewhere").check(Reachable([]))
    with pytest.raises(CannotCompile, match=r"calls .*, which can change with every call"):
        first_use_in("somewhere").check(Reachable([]))


def test_annotations_that_torch_evaluates_are_not_calls_of_the_update():
    """On Python 3.11, typing_extensions replaces a function of typing. Optimizers evaluate `Optional[...]` when they
    are used for the first time in a process.
    """
    namespace = {"__name__": "torch.somewhere", "typing": typing}
    exec("def first_use(): return typing.Optional['OfItsOwn']", namespace)
    with Calls() as calls:
        namespace["first_use"]()
    calls.check(Reachable([]))
