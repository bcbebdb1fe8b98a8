"""Resuming with other settings than those of the run: what is kept, what changes, with both values."""

import json
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small import X, Y, loader, log, loss_fn
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

import samplewise as sw
from samplewise.errors import TrainingWarning
from samplewise.loop.callbacks import SetLR
from samplewise.loop.checkpoint.resume_settings import loss_name

OPENING = "The run is resumed with settings that differ from those of the checkpoint: "
REMEDY = " To change a learning rate on resume, pass callbacks=[sw.callbacks.SetLR(...)]."


def sgd(lr=0.1, **options):
    return lambda p: optim.SGD(p, lr=lr, **options)


def make(run=None, callbacks=(), optimizer=None, scheduler=None, loss=loss_fn, **settings):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = (optimizer or sgd())(list(model.parameters()))
    step = sw.Step(model, optimizer, loss, **{"samples": 10, **settings}, scheduler=scheduler and scheduler(optimizer))
    return sw.Trainer(step, run, callbacks, progress=False, device="cpu")


def resumed(run, epochs=2, **options):
    """The trainer after the resumed fit, and the new line in the log; None if there is none.

    It is a warning, too, unless all was set by a callback.
    """
    trainer = make(run, **options)
    before = len(notes(run))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "The epoch parameter in")  # of SequentialLR in torch 2.8
        trainer.fit(loader(), epochs=epochs, resume=True)
    assert all(warning.category is TrainingWarning for warning in caught) and len(caught) <= 1
    text = next(iter(notes(run)[before:]), None)
    on_purpose = text is None or set(text.split()) & {"kept,", "had"} == set()
    assert [str(warning.message) for warning in caught] == ([] if on_purpose else [text])
    return trainer, text


def notes(run):
    return [line["text"] for line in log(run) if line["kind"] == "note"] if (run / "log.jsonl").exists() else []


def rates(trainer):
    return [group["lr"] for group in trainer.step.optimizer.param_groups]


def test_an_unchanged_script_says_nothing(tmp_path):
    options = {
        "transforms": [sw.clip(1.0), sw.weight(lambda losses: losses)],
        "microbatch": "auto",
        "loss": nn.CrossEntropyLoss(),
    }
    for epochs in (1, 2, 3):
        assert resumed(tmp_path, epochs, scheduler=lambda o: lrs.LambdaLR(o, lambda k: 0.9**k), **options)[1] is None


def test_another_learning_rate(tmp_path):
    make(tmp_path).fit(loader(), epochs=1)
    trainer, text = resumed(tmp_path, optimizer=sgd(0.01))
    assert text == f"{OPENING}learning rate: the checkpoint's 0.1 is kept, the script has 0.01.{REMEDY}"
    assert rates(trainer) == [0.1]
    assert resumed(tmp_path, 3, optimizer=sgd(0.01))[1] == text  # as long as it is so
    assert resumed(tmp_path, 4)[1] is None


def test_several_settings_in_one_warning(tmp_path):
    make(tmp_path).fit(loader(), epochs=1)
    found = resumed(
        tmp_path, optimizer=sgd(momentum=0.9, weight_decay=0.1), samples=15, transforms=[sw.clip(1.0)], tail="drop"
    )[1]
    assert found == (
        f"{OPENING}momentum: the checkpoint's 0 is kept, the script has 0.9; weight_decay: the checkpoint's 0 is kept, "
        "the script has 0.1; samples: 15 from now on, the run had 10; transforms: chain(clip(1.0)) from now on, the "
        f"run had chain(); tail: drop from now on, the run had update."
    )
    trainer, text = resumed(tmp_path, 3, samples=15, transforms=[sw.clip(1.0)], tail="drop")
    assert text is None and trainer.step.samples == 15


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"microbatch": 5}, "microbatch: 5 from now on, the run had None"),
        ({"precision": "bf16-mixed"}, "precision: bf16-mixed from now on, the run had None"),
        ({"max_grad_norm": 1.0}, "max_grad_norm: 1.0 from now on, the run had None"),
        ({"on_nonfinite": "skip"}, "on_nonfinite: skip from now on, the run had raise"),
        ({"loss": nn.CrossEntropyLoss()}, "loss: CrossEntropyLoss() from now on, the run had loss_fn"),
    ],
    ids=lambda change: str(change)[:20],
)
def test_settings_of_the_step(tmp_path, change, found):
    make(tmp_path).fit(loader(), epochs=1)
    assert resumed(tmp_path, **change)[1] == f"{OPENING}{found}."


