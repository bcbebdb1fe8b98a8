"""Metrics: means over samples, other people's objects, names, outputs; what `predict` returns; where batches go."""

import math
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torchmetrics
import transformers
from small import X, Y, loader, make
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import samplewise as sw
from samplewise.loop.evaluation import accuracy


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


@pytest.mark.parametrize(
    "number", [lambda hits: hits.sum(), lambda hits: int(hits.sum()), lambda hits: np.sum(hits.numpy())]
)
def test_a_sum_is_no_mean(number):
    trainer = make(metrics={"accuracy": lambda out, batch: number(accuracy(out, batch))})
    with pytest.raises(
        ValueError, match=r"'accuracy' must return one number per .* found the integer \d+, as a sum or count"
    ):
        trainer.evaluate(loader())


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
    found = make(metrics={"largest": Largest(), "accuracy": torchmetrics_accuracy()}, loss=dict_loss).evaluate(DICTS)
    assert found["largest"] == X.max().item()
    assert found["accuracy"] == right()


def torchmetrics_accuracy():
    return torchmetrics.classification.MulticlassAccuracy(3, average="micro")


@pytest.mark.parametrize("name", ["y", "target", "targets", "label", "labels"])
def test_the_target_is_passed_by_the_name_of_the_argument(name):
    """`lambda o, y: o.argmax(1) == y` compared the predictions with the batch, and was always False."""
    function = eval(f"lambda o, {name}: o.argmax(1) == {name}")
    assert make(metrics={"a": function}).evaluate(loader())["a"] == right()

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), Y, reduction="none")

    wrong = {"y": 0 * Y, "label": 0 * Y}
    for batch in ({"x": X, "y": Y}, {"x": X, "labels": Y}, {"x": X, **wrong, name: Y}):
        assert make(metrics={"a": function}, loss=loss).evaluate([batch])["a"] == right()


def right():
    model = make().model.eval()
    return pytest.approx((model(X).argmax(1) == Y).double().mean().item(), rel=1e-6)


def test_functions_of_torch_and_torchmetrics_and_partials():
    functions = {
        "loss_again": nn.functional.cross_entropy,
        "accuracy": partial(torchmetrics.functional.accuracy, task="multiclass", num_classes=3),
        "batch": lambda outputs, everything: outputs.argmax(1) == everything[1],
    }
    found = make(metrics=functions).evaluate(loader())
    assert found["accuracy"] == right() == found["batch"]
    assert found["loss_again"] == pytest.approx(found["loss"], rel=1e-6)


class Sample(NamedTuple):
    """Target first, so that the position of the target is not 1."""

    y: torch.Tensor
    x: torch.Tensor


@dataclass
class Graph:
    x: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("batch", [Sample(Y, X), Graph(X, Y)], ids=["named tuple", "dataclass"])
def test_targets_of_batches_with_attributes(batch):
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch.x), Y, reduction="none")

    assert make(metrics={"a": lambda o, y: o.argmax(1) == y}, loss=loss).evaluate([batch])["a"] == right()


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"x": X}, "a dict with the keys 'x'"),
        ({"x": X, "label": Y, "labels": Y}, "a dict with 'label' and 'labels'"),
        ([X], "a list of 1"),
        (X, "a Tensor"),
    ],
)
def test_batches_without_a_target(batch, found):
    def loss(model, batch):
        return model(X).sum(1)

    message = rf"metric 'a' needs the target of a batch.*; found {found}. Use a function \(outputs, batch\)"
    for metric in (lambda o, y: o[:, 0], torchmetrics_accuracy()):
        with pytest.raises(sw.BatchError, match=message):
            make(metrics={"a": metric}, loss=loss).evaluate([batch])


@pytest.mark.parametrize("answer", [False, True, None, "0.5", [0.5], (1, 2), {"a": 1}, np.bool_(True)], ids=repr)
def test_answers_that_are_no_numbers(answer):
    message = rf"metric 'a' must return one number per sample in a tensor, or .*; found {type(answer).__name__}"
    with pytest.raises(TypeError, match=message):
        make(metrics={"a": lambda outputs, batch: answer}).evaluate(loader())


@pytest.mark.parametrize("answer", [1.0, 0.5, np.float32(0.5), np.ones(7), torch.tensor(True)], ids=repr)
def test_answers_that_are_numbers(answer):
    found = make(metrics={"a": lambda outputs, batch: answer}).evaluate([(X[:7], Y[:7])])
    assert found["a"] == float(answer if np.ndim(answer) == 0 else answer.mean())


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

    def loss(model, batch):
        model(batch[0])
        return batch[0].sum(1)

    step = sw.Step(model, sw.sgd(0.1), loss)
    found, right = sw.Trainer(step, device="cpu").predict(loader()), model(X)
    assert type(found) is type(right)
    torch.testing.assert_close(found, right)


