"""Metrics: means over samples, other people's objects, names, outputs; what `predict` returns; where batches go."""

import math
from collections import namedtuple

import pytest
import torch
import torchmetrics
from small import X, Y, loader, make
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import samplewise as sw
from samplewise.loop.metrics import accuracy


def test_half_precision_does_not_stop_counting():
    """In bfloat16 a sum of ones ends at 256."""
    ones = [(torch.zeros(100, 6), torch.zeros(100, dtype=torch.long))] * 20
    found = make(metrics={"one": lambda out, batch: torch.ones(len(out), dtype=torch.bfloat16)}).evaluate(ones)
    assert found["one"] == 1.0


def test_ragged_batches_and_a_mean_per_batch():
    batches = [(X[:29], Y[:29]), (X[29:], Y[29:])]
    trainer = make(metrics={"each": accuracy, "mean": lambda out, batch: accuracy(out, batch).float().mean()})
    found = trainer.evaluate(batches)
    assert found["each"] == pytest.approx(found["mean"], rel=1e-6)
    trainer.model.eval()
    assert found["each"] == pytest.approx((trainer.model(X).argmax(1) == Y).double().mean().item())


def test_a_metric_with_several_results():
    both = torchmetrics.MetricCollection(
        {
            "micro": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
            "each": torchmetrics.classification.MulticlassAccuracy(3, average=None),
        }
    )
    found = make(metrics={"accuracy": both}).evaluate(loader())
    assert set(found) == {"loss", "accuracy/micro", "accuracy/each/0", "accuracy/each/1", "accuracy/each/2"}
    each = [found[f"accuracy/each/{k}"] for k in range(3)]
    assert sum(each) / 3 == pytest.approx(found["accuracy/micro"])  # ten samples a class


class Largest:
    """Asks for the whole batch."""

    def update(self, outputs, batch):
        self.found = max(self.found, float(batch["x"].max()))

    def compute(self):
        return self.found

    def reset(self):
        self.found = -math.inf


def dict_loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


DICTS = [dict(x=x, y=y) for x, y in zip(X.split(8), Y.split(8), strict=True)]


def test_batches_that_are_dicts():
    trainer = make(metrics={"largest": Largest()}, loss=dict_loss)
    assert trainer.evaluate(DICTS)["largest"] == X.max().item()
    theirs = make(metrics={"a": torchmetrics.classification.MulticlassAccuracy(3)}, loss=dict_loss)
    with pytest.raises(
        TypeError,
        match=r"batches must be \(x, y\) for .* updated with \(outputs, y\); found a dict\. Give the metric a",
    ):
        theirs.evaluate(DICTS)


def test_metrics_go_where_the_model_is():
    class Moved(Largest):
        def to(self, device):
            self.device = device
            return self

    metric = Moved()
    make(metrics={"a": metric})
    assert metric.device == torch.device("cpu")


@pytest.mark.parametrize("name", ["loss", "train_loss", "update", "epoch", "kind"])
def test_names_that_are_taken(name):
    with pytest.raises(ValueError, match=f"a metric must not use a field name of the log; found '{name}'"):
        make(metrics={name: accuracy})


def test_a_model_that_the_loss_does_not_call():
    def around(model, batch):
        return nn.functional.cross_entropy(model[3](model[1](model[0](batch[0]))), batch[1], reduction="none")

    assert math.isfinite(make(loss=around).evaluate(loader())["loss"])
    with pytest.raises(
        sw.LossesError, match=r"must call model\(\.\.\.\), since metrics use the outputs of the model; found no call"
    ):
        make(loss=around, metrics={"accuracy": accuracy}).evaluate(loader())


@pytest.mark.parametrize(
    ("loss", "found"),
    [(lambda m, b: m(b[0]).mean(), r"shape \(\)"), (lambda m, b: 1.0, "float")],
    ids=["mean", "float"],
)
def test_losses_that_are_none(loss, found):
    with pytest.raises(sw.LossesError, match=f"losses must be 1-D, one value per sample; found {found}"):
        make(loss=loss).evaluate(loader())


class LossModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, model, batch):
        self.seen = self.training
        return nn.functional.cross_entropy(self.drop(model(batch[0])), batch[1], reduction="none")


def test_a_loss_module_is_in_eval_mode_too():
    loss = LossModule()
    trainer = make(loss=loss)
    assert trainer.evaluate(loader()) == trainer.evaluate(loader())
    assert not loss.seen and loss.training and loss.drop.training


# ------------------------------------------------------------- predict


class Heads(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 3), kind

    def forward(self, x):
        return self.kind(self.layer(x), x.sum(1))


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "kind", [lambda a, b: (a, b), lambda a, b: {"a": a, "b": [b, a]}, Pair], ids=["tuple", "dict", "named tuple"]
)
def test_outputs_of_any_shape(kind):
    model = Heads(kind)
    step = sw.Step(model, sw.sgd(0.1), lambda model, batch: model(batch[0])[0])
    found, right = sw.Trainer(step, device="cpu").predict(loader()), model(X)
    assert type(found) is type(right)
    torch.testing.assert_close(found, right)


def test_predict_keeps_modes_and_random_numbers():
    trainer, state = make(), torch.get_rng_state()
    trainer.predict(loader(shuffle=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in trainer.model.modules())
    assert not trainer.predict(loader()).requires_grad


# ------------------------------------------------------------- waiting for the device


class Waits(TorchDispatchMode):
    """Counts how often a number is taken out of a tensor: on a device each is a wait."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01))


def waits(updates, by_hand=False, **options):
    trainer, batches = make(optimizer=adamw, samples=None, **options), [(X, Y)] * updates
    with Waits() as found:
        if by_hand:
            for _ in trainer.step.over(batches):
                pass
        else:
            trainer.fit(batches, updates=updates)
    return found.count


def test_the_trainer_waits_at_the_log_interval_only():
    more_updates = waits(60, log_every=100) - waits(20, log_every=100)
    assert more_updates == waits(60, by_hand=True) - waits(20, by_hand=True)
    assert waits(60, log_every=10) > waits(60, log_every=100)


def test_validation_waits_once():
    trainer = make(metrics={"accuracy": accuracy})
    counts = []
    for batches in (2, 12):
        with Waits() as found:
            trainer.evaluate([(X, Y)] * batches)
        counts.append(found.count)
    assert counts[0] == counts[1]
