"""The updates of a resumed step are compiled if, and only if, those of the uninterrupted one are."""

import copy
import functools
import sys
import types
import typing

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.errors import TrainingWarning
from samplewise.step.compiled import program_cache
from samplewise.step.compiled.program import Program
from samplewise.step.compiled.verify import DRY_RUN

pytestmark = pytest.mark.usefixtures("interpreted")
BATCHES = 9
AT = 4  # batch before which the change happens


class Run:
    def __init__(self, samples=None, first_call=lambda: lambda: 1.0, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.factors = factors = [1.0]
        factor = first_call()

        def loss_fn(model, batch):
            return factors[0] * factor() * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        self.step = sw.Step(self.model, self.optimizer, loss_fn, samples, compile=True, recheck=False, **options)

    def train(self, start, stop, change):
        """Number of compiled microbatches of each update."""
        compiled = []
        if start > AT:
            change(self)
        for number in range(start, stop):
            if number == AT:
                change(self)
            torch.manual_seed(number)
            batch = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
            for _ in self.step.over([batch]):
                compiled.append(len(calls))
                calls.clear()
        return compiled

    def state(self):
        return copy.deepcopy([part.state_dict() for part in (self.model, self.optimizer, self.step)])

    def load(self, state):
        for part, saved in zip((self.model, self.optimizer, self.step), state, strict=True):
            part.load_state_dict(saved)


def closure(run):
    run.factors[0] = 0.5


def transforms(run):
    run.step.transforms = [sw.clip(0.5)]


def max_grad_norm(run):
    run.step.max_grad_norm = 0.25


def samples(run):
    run.step.samples = 3


def frozen(run):
    run.model[0].bias.requires_grad_(False)


def equal_transforms(run):
    """Other objects with the same settings, as a callback may set them at the start of each epoch."""
    run.step.transforms = [sw.clip(0.8), sw.weight(halves)]


def other_function(run):
    """A function of the same name."""
    run.step.transforms = [sw.clip(0.8), sw.weight(other_halves())]


def nothing(run):
    pass


def microbatch(run):
    run.step.microbatch = 2


def halves(losses):
    return torch.full_like(losses, 0.5)


def other_halves():
    def halves(losses):
        return torch.full_like(losses, 0.25)

    return halves


calls = []  # of programs since the last update


@pytest.fixture(autouse=True)
def _counted_calls(monkeypatch):
    def counted(program, start, hyperparameter_version):
        results = run(program, start, hyperparameter_version)
        if hyperparameter_version != DRY_RUN and results is not None:
            calls.append(start)
        return results

    run = Program.__call__
    monkeypatch.setattr(Program, "__call__", counted)
    calls.clear()


OPTIONS = {
    "batches": {},
    "parts of batches": {"samples": 2},
    "microbatches": {"samples": 6, "microbatch": 3},
    "transforms": {"transforms": [sw.clip(0.8), sw.weight(halves)]},
}
CHANGES = (nothing, closure, transforms, max_grad_norm, samples, frozen, microbatch, equal_transforms, other_function)


@pytest.mark.sweep(1 / 36)
@pytest.mark.filterwarnings("ignore::samplewise.errors.TrainingWarning")
@pytest.mark.parametrize("case", [(change, name) for change in CHANGES for name in OPTIONS])
def test_the_same_updates_are_compiled(case):
    change, name = case
    options = OPTIONS[name]
    whole = Run(**options)
    made = []
    states = []
    for number in range(BATCHES):
        states.append(whole.state())
        made.append(whole.train(number, number + 1, change if number == AT else nothing))
    assert any(map(any, made))
    if change in (equal_transforms, other_function):  # the first update of other transforms is checked for mistakes
        assert made[AT] == [int(change is equal_transforms)] * len(made[AT]) or options.get("transforms") is None
    for number in (2, AT, AT + 1, BATCHES - 1):
        resumed = Run(**options)
        resumed.load(states[number])
        compiled = resumed.train(number, BATCHES, change)
        assert compiled == [count for of_batch in made[number:] for count in of_batch], number
        for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_changes_are_counted_over_resumes(monkeypatch):
    monkeypatch.setattr(program_cache, "CHANGES", 2)
    run = Run()
    run.train(0, 2, nothing)
    for k in range(3):
        run.factors[0] = 2.0 + k
        if k == 2:
            with pytest.warns(TrainingWarning, match="have changed 3 times"):
                run.train(5, 6, nothing)
        else:
            run.train(5, 6, nothing)
        state = run.state()
        factor = run.factors[0]
        run = Run()
        run.load(state)
        run.factors[0] = factor
        run.train(5, 6, nothing)
    assert run.step.compiled == "the model, the optimizer or the settings have changed 3 times"


def test_a_warning_is_no_change(monkeypatch):
    """Python notes warnings in the module that has caused them, again in each process."""
    monkeypatch.setattr(program_cache, "CHANGES", 0)
    module = types.ModuleType("warns_in_updates")
    exec("SCALE = 1.0\ndef scale():\n    return SCALE", vars(module))
    run = Run(first_call=lambda: lambda: module.scale())
    run.train(0, 3, nothing)
    vars(module)["__warningregistry__"] = {}
    assert run.train(3, 5, nothing) == [1, 1]
    module.scale = lambda: 2.0
    with pytest.warns(TrainingWarning, match="have changed 1 times"):
        run.train(5, 6, nothing)


def test_a_shape_whose_speed_was_not_measured_is_measured_after_a_resume(monkeypatch):
    """The first update that could be measured was not finite."""
    measured = []
    monkeypatch.setattr(program_cache, "refuse_slower", lambda *_: measured.append(1))
    run = Run(on_nonfinite="skip")
    run.train(0, 1, nothing)
    run.factors[0] = float("inf")
    run.train(1, 2, nothing)
    assert not measured
    state = run.state()
    resumed = Run(on_nonfinite="skip")
    resumed.load(state)
    resumed.train(2, 4, nothing)
    assert measured == [1]


# --- first calls in a process ----------------------------------------------------------------------------------------
# Each makes a function that does something else in its first call: a resumed run compiles the update in which it is
# called for the first time, an uninterrupted one a later update.


def cached_attribute():
    class Mask:
        values = None

        def __call__(self):
            if self.values is None:
                self.values = torch.ones(6, dtype=torch.float64)
            return self.values

    return Mask()


def cached_in_a_dict():
    cache = {}

    def factor():
        if "scale" not in cache:
            cache["scale"] = 1.0
        return cache["scale"]

    return factor


def cached_function():
    @functools.lru_cache
    def factor():
        return torch.ones(6, dtype=torch.float64)

    return factor


def imported():
    sys.modules.pop("imported_by_the_loss", None)

    def factor():
        import imported_by_the_loss

        return imported_by_the_loss.FACTOR

    return factor


def read_from_a_file():
    content = []

    def factor():
        if not content:
            with open(__file__) as file:
                content.append(float(len(file.readline()) > 0))
        return content[0]

    return factor


def caches_of_typing():
    """torch makes an Optional in each update of an optimizer; it calls typing_extensions if no cache has it."""
    for clear in typing._cleanups:
        clear()
    return lambda: 1.0


FIRST_CALLS = (cached_attribute, cached_in_a_dict, cached_function, imported, read_from_a_file, caches_of_typing)


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("first_call", FIRST_CALLS)
def test_a_first_call_in_the_process(first_call, tmp_path, monkeypatch):
    (tmp_path / "imported_by_the_loss.py").write_text("def make():\n    return 1.0\n\n\nFACTOR = make()\n")
    monkeypatch.syspath_prepend(tmp_path)
    whole = Run(first_call=first_call)
    whole.train(0, 1, nothing)
    states = []
    made = []
    for number in range(1, 4):
        states.append(whole.state())
        made += whole.train(number, number + 1, nothing)
    assert made == [1, 1, 1]
    for number, state in enumerate(states, start=1):
        resumed = Run(first_call=first_call)
        resumed.load(state)
        assert resumed.train(number, 4, nothing) == made[number - 1 :], number
        for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(a, b)


# --- changes that come and go ----------------------------------------------------------------------------------------


def hook_at_the_start(run, number):
    """A hook that is there when an update could be compiled for the first time."""
    hook(run, number, at=1)


def hook_later(run, number):
    hook(run, number, at=AT)


def hook(run, number, at):
    if number == at:
        run.hook = run.model[0].register_forward_hook(lambda *_: None)
    elif getattr(run, "hook", None) is not None:
        run.hook.remove()


def another_value_in_each_update(run, number):
    run.factors[0] = 1.0 + number


@pytest.mark.sweep(1 / 3)
@pytest.mark.filterwarnings("ignore::samplewise.errors.TrainingWarning")
@pytest.mark.parametrize("before", [hook_at_the_start, hook_later, another_value_in_each_update])
def test_changes_that_come_and_go(before, monkeypatch):
    monkeypatch.setattr(program_cache, "CHANGES", 4)
    whole = Run()
    states = []
    made = []
    for number in range(BATCHES):
        states.append(whole.state())
        before(whole, number)
        made += whole.train(number, number + 1, nothing)
    expected = {
        hook_at_the_start: [0] * BATCHES,
        hook_later: [0, 1, 1, 1, 0, 1, 1, 1, 1],
        another_value_in_each_update: [0, 1, 1, 1, 1, 1, 0, 0, 0],
    }
    assert made == expected[before]
    for start in range(1, BATCHES):
        resumed = Run()
        resumed.load(states[start])
        compiled = []
        for number in range(start, BATCHES):
            before(resumed, number)
            compiled += resumed.train(number, number + 1, nothing)
        assert compiled == made[start:], start
        for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(a, b)