def test_parameter_groups_are_numbered(tmp_path):
    def groups(*lrs):
        return lambda p: optim.AdamW([{"params": [q], "lr": lr} for q, lr in zip(p, lrs, strict=True)])

    make(tmp_path, optimizer=groups(0.1, 0.2)).fit(loader(), epochs=1)
    text = resumed(tmp_path, optimizer=groups(0.1, 0.3))[1]
    assert f"{OPENING}learning rate of parameter group 1: the checkpoint's 0.2 is kept, the script has 0.3." in text


def test_a_schedule_is_no_change_but_another_schedule_is(tmp_path):
    def warmup(o):
        return lrs.LambdaLR(o, lambda k: min(k / 4, 1.0))  # the first rate is 0 whatever the script says

    make(tmp_path / "a", scheduler=warmup).fit(loader(), epochs=1)
    text = resumed(tmp_path / "a", scheduler=warmup, optimizer=sgd(0.01))[1]
    assert f"{OPENING}initial learning rate: the checkpoint's 0.1 is kept, the script has 0.01.{REMEDY}" == text
    make(tmp_path / "b", scheduler=lambda o: lrs.StepLR(o, 2, 0.5)).fit(loader(), epochs=1)
    trainer, text = resumed(tmp_path / "b", scheduler=lambda o: lrs.StepLR(o, 3, 0.5))
    assert text == f"{OPENING}step_size of the scheduler: the checkpoint's 2 is kept, the script has 3."
    assert trainer.step.scheduler.step_size == 2

    def sequence(gamma):
        return lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, gamma)], [2])

    make(tmp_path / "c", scheduler=sequence(0.9)).fit(loader(), epochs=1)
    text = resumed(tmp_path / "c", scheduler=sequence(0.8))[1]
    assert "gamma of the scheduler's part 1: the checkpoint's 0.9 is kept, the script has 0.8" in text


def test_a_scheduler_without_a_state(tmp_path):
    class Mine:
        def step(self):
            pass

    assert make(scheduler=lambda o: Mine()).fit(loader(), epochs=1).reason == "1 epoch is done"
    message = (
        "^the scheduler must have state_dict and load_state_dict to be saved in a checkpoint; found Mine without them. "
        "Add both methods, or use a Trainer without a run directory.$"
    )
    with pytest.raises(sw.CheckpointError, match=message):
        make(tmp_path, scheduler=lambda o: Mine()).fit(loader(), epochs=1)


def test_the_rate_of_a_function_is_that_of_the_script(tmp_path):
    make(tmp_path, optimizer=lambda p: sw.sgd(0.1)).fit(loader(), epochs=1)
    trainer, text = resumed(tmp_path, optimizer=lambda p: sw.sgd(0.01))
    assert text == f"{OPENING}learning rate: 0.01 from now on, the run had 0.1."
    assert rates(trainer) == [0.01] and resumed(tmp_path, 3, optimizer=lambda p: sw.sgd(0.01))[1] is None


