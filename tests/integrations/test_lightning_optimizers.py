"""Manual optimization with several optimizers: GANs against plain Lightning, and against one sample at a time."""

from contextlib import nullcontext

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning_module import trainer
from small_problem import flat
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.errors import DistributedError, GraphError
from samplewise.integrations.lightning import PerSample
from samplewise.integrations.lightning import module as lightning_module

SAMPLES = 10
BATCH = 4
LR = 0.2
BOUND = 0.15


def dataset():
    generator = torch.Generator().manual_seed(3)
    real = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64) * torch.linspace(0.3, 2, SAMPLES)[:, None]
    return TensorDataset(real, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64))


def losses_of_generator(scores):
    return F.softplus(-scores).squeeze(1)


def losses_of_discriminator(real, fake):
    return (F.softplus(-real) + F.softplus(fake)).squeeze(1) / 2


class Gan(L.LightningModule):
    """`order`: toggled; zeroed (zero_grad before each pass); dangling (zero_grad after each step, without toggling)."""

    def __init__(self, order="toggled", scalar=True, plain=False, accumulate=1):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
        self.discriminator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.order = order
        self.scalar = scalar
        self.plain = plain
        self.accumulate = accumulate
        self.gradients = []  # of the discriminator after the pass of the generator

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), LR) for net in (self.generator, self.discriminator)]

    def training_step(self, batch, batch_idx):
        real, z, *_ = batch
        generator, discriminator = self.optimizers()
        update = (batch_idx + 1) % self.accumulate == 0
        with self.toggled_optimizer(generator) if self.order == "toggled" else nullcontext():
            scores = self.discriminator(self.generator(z))
            self.step(generator, losses_of_generator(scores), [scores], update)
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in self.discriminator.parameters()])
        with self.toggled_optimizer(discriminator) if self.order == "toggled" else nullcontext():
            scores = [self.discriminator(real), self.discriminator(self.generator(z).detach())]
            self.step(discriminator, losses_of_discriminator(*scores), scores, update)

    def step(self, optimizer, losses, scores, update):
        if self.order == "zeroed":
            optimizer.zero_grad()
        if self.plain:
            self.manual_backward(losses.mean())
        elif self.scalar:
            self.manual_backward(losses.mean(), outputs=scores, losses=losses.detach())
        else:
            self.manual_backward(losses)
        if update:
            optimizer.step()
            if self.order != "zeroed":
                optimizer.zero_grad()


def trained(module, *callbacks, **settings):
    trainer(callbacks, **settings).fit(module, DataLoader(sw.Indexed(dataset()), batch_size=BATCH))
    return module


def by_hand(order, accumulate=1):
    """The networks after one epoch, from one backward pass per sample, and (update, optimizer, id, norm) of each."""
    module = Gan()
    nets = [module.generator, module.discriminator]
    data = dataset()
    rows = []
    windows = [[], []]  # rows since the last zero_grad

    def passes(optimizer, batch, loss_of):
        if order == "zeroed":
            reset(optimizer)
        for number, net in enumerate(nets):
            if order == "toggled" and number != optimizer:
                continue
            parameters = list(net.parameters())
            for i in batch:
                row = torch.autograd.grad(loss_of(*data[i]), parameters, allow_unused=True)
                if row[0] is None:
                    continue
                norm = torch.cat([r.flatten() for r in row]).norm()
                windows[number].append((i, norm.item()))
                for p, r in zip(parameters, row, strict=True):
                    part = r * min(1, BOUND / norm) / len(batch)
                    p.grad = part if p.grad is None else p.grad + part

    def reset(optimizer):
        windows[optimizer] = []
        nets[optimizer].zero_grad()

    def step(optimizer):
        update = 0 if not rows else rows[-1][0] + 1
        rows.extend((update, optimizer, *row) for row in windows[optimizer])
        with torch.no_grad():
            for p in nets[optimizer].parameters():
                p -= LR * p.grad
        windows[optimizer] = []
        if order != "zeroed":
            reset(optimizer)

    def loss_of_generator(real, z):
        return losses_of_generator(module.discriminator(module.generator(z[None])))[0]

    def loss_of_discriminator(real, z):
        fake = module.generator(z[None]).detach()
        return losses_of_discriminator(module.discriminator(real[None]), module.discriminator(fake))[0]

    for at, start in enumerate(range(0, SAMPLES, BATCH)):
        batch = range(start, min(start + BATCH, SAMPLES))
        for optimizer, loss_of in enumerate([loss_of_generator, loss_of_discriminator]):
            passes(optimizer, batch, loss_of)
            if (at + 1) % accumulate == 0:
                step(optimizer)
    return module, rows


