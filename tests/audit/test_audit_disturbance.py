"""An audit changes no result of the loop, keeps nothing and fails alone."""

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from audited_loops import Task
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import samplewise as sw
from samplewise.audit.calls import Calls
from samplewise.audit.updates import Updates


def train(task, batches=4):
    for x, y in task.batches()[:batches]:
        task.optimizer.zero_grad()
        F.cross_entropy(task.model(x), y).backward()
        task.optimizer.step()


def installed():
    """Hooks of all modules and optimizers, and filters of the warning about them."""
    modules = [len(hooks) for name, hooks in vars(torch_module).items() if name.startswith("_global_") and hooks]
    pre_hooks = torch_optimizer._global_optimizer_pre_hooks
    post_hooks = torch_optimizer._global_optimizer_post_hooks
    filters = [pattern.pattern for _, pattern, *_ in warnings.filters if pattern and "global hooks" in pattern.pattern]
    return modules, len(pre_hooks), len(post_hooks), filters


@pytest.fixture(autouse=True)
def nothing_stays_installed():
    before = installed()
    yield
    assert installed() == before


class LoopError(Exception):
    pass


class Failing(nn.Module):
    """Fails in the second forward or backward pass."""

    def __init__(self, model, where):
        super().__init__()
        self.model = model
        self.where = where
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        outputs = self.model(x)
        if self.calls == 2 and self.where == "forward":
            raise LoopError
        if self.calls == 2:
            next(self.model.parameters()).register_hook(self.fail)
        return outputs

    def fail(self, gradient):
        if self.calls == 2:
            raise LoopError


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"norms": True},
        {"ids": lambda args, kwargs: torch.arange(4)},
        {"losses": nn.CrossEntropyLoss(reduction="none"), "labels": lambda args, kwargs: torch.zeros(4).long()},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_parameters_and_random_numbers_are_those_without_an_audit(arguments, model):
    results = []
    for audited in (False, True):
        task = Task()
        with sw.audit(task.model if model else None, **arguments) if audited else nullcontext():
            train(task)
        results.append([*task.model.state_dict().values(), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_errors_of_the_loop_come_through_unchanged():
    task = Task()
    error = LoopError()
    audit = sw.audit(task.model)

    def fail():
        with audit:
            train(task)
            raise error

    with pytest.raises(LoopError) as raised:
        fail()
    assert raised.value is error and error.__cause__ is None and error.__context__ is None
    assert len(audit.sums) == 4


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_loop_that_goes_on_after_a_failed_batch(where):
    task = Task()
    model = Failing(task.model, where)
    with sw.audit(model) as audit:
        for x, y in task.batches():
            task.optimizer.zero_grad()
            try:
                F.cross_entropy(model(x), y).backward()
            except LoopError:
                continue
            task.optimizer.step()
    assert audit.ok, str(audit)
    assert audit.sums == pytest.approx([1.0] * 4)


@pytest.mark.parametrize(
    ("recorder", "method"),
    [
        (Calls, "record"),
        (Updates, "_begin_pass"),
        (Updates, "_end_pass"),
        (Updates, "begin_step"),
        (Updates, "end_step"),
        (Updates, "_look"),
    ],
)
def test_errors_of_the_audit_do_not_reach_the_loop(recorder, method, monkeypatch):
    def fail(*args):
        raise RuntimeError("of the audit\nwith a second line")

    plain = Task()
    train(plain)
    task = Task()
    monkeypatch.setattr(recorder, method, fail)
    with sw.audit(task.model) as audit:
        train(task)
    assert all(map(torch.equal, plain.model.parameters(), task.model.parameters()))
    assert not audit.ok
    assert audit.notes[0].startswith(
        "the audit has ended early; the training was not disturbed: RuntimeError: of the audit"
    )


@pytest.mark.parametrize("model", [True, False])
def test_nothing_is_kept_after_the_block(model):
    task = Task()
    with sw.audit(task.model if model else None) as audit:
        outputs = task.model(task.x)
        of_outputs = weakref.ref(outputs)
        F.cross_entropy(outputs, task.y).backward()
        task.optimizer.step()
        del outputs
    assert of_outputs() is None
    objects = [weakref.ref(task.model), weakref.ref(task.model[0].weight), weakref.ref(task.optimizer)]
    del task
    gc.collect()
    assert [reference() for reference in objects] == [None, None, None]
    assert audit.ok


def test_copies_pickles_and_traces_of_an_audited_model():
    task = Task()
    with sw.audit(None) as audit, warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # torch 2.15: FutureWarning
            warnings.filterwarnings("ignore", ".*torch.jit", category)
        train(task)
        copies = [copy.deepcopy(task.model), pickle.loads(pickle.dumps(task.model))]
        outputs = task.model(task.x)
        torch.save(outputs, io.BytesIO())
        traced = torch.jit.trace(task.model.eval(), task.x)
    assert audit.ok, str(audit)
    for model in copies:
        assert torch.equal(model.eval()(task.x), task.model(task.x))
    assert torch.equal(traced(task.x), task.model(task.x))


def test_per_sample_gradients_of_torch_func():
    task = Task()
    task.model.eval()
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}

    def loss(parameters, x, y):
        return F.cross_entropy(functional_call(task.model, parameters, (x[None],)), y[None])

    gradients = vmap(grad(loss), (None, 0, 0))
    plain = gradients(parameters, task.x, task.y)
    with sw.audit(None) as audit:
        audited = gradients(parameters, task.x, task.y)
    assert all(torch.equal(plain[name], audited[name]) for name in plain)
    assert audit.notes == ["no call of the model was seen: pass the model that the loop trains, or None for all models"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled_before", [True, False])
def test_compiled_models_are_audited_without_recompilation(compiled_before):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    task = Task()
    inner = task.model
    task.model = torch.compile(inner, backend=backend)
    if compiled_before:
        train(task, 1)
    with sw.audit(inner) as audit:
        train(task)
    assert audit.ok and audit.sums == pytest.approx([1.0] * 4), str(audit)
    assert len(graphs) == 1


def test_nested_overlapping_and_consecutive_audits():
    task = Task()
    with sw.audit(task.model) as outer:
        train(task, 2)
        with sw.audit(None) as inner:
            train(task, 3)
    assert outer.ok and inner.ok
    assert len(outer.sums) == 5 and len(inner.sums) == 3
    first, second = sw.audit(task.model), sw.audit(task.model)
    first.__enter__()
    second.__enter__()
    train(task, 2)
    first.stop()
    train(task, 3)
    second.stop()
    assert len(first.sums) == 2 and len(second.sums) == 5
    assert first.ok and second.ok


def test_other_threads_do_not_matter():
    task = Task()
    other = nn.Linear(6, 5)
    started, ended = threading.Event(), threading.Event()

    def call():
        while not ended.is_set():
            other(task.x)
            started.set()

    thread = threading.Thread(target=call)
    with sw.audit(None) as audit:
        thread.start()
        assert started.wait(300)
        train(task)
        ended.set()
        thread.join()
    assert audit.ok and audit.sums == pytest.approx([1.0] * 4), str(audit)