def test_a_rate_that_is_set_between_two_fits_and_undone_by_resume(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(loader(), epochs=1)
    trainer.step.optimizer.param_groups[0]["lr"] = 0.05
    trainer.fit(loader(), epochs=2)
    trainer.fit(loader(), epochs=3, resume=True)  # the checkpoint has it
    trainer.step.optimizer.param_groups[0]["lr"] = 0.02
    with pytest.warns(TrainingWarning, match="learning rate: the checkpoint's 0.05 is kept, the script has 0.02"):
        trainer.fit(loader(), epochs=4, resume=True)
    assert rates(trainer) == [0.05]


def test_fits_of_one_trainer_with_a_schedule(tmp_path):
    """The schedule has moved rate and momentum meanwhile: the script is the same."""
    trainer = make(tmp_path, optimizer=sgd(momentum=0.9), scheduler=lambda o: lrs.OneCycleLR(o, 0.1, total_steps=50))
    for epochs in (1, 2, 3):
        trainer.fit(loader(), epochs=epochs, resume=True)
        next(iter(trainer.step.over(loader())))  # an update after the last checkpoint


class Curriculum:
    """Larger updates in later epochs."""

    def __init__(self, every_epoch):
        self.every_epoch = every_epoch

    def on_epoch_start(self, step, epoch):
        if self.every_epoch or epoch == 1:
            step.samples = 10 * (epoch + 1)


def test_a_curriculum_is_no_change_unless_it_is_lost(tmp_path):
    for epochs in (1, 2, 3):
        trainer, text = resumed(tmp_path / "a", epochs, callbacks=[Curriculum(every_epoch=True)])
        assert text is None and trainer.step.samples == 10 * epochs
    make(tmp_path / "b", [Curriculum(every_epoch=False)]).fit(loader(), epochs=2)
    trainer, text = resumed(tmp_path / "b", 3, callbacks=[Curriculum(every_epoch=False)])
    assert text == f"{OPENING}samples: 10 from now on, a callback had changed it to 20." and trainer.step.samples == 10


# ------------------------------------------------------------------------------------------- changing the learning rate

SCHEDULERS = {
    "Step": lambda o: lrs.StepLR(o, 2, 0.5),
    "Cosine": lambda o: lrs.CosineAnnealingLR(o, 20),
    "Sequential": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, total_iters=4), lrs.CosineAnnealingLR(o, 9)], [4]),
    "Chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], optimizer=o),
    "Lambda": lambda o: lrs.LambdaLR(o, lambda k: (k + 1) / 9),
    "Polynomial": lambda o: lrs.PolynomialLR(o, 20),
    "WarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", [None, *SCHEDULERS])
def test_another_rate_on_resume_is_as_if_the_schedule_had_it(tmp_path, name):
    """From the update of the resume on, the rates are those of a run that was created with the new one."""
    scheduler = SCHEDULERS.get(name)
    make(tmp_path, scheduler=scheduler).fit(loader(), epochs=1)
    whole = make(optimizer=sgd(0.01), scheduler=scheduler)
    expected = [update.lr for _ in range(3) for update in whole.step.over(loader())]
    found = []

    class Rates:
        def on_update(self, update):
            found.append(update.lr)

    for epochs in (2, 3):  # the callback may stay
        _, text = resumed(tmp_path, epochs, callbacks=[SetLR(0.01), Rates()], scheduler=scheduler)
        what = "learning rate" if name is None else "initial learning rate"
        told = f"{OPENING}{what}: 0.01 from now on, set by a callback; the checkpoint has 0.1."
        assert text == (told if epochs == 2 else None)
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected[3:], dtype=torch.float64)
    )


def test_one_cycle_and_cyclic_schedules_are_scaled(tmp_path):
    for name, scheduler, initial in [
        ("one", lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20), 0.1),
        ("cyclic", lambda o: lrs.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False), 0.001),
    ]:
        make(tmp_path / name, scheduler=scheduler, optimizer=sgd(momentum=0.9)).fit(loader(), epochs=1)
        plain = make(scheduler=scheduler, optimizer=sgd(momentum=0.9))
        expected = [update.lr / 2 for _ in range(2) for update in plain.step.over(loader())][3:]
        found = []

        class Rates:
            def on_update(self, update):
                found.append(update.lr)  # noqa: B023

        resumed(
            tmp_path / name,
            callbacks=[SetLR(initial / 2), Rates()],
            scheduler=scheduler,
            optimizer=sgd(momentum=0.9),
        )
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