@pytest.mark.parametrize("scalar", [True, False], ids=["outputs", "losses"])
@pytest.mark.parametrize("order", ["toggled", "zeroed", "dangling"])
def test_clipping_equals_one_sample_at_a_time(tmp_path, order, scalar):
    module = trained(Gan(order, scalar), PerSample([sw.clip(BOUND)], sw.Ledger(tmp_path)))
    expected, rows = by_hand(order)
    torch.testing.assert_close(flat(module), flat(expected), rtol=1e-12, atol=1e-12)
    table = sw.read_ledger(tmp_path).to_pydict()
    found = list(zip(table["update"], table["optimizer"], table["id"], strict=True))
    assert found == [row[:3] for row in rows]
    assert table["norm"] == pytest.approx([row[3] for row in rows], rel=1e-6)
    assert table["weight"] == pytest.approx([min(1, BOUND / row[3]) for row in rows], rel=1e-6)
    assert 0 < sum(weight < 1 for weight in table["weight"]) < len(rows)


def test_norms_are_logged_by_optimizer():
    fit = trainer([PerSample([sw.clip(BOUND)])])
    fit.fit(Gan("zeroed"), DataLoader(sw.Indexed(dataset()), batch_size=BATCH))
    _, rows = by_hand("zeroed")
    for optimizer in range(2):
        norms = torch.tensor([norm for _, number, _, norm in rows if number == optimizer], dtype=torch.float64)
        logged = fit.callback_metrics[f"samplewise/optimizer_{optimizer}/norm_median"]
        torch.testing.assert_close(logged, norms.quantile(0.5))


