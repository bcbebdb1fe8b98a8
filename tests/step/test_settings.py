"""Settings of a step that are changed between updates, and attributes that cannot be assigned."""

import copy

import pytest
import torch
from by_hand import LR, clipped, close, counted, cut, descend, mlp, one_by_one, squared
from torch import nn
from torch.utils.data import TensorDataset

import samplewise as sw

GENERATOR = torch.Generator().manual_seed(5)
DATA = {
    "x": torch.randn(24, 4, generator=GENERATOR, dtype=torch.float64),
    "y": torch.randn(24, 3, generator=GENERATOR, dtype=torch.float64),
    "n": torch.randint(1, 6, (24,), generator=GENERATOR),
}


def step_of(model, **options):
    return sw.Step(model, sw.sgd(LR), squared, **options)


def by_loop(model, size, bounds):
    """Updates of `size` samples each, clipped to the bound of each update; None: not clipped."""
    for batch, bound in zip(cut(DATA, size), bounds, strict=True):
        window = one_by_one(model, squared, batch)
        c = torch.ones(size).double() if bound is None else clipped(window.norms, bound)
        descend(model, window.grads, c, size)


# --- settings that take effect ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [4, 24])
def test_transforms_take_effect_at_the_next_window(batch):
    ours, theirs = mlp(), mlp()
    bounds = [None, 2.0, 2.0, 0.5, None, None]
    step = step_of(ours, samples=4, recheck=False)
    for update, bound in zip(step.over(cut(DATA, batch)), [*bounds[1:], None], strict=True):
        if bound != bounds[update.index]:
            step.transforms = [] if bound is None else [sw.clip(bound)]
    by_loop(theirs, 4, bounds)
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    assert not step.transforms.transforms


def test_an_open_window_keeps_its_transforms_and_bounds():
    """Its sums, its noise and its division belong to the settings with which it was begun."""
    ours, theirs = mlp(), mlp()
    step = step_of(ours, samples=4, transforms=[sw.clip(2.0)])
    (first, second), third = cut({name: values[:4] for name, values in DATA.items()}, 2), cut(DATA, 4)[1]
    assert step(first) == []
    step.transforms = [sw.weight(lambda losses: torch.zeros_like(losses)), sw.noise(1e6)]
    step.max_grad_norm = 1e-6
    (update,) = step(second)
    close(update.weights, clipped(update.norms, 2.0))
    by_loop_model = copy.deepcopy(theirs)
    window = one_by_one(by_loop_model, squared, cut(DATA, 4)[0])
    descend(by_loop_model, window.grads, clipped(window.norms, 2.0), 4)
    close(dict(ours.named_parameters()), dict(by_loop_model.named_parameters()))
    step.transforms = []
    before = torch.cat([p.detach().flatten() for p in ours.parameters()])
    (update,) = step(third)
    moved = (torch.cat([p.detach().flatten() for p in ours.parameters()]) - before).norm().item()
    assert moved == pytest.approx(LR * 1e-6, rel=1e-3)  # max_grad_norm holds from this window on


def test_max_grad_norm_and_microbatch_take_effect():
    ours, theirs = mlp(), mlp()
    step = step_of(ours, samples=8)
    first, second, third = cut(DATA, 8)
    step(first)
    step.max_grad_norm = 0.5
    step.microbatch = 3
    step(second)
    assert step.counters.microbatches == 1 + 3
    step.max_grad_norm = None
    step(third)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=LR)
    for batch, bound in ((first, None), (second, 0.5), (third, None)):
        optimizer.zero_grad()
        squared(theirs, batch).mean().backward()
        if bound:
            nn.utils.clip_grad_norm_(theirs.parameters(), bound)
        optimizer.step()
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    assert (step.max_grad_norm, step.microbatch) == (None, 3)