def test_predict_keeps_modes_and_random_numbers():
    trainer, state = make(), torch.get_rng_state()
    trainer.predict(loader(shuffle=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in trainer.model.modules())
    assert not trainer.predict(loader()).requires_grad


def test_predict_calls_the_model_as_the_loss_function_does():
    trainer = make(loss=dict_loss)
    torch.testing.assert_close(trainer.predict(DICTS), trainer.model.eval()(X))

    def shifted(model, batch):
        return nn.functional.cross_entropy(model(batch[0] - 1), batch[1], reduction="none")

    trainer = make(loss=shifted)
    torch.testing.assert_close(trainer.predict(loader()), trainer.model.eval()(X - 1))


def test_predict_does_not_need_targets():
    """A criterion calls model(x); x and (x,) have no target, so that the loss function cannot be used."""
    for loss in (nn.CrossEntropyLoss(), dict_loss):
        trainer = make(loss=loss)
        right = trainer.model.eval()(X)
        for batches in (X.split(7), [(x,) for x in X.split(7)], [[x] for x in X.split(7)]):
            torch.testing.assert_close(trainer.predict(batches), right)
    trainer = make(loss=nn.CrossEntropyLoss())
    torch.testing.assert_close(trainer.predict([(X, 0 * Y - 1, Y)]), trainer.model.eval()(X))


def test_predict_with_a_forward_function():
    trainer = make(loss=dict_loss)
    found = trainer.predict([{"x": X}, {"x": X}], forward=lambda model, batch: {"twice": 2 * model(batch["x"])})
    torch.testing.assert_close(found, {"twice": 2 * trainer.model.eval()(X).repeat(2, 1)})
    assert not found["twice"].requires_grad
    for forward, message in (
        (3, r"forward must be a function \(model, batch\) -> outputs; found int"),
        (lambda model, batch: None, r"forward must return the outputs of the model; found None"),
    ):
        with pytest.raises(TypeError, match=message):
            trainer.predict([{"x": X}], forward=forward)


def test_a_loss_function_that_predict_cannot_use():
    message = (
        r"predict runs the loss function to see how it calls the model; found KeyError: 'y' in it. If the batches have "
        r"no targets, pass the forward pass: predict\(loader, forward=lambda model, batch: model\(...\)\)"
    )
    with pytest.raises(sw.BatchError, match=message):
        make(loss=dict_loss).predict([{"x": X}])
    with pytest.raises(
        sw.LossesError, match=r"must call model\(...\), since predict returns its outputs; found no call"
    ):
        make(loss=lambda model, batch: model[0](batch["x"]).sum(1)).predict([{"x": X}])


def test_a_batch_in_place_of_a_loader():
    trainer = make()
    uses = (trainer.predict, trainer.evaluate, lambda data: trainer.fit(data, epochs=1))
    for use in uses:
        with pytest.raises(sw.BatchError, match=r"found a Tensor of shape \(30, 6\).* Pass a list of batches, or wrap"):
            use(X)
        with pytest.raises(sw.BatchError, match=r"a loader must be an iterable of batches; found a dict"):
            use({"x": X, "y": Y})
        with pytest.raises(sw.BatchError, match=r"a loader must be an iterable of batches; found an int"):
            use(3)
    assert trainer.step.counters.updates == 0


def test_outputs_that_do_not_fit_together():
    trainer = make()
    widths = iter((2, 3))
    with pytest.raises(sw.BatchError, match=r"found shapes \(30, 2\) and \(30, 3\)"):
        trainer.predict([X, X], forward=lambda model, batch: batch[:, : next(widths)])
    keys = iter("ab")
    with pytest.raises(sw.BatchError, match=r"found the keys 'a' and 'b'"):
        trainer.predict([X, X], forward=lambda model, batch: {next(keys): batch})


SMALL = {
    "BertForSequenceClassification": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "GPT2LMHeadModel": {"n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},  # has a cache
}


@pytest.mark.parametrize("name", SMALL)
def test_predict_with_hugging_face_models(name):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(vocab_size=11, **SMALL[name])).eval()
    tokens = torch.arange(30).view(6, 5) % 11
    whole = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    batches = [{name: part.split(4)[k] for name, part in whole.items()} for k in (0, 1)]

    def loss(model, batch):
        return model(**batch).logits.flatten(1).sum(1)

    found = sw.Trainer(sw.Step(model, sw.sgd(0.1), loss), device="cpu").predict(batches)
    right = model(**whole)
    assert type(found) is type(right) and list(found) == list(right)
    torch.testing.assert_close(found.logits, right.logits)
    if "past_key_values" in found:  # not a tensor: one for each batch
        assert len(found.past_key_values) == 2


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
    more_updates = waits(60, log_every="100up") - waits(20, log_every="100up")
    assert more_updates == waits(60, by_hand=True) - waits(20, by_hand=True)
    assert waits(60, log_every="10up") > waits(60, log_every="100up")


def test_validation_waits_once():
    trainer = make(metrics={"accuracy": accuracy})
    counts = []
    for batches in (2, 12):
        with Waits() as found:
            trainer.evaluate([(X, Y)] * batches)
        counts.append(found.count)
    assert counts[0] == counts[1]
