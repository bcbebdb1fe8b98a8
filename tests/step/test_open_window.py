"""An open window while code of the caller runs: its sums in `.grad` are used as they are, or an error says why not."""

import copy
import gc
from functools import partial

import pytest
import torch
from by_hand import close
from torch import nn
from torch.nn.utils import clip_grad_norm_

import samplewise as sw

CHANGED = r"`\.grad` holds the sums of an open window .* found that the gradient of '.*' was {}.*Call step\.flush\(\)"
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(12, 4, generator=DRAW, dtype=torch.float64)
Y = torch.randn(12, generator=DRAW, dtype=torch.float64)
CHAINS = {
    "plain": (),
    "clip": [sw.clip(0.7)],
    "weight": [sw.weight(lambda losses: 1 / (1 + losses), renormalize=True)],
    "noise": [sw.clip(0.7), sw.noise(0.0)],
}
DEFERRED = {"window": [sw.normalize("mean")], "group": [sw.group(lambda b: (b[1] > 0).tolist()), sw.clip(5.0)]}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def losses_of(model, batch):
    return (model(batch[0])[:, 0] - batch[1]).square()


def rows(start, stop):
    return X[start:stop], Y[start:stop]


def make(transforms=(), **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return sw.Step(model, optimizer, losses_of, transforms=transforms, **options)


def state(step):
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}


def expected(transforms, *windows):
    """Parameters after these windows, each in one batch."""
    step = make(transforms, recheck=False)
    for window in windows:
        step(rows(*window))
    return state(step)


# ------------------------------------------------------------- what other code does


def foreign_backward(step):
    losses_of(step.model, rows(0, 3)).sum().backward()


def second_step(step):
    model = step.model
    sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.0), losses_of, recheck=False)(rows(0, 3))


def second_open_window(step):
    other = sw.Step(step.model, torch.optim.SGD(step.model.parameters(), lr=0.0), losses_of, recheck=False)
    other.accumulate(rows(0, 3))


def last_gradient(step):
    return list(step.model.parameters())[-1]


def set_last(step, value):
    last_gradient(step).grad = value


ACTIONS = {
    "zero_grad": (lambda step: step.optimizer.zero_grad(), "removed"),
    "zero_grad in place": (lambda step: step.optimizer.zero_grad(set_to_none=False), "changed in place"),
    "model.zero_grad": (lambda step: step.model.zero_grad(), "removed"),
    "zero_ of one": (lambda step: last_gradient(step).grad.zero_(), "changed in place"),
    "one is None": (lambda step: set_last(step, None), "removed"),
    "an equal tensor": (lambda step: set_last(step, last_gradient(step).grad.clone()), "replaced"),
    "backward": (foreign_backward, "changed in place"),
    "sw.backward": (lambda step: sw.backward(losses_of(step.model, rows(0, 3)), step.model), "changed in place"),
    "g.backward": (
        lambda step: sw.gradients(losses_of(step.model, rows(0, 3)), step.model).backward(),
        "changed in place",
    ),
    "zero_grad and backward": (lambda step: (step.model.zero_grad(), foreign_backward(step)), "replaced"),
    "second step": (second_step, "replaced"),
    "second window": (second_open_window, "replaced"),
    "clip_grad_norm_": (lambda step: clip_grad_norm_(step.model.parameters(), 1e-3), "changed in place"),
}
actions = pytest.mark.parametrize(("act", "change"), ACTIONS.values(), ids=ACTIONS)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("transforms", CHAINS)
@actions
def test_changes_between_accumulate_and_apply(act, change, transforms):
    step = make(CHAINS[transforms])
    step.accumulate(rows(0, 5))
    before = state(step)
    act(step)
    with pytest.raises(sw.ParameterError, match=CHANGED.format(change)):
        step.apply()
    close(state(step), before, rtol=0, atol=0)
    assert not step._has_pending_samples
    assert step.counters.samples == step.counters.updates == 0
    step.accumulate(rows(0, 5))  # a new window is exact
    step.accumulate(rows(5, 12))
    step.apply()
    close(state(step), expected(CHAINS[transforms], (0, 12)))


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("transforms", CHAINS)
@actions
def test_changes_between_two_batches(act, change, transforms):
    step = make(CHAINS[transforms], samples=6, microbatch=2)
    step(rows(0, 4))
    act(step)
    with pytest.raises(sw.ParameterError, match=CHANGED.format(change)):
        step(rows(4, 8))
    step(rows(0, 6))
    close(state(step), expected(CHAINS[transforms], (0, 6)))


