"""The updates of a resumed step are compiled if, and only if, those of the uninterrupted one are."""

import copy

import pytest
import torch
from daily import daily
from torch import nn

import samplewise as sw
from samplewise.errors import TrainingWarning
from samplewise.step.compiled import programs
from samplewise.step.compiled.program import Program

pytestmark = pytest.mark.usefixtures("interpreted")
BATCHES = 9
AT = 4  # batch before which the change happens


class Run:
    def __init__(self, samples=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.factors = factors = [1.0]

        def loss_fn(model, batch):
            return factors[0] * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        self.step = sw.Step(self.model, self.optimizer, loss_fn, samples, compile=True, audit=False, **options)

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


def nothing(run):
    pass


def microbatch(run):
    run.step.microbatch = 2


calls = []  # of programs since the last update


@pytest.fixture(autouse=True)
def _counted_calls(monkeypatch):
    def counted(program, start, era):
        results = run(program, start, era)
        if era != -2 and results is not None:  # not a rehearsal
            calls.append(start)
        return results

    run = Program.__call__
    monkeypatch.setattr(Program, "__call__", counted)
    calls.clear()


OPTIONS = {"batches": {}, "parts of batches": {"samples": 2}, "microbatches": {"samples": 6, "microbatch": 3}}
CHANGES = (nothing, closure, transforms, max_grad_norm, samples, frozen, microbatch)
DAILY = [(transforms, "batches"), (closure, "microbatches"), (max_grad_norm, "parts of batches")]


@pytest.mark.filterwarnings("ignore::samplewise.errors.TrainingWarning")
@pytest.mark.parametrize("case", daily([(change, name) for change in CHANGES for name in OPTIONS], DAILY))
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
    for number in (2, AT, AT + 1, BATCHES - 1):
        resumed = Run(**options)
        resumed.load(states[number])
        compiled = resumed.train(number, BATCHES, change)
        assert compiled == [count for of_batch in made[number:] for count in of_batch], number
        for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_changes_are_counted_over_resumes(monkeypatch):
    monkeypatch.setattr(programs, "CHANGES", 2)
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


def test_a_shape_whose_speed_was_not_measured_is_measured_after_a_resume(monkeypatch):
    """The first update that could be measured was not finite."""
    measured = []
    monkeypatch.setattr(programs, "refuse_slower", lambda *_: measured.append(1))
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
