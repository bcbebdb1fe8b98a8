"""A sample computed alone must be what it is among others: said when it is not, and without leaving a trace."""

import random
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unrestored import Unrestored

import samplewise as sw
from samplewise.step import forward

CLIP = [sw.clip(1.0)]
transforms = pytest.mark.parametrize("transforms", [(), CLIP], ids=["plain", "clip"])


def mlp(*between):
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 1))


def squares(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y).square()


def batches(updates=6, samples=8):
    torch.manual_seed(1)
    return [(torch.randn(samples, 6), torch.randn(samples)) for _ in range(updates)]


def make(model, loss_fn=squares, lr=0.01, **options):
    return sw.Step(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), loss_fn, **options)


def said(step, data):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.run(data)
    return [str(warning.message) for warning in caught]


# ------------------------------------------------------------- what is caught


class Later:
    """Mixes samples in one of four ways, once it is told to."""

    def __init__(self, way):
        self.way, self.on = way, False

    def __call__(self, model, batch):
        x, y = batch
        if not self.on:
            return squares(model, batch)
        if self.way == "losses":
            losses = squares(model, batch)
            return losses + losses.mean()
        if self.way == "targets":  # constants: autograd sees nothing of it
            return squares(model, (x, y - y.mean()))
        if self.way == "inputs":
            return squares(model, ((x - x.mean(0)) / x.std(0, correction=0).clamp(min=0.1), y))
        h = model(x).squeeze(1)  # the losses are right, their gradients are not
        return (h - y).square() + (h - h.detach()).mean()


@pytest.mark.parametrize(
    ("way", "transforms"),
    [("losses", ()), ("targets", ()), ("inputs", ()), ("gradients", ()), ("targets", CLIP), ("inputs", CLIP)],
    ids=str,
)
def test_interaction_that_begins_later(way, transforms):
    loss_fn = Later(way)
    step = make(mlp(), loss_fn, recheck=3, transforms=transforms)
    updates = step.over(batches(updates=9))
    for _ in range(3):  # numbers 0, 1 and 2, of which the first is looked at
        next(updates)
        loss_fn.on = True
    word = "the gradient of sample . of 8 differs by" if way == "gradients" else "sample . of 8 has loss .* alone"
    with pytest.raises(sw.SamplesInteractError, match=word):
        next(updates)
    assert step.counters.updates == 3


def swapped(y):
    """Labels of neighbors exchanged; the last one of an odd number stays."""
    even = len(y) // 2 * 2
    return torch.cat([y[:even].view(-1, 2).flip(1).flatten(), y[even:]])


def replaced(y, place):
    y = y.clone()
    y[place] = y[place - 1]
    return y


LABELS = {
    "flip": lambda y: y.flip(0),
    "roll": lambda y: y.roll(1),
    "roll back by two": lambda y: y.roll(-2),
    "sort": lambda y: y.sort().values,
    "neighbors exchanged": swapped,
    "halves exchanged": lambda y: y.roll(len(y) // 2),
    "fixed permutation": lambda y: y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))],
    "first label for all": lambda y: y[:1].expand(len(y)),
    "one wrong index": lambda y: replaced(y, 1),
    "last index wrong": lambda y: replaced(y, -1),
    "index far behind wrong": lambda y: replaced(y, min(15, len(y) - 1)),
    "exchange of two": lambda y: torch.cat([y[1:2], y[:1], y[2:]]),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("samples", [6, 7, 20])
@pytest.mark.parametrize("change", LABELS.values(), ids=LABELS)
def test_labels_of_other_samples_are_noticed_with_any_data(change, samples):
    """Also with two classes, where another sample often has the same label."""

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], change(batch[1]), reduction="none")

    for seed in range(6):
        torch.manual_seed(seed)
        y = torch.randint(2, (samples,)).float()
        y[:2] = torch.tensor([0.0, 1.0])
        if torch.equal(change(y), y):
            y = y.flip(0)
        step = make(mlp(), loss_fn, transforms=CLIP)
        with pytest.raises(sw.SamplesInteractError, match=r"sample .* has loss .* (alone|changed places)\."):
            step.run([(torch.randn(samples, 6), y)])
        assert step.counters.updates == 0