@pytest.mark.parametrize("act", ["zero_grad", "backward", "second step"])
def test_changes_by_a_loader(act):
    step = make(samples=6)

    def loader():
        yield rows(0, 4)
        ACTIONS[act][0](step)
        yield rows(4, 12)

    with pytest.raises(sw.ParameterError, match=CHANGED.format(ACTIONS[act][1])):
        step.run(loader())
    assert step.counters.samples == 0


@pytest.mark.parametrize("finish", ["flush", "over", "call", "accumulate", "state_dict", "window_state"])
def test_changes_before_any_use_of_the_window(finish):
    step = make(samples=9, tail="carry")
    step.run([rows(0, 4)])
    step.optimizer.zero_grad()
    uses = {
        "flush": step.flush,
        "over": lambda: step.run([rows(4, 12)]),
        "call": lambda: step(rows(4, 12)),
        "accumulate": lambda: step.accumulate(rows(4, 12)),
        "state_dict": step.state_dict,
        "window_state": step._window_state,
    }
    for _ in range(2 if finish in ("state_dict", "window_state") else 1):  # these two leave the window as it is
        with pytest.raises(sw.ParameterError, match=CHANGED.format("removed")):
            uses[finish]()


def test_changes_of_a_restored_window():
    before = make(samples=9)
    before(rows(0, 4))
    step = make(samples=9)
    step.load_state_dict(before.state_dict())
    step.model.zero_grad()
    with pytest.raises(sw.ParameterError, match=CHANGED.format("removed")):
        step(rows(4, 9))
    step.load_state_dict(before.state_dict())
    step(rows(4, 9))
    before(rows(4, 9))  # state_dict() has left its window as it was
    close(state(step), state(before), rtol=0, atol=0)
    close(state(step), expected((), (0, 9)))


@pytest.mark.parametrize("transforms", DEFERRED.values(), ids=DEFERRED)
@pytest.mark.parametrize("act", ["zero_grad", "model.zero_grad", "zero_grad in place"])
def test_windows_that_are_computed_at_their_end_have_no_sums_to_lose(act, transforms):
    step = make(transforms, recheck=False)
    step.accumulate(rows(0, 5))
    ACTIONS[act][0](step)
    step.accumulate(rows(5, 12))
    step.apply()
    close(state(step), expected(transforms, (0, 12)))


@pytest.mark.parametrize("transforms", DEFERRED.values(), ids=DEFERRED)
@pytest.mark.parametrize("act", ["backward", "sw.backward", "zero_grad and backward"])
def test_gradients_that_are_added_before_a_window_is_computed(act, transforms):
    step = make(transforms, recheck=False)
    step.accumulate(rows(0, 5))
    ACTIONS[act][0](step)
    with pytest.raises(sw.ParameterError, match=CHANGED.format("added")):
        step.apply()


@pytest.mark.slow
@pytest.mark.parametrize("act", ["zero_grad", "backward", "clip_grad_norm_"])
def test_changes_of_compiled_sums(act):
    step = make(samples=8, microbatch=2, compile=True)
    for _ in range(8):
        step(rows(0, 8))
    step(rows(0, 4))
    ACTIONS[act][0](step)
    with pytest.raises(sw.ParameterError, match=CHANGED.format(ACTIONS[act][1])):
        step(rows(4, 12))


# ------------------------------------------------------------- states that are loaded

MOVED = r"parameters must not change while a window is open.*found that '.*' was changed in place.*Call step\.flush\(\)"


def load_model(step):
    step.model.load_state_dict({name: value + 1 for name, value in step.model.state_dict().items()})


@torch.no_grad()
def clamp(step):
    for p in step.model.parameters():
        p.clamp_(-0.1, 0.1)


@torch.no_grad()
def swap(step):
    last_gradient(step).copy_(torch.zeros_like(last_gradient(step)))


PARAMETERS = {
    "model.load_state_dict": load_model,
    "clamp": clamp,
    "copy": swap,
    "initialization": lambda step: nn.init.normal_(step.model[0].weight),
    "a layer": lambda step: step.model[0].load_state_dict(net()[0].state_dict()),
}


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("transforms", CHAINS)
@pytest.mark.parametrize("act", PARAMETERS.values(), ids=PARAMETERS)
def test_parameters_that_change_while_a_window_is_open(act, transforms):
    step = make(CHAINS[transforms], recheck=False)
    step.accumulate(rows(0, 5))
    act(step)
    moved = state(step)
    with pytest.raises(sw.ParameterError, match=MOVED):
        step.apply()
    close(state(step), moved, rtol=0, atol=0)
    assert not step._has_pending_samples and step.counters.samples == 0
    carrying = make(CHAINS[transforms], samples=9, tail="carry", recheck=False)
    carrying.run([rows(0, 4)])
    act(carrying)
    with pytest.raises(sw.ParameterError, match=MOVED):
        carrying.run([rows(4, 12)])