def test_a_curriculum_in_the_trainer():
    """A callback changes the transforms after an epoch; the open window of tail="carry" keeps its own."""

    class Harder:
        def on_epoch_end(self, trainer, epoch):
            trainer.step.transforms = [sw.clip(2.0 / (epoch + 2))]

    ours, theirs = mlp(), mlp()
    trainer = sw.Trainer(step_of(ours, samples=16, tail="carry"), callbacks=[Harder()], progress=False, device="cpu")
    trainer.fit([DATA], epochs=2)  # 24 samples each: windows 0..15, then 16..23 and 0..7 (begun unclipped), 8..23
    doubled = {name: torch.cat([values, values]) for name, values in DATA.items()}
    for batch, bound in zip(cut(doubled, 16), (None, None, 1.0), strict=True):
        window = one_by_one(theirs, squared, batch)
        c = torch.ones(16).double() if bound is None else clipped(window.norms, bound)
        descend(theirs, window.grads, c, 16)
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.mark.parametrize(
    ("samples", "sizes"), [(20, [20, 20]), (40, [40]), (10, [12, 10, 10, 10]), (None, [42])], ids=str
)
def test_samples_apply_to_an_open_window(samples, sizes):
    """Before, a larger number after tail="carry" never ended."""
    step = sw.Step(nn.Linear(4, 3), sw.sgd(LR), nn.MSELoss(), samples=15, tail="carry")
    x, y = torch.randn(30, 4), torch.randn(30, 3)
    assert [update.samples for update in step.over([(x[:27], y[:27])])] == [15]
    step.samples = samples
    assert [update.samples for update in step.over([(x, y)])] == sizes


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("transforms", [(), [sw.drop(largest=1)]], ids=str)
@pytest.mark.parametrize("stop", [3, 9])
def test_a_resumed_window_gets_the_settings_of_on_epoch_start(tmp_path, transforms, stop):
    """Bit-identical after a stop in the middle of a window, whatever the script creates the step with."""

    class Harder:
        def on_epoch_start(self, step, epoch):
            step.transforms = [sw.clip(1 / (epoch + 1))]
            step.max_grad_norm = 0.5 / (epoch + 1)
            step.samples = 12 + epoch

    class Batches:
        """24 samples; `stop`: the number of the batch that stops the training."""

        def __init__(self, stop=None):
            self.stop = stop
            self.count = 0

        def __iter__(self):
            for batch in cut(DATA, 4):
                self.count += 1
                if self.count == self.stop:
                    raise sw.LoaderStopped
                yield batch

    def fit(run, loader, **options):
        step = step_of(mlp(), samples=12, transforms=transforms)
        sw.Trainer(step, run, [Harder()], progress=False, device="cpu").fit(loader, epochs=3, **options)
        return step

    whole = fit(tmp_path / "whole", Batches())
    assert fit(tmp_path / "stopped", Batches(stop))._has_pending_samples
    resumed = fit(tmp_path / "stopped", Batches(), resume=True)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_new_transforms_are_checked_at_their_first_window():
    step = step_of(mlp())
    first, second, third = cut(DATA, 8)
    step(first)
    step.transforms = [sw.weight(lambda losses: losses * 0)]
    with pytest.raises(sw.TransformError, match="at least one sample of the first update must have a nonzero weight"):
        step(second)
    step.transforms = [sw.weight(lambda losses: losses / losses.mean())]
    with pytest.warns(sw.TrainingWarning, match="gives a sample another weight"):
        step(third)


# --- what cannot be assigned ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("loss_fn", r"Create a new Step, or let the loss function read a variable that you change\."),
        ("precision", r"It is fixed when the Step is created: create a new one\."),
        ("record", r"Call step\.require\(norms=True\)\."),
        ("optimizer", r"Create a new Step, or change the settings in step\.optimizer\.param_groups\."),
        ("scheduler", r"It is fixed when the Step is created"),
        ("model", r"It is fixed when the Step is created"),
        ("on_nonfinite", r"It is fixed when the Step is created"),
        ("transform", r"Did you mean 'transforms'\?"),
        ("micro_batch", r"Did you mean 'microbatch'\?"),
        ("nonsense", r"found 'nonsense'\.$"),
    ],
)
def test_attributes_without_effect_are_refused(name, remedy):
    step = step_of(mlp())
    message = (
        r"the attributes of a Step that can be assigned are samples, tail, transforms, max_grad_norm, microbatch; "
        rf"found '{name}'\. ?"
    )
    with pytest.raises(AttributeError, match=message) as caught:
        setattr(step, name, None)
    assert caught.match(remedy)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_grad_norm", -1, "max_grad_norm must be positive; found -1"),
        ("microbatch", 0, "microbatch must be a positive integer, None, 'auto' or sw.auto.*; found 0"),
        ("microbatch", "auto", "microbatch can be changed from one number to another; found an automatic size"),
        ("transforms", [3], "a transform must be one of clip, .*; found int"),
        ("samples", 0, "samples must be a positive integer, or None for one update per batch; found 0"),
    ],
)
def test_a_wrong_value_changes_nothing(name, value, message):
    step = step_of(mlp(), samples=4, microbatch=2, max_grad_norm=1.0)
    before = step.config
    with pytest.raises((ValueError, sw.TransformError), match=message):
        setattr(step, name, value)
    assert step.config is before
    assert step._windows.size.size == 2