MIXTURES = {
    "centered inputs": lambda model, x, y: squares(model, (x - x.mean(0), y)),
    "cumulative inputs": lambda model, x, y: squares(model, (x.cumsum(0), y)),
    "cumulative losses": lambda model, x, y: squares(model, (x, y)).cumsum(0).detach() * squares(model, (x, y)),
    "detached mean": lambda model, x, y: squares(model, (x, y)) / squares(model, (x, y)).mean().detach(),
    "detached rank": lambda model, x, y: squares(model, (x, y)) * squares(model, (x, y)).detach().argsort().argsort(),
    "largest loss only": lambda model, x, y: (losses := squares(model, (x, y))) * (losses == losses.max()),
    "weights by position": lambda model, x, y: squares(model, (x, y)) * torch.arange(len(y)),
    "gradient of the next sample": lambda model, x, y: (
        (h := model(x).squeeze(1)).sub(y).square() + (h - h.detach()).roll(1)
    ),
}


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
def test_mixtures_of_samples_are_noticed_with_any_data(mixture):
    for seed in range(4):
        torch.manual_seed(seed)
        step = make(mlp(), lambda model, batch: mixture(model, *batch))
        (word,) = said(step, [(torch.randn(7, 6), torch.randn(7))])
        assert word.startswith("samples depend on each other: ")


@pytest.mark.parametrize("way", ["losses", "gradients"])
def test_interaction_that_autograd_knows_of_needs_no_recheck_where_samples_have_gradients(way):
    loss_fn = Later(way)
    step = make(mlp(), loss_fn, transforms=CLIP)
    step.run(batches(updates=2))
    loss_fn.on = True
    with pytest.raises(sw.SamplesInteractError, match="mixes samples"):
        step.run(batches(updates=1))


@pytest.mark.parametrize("recheck", [None, False])
def test_interaction_that_begins_later_is_not_seen_without_a_recheck(recheck):
    loss_fn = Later("targets")
    step = make(mlp(), loss_fn, recheck=recheck)
    for _ in step.over(batches()):
        loss_fn.on = True
    assert step.counters.updates == 6


@transforms
def test_targets_mixed_from_the_beginning(transforms):
    """With transforms refused, without them a word; with a recheck refused as well."""
    loss_fn = Later("targets")
    loss_fn.on = True
    if transforms:
        with pytest.raises(sw.SamplesInteractError, match=r"in the batch and .* alone"):
            make(mlp(), loss_fn, transforms=transforms).run(batches())
    else:
        (word,) = said(make(mlp(), loss_fn), batches())
        assert "samples depend on each other: sample " in word
    with pytest.raises(sw.SamplesInteractError, match=r"in the batch and .* alone"):
        make(mlp(), loss_fn, transforms=transforms, recheck=2).run(batches())


def test_a_wrong_owner_in_the_engine(monkeypatch):
    """Gradients given to the neighbor."""
    right = forward.gradients_of
    step = make(mlp(), transforms=CLIP, recheck=1)
    updates = step.over(batches())
    next(updates)
    monkeypatch.setattr(
        forward, "gradients_of", lambda losses, *rest, **options: right(losses.roll(1), *rest, **options)
    )
    with pytest.raises(sw.SamplesInteractError, match=r"gradient of sample \d of 8 differs by"):
        next(updates)