@pytest.mark.parametrize("order", [("model", "optimizer", "step"), ("step", "model", "optimizer")], ids=str)
@pytest.mark.parametrize("transforms", CHAINS)
def test_a_checkpoint_that_is_loaded_while_a_window_is_open(order, transforms):
    """The open window is replaced by that of the checkpoint, in any order."""
    step = make(CHAINS[transforms], samples=9, recheck=False)
    step(rows(0, 9))
    step(rows(0, 4))
    parts = {"model": step.model, "optimizer": step.optimizer, "step": step}
    saved = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    step(rows(4, 9))
    after = state(step)
    step(rows(0, 5))  # another window, which is discarded
    for name in order:
        parts[name].load_state_dict(saved[name])
    step.state_dict()  # leaves it as it is
    step(rows(4, 9))
    close(state(step), after, rtol=0, atol=0)


@pytest.mark.parametrize("transforms", DEFERRED.values(), ids=DEFERRED)
def test_parameters_of_windows_that_are_computed_at_their_end_may_change(transforms):
    step, expected_step = make(transforms, recheck=False), make(transforms, recheck=False)
    clamp(expected_step)
    expected_step(rows(0, 12))
    step.accumulate(rows(0, 5))
    clamp(step)
    step.accumulate(rows(5, 12))
    step.apply()
    close(state(step), state(expected_step))


def test_the_state_of_the_optimizer_may_be_loaded():
    """It is no part of the sums; the update uses it."""
    step, expected_step = make(recheck=False), make(recheck=False)
    saved = copy.deepcopy(step.optimizer.state_dict())
    for one in (step, expected_step):
        one(rows(0, 6))
    expected_step.optimizer.load_state_dict(saved)
    expected_step(rows(0, 12))
    step.accumulate(rows(0, 5))
    step.optimizer.load_state_dict(saved)
    step.accumulate(rows(5, 12))
    step.apply()
    close(state(step), state(expected_step))


def test_layers_that_change_their_parameters_in_the_forward_pass():
    """nn.Embedding(max_norm=) does in each microbatch."""
    ids, after = torch.arange(12) % 4, []
    for sizes in ((12,), (5, 7)):
        torch.manual_seed(0)
        model = nn.Embedding(4, 3, max_norm=0.5).double()
        step = sw.Step(model, sw.sgd(0.1), lambda model, batch: model(batch).square().sum(1), microbatch=4)
        for part in ids.split(list(sizes)):
            step.accumulate(part)
        step.apply()
        after.append(state(step))
    close(*after)


# ------------------------------------------------------------- what is allowed


def read(step):
    return [p.grad.norm() for p in step.model.parameters()]


def evaluate(step):
    step.model.eval()
    with torch.no_grad():
        losses_of(step.model, rows(0, 3))
    step.model.train()