@pytest.mark.parametrize("name", ["metrics", "callbacks", "step", "log_every", "foo"])
def test_attributes_of_a_trainer_are_fixed(name):
    trainer = sw.Trainer(step_of(mlp()), progress=False, device="cpu")
    remedy = "" if name == "foo" else r" It is fixed when the Trainer is created: create a new one\."
    message = rf"the attributes of a Trainer cannot be assigned; found '{name}'\.{remedy}$"
    with pytest.raises(AttributeError, match=message):
        setattr(trainer, name, [])


@pytest.mark.parametrize("data", [DATA["x"], DATA, TensorDataset(DATA["x"], DATA["y"]), 3, None])
def test_something_else_than_a_loader(data):
    step = step_of(mlp())
    trainer = sw.Trainer(step, progress=False, device="cpu")
    for use in (step.run, lambda data: list(step.over(data)), lambda data: trainer.fit(data, epochs=1)):
        with pytest.raises(sw.BatchError, match="a loader must be an iterable of batches; found a"):
            use(data)


def test_transforms_of_interacting_samples_are_rechecked_when_they_come():
    """Without transforms, samples that depend on each other are only warned about."""

    def mixing(model, batch):
        order = torch.randperm(len(batch["x"]))
        return (model(0.5 * batch["x"] + 0.5 * batch["x"][order]) - batch["y"]).square().sum(1)

    step = sw.Step(mlp(), sw.sgd(LR), mixing)
    with pytest.warns(sw.TrainingWarning, match="samples depend on each other"):
        step(DATA)
    step.transforms = [sw.clip(1.0)]
    with pytest.raises(sw.SamplesInteractError, match="samples must not depend on each other"):
        step(DATA)


def test_a_subclass_may_have_attributes_of_its_own():
    class Named(sw.Step):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.name = "mine"

    step = Named(mlp(), sw.sgd(LR), squared)
    assert step.name == "mine"
    with pytest.raises(AttributeError, match=r"of a Named that can be assigned are samples, tail, .*; found 'model'\."):
        step.model = mlp()


def test_a_step_can_be_copied():
    step = step_of(mlp(), samples=4, transforms=[sw.clip(1.0)])
    step.run(cut(DATA, 8)[:1])
    twin = copy.deepcopy(step)
    for each in (step, twin):
        each.run(cut(DATA, 8)[1:])
    close(dict(step.model.named_parameters()), dict(twin.model.named_parameters()))


# --- clip per count ---------------------------------------------------------------------------------------------------

per_count = pytest.mark.parametrize("microbatch", [None, 3])


@per_count
@pytest.mark.parametrize("mode", ["flat", "automatic"])
def test_clip_per_count_bounds_the_gradient_of_the_mean(microbatch, mode):
    ours, theirs = mlp(), mlp()
    bound, gamma = 1.5, 0.05
    transforms = [sw.clip(bound, per_count=True, mode=mode, gamma=gamma)]
    step = sw.Step(ours, sw.sgd(LR), counted, samples=8, microbatch=microbatch, transforms=transforms)
    for update, batch in zip(step.over(cut(DATA, 8)), cut(DATA, 8), strict=True):
        window = one_by_one(theirs, counted, batch)
        means = window.norms / window.counts
        c = clipped(means, bound) if mode == "flat" else bound / (means + gamma)
        descend(theirs, window.grads, c, window.counts.sum())
        close(update.weights, c)
        close(update.counts, window.counts.double(), check_dtype=False)
        assert (c < 1).sum() > 0
    close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_clip_per_count_of_each_parameter():
    model = mlp()
    transforms = [sw.clip(0.5, by="parameter", per_count=True)]
    (update,) = sw.Step(model, sw.sgd(LR), counted, transforms=transforms, microbatch=5).over(cut(DATA, 24))
    grads = one_by_one(mlp(), counted, DATA).grads
    for name, rows in grads.items():
        close(update.weights[name], clipped(rows.flatten(1).norm(dim=1) / DATA["n"], 0.5))