def test_accumulation_of_toggled_passes(tmp_path):
    module = trained(Gan(accumulate=2), PerSample([sw.clip(BOUND)], sw.Ledger(tmp_path)))
    expected, rows = by_hand("toggled", accumulate=2)
    torch.testing.assert_close(flat(module), flat(expected), rtol=1e-12, atol=1e-12)
    table = sw.read_ledger(tmp_path).to_pydict()
    assert list(zip(table["update"], table["optimizer"], table["id"], strict=True)) == [row[:3] for row in rows]


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("order", ["toggled", "zeroed", "dangling"])
def test_recording_is_bit_identical(tmp_path, order, norms):
    """Also the gradients that the pass of the generator leaves on the discriminator."""
    plain = trained(Gan(order, plain=True), max_epochs=2)
    module = trained(Gan(order), PerSample(ledger=sw.Ledger(tmp_path, norms=norms)), max_epochs=2)
    assert torch.equal(flat(module), flat(plain))
    for found, expected in zip(module.gradients, plain.gradients, strict=True):
        assert all(a is b if b is None else torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    table = sw.read_ledger(tmp_path).to_pydict()
    rows = [row for *_, row in sorted(set(zip(table["update"], table["optimizer"], strict=True)))]
    assert rows == [0, 1] * 6  # updates of the generator and the discriminator in turn


class Networks(Gan):
    """Two optimizers, of parameters that `configure` names, and one pass before both steps."""

    def __init__(self, configure, toggled=None, plain=False):
        super().__init__(plain=plain)
        self.configure = configure
        self.toggled = toggled

    def configure_optimizers(self):
        return [torch.optim.SGD(parameters, LR) for parameters in self.configure(self)]

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        optimizer = None if self.toggled is None else optimizers[self.toggled]
        with nullcontext() if optimizer is None else self.toggled_optimizer(optimizer):
            scores = self.discriminator(self.generator(batch[1]))
            losses = losses_of_generator(scores)
            self.manual_backward(losses.mean() if self.plain else losses)
            for each in optimizers if optimizer is None else [optimizer]:
                each.step()
                each.zero_grad()


def separate(module):
    return module.generator.parameters(), module.discriminator[0].parameters()


def overlapping(module):
    return module.generator.parameters(), [*module.generator[0].parameters(), *module.discriminator.parameters()]


def test_one_pass_for_the_steps_of_two_optimizers(tmp_path):
    """And a parameter that no optimizer has: its gradient is that of plain Lightning."""
    module = trained(Networks(separate), PerSample([sw.clip(BOUND)], sw.Ledger(tmp_path / "a")), limit_train_batches=1)
    expected = Networks(separate)
    for parameters in expected.configure(expected):
        parameters = list(parameters)
        start = Gan()
        total = [torch.zeros_like(p) for p in parameters]
        for _, z in list(dataset())[:BATCH]:
            names = {name for name, p in expected.named_parameters() if any(p is other for other in parameters)}
            own = [p for name, p in start.named_parameters() if name in names]
            row = torch.autograd.grad(losses_of_generator(start.discriminator(start.generator(z[None])))[0], own)
            norm = torch.cat([r.flatten() for r in row]).norm()
            total = [t + r * min(1, BOUND / norm) / BATCH for t, r in zip(total, row, strict=True)]
        with torch.no_grad():
            for p, t in zip(parameters, total, strict=True):
                p -= LR * t
    torch.testing.assert_close(flat(module), flat(expected), rtol=1e-12, atol=1e-12)
    table = sw.read_ledger(tmp_path / "a").to_pydict()
    assert table["update"] == table["optimizer"] == [0] * BATCH + [1] * BATCH
    plain = trained(Networks(separate, plain=True))
    recorded = trained(Networks(separate), PerSample(ledger=sw.Ledger(tmp_path / "b")))
    assert torch.equal(flat(recorded), flat(plain))
    last = plain.discriminator[2].weight.grad
    assert last is not None and torch.equal(recorded.discriminator[2].weight.grad, last)
    torch.testing.assert_close(
        module.discriminator[2].weight.grad,
        trained(Networks(separate, plain=True), limit_train_batches=1).discriminator[2].weight.grad,
    )


def test_parameters_of_two_optimizers(tmp_path):
    message = (
        r"manual_backward must differentiate each parameter for one optimizer; found 'generator.0.bias' in "
        r"optimizers 0 and 1\. Call self.toggle_optimizer\(optimizer\) before the forward pass"
    )
    with pytest.raises(GraphError, match=message):
        trained(Networks(overlapping), PerSample([sw.clip(BOUND)]))
    plain = trained(Networks(overlapping, toggled=1, plain=True))
    toggled = trained(Networks(overlapping, toggled=1), PerSample(ledger=sw.Ledger(tmp_path)))
    assert torch.equal(flat(toggled), flat(plain))
    assert set(sw.read_ledger(tmp_path)["optimizer"].to_pylist()) == {1}


def test_a_pass_for_several_optimizers_is_refused_with_several_ranks(monkeypatch):
    """A second pass of a DistributedDataParallel would average the gradients again."""
    monkeypatch.setattr(lightning_module, "is_replica", lambda parameters: True)
    message = r"several optimizers .* Call self.toggle_optimizer\(optimizer\) before the forward pass"
    with pytest.raises(DistributedError, match=message):
        trained(Networks(separate), PerSample([sw.clip(BOUND)]))


def test_a_step_without_manual_backward_is_refused():
    class Bypassing(Gan):
        def step(self, optimizer, losses, scores, update):
            if losses.requires_grad and len(scores) == 2:  # of the discriminator
                losses.mean().backward()
            else:
                self.manual_backward(losses)
            optimizer.step()

    with pytest.raises(GraphError, match="must run the backward pass; found an optimizer step without it"):
        trained(Bypassing(), PerSample([sw.clip(BOUND)]))


def test_a_retained_graph():
    """Two passes through one graph: losses of the discriminator with a trunk in common."""

    class Retaining(Gan):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()[1]
            scores = self.discriminator(batch[0])
            losses = losses_of_generator(scores)
            self.manual_backward(losses.mean() if self.plain else losses, retain_graph=True)
            self.manual_backward(losses.mean() if self.plain else losses)
            optimizer.step()
            optimizer.zero_grad()

    expected = flat(trained(Retaining(plain=True)))
    torch.testing.assert_close(flat(trained(Retaining(), PerSample([sw.clip(1e6)]))), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(flat(trained(Retaining(), PerSample())), expected)