def other_model(step):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses_of(model, rows(0, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


HARMLESS = {
    "reads": read,
    "evaluates": evaluate,
    "autograd.grad": lambda step: torch.autograd.grad(
        losses_of(step.model, rows(0, 3)).sum(), list(step.model.parameters())
    ),
    "sw.gradients": lambda step: sw.gradients(losses_of(step.model, rows(0, 3)), step.model).norms(),
    "another model": other_model,
    "state_dict": lambda step: step.state_dict(),
    "window_state": lambda step: step._window_state(),
    "checkpoint of all": lambda step: (step.model.state_dict(), step.optimizer.state_dict(), step.state_dict()),
    "settings": lambda step: (setattr(step, "max_grad_norm", None), step.optimizer.param_groups[0].update(lr=0.1)),
}


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("transforms", CHAINS)
@pytest.mark.parametrize("act", HARMLESS.values(), ids=HARMLESS)
def test_code_that_leaves_the_sums_alone(act, transforms):
    step = make(CHAINS[transforms])
    step.accumulate(rows(0, 5))
    act(step)
    step.accumulate(rows(5, 12))
    act(step)
    step.apply()
    close(state(step), expected(CHAINS[transforms], (0, 12)))


@pytest.mark.parametrize("options", [{}, {"samples": 4}, {"samples": 2, "microbatch": 1}], ids=str)
def test_zero_grad_between_updates_changes_nothing(options):
    step = make(**options)
    for start in (0, 4, 8):
        step.optimizer.zero_grad()  # out of habit
        step(rows(start, start + 4))
    size = options.get("samples", 4)
    close(state(step), expected((), *((start, start + size) for start in range(0, 12, size))))


# ------------------------------------------------------------- optimizer.step()


def scaled_step(optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def scheduled_step(optimizer):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)  # wraps optimizer.step
    optimizer.step()
    scheduler.step()


STEPS = {
    "plain": lambda optimizer: optimizer.step(),
    "closure": lambda optimizer: optimizer.step(lambda: 0.0),
    "scaler": scaled_step,
    "scheduler": scheduled_step,
}


@pytest.mark.parametrize("act", STEPS.values(), ids=STEPS)
def test_a_step_of_the_optimizer_with_sums_is_refused(act):
    step = make()
    step.accumulate(rows(0, 5))
    before = state(step)
    with pytest.raises(sw.ParameterError, match=r"optimizer\.step\(\) must not be called while a window .* is open"):
        act(step.optimizer)
    close(state(step), before, rtol=0, atol=0)
    step.accumulate(rows(5, 12))
    step.apply()  # the window is as it was
    close(state(step), expected((), (0, 12)))


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, partial(torch.optim.SGD, foreach=True), torch.optim.RMSprop], ids=["adam", "sgd", "rms"]
)
def test_two_steps_with_one_optimizer(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    first, second = (sw.Step(model, optimizer, losses_of, samples=8, recheck=False) for _ in range(2))
    first(rows(0, 4))
    before = state(first)
    second(rows(0, 8))
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(sw.ParameterError, match=CHANGED.format("(removed|replaced)")):
        first(rows(4, 8))
    second(rows(0, 4))
    with pytest.raises(sw.ParameterError, match=CHANGED.format("(removed|replaced)")):
        [step(rows(4, 8)) for step in (first, second)]


def test_the_optimizer_is_free_after_zero_grad_and_without_the_step():
    step = make(samples=8)
    step(rows(0, 4))
    optimizer = step.optimizer
    optimizer.zero_grad()
    losses_of(step.model, rows(0, 3)).sum().backward()
    optimizer.step()  # not the sums of the window
    with pytest.raises(sw.ParameterError, match=CHANGED.format("replaced")):
        step(rows(4, 8))
    step(rows(0, 4))
    losses_of(step.model, rows(0, 3)).sum().backward()
    del step
    gc.collect()
    optimizer.step()


def test_hooks_of_the_optimizer_stay_as_they_are():
    step = make(samples=8)
    calls = []
    handle = step.optimizer.register_step_pre_hook(lambda *_: calls.append(0))
    for _ in range(2):
        step(rows(0, 4))
        step(rows(4, 8))
    handle.remove()
    assert len(calls) == 2
    assert not step.optimizer._optimizer_step_pre_hooks


# ------------------------------------------------------------- parameters and the loss function


@pytest.mark.parametrize("act", ["add", "remove"])
def test_parameters_of_the_optimizer_that_change(act):
    step = make()
    step.accumulate(rows(0, 5))
    groups = step.optimizer.param_groups
    if act == "add":
        step.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2).double())]})
    else:
        groups[0]["params"].pop()
    with pytest.raises(
        sw.ParameterError, match="parameters of the optimizer must stay the same while a window is open"
    ):
        step.apply()


@pytest.mark.parametrize("options", [{"microbatch": 4}, {"samples": 12, "microbatch": 5, "recheck": False}], ids=str)
@pytest.mark.parametrize("transforms", [*CHAINS.values(), *DEFERRED.values()], ids=[*CHAINS, *DEFERRED])
@pytest.mark.parametrize("act", ["zero_grad", "backward"])
def test_a_loss_function_that_changes_gradients(act, transforms, options):
    """In a first microbatch there is nothing to clear."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(model, batch):
        if act == "zero_grad":
            optimizer.zero_grad()
        else:
            losses_of(model, rows(0, 2)).sum().backward()
        return losses_of(model, batch)

    step = sw.Step(model, optimizer, losses, transforms=transforms, **options)
    before = state(step)
    with pytest.raises(sw.ParameterError, match=CHANGED.format("(added|removed|changed in place)")):
        step(rows(0, 12))
    close(state(step), before, rtol=0, atol=0)