def test_the_new_rate_is_used(tmp_path):
    """Parameters as in a plain loop: SGD without state, so that the rate is all that matters."""
    make(tmp_path, samples=30).fit(loader(), epochs=1)
    trainer, _ = resumed(tmp_path, callbacks=[SetLR(0.01)], samples=30)
    model = make().model
    for rate in (0.1, 0.01):
        gradients = torch.autograd.grad(F.cross_entropy(model(X), Y), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= rate * g
    for mine, plain in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, plain)


def test_rates_in_tensors_and_one_for_each_group(tmp_path):
    def groups(p):
        return optim.AdamW([{"params": [q], "lr": torch.tensor(0.1)} for q in p])

    make(tmp_path, optimizer=groups).fit(loader(), epochs=1)
    trainer, text = resumed(tmp_path, optimizer=groups, callbacks=[SetLR([0.5, 0.25])])
    assert rates(trainer) == [0.5, 0.25] and "learning rate of parameter group 1: 0.25 from now on" in text
    with pytest.raises(ValueError, match="one rate, or one for each of the 2 parameter groups; found 3 rates"):
        make(optimizer=groups, callbacks=[SetLR([0.1, 0.2, 0.3])]).fit(loader(), epochs=1)


def test_a_rate_of_zero_can_be_set_again(tmp_path):
    options = {"scheduler": lambda o: lrs.ExponentialLR(o, 0.5), "callbacks": [SetLR(0.0)]}
    make(tmp_path, **options).fit(loader(), epochs=1)
    trainer, _ = resumed(tmp_path, **options)
    assert rates(trainer) == [0.0]


@pytest.mark.parametrize("lr", [-1, float("nan"), float("inf"), "0.1", None, [0.1, None]])
def test_rates_that_are_none(lr):
    with pytest.raises(ValueError, match="lr must be zero or a positive number, or a list of such numbers; found"):
        SetLR(lr)


def test_rates_that_cannot_be_set():
    with pytest.raises(TypeError, match=r"found a function. Its rate is that of the script: write for example sw.sgd"):
        make(optimizer=lambda p: sw.sgd(0.1), callbacks=[SetLR(0.01)]).fit(loader(), epochs=1)

    class Mine:
        def step(self):
            pass

    with pytest.raises(TypeError, match=r"must have a scheduler of torch\.optim\.lr_scheduler; found Mine"):
        make(scheduler=lambda o: Mine(), callbacks=[SetLR(0.01)]).fit(loader(), epochs=1)
    with pytest.raises(ValueError, match="must not be 0 to be changed by SetLR; found 0 in parameter group 0"):
        make(optimizer=sgd(0.0), scheduler=lambda o: lrs.StepLR(o, 2), callbacks=[SetLR(0.01)]).fit(loader(), epochs=1)


# ------------------------------------------------------------------------------------------------------------- names


class Weighted(nn.Module):
    def forward(self, model, batch):
        return loss_fn(model, batch)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.CrossEntropyLoss(), "CrossEntropyLoss()"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "CrossEntropyLoss(label_smoothing=0.1)"),
        (nn.CrossEntropyLoss(torch.ones(3)), "CrossEntropyLoss(weight=tensor of shape (3,))"),
        (loss_fn, "small.loss_fn"),
        (partial(loss_fn), "small.loss_fn"),
        (Weighted(), "test_resume_settings.Weighted"),
        (lambda model, batch: loss_fn(model, batch), "test_resume_settings.<lambda>"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_run_json_names_the_loss(tmp_path, loss, name):
    make(tmp_path, loss=loss).fit(loader(), updates=1)
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["loss"] == name
    assert name.endswith(loss_name(make(loss=loss).step.loss_fn))


def test_another_number_of_threads(tmp_path, monkeypatch):
    """Sums are then rounded differently, so that the run is not repeated bit for bit."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    make(tmp_path).fit(loader(), epochs=1)
    assert resumed(tmp_path)[1] is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    _, text = resumed(tmp_path, epochs=3)
    assert text == f"{OPENING}threads: 2 from now on, the run had 1."
