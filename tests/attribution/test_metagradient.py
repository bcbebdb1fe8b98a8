"""Metagradients against finite differences of retraining, in float64."""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.attribution import replay

module = sys.modules[sw.metagradient.__module__]
SAMPLES = 24


class Attention(nn.Module):
    """Tiny transformer with dropout: classes of sequences of tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.query_key_value = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.query_key_value(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.drop(mixed.transpose(1, 2).flatten(2)))
        return self.head(x.mean(1))


def mlp(transforms):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return sw.Step(model, optimizer, nn.CrossEntropyLoss(), 5, transforms=transforms, scheduler=scheduler)


def cnn(transforms):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=6)
    return sw.Step(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        10,
        microbatch=4,
        transforms=transforms,
        scheduler=scheduler,
        max_grad_norm=0.3,
        tail="drop",
    )


def transformer(transforms):
    model = Attention()
    optimizer = torch.optim.AdamW(
        [{"params": model.head.parameters(), "lr": 0.02}, {"params": [*model.parameters()][:-2], "lr": 0.01}],
        weight_decay=0.1,
        amsgrad=True,
    )
    soft = sw.weight(lambda losses: 1 / (1 + losses), renormalize=True)
    return sw.Step(
        model, optimizer, nn.CrossEntropyLoss(), 7, transforms=[sw.clip(0.6), soft, *transforms], tail="carry"
    )


def inputs(make):
    if make is transformer:
        return torch.randint(7, (SAMPLES, 5))
    return torch.randn(SAMPLES, *((4,) if make is mlp else (1, 6, 6)), dtype=torch.float64)


def data(make):
    torch.manual_seed(1)
    x = inputs(make)
    y = torch.randint(3, (SAMPLES,))
    loader = DataLoader(sw.Indexed(TensorDataset(x, y)), batch_size=6, shuffle=True)
    return loader, [(inputs(make)[:2], torch.tensor([0, 1])), (inputs(make)[:1], torch.tensor([2]))]


def fresh(make, *transforms):
    torch.manual_seed(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return make(transforms)
    finally:
        torch.set_default_dtype(before)


def train(make, run, loader, *transforms, epochs=3):
    step = fresh(make, *transforms)
    sw.Trainer(step, run, progress=False).fit(loader, epochs=epochs)
    return step.model.eval()


def losses(model, queries):
    with torch.no_grad():
        return torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in queries])


def finite_differences(make, loader, queries, samples, size=1e-5):
    """Derivative of the losses of the queries with respect to the weights of some samples, (queries, samples)."""
    columns = []
    for i in samples:
        sides = []
        for sign in (1, -1):
            weights = torch.ones(SAMPLES, dtype=torch.float64)
            weights[i] += sign * size
            sides.append(losses(train(make, None, loader, sw.weight(weights, index="id")), queries))
        columns.append((sides[0] - sides[1]) / (2 * size))
    return torch.stack(columns, 1)


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("make", [mlp, cnn, transformer])
def test_equals_finite_differences_of_retraining(make, tmp_path):
    loader, queries = data(make)
    train(make, tmp_path, loader)
    state = torch.get_rng_state()
    found = sw.metagradient(tmp_path, partial(fresh, make), loader, queries, device="cpu")
    assert found.shape == (3, SAMPLES)
    assert torch.equal(torch.get_rng_state(), state)
    samples = [0, 5, 17]
    wanted = finite_differences(make, loader, queries, samples)
    torch.testing.assert_close(found[:, samples], wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    assert not (tmp_path / "metagradient").exists()


def test_repeated_segments_give_the_same_result(tmp_path):
    loader, queries = data(transformer)
    train(transformer, tmp_path, loader)
    call = partial(sw.metagradient, tmp_path, partial(fresh, transformer), loader, queries, device="cpu")
    wanted = call()
    torch.testing.assert_close(call(every=1), wanted)
    torch.testing.assert_close(call(every=4), wanted)


def test_epochs_add_up(tmp_path):
    loader, queries = data(mlp)
    train(mlp, tmp_path, loader)
    call = partial(sw.metagradient, tmp_path, partial(fresh, mlp), loader, queries, device="cpu")
    by_epoch = call(by="epoch")
    assert by_epoch.shape == (3, 3, SAMPLES)
    assert (by_epoch != 0).any((1, 2)).all()
    torch.testing.assert_close(by_epoch.sum(0), call())


@pytest.mark.parametrize("by", ["parameter", None])
def test_clip_by_parameter_and_whole_windows_of_unequal_counts(by, tmp_path):
    """Counts differ between samples, and one sample has a gradient of 0."""

    def counted(model, batch):
        x, y, _ = batch
        counts = torch.where(y == 0, 2.0, 1.0).double()
        return F.cross_entropy(model(x), y, reduction="none") * (x[:, 0] < 1.2), counts

    def make(transforms):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        return sw.Step(model, sw.sgd(0.3), counted, transforms=[sw.clip(0.3, by=by, per_count=True), *transforms])

    loader, _ = data(mlp)
    queries = [(torch.randn(2, 4, dtype=torch.float64), torch.tensor([0, 1]), torch.tensor([0, 0]))]
    train(make, tmp_path, loader)
    found = sw.metagradient(tmp_path, partial(fresh, make), loader, queries, device="cpu")

    def outcome(weights):
        model = train(make, None, loader, sw.weight(weights, index="id"))
        with torch.no_grad():
            return counted(model, queries[0])[0]

    for i in (0, 7):
        weights = torch.ones(2, SAMPLES, dtype=torch.float64)
        weights[0, i] += 1e-5
        weights[1, i] -= 1e-5
        wanted = (outcome(weights[0]) - outcome(weights[1])) / 2e-5
        torch.testing.assert_close(found[:, i], wanted, rtol=1e-4, atol=1e-8)


# --- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize(
    ("place", "number", "left"),
    [("on_update", 4, 6), ("on_update", 7, 4), ("set_adjoint", 6, 1), ("set_adjoint", 1, 6)],
)
def test_an_interrupted_call_continues(place, number, left, tmp_path, monkeypatch):
    """In the first pass of 6 updates, in a repeated segment, and on the way back, with a save after each update."""
    loader, queries = data(cnn)
    train(cnn, tmp_path / "run", loader)
    call = partial(sw.metagradient, tmp_path / "run", partial(fresh, cnn), loader, queries, every=2, device="cpu")
    wanted = call(to=tmp_path / "other")
    monkeypatch.setattr(module, "SAVE_EVERY", 0.0)
    kind = replay.Replay if place == "on_update" else module.BackwardState
    original = getattr(kind, place)
    calls = []

    def on_update(self, update):
        count(self, update)

    def count(self, argument):
        calls.append(argument)
        if len(calls) == number:
            raise KeyboardInterrupt
        return original(self, argument)

    with monkeypatch.context() as patch:
        patch.setattr(kind, place, on_update if place == "on_update" else count)
        with pytest.raises(KeyboardInterrupt):
            call()
    assert (tmp_path / "run" / "metagradient").exists()
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(module.UpdateDerivative, "__call__", counted_calls(calls))
        torch.testing.assert_close(call(), wanted)
    assert len(calls) == left
    assert not (tmp_path / "run" / "metagradient").exists()


def counted_calls(calls):
    original = module.UpdateDerivative.__call__

    def call(self, record, adjoint):
        calls.append(record.number)
        return original(self, record, adjoint)

    return call


# --- refusals ---------------------------------------------------------------------------------------------------------


def linear(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), *layers, **options):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), *layers).double()
        return sw.Step(model, optimizer(model.parameters()), nn.CrossEntropyLoss(), **options)

    return make


@pytest.fixture
def recorded(tmp_path):
    """A run of `linear()`, its loader and queries."""
    loader, queries = data(mlp)
    sw.Trainer(linear()(), tmp_path, progress=False).fit(loader, epochs=2)
    return tmp_path, loader, queries


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (linear(torch.optim.Adagrad), "needs SGD, Adam, AdamW.*found Adagrad"),
        (linear(transforms=[sw.drop(1)]), r"needs transforms of single samples.*found chain\(drop"),
        (linear(transforms=[sw.guard()]), r"do not depend on earlier updates; found chain\(guard"),
        (linear(transforms=[sw.noise(1.0)]), "needs updates without noise"),
        (linear(precision="bf16-mixed"), "without autocast; found precision='bf16-mixed'"),
        (linear(compile=True), "not compiled; found compile=True"),
        (linear(microbatch="auto"), "needs a fixed microbatch size"),
        (linear(aggregate=sw.per("group", key="g")), "needs sw.per.*found per"),
        (linear(lambda p: torch.optim.SGD(p, lr=0.1), nn.BatchNorm1d(3)), "BatchNorm in training mode: 1"),
    ],
)
def test_refuses_what_it_cannot_differentiate(make, message, recorded):
    with pytest.raises(ValueError, match=message):
        sw.metagradient(recorded[0], make, *recorded[1:])
    assert not (recorded[0] / "metagradient").exists()


def test_refuses_another_run(recorded):
    run, loader, queries = recorded
    with pytest.raises(sw.CheckpointError, match="the replay differs from the recorded run: after 8 updates"):
        sw.metagradient(run, linear(lambda p: torch.optim.SGD(p, lr=0.101)), loader, queries)
    assert list(run.glob("metagradient/*")) == []
    with pytest.raises(sw.CheckpointError, match="the optimizer it was saved with, SGD; found Adam"):
        sw.metagradient(run, linear(torch.optim.Adam), loader, queries)
    other = DataLoader(loader.dataset, batch_size=5, shuffle=True)
    with pytest.raises(sw.CheckpointError, match="loader must be that of the run; found batch size 5 instead of 6"):
        sw.metagradient(run, linear(), other, queries)
    with pytest.raises(sw.CheckpointError, match="run must be the directory of a run with checkpoints"):
        sw.metagradient(run / "nothing", linear(), loader, queries)


def test_needs_the_indices_of_samples(recorded):
    run, loader, queries = recorded
    plain = DataLoader(loader.dataset.dataset, batch_size=6, shuffle=True)
    with pytest.raises(sw.BatchError, match=r"must hold 'id'.*sw.Indexed"):
        sw.metagradient(run, linear(), plain, queries)
    with pytest.raises(sw.BatchError, match=r"loader must be a DataLoader.*found list"):
        sw.metagradient(run, linear(), list(plain), queries)


def test_wrong_arguments(recorded):
    run, loader, queries = recorded
    with pytest.raises(ValueError, match="by must be None or 'epoch'; found 'layer'"):
        sw.metagradient(run, linear(), loader, queries, by="layer")
    with pytest.raises(ValueError, match="every must be a number of updates, 1 or more, or None; found 0"):
        sw.metagradient(run, linear(), loader, queries, every=0)
    with pytest.raises(sw.BatchError, match="queries must yield at least one batch"):
        sw.metagradient(run, linear(), loader, [])
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        sw.metagradient(run, linear(), loader, [(torch.randn(2, 5).double(), torch.tensor([0, 1]))])
    assert not (run / "metagradient").exists()
    with pytest.raises(TypeError, match=r"make_step\(\) must return a sw.Step"):
        sw.metagradient(run, lambda: None, loader, queries)


def test_a_loss_that_keeps_state_is_found(recorded, tmp_path):
    _, loader, queries = recorded
    calls = []

    def drifting(model, batch):
        calls.extend([1] if model.training else [])
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * len(calls)

    def make():
        calls.clear()
        model = nn.Linear(4, 3).double()
        return sw.Step(model, sw.sgd(0.1), drifting, recheck=False)

    torch.manual_seed(0)
    sw.Trainer(make(), tmp_path / "drifting", progress=False).fit(loader, epochs=2)
    with pytest.raises(sw.CheckpointError, match=r"update 7 must be repeated.*keeps state between calls"):
        sw.metagradient(tmp_path / "drifting", make, loader, queries)


def test_refuses_buffers_that_updates_change(recorded, tmp_path):
    class Counting(nn.Linear):
        def forward(self, x):
            self.seen += 1
            return super().forward(x)

    def make():
        torch.manual_seed(0)
        model = Counting(4, 3, dtype=torch.float64)
        model.register_buffer("seen", torch.tensor(0))
        return sw.Step(model, sw.sgd(0.1), nn.CrossEntropyLoss())

    _, loader, queries = recorded
    sw.Trainer(make(), tmp_path / "counting", progress=False).fit(loader, epochs=1)
    with pytest.raises(ValueError, match="needs buffers that updates leave alone; found changed: seen"):
        sw.metagradient(tmp_path / "counting", make, loader, queries)


def test_warns_if_the_training_is_not_smooth(tmp_path):
    """Gradient descent on 4/3 x³ - 3/2 x² is the logistic map, which is chaotic."""

    class Logistic(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

        def forward(self, inputs):
            return (4 / 3 * self.x**3 - 3 / 2 * self.x**2) + 0 * inputs[:, 0]

    def make():
        return sw.Step(Logistic(), sw.sgd(1.0), lambda model, batch: model(batch[0]))

    loader, queries = data(mlp)
    sw.Trainer(make(), tmp_path, progress=False).fit(loader, epochs=5)
    with pytest.warns(sw.TrainingWarning, match=r"not smooth enough.*smaller learning rate"):
        sw.metagradient(tmp_path, make, loader, queries, device="cpu")


def two_layers(activation, rate, momentum, dtype, *transforms):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    return sw.Step(model, optimizer, nn.CrossEntropyLoss(), transforms=transforms)


def error_for_finite_changes(make, run, dtype):
    """Error of the changes of losses that the metagradient of 40 updates predicts for weights of 0.9 and 1.1, relative
    to the prediction: mean over three random choices of weights.
    """
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64).to(dtype)
    loader = DataLoader(sw.Indexed(TensorDataset(x, torch.randint(3, (SAMPLES,)))), batch_size=6, shuffle=True)
    queries = [(torch.randn(8, 4, dtype=torch.float64).to(dtype), torch.randint(3, (8,)))]

    def outcome(directory, *transforms):
        step = make(dtype, *transforms)
        sw.Trainer(step, directory, progress=False, device="cpu").fit(loader, epochs=10)
        return losses(step.model.eval(), queries)

    before = outcome(run)
    found = sw.metagradient(run, partial(make, dtype), loader, queries, device="cpu")
    errors = []
    for _ in range(3):
        changes = 0.2 * torch.randint(2, (SAMPLES,)).to(dtype) - 0.1
        actual = outcome(None, sw.weight(1 + changes, index="id")) - before
        errors.append((actual - found @ changes).norm() / (found @ changes).norm())
    return torch.stack(errors).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_warns_if_finite_changes_have_other_effects_although_gradients_do_not_grow(dtype, tmp_path):
    """Gradients of ReLUs jump: the derivative is right for tiny changes only."""
    message = "with weights of 0.9 and 1.1 at random, .* predict changes .* found changes that differ .*wider model"
    with pytest.warns(sw.TrainingWarning, match=message):
        error = error_for_finite_changes(partial(two_layers, nn.ReLU, 1.5, 0.0), tmp_path, dtype)
    assert error > 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_does_not_warn_if_derivatives_predict_finite_changes(dtype, tmp_path):
    assert error_for_finite_changes(partial(two_layers, nn.Tanh, 0.1, 0.9), tmp_path, dtype) < 0.3


def test_does_not_warn_of_rounding(tmp_path):
    """Derivatives are zero with a learning rate below rounding; the losses of the queries are not."""
    loader, queries = data(mlp)
    make = linear(lambda p: torch.optim.SGD(p, lr=1e-300))
    sw.Trainer(make(), tmp_path, progress=False).fit(loader, epochs=1)
    assert sw.metagradient(tmp_path, make, loader, queries, device="cpu").abs().max() < 1e-290


def test_warns_if_a_repetition_with_other_weights_diverges(recorded, monkeypatch):
    original = replay.Replay.on_update

    def on_update(self, update):
        if self._weights is not None:
            raise sw.NonFiniteLossError("losses must be finite")
        original(self, update)

    monkeypatch.setattr(replay.Replay, "on_update", on_update)
    with pytest.warns(sw.TrainingWarning, match="found changes that differ from these by nan"):
        assert sw.metagradient(recorded[0], linear(), *recorded[1:], device="cpu").isfinite().all()


def test_losses_that_compare_samples_of_a_batch(tmp_path):
    """The samples of a batch are negatives of each other, except in evaluation mode."""

    def contrast(model, batch):
        z = model(batch[0])
        if not model.training:
            return F.cross_entropy(z, batch[1], reduction="none")
        return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")

    def make():
        torch.manual_seed(0)
        return sw.Step(nn.Linear(4, 3).double(), sw.sgd(0.01), contrast, interacting="allow")

    loader, queries = data(mlp)
    sw.Trainer(make(), tmp_path, progress=False).fit(loader, epochs=1)
    assert sw.metagradient(tmp_path, make, loader, queries, device="cpu").shape == (3, SAMPLES)


def test_a_killed_repetition_with_other_weights_continues(tmp_path, monkeypatch):
    loader, queries = data(cnn)
    train(cnn, tmp_path, loader)
    call = partial(sw.metagradient, tmp_path, partial(fresh, cnn), loader, queries, device="cpu")
    monkeypatch.setattr(replay, "SAVE_EVERY", 0.0)
    updates = []
    original = replay.Replay.on_update

    def on_update(self, update):
        if self._weights is not None:
            updates.append(update.index)
            if len(updates) == 4:
                raise KeyboardInterrupt
        original(self, update)

    monkeypatch.setattr(replay.Replay, "on_update", on_update)
    with pytest.raises(KeyboardInterrupt):
        call()
    monkeypatch.setattr(module.UpdateDerivative, "__call__", None)  # the way back is done
    found = call()
    assert updates == [0, 1, 2, 3, 3, 4, 5]
    monkeypatch.undo()
    torch.testing.assert_close(found, call())