def test_clip_per_count_of_a_sample_without_counts_is_harmless():
    """A sequence of ignored tokens: gradient and count are 0."""
    logits = nn.Linear(4, 3).double()
    targets = torch.tensor([0, 1, -100, 2])
    for mode in ("flat", "automatic"):
        transforms = [sw.clip(0.1, per_count=True, mode=mode)]
        step = sw.Step(logits, sw.sgd(LR), nn.CrossEntropyLoss(), transforms=transforms)
        (update,) = step.over([(DATA["x"][:4], targets)])
        assert update.counts.tolist() == [1, 1, 0, 1]
        assert update.weights.isfinite().all()


def test_the_formula_of_clip_per_count():
    assert str(sw.chain(sw.clip(2.0, per_count=True))) == "(Σ c1·g) / Σ count\nc1 = min(1, 2.0·count/‖g‖)"
    automatic = sw.clip(2.0, mode="automatic", gamma=0.1, per_count=True)
    assert repr(automatic) == "clip(2.0, mode='automatic', gamma=0.1, per_count=True)"
    assert automatic.formula == "2.0·count/(‖{g}‖ + 0.1·count)"


def test_clip_per_count_of_groups_bounds_the_mean_of_the_group():
    model = mlp()
    transforms = [sw.group(lambda batch: batch["n"]), sw.clip(1.0, per_count=True)]
    (update,) = sw.Step(model, sw.sgd(LR), squared, transforms=transforms).over([DATA])
    rows = torch.cat([g.flatten(1) for g in one_by_one(mlp(), squared, DATA).grads.values()], 1)
    for key in DATA["n"].unique():
        members = DATA["n"] == key
        close(update.weights[members][:1], clipped(rows[members].mean(0).norm()[None], 1.0))


# --- arguments in the wrong place -------------------------------------------------------------------------------------


def test_arguments_of_a_step_in_another_order():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    criterion = nn.MSELoss()
    order = r"arguments must be Step\(model, optimizer, loss_fn\), with a torch.nn.Module; found "
    for arguments, found in [
        ((optimizer, model, criterion), "SGD, Sequential, MSELoss"),
        ((model, criterion, optimizer), "Sequential, MSELoss, SGD"),
        ((model.parameters(), optimizer, criterion), "generator, SGD, MSELoss"),
        ((squared, optimizer, model), "function, SGD, Sequential"),
    ]:
        with pytest.raises(TypeError, match=order + found):
            sw.Step(*arguments)


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (torch.optim.SGD, "the class SGD"),
        (sw.sgd, "the function sgd"),
        (nn.MSELoss(), "MSELoss"),
        (lambda params: None, "the function <lambda>"),
        (0.1, "float"),
    ],
)
def test_an_optimizer_that_is_none(optimizer, found):
    message = (
        rf"optimizer must be a torch.optim optimizer, or a function \(params, gradients\) -> None; found {found}\."
    )
    with pytest.raises(TypeError, match=message):
        sw.Step(mlp(), optimizer, squared)


@pytest.mark.parametrize("transform", [sw.clip, sw.drop, sw.group])
def test_a_transform_that_was_not_called(transform):
    name = transform.__name__
    with pytest.raises(sw.TransformError, match=rf"found the function {name}\. Call sw\.{name}\(\.\.\.\)\."):
        sw.Step(mlp(), sw.sgd(LR), squared, transforms=[transform])


@pytest.mark.parametrize("bound", ["1", None, -1.0, float("nan")])
def test_a_bound_that_is_no_number(bound):
    with pytest.raises(ValueError, match=f"max_norm must be a number, zero or positive; found {bound!r}"):
        sw.clip(bound)


def test_a_scheduler_that_was_not_created():
    optimizer = torch.optim.SGD(mlp().parameters(), lr=LR)
    message = r"must be an object of torch.optim.lr_scheduler; found the class StepLR\. Create it with the optimizer"
    with pytest.raises(TypeError, match=message):
        sw.Step(mlp(), optimizer, squared, scheduler=torch.optim.lr_scheduler.StepLR)
