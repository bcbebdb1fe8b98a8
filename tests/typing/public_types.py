"""Types of the main objects, as users see them: test_typing.py checks this file with mypy and pyright."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import samplewise as sw

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4)


def losses_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum(1)


def gradients() -> None:
    g = sw.gradients(losses_of(model, x), model)
    assert_type(g, sw.Gradients)
    assert_type(g.norms(), Tensor)
    assert_type(g.norms(by="parameter"), dict[str, Tensor])
    assert_type(g.dot(g), Tensor)
    assert_type(g.dot(g.sum(), by="parameter"), dict[str, Tensor])
    assert_type(g.gram(), Tensor)
    assert_type(g.sum(), dict[str, Tensor])
    assert_type(g.mean(), dict[str, Tensor])
    assert_type(g.full(), dict[str, Tensor])
    assert_type(g.variance(), dict[str, Tensor])
    assert_type(g.project(16), Tensor)
    assert_type(g["weight"], Tensor)
    assert_type(g[3], dict[str, Tensor])
    assert_type(g[1:3], dict[str, Tensor])
    assert_type(g.losses, Tensor)
    assert_type(g.names, list[str])
    assert_type(g.explain(), str)
    assert_type(len(g), int)
    for row in g:
        assert_type(row, dict[str, Tensor])
    g.backward(0.5)
    g.backward(torch.ones(8))
    g.backward({"weight": torch.ones(8)})


def arguments_of_gradients() -> None:
    losses = losses_of(model, x)
    sw.gradients(losses, dict(model.named_parameters()))
    sw.gradients(losses, model.named_parameters())
    sw.gradients(losses, model.parameters())
    sw.gradients(losses, [model.weight])
    sw.gradients(losses.mean(), model, outputs=losses)
    assert_type(sw.input_gradients(losses, x), Tensor)


def step() -> None:
    step = sw.Step(model, optimizer, losses_of, samples=4, transforms=[sw.clip(1.0), sw.noise(0.1)])
    assert_type(step, sw.Step)
    assert_type(step(x), list[sw.Update])
    assert_type(step.over([x]), Iterator[sw.Update])
    assert_type(step.apply(), sw.Update)
    assert_type(step.flush(), sw.Update | None)
    assert_type(step.counters.updates, int)
    assert_type(step.run([x]).loss, float)
    assert_type(step.samples, int | None)
    assert_type(step.state_dict(), dict[str, Any])
    sw.Step(model, sw.sgd(0.1), nn.MSELoss(), microbatch="auto")
    sw.Step(model, sw.sgd(0.1), nn.functional.cross_entropy, microbatch=sw.auto(memory=10**9))


class Net(nn.Module):
    pass


def losses_of_net(model: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def functions_of_users() -> None:
    """Loss functions may name the class of the model and of the batch; transforms may be functions."""
    net = Net()
    batch = (x, torch.zeros(8, dtype=torch.long))
    sw.Step(net, sw.sgd(0.1), losses_of_net, transforms=lambda losses: losses.sigmoid())
    sw.Step(net, sw.sgd(0.1), losses_of_net, transforms=sw.chain(sw.clip(1.0), sw.group("user")))
    sw.fisher(net, losses_of_net, [batch])
    sw.scan(net, losses_of_net, [batch])
    sw.influence(net, losses_of_net, [batch], [batch])
    sw.check(net, losses_of_net, batch)


def private_step(plan: sw.Privacy) -> None:
    step = sw.Step(model, optimizer, losses_of, privacy=plan)
    assert_type(step.privacy.spent().epsilon, float | Any)
    assert_type(plan.noise_multiplier, float | Any)


def update(update: sw.Update) -> None:
    assert_type(update.index, int)
    assert_type(update.samples, int)
    assert_type(update.loss, float)
    assert_type(update.losses, Tensor)
    assert_type(update.norms, Tensor)
    assert_type(update.grad_norm, float)
    assert_type(update.skipped, bool)
    assert_type(update.seconds, float)
    assert_type(update.phases, dict[str, float])
    assert_type(update.weights, Tensor | Any)
    assert_type(update.lr, float | Any)
    assert_type(update.columns, dict[str, Tensor | Any])
    share = (update.weights < 1).float().mean()
    print(f"{share:.0%} of {update.samples} samples clipped")


def trainer(run: Path) -> None:
    trainer = sw.Trainer(sw.Step(model, optimizer, losses_of), run, [sw.callbacks.EarlyStopping(), sw.Ledger()])
    assert_type(trainer, sw.Trainer)
    assert_type(trainer.fit([x], validate=[x], epochs=2), str)
    assert_type(trainer.evaluate([x]), dict[str, float])
    assert_type(trainer.step, sw.Step)
    assert_type(trainer.device, torch.device)
    assert_type(trainer.run, Path | None)
    assert_type(trainer.save(), Path)
    assert_type(sw.load_checkpoint(run), dict[str, Any])


def other_results(loss: Tensor, logits: Tensor) -> None:
    result = sw.backward(loss, model, outputs=logits, transforms=[sw.clip(1.0)])
    assert_type(result.norms, Tensor)
    assert_type(result.weights, Tensor | dict[str, Tensor])
    assert_type(sw.noise_scale(sw.gradients(loss, model)).scale, float)
    assert_type(sw.freeze_batchnorm(model), nn.Linear)
    assert_type(sw.fisher(model, losses_of, [x]), dict[str, Tensor])
    for batch, g in sw.scan(model, losses_of, [x]):
        assert_type(batch, Any)
        assert_type(g, sw.Gradients)
    found = sw.suspects(model, losses_of, [x])
    assert_type(found.score, Tensor)
    assert_type(sw.suspects("run", score=["margin", "loss"]).score_names, tuple[str, ...])
    sw.backward(loss, model, through=torch.amp.GradScaler("cpu"), denominator=loss.detach())
    sw.backward(loss, model, through=lambda loss: loss.backward(), retain_graph=False)
    sw.fisher(model, losses_of, [x], microbatch=sw.auto(10**9))
    assert_type(found.top(5), Tensor | Any)
    assert_type(sw.__version__, str)
