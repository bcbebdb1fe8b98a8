"""Types of the main objects, as users see them: test_typing.py checks this file with mypy and pyright."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, assert_type

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
    assert_type(step.tail, Literal["update", "drop", "carry"])
    print(step.optimizer.param_groups[0]["lr"])
    assert_type(step.state_dict(), dict[str, Any])
    sw.Step(model, sw.sgd(0.1), nn.MSELoss(), microbatch="auto")
    sw.Step(model, sw.sgd(0.1), nn.functional.cross_entropy, microbatch=sw.auto(memory=10**9))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    sw.Step(model, optimizer, losses_of, scheduler=scheduler, tail="carry", compile="auto", record=["norms"])
    sw.Step(model, optimizer, losses_of, parallel=sw.parallel.fsdp([nn.Linear]), on_nonfinite="skip", recheck=False)


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
    sw.trak(net, sw.attribution.margin, [batch], [batch], 8, microbatch=sw.auto(memory=10**9))
    sw.check(net, losses_of_net, batch)


def private_step(plan: sw.Privacy) -> None:
    step = sw.Step(model, optimizer, losses_of, privacy=plan)
    assert step.privacy is not None
    assert_type(step.privacy.spent().epsilon, float)
    assert_type(plan.noise_multiplier, float)
    assert_type(plan.epsilon, float)
    sw.Privacy(epsilon=3.0, delta=1e-5, updates=9, sample_rate=0.1, clip=sw.clip(1.0), users=x[:, 0])


def attribution(directory: Path) -> None:
    data = [x]
    curvature = sw.ekfac(model, losses_of, data, labels="data", microbatch=4)
    assert_type(curvature, sw.attribution.EKFAC)
    assert_type(sw.influence(model, losses_of, data, data, curvature=curvature, damping=0.1), Tensor)
    assert_type(sw.influence(model, losses_of, data, data, by="layer"), dict[str, Tensor])
    assert_type(
        sw.metagradient(directory, lambda: sw.Step(model, sw.sgd(0.1), losses_of), data, data, by="epoch"), Tensor
    )
    assert_type(sw.attribution.hessian(model, losses_of, data).mean_eigenvalue, float)
    store = sw.attribution.ProjectedStore(directory, 8, dtype="float32", blocks="layer")
    assert_type(store.fill(model, losses_of, data, returns="losses", microbatch="auto"), int)
    assert_type(store.search(store.project(model, losses_of, data), k=3), tuple[Tensor, Tensor])
    assert_type(sw.attribution.select(store, torch.ones(1, 8), 2, reduce="mean"), Tensor)
    subsets = sw.attribution.evaluate.subsets(8, 4, fraction=0.5)
    found = sw.attribution.evaluate.lds(torch.ones(2, 8), subsets, torch.ones(4, 2))
    assert_type(found, sw.attribution.evaluate.LDS)
    assert_type(found.ceiling, float | None)


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
    assert_type(update.weights, Tensor | dict[str, Tensor])
    assert_type(update.lr, float | tuple[float, ...])
    assert_type(update.columns, dict[str, Tensor | list[Any]])
    assert isinstance(update.weights, Tensor)
    share = (update.weights < 1).float().mean()
    print(f"{share:.0%} of {update.samples} samples clipped")


class Largest:
    """Metric in the form of torchmetrics."""

    largest = 0.0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.largest = max(self.largest, preds.max().item())

    def compute(self) -> float:
        return self.largest

    def reset(self) -> None:
        self.largest = 0.0


class Stops:
    """A callback is any object with methods named after events."""

    def on_update(self, trainer: sw.Trainer, update: sw.Update) -> None:
        if trainer.log_every.ends_with(update, trainer.step):
            trainer.stop(f"loss {update.loss}")


def trainer(run: Path) -> None:
    trainer = sw.Trainer(sw.Step(model, optimizer, losses_of), run, [sw.callbacks.EarlyStopping(), sw.Ledger()])
    assert_type(trainer, sw.Trainer)
    sw.Trainer(
        sw.Step(model, optimizer, losses_of),
        callbacks=[Stops()],
        metrics={"mean": lambda outputs, y: outputs.mean(), "largest": Largest()},
        log_every="1up",
        save="trained",
    )
    result = trainer.fit([x], validate=[x], epochs=2)
    assert_type(result, sw.FitResult)
    assert_type(result.signal, str | None)
    assert_type(result.metrics["loss"], float)
    assert_type(trainer.predict([x]), Tensor | Any)
    print(sw.read_ledger(run, damaged="skip").num_rows, sw.Ledger(run, rows_per_file=10).read().num_rows)
    assert_type(trainer.evaluate([x]), dict[str, float])
    assert_type(trainer.step, sw.Step)
    assert_type(trainer.device, torch.device)
    assert_type(trainer.run, Path | None)
    assert_type(trainer.save(), Path)
    assert_type(sw.load_checkpoint(run), dict[str, Any])
    assert_type(sw.download_run("s3://bucket/run", run, key="k"), Path)
    sw.Trainer(trainer.step, run, [sw.callbacks.Upload("s3://bucket/run", endpoint_url="http://localhost")])


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
    assert_type(sw.dynamics("run"), sw.diagnostics.Dynamics)
    assert_type(sw.dynamics("run", early_epochs=10).confidence, Tensor)
    sw.backward(loss, model, through=torch.amp.GradScaler("cpu"), denominator=loss.detach())
    sw.backward(loss, model, through=lambda loss: loss.backward(), retain_graph=False)
    sw.fisher(model, losses_of, [x], microbatch=sw.auto(10**9))
    assert_type(found.top(5), Tensor | Any)
    assert_type(sw.__version__, str)