def test_what_is_caught_changes_nothing_and_the_step_goes_on():
    loss_fn, model, twin = Later("targets"), mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    data, step = batches(), make(model, loss_fn, recheck=1)
    step.run(data[:2])
    loss_fn.on = True
    with pytest.raises(sw.SamplesInteractError):
        step.run(data[2:3])
    loss_fn.on = False
    step.run(data[3:])
    make(twin, recheck=False).run(data[:2] + data[3:])
    assert_same(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("bad", [True, 0, -1, 2.5, "always"])
def test_what_recheck_may_be(bad):
    with pytest.raises(ValueError, match="recheck must be a positive number of updates, None or False"):
        make(mlp(), recheck=bad)


# ------------------------------------------------------------- no trace


class Busy(nn.Module):
    """Dropout, running statistics, a buffer that counts calls whatever the mode, and parts in eval mode."""

    def __init__(self, norm):
        super().__init__()
        self.f, self.g = mlp(nn.Dropout(0.4)), mlp(nn.Dropout(0.4)).eval()
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        x = self.norm(x)
        return self.f(x) + self.g(x) + (0.1 * torch.rand(len(x), 1) if self.training else 0)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        assert torch.equal(found[name], right), name


@pytest.mark.filterwarnings("ignore:modules are in eval mode:samplewise.TrainingWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(samples=12, microbatch=4),
        dict(transforms=CLIP),
        dict(transforms=[sw.normalize("mean"), sw.noise(0.1)], samples=12, microbatch=5),
        dict(precision="bf16-mixed"),
        dict(max_grad_norm=0.1, on_nonfinite="skip", record={"norms"}),
    ],
    ids=str,
)
def test_a_run_with_rechecks_is_bit_for_bit_the_run_without(options):
    own_gradients = "transforms" in options or "record" in options
    ended = []
    for recheck in (False, 1):
        torch.manual_seed(0)
        model, data = Busy(norm=not own_gradients and "samples" not in options), batches()
        modes = [module.training for module in model.modules()]
        torch.manual_seed(2)
        losses = [update.losses for update in make(model, recheck=recheck, **options).over(data)]
        assert [module.training for module in model.modules()] == modes
        ended.append(model.state_dict() | {"losses": torch.cat(losses), "random": torch.get_rng_state()})
    assert_same(*ended)


@pytest.mark.filterwarnings("ignore:modules are in eval mode:samplewise.TrainingWarning")
def test_two_runs_without_rechecks_are_bit_for_bit_the_same():
    """Else the test above says nothing."""
    kept, seen = [], set()  # so that each model lies elsewhere in memory
    for _ in range(12):
        torch.manual_seed(0)
        kept.append((Busy(norm=False), [object() for _ in range(100)]))
        step = make(kept[-1][0], recheck=False, transforms=CLIP)
        seen.add(tuple(torch.cat([update.norms for update in step.over(batches())]).tolist()))
    assert len(seen) == 1


def test_the_look_comes_back_to_the_modes_it_found_before_the_update():
    looks = Unrestored()

    def loss_fn(model, batch):
        looks.append([module.training for module in model.modules()])
        return squares(model, batch)

    model = mlp(nn.Dropout(), nn.Dropout())
    model[2].eval()
    modes = [module.training for module in model.modules()]
    with pytest.warns(sw.TrainingWarning, match="eval mode while training: 2"):
        make(model, loss_fn).run(batches(updates=1))
    seen = looks.take()
    assert seen[-1] == modes
    assert not any(any(look) for look in seen[:-1])
    assert len(seen) > 1


def test_gradients_are_untouched_while_looking():
    """Those of the open window are of no concern to it, and other people's neither."""
    other = nn.Parameter(torch.ones(6))
    other.grad = torch.full((6,), 7.0)
    data = batches()
    make(mlp(), lambda model, batch: squares(model, (batch[0] * other, batch[1])), recheck=1, transforms=CLIP).run(data)
    assert torch.equal(other.grad, torch.full((6,), 7.0))


class Merged(nn.Linear):
    """As loralib: eval() adds the low-rank product to the weight, train() takes it away again."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down).data
            self.merged = not mode
        return self

    def forward(self, x):
        base = F.linear(x, self.weight, self.bias)
        return base if self.merged else base + x @ self.down.T @ self.up.T


def test_modules_that_do_something_on_changing_mode_are_left_in_order():
    model = nn.Sequential(Merged(6, 8), nn.Tanh(), nn.Linear(8, 1))
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = model[0].weight.clone()
    sw.Step(model, torch.optim.SGD(trained, lr=0.01), squares).run(batches(updates=1))
    assert not model[0].merged
    assert torch.equal(model[0].weight, frozen)


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()).item(), random.random, np.random.rand], ids=["torch", "random", "numpy"]
)
@pytest.mark.parametrize("recheck", [None, 1])
def test_random_numbers_are_not_used_up(draw, recheck):
    """Of whichever generator the loss function draws its augmentations from."""
    drawn = []

    def loss_fn(model, batch):
        number = draw()
        if model.training:
            drawn.append(number)
        return squares(model, batch)

    def begin():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)

    step, data = make(mlp(), loss_fn, recheck=recheck), batches(updates=3)
    begin()
    expected = [draw() for _ in range(3)]
    begin()
    step.run(data)
    assert drawn == expected


# ------------------------------------------------------------- what it costs


class Counted:
    def __init__(self):
        self.sizes = Unrestored()

    @property
    def calls(self):
        return len(self.sizes)

    def __call__(self, model, batch):
        self.sizes.append(len(batch))
        return squares(model, batch)


@transforms
@pytest.mark.parametrize(("numbers", "pieces"), [({}, 1), (dict(samples=8, microbatch=3), 3)])
def test_without_recheck_each_piece_is_computed_once(transforms, numbers, pieces):
    loss_fn = Counted()
    make(mlp(), loss_fn, recheck=False, transforms=transforms, **numbers).run(batches(updates=4))
    assert loss_fn.calls == 4 * pieces


def calls_of_each_update(recheck):
    loss_fn, calls = Counted(), []
    for _ in make(mlp(), loss_fn, recheck=recheck).over(batches()):
        calls.append(loss_fn.calls - sum(calls))
    return calls


def test_by_default_only_the_first_update_is_looked_at():
    first, *others = calls_of_each_update(None)
    assert first > 1
    assert others == [1] * 5


def test_an_recheck_looks_every_so_many_updates():
    looked_at = [calls > 1 for calls in calls_of_each_update(2)]
    assert looked_at == [True, False, True, False, True, False]


# ------------------------------------------------------------- what is left alone


@transforms
def test_dropout_is_switched_off_for_the_look(transforms):
    assert said(make(mlp(nn.Dropout(0.5)), recheck=1, transforms=transforms), batches()) == []


@transforms
def test_losses_that_are_random_even_in_eval_mode(transforms):
    def loss_fn(model, batch):
        return squares(model, (F.dropout(batch[0], 0.5, training=True), batch[1]))

    assert said(make(mlp(), loss_fn, recheck=1, transforms=transforms), batches()) == []


@transforms
def test_random_losses_of_pairs_of_rows(transforms):
    """Fewer losses than rows: rows that change places are not the samples of the same number."""

    def loss_fn(model, batch):
        outputs = model(F.dropout(batch[0], 0.5, training=True)).squeeze(1)
        return (outputs[0::2] - outputs[1::2]).square()

    assert said(make(mlp(), loss_fn, transforms=transforms), batches()) == []


def only_in_training(model, batch):
    if not model.training:
        raise RuntimeError("no auxiliary head in eval mode")
    return squares(model, batch)


@transforms
def test_a_loss_function_that_fails_in_eval_mode(transforms):
    assert said(make(mlp(), only_in_training, transforms=transforms), batches()) == []


def test_a_loss_function_that_fails_in_eval_mode_cannot_be_rechecked_and_that_is_said_once():
    step = make(mlp(), only_in_training, recheck=1)
    (word,) = said(step, batches())
    assert word == "the recheck could not compute a sample alone in eval mode: no auxiliary head in eval mode"
    assert step.counters.updates == 6


def test_a_loss_function_that_fails_for_one_sample():
    def loss_fn(model, batch):
        if len(batch[1]) == 1:
            raise RuntimeError("needs two")
        return squares(model, batch)

    assert said(make(mlp(), loss_fn), batches()) == []
    words = said(make(mlp(), loss_fn, recheck=6), batches())
    assert words == ["the recheck could not compute a sample alone in eval mode: needs two"]


@dataclass
class Pairs:
    left: torch.Tensor
    right: torch.Tensor  # two rows per sample


def test_batches_that_cannot_be_cut():
    def loss_fn(model, batch):
        return (model(batch.left) - model(batch.right).view(-1, 2)).square().mean(1)

    data = [Pairs(torch.randn(4, 6), torch.randn(8, 6)) for _ in range(3)]
    assert said(make(mlp(), loss_fn, recheck=1), data) == []


def test_several_samples_in_a_row():
    def loss_fn(model, batch):
        return model(batch[0]).view(-1, 2).mean(1).square()

    assert said(make(mlp(), loss_fn, recheck=1), batches()) == []


@pytest.mark.parametrize("numbers", [dict(samples=1), dict(microbatch=1)], ids=str)
def test_single_samples(numbers):
    assert said(make(mlp(), recheck=1, **numbers), batches()) == []


def test_losses_with_counts():
    def loss_fn(model, batch):
        return squares(model, batch), 1 + batch[1].abs()

    assert said(make(mlp(), loss_fn, recheck=1), batches()) == []


@transforms
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_rounding_is_no_interaction(precision, transforms):
    """A wider net, whose products are summed in another order for one row than for 64."""
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 1))
    data = [(10 * torch.randn(64, 64), torch.randn(64)) for _ in range(10)]
    assert said(make(model, lr=1e-4, recheck=1, precision=precision, transforms=transforms), data) == []


@transforms
def test_a_classifier_that_knows_everything_is_no_interaction(transforms):
    """Losses of 1e-6 and less, and gradients of which float32 leaves a digit or two."""
    x = torch.randn(64, 6)
    y = (x[:, 0] > 0).long()
    x[:, 0] += 4 * y - 2
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    step = make(model, nn.CrossEntropyLoss(), lr=1.0, recheck=1, transforms=transforms)
    assert said(step, loader) == []
    for _ in range(50):
        assert said(step, loader) == []
    assert F.cross_entropy(model(x), y) < 1e-3


# ------------------------------------------------------------- errors of the loss function


class Fails(Counted):
    """A loss function that raises in some of its calls, counted from 1."""

    def __init__(self, error, when):
        super().__init__()
        self.error, self.when = error, when

    def __call__(self, model, batch):
        losses = super().__call__(model, batch)
        if self.when(self.calls):
            raise self.error
        return losses


ERRORS = [ValueError("broken file"), OSError("no such row"), KeyError("label"), AssertionError("no label")]


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("recheck", [None, 3])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_in_one_of_the_first_calls_reaches_the_user(error, recheck, call):
    step = make(mlp(), Fails(error, lambda calls: calls == call), recheck=recheck)
    before = [p.clone() for p in step.model.parameters()]
    with pytest.raises(type(error)) as found:
        step.run(batches())
    assert found.value is error
    assert step.counters.updates == 0 and not step._has_pending_samples
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert step.run(batches()).updates == 6  # as if nothing had been


@pytest.mark.parametrize("calls", range(1, 8))
def test_an_error_in_all_of_the_first_calls_reaches_the_user(calls):
    error = ValueError("not ready")
    step = make(mlp(), Fails(error, lambda call: call <= calls))
    with pytest.raises(ValueError, match="not ready"):
        step.run(batches())
    assert step.counters.updates == 0


def test_an_error_of_the_model_in_its_first_call_reaches_the_user():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.loaded = nn.Linear(6, 1), False

        def forward(self, x):
            if not self.loaded:
                self.loaded = True
                raise ConnectionError("weights could not be fetched")
            return self.inner(x)

    with pytest.raises(ConnectionError, match="weights could not be fetched"):
        make(Lazy()).run(batches())


def test_an_error_of_the_optimizer_in_its_first_call_reaches_the_user():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *given: (_ for _ in ()).throw(ValueError("no such group")))
    with pytest.raises(ValueError, match="no such group"):
        sw.Step(model, optimizer, squares).run(batches())


@pytest.mark.parametrize("call", [1, 3])
def test_an_error_in_a_recheck_later_on_reaches_the_user(call):
    loss_fn = Fails(ValueError("gone"), lambda calls: False)
    step = make(mlp(), loss_fn, recheck=3)
    updates = step.over(batches(updates=9))
    for _ in range(3):
        next(updates)
    at = loss_fn.calls + call
    loss_fn.when = lambda calls: calls == at
    with pytest.raises(ValueError, match="gone"):
        next(updates)


def test_a_loss_function_of_whole_batches_is_excused():
    """Eight of its samples, or one, are refused every time; all of them are not."""

    def whole(model, batch):
        assert len(batch[0]) == 20
        return squares(model, batch)

    assert make(mlp(), whole).run(batches(samples=20)).updates == 6


def test_an_error_of_eval_mode_alone_is_excused_once_training_is_seen_to_work():
    modes = Unrestored()

    def loss_fn(model, batch):
        modes.append(model.training)
        assert model.training
        return squares(model, batch)

    assert make(mlp(nn.Dropout(0.5)), loss_fn).run(batches()).updates == 6
    assert modes.take() == [False, True, False] + [True] * 6
